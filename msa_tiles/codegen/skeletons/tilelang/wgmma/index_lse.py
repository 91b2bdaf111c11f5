"""Log-sum-exp of the index scores of every edge (query, slot) of a schedule, over the tokens of its block.

Grid: (task, KV head, window), a CTA for every place in the lists of tasks; those past the end of a list leave at once.
One warpgroup: idx_k of the task's block stays in shared memory, tiles of 64 edges go by, one a row. The queries are
gathered with 16-byte loads into two buffers in turn; several CTAs share an SM and hide each other's latencies.

# <- cta

Edges and tasks are the words that msa_tiles.dsl.words describes.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.packing import high_half, low_half
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.words import last_column_of, query_of, slot_of

ELEMENT = "bfloat16"  # <- precision.multiply
ROWS = 64  # <- tile.rows
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
LN_2 = 0.6931471805599453


@declares
def cta(index_dim, block_size):
    halves = index_dim // 64
    return Table(
        roles=(Role("everybody", 4, "gathers the queries of a tile, S = Q K^T, their sums"),),
        pipelines=(Pipeline("keys", 1, (threads("everybody"),), fills=("keys",)),),
        buffers=(
            buffer("keys", ELEMENT, align=1024, halves=halves, block_size=block_size, columns=64),
            buffer("queries", ELEMENT, align=1024, halves=2 * halves, rows=ROWS, columns=64),
        ),
        static=TILELANG,
    )


def index_lse(index_dim: int, block_size: int):
    """Build the kernel for one index dim and block size.

    idx_q [total_q, num_kv_heads, index_dim], idx_k [total_k, index_dim] and a schedule -> partial_lse [rows, topk,
    num_kv_heads] (natural logarithm) of every edge of the windows from first_window on; row 0 is the first query of
    that window. Of slots without an edge nothing is written. scale_log2 is the scale times log2(e), positive. Heads
    past the schedule's last one share that.
    """
    table = cta(index_dim, block_size)
    halves = index_dim // 64
    loads = ROWS // 16

    total_q, total_k, num_kv_heads, schedule_heads = T.dynamic("total_q, total_k, num_kv_heads, schedule_heads")
    num_windows, num_rows, topk, num_edges, num_tasks = T.dynamic("num_windows, num_rows, topk, num_edges, num_tasks")
    iq_token, iq_head, ik_token = strides("iq_token, iq_head, ik_token")

    @T.prim_func
    def main(
        idx_q: T.StridedTensor((total_q, num_kv_heads, index_dim), (iq_token, iq_head, 1), ELEMENT),
        idx_k: T.StridedTensor((total_k, index_dim), (ik_token, 1), ELEMENT),
        edges: T.Tensor((num_windows, schedule_heads, num_edges), "int32"),
        tasks: T.Tensor((num_windows, schedule_heads, num_tasks, 4), "int32"),
        counts: T.Tensor((num_windows, schedule_heads), "int32"),
        partial_lse: T.Tensor((num_rows, topk, num_kv_heads), "float32"),
        scale_log2: T.float32,
        window: T.int32,
        first_window: T.int32,
        windows: T.int32,
    ):
        with T.Kernel(num_tasks, num_kv_heads, windows, threads=table.threads) as (task, head, part):
            keys_shared = make_buffer(table, "keys")
            idx_q_shared = make_buffer(table, "queries")
            keys_full = make_barrier(table, "keys_full")
            S = T.alloc_fragment([ROWS, block_size], "float32")
            row_max = T.alloc_fragment([ROWS], "float32")
            row_sum = T.alloc_fragment([ROWS], "float32")
            row_edge = T.alloc_fragment([ROWS], "int32")
            packed = T.alloc_local([loads * halves, 4], "uint32")
            listed = T.alloc_var("int32")
            tx = T.get_thread_binding()
            window_index = first_window + part
            listed = T.min(head, schedule_heads - 1)
            if task < counts[window_index, listed]:
                key_row = tasks[window_index, listed, task, 0]
                first_edge = tasks[window_index, listed, task, 1]
                num = tasks[window_index, listed, task, 2]
                for h in T.unroll(halves):
                    T.tma_copy(
                        described(idx_k)[key_row : key_row + block_size, h * 64 : h * 64 + 64],
                        keys_shared[h, :, :],
                        barrier=keys_full,
                    )
                T.barrier_arrive(keys_full)
                for tile in T.serial(T.ceildiv(num, ROWS)):
                    for step in T.unroll(loads):
                        query = window_index * window + query_of(
                            edges[window_index, listed, first_edge + T.min(tile * ROWS + step * 16 + tx // 8, num - 1)]
                        )
                        for h in T.unroll(halves):
                            packed[step * halves + h, 0:4] = T.ldg128(idx_q[query, head, h * 64 + tx % 8 * 8])
                    for step in T.unroll(loads):
                        for h in T.unroll(halves):
                            for u in T.unroll(4):
                                idx_q_shared[(tile & 1) * halves + h, step * 16 + tx // 8, tx % 8 * 8 + 2 * u] = (
                                    low_half(packed[step * halves + h, u])
                                )
                                idx_q_shared[(tile & 1) * halves + h, step * 16 + tx // 8, tx % 8 * 8 + 2 * u + 1] = (
                                    high_half(packed[step * halves + h, u])
                                )
                    T.fence_proxy_async()
                    # Whoever passes has done the products of the last tile, so that its buffer may be filled again.
                    T.sync_threads()
                    if tile == 0:
                        T.barrier_wait(keys_full, 0)
                    T.wgmma_gemm(
                        idx_q_shared[(tile & 1) * halves, :, :],
                        keys_shared[0, :, :],
                        S,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    if halves > 1:
                        T.wgmma_gemm(
                            idx_q_shared[(tile & 1) * halves + 1, :, :],
                            keys_shared[1, :, :],
                            S,
                            transpose_B=True,
                            clear_accum=False,
                        )
                    for i in T.Parallel(ROWS):
                        row_edge[i] = edges[window_index, listed, first_edge + T.min(tile * ROWS + i, num - 1)]
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(ROWS, block_size):
                        S[i, j] = T.if_then_else(j <= last_column_of(row_edge[i]), S[i, j], -T.infinity("float32"))
                    T.reduce_max(S, row_max, dim=1, clear=True)
                    for i, j in T.Parallel(ROWS, block_size):
                        S[i, j] = T.exp2(S[i, j] * scale_log2 - row_max[i] * scale_log2)
                    T.reduce_sum(S, row_sum, dim=1)
                    for i in T.Parallel(ROWS):
                        partial_lse[part * window + query_of(row_edge[i]), slot_of(row_edge[i]), head] = (
                            row_max[i] * scale_log2 + T.log2(row_sum[i])
                        ) * LN_2

    return main
