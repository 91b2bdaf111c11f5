"""Add up what the backward of sparse attention left in parts for one window: dQ of every slot, and dK and dV of
blocks that took several tasks.

Grid: first one CTA for every task of the window and KV head, of which those work whose task does not own its block:
the further tasks of a block share out its rows, and each adds its share of what all of them left, in their order, to
the sums of the block. Then one CTA for ROWS heads of a token, in which head_dim // 8 neighbouring threads share a row
of dQ and own eight columns each, with the loads of UNROLL slots in flight. Warps of a CTA are all alike, and nothing is
shared between them.

Slots and tasks are added in order, in float32. A slot counts where its mark is window_index + 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, wide
from msa_tiles.dsl.cutedsl.warp import ballot, first_bit
from msa_tiles.dsl.table import WARP, Role, Table, declares
from msa_tiles.dsl.words import valid_rows_of

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
UNROLL = 16  # <- tile.unroll
FLOATS = 4  # of the sums, in one load


def merge_gradients(head_dim: int):
    """Build the kernel for one head dim.

    partial_dq [window, topk, num_q_heads, head_dim] of the slots that marks [window, num_kv_heads, topk] tell become dq
    [num_queries, num_q_heads, head_dim], the window's first num_queries; a query without any gets 0. In sums [2,
    num_kv_heads, num_sums, head_dim] the rows of a block get those that its further tasks wrote, block_size rows each,
    one behind the other; the sparse_attention_backward kernel documents the tasks.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = MergeGradients(head_dim)
    return kernel, kernel.arguments()


@declares
def cta(head_dim):
    """What a thread block is made of."""
    return Table(
        (
            Role(
                "all",
                ROWS * head_dim // (VECTOR * WARP),
                "head_dim // 8 neighbouring threads a row of dQ, eight columns each",
            ),
        ),
        (),
    )


