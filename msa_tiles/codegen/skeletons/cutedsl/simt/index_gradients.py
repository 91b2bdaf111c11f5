"""Sums of the partial gradients that index_kl has left behind one query window, in a fixed order.

Grid: first one CTA for every ROWS rows of every block of keys, whose search takes long, then one for every query of
the window and KV head. A thread moves four columns at a time. A query's slots are dealt out to the rows of threads,
whose sums are added up in shared memory; a row of keys adds the tasks of its block, head after head, which a warp
finds in the sorted lists of tasks by their first row. Blocks of keys are numbered as build_schedule numbers them.

Shared memory: a sum [index_dim] of every row of threads.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.shared import by_rows, make_buffers
from msa_tiles.dsl.cutedsl.varlen import last_tile_at_most
from msa_tiles.dsl.cutedsl.warp import ballot, count_bits
from msa_tiles.dsl.table import WARP, Role, Table, buffer, declares
from msa_tiles.dsl.words import valid_rows_of

ROWS = 16  # <- tile.rows
UNROLL = 4  # <- tile.unroll
WARPS = 4
FOUR = 4  # columns of a thread
BYTES = 16


def index_gradients(index_dim: int, block_size: int):
    """Build the kernel for one index dim and block size.

    partial_dq [window, topk, num_kv_heads, index_dim] counts where present [window, topk, num_kv_heads] is not 0. The
    sums of its first rows over the slots become dq [num_queries, num_kv_heads, index_dim], or are added to it unless
    `first`. partial_dk [num_kv_heads, num_tasks, block_size, index_dim] is added to dk [total_k,
    index_dim], the rows that hold a key of the task's block. Heads past the schedule's last one share that.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = IndexGradients(index_dim, block_size)
    return kernel, kernel.arguments()


@declares
def cta(index_dim, block_size):
    """What a thread block is made of."""
    return Table(
        roles=(Role("all", WARPS, "four columns a thread"),),
        pipelines=(),
        buffers=(
            buffer(
                "sums", "float32", note="of every row of threads",
                rows=WARPS * WARP * FOUR // index_dim, index_dim=index_dim,
            ),
        ),
    )  # fmt: skip


