"""KV-outer index KL over one query window: loss and partial gradients of the index branch from one pass of the scores.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2. Everything is transposed, keys along the rows of an accumulator: consumer w owns the keys 64 w to
64 w + 63 of the block, with K in registers.

Edges are taken EDGES at a time, a chunk, in tiles of 64 query rows: 64 // rows_per_query queries, each with its `group`
heads in the first of rows_per_query rows. Of a tile, S = K Q^T and exp2 give the heads' probabilities, which a lane
adds up for its own columns and then with the three others of its row: the teacher P [keys, edges]. Of a chunk, the
index scores idx_k idx_q^T give the student Q in the same layout; then with dS = weight (Q - P) in BF16

  d_idx_k [keys, index_dim] += dS idx_q          kept in registers until the task ends
  d_idx_q^T [index_dim, edges] = idx_k^T dS      stored for every edge; 64 rows of it are one consumer's

Edges and tasks are laid out as the sparse_attention kernel documents them.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import softmax, swap_ab, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.claims import first_claim, next_claim
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive, following
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, wide
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.words import last_column_of, query_of, slot_of, valid_rows_of

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 6  # <- tile.stages
EDGES = 16  # <- tile.edges
CHUNKS = 3  # <- tile.chunks
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
GROUP = 128  # threads of a warpgroup
WARP = 32
WARPS = GROUP // WARP
WARP_ROWS = 16  # of a tile
PREPARERS = 2
FIRST, LAST = 1, 2  # bits of a chunk's header: whether it is the first one of its task, or the last
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def index_kl(head_dim: int, index_dim: int, block_size: int, group: int, prefix: int):
    """Build the kernel for one head dim, index dim, block size and number of query heads per KV head.

    q [total_q, num_q_heads, head_dim], k [total_k, num_kv_heads, head_dim], lse [total_q, num_q_heads] and index_lse
    [total_q, num_kv_heads] (natural logarithms), idx_q [total_q, num_kv_heads, index_dim], idx_k [total_k, index_dim],
    weights [total_q], the window's schedule -> losses [num_kv_heads, num_tasks, block_size], to which every task adds
    what its keys give, and with `gradients`, both times `factor`, partial_dq [window, topk, num_kv_heads, index_dim] of
    every edge, with present [window, topk, num_kv_heads] set to 1, and partial_dk [num_kv_heads, num_tasks,
    block_size, index_dim] of every task. With prefix all KV heads share one schedule, that of a head 0. scale_log2 and
    index_scale_log2 are the scales times log2(e).

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = IndexKl(head_dim, index_dim, block_size, group, prefix)
    return kernel, kernel.arguments()


class Shared(NamedTuple):
    """What the CTA keeps in shared memory; the barriers are pointers to the first of each kind."""

    block: Any
    keys: Any
    ring: Any
    index_queries: Any
    dS: Any
    tasks: Any
    headers: Any
    edges: Any
    lse: Any
    index_lse: Any
    weights: Any
    task_full: Any
    task_gathered: Any
    k_full: Any
    k_free: Any
    keys_full: Any
    keys_free: Any
    q_full: Any
    q_free: Any
    chunk_full: Any
    chunk_free: Any
    exchanged: Any


class Results(NamedTuple):
    """Where the partial results go."""

    present: Any
    losses: Any
    partial_dq: Any
    partial_dk: Any
    factor: Any


class Tile(NamedTuple):
    """What a consumer warp works with: products, their operands and results, and which part of a tile is its own."""

    score: Any  # S = K Q^T
    K: Any
    queries: Any
    S: tuple  # of even tiles, and of odd ones
    teacher: Any
    score_product: Any  # scores = idx_k idx_q^T
    keys: Any
    index_queries: Any
    scores: Any
    dS: Any
    index_columns: Any
    dk: Any  # += dS idx_q
    query_product: Any  # dq = idx_k^T dS
    key_columns: Any
    weights: Any
    dq: Any
    row_loss: Any
    loading: tuple
    staging: tuple
    scale_log2: Any
    index_scale_log2: Any
    consumer: Any
    row: Any  # the lane's first one among the consumer's 64
    lane: Any


