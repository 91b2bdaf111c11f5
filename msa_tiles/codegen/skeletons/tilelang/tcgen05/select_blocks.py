"""Indexer scores and top-k in one kernel: the score matrix never exists.

Grid: a CTA for every KV head of every tile slot, the tiles with the longest prefix first; all on one axis, since the
others end at 65,535. A tile is 128 consecutive queries of one request; slots follow msa_tiles.dsl.tilelang.varlen, and
the slots past the last request pad the rows that belong to nobody.

# <- cta

A product is reduced, COLUMNS at a time, while the next one is multiplied. A row and its list belong to one thread, so
that nothing is shuffled and no lists are merged. With several index heads per KV head the maximum also runs over the
heads.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Columns, Pipeline, Role, Table, buffer, commits, declares, threads
from msa_tiles.dsl.tilelang import topk as top
from msa_tiles.dsl.tilelang.keys import box_columns, index_keys, load_index_block
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.scores import block_max
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.tensor_memory import make_tiles
from msa_tiles.dsl.tilelang.varlen import key_length, last_tile_at_most, last_visible, tile_limits

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 3  # <- tile.stages
ACCUMULATORS = 2  # <- tile.accumulators
COLUMNS = 32  # <- tile.columns
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
ROWS = 128


@declares
def cta(head_dim, block_size, topk, heads_per_group, pages_per_block):
    return Table(
        roles=(
            Role(
                "epilogue",
                4,
                "thread i reads row i of every product, keeps its maximum and the row's top-k list",
            ),
            Role("producer", 1, "loads Q once, then streams the index keys, one block a stage"),
            Role("issuer", 1, "multiplies: S = Q K^T for every block and head in turn"),
            Role("idle", 2, "nothing: tensor memory is given to whole warpgroups"),
        ),
        pipelines=(
            Pipeline("q", 1, (threads("producer"),), fills=("queries",)),
            Pipeline("k", STAGES, (threads("producer"),), (commits("issuer"),), fills=("keys",)),
            Pipeline("s", ACCUMULATORS, (commits("issuer"),), (threads("epilogue"),)),
        ),
        buffers=(
            buffer("queries", ELEMENT, align=1024, heads=heads_per_group, rows=ROWS, head_dim=head_dim),
            buffer("keys", ELEMENT, align=1024, stages=STAGES, block_size=block_size, head_dim=head_dim),
            buffer("maxima", "float32", rows=ROWS),
        ),
        tensor_memory=(Columns("S", ACCUMULATORS, block_size, "float32"),),
        static=TILELANG,
    )


def select_blocks(head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.
    """
    table = cta(head_dim, block_size, topk, heads_per_group, pages_per_block)
    producer, issuer, idle = (table.first_warp(role) * 32 for role in ("producer", "issuer", "idle"))
    total_q, num_index_heads, num_kv_heads, k = T.dynamic("total_q, num_index_heads, num_kv_heads, k")
    num_starts, num_requests = T.dynamic("num_starts, num_requests")
    q_token, q_head, out_head, out_token = strides("q_token, q_head, out_head, out_token")
    num_tables, max_pages, num_positions = T.dynamic("num_tables, max_pages, num_positions")
    table_stride = strides("table_stride")
    key_shape, key_strides = index_keys(head_dim, block_size, pages_per_block)

    @T.macro
    def multiply(Q_shared, K_shared, S, q_full, k_full, k_free, s_full, s_free, num_blocks):
        """For every block and every head a product into the next accumulator."""
        place = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        place = 0
        phase = 1
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
        for block in T.serial(num_blocks):
            T.barrier_wait(k_full[block % STAGES], (block // STAGES) & 1)
            for r in T.unroll(heads_per_group):
                T.barrier_wait(s_free[place], phase)
                T.tcgen05_gemm(
                    Q_shared[r, :, :], K_shared[block % STAGES, :, :], S[place, :, :], transpose_B=True,
                    clear_accum=True, mbar=None,
                )  # fmt: skip
                if r == heads_per_group - 1:
                    T.tcgen05_mma_arrive(k_free[block % STAGES])
                # Last, so that whoever has seen the last product leaves with nothing under way.
                T.tcgen05_mma_arrive(s_full[place])
                place = place + 1
                if place == ACCUMULATORS:
                    place = 0
                    phase = phase ^ 1

    @T.macro
    def consume(
        tx, S, max_shared, s_full, s_free, head, first_token, end_token, first_limit, length, num_blocks,
        q_positions, use_positions, init_blocks, local_blocks, order, out,
    ):  # fmt: skip
        """The epilogue; the row of a thread is its token."""
        keys = T.alloc_local([topk], "int32")
        ids = T.alloc_local([topk], "int32")
        part = T.alloc_fragment([ROWS, COLUMNS], "float32")
        row_max = T.alloc_fragment([ROWS], "float32")
        row_limit = T.alloc_fragment([ROWS], "int32")
        least = T.alloc_local([1], "int32")
        most = T.alloc_local([1], "int32")
        place = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        key = T.alloc_var("int32")
        place = 0
        phase = 0
        token = T.min(first_token + tx, end_token - 1)
        limit = last_visible(q_positions, use_positions, token, first_token, first_limit, length)
        valid = T.if_then_else(limit >= 0, limit // block_size + 1, 0)
        for i in T.Parallel(ROWS):
            row_limit[i] = last_visible(
                q_positions, use_positions, T.min(first_token + i, end_token - 1), first_token, first_limit, length
            )
        tile_limits(
            q_positions, use_positions, first_token, T.min(first_token + ROWS, end_token) - 1, first_limit, length,
            least, most,
        )  # fmt: skip
        full_blocks = T.max(least[0] + 1, 0) // block_size
        steps = block_size // COLUMNS
        top.clear(keys, ids, topk)
        for block in T.serial(num_blocks):
            T.fill(row_max, -T.infinity("float32"))
            for _ in T.serial(heads_per_group):
                T.barrier_wait(s_full[place], phase)
                for step in T.unroll(steps):
                    T.copy(S[place, :, step * COLUMNS : step * COLUMNS + COLUMNS], part)
                    if step == steps - 1:
                        T.tcgen05_before_thread_sync()
                        T.barrier_arrive(s_free[place])
                    block_max(part, row_max, row_limit, ROWS, COLUMNS, block * steps + step, full_blocks * steps)
                place = place + 1
                if place == ACCUMULATORS:
                    place = 0
                    phase = phase ^ 1
            for i in T.Parallel(ROWS):
                max_shared[i] = row_max[i]
            T.sync_warp()
            key = top.forced_key(top.order_key(max_shared[tx]), block, valid, init_blocks, local_blocks)
            if block < valid:
                top.insert(keys, ids, topk, key, block)
            # The lanes may have parted; tensor memory is read by whole warps.
            T.sync_warp()
        if first_token + tx < end_token:
            top.emit(keys, ids, topk, valid, k, order, out, head, first_token + tx)

    @T.prim_func
    def main(
        idx_q: T.StridedTensor((total_q, num_index_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        idx_k: T.StridedTensor(key_shape, key_strides, ELEMENT),
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        out: T.StridedTensor((num_kv_heads, total_q, k), (out_head, out_token, 1), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
        order: T.int32,
    ):
        with T.Kernel(num_kv_heads * (total_q // ROWS + num_starts), threads=table.threads) as cta_index:
            Q_shared = make_buffer(table, "queries")
            K_shared = make_buffer(table, "keys")
            max_shared = make_buffer(table, "maxima")
            S = make_tiles(table, "S", "float32", 32)
            q_full = make_barrier(table, "q_full")
            k_full = make_barrier(table, "k_full")
            k_free = make_barrier(table, "k_free")
            s_full = make_barrier(table, "s_full")
            s_free = make_barrier(table, "s_free")
            request = T.alloc_local([1], "int32")
            least = T.alloc_local([1], "int32")
            most = T.alloc_local([1], "int32")
            length = T.alloc_var("int32")
            end_token = T.alloc_var("int32")
            num_blocks = T.alloc_var("int32")
            # Variables: an expression is computed wherever it is used, and these hold a division.
            head = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            tx = T.get_thread_binding()
            head = T.truncmod(cta_index, num_kv_heads)
            slot = total_q // ROWS + num_starts - 1 - T.truncdiv(cta_index, num_kv_heads)
            last_tile_at_most(cu_seqlens_q, num_starts, ROWS, slot, request)
            first_token = cu_seqlens_q[request[0]] + (slot - cu_seqlens_q[request[0]] // ROWS - request[0]) * ROWS
            length = 0
            end_token = total_q
            num_blocks = 0
            if request[0] < num_starts - 1:
                length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                end_token = cu_seqlens_q[request[0] + 1]
            first_limit = length - end_token + first_token
            if length > 0:
                tile_limits(
                    q_positions, use_positions, first_token, T.min(first_token + ROWS, end_token) - 1, first_limit,
                    length, least, most,
                )  # fmt: skip
                num_blocks = T.max(most[0] + block_size, 0) // block_size
            if first_token < end_token:
                if tx < producer:
                    consume(
                        tx, S, max_shared, s_full, s_free, head, first_token, end_token, first_limit, length,
                        num_blocks, q_positions, use_positions, init_blocks, local_blocks, order, out,
                    )  # fmt: skip
                elif tx < issuer:
                    if num_blocks > 0:
                        key_row = cu_seqlens_k[request[0]]
                        for r in T.unroll(heads_per_group):
                            T.tma_copy(
                                described(idx_q)[first_token : first_token + ROWS, head * heads_per_group + r, :],
                                Q_shared[r, :, :],
                                barrier=q_full,
                            )
                        T.barrier_arrive(q_full)
                        for block in T.serial(num_blocks):
                            T.barrier_wait(k_free[block % STAGES], ((block // STAGES) & 1) ^ 1)
                            load_index_block(
                                idx_k, page_table, key_row + block * block_size, K_shared, k_full, block % STAGES,
                                block_size, head_dim, pages_per_block, box_columns(head_dim, ELEMENT),
                            )  # fmt: skip
                            T.barrier_arrive(k_full[block % STAGES])
                elif tx < idle:
                    multiply(Q_shared, K_shared, S, q_full, k_full, k_free, s_full, s_free, num_blocks)
            # Warp 0 gives the tensor memory back, and must not before the other warps have read it.
            T.sync_threads()

    return main
