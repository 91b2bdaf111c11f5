"""Indexer scores and top-k in one kernel: the score matrix never exists.

Grid: a CTA for every KV head of every tile slot, the tiles with the longest prefix first; all on one axis, since the
others end at 65,535. A tile is CONSUMERS * 128 consecutive queries of one request; slots follow
msa_tiles.dsl.tilelang.varlen, and the slots past the last request pad the rows that belong to nobody.

# <- cta

The consumer has two score tiles, of the same keys: one is multiplied while the other is reduced; a list of 64 leaves
it registers for one. Row maxima pass through shared memory inside a warp: warp i owns rows 16i to 16i+15 of both
tiles, and each of its lanes keeps the list of one of these 32 rows: lanes below 16 of the upper tile, the others of
the lower one. With several index heads per KV head the maximum also runs over the heads.

Only scales that can change a ranking are read. The scales of queries do where a KV head has several index heads: each
warp keeps those of its rows in query_scale and multiplies row maxima. One scale for all keys never does; scales of
single keys (key_scales = 1) multiply the columns of a score tile. Each producer thread stores one of a block's, or of
the keys behind it, in key_scale before it arrives at k_full. There are SLOTS = 2 * STAGES blocks of them: one is
overwritten after the consumers have released a later block, and they do so when they are done with its scales.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang import scaled
from msa_tiles.dsl.tilelang import topk as top
from msa_tiles.dsl.tilelang.keys import box_columns, index_keys, load_index_block
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.varlen import key_length, last_tile_at_most, last_visible, tile_limits

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 4  # <- tile.stages
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 24  # <- tile.producer_registers
CONSUMER_REGISTERS = 240  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
ROWS = 64
GROUP_ROWS = 2 * ROWS
TILE = CONSUMERS * GROUP_ROWS
SLOTS = 2 * STAGES


@declares
def cta(head_dim, block_size, topk, heads_per_group, pages_per_block, key_scales):
    scales = (
        buffer("query_scale", "float32", tiles=2 * CONSUMERS, heads=heads_per_group, rows=ROWS),
        buffer("key_scale", "float32", slots=2 * STAGES, keys=128),
    )
    return Table(
        roles=(
            Role(
                "consumers",
                4 * CONSUMERS,
                "a warpgroup takes 128 query rows, in two tiles: S = Q K^T of a KV block, row maxima, top-k lists",
                CONSUMER_REGISTERS,
            ),
            Role("producer", 4, "loads Q once, then streams the index keys, one block a stage", PRODUCER_REGISTERS),
        ),
        pipelines=(
            Pipeline("q", 1, (threads("producer"),), fills=("queries",)),
            Pipeline("k", STAGES, (threads("producer"),), (threads("consumers"),), fills=("keys",)),
        ),
        buffers=(
            buffer(
                "queries",
                ELEMENT,
                align=1024,
                tiles=2 * CONSUMERS,
                heads=heads_per_group,
                rows=ROWS,
                head_dim=head_dim,
            ),
            buffer("keys", ELEMENT, align=1024, stages=STAGES, block_size=block_size, head_dim=head_dim),
            buffer("maxima", "float32", consumers=CONSUMERS, tiles=2, rows=ROWS),
            *(scales[:1] if heads_per_group > 1 else ()),
            *(scales[1:] if key_scales else ()),
        ),
        static=TILELANG,
    )


def select_blocks(
    head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int, key_scales: int
):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.
    q_scale [total_q, num_index_heads] is read with use_q_scale and heads_per_group > 1, k_scale [total_k] or
    [pages, page] with key_scales = 1. Scales are float32 and positive.
    """
    table = cta(head_dim, block_size, topk, heads_per_group, pages_per_block, key_scales)
    total_q, num_index_heads, num_kv_heads, k = T.dynamic("total_q, num_index_heads, num_kv_heads, k")
    num_starts, num_requests = T.dynamic("num_starts, num_requests")
    q_token, q_head, out_head, out_token = strides("q_token, q_head, out_head, out_token")
    num_tables, max_pages, num_positions = T.dynamic("num_tables, max_pages, num_positions")
    table_stride = strides("table_stride")
    scale_token, scale_head = strides("scale_token, scale_head")
    scale_shape, scale_strides = scaled.scale_layout(block_size, pages_per_block, key_scales)
    key_shape, key_strides = index_keys(head_dim, block_size, pages_per_block)

    @T.macro
    def rank_block(
        w, lane, row, max_shared, upper_max, lower_max, block, valid, init_blocks, local_blocks, keys, ids
    ):  # fmt: skip
        """Offer the maxima of a block to the lists: lanes below 16 take a row of the upper tile."""
        key = T.alloc_var("int32")
        T.sync_warp()
        for i in T.Parallel(ROWS):
            max_shared[w, 0, i] = upper_max[i]
        for i in T.Parallel(ROWS):
            max_shared[w, 1, i] = lower_max[i]
        T.sync_warp()
        key = top.forced_key(top.order_key(max_shared[w, lane // 16, row]), block, valid, init_blocks, local_blocks)
        if block < valid:
            top.insert(keys, ids, topk, key, block)

    @T.macro
    def score_blocks(
        w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids, upper_limit, lower_limit,
        valid, full_blocks, num_blocks, init_blocks, local_blocks, query_scale, key_scale,
    ):  # fmt: skip
        """Two score tiles: the upper one is reduced while the lower one is multiplied, then the other way round."""
        S_upper = T.alloc_fragment([ROWS, block_size], "float32")
        S_lower = T.alloc_fragment([ROWS, block_size], "float32")
        upper_max = T.alloc_fragment([ROWS], "float32")
        lower_max = T.alloc_fragment([ROWS], "float32")
        head_max = T.alloc_fragment([ROWS], "float32")
        stage = T.alloc_var("int32")
        following = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        stage = 0
        phase = 0
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
            T.barrier_wait(k_full[0], 0)
            T.wgmma_gemm(Q_shared[2 * w, 0, :, :], K_shared[0, :, :], S_upper, transpose_B=True, clear_accum=True)
        for block in T.serial(num_blocks):
            T.fill(upper_max, -T.infinity("float32"))
            T.fill(lower_max, -T.infinity("float32"))
            following = stage + 1
            if following == STAGES:
                following = 0
                phase = phase ^ 1
            for r in T.unroll(heads_per_group):
                T.wait_wgmma(0)
                T.wgmma_gemm(
                    Q_shared[2 * w + 1, r, :, :], K_shared[stage, :, :], S_lower, transpose_B=True, clear_accum=True
                )
                scaled.block_max(
                    S_upper, upper_max, head_max, upper_limit, ROWS, block_size, block, full_blocks,
                    query_scale, 2 * w, r, heads_per_group, key_scale, block % SLOTS, key_scales,
                )  # fmt: skip
                if r == heads_per_group - 1:
                    if block + 1 < num_blocks:
                        T.barrier_wait(k_full[following], phase)
                T.wait_wgmma(0)
                if r < heads_per_group - 1:
                    T.wgmma_gemm(
                        Q_shared[2 * w, r + 1, :, :], K_shared[stage, :, :], S_upper, transpose_B=True, clear_accum=True
                    )
                else:
                    T.barrier_arrive(k_free[stage])
                    # Past the last block this multiplies a stale stage, for nobody: the waits stay uniform.
                    T.wgmma_gemm(
                        Q_shared[2 * w, 0, :, :], K_shared[following, :, :], S_upper, transpose_B=True, clear_accum=True
                    )
                scaled.block_max(
                    S_lower, lower_max, head_max, lower_limit, ROWS, block_size, block, full_blocks,
                    query_scale, 2 * w + 1, r, heads_per_group, key_scale, block % SLOTS, key_scales,
                )  # fmt: skip
            stage = following
            rank_block(
                w, lane, row, max_shared, upper_max, lower_max, block, valid, init_blocks, local_blocks, keys, ids
            )
        T.wait_wgmma(0)

    @T.macro
    def score_singly(
        w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids, upper_limit, lower_limit,
        valid, full_blocks, num_blocks, init_blocks, local_blocks, query_scale, key_scale,
    ):  # fmt: skip
        """One score tile at a time, for lists that leave no registers for a second one."""
        S = T.alloc_fragment([ROWS, block_size], "float32")
        upper_max = T.alloc_fragment([ROWS], "float32")
        lower_max = T.alloc_fragment([ROWS], "float32")
        head_max = T.alloc_fragment([ROWS], "float32")
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
        for block in T.serial(num_blocks):
            T.fill(upper_max, -T.infinity("float32"))
            T.fill(lower_max, -T.infinity("float32"))
            T.barrier_wait(k_full[block % STAGES], (block // STAGES) & 1)
            # Not unrolled: the addresses of every head's queries would take registers.
            for r in T.serial(heads_per_group):
                T.wgmma_gemm(
                    Q_shared[2 * w, r, :, :], K_shared[block % STAGES, :, :], S, transpose_B=True, clear_accum=True
                )
                T.wait_wgmma(0)
                scaled.block_max(
                    S, upper_max, head_max, upper_limit, ROWS, block_size, block, full_blocks,
                    query_scale, 2 * w, r, heads_per_group, key_scale, block % SLOTS, key_scales,
                )  # fmt: skip
                T.wgmma_gemm(
                    Q_shared[2 * w + 1, r, :, :], K_shared[block % STAGES, :, :], S, transpose_B=True, clear_accum=True
                )
                T.wait_wgmma(0)
                if r == heads_per_group - 1:
                    T.barrier_arrive(k_free[block % STAGES])
                scaled.block_max(
                    S, lower_max, head_max, lower_limit, ROWS, block_size, block, full_blocks,
                    query_scale, 2 * w + 1, r, heads_per_group, key_scale, block % SLOTS, key_scales,
                )  # fmt: skip
            rank_block(
                w, lane, row, max_shared, upper_max, lower_max, block, valid, init_blocks, local_blocks, keys, ids
            )

    if topk * heads_per_group > 64:
        # Four heads in a row need so many registers that lists of 32 leave none for a second score tile either.
        score_blocks = score_singly

    @T.macro
    def consume(
        w, tx, Q_shared, K_shared, max_shared, q_full, k_full, k_free,
        head, first_token, end_token, first_limit, length, num_blocks, q_positions, use_positions,
        init_blocks, local_blocks, order, out,
        q_scale, use_q_scale, query_scale, key_scale,
    ):  # fmt: skip
        keys = T.alloc_local([topk], "int32")
        ids = T.alloc_local([topk], "int32")
        upper_limit = T.alloc_fragment([ROWS], "int32")
        lower_limit = T.alloc_fragment([ROWS], "int32")
        least = T.alloc_local([1], "int32")
        most = T.alloc_local([1], "int32")
        lane = tx % 32
        row = (tx - w * 128) // 32 * 16 + lane % 16
        place = lane // 16 * ROWS + row
        token = T.min(first_token + place, end_token - 1)
        limit = last_visible(q_positions, use_positions, token, first_token, first_limit, length)
        valid = T.if_then_else(limit >= 0, limit // block_size + 1, 0)
        for i in T.Parallel(ROWS):
            upper_limit[i] = last_visible(
                q_positions, use_positions, T.min(first_token + i, end_token - 1), first_token, first_limit, length
            )
        for i in T.Parallel(ROWS):
            lower_limit[i] = last_visible(
                q_positions, use_positions, T.min(first_token + ROWS + i, end_token - 1), first_token, first_limit,
                length,
            )  # fmt: skip
        tile_limits(
            q_positions, use_positions, first_token, T.min(first_token + GROUP_ROWS, end_token) - 1, first_limit,
            length, least, most,
        )  # fmt: skip
        full_blocks = T.max(least[0] + 1, 0) // block_size
        if heads_per_group > 1:
            for r in T.unroll(heads_per_group):
                query_scale[2 * w + lane // 16, r, row] = T.if_then_else(
                    use_q_scale != 0, q_scale[token, head * heads_per_group + r], T.float32(1)
                )
            T.sync_warp()
        top.clear(keys, ids, topk)
        if topk <= 32:
            score_blocks(
                w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids, upper_limit,
                lower_limit, valid, full_blocks, num_blocks, init_blocks, local_blocks, query_scale, key_scale,
            )  # fmt: skip
        else:
            score_singly(
                w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids, upper_limit,
                lower_limit, valid, full_blocks, num_blocks, init_blocks, local_blocks, query_scale, key_scale,
            )  # fmt: skip
        if first_token + place < end_token:
            top.emit(keys, ids, topk, valid, k, order, out, head, first_token + place)

    @T.prim_func
    def main(
        idx_q: T.StridedTensor((total_q, num_index_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        idx_k: T.StridedTensor(key_shape, key_strides, ELEMENT),
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        q_scale: T.StridedTensor((total_q, num_index_heads), (scale_token, scale_head), "float32"),
        k_scale: T.StridedTensor(scale_shape, scale_strides, "float32"),
        out: T.StridedTensor((num_kv_heads, total_q, k), (out_head, out_token, 1), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        use_q_scale: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
        order: T.int32,
    ):
        with T.Kernel(num_kv_heads * (total_q // TILE + num_starts), threads=table.threads) as cta_index:
            Q_shared = make_buffer(table, "queries")
            K_shared = make_buffer(table, "keys")
            max_shared = make_buffer(table, "maxima")
            query_scale = make_buffer(table, "query_scale") if heads_per_group > 1 else None
            key_scale = make_buffer(table, "key_scale") if key_scales else None
            scale_read = T.alloc_local([1], "float32")
            q_full = make_barrier(table, "q_full")
            k_full = make_barrier(table, "k_full")
            k_free = make_barrier(table, "k_free")
            request = T.alloc_local([1], "int32")
            least = T.alloc_local([1], "int32")
            most = T.alloc_local([1], "int32")
            length = T.alloc_var("int32")
            end_token = T.alloc_var("int32")
            num_blocks = T.alloc_var("int32")
            tx = T.get_thread_binding()
            head = T.truncmod(cta_index, num_kv_heads)
            slot = total_q // TILE + num_starts - 1 - T.truncdiv(cta_index, num_kv_heads)
            last_tile_at_most(cu_seqlens_q, num_starts, TILE, slot, request)
            first_token = cu_seqlens_q[request[0]] + (slot - cu_seqlens_q[request[0]] // TILE - request[0]) * TILE
            length = 0
            end_token = total_q
            num_blocks = 0
            if request[0] < num_starts - 1:
                length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                end_token = cu_seqlens_q[request[0] + 1]
            first_limit = length - end_token + first_token
            if length > 0:
                tile_limits(
                    q_positions, use_positions, first_token, T.min(first_token + TILE, end_token) - 1, first_limit,
                    length, least, most,
                )  # fmt: skip
                num_blocks = T.max(most[0] + block_size, 0) // block_size
            if first_token < end_token:
                if tx >= CONSUMERS * 128:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    if num_blocks > 0:
                        key_row = cu_seqlens_k[request[0]]
                        for tile in T.serial(2 * CONSUMERS):
                            rows = first_token + tile * ROWS
                            for r in T.serial(heads_per_group):
                                T.tma_copy(
                                    described(idx_q)[rows : rows + ROWS, head * heads_per_group + r, :],
                                    Q_shared[tile, r, :, :],
                                    barrier=q_full,
                                )
                        T.barrier_arrive(q_full)
                        for block in T.serial(num_blocks):
                            # Before the wait, so that the scale is there when the stage is free.
                            if key_scales:
                                scaled.read_key_scale(
                                    k_scale, page_table, key_row + block * block_size, tx % 128,
                                    block_size, pages_per_block, scale_read,
                                )  # fmt: skip
                            T.barrier_wait(k_free[block % STAGES], ((block // STAGES) & 1) ^ 1)
                            load_index_block(
                                idx_k, page_table, key_row + block * block_size, K_shared, k_full, block % STAGES,
                                block_size, head_dim, pages_per_block, box_columns(head_dim, ELEMENT),
                            )  # fmt: skip
                            if key_scales:
                                key_scale[block % SLOTS, tx % 128] = scale_read[0]
                            T.barrier_arrive(k_full[block % STAGES])
                elif tx < 128:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    consume(
                        0, tx, Q_shared, K_shared, max_shared, q_full, k_full, k_free, head, first_token, end_token,
                        first_limit, length, num_blocks, q_positions, use_positions, init_blocks, local_blocks, order,
                        out,
                        q_scale, use_q_scale, query_scale, key_scale,
                    )  # fmt: skip
                else:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    consume(
                        1, tx, Q_shared, K_shared, max_shared, q_full, k_full, k_free, head, first_token + GROUP_ROWS,
                        end_token, first_limit + GROUP_ROWS, length, num_blocks, q_positions, use_positions,
                        init_blocks, local_blocks, order, out, q_scale, use_q_scale, query_scale, key_scale,
                    )  # fmt: skip

    return main