class IndexKl:
    """Warps
      warpgroups 0 .. consumers-1   block_size // 64 of them, all of which take every tile
      warpgroup consumers           warp 0: claims tasks, loads K and idx_k
                                    warp 1: gathers the query rows of every tile, by TMA
                                    warps 2 and 3: half of every chunk each: its index queries and what is known of
                                    its edges

    Pipelines (name: depth, arrivals)
      task_full: 2, 1 lane of the claiming warp
      task_gathered: 1, 1 lane of each of warps 1 to 3, as it comes to the task's last chunk
      k_full: 1, keys_full: 2, 1 producer lane + TMA bytes
      k_free: 1, keys_free: 2, 1 lane of each consumer warp
      q_full: STAGES, 1 producer lane + TMA bytes      q_free: STAGES, 1 lane of each consumer warp
      chunk_full: CHUNKS, 1 lane of warps 2 and 3      chunk_free: CHUNKS, 1 lane of each consumer warp
      exchanged: CHUNKS, 1 lane of each consumer warp, once its keys of a chunk's dS are written

    A task is claimed when the last chunk of the one before is on its way: as late as the rings allow, so that no CTA
    hoards work. Its entry is overwritten two tasks later, when all who read it have left it behind.

    The chunks of all tasks are one stream to the consumers, whose headers say where a task begins and ends: the first
    tiles of a task are multiplied while the chunk before is being finished. The gathering warps fill every tile of a
    chunk, though the last ones of a task may have no query.

    Shared memory, tiles swizzled by 128 bytes, in panels of 64 columns where nothing else is said
      block [block_size, head_dim]: K on its way to registers      keys [2, block_size, index_dim]: idx_k of two tasks
      ring [STAGES, 64, head_dim], laid out as msa_tiles.dsl.cutedsl.gather says
      index_queries [CHUNKS, EDGES, index_dim]      dS [CHUNKS, EDGES, block_size]
      tasks [2, (first edge, edges or -1 at the end, head, valid rows, task)]
      headers [CHUNKS, (bits or -1 at the end, head, task, valid rows, how many tasks came before)]
      lse [CHUNKS, EDGES, rows_per_query]; edges, index_lse and weights [CHUNKS, EDGES]: the edge, or -1, its index LSE
      and weight, in the order of the accumulators' columns      barriers

    A chunk of a consumer, S of its second tile ready and the first one's exponentials taken: what is started in order,
    each before the exponentials that it hides behind
      S of the third tile | exponentials of the second, and so on to the last tile; d_idx_q of chunk c - 2 is stored
      scores, S of the first tile of chunk c + 1 | exponentials of the last tile, Q, dS
      d_idx_k of chunk c, d_idx_q of chunk c - 1, S of the second tile of chunk c + 1 | exponentials of its first
    Two score tiles take turns. Nothing is under way where the loop closes, because ptxas cannot follow accumulators
    over it. d_idx_q comes a chunk late, so that no consumer waits for the others' keys of dS. A chunk's buffer is free
    once that is stored, idx_k once that of the task's last chunk is multiplied.
    """

    def __init__(self, head_dim, index_dim, block_size, group, prefix):
        self.element = ELEMENTS[ELEMENT]
        self.head_dim = head_dim
        self.index_dim = index_dim
        self.block_size = block_size
        self.group = group
        self.prefix = prefix
        self.consumers = block_size // ROWS
        self.rows = Rows(self.element, head_dim, group)
        self.blocks = Blocks(self.element, head_dim, block_size, 0)
        self.index_blocks = Blocks(self.element, index_dim, block_size, 0)
        self.rows_per_query = self.rows.rows_per_token
        self.queries = self.rows.tokens
        self.tiles = EDGES // self.queries
        # Of d_idx_q^T, the tiles of 64 rows that a consumer makes; where there is only one, all make it.
        self.own_tiles = max(index_dim // ROWS // self.consumers, 1)

    def arguments(self):
        """Stand-ins for cute.compile: 15 tensors, 7 scalars and the stream."""
        total_q, total_k, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        windows, scheduled, num_tasks = cute.sym_int(), cute.sym_int(), cute.sym_int()
        rows, topk = cute.sym_int(), cute.sym_int()
        q_heads = cute.sym_int()

        return (
            stand_in(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(self.element, total_k, kv_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, total_q, q_heads, last=cute.sym_int64()),
            stand_in(self.element, total_q, kv_heads, self.index_dim, align=tma.BYTES),
            stand_in(self.element, total_k, self.index_dim, align=tma.BYTES),
            stand_in(Float32, total_q, kv_heads),
            stand_in(Float32, total_q),
            stand_in(Int32, windows, scheduled, cute.sym_int()),
            stand_in(Int32, windows, scheduled, num_tasks, 4),
            stand_in(Int32, windows, scheduled),
            stand_in(Int32, windows),
            stand_in(Int32, rows, topk, kv_heads),
            stand_in(Float32, kv_heads, num_tasks, self.block_size),
            stand_in(Float32, rows, topk, kv_heads, self.index_dim, align=tma.BYTES),
            stand_in(Float32, kv_heads, cute.sym_int(), self.block_size, self.index_dim, align=tma.BYTES),
            *(Float32(0.0) for _ in range(3)),
            *(Int32(0) for _ in range(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, lse: cute.Tensor, idx_q: cute.Tensor, idx_k: cute.Tensor,
        index_lse: cute.Tensor, weights: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor,
        claims: cute.Tensor, present: cute.Tensor, losses: cute.Tensor, partial_dq: cute.Tensor,
        partial_dk: cute.Tensor, scale_log2: Float32, index_scale_log2: Float32, factor: Float32, gradients: Int32,
        window: Int32, window_index: Int32, num_ctas: Int32, stream,
    ):  # fmt: skip
        """Launch. The schedule and the partial results are contiguous."""
        q_atom, mQ = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), self.rows.described(q))
        k_atom, mK = self.blocks.described(k)
        index_atom, mIndex = tma.box_atom(tma.described(idx_k, (0, 1)), self.block_size)
        results = Results(present, losses, partial_dq, partial_dk, factor)
        self.kernel(
            q_atom, mQ, k_atom, mK, index_atom, mIndex, lse, idx_q, index_lse, weights, edges, tasks, counts, claims,
            results, scale_log2, index_scale_log2, gradients, window, window_index,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=((self.consumers + 1) * GROUP, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor,
        index_atom: cute.CopyAtom, mIndex: cute.Tensor, lse: cute.Tensor, idx_q: cute.Tensor, index_lse: cute.Tensor,
        weights: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor,
        results: Results, scale_log2: Float32, index_scale_log2: Float32, gradients: Int32, window: Int32,
        window_index: Int32,
    ):  # fmt: skip
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(SmemAllocator())
        if warp_index >= self.consumers * WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            role = warp_index - self.consumers * WARPS
            if role == 0:
                heads = Int32(results.losses.shape[0])
                self.claim(k_atom, mK, index_atom, mIndex, shared, tasks, counts, claims, window_index, heads)
            elif role == 1:
                self.gather(q_atom, mQ, shared, edges, results.present, window_index, window_index * window, gradients)
            else:
                given = (idx_q, lse, index_lse, weights)
                self.prepare(given, shared, edges, window_index, window_index * window, role - 2)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if gradients > 0:
                self.consume(True, shared, results, scale_log2, index_scale_log2, warp_index)
            else:
                self.consume(False, shared, results, scale_log2, index_scale_log2, warp_index)

    @cute.jit
    def allocate(self, memory: SmemAllocator):
        """Shared memory, with barriers ready for use on return."""
        rows = LayoutEnum.ROW_MAJOR
        tiler = (self.block_size, ROWS, self.index_dim)
        k_layout = hopper.make_smem_layout_a(rows, (self.block_size, ROWS, self.head_dim), self.element, 1)
        keys_layout = hopper.make_smem_layout_a(rows, tiler, self.element, 2)
        q_layout = self.rows.tiles_layout(STAGES)
        index_layout = hopper.make_smem_layout_b(rows, (ROWS, EDGES, self.index_dim), self.element, CHUNKS)
        dS_layout = hopper.make_smem_layout_b(rows, (ROWS, EDGES, self.block_size), self.element, CHUNKS)
        block = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        keys = memory.allocate_tensor(self.element, keys_layout.outer, 1024, keys_layout.inner)
        ring = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        index_queries = memory.allocate_tensor(self.element, index_layout.outer, 1024, index_layout.inner)
        dS = memory.allocate_tensor(self.element, dS_layout.outer, 1024, dS_layout.inner)
        # Of an edge, what the four lanes of a row need: the same number of heads each, neighbours in the accumulators.
        heads = self.rows_per_query // 4
        lse_layout = cute.make_layout((heads, 4, EDGES, CHUNKS), stride=(1, heads, 4 * heads, 4 * heads * EDGES))
        lse = memory.allocate_tensor(Float32, lse_layout, 16)
        of_edges = cute.make_layout((CHUNKS, EDGES), stride=(EDGES, 1))
        edges = memory.allocate_tensor(Int32, of_edges, 16)
        index_lse = memory.allocate_tensor(Float32, of_edges, 16)
        weights = memory.allocate_tensor(Float32, of_edges, 16)
        headers = memory.allocate_tensor(Int32, cute.make_layout((CHUNKS, 5), stride=(5, 1)), 16)
        tasks = memory.allocate_tensor(Int32, cute.make_layout((2, 5), stride=(5, 1)), 16)
        consumers = self.consumers * WARPS
        counts = [2, 1, 1, 1, 2, 2, STAGES, STAGES, CHUNKS, CHUNKS, CHUNKS]
        arrivals = [1, 1 + PREPARERS, 1, consumers, 1, consumers, 1, consumers, PREPARERS, consumers, consumers]
        barriers = memory.allocate_array(Int64, sum(counts))
        if cute.arch.thread_idx()[0] == 0:
            for kind in cutlass.range_constexpr(len(counts)):
                for i in cutlass.range_constexpr(counts[kind]):
                    cute.arch.mbarrier_init(barriers + sum(counts[:kind]) + i, arrivals[kind])
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.group < self.rows_per_query):
            # The rows that no head fills meet an LSE of infinity: their scores must be finite.
            words = cute.make_tensor(
                cute.recast_ptr(ring.iterator, dtype=Int64), cute.make_layout(STAGES * ROWS * self.head_dim // 4)
            )
            for word in cutlass.range(
                cute.arch.thread_idx()[0], cute.size(words), (self.consumers + 1) * GROUP, unroll=1
            ):
                words[word] = Int64(0)
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        places = (barriers + sum(counts[:kind]) for kind in range(len(counts)))
        return Shared(
            block, keys, ring, index_queries, dS, tasks, headers, edges, lse, index_lse, weights, *places
        )  # fmt: skip

    def listed(self, head):
        """The head of the schedule that a KV head follows."""
        return Int32(0) if self.prefix else head

    @cute.jit
    def claim(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, index_atom: cute.CopyAtom, mIndex: cute.Tensor, shared: Shared,
        tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, window_index: Int32, heads: Int32,
    ):  # fmt: skip
        """The claiming warp: one task after the other, its entry, then its keys and index keys."""
        lane = cute.arch.lane_idx()
        k_boxes = self.blocks.boxes(shared.block)
        index_boxes = tma.boxes(shared.keys, self.block_size, self.block_size, self.index_dim, 2)
        cpasync.prefetch_descriptor(k_atom)
        cpasync.prefetch_descriptor(index_atom)
        claim = first_claim(counts, window_index)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_gathered, parity ^ 1)
            claim = next_claim(claim, claims, counts, window_index, heads, self.listed)
            head = claim.head
            row = Int32(0)
            if head < heads:
                task = tasks[window_index, self.listed(head), claim.place, None]
                row = task[0]
                if lane == 0:
                    shared.tasks[parity, 0] = task[1]
                    shared.tasks[parity, 1] = task[2]
                    shared.tasks[parity, 2] = head
                    shared.tasks[parity, 3] = valid_rows_of(task[3])
                    shared.tasks[parity, 4] = claim.place
            else:
                running = Int32(0)
                if lane == 0:
                    shared.tasks[parity, 1] = Int32(-1)
            if lane == 0:
                cute.arch.mbarrier_arrive(shared.task_full + parity)
            if running > 0:
                cute.arch.mbarrier_wait(shared.k_free, parity ^ 1)
                self.blocks.load(k_atom, mK, row, [], head, k_boxes, shared.k_full)
                cute.arch.mbarrier_wait(shared.keys_free + parity, (turn >> 1) & 1 ^ 1)
                full = shared.keys_full + parity
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.index_blocks.block_bytes)
                for panel in cutlass.range_constexpr(self.index_dim // tma.PANEL):
                    tma.load_box(index_atom, mIndex, row, panel, index_boxes[None, None, 0, panel, parity], full)
            turn = turn + 1

    @cute.jit
    def gather(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, shared: Shared, edges: cute.Tensor, present: cute.Tensor,
        window_index: Int32, first_token: Int32, gradients: Int32,
    ):  # fmt: skip
        """The gathering warp: the query rows of every tile of each task, as fast as the ring takes them.

        It also marks the edges whose gradients will come.
        """
        lane = cute.arch.lane_idx()
        cpasync.prefetch_descriptor(q_atom)
        boxes = self.rows.boxes(shared.ring, STAGES)
        slot = Int32(0)
        phase = Int32(1)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            first_edge = shared.tasks[parity, 0]
            num = shared.tasks[parity, 1]
            head = shared.tasks[parity, 2]
            if num < 0:
                running = Int32(0)
            else:
                of_head = edges[window_index, self.listed(head), None]
                # Lane i holds the edge of the tile's i-th query; it is read one tile ahead of need.
                edge = of_head[first_edge + cutlass.min(lane, num - 1)]
                left = num
                tiles = (num + EDGES - 1) // EDGES * self.tiles
                for number in cutlass.range(tiles, unroll=1):
                    if (number == tiles - self.tiles) & (lane == 0):
                        cute.arch.mbarrier_arrive(shared.task_gathered)
                    current = edge
                    queries = cutlass.max(cutlass.min(left, self.queries), 0)
                    left = left - self.queries
                    edge = of_head[first_edge + cutlass.min(num - left + lane, num - 1)]
                    if (lane < queries) & (gradients > 0):
                        present[query_of(current), slot_of(current), head] = Int32(1)
                    cute.arch.mbarrier_wait(shared.q_free + slot, phase)
                    full = shared.q_full + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, queries * self.rows.token_bytes)
                    for r in cutlass.range_constexpr(self.queries):
                        token = first_token + query_of(cute.arch.shuffle_sync(current, r))
                        if r < queries:
                            target = boxes[None, None, None, None, None, r, slot]
                            self.rows.load(q_atom, mQ, token, head, target, full)
                    slot, phase = following(slot, phase, STAGES)
            turn = turn + 1

    def column_of(self, edge):
        """The column of a chunk's accumulators that an edge takes.

        A lane has two neighbouring columns of every eight. Of a tile, it ends up with the queries of its own place:
        one of four, which is a column of it, or two neighbours of eight.
        """
        if self.queries == 8:
            return edge
        return (edge >> 3 << 3) + (edge & 3) * 2 + (edge >> 2 & 1)

    def edge_of(self, column):
        """The edge of a column."""
        if self.queries == 8:
            return column
        return (column >> 3 << 3) + (column & 1) * 4 + (column >> 1 & 3)

    @cute.jit
    def prepare(
        self, given: tuple, shared: Shared, edges: cute.Tensor, window_index: Int32, first_token: Int32, part: Int32
    ):
        """A preparing warp: its half of every chunk, read before the chunk's buffer is free."""
        lane = cute.arch.lane_idx()
        of_row = self.index_dim // VECTOR
        index_queries = cute.make_rmem_tensor((VECTOR, EDGES // PREPARERS * of_row // WARP), self.element)
        lse = cute.make_rmem_tensor(EDGES // PREPARERS * self.rows_per_query // WARP, Float32)
        buffer = Int32(0)
        phase = Int32(1)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            first_edge = shared.tasks[parity, 0]
            num = shared.tasks[parity, 1]
            head = shared.tasks[parity, 2]
            if num < 0:
                running = Int32(0)
                cute.arch.mbarrier_wait(shared.chunk_free + buffer, phase)
                if lane == 0:
                    shared.headers[buffer, 0] = Int32(-1)
                    cute.arch.mbarrier_arrive(shared.chunk_full + buffer)
            else:
                of_head = edges[window_index, self.listed(head), None]
                queries_of_head = given[0][None, head, None]
                # A lane has the same head of every query that it reads the LSE of.
                lse_of_member = given[1][None, head * self.group + (lane & self.group - 1)]
                # Lane i holds the chunk's i-th edge, or the task's last one: no column may meet what is no number.
                edge = of_head[first_edge + cutlass.min(lane % EDGES, num - 1)]
                for first in cutlass.range(0, num, EDGES, unroll=1):
                    if (first + EDGES >= num) & (lane == 0):
                        cute.arch.mbarrier_arrive(shared.task_gathered)
                    current = edge
                    edge = of_head[first_edge + cutlass.min(first + EDGES + lane % EDGES, num - 1)]
                    query = first_token + query_of(current)
                    for v in cutlass.range_constexpr(index_queries.shape[1]):
                        column = part * (EDGES // PREPARERS) + (v * WARP + lane) // of_row
                        token = cute.arch.shuffle_sync(query, self.edge_of(column))
                        copy_wide(wide(queries_of_head[token, None], lane % of_row), index_queries[None, v])
                    for v in cutlass.range_constexpr(cute.size(lse)):
                        number = part * (EDGES // PREPARERS) + (v * WARP + lane) // self.rows_per_query
                        lse[v] = lse_of_member[cute.arch.shuffle_sync(query, number)]
                    index_lse = given[2][query, head]
                    weight = given[3][query]
                    cute.arch.mbarrier_wait(shared.chunk_free + buffer, phase)
                    self.fill_chunk(shared, buffer, part, index_queries, lse, lane)
                    if lane // (EDGES // PREPARERS) == part:
                        column = self.column_of(lane)
                        shared.edges[buffer, column] = pick(first + lane < num, current, -1)
                        shared.index_lse[buffer, column] = index_lse * LOG2_E
                        shared.weights[buffer, column] = weight
                    if (lane == 0) & (part == 0):
                        bits = pick(first == 0, FIRST, 0) | pick(first + EDGES >= num, LAST, 0)
                        shared.headers[buffer, 0] = bits
                        shared.headers[buffer, 1] = head
                        shared.headers[buffer, 2] = shared.tasks[parity, 4]
                        shared.headers[buffer, 3] = shared.tasks[parity, 3]
                        shared.headers[buffer, 4] = turn
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(shared.chunk_full + buffer)
                    buffer = buffer + 1
                    if buffer == CHUNKS:
                        buffer = Int32(0)
                        phase = phase ^ 1
            turn = turn + 1

    @cute.jit
    def fill_chunk(
        self, shared: Shared, buffer: Int32, part: Int32, index_queries: cute.Tensor, lse: cute.Tensor, lane: Int32
    ):
        """What a preparing warp has read of index queries and LSE -> shared memory."""
        of_row = self.index_dim // VECTOR
        base = shared.index_queries.iterator.toint() + buffer * (EDGES * self.index_dim * BYTES // VECTOR)
        for v in cutlass.range_constexpr(index_queries.shape[1]):
            column = part * (EDGES // PREPARERS) + (v * WARP + lane) // of_row
            address = base + self.place(column, lane % of_row) * BYTES
            target = cute.make_ptr(self.element, address, cute.AddressSpace.smem, assumed_align=BYTES)
            copy_wide(index_queries[None, v], cute.make_tensor(target, cute.make_layout(VECTOR)))
        log2_group = self.group.bit_length() - 1
        for v in cutlass.range_constexpr(cute.size(lse)):
            place = v * WARP + lane
            member = place % self.rows_per_query
            edge = part * (EDGES // PREPARERS) + place // self.rows_per_query
            # The mean over the group's heads is a sum of probabilities that are smaller by as much.
            shift = -lse[v] * LOG2_E - log2_group
            if cutlass.const_expr(self.group < self.rows_per_query):
                shift = pick_float(member < self.group, shift, -Float32.inf)
            shared.lse[(member >> 3) * 2 + (member & 1), member >> 1 & 3, edge, buffer] = shift

    def place(self, row, vector):
        """Where the vector-th 16 bytes of an index query lie in a chunk, in units of 16 bytes.

        Rows of a panel are 128 bytes apart; the swizzle exchanges the vectors of a row by its number in the atom.
        """
        return (vector >> 3) * (EDGES * 8) + row * 8 + (vector & 7 ^ row & 7)

    @cute.jit
    def consume(
        self, gradients: cutlass.Constexpr, shared: Shared, results: Results, scale_log2: Float32,
        index_scale_log2: Float32, warp_index: Int32,
    ):  # fmt: skip
        """A warp of a consumer."""
        cute.arch.mbarrier_wait(shared.chunk_full, 0)
        if shared.headers[0, 0] >= 0:
            tile = self.tile(shared, scale_log2, index_scale_log2, warp_index)
            self.load_keys(shared, tile, Int32(0))
            slot = Int32(0)
            phase = Int32(0)
            real = Int32(1)
            cute.arch.mbarrier_wait(shared.q_full, 0)
            self.multiply_tile(tile, 0, slot)
            warpgroup.wait_group(0)
            slot, phase = self.release_tile(shared, real, slot, phase)
            cute.arch.mbarrier_wait(shared.q_full + slot, phase)
            self.multiply_tile(tile, 1, slot)
            self.teacher_columns(tile, 0, shared.lse[None, None, None, 0])
            warpgroup.wait_group(0)
            slot, phase = self.release_tile(shared, real, slot, phase)
            number = Int32(0)
            buffer = Int32(0)
            chunk_phase = Int32(0)
            while real > 0:
                slot, phase, buffer, chunk_phase, real = self.step(
                    gradients, shared, results, tile, slot, phase, number, buffer, chunk_phase
                )
                number = number + 1
            if cutlass.const_expr(gradients):
                # What the loop has left for later.
                before, phase_before = self.chunk_before(buffer, chunk_phase)
                self.finish(shared, results, tile, number, before)
                cute.arch.mbarrier_wait(shared.exchanged + before, phase_before)
                self.multiply_keys_transposed(tile, before, shared.headers[before, 4] & 1)
                warpgroup.wait_group(0)
                self.store_queries(shared, results, tile, before)

    @cute.jit
    def tile(self, shared: Shared, scale_log2: Float32, index_scale_log2: Float32, warp_index: Int32):
        """Products, operands and registers of a consumer warp."""
        consumer = warp_index // WARPS
        lane = cute.arch.lane_idx()
        thread = warp_index % WARPS * WARP + lane
        score = wgmma.product(self.element, ROWS, OperandMajorMode.K, warpgroup.OperandSource.RMEM)
        score_product = swap_ab.product(self.element, EDGES, OperandMajorMode.K)
        sum_keys = self.sum_keys()
        query_product = swap_ab.product(self.element, EDGES, OperandMajorMode.MN)
        # The same bytes, along their other side.
        by_column = LayoutEnum.COL_MAJOR
        index_columns = hopper.make_smem_layout_b(by_column, (ROWS, self.index_dim, EDGES), self.element, CHUNKS)
        key_columns = hopper.make_smem_layout_a(by_column, (self.index_dim, ROWS, self.block_size), self.element, 2)
        by_key = cute.make_tensor(shared.dS.iterator, cute.select(shared.dS.layout, mode=[1, 0, 2]))
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.element)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.element)
        loading = cute.make_tiled_copy_A(ldmatrix, score[0]).get_slice(thread)
        staging = cute.make_tiled_copy_C(stmatrix, score_product[0]).get_slice(thread)
        scores = swap_ab.accumulator(score_product, ROWS, EDGES)
        row_loss = cute.make_rmem_tensor(2, Float32)
        row_loss.fill(0.0)
        return Tile(
            score,
            cute.make_rmem_tensor(score[0].partition_shape_A((ROWS, self.head_dim)), self.element),
            wgmma.operand_b(score, shared.ring),
            (wgmma.accumulator(score, ROWS), wgmma.accumulator(score, ROWS)),
            cute.make_rmem_tensor(scores.layout, Float32),
            score_product,
            wgmma.operand_a(score_product, shared.keys),
            wgmma.operand_b(score_product, shared.index_queries),
            scores,
            cute.make_rmem_tensor(sum_keys[0].partition_shape_A((ROWS, EDGES)), self.element),
            wgmma.operand_b(sum_keys, cute.make_tensor(shared.index_queries.iterator, index_columns.outer)),
            wgmma.accumulator(sum_keys, self.index_dim),
            query_product,
            wgmma.operand_a(query_product, cute.make_tensor(shared.keys.iterator, key_columns.outer)),
            wgmma.operand_b(query_product, shared.dS),
            swap_ab.accumulator(query_product, self.own_tiles * ROWS, EDGES),
            row_loss,
            (ldmatrix, loading, loading.partition_S(shared.block)),
            (stmatrix, staging, staging.partition_D(by_key)),
            scale_log2,
            index_scale_log2,
            consumer,
            warp_index % WARPS * WARP_ROWS + lane // 4,
            lane,
        )

    def sum_keys(self):
        """The multiplications of dS and idx_q."""
        return wgmma.product(self.element, self.index_dim, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)

    @cute.jit
    def release_tile(self, shared: Shared, real: Int32, slot: Int32, phase: Int32):
        """A slot's tile is multiplied: the next slot and its phase. Past the end of the stream nothing changes."""
        if real > 0:
            arrive(shared.q_free + slot)
            slot, phase = following(slot, phase, STAGES)
        return slot, phase

    @cute.jit
    def load_keys(self, shared: Shared, tile: Tile, parity: Int32):
        """K of a task -> registers."""
        cute.arch.mbarrier_wait(shared.k_full, parity)
        atom, loading, block = tile.loading
        cute.copy(atom, block[None, tile.consumer, None, 0], loading.retile(tile.K)[None, 0, None])
        arrive(shared.k_free)

    @cute.jit
    def chunk_before(self, buffer: Int32, phase: Int32):
        """Buffer and phase of the chunk before the one in `buffer`."""
        return pick(buffer == 0, CHUNKS - 1, buffer - 1), pick(buffer == 0, phase ^ 1, phase)

    @cute.jit
    def step(
        self, gradients: cutlass.Constexpr, shared: Shared, results: Results, tile: Tile, slot: Int32, phase: Int32,
        number: Int32, buffer: Int32, chunk_phase: Int32,
    ):  # fmt: skip
        """One chunk, S of its second tile done and its first one taken in, and as much of the next chunk."""
        bits = shared.headers[buffer, 0]
        turn = shared.headers[buffer, 4]
        before, phase_before = self.chunk_before(buffer, chunk_phase)
        after = buffer + 1
        phase_after = chunk_phase
        if after == CHUNKS:
            after = Int32(0)
            phase_after = chunk_phase ^ 1
        real = Int32(1)  # whether there is a next chunk
        for t in cutlass.range_constexpr(1, self.tiles):
            if cutlass.const_expr(t + 1 == self.tiles):
                if (bits & FIRST) != 0:
                    self.receive_index_keys(shared, tile, shared.headers[buffer, 3], turn)
                left, right = tile.keys[None, tile.consumer, None, turn & 1], tile.index_queries[None, 0, None, buffer]
                multiply(tile.score_product, tile.scores[None, 0, 0], left, right)
                if cutlass.const_expr(gradients and self.tiles == 2):
                    self.finish(shared, results, tile, number, before)
                cute.arch.mbarrier_wait(shared.chunk_full + after, phase_after)
                bits_after = shared.headers[after, 0]
                if bits_after < 0:
                    real = Int32(0)
                elif (bits_after & FIRST) != 0:
                    self.load_keys(shared, tile, shared.headers[after, 4] & 1)
            if real > 0:
                cute.arch.mbarrier_wait(shared.q_full + slot, phase)
            # Past the end of the stream this multiplies a stale tile and the result is dropped: waits stay uniform.
            self.multiply_tile(tile, (t + 1) % 2, slot)
            if cutlass.const_expr(gradients and t == 1 and self.tiles > 2):
                self.finish(shared, results, tile, number, before)
            self.teacher_columns(tile, t, shared.lse[None, None, None, buffer])
            if cutlass.const_expr(t + 1 < self.tiles):
                warpgroup.wait_group(0)
                slot, phase = self.release_tile(shared, real, slot, phase)
        warpgroup.wait_group(1)
        self.score_gradients(shared, tile, buffer)
        if (bits & LAST) != 0:
            self.store_loss(shared, results, tile, buffer)
        if cutlass.const_expr(gradients):
            # Whoever has written dS of the chunk before is done with the one that stands where this one goes.
            if number > 0:
                cute.arch.mbarrier_wait(shared.exchanged + before, phase_before)
            self.stage(tile, buffer)
            arrive(shared.exchanged + buffer)
            self.multiply_queries(tile, buffer, (bits & FIRST) == 0)
            # Before the first chunk this multiplies anything, and the result is dropped.
            self.multiply_keys_transposed(tile, before, shared.headers[before, 4] & 1)
            warpgroup.wait_group(1 + self.own_tiles)
        else:
            warpgroup.wait_group(0)
            arrive(shared.chunk_free + buffer)
            if (bits & LAST) != 0:
                arrive(shared.keys_free + (turn & 1))
        slot, phase = self.release_tile(shared, real, slot, phase)
        if real > 0:
            cute.arch.mbarrier_wait(shared.q_full + slot, phase)
        self.multiply_tile(tile, 1, slot)
        self.teacher_columns(tile, 0, shared.lse[None, None, None, after])
        warpgroup.wait_group(0)
        slot, phase = self.release_tile(shared, real, slot, phase)
        if cutlass.const_expr(gradients):
            if number > 0:
                if (shared.headers[before, 0] & LAST) != 0:
                    arrive(shared.keys_free + (shared.headers[before, 4] & 1))
        return slot, phase, after, phase_after, real

    @cute.jit
    def receive_index_keys(self, shared: Shared, tile: Tile, valid: Int32, turn: Int32):
        """Wait for a task's index keys, and clear what is behind those of the request."""
        cute.arch.mbarrier_wait(shared.keys_full + (turn & 1), (turn >> 1) & 1)
        if valid < self.block_size:
            # All rows, though those of other consumers too are cleared by them: d_idx_q needs all.
            thread = cute.arch.thread_idx()[0] % GROUP
            self.index_blocks.clear_rows(shared.keys[None, None, turn & 1], valid, thread, GROUP)
            cute.arch.barrier(barrier_id=1 + tile.consumer, number_of_threads=GROUP)

    def multiply_tile(self, tile, odd, slot):
        """Start S of the tile in a slot."""
        multiply(tile.score, tile.S[odd][None, 0, 0], tile.K[None, 0, None], tile.queries[None, 0, None, slot])

    @cute.jit
    def teacher_columns(self, tile: Tile, t: cutlass.Constexpr, lse: cute.Tensor):
        """The exponentials of tile t of a chunk, and their sums over the heads -> its columns of the teacher."""
        S = tile.S[t % 2]
        place = tile.lane % 4
        eights = self.rows_per_query // 8
        sums = [[], []]
        for r in cutlass.range_constexpr(self.queries):
            shifts = lse[None, place, t * self.queries + r].load()
            for half in cutlass.range_constexpr(2):
                terms = []
                for c in cutlass.range_constexpr(2 * eights):
                    score = S[(c % 2, half, r * eights + c // 2), 0, 0]
                    terms.append(cute.math.exp2(score * tile.scale_log2 + shifts[c], fastmath=True))
                sums[half].append(added(terms))
        for half in cutlass.range_constexpr(2):
            own = halved(halved(sums[half], place >= 2, 2), place % 2 != 0, 1)
            for c in cutlass.range_constexpr(len(own)):
                if cutlass.const_expr(self.queries == 8):
                    tile.teacher[(c, half, t), 0, 0] = own[c]
                else:
                    tile.teacher[(t % 2, half, t // 2), 0, 0] = own[c]

    @cute.jit
    def score_gradients(self, shared: Shared, tile: Tile, buffer: Int32):
        """dS of a chunk from scores and teacher, and what it adds to the loss of the lane's two keys."""
        dS = cute.make_tensor(tile.dS.iterator, tile.scores.layout)
        first_row = tile.consumer * ROWS + tile.row
        for j in cutlass.range_constexpr(EDGES // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + 2 * (tile.lane % 4) + c
                edge = shared.edges[buffer, column]
                shift = shared.index_lse[buffer, column]
                weight = shared.weights[buffer, column]
                # The last key of the block that the query sees.
                limit = pick(edge < 0, -1, last_column_of(edge))
                for half in cutlass.range_constexpr(2):
                    seen = first_row + 8 * half <= limit
                    probability = pick_float(seen, tile.teacher[(c, half, j), 0, 0], Float32(0.0))
                    score = tile.scores[(c, half, j), 0, 0] * tile.index_scale_log2 - shift
                    guess = pick_float(seen, cute.math.exp2(score, fastmath=True), Float32(0.0))
                    dS[(c, half, j), 0, 0] = (weight * (guess - probability)).to(self.element)
                    # A term of 0 * log(0 / Q) is 0, whatever Q is.
                    term = weight * probability * (cute.math.log2(probability, fastmath=True) - score)
                    tile.row_loss[half] = tile.row_loss[half] + pick_float(probability != 0.0, term, Float32(0.0))

    @cute.jit
    def store_loss(self, shared: Shared, results: Results, tile: Tile, buffer: Int32):
        """Add the loss of a task's keys to what stands there, and begin with 0 again."""
        losses = results.losses[shared.headers[buffer, 1], shared.headers[buffer, 2], None]
        for half in cutlass.range_constexpr(2):
            total = softmax.quad_sum(tile.row_loss[half]) * LN_2
            if tile.lane % 4 == 0:
                # One addition to each place in a launch: their order is that of the launches.
                cute.arch.atomic_add(losses.iterator + (tile.consumer * ROWS + tile.row + 8 * half), total)
            tile.row_loss[half] = Float32(0.0)

    @cute.jit
    def stage(self, tile: Tile, buffer: Int32):
        """This warp's keys of dS -> shared memory, for the products of all consumers."""
        atom, staging, target = tile.staging
        rounded = cute.make_tensor(tile.dS.iterator, tile.scores.layout)
        cute.copy(atom, staging.retile(rounded)[None, 0, None], target[None, tile.consumer, None, buffer])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def multiply_queries(self, tile: Tile, buffer: Int32, further: Boolean):
        """Start dk = dS idx_q, added to what was there if `further`."""
        # Made here, because a multiplication that is told at run time what to do is a new value, which cannot leave
        # the loop.
        first, rest = self.sum_keys()
        first.set(warpgroup.Field.ACCUMULATE, further)
        right = tile.index_columns[None, 0, None, buffer]
        multiply((first, rest), tile.dk[None, 0, 0], tile.dS[None, 0, None], right)

    @cute.jit
    def multiply_keys_transposed(self, tile: Tile, buffer: Int32, keys: Int32):
        """Start dq = idx_k^T dS for this consumer's rows of it."""
        for own in cutlass.range_constexpr(self.own_tiles):
            left = tile.key_columns[None, self.tile_of(tile.consumer, own), None, keys]
            multiply(tile.query_product, tile.dq[None, own, 0], left, tile.weights[None, 0, None, buffer])

    def tile_of(self, consumer, own):
        """Which 64 rows of d_idx_q^T a consumer's own-th tile is."""
        if self.index_dim == ROWS:
            return 0
        return consumer if self.own_tiles == 1 else own

    @cute.jit
    def finish(self, shared: Shared, results: Results, tile: Tile, number: Int32, before: Int32):
        """Once the chunk in `before` is done: store d_idx_q of the one before it, and d_idx_k if its task is done."""
        if number > 1:
            place, _ = self.chunk_before(before, Int32(0))
            self.store_queries(shared, results, tile, place)
            arrive(shared.chunk_free + place)
        if number > 0:
            if (shared.headers[before, 0] & LAST) != 0:
                self.store_keys(shared, results, tile, before)

    @cute.jit
    def store_queries(self, shared: Shared, results: Results, tile: Tile, buffer: Int32):
        """d_idx_q of a chunk's edges -> memory: eight neighbouring dims of four edges at a time."""
        head = shared.headers[buffer, 1]
        for j in cutlass.range_constexpr(EDGES // 8):
            for c in cutlass.range_constexpr(2):
                edge = shared.edges[buffer, 8 * j + 2 * (tile.lane % 4) + c]
                own = edge >= 0
                if cutlass.const_expr(self.index_dim == ROWS):
                    # All consumers have the same.
                    own = own & (tile.consumer == 0)
                if own:
                    row = results.partial_dq[query_of(edge), slot_of(edge), head, None]
                    for m in cutlass.range_constexpr(self.own_tiles):
                        for half in cutlass.range_constexpr(2):
                            value = tile.dq[(c, half, j), m, 0] * results.factor
                            row[self.tile_of(tile.consumer, m) * ROWS + tile.row + 8 * half] = value

    @cute.jit
    def store_keys(self, shared: Shared, results: Results, tile: Tile, buffer: Int32):
        """d_idx_k of a task -> memory."""
        partial = results.partial_dk[shared.headers[buffer, 1], shared.headers[buffer, 2], None, None]
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
        for half in cutlass.range_constexpr(2):
            row = partial[tile.consumer * ROWS + tile.row + 8 * half, None]
            start = (row.iterator + 2 * (tile.lane % 4)).toint()
            pairs = cute.make_tensor(
                cute.make_ptr(Float32, start, row.memspace, assumed_align=8),
                cute.make_layout((2, self.index_dim // 8), stride=(1, 8)),
            )
            for j in cutlass.range_constexpr(self.index_dim // 8):
                pair = cute.make_rmem_tensor(2, Float32)
                for c in cutlass.range_constexpr(2):
                    pair[c] = tile.dk[(c, half, j), 0, 0] * results.factor
                cute.copy(atom, pair, pairs[None, j])


def added(terms):
    """The sum of a power of two of numbers."""
    while len(terms) > 1:
        terms = [low + high for low, high in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def halved(values, upper, distance):
    """The sums over this lane and the one at a distance, of the upper half of the values for `upper` lanes, or else of
    the lower one."""
    half = len(values) // 2
    sent = [pick_float(upper, low, high) for low, high in zip(values[:half], values[half:], strict=True)]
    kept = [pick_float(upper, high, low) for low, high in zip(values[:half], values[half:], strict=True)]
    return [own + cute.arch.shuffle_sync_bfly(other, distance) for own, other in zip(kept, sent, strict=True)]


@cute.jit
def multiply(multiplications, into: cute.Tensor, left: cute.Tensor, right: cute.Tensor):
    """Start into = left x right for one tile of each, operands [values, steps], and close the group."""
    warpgroup.fence()
    total = cute.append_ones(into, 3)
    for step in cutlass.range_constexpr(cute.size(left, mode=[1])):
        mma = multiplications[0] if cutlass.const_expr(step == 0) else multiplications[1]
        cute.gemm(mma, total, cute.append_ones(left[None, step]), cute.append_ones(right[None, step]), total)
    warpgroup.commit_group()
