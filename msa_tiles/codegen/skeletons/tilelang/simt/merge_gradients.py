"""Add up what the backward of sparse attention left in parts for one window: dQ of every slot, and dK and dV of
blocks that took several tasks.

Grid: first one CTA for ROWS heads of a token, in which head_dim // 8 neighbouring threads share a row of dQ and own
eight columns each, with the loads of UNROLL slots in flight; then one CTA for every task of the window and KV head, of
which those work whose task is the second of a block: they add what it and the block's further tasks left to the sums of
the block.

Slots and tasks are added in order, in float32. A slot counts where its mark is window_index + 1.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.packing import high_half, low_half, pack_halves
from msa_tiles.dsl.words import valid_rows_of

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
UNROLL = 16  # <- tile.unroll
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
VECTOR = 8


def merge_gradients(head_dim: int):
    """Build the kernel for one head dim.

    partial_dq [window, topk, num_q_heads, head_dim] of the slots that marks [window, num_kv_heads, topk] tell become dq
    [num_queries, num_q_heads, head_dim], the window's first num_queries; a query without any gets 0. In sums [2,
    num_kv_heads, num_sums, head_dim] the rows of a block get those that its further tasks wrote, block_size rows each,
    one behind the other; the sparse_attention_backward kernel documents the tasks.
    """
    lanes = head_dim // VECTOR
    threads = ROWS * lanes
    window, topk, num_queries, num_q_heads, num_kv_heads = T.dynamic(
        "window, topk, num_queries, num_q_heads, num_kv_heads"
    )
    num_windows, num_tasks, num_sums = T.dynamic("num_windows, num_tasks, num_sums")

    @T.prim_func
    def main(
        partial_dq: T.Tensor((window, topk, num_q_heads, head_dim), ELEMENT),
        marks: T.Tensor((window, num_kv_heads, topk), "int32"),
        tasks: T.Tensor((num_windows, num_kv_heads, num_tasks, 5), "int32"),
        counts: T.Tensor((num_windows, num_kv_heads), "int32"),
        sums: T.Tensor((2, num_kv_heads, num_sums, head_dim), "float32"),
        dq: T.Tensor((num_queries, num_q_heads, head_dim), ELEMENT),
        window_index: T.int32,
        block_size: T.int32,
    ):
        with T.Kernel(num_queries * T.ceildiv(num_q_heads, ROWS) + num_kv_heads * num_tasks, threads=threads) as cta:
            packed = T.alloc_local([UNROLL, 4], "uint32")
            mark = T.alloc_local([UNROLL], "int32")
            total = T.alloc_local([VECTOR], "float32")
            stored = T.alloc_local([4], "uint32")
            slot = T.alloc_var("int32")
            first = T.alloc_var("int32")
            number = T.alloc_var("int32")
            one = T.alloc_var("float32")
            tx = T.get_thread_binding()
            head_groups = T.ceildiv(num_q_heads, ROWS)
            if cta < num_queries * head_groups:
                query = T.truncdiv(cta, head_groups)
                head = (cta - query * head_groups) * ROWS + tx // lanes
                column = (tx % lanes) * VECTOR
                if head < num_q_heads:
                    for c in T.unroll(VECTOR):
                        total[c] = 0.0
                    for step in T.serial(T.ceildiv(topk, UNROLL)):
                        for u in T.unroll(UNROLL):
                            slot = T.min(step * UNROLL + u, topk - 1)
                            packed[u, 0:4] = T.ldg128(partial_dq[query, slot, head, column])
                            mark[u] = marks[query, T.truncdiv(head * num_kv_heads, num_q_heads), slot]
                        for u in T.unroll(UNROLL):
                            if step * UNROLL + u < topk and mark[u] == window_index + 1:
                                for c in T.unroll(4):
                                    total[2 * c] = total[2 * c] + low_half(packed[u, c])
                                    total[2 * c + 1] = total[2 * c + 1] + high_half(packed[u, c])
                    for c in T.unroll(4):
                        stored[c] = pack_halves(total[2 * c], total[2 * c + 1])
                    T.stg128(dq[query, head, column], stored[0:4])
            else:
                kv_head = T.truncdiv(cta - num_queries * head_groups, num_tasks)
                task = cta - num_queries * head_groups - kv_head * num_tasks
                first = 0
                number = 0
                if task > 0 and task < counts[window_index, kv_head]:
                    first = tasks[window_index, kv_head, task, 4]
                    if (
                        first != tasks[window_index, kv_head, task, 0]
                        and tasks[window_index, kv_head, task - 1, 4] == tasks[window_index, kv_head, task - 1, 0]
                    ):
                        number = 1
                if number > 0:
                    row = tasks[window_index, kv_head, task, 0]
                    valid = valid_rows_of(tasks[window_index, kv_head, task, 3])
                    while (
                        task + number < counts[window_index, kv_head]
                        and tasks[window_index, kv_head, T.min(task + number, num_tasks - 1), 0] == row
                    ):
                        number = number + 1
                    for i in T.serial(T.ceildiv(valid * head_dim, threads)):
                        key = T.truncdiv(i * threads + tx, head_dim)
                        if key < valid:
                            for side in T.unroll(2):
                                one = sums[side, kv_head, row + key, tx % head_dim]
                                for t in T.serial(number):
                                    one = one + sums[side, kv_head, first + t * block_size + key, tx % head_dim]
                                sums[side, kv_head, row + key, tx % head_dim] = one

    return main
