"""Exact top-k over block scores: one thread a row, its list in registers, every score read once.

Grid: (KV head, ROWS consecutive tokens). The CTA's warps bring COLUMNS scores of each row into shared memory with
whole-line reads; then each thread walks its own row's piece and inserts what beats the tail of its list. Blocks past
a row's valid count are never looked at. With several index heads per KV head, the maximum over the heads is taken on
the way into shared memory; it ignores NaN unless every head has NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang import topk as top
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most

ROWS = 128  # <- tile.rows
COLUMNS = 32  # <- tile.columns
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
WARPS = ROWS // 32


def topk_select(topk: int, heads_per_group: int):
    """Build the kernel for one list capacity (topk) and number of index heads per KV head.

    score [num_index_heads, total_q, max_blocks] float32 -> out [num_kv_heads, total_q, k] int32, k <= topk. How many
    blocks a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token].
    """
    num_index_heads, num_kv_heads, total_q, max_blocks, k = T.dynamic(
        "num_index_heads, num_kv_heads, total_q, max_blocks, k"
    )
    num_starts, num_requests, num_counts = T.dynamic("num_starts, num_requests, num_counts")
    score_head, score_token, out_head, out_token = T.dynamic("score_head, score_token, out_head, out_token")

    @T.prim_func
    def main(
        score: T.StridedTensor((num_index_heads, total_q, max_blocks), (score_head, score_token, 1), "float32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        num_valid: T.Tensor((num_counts,), "int32"),
        out: T.StridedTensor((num_kv_heads, total_q, k), (out_head, out_token, 1), "int32"),
        use_seqused: T.int32,
        valid_mode: T.int32,
        num_valid_scalar: T.int32,
        block_size: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
        order: T.int32,
    ):
        with T.Kernel(num_kv_heads, T.ceildiv(total_q, ROWS), threads=ROWS) as (head, tile):
            piece = T.alloc_shared([ROWS, COLUMNS + 1], "float32", scope="shared.dyn")
            most_shared = T.alloc_shared([WARPS], "int32", scope="shared.dyn")
            keys = T.alloc_local([topk], "int32")
            ids = T.alloc_local([topk], "int32")
            request = T.alloc_local([1], "int32")
            valid = T.alloc_var("int32")
            most = T.alloc_var("int32")
            length = T.alloc_var("int32")
            largest = T.alloc_var("float32")
            block = T.alloc_var("int32")
            key = T.alloc_var("int32")
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            token = tile * ROWS + tx
            valid = 0
            # Tokens past the last request belong to nobody and choose nothing.
            if token < T.min(total_q, cu_seqlens_q[num_starts - 1]):
                if valid_mode == 0:
                    last_at_most(cu_seqlens_q, num_starts - 1, token, request)
                    length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                    length = T.min(length - cu_seqlens_q[request[0] + 1] + token + 1, length)
                    valid = T.truncdiv(T.max(length, 0) + block_size - 1, block_size)
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
            for start in T.serial(T.ceildiv(most, COLUMNS)):
                T.sync_threads()
                for i in T.unroll(ROWS // WARPS):
                    if start * COLUMNS + lane < most and tile * ROWS + warp * 32 + i < total_q:
                        largest = score[head * heads_per_group, tile * ROWS + warp * 32 + i, start * COLUMNS + lane]
                        for r in T.unroll(heads_per_group - 1):
                            largest = T.max(
                                largest,
                                score[
                                    head * heads_per_group + r + 1,
                                    tile * ROWS + warp * 32 + i,
                                    start * COLUMNS + lane,
                                ],
                            )
                        piece[warp * 32 + i, lane] = largest
                T.sync_threads()
                for c in T.serial(T.min(COLUMNS, valid - start * COLUMNS)):
                    block = start * COLUMNS + c
                    key = top.forced_key(top.order_key(piece[tx, c]), block, valid, init_blocks, local_blocks)
                    top.insert(keys, ids, topk, key, block)
            if token < total_q:
                top.emit(keys, ids, topk, valid, k, order, out, head, token)

    return main
