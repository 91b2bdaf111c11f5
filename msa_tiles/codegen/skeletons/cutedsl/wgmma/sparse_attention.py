"""KV-outer sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2.

Edges and tasks are the words that msa_tiles.dsl.words describes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import softmax, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.claims import first_claim, next_claim
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.hidden import any_unbounded, clean_column
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive, following
from msa_tiles.dsl.cutedsl.warp import ballot
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.words import is_cut, last_column_of, query_of, slot_of, valid_rows_of

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 5  # <- tile.stages
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
GROUP = 128  # threads of a warpgroup
WARP = 32
WARP_ROWS = 16  # of a tile
TINY = 1.0e-30  # nothing beside a sum of exponentials, of which the largest is 1


def sparse_attention(head_dim: int, block_size: int, group: int, pages_per_block: int):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    The kernel takes q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or
    [pages, num_kv_heads, page, head_dim] with pages_per_block > 0 and page_table [requests, max_pages], the window's
    schedule, and writes partial_out [window, topk, num_q_heads, head_dim] and partial_lse [window, topk, num_q_heads]
    (natural logarithm) for every edge of the window. scale_log2 is the softmax scale times log2(e).

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SparseAttention(head_dim, block_size, group, pages_per_block)
    return kernel, kernel.arguments()


class Shared(NamedTuple):
    """What the CTA keeps in shared memory; the barriers are pointers to the first of each kind."""

    keys: Any
    values: Any
    ring: Any
    tasks: Any
    edges: Any
    tainted: Any
    tainted_from: Any
    task_full: Any
    task_gathered: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    v_raw: Any
    q_full: Any
    q_free: Any


class Tile(NamedTuple):
    """What a consumer warp works with: atoms, operands in shared memory, registers, and where results go."""

    score: Any  # S = queries x keys
    weigh: Any  # O = P x values
    queries: Any
    keys: Any
    values: Any
    S: Any
    P: Any
    O: Any
    staging: Any
    staged_rows: Any
    boxes: Any
    out_atom: Any
    partials: Any
    partial_lse: Any
    scale_log2: Any
    consumer: Any
    member: Any  # this warp among those of its warpgroup
    lane: Any


class SparseAttention:
    """Warps
      warpgroups 0 .. CONSUMERS-1   one 64-row tile at a time: S = Q K^T, softmax over the block, O = P V, partial store
      warpgroup CONSUMERS           warp 0: claims tasks, loads K and V
                                    warp 1 + c: gathers the query rows of consumer c's tiles, by TMA
                                    warp 1 + CONSUMERS: inspects V of tasks that are cut

    Pipelines (name: depth, arrivals)
      task_full: 2, 1 lane of the claiming warp                task_gathered: 1, 1 lane of each gathering and inspecting
                                                               warp, once it has read the task or gathered it
      k_full, v_full: 1, 1 producer lane + TMA bytes           k_free, v_free: 1, 1 lane of each consumer warp
      v_raw: 1, in place of v_full for a task that is cut; v_full then gets 1 lane of the inspecting warp
      q_full: STAGES per consumer, 1 producer lane + TMA bytes
      q_free: STAGES per consumer, 1 lane of each warp of it, once the partial staged in its rows has left

    A task is claimed when all tiles of the one before are gathered or on their way: as late as the rings allow, so that
    no CTA hoards work. Its entry is overwritten two tasks later. By then nobody needs it: consumers read it before they
    free K, which the task in between has to wait for.

    Shared memory, tiles swizzled by 128 bytes
      keys and values [block_size, head_dim], in panels of 64 columns
      ring [CONSUMERS, STAGES, 64, head_dim], laid out as msa_tiles.dsl.cutedsl.gather says
      tasks [2, (first edge, edges or -1 at the end, head, valid rows << 1 | cut)]
      edges [CONSUMERS, STAGES, queries of a tile]             barriers
      tainted [2, head_dim], tainted_from [2]: of a cut task's values, the first row of a column that was infinite or
      NaN, and the first of all columns; block_size for none

    Where a query sees a part of a block, values that it may not see would reach it as 0 times infinity or NaN. So the
    inspecting warp zeroes them, as it does rows past the request's end, and consumers write NaN into the columns of
    queries that see one. V is free for it until it arrives at v_full, and the two entries are as long-lived as tasks.

    A ring slot holds the query rows of a tile until its S is done, then the tile's normalised partial output on its way
    to global memory. S of the next tile is issued before the current partial is scaled, so it overlaps the epilogue;
    the other consumer's products overlap the softmax. Rows of a tile that belong to no edge hold stale data and are
    never stored. A warp has the same 16 rows in S, O and the stores of the queries in them, so what it stages needs no
    barrier with other warps. The slot of a consumer's last partial is freed by its next tile only: STAGES must
    be at least 2.
    """

    def __init__(self, head_dim, block_size, group, pages_per_block):
        self.element = ELEMENTS[ELEMENT]
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.rows = Rows(self.element, head_dim, group)
        self.blocks = Blocks(self.element, head_dim, block_size, pages_per_block)
        self.queries = self.rows.tokens

    def arguments(self):
        """Stand-ins for cute.compile: 10 tensors, 3 scalars and the stream."""
        total_q, q_heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        windows, window, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()

        def keys():
            shape = (cute.sym_int(), kv_heads, self.head_dim)
            if self.blocks.pages_per_block:
                shape = (cute.sym_int(), kv_heads, self.blocks.box_rows, self.head_dim)
            return stand_in(self.element, *shape, align=tma.BYTES)

        return (
            stand_in(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            keys(),
            keys(),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, windows, kv_heads, cute.sym_int()),
            stand_in(Int32, windows, kv_heads, cute.sym_int(), 4),
            stand_in(Int32, windows, kv_heads),
            stand_in(Int32, windows),
            stand_in(self.element, window, topk, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, window, topk, q_heads),
            Float32(0.0),
            Int32(0),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, page_table: cute.Tensor, edges: cute.Tensor,
        tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, partial_out: cute.Tensor,
        partial_lse: cute.Tensor, scale_log2: Float32, window_index: Int32, num_ctas: Int32, stream,
    ):  # fmt: skip
        """Launch. The schedule and the partial results are contiguous; with flat keys any table will do."""
        k_atom, mK = self.blocks.described(k)
        v_atom, mV = self.blocks.described(v)
        q_atom, mQ = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), self.rows.described(q))
        # [window * topk, heads, dim]: TMA has no dimension to spare for the slots.
        window, topk, heads, dim = partial_out.shape
        flat = cute.make_layout((window * topk, heads, dim), stride=(Int64(heads) * dim, dim, 1))
        partials = self.rows.described(cute.make_tensor(partial_out.iterator, flat))
        out_atom, mO = self.rows.atom(cpasync.CopyBulkTensorTileS2GOp(), partials)
        self.kernel(
            q_atom, mQ, k_atom, mK, v_atom, mV, out_atom, mO, page_table, edges, tasks, counts, claims, partial_lse,
            scale_log2, window_index, Int32(window),
        ).launch(
            grid=(num_ctas, 1, 1),
            block=((CONSUMERS + 1) * GROUP, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor, v_atom: cute.CopyAtom,
        mV: cute.Tensor, out_atom: cute.CopyAtom, mO: cute.Tensor, page_table: cute.Tensor, edges: cute.Tensor,
        tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, partial_lse: cute.Tensor, scale_log2: Float32,
        window_index: Int32, window: Int32,
    ):  # fmt: skip
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(SmemAllocator())
        if warp_index >= CONSUMERS * GROUP // WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            role = warp_index - CONSUMERS * GROUP // WARP
            if role == 0:
                self.claim(
                    k_atom, mK, v_atom, mV, shared, page_table, tasks, counts, claims, window_index
                )  # fmt: skip
            elif role <= CONSUMERS:
                self.gather(q_atom, mQ, shared, edges, window_index, window_index * window, role - 1)
            elif role == CONSUMERS + 1:
                self.inspect(shared)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(out_atom, mO, shared, partial_lse, scale_log2, warp_index)

    @cute.jit
    def allocate(self, memory: SmemAllocator):
        """Shared memory, with barriers ready for use on return."""
        slots = CONSUMERS * STAGES
        k_tiler = (ROWS, self.block_size, self.head_dim)
        v_tiler = (ROWS, self.head_dim, self.block_size)
        k_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, k_tiler, self.element, 1)
        v_layout = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, v_tiler, self.element, 1)
        q_layout = self.rows.tiles_layout(slots)
        keys = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        values = memory.allocate_tensor(self.element, v_layout.outer, 1024, v_layout.inner)
        ring = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        tasks = memory.allocate_tensor(Int32, cute.make_layout((2, 4), stride=(4, 1)), 16)
        edges = memory.allocate_tensor(Int32, cute.make_layout((slots, self.queries), stride=(self.queries, 1)), 16)
        tainted = memory.allocate_tensor(Int32, cute.make_layout((2, self.head_dim), stride=(self.head_dim, 1)), 16)
        tainted_from = memory.allocate_tensor(Int32, cute.make_layout((2,)), 8)
        warps = GROUP // WARP
        readers = CONSUMERS * warps
        arrivals = [1, 1, CONSUMERS + 1, 1, 1, readers, readers, 1, *[1] * slots, *[warps] * slots]
        barriers = memory.allocate_array(Int64, len(arrivals))
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(len(arrivals)):
                cute.arch.mbarrier_init(barriers + i, arrivals[i])
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        later = (barriers + i for i in (2, 3, 4, 5, 6, 7, 8, 8 + slots))
        return Shared(keys, values, ring, tasks, edges, tainted, tainted_from, barriers, *later)

    @cute.jit
    def claim(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, v_atom: cute.CopyAtom, mV: cute.Tensor, shared: Shared,
        page_table: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, window_index: Int32,
    ):  # fmt: skip
        """The claiming warp: one task after the other, its entry, then its keys and values."""
        lane = cute.arch.lane_idx()
        heads = Int32(counts.shape[1])
        k_boxes = self.blocks.boxes(shared.keys)
        v_boxes = self.blocks.boxes(shared.values)
        cpasync.prefetch_descriptor(k_atom)
        cpasync.prefetch_descriptor(v_atom)
        claim = first_claim(counts, window_index)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_gathered, parity ^ 1)
            claim = next_claim(claim, claims, counts, window_index, heads, lambda head: head)
            head = claim.head
            row = Int32(0)
            landing = shared.v_full
            pages = [Int32(0) for _ in range(self.blocks.pages_per_block)]
            if head < heads:
                task = tasks[window_index, head, claim.place, None]
                row = task[0]
                if is_cut(task[3]) != 0:
                    landing = shared.v_raw
                pages = self.blocks.pages(page_table, row)
                if lane == 0:
                    shared.tasks[parity, 0] = task[1]
                    shared.tasks[parity, 1] = task[2]
                    shared.tasks[parity, 2] = head
                    shared.tasks[parity, 3] = task[3]
            else:
                running = Int32(0)
                if lane == 0:
                    shared.tasks[parity, 1] = Int32(-1)
            if lane == 0:
                cute.arch.mbarrier_arrive(shared.task_full + parity)
            cute.arch.mbarrier_wait(shared.k_free, parity ^ 1)
            if running > 0:
                self.blocks.load(k_atom, mK, row, pages, head, k_boxes, shared.k_full)
                cute.arch.mbarrier_wait(shared.v_free, parity ^ 1)
                self.blocks.load(v_atom, mV, row, pages, head, v_boxes, landing)
            elif lane == 0:
                cute.arch.mbarrier_arrive(shared.k_full)
            turn = turn + 1

    @cute.jit
    def gather(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, shared: Shared, edges: cute.Tensor, window_index: Int32,
        first_token: Int32, consumer: Int32,
    ):  # fmt: skip
        """A gathering warp: the query rows of every CONSUMERS-th tile of each task, as fast as the ring takes them."""
        lane = cute.arch.lane_idx()
        cpasync.prefetch_descriptor(q_atom)
        boxes = self.rows.boxes(shared.ring, CONSUMERS * STAGES)
        first_slot = consumer * STAGES
        slot = first_slot
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
                of_head = edges[window_index, head, None]
                # Lane i holds the edge of the tile's i-th query, or -1; it is read one tile ahead of need.
                mine = consumer * self.queries + lane
                edge = Int32(-1)
                if (lane < self.queries) & (mine < num):
                    edge = of_head[first_edge + mine]
                for _ in cutlass.range(self.tiles_of(num, consumer), unroll=1):
                    current = edge
                    queries = cutlass.min(num - mine + lane, self.queries)
                    mine = mine + CONSUMERS * self.queries
                    edge = Int32(-1)
                    if (lane < self.queries) & (mine < num):
                        edge = of_head[first_edge + mine]
                    cute.arch.mbarrier_wait(shared.q_free + slot, phase)
                    if lane < self.queries:
                        shared.edges[slot, lane] = current
                    cute.arch.sync_warp()
                    full = shared.q_full + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, queries * self.rows.token_bytes)
                    for r in cutlass.range_constexpr(self.queries):
                        token = first_token + query_of(cute.arch.shuffle_sync(current, r))
                        if r < queries:
                            target = boxes[None, None, None, None, None, r, slot]
                            self.rows.load(q_atom, mQ, token, head, target, full)
                    slot, phase = following(slot, phase, first_slot + STAGES, first_slot)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(shared.task_gathered)
            turn = turn + 1

    @cute.jit
    def inspect(self, shared: Shared):
        """The inspecting warp: values of tasks that are cut, before consumers read them."""
        lane = cute.arch.lane_idx()
        phase = Int32(0)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            num = shared.tasks[parity, 1]
            extent = shared.tasks[parity, 3]
            arrive(shared.task_gathered)
            if num < 0:
                running = Int32(0)
            elif is_cut(extent) != 0:
                cute.arch.mbarrier_wait(shared.v_raw, phase)
                phase = phase ^ 1
                valid = valid_rows_of(extent)
                if valid < self.block_size:
                    self.blocks.clear_rows(shared.values, valid, lane, WARP)
                    cute.arch.sync_warp()
                first = Int32(self.block_size)
                if ballot(any_unbounded(shared.values, self.blocks.block_bytes // 4, lane, WARP) != 0) != 0:
                    for column in cutlass.range(lane, self.head_dim, WARP, unroll=1):
                        of_column = clean_column(shared.values[None, None, 0], column, valid, self.block_size)
                        shared.tainted[parity, column] = of_column
                        first = cutlass.min(first, of_column)
                    first = Int32(cute.arch.warp_redux_sync(first, "min"))
                    cute.arch.fence_view_async_shared()
                if lane == 0:
                    shared.tainted_from[parity] = first
                arrive(shared.v_full)
            turn = turn + 1

    def tiles_of(self, num, consumer):
        """How many tiles of a task of `num` edges a consumer takes."""
        return ((num + self.queries - 1) // self.queries - consumer + CONSUMERS - 1) // CONSUMERS

    @cute.jit
    def consume(
        self, out_atom: cute.CopyAtom, mO: cute.Tensor, shared: Shared, partial_lse: cute.Tensor,
        scale_log2: Float32, warp_index: Int32,
    ):  # fmt: skip
        """A warp of a consumer."""
        cpasync.prefetch_descriptor(out_atom)
        # Uniform in a warp, as what addresses its stores must be.
        member = warp_index % (GROUP // WARP)
        lane = cute.arch.lane_idx()
        score = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        weigh = wgmma.product(self.element, self.head_dim, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element)
        staging = cute.make_tiled_copy_C(stmatrix, weigh[0]).get_slice(member * WARP + lane)
        tile = Tile(
            score,
            weigh,
            wgmma.operand_a(score, shared.ring),
            wgmma.operand_b(score, shared.keys)[None, None, None, 0],
            wgmma.operand_b(weigh, shared.values)[None, None, None, 0],
            wgmma.accumulator(score, self.block_size),
            cute.make_rmem_tensor(weigh[0].partition_shape_A((ROWS, self.block_size)), self.element),
            wgmma.accumulator(weigh, self.head_dim),
            staging,
            staging.partition_D(shared.ring),
            self.rows.boxes(shared.ring, CONSUMERS * STAGES),
            out_atom,
            mO,
            partial_lse,
            scale_log2,
            warp_index // (GROUP // WARP),
            member,
            lane,
        )
        # The slot of the next tile and its phase; the slot in which the last partial is staged.
        slot = tile.consumer * STAGES
        phase = Int32(0)
        staged = Int32(-1)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.k_full, parity)
            num = shared.tasks[parity, 1]
            head = shared.tasks[parity, 2]
            cut = is_cut(shared.tasks[parity, 3])
            tiles = self.tiles_of(num, tile.consumer)
            if num < 0:
                running = Int32(0)
            elif tiles > 0:
                cute.arch.mbarrier_wait(shared.q_full + slot, phase)
                wgmma.multiply(tile.score, tile.S, tile.queries[None, None, None, slot], tile.keys)
                for _ in cutlass.range(tiles - 1, unroll=1):
                    slot, phase, staged = self.step(False, shared, tile, head, cut, parity, slot, phase, staged)
                slot, phase, staged = self.step(True, shared, tile, head, cut, parity, slot, phase, staged)
            else:
                arrive(shared.k_free)
                # To skip a phase would take the next one for done.
                cute.arch.mbarrier_wait(shared.v_full, parity)
                arrive(shared.v_free)
            turn = turn + 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step(
        self, last: cutlass.Constexpr, shared: Shared, tile: Tile, head: Int32, cut: Int32, parity: Int32,
        used: Int32, phase: Int32, staged: Int32,
    ):  # fmt: skip
        """One tile, its S under way, and the start of the next one's S unless it is the last of the task."""
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        tokens = self.tokens_of(shared.edges[used, None], tile.member)
        warpgroup.wait_group(0)
        if cutlass.const_expr(last):
            arrive(shared.k_free)
        if cut != 0:
            rooms = [last_column_of(token) - tile.lane % 4 * 2 for token in tokens]
            softmax.block_softmax(tile.S, tile.P, row_max, row_sum, tile.scale_log2, rooms)
        else:
            softmax.block_softmax(tile.S, tile.P, row_max, row_sum, tile.scale_log2, None)
        cute.arch.mbarrier_wait(shared.v_full, parity)
        wgmma.multiply(tile.weigh, tile.O, tile.P, tile.values)
        first_slot = tile.consumer * STAGES
        slot, phase = following(used, phase, first_slot + STAGES, first_slot)
        if cutlass.const_expr(last):
            warpgroup.wait_group(0)
            arrive(shared.v_free)
        else:
            cute.arch.mbarrier_wait(shared.q_full + slot, phase)
            wgmma.multiply(tile.score, tile.S, tile.queries[None, None, None, slot], tile.keys)
            warpgroup.wait_group(1)
        self.emit(shared, tile, tokens, row_max, row_sum, head, used, staged, cut, parity)
        return slot, phase, used

    def tokens_of(self, edges, member):
        """The edges of the two rows that a lane holds: the same one with a group of 16."""
        of_warp = WARP_ROWS // self.rows.rows_per_token
        return [edges[member * of_warp + half * (of_warp - 1)] for half in range(2)]

    @cute.jit
    def emit(
        self, shared: Shared, tile: Tile, tokens, row_max: cute.Tensor, row_sum: cute.Tensor, head: Int32,
        slot: Int32, staged: Int32, cut: Int32, parity: Int32,
    ):  # fmt: skip
        """Normalise a partial, stage it in the slot of its queries and send it and its LSE on their way."""
        # A row whose scores are all -inf has a sum of 0 and an O of 0.
        inverse = [cute.arch.rcp_approx(row_sum[half] + TINY) for half in range(2)]
        scaled = cute.make_rmem_tensor(tile.O.layout, Float32)
        for i in cutlass.range_constexpr(cute.size(tile.O)):
            scaled[i] = tile.O[i] * inverse[i // 2 % 2]
        rounded = cute.make_rmem_tensor(tile.O.layout, self.element)
        rounded.store(scaled.load().to(self.element))
        # The rows staged last have been read once this returns; then their slot is free.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if staged >= 0:
            arrive(shared.q_free + staged)
        cute.copy(tile.staging, tile.staging.retile(rounded), tile.staged_rows[None, None, None, slot])
        if cut != 0:
            if shared.tainted_from[parity] < self.block_size:
                self.taint(shared, tile, slot, parity)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        topk = Int32(tile.partial_lse.shape[1])
        of_warp = WARP_ROWS // self.rows.rows_per_token
        for r in cutlass.range_constexpr(of_warp):
            # A lane knows every edge of its warp: they are those of its rows.
            if tokens[r] >= 0:
                source = tile.boxes[None, None, None, None, None, tile.member * of_warp + r, slot]
                partial = query_of(tokens[r]) * topk + slot_of(tokens[r])
                self.rows.store(tile.out_atom, source, tile.partials, partial, head)
        cute.arch.cp_async_bulk_commit_group()
        # Behind the copies, whose fence would wait for it. Lanes 0 and 1 of the four that share two rows write one LSE
        # each.
        half = tile.lane % 4
        token = tokens[0]
        lse = softmax.log_sum(row_max[0], row_sum[0], tile.scale_log2)
        if half == 1:
            token = tokens[1]
            lse = softmax.log_sum(row_max[1], row_sum[1], tile.scale_log2)
        row = (tile.lane // 4 + half * 8) % self.rows.rows_per_token
        if (half < 2) & (token >= 0) & (row < self.group):
            tile.partial_lse[query_of(token), slot_of(token), head * self.group + row] = lse

    @cute.jit
    def taint(self, shared: Shared, tile: Tile, slot: Int32, parity: Int32):
        """NaN in the staged rows of this warp, in the columns where they see a value that was taken out."""
        cute.arch.sync_warp()
        for i in cutlass.range(WARP_ROWS * self.head_dim // WARP, unroll=1):
            place = i * WARP + tile.lane
            row = tile.member * WARP_ROWS + place // self.head_dim
            column = place % self.head_dim
            visible = last_column_of(shared.edges[slot, row // self.rows.rows_per_token])
            if shared.tainted[parity, column] <= visible:
                shared.ring[row, column, slot] = self.element(Float32.nan)
