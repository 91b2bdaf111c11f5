"""Sums of the partial gradients that index_kl has left behind one query window, in a fixed order.

Grid: first one CTA for every query of the window and KV head, then one for every ROWS rows of every block of keys.
A thread is a column. A query adds its slots; a row of keys adds the tasks of its block, head after head, which it finds
in the sorted lists of tasks by their first row. Blocks of keys are numbered as build_schedule numbers them.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.varlen import last_tile_at_most
from msa_tiles.dsl.words import valid_rows_of

ROWS = 16  # <- tile.rows
UNROLL = 8  # <- tile.unroll
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}


def index_gradients(index_dim: int, block_size: int):
    """Build the kernel for one index dim and block size.

    partial_dq [window, topk, num_kv_heads, index_dim] counts where present [window, topk, num_kv_heads] is not 0. The
    sums of its first rows over the slots become dq [num_queries, num_kv_heads, index_dim], or are added to it unless
    `first`. partial_dk [num_kv_heads, num_tasks, block_size, index_dim] is added to dk [total_k,
    index_dim], the rows that hold a key of the task's block. Heads past the schedule's last one share that.
    """
    parts = block_size // ROWS

    total_k, num_kv_heads, schedule_heads, num_requests_1 = T.dynamic(
        "total_k, num_kv_heads, schedule_heads, num_requests_1"
    )
    num_windows, window, num_queries, topk, num_tasks = T.dynamic("num_windows, window, num_queries, topk, num_tasks")

    @T.prim_func
    def main(
        partial_dq: T.Tensor((window, topk, num_kv_heads, index_dim), "float32"),
        present: T.Tensor((window, topk, num_kv_heads), "int32"),
        partial_dk: T.Tensor((num_kv_heads, num_tasks, block_size, index_dim), "float32"),
        tasks: T.Tensor((num_windows, schedule_heads, num_tasks, 4), "int32"),
        counts: T.Tensor((num_windows, schedule_heads), "int32"),
        cu_seqlens_k: T.Tensor((num_requests_1,), "int32"),
        dq: T.Tensor((num_queries, num_kv_heads, index_dim), "float32"),
        dk: T.Tensor((total_k, index_dim), "float32"),
        window_index: T.int32,
        first: T.int32,
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=index_dim) as cta:
            total = T.alloc_local([ROWS], "float32")
            value = T.alloc_local([UNROLL], "float32")
            request = T.alloc_local([1], "int32")
            low = T.alloc_var("int32")
            high = T.alloc_var("int32")
            middle = T.alloc_var("int32")
            listed = T.alloc_var("int32")
            found = T.alloc_var("int32")
            heads = T.alloc_var("int32")
            tx = T.get_thread_binding()
            if cta < num_queries * num_kv_heads:
                query = cta // num_kv_heads
                head = cta % num_kv_heads
                total[0] = 0.0
                if first == 0:
                    total[0] = dq[query, head, tx]
                for step in T.serial(T.ceildiv(topk, UNROLL)):
                    for u in T.unroll(UNROLL):
                        value[u] = 0.0
                        if step * UNROLL + u < topk:
                            if present[query, step * UNROLL + u, head] != 0:
                                value[u] = partial_dq[query, step * UNROLL + u, head, tx]
                    for u in T.unroll(UNROLL):
                        total[0] = total[0] + value[u]
                dq[query, head, tx] = total[0]
            else:
                place = (cta - num_queries * num_kv_heads) // parts
                part = (cta - num_queries * num_kv_heads) % parts
                last_tile_at_most(cu_seqlens_k, num_requests_1 - 1, block_size, place, request)
                key_row = (
                    cu_seqlens_k[request[0]]
                    + (place - cu_seqlens_k[request[0]] // block_size - request[0]) * block_size
                )
                found = 0
                for i in T.unroll(ROWS):
                    total[i] = 0.0
                # A place behind a request's blocks is nobody's, though another's block may begin at its row.
                heads = 0
                if key_row < cu_seqlens_k[request[0] + 1]:
                    heads = num_kv_heads
                for head in T.serial(heads):
                    listed = T.min(head, schedule_heads - 1)
                    # The first task of the block, or where it would stand.
                    low = 0
                    high = counts[window_index, listed]
                    while low < high:
                        middle = (low + high) // 2
                        if tasks[window_index, listed, middle, 0] < key_row:
                            low = middle + 1
                        else:
                            high = middle
                    high = counts[window_index, listed]
                    while low < high:
                        if tasks[window_index, listed, low, 0] == key_row:
                            found = valid_rows_of(tasks[window_index, listed, low, 3])
                            for i in T.unroll(ROWS):
                                total[i] = total[i] + partial_dk[head, low, part * ROWS + i, tx]
                            low = low + 1
                        else:
                            low = high
                for i in T.unroll(ROWS):
                    if part * ROWS + i < found:
                        dk[key_row + part * ROWS + i, tx] = dk[key_row + part * ROWS + i, tx] + total[i]

    return main