class MergeGradients:
    """
    # <- cta
    """

    def __init__(self, head_dim):
        self.cta = cta(head_dim)
        self.head_dim = head_dim
        self.element = ELEMENTS[ELEMENT]
        self.lanes = head_dim // VECTOR  # threads of a row

    def arguments(self):
        """Stand-ins for cute.compile: 6 tensors, 2 scalars and the stream."""
        window, topk, q_heads, kv_heads, windows = (cute.sym_int() for _ in range(5))

        return (
            stand_in(self.element, window, topk, q_heads, self.head_dim, align=BYTES),
            stand_in(Int32, window, kv_heads, topk),
            stand_in(Int32, windows, kv_heads, cute.sym_int(), 5),
            stand_in(Int32, windows, kv_heads),
            stand_in(Float32, 2, kv_heads, cute.sym_int(), self.head_dim, align=BYTES),
            stand_in(self.element, cute.sym_int(), q_heads, self.head_dim, align=BYTES),
            Int32(0),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, partial_dq: cute.Tensor, marks: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, sums: cute.Tensor,
        dq: cute.Tensor, window_index: Int32, block_size: Int32, stream,
    ):  # fmt: skip
        """Launch. All tensors are contiguous."""
        head_groups = cute.ceil_div(dq.shape[1], ROWS)
        self.kernel(partial_dq, marks, tasks, counts, sums, dq, window_index, block_size).launch(
            grid=(tasks.shape[1] * tasks.shape[2] + dq.shape[0] * head_groups, 1, 1),
            block=(self.cta.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, partial_dq: cute.Tensor, marks: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, sums: cute.Tensor,
        dq: cute.Tensor, window_index: Int32, block_size: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_tasks = Int32(tasks.shape[2])
        of_tasks = Int32(tasks.shape[1]) * num_tasks
        if cta < of_tasks:
            head = cta // num_tasks
            task = cta % num_tasks
            count = counts[window_index, head]
            # An owner has nothing to add, and what stands behind the counts is no task.
            if task < count:
                of_head = tasks[window_index, head, None, None]
                if of_head[task, 4] != of_head[task, 0]:
                    self.merge_block(of_head, count, sums, head, task, block_size, thread)
        else:
            head_groups = cute.ceil_div(Int32(dq.shape[1]), ROWS)
            query = (cta - of_tasks) // head_groups
            head = (cta - of_tasks) % head_groups * ROWS + thread // self.lanes
            self.merge_row(partial_dq, marks, dq, query, head, window_index, thread)

    @cute.jit
    def merge_row(
        self, partial_dq: cute.Tensor, marks: cute.Tensor, dq: cute.Tensor, query: Int32, wanted: Int32,
        window_index: Int32, thread: Int32,
    ):  # fmt: skip
        """Eight columns of dQ of one head: the slots of its query, in order."""
        topk = Int32(marks.shape[2])
        # Every lane takes part in the votes.
        head = cutlass.min(wanted, Int32(dq.shape[1]) - 1)
        of_query = marks[query, head * Int32(marks.shape[1]) // Int32(dq.shape[1]), None]
        lane = thread % self.lanes
        first_lane = thread % WARP - lane
        loaded = cute.make_rmem_tensor((VECTOR, UNROLL), self.element)
        counting = cute.make_rmem_tensor(UNROLL // self.lanes, Int32)
        total = cute.make_rmem_tensor(VECTOR, Float32)
        total.fill(0.0)
        for step in cutlass.range(cute.ceil_div(topk, UNROLL), unroll=1):
            # Slots past the last one repeat it and do not count, so that the loads need no branch.
            for u in cutlass.range_constexpr(UNROLL):
                slot = cutlass.min(step * UNROLL + u, topk - 1)
                copy_wide(wide(partial_dq[query, slot, head, None], lane), loaded[None, u])
            # The lanes of a row look at one mark each.
            for part in cutlass.range_constexpr(UNROLL // self.lanes):
                slot = step * UNROLL + part * self.lanes + lane
                mark = of_query[cutlass.min(slot, topk - 1)]
                counting[part] = ballot((slot < topk) & (mark == window_index + 1)) >> first_lane
            for u in cutlass.range_constexpr(UNROLL):
                if (counting[u // self.lanes] >> (u % self.lanes)) & 1 != 0:
                    for c in cutlass.range_constexpr(VECTOR):
                        total[c] = total[c] + Float32(loaded[c, u])
        if wanted == head:
            stored = cute.make_rmem_tensor(VECTOR, self.element)
            stored.store(total.load().to(self.element))
            copy_wide(stored, wide(dq[query, head, None], lane))

    @cute.jit
    def merge_block(
        self, tasks: cute.Tensor, count: Int32, sums: cute.Tensor, head: Int32, task: Int32, block_size: Int32,
        thread: Int32,
    ):  # fmt: skip
        """This task's share of the sums of a block that its `number` further tasks left."""
        row = tasks[task, 0]
        valid = valid_rows_of(tasks[task, 3])
        before = self.further(tasks, row, task, -1, count)
        number = before + 1 + self.further(tasks, row, task, 1, count)
        first = tasks[task - before, 4]
        columns = self.head_dim // FLOATS
        of_row = thread % columns
        first_key = before * valid // number
        last_key = (before + 1) * valid // number
        loaded = cute.make_rmem_tensor((FLOATS, 2), Float32)
        total = cute.make_rmem_tensor((FLOATS, 2), Float32)
        for key in cutlass.range(first_key + thread // columns, last_key, self.cta.threads // columns, unroll=1):
            for side in cutlass.range_constexpr(2):
                cute.autovec_copy(self.at(sums, side, head, row + key, of_row), total[None, side])
            for other in cutlass.range(number, unroll=4):
                for side in cutlass.range_constexpr(2):
                    place = first + other * block_size + key
                    cute.autovec_copy(self.at(sums, side, head, place, of_row), loaded[None, side])
                for i in cutlass.range_constexpr(2 * FLOATS):
                    total[i] = total[i] + loaded[i]
            for side in cutlass.range_constexpr(2):
                cute.autovec_copy(total[None, side], self.at(sums, side, head, row + key, of_row))

    @cute.jit
    def further(self, tasks: cute.Tensor, row: Int32, task: Int32, way: cutlass.Constexpr, count: Int32) -> Int32:
        """How many tasks beside this one, one way, are further tasks of the same block. A whole warp calls it."""
        number = Int32(0)
        looking = Int32(1)
        while looking > 0:
            place = task + (number + cute.arch.lane_idx() + 1) * way
            same = Int32(0)
            if (place >= 0) & (place < count):
                if (tasks[place, 0] == row) & (tasks[place, 4] != row):
                    same = Int32(1)
            run = first_bit(ballot(same == 0))
            number = number + run
            if run < WARP:
                looking = Int32(0)
        return number

    @cute.jit
    def at(self, sums: cute.Tensor, side: cutlass.Constexpr, head: Int32, row: Int32, place: Int32) -> cute.Tensor:
        """Columns 4 place to 4 place + 3 of a row of dK (0) or dV (1)."""
        of_row = sums[side, head, row, None]
        start = of_row.iterator + place * FLOATS
        aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=BYTES)
        return cute.make_tensor(aligned, cute.make_layout(FLOATS))
