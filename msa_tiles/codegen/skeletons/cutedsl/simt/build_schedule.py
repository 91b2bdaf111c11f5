"""Reverse index of a block selection: for every KV block, the (query, slot) edges that chose it, and the task list.

Grid: (window, KV head, part); the CTAs of a window sort the edges of its queries by KV block with a counting sort that
is stable in the query, so the schedule is the same in every run. Global block numbers are
cu_seqlens_k[b] // block_size + b + block, which keeps requests apart without a prefix sum. They are taken in ranges of
BLOCKS, which the parts of a window take in turn.

Edges and tasks are laid out as the sparse_attention kernel documents them. A block with more than CHUNK edges becomes
several tasks of nearly equal size, so that no CTA works long after the others.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.scan import inclusive_sum
from msa_tiles.dsl.cutedsl.shared import by_rows, make_buffers
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.varlen import key_length, last_at_most, last_tile_at_most, last_visible
from msa_tiles.dsl.table import WARP, Role, Table, buffer, declares
from msa_tiles.dsl.words import edge_of, extent_of

WARPS = 16  # <- tile.warps
BLOCKS = 2048  # <- tile.blocks
CHUNK = 128  # as msa_tiles.launch.windows counts tasks
PREFETCH = 4  # <- tile.prefetch
PARTS = 4  # <- tile.parts
HALF = WARP // 2
THREADS = WARPS * WARP
PER_THREAD = BLOCKS // THREADS
PIECE = 8  # edges of a task come in multiples of it, but for the last task of a block


def build_schedule(block_size: int):
    """Build the kernel for one block size.

    block_indices [num_kv_heads, total_q, topk] in any order with -1 anywhere; ids of blocks that the query cannot see
    are dropped. Writes edges [num_windows, num_kv_heads, window * topk], tasks [.., max_tasks, 4] and the number of
    tasks, counts [num_windows, num_kv_heads].

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = BuildSchedule(block_size)
    return kernel, kernel.arguments()


class Lengths(NamedTuple):
    """Where queries and keys stand."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    q_positions: Any
    use_seqused: Any
    use_positions: Any


class Run(NamedTuple):
    """A warp's queries [first, last) of a window that begins at query `start`, and what it writes."""

    ids: Any  # [query, slot] of the head
    start: Any
    first: Any
    last: Any
    counter: Any  # of the warp
    cut: Any
    edges: Any  # of the window and head


@declares
def cta(block_size):
    """What a thread block is made of."""
    return Table(
        roles=(Role("all", WARPS, "a run of the window's queries each; between the walks, blocks a thread"),),
        pipelines=(),
        buffers=(
            buffer("counters", "int32", note="of a warp's edges", warps=WARPS, blocks=BLOCKS),
            buffer("cut", "int32", note="whether a query sees only a part", blocks=BLOCKS),
            buffer("sums", "int32", note="of the warps before", warps=WARPS, edges_and_tasks=2),
        ),
    )