class IndexGradients:
    """
    # <- cta
    """

    def __init__(self, index_dim, block_size):
        self.cta = cta(index_dim, block_size)
        self.index_dim = index_dim
        self.block_size = block_size
        self.lanes = index_dim // FOUR  # threads of a row
        self.at_once = self.cta.threads // self.lanes  # rows

    def arguments(self):
        """Stand-ins for cute.compile: 8 tensors, 3 scalars and the stream."""
        window, topk, heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        windows, scheduled, num_tasks = cute.sym_int(), cute.sym_int(), cute.sym_int()

        return (
            stand_in(Float32, window, topk, heads, self.index_dim, align=BYTES),
            stand_in(Int32, window, topk, heads),
            stand_in(Float32, heads, num_tasks, self.block_size, self.index_dim, align=BYTES),
            stand_in(Int32, windows, scheduled, num_tasks, 4),
            stand_in(Int32, windows, scheduled),
            stand_in(Int32, cute.sym_int()),
            stand_in(Float32, cute.sym_int(), heads, self.index_dim, align=BYTES),
            stand_in(Float32, cute.sym_int(), self.index_dim, align=BYTES),
            *(Int32(0) for _ in range(3)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, partial_dq: cute.Tensor, present: cute.Tensor, partial_dk: cute.Tensor, tasks: cute.Tensor,
        counts: cute.Tensor, cu_seqlens_k: cute.Tensor, dq: cute.Tensor, dk: cute.Tensor, window_index: Int32,
        first: Int32, ctas: Int32, stream,
    ):  # fmt: skip
        """Launch. All tensors are contiguous."""
        self.kernel(
            partial_dq, present, partial_dk, tasks, counts, cu_seqlens_k, dq, dk, window_index, first
        ).launch(grid=(ctas, 1, 1), block=(self.cta.threads, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, partial_dq: cute.Tensor, present: cute.Tensor, partial_dk: cute.Tensor, tasks: cute.Tensor,
        counts: cute.Tensor, cu_seqlens_k: cute.Tensor, dq: cute.Tensor, dk: cute.Tensor, window_index: Int32,
        first: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        heads = Int32(dq.shape[1])
        query_ctas = Int32(dq.shape[0]) * heads
        of_keys = ctas - query_ctas
        sums = make_buffers(self.cta, SmemAllocator(), by_rows(self.cta, "sums"))["sums"]
        if cta < of_keys:
            parts = self.block_size // ROWS
            self.add_keys(
                partial_dk, tasks[window_index, None, None, None], counts[window_index, None], cu_seqlens_k, dk,
                cta // parts, cta % parts * ROWS, thread,
            )  # fmt: skip
        else:
            query = (cta - of_keys) // heads
            head = (cta - of_keys) % heads
            self.add_queries(
                partial_dq[query, None, head, None], present[query, None, head], dq[query, head, None], sums, first,
                thread,
            )  # fmt: skip

    @cute.jit
    def add_queries(
        self, partial: cute.Tensor, present: cute.Tensor, total: cute.Tensor, sums: cute.Tensor, first: Int32,
        thread: Int32,
    ):  # fmt: skip
        """partial [topk, index_dim], those present -> their sum."""
        row = thread // self.lanes
        lane = thread % self.lanes
        topk = Int32(partial.shape[0])
        read = cute.make_rmem_tensor((FOUR, UNROLL), Float32)
        own = cute.make_rmem_tensor(FOUR, Float32)
        own.fill(0.0)
        for start in cutlass.range(row, topk, self.at_once * UNROLL, unroll=1):
            read.fill(0.0)
            for u in cutlass.range_constexpr(UNROLL):
                slot = start + u * self.at_once
                if slot < topk:
                    if present[slot] != 0:
                        copy_four(four(partial[slot, None], lane), read[None, u])
            for u in cutlass.range_constexpr(UNROLL):
                for c in cutlass.range_constexpr(FOUR):
                    own[c] = own[c] + read[c, u]
        for c in cutlass.range_constexpr(FOUR):
            sums[row, lane * FOUR + c] = own[c]
        cute.arch.sync_threads()
        if thread < self.index_dim:
            column = Float32(0.0)
            if first == 0:
                column = total[thread]
            for i in cutlass.range_constexpr(self.at_once):
                column = column + sums[i, thread]
            total[thread] = column

    @cute.jit
    def add_keys(
        self, partial_dk: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, cu_seqlens_k: cute.Tensor,
        dk: cute.Tensor, place: Int32, first_row: Int32, thread: Int32,
    ):  # fmt: skip
        """The rows of a block of keys from first_row on; `place` is the block's number."""
        row = first_row + thread // self.lanes
        lane = thread % self.lanes
        steps = ROWS // self.at_once
        read = cute.make_rmem_tensor((FOUR, steps), Float32)
        total = cute.make_rmem_tensor((FOUR, steps), Float32)
        total.fill(0.0)
        requests = Int32(cute.size(cu_seqlens_k)) - 1
        request = last_tile_at_most(cu_seqlens_k, self.block_size, place)
        start = cu_seqlens_k[request]
        key_row = start + (place - start // self.block_size - request) * self.block_size
        # A place behind a request's blocks is nobody's, though another's block may begin at its row.
        heads = Int32(0)
        if request < requests:
            if key_row < cu_seqlens_k[request + 1]:
                heads = Int32(partial_dk.shape[0])
        valid = Int32(0)
        for head in cutlass.range(heads, unroll=1):
            listed = cutlass.min(head, Int32(counts.shape[0]) - 1)
            rows = tasks[listed, None, 0]
            count = counts[listed]
            task = self.first_task(rows, count, key_row)
            found = self.tasks_of(rows, count, task, key_row)
            while found > 0:
                valid = valid_rows_of(tasks[listed, task, 3])
                for step in cutlass.range_constexpr(steps):
                    copy_four(four(partial_dk[head, task, row + step * self.at_once, None], lane), read[None, step])
                for step in cutlass.range_constexpr(steps):
                    for c in cutlass.range_constexpr(FOUR):
                        total[c, step] = total[c, step] + read[c, step]
                task = task + 1
                found = found - 1
                if found == 0:
                    found = self.tasks_of(rows, count, task, key_row)
        for step in cutlass.range_constexpr(steps):
            if row + step * self.at_once < valid:
                place_of_row = four(dk[key_row + row + step * self.at_once, None], lane)
                copy_four(place_of_row, read[None, step])
                for c in cutlass.range_constexpr(FOUR):
                    total[c, step] = total[c, step] + read[c, step]
                copy_four(total[None, step], place_of_row)

    @cute.jit
    def first_task(self, rows: cute.Tensor, count: Int32, key_row: Int32) -> Int32:
        """The first of `count` ascending rows that is not below key_row, or `count`: 31 of 32 are ruled out a round."""
        low = Int32(0)
        left = count
        while left > 0:
            step = (left + WARP - 1) // WARP
            ahead = cute.arch.lane_idx() * step
            below = cutlass.Boolean(False)
            if ahead < left:
                below = rows[low + ahead] < key_row
            passed = count_bits(ballot(below))
            # The first of the probes that is not below the row may be it; one that no probe rules out may come before.
            low = low + cutlass.max((passed - 1) * step + 1, 0)
            left = cutlass.min(left - cutlass.max((passed - 1) * step + 1, 0), step - 1)
            if passed == 0:
                left = Int32(0)
        return low

    @cute.jit
    def tasks_of(self, rows: cute.Tensor, count: Int32, task: Int32, key_row: Int32) -> Int32:
        """How many tasks from `task` on begin at key_row, at most 32 of them."""
        here = cutlass.Boolean(False)
        if task + cute.arch.lane_idx() < count:
            here = rows[task + cute.arch.lane_idx()] == key_row
        return count_bits(ballot(here))


@cute.jit
def four(row: cute.Tensor, place: Int32) -> cute.Tensor:
    """Columns 4 place to 4 place + 3 of a row that begins at a multiple of 16 bytes."""
    start = row.iterator + place * FOUR
    aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=BYTES)
    return cute.make_tensor(aligned, cute.make_layout(FOUR))


@cute.jit
def copy_four(source: cute.Tensor, target: cute.Tensor):
    """Four columns from memory to registers or back, in one instruction."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=BYTES * 8)
    cute.copy(atom, source, target)
