"""Exact top-k over block scores: lists in registers, every score read once.

Grid: (KV head, THREADS // lanes consecutive tokens). lanes = 2 ** lanes_log2 neighbours in a warp share a row: one
where rows abound, more where rows are few and long; their lists are merged at the end.

The CTA's warps bring a piece of COLUMNS scores per thread into shared memory with whole-line reads, already turned
into keys. Each thread then marks, in one mask, which scores of its piece beat the tail of its list, and inserts only
those: a warp spends as many insertions as its luckiest lane needs, not one for every column in which some lane has a
candidate. Blocks past a row's valid count are never looked at. With several index heads per KV head, the maximum over
the heads is taken on the way into shared memory; it ignores NaN unless every head has NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang import topk as top
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_visible

THREADS = 128  # <- tile.threads
BATCH = 8  # <- tile.batch
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
COLUMNS = 32
WARPS = THREADS // 32
# CTAs per SM for each list capacity: the list is kept in registers, and the rest has to make do.
RESIDENT = {8: 5, 16: 4, 32: 3, 64: 2}


def bits_below(count):
    """The lowest `count` of 32 bits; none or all where count is out of range."""
    return T.if_then_else(
        count <= 0,
        T.uint32(0),
        T.if_then_else(count >= 32, T.uint32(0xFFFFFFFF), (T.uint32(1) << T.cast(count, "uint32")) - T.uint32(1)),
    )


def topk_select(topk: int):
    """Build the kernel for one list capacity (topk).

    score [num_index_heads, total_q, max_blocks] float32 -> out [num_kv_heads, total_q, k] int32, k <= topk. How many
    blocks a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token].
    """
    num_index_heads, num_kv_heads, total_q, max_blocks, k = T.dynamic(
        "num_index_heads, num_kv_heads, total_q, max_blocks, k"
    )
    num_starts, num_requests, num_positions, num_counts = T.dynamic(
        "num_starts, num_requests, num_positions, num_counts"
    )
    score_head, score_token, out_head, out_token = T.dynamic("score_head, score_token, out_head, out_token")

    @T.prim_func
    def main(
        score: T.StridedTensor((num_index_heads, total_q, max_blocks), (score_head, score_token, 1), "float32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        num_valid: T.Tensor((num_counts,), "int32"),
        out: T.StridedTensor((num_kv_heads, total_q, k), (out_head, out_token, 1), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        valid_mode: T.int32,
        num_valid_scalar: T.int32,
        block_size: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
        order: T.int32,
        lanes_log2: T.int32,
    ):
        with T.Kernel(num_kv_heads, T.ceildiv(total_q, THREADS >> lanes_log2), threads=THREADS) as (head, tile):
            T.annotate_min_blocks_per_sm(RESIDENT[topk])
            piece = T.alloc_shared([THREADS, COLUMNS + 1], "int32", scope="shared.dyn")
            most_shared = T.alloc_shared([WARPS], "int32", scope="shared.dyn")
            keys = T.alloc_local([topk], "int32")
            ids = T.alloc_local([topk], "int32")
            request = T.alloc_local([1], "int32")
            valid = T.alloc_var("int32")
            most = T.alloc_var("int32")
            length = T.alloc_var("int32")
            got = T.alloc_local([BATCH], "float32")
            read = T.alloc_local([BATCH], "float32")
            wanted = T.alloc_var("uint32")
            column = T.alloc_var("int32")
            tx = T.get_thread_binding()
            lanes = 1 << lanes_log2
            rows = THREADS >> lanes_log2
            place = tx & (lanes - 1)
            heads_per_group = T.truncdiv(num_index_heads, num_kv_heads)
            warp = tx // 32
            lane = tx % 32
            token = tile * rows + (tx >> lanes_log2)
            valid = 0
            # Tokens past the last request belong to nobody and choose nothing.
            if token < T.min(total_q, cu_seqlens_q[num_starts - 1]):
                if valid_mode == 0:
                    last_at_most(cu_seqlens_q, num_starts - 1, token, request)
                    length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                    length = last_visible(
                        q_positions, use_positions, token, token, length - cu_seqlens_q[request[0] + 1] + token, length
                    )
                    valid = T.truncdiv(T.max(length + 1, 0) + block_size - 1, block_size)
                elif valid_mode == 1:
                    valid = num_valid_scalar
                else:
                    valid = num_valid[token]
                valid = T.max(T.min(valid, max_blocks), 0)
            most = valid
            for step in T.unroll(5):
                most = T.max(most, T.shfl_xor(most, 16 >> step))
            most_shared[warp] = most
            T.sync_threads()
            for w in T.unroll(WARPS):
                most = T.max(most, most_shared[w])
            top.clear(keys, ids, topk)
            for step in T.serial(T.ceildiv(most, COLUMNS * lanes)):
                T.sync_threads()
                # Loads first, at clamped places, so that a batch is in flight; what lies outside is masked below.
                for batch in T.serial(32 // BATCH):
                    for r in T.serial(heads_per_group):
                        for i in T.unroll(BATCH):
                            reader = warp * 32 + batch * BATCH + i
                            read_token = T.min(tile * rows + (reader >> lanes_log2), total_q - 1)
                            read_block = T.min((step * lanes + (reader & (lanes - 1))) * COLUMNS + lane, max_blocks - 1)
                            got[i] = score[head * heads_per_group + r, read_token, read_block]
                        for i in T.unroll(BATCH):
                            if r == 0:
                                read[i] = got[i]
                            else:
                                read[i] = T.max(read[i], got[i])
                    for i in T.unroll(BATCH):
                        piece[warp * 32 + batch * BATCH + i, lane] = top.order_key(read[i])
                T.sync_threads()
                first = (step * lanes + place) * COLUMNS
                wanted = 0
                for c in T.unroll(COLUMNS):
                    if piece[tx, c] > keys[topk - 1]:
                        wanted = wanted | T.uint32(1 << c)
                wanted = wanted | bits_below(init_blocks - first) | ~bits_below(valid - local_blocks - first)
                wanted = wanted & bits_below(valid - first)
                while wanted != T.uint32(0):
                    column = T.__ffs(T.reinterpret(wanted, "int32")) - 1
                    wanted = wanted & (wanted - T.uint32(1))
                    top.insert(
                        keys,
                        ids,
                        topk,
                        top.forced_key(piece[tx, column], first + column, valid, init_blocks, local_blocks),
                        first + column,
                    )
            for level in T.serial(lanes_log2):
                top.merge(keys, ids, topk, 1 << level, (place & ((2 << level) - 1)) == 0)
            if place == 0 and token < total_q:
                top.emit(keys, ids, topk, valid, k, order, out, head, token)

    return main