class BuildSchedule:
    """
    # <- cta

    Warp i owns a contiguous run of the window's queries and takes them in order, with one slot a
    lane; where a row fits half a warp, two queries a step, which take turns at the counters. The ids of a row are
    distinct, so a turn never has two lanes on one counter and needs no atomics. (A row that repeats an id breaks the
    contract: copies within a step of 32 slots become one edge, of whichever lane stores last, others edges of their
    own.)

    Passes over the ids, for every range of BLOCKS block numbers that the window can touch (one range up to
    BLOCKS * block_size keys): count per warp and block; prefix over the warps and over the blocks, which gives each
    block its run of edges and its tasks; then the same walk again writes the edges. A barrier parts each pass from the
    next. A CTA counts the ranges below its own too, whose sums say where its edges and tasks begin.
    """

    def __init__(self, block_size):
        self.cta = cta(block_size)
        self.block_size = block_size

    def arguments(self):
        """Stand-ins for cute.compile: 8 tensors, 3 scalars and the stream."""
        heads, starts, windows = cute.sym_int(), cute.sym_int(), cute.sym_int()

        return (
            stand_in(Int32, heads, cute.sym_int(), cute.sym_int(), last=cute.sym_int64()),
            stand_in(Int32, starts),
            stand_in(Int32, starts),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, windows, heads, cute.sym_int()),
            stand_in(Int32, windows, heads, cute.sym_int(), 4),
            stand_in(Int32, windows, heads),
            *(Int32(0) for _ in range(3)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, block_indices: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor,
        q_positions: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, use_seqused: Int32,
        use_positions: Int32, window: Int32, stream,
    ):  # fmt: skip
        """Launch. An absent tensor is any other of its rank and type."""
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions)
        self.kernel(block_indices, lengths, edges, tasks, counts, window).launch(
            grid=(counts.shape[0], counts.shape[1], self.parts(edges, tasks)),
            block=(self.cta.threads, 1, 1),
            # Shared memory holds one block; without being told, the compiler saves registers for two, and spills.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.jit
    def parts(self, edges: cute.Tensor, tasks: cute.Tensor) -> Int32:
        """CTAs of a window and head: tasks have room for one of each block, and for one of every CHUNK edges."""
        blocks = Int32(tasks.shape[2]) - Int32(edges.shape[2]) // CHUNK
        return cutlass.max(cutlass.min((blocks + BLOCKS - 1) // BLOCKS, PARTS), 1)

    @cute.kernel
    def kernel(
        self, block_indices: cute.Tensor, lengths: Lengths, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor,
        window: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        window_index, head, part = cute.arch.block_idx()
        _, _, parts = cute.arch.grid_dim()
        warp, lane = thread // WARP, cute.arch.lane_idx()
        found = make_buffers(self.cta, SmemAllocator(), by_rows(self.cta, "counters"))
        by_block, cut_by_block, sums = (found[name] for name in self.cta.buffers)
        # A thread's own blocks.
        layout = cute.make_layout((WARPS, THREADS, PER_THREAD), stride=(BLOCKS, PER_THREAD, 1))
        counters = cute.make_tensor(by_block.iterator, layout)
        cut = cute.make_tensor(cut_by_block.iterator, cute.make_layout((THREADS, PER_THREAD), stride=(PER_THREAD, 1)))

        requests = Int32(cute.size(lengths.cu_seqlens_q)) - 1
        start = window_index * window
        # Queries past the last request belong to nobody.
        end = cutlass.min(cutlass.min(start + window, Int32(block_indices.shape[1])), lengths.cu_seqlens_q[requests])
        share = (window + WARPS - 1) // WARPS
        first = cutlass.min(start + warp * share, end)
        last = cutlass.min(first + share, end)
        run = Run(
            block_indices[head, None, None], start, first, last, by_block[warp, None], cut_by_block,
            edges[window_index, head, None],
        )  # fmt: skip
        low, high = Int32(0), Int32(0)
        if start < end:
            request = last_at_most(lengths.cu_seqlens_q, start)
            low = self.first_block(lengths, request)
            request = last_at_most(lengths.cu_seqlens_q, end - 1)
            length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
            high = self.first_block(lengths, request) + (length + self.block_size - 1) // self.block_size
        ranges = (high - low + BLOCKS - 1) // BLOCKS
        mine, number = part, Int32(0)
        edge_base, task_base = Int32(0), Int32(0)
        while mine < ranges:
            upper = cutlass.min(low + BLOCKS, high)
            zeros = cute.make_rmem_tensor(PER_THREAD, Int32)
            zeros.fill(0)
            for i in cutlass.range((upper - low + WARP * PER_THREAD - 1) // (WARP * PER_THREAD), unroll=1):
                cute.autovec_copy(zeros, counters[warp, i * WARP + lane, None])
            cute.autovec_copy(zeros, cut[thread, None])
            cute.arch.sync_threads()
            self.walk(False, run, lengths, low, upper, lane)
            cute.arch.sync_threads()
            totals, edge_sum, task_sum = self.total(counters, thread, upper - low)
            edge_at, edge_all = inclusive_sum(edge_sum, sums[None, 0], warp, lane)
            task_at, task_all = inclusive_sum(task_sum, sums[None, 1], warp, lane)
            if number == mine:
                self.place(
                    counters, cut, totals, tasks[window_index, head, None, None], lengths, requests, thread, low,
                    edge_base + edge_at - edge_sum, task_base + task_at - task_sum,
                )  # fmt: skip
                cute.arch.sync_threads()
                self.walk(True, run, lengths, low, upper, lane)
                cute.arch.sync_threads()
                mine = mine + parts
            edge_base = edge_base + edge_all
            task_base = task_base + task_all
            low = low + BLOCKS
            number = number + 1
        # The CTA of the last range has counted all.
        if (thread == 0) & (part == cutlass.max(ranges - 1, 0) % parts):
            counts[window_index, head] = task_base

    @cute.jit
    def first_block(self, lengths: Lengths, request: Int32) -> Int32:
        """The global number of a request's first block."""
        return lengths.cu_seqlens_k[request] // self.block_size + request

    @cute.jit
    def total(self, counters: cute.Tensor, thread: Int32, num_blocks: Int32):
        """Edges of each block of a thread, of all of them, and the tasks that they make."""
        totals = cute.make_rmem_tensor(PER_THREAD, Int32)
        totals.fill(0)
        part = cute.make_rmem_tensor(PER_THREAD, Int32)
        for other in cutlass.range_constexpr(WARPS):
            cute.autovec_copy(counters[other, thread, None], part)
            for i in cutlass.range_constexpr(PER_THREAD):
                totals[i] = totals[i] + part[i]
        edge_sum, task_sum = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(PER_THREAD):
            # Counters past the last block hold anything.
            totals[i] = pick(thread * PER_THREAD + i < num_blocks, totals[i], 0)
            edge_sum = edge_sum + totals[i]
            task_sum = task_sum + (totals[i] + CHUNK - 1) // CHUNK
        return totals, edge_sum, task_sum

    @cute.jit
    def place(
        self, counters: cute.Tensor, cut: cute.Tensor, totals: cute.Tensor, tasks: cute.Tensor, lengths: Lengths,
        requests: Int32, thread: Int32, low: Int32, edge_at: Int32, task_at: Int32,
    ):  # fmt: skip
        """Turn the counters of a thread's blocks into places of edges, warp after warp, and write the blocks' tasks."""
        at = cute.make_rmem_tensor(PER_THREAD, Int32)
        for i in cutlass.range_constexpr(PER_THREAD):
            at[i] = edge_at
            edge_at = edge_at + totals[i]
        firsts = cute.make_rmem_tensor(PER_THREAD, Int32)
        firsts.store(at.load())
        part = cute.make_rmem_tensor(PER_THREAD, Int32)
        for other in cutlass.range_constexpr(WARPS):
            cute.autovec_copy(counters[other, thread, None], part)
            cute.autovec_copy(at, counters[other, thread, None])
            for i in cutlass.range_constexpr(PER_THREAD):
                at[i] = at[i] + part[i]
        for i in cutlass.range_constexpr(PER_THREAD):
            if totals[i] > 0:
                number = low + thread * PER_THREAD + i
                request = cutlass.min(last_tile_at_most(lengths.cu_seqlens_k, self.block_size, number), requests - 1)
                row = (number - self.first_block(lengths, request)) * self.block_size
                length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
                rows = cutlass.min(length - row, self.block_size)
                pieces = (totals[i] + CHUNK - 1) // CHUNK
                piece = ((totals[i] + pieces - 1) // pieces + PIECE - 1) // PIECE * PIECE
                for p in cutlass.range(pieces, unroll=1):
                    tasks[task_at, 0] = lengths.cu_seqlens_k[request] + row
                    tasks[task_at, 1] = firsts[i] + p * piece
                    tasks[task_at, 2] = cutlass.min(piece, totals[i] - p * piece)
                    tasks[task_at, 3] = extent_of(rows, cut[thread, i])
                    task_at = task_at + 1

    @cute.jit
    def walk(self, write: cutlass.Constexpr, run: Run, lengths: Lengths, low: Int32, high: Int32, lane: Int32):
        """Visit a warp's edges whose block number is in [low, high); count them, or write them when `write`."""
        topk = Int32(run.ids.shape[1])
        # Queries a step; which of them is the lane's, and its slot there.
        abreast = pick(topk <= HALF, 2, 1)
        beside = pick(topk <= HALF, lane // HALF, 0)
        first_slot = lane - beside * HALF
        ids, coming = (cute.make_rmem_tensor(PREFETCH, Int32) for _ in range(2))
        request, end, length, base = Int32(0), Int32(0), Int32(0), Int32(0)
        if run.first < run.last:
            request = last_at_most(lengths.cu_seqlens_q, run.first)
            end, length, base = self.standing(lengths, request)
        stride = PREFETCH * abreast
        self.fetch(run, run.first + beside, abreast, first_slot, coming)
        for group in cutlass.range((run.last - run.first + stride - 1) // stride, unroll=1):
            first = run.first + group * stride + beside
            before = (request, end, length, base)
            for step in cutlass.range((topk + WARP - 1) // WARP, unroll=1):
                # Every step walks the group's queries again, from the request of the first one.
                request, end, length, base = before
                slot = step * WARP + first_slot
                ids.store(coming.load())
                # The next ids come while these are placed.
                done = (step + 1) * WARP >= topk
                next_first, next_slot = pick(done, first + stride, first), pick(done, first_slot, slot + WARP)
                self.fetch(run, next_first, abreast, next_slot, coming)
                for ahead in cutlass.range_constexpr(PREFETCH):
                    query = cutlass.min(first + ahead * abreast, run.last - 1)
                    while query >= end:
                        request = request + 1
                        end, length, base = self.standing(lengths, request)
                    limit = last_visible(
                        lengths.q_positions, lengths.use_positions, query, query, length - end + query, length
                    )
                    block = ids[ahead]
                    visible, column = Int32(0), Int32(-1)
                    # Compare before multiplying: a wild id must not overflow into a visible one.
                    if (block >= 0) & (limit >= 0) & (block <= limit // self.block_size):
                        visible = cutlass.min(limit - block * self.block_size, self.block_size - 1)
                        column = block + base - low
                    for turn in cutlass.range_constexpr(2):
                        if (beside == turn) & (column >= 0) & (column < high - low):
                            place = run.counter[column]
                            run.counter[column] = place + 1
                            if cutlass.const_expr(write):
                                run.edges[place] = edge_of(query - run.start, slot, visible)
                            elif visible < self.block_size - 1:
                                run.cut[column] = 1
                        cute.arch.sync_warp()

    @cute.jit
    def fetch(self, run: Run, first: Int32, apart: Int32, slot: Int32, ids: cute.Tensor):
        """What PREFETCH queries of a run, some queries apart, hold in a slot, -1 where there is none."""
        there = slot < run.ids.shape[1]
        for ahead in cutlass.range_constexpr(PREFETCH):
            query = first + ahead * apart
            ids[ahead] = Int32(-1)
            if there & (query < run.last):
                ids[ahead] = run.ids[query, slot]

    @cute.jit
    def standing(self, lengths: Lengths, request: Int32):
        """Where a request's queries end, how many keys it has, and the global number of its first block."""
        length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
        return lengths.cu_seqlens_q[request + 1], length, self.first_block(lengths, request)
