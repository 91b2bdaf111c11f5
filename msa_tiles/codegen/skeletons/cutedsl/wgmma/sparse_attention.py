"""KV-outer sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2.

Edges and tasks are the words that msa_tiles.dsl.words describes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import softmax, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.claims import first_claim, next_claim
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.hidden import any_unbounded, clean_column
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.operands import plain as key_value  # <- operands.key_value
from msa_tiles.dsl.cutedsl.pipeline import arrive, arrive_alone, following
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.warp import ballot
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Pipeline, Role, Table, buffer, declares, lane, warps
from msa_tiles.dsl.words import is_cut, last_column_of, query_of, slot_of, valid_rows_of

OUTPUT = "bfloat16"  # <- precision.output
STAGES = 5  # <- tile.stages
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
GROUP_WARPS = 4  # of a warpgroup
WARP_ROWS = 16  # of a tile
TILE_ROWS = 64
LEAST_ROWS = 8  # of a query in a tile
TINY = 1.0e-30  # nothing beside a sum of exponentials, of which the largest is 1


def sparse_attention(
    head_dim: int,
    block_size: int,
    group: int,
    pages_per_block: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    The kernel takes q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or
    [pages, num_kv_heads, page, head_dim] with pages_per_block > 0 and page_table [requests, max_pages], the window's
    schedule, and writes partial_out [window, topk, num_q_heads, head_dim] and partial_lse [window, topk, num_q_heads]
    (natural logarithm) for every edge of the window. scale_log2 is the softmax scale times log2(e).

    Of the schedule this is window number window_index: edges [windows, num_kv_heads, edges of a head], tasks [windows,
    num_kv_heads, tasks of a head, 4], how many tasks each head has in counts [windows, num_kv_heads], and how many are
    claimed in claims [windows], 0 at first.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SparseAttention(
        head_dim,
        block_size,
        group,
        pages_per_block,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, block_size, group, pages_per_block, **scales):
    """What a thread block is made of."""
    consumers = [f"consumer_{c}" for c in range(CONSUMERS)]
    gatherers = [f"gatherer_{c}" for c in range(CONSUMERS)]
    queries = TILE_ROWS // max(group, LEAST_ROWS)
    keys, values = (
        key_value.right_parts(
            name, head_dim, block_size, producer="claimer", keeper="keeper", readers=consumers, inspected=name == "v",
            **scales,
        )
        for name in "kv"
    )  # fmt: skip
    does = "one 64-row tile at a time: S = Q K^T, softmax over the block, O = P V, partial store"
    return Table(
        roles=(
            *(Role(name, GROUP_WARPS, does, CONSUMER_REGISTERS) for name in consumers),
            Role("claimer", 1, "claims tasks, loads K and V", PRODUCER_REGISTERS),
            *(Role(name, 1, "gathers the rows of its consumer's tiles", PRODUCER_REGISTERS) for name in gatherers),
            # % if not declared.key_value.get("KEEPERS")
            Role("keeper", 1, "makes K and V fit for the products; V of tasks that are cut", PRODUCER_REGISTERS),
            # % else
            Role(
                "keeper", key_value.KEEPERS, "makes K and V fit for the products; one warp, V of tasks that are cut",
                PRODUCER_REGISTERS,
            ),
            # % endif
        ),
        pipelines=(
            Pipeline("task", 2, (lane("claimer"),)),
            # % if not declared.key_value.get("KEEPERS")
            Pipeline("gathered", 1, (*(lane(name) for name in gatherers), lane("keeper"))),
            # % else
            Pipeline("gathered", 1, (*(lane(name) for name in gatherers), warps("keeper"))),
            # % endif
            *keys.pipelines,
            *values.pipelines,
            *(Pipeline(f"q_{c}", STAGES, (lane(gatherers[c]),), (warps(consumers[c]),)) for c in range(CONSUMERS)),
        ),
        buffers=(
            *keys.buffers,
            *values.buffers,
            buffer(
                "ring", key_value.multiplied("k", **scales), align=1024,
                note="tiles, laid out as msa_tiles.dsl.cutedsl.gather says",
                rows=TILE_ROWS, head_dim=head_dim, consumers=CONSUMERS, slots=STAGES,
            ),
            buffer("tasks", "int32", fields=4, tasks=2, note="first edge, edges or -1 at the end, head, extent"),
            buffer("edges", "int32", queries=queries, slots=CONSUMERS * STAGES),
            buffer("tainted", "uint8", head_dim=head_dim, tasks=2, note="first row whose value was taken out, or all"),
            buffer("tainted_from", "int32", tasks=2, note="the first of them"),
        ),
    )  # fmt: skip


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
    q_full: Any  # of this consumer's slots, by their number among all
    q_free: Any
    consumer: Any
    member: Any  # this warp among those of its warpgroup
    lane: Any


class Task(NamedTuple):
    """What a consumer knows of the task in work."""

    head: Any
    cut: Any
    parity: Any
    scale_log2: Any
    out_scale: Any  # None where values have no scale of their head


class SparseAttention:
    """
    # <- cta

    A task is claimed when all tiles of the one before are gathered or on their way: as late as the rings allow, so that
    no CTA hoards work. Its entry is overwritten two tasks later. By then nobody needs it: consumers read it before they
    free K, and gatherers and keeper say `gathered` once they have read it and K of the task before is free.

    Where a query sees a part of a block, values that it may not see would reach it as 0 times infinity or NaN. So the
    keeper zeroes them, as it does rows past the request's end, and consumers write NaN into the columns of queries that
    see one. V is the keeper's until it arrives at v_full. What it notes in `tainted` consumers read when V is free
    already, so that there are two: consumers are done with a task's before they free V of the next one, and the keeper
    writes it again for the one after that.

    # <- Right of operands.key_value

    Threads index `tasks`, `edges` and `tainted` the other way round than they are listed: [task, field], [slot, query],
    [task, column]. Consumer c has the STAGES slots from number c * STAGES on, of `ring` and of `edges`.

    A ring slot holds the query rows of a tile until its S is done, then the tile's normalised partial output on its way
    to global memory. S of the next tile is issued before the current partial is scaled, so it overlaps the epilogue;
    the other consumer's products overlap the softmax. Rows of a tile that belong to no edge hold stale data and are
    never stored. A warp has the same 16 rows in S, O and the stores of the queries in them, so what it stages needs no
    barrier with other warps. The slot of a consumer's last partial is freed by its next tile only: STAGES must
    be at least 2.
    """

    def __init__(self, head_dim, block_size, group, pages_per_block, **scales):
        self.cta = cta(head_dim, block_size, group, pages_per_block, **scales)
        self.keys, self.values = (
            key_value.Right(name, self.cta, head_dim, block_size, pages_per_block, **scales) for name in "kv"
        )
        self.element = self.keys.element
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.rows = Rows(self.element, head_dim, group)
        self.blocks = Blocks(self.values.element, head_dim, block_size, pages_per_block)
        self.queries = self.rows.tokens

    def arguments(self):
        """Stand-ins for cute.compile: tensors, 3 scalars and the stream."""
        total_q, q_heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        windows, window, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()
        return (
            stand_in(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            *self.keys.arguments(kv_heads),
            *self.values.arguments(kv_heads),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, windows, kv_heads, cute.sym_int()),
            stand_in(Int32, windows, kv_heads, cute.sym_int(), 4),
            stand_in(Int32, windows, kv_heads),
            stand_in(Int32, windows),
            stand_in(ELEMENTS[OUTPUT], window, topk, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, window, topk, q_heads),
            Float32(0.0),
            Int32(0),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,  # <- tensors of operands.key_value
        v: cute.Tensor,  # <- tensors of operands.key_value
        page_table: cute.Tensor,
        edges: cute.Tensor,
        tasks: cute.Tensor,
        counts: cute.Tensor,
        claims: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        scale_log2: Float32,
        window_index: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launch. The schedule and the partial results are contiguous; with flat keys any table will do."""
        keys = self.keys.stored(
            k,  # <- tensors of operands.key_value
        )
        values = self.values.stored(
            v,  # <- tensors of operands.key_value
        )
        q_atom, mQ = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), self.rows.described(q))
        # [window * topk, heads, dim]: TMA has no dimension to spare for the slots.
        window, topk, heads, dim = partial_out.shape
        flat = cute.make_layout((window * topk, heads, dim), stride=(Int64(heads) * dim, dim, 1))
        partials = self.rows.described(cute.make_tensor(partial_out.iterator, flat))
        out_atom, mO = self.rows.atom(cpasync.CopyBulkTensorTileS2GOp(), partials)
        self.kernel(
            q_atom, mQ, keys, values, out_atom, mO, page_table, edges, tasks, counts, claims, partial_lse, scale_log2,
            window_index, Int32(window),
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.cta.threads, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k: tuple, v: tuple, out_atom: cute.CopyAtom, mO: cute.Tensor,
        page_table: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor,
        partial_lse: cute.Tensor, scale_log2: Float32, window_index: Int32, window: Int32,
    ):  # fmt: skip
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(SmemAllocator(), (q_atom, out_atom, *self.keys.atoms(k), *self.values.atoms(v)))
        claimer, gatherer, keeper = (self.cta.first_warp(role) for role in ("claimer", "gatherer_0", "keeper"))
        if warp_index >= claimer:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index < gatherer:
                self.claim(k, v, shared, page_table, tasks, counts, claims, window_index)
            elif warp_index < keeper:
                self.gather(q_atom, mQ, shared, edges, window_index, window_index * window, warp_index - gatherer)
            else:
                self.keep(shared)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(k, v, out_atom, mO, shared, partial_lse, scale_log2, warp_index)

    @cute.jit
    def allocate(self, memory: SmemAllocator, atoms: tuple):
        """Shared memory, with barriers ready for use on return."""
        layouts = {
            "ring": self.rows.tiles_layout(CONSUMERS * STAGES),
            "tasks": cute.make_layout((2, 4), stride=(4, 1)),
            "edges": cute.make_layout((CONSUMERS * STAGES, self.queries), stride=(self.queries, 1)),
            "tainted": cute.make_layout((2, self.head_dim), stride=(self.head_dim, 1)),
            **self.keys.layouts(),
            **self.values.layouts(),
        }
        found = make_buffers(self.cta, memory, layouts)
        barriers = make_barriers(self.cta, memory, atoms)
        places = (barriers + self.cta.place(name) for name in ("task_full", "gathered_full", "q_0_full", "q_0_free"))
        return Shared(
            self.keys.held(found, barriers), self.values.held(found, barriers), found["ring"], found["tasks"],
            found["edges"], found["tainted"], found["tainted_from"], *places,
        )  # fmt: skip

    def slots_of(self, shared, consumer):
        """A consumer's ring: its barriers, by the number of a slot in the whole ring."""
        ahead = consumer * STAGES  # those of the consumers before, full and free, less their slots
        return shared.q_full + ahead, shared.q_free + ahead

    @cute.jit
    def claim(
        self, k: tuple, v: tuple, shared: Shared, page_table: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor,
        claims: cute.Tensor, window_index: Int32,
    ):  # fmt: skip
        """The claiming warp: one task after the other, its entry, then its keys and values."""
        lane = cute.arch.lane_idx()
        heads = Int32(counts.shape[1])
        claim = first_claim(counts, window_index)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_gathered, parity ^ 1)
            claim = next_claim(claim, claims, counts, window_index, heads, lambda head: head)
            head = claim.head
            row = Int32(0)
            cut = Int32(0)
            pages = [Int32(0) for _ in range(self.blocks.pages_per_block)]
            if head < heads:
                task = tasks[window_index, head, claim.place, None]
                row = task[0]
                cut = is_cut(task[3])
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
                    # Consumers read scales of a head before they know that they need none.
                    shared.tasks[parity, 2] = Int32(0)
            arrive_alone(shared.task_full + parity)
            if running > 0:
                self.keys.load(k, row, pages, head, shared.keys, parity, cut)
                self.values.load(v, row, pages, head, shared.values, parity, cut)
            else:
                self.keys.end_of_loads(shared.keys, parity)
            turn = turn + 1

    @cute.jit
    def gather(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, shared: Shared, edges: cute.Tensor, window_index: Int32,
        first_token: Int32, consumer: Int32,
    ):  # fmt: skip
        """A gathering warp: the query rows of every CONSUMERS-th tile of each task, as fast as the ring takes them."""
        lane = cute.arch.lane_idx()
        q_full, q_free = self.slots_of(shared, consumer)
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
                    cute.arch.mbarrier_wait(q_free + slot, phase)
                    if lane < self.queries:
                        shared.edges[slot, lane] = current
                    cute.arch.sync_warp()
                    full = q_full + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, queries * self.rows.token_bytes)
                    for r in cutlass.range_constexpr(self.queries):
                        token = first_token + query_of(cute.arch.shuffle_sync(current, r))
                        if r < queries:
                            target = boxes[None, None, None, None, None, r, slot]
                            self.rows.load(q_atom, mQ, token, head, target, full)
                    slot, phase = following(slot, phase, first_slot + STAGES, first_slot)
                arrive(shared.task_gathered)
            turn = turn + 1

    @cute.jit
    def keep(self, shared: Shared):
        """A keeping warp: keys and values before consumers read them."""
        phase = Int32(0)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            num = shared.tasks[parity, 1]
            extent = shared.tasks[parity, 3]
            if num < 0:
                running = Int32(0)
                self.keys.end_of_tasks(shared.keys, parity)
            else:
                self.keys.bring(shared.keys, parity, phase, 0)
                self.keys.pass_on(shared.keys, 0)
                arrive(shared.task_gathered)
                phase = self.values.bring(shared.values, parity, phase, is_cut(extent))
                if is_cut(extent) != 0:
                    # % if not declared.key_value.get("KEEPERS")
                    self.inspect(shared, valid_rows_of(extent), parity)
                    # % else
                    # One warp looks at what all of them have decoded.
                    cute.arch.barrier(barrier_id=1, number_of_threads=self.cta.threads_of("keeper"))
                    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.cta.first_warp("keeper"):
                        self.inspect(shared, valid_rows_of(extent), parity)
                    # % endif
                self.values.pass_on(shared.values, is_cut(extent))
            turn = turn + 1

    @cute.jit
    def inspect(self, shared: Shared, valid: Int32, parity: Int32):
        """Zero what a query may not see of a block's values, and note which columns had something to see."""
        lane = cute.arch.lane_idx()
        tile = shared.values.tile
        if valid < self.block_size:
            self.blocks.clear_rows(tile, valid, lane, WARP)
            cute.arch.sync_warp()
        first = Int32(self.block_size)
        if ballot(any_unbounded(tile, self.blocks.block_bytes // 4, lane, WARP) != 0) != 0:
            for column in cutlass.range(lane, self.head_dim, WARP, unroll=1):
                of_column = clean_column(tile[None, None, 0], column, valid, self.block_size)
                shared.tainted[parity, column] = Uint8(of_column)
                first = cutlass.min(first, of_column)
            first = Int32(cute.arch.warp_redux_sync(first, "min"))
            cute.arch.fence_view_async_shared()
        if lane == 0:
            shared.tainted_from[parity] = first

    def tiles_of(self, num, consumer):
        """How many tiles of a task of `num` edges a consumer takes."""
        return ((num + self.queries - 1) // self.queries - consumer + CONSUMERS - 1) // CONSUMERS

    @cute.jit
    def consume(
        self, k: tuple, v: tuple, out_atom: cute.CopyAtom, mO: cute.Tensor, shared: Shared, partial_lse: cute.Tensor,
        scale_log2: Float32, warp_index: Int32,
    ):  # fmt: skip
        """A warp of a consumer."""
        # Uniform in a warp, as what addresses its stores must be.
        member = warp_index % GROUP_WARPS
        lane = cute.arch.lane_idx()
        score = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        weigh = wgmma.product(self.values.element, self.head_dim, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), ELEMENTS[OUTPUT])
        staging = cute.make_tiled_copy_C(stmatrix, weigh[0]).get_slice(member * WARP + lane)
        tile = Tile(
            score,
            weigh,
            wgmma.operand_a(score, shared.ring),
            wgmma.operand_b(score, shared.keys.tile)[None, None, None, 0],
            wgmma.operand_b(weigh, shared.values.tile)[None, None, None, 0],
            wgmma.accumulator(score, self.block_size),
            cute.make_rmem_tensor(weigh[0].partition_shape_A((ROWS, self.block_size)), self.values.element),
            wgmma.accumulator(weigh, self.head_dim),
            staging,
            staging.partition_D(shared.ring),
            self.rows.boxes(shared.ring, CONSUMERS * STAGES),
            out_atom,
            mO,
            partial_lse,
            *self.slots_of(shared, warp_index // GROUP_WARPS),
            warp_index // GROUP_WARPS,
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
            cute.arch.mbarrier_wait(shared.keys.full, parity)
            num = shared.tasks[parity, 1]
            head = shared.tasks[parity, 2]
            task = Task(
                head, is_cut(shared.tasks[parity, 3]), parity, self.keys.fold(scale_log2, k, head),
                self.values.of_head(v, head),
            )  # fmt: skip
            tiles = self.tiles_of(num, tile.consumer)
            if num < 0:
                running = Int32(0)
            elif tiles > 0:
                cute.arch.mbarrier_wait(tile.q_full + slot, phase)
                wgmma.multiply(tile.score, tile.S, tile.queries[None, None, None, slot], tile.keys)
                for _ in cutlass.range(tiles - 1, unroll=1):
                    slot, phase, staged = self.step(False, shared, tile, task, slot, phase, staged)
                slot, phase, staged = self.step(True, shared, tile, task, slot, phase, staged)
            else:
                arrive(shared.keys.free)
                # To skip a phase would take the next one for done.
                cute.arch.mbarrier_wait(shared.values.full, parity)
                arrive(shared.values.free)
            turn = turn + 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step(
        self, last: cutlass.Constexpr, shared: Shared, tile: Tile, task: Task, used: Int32, phase: Int32, staged: Int32
    ):
        """One tile, its S under way, and the start of the next one's S unless it is the last of the task."""
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        tokens = self.tokens_of(shared.edges[used, None], tile.member)
        warpgroup.wait_group(0)
        if cutlass.const_expr(last):
            arrive(shared.keys.free)
        if task.cut != 0:
            rooms = [last_column_of(token) - tile.lane % 4 * 2 for token in tokens]
            softmax.block_softmax(tile.S, tile.P, row_max, row_sum, task.scale_log2, rooms)
        else:
            softmax.block_softmax(tile.S, tile.P, row_max, row_sum, task.scale_log2, None)
        cute.arch.mbarrier_wait(shared.values.full, task.parity)
        wgmma.multiply(tile.weigh, tile.O, tile.P, tile.values)
        first_slot = tile.consumer * STAGES
        slot, phase = following(used, phase, first_slot + STAGES, first_slot)
        if cutlass.const_expr(last):
            warpgroup.wait_group(0)
            arrive(shared.values.free)
        else:
            cute.arch.mbarrier_wait(tile.q_full + slot, phase)
            wgmma.multiply(tile.score, tile.S, tile.queries[None, None, None, slot], tile.keys)
            warpgroup.wait_group(1)
        self.emit(shared, tile, task, tokens, row_max, row_sum, used, staged)
        return slot, phase, used

    def tokens_of(self, edges, member):
        """The edges (of tokens: words of msa_tiles.dsl.words) of a lane's two rows: the same one with a group of 16."""
        of_warp = WARP_ROWS // self.rows.rows_per_token
        return [edges[member * of_warp + half * (of_warp - 1)] for half in range(2)]

    @cute.jit
    def emit(
        self, shared: Shared, tile: Tile, task: Task, tokens, row_max: cute.Tensor, row_sum: cute.Tensor, slot: Int32,
        staged: Int32,
    ):  # fmt: skip
        """Normalise a partial, stage it in the slot of its queries and send it and its LSE on their way."""
        # A row whose scores are all -inf has a sum of 0 and an O of 0.
        inverse = [cute.arch.rcp_approx(row_sum[half] + TINY) for half in range(2)]
        if cutlass.const_expr(task.out_scale is not None):
            inverse = [value * task.out_scale for value in inverse]
        scaled = cute.make_rmem_tensor(tile.O.layout, Float32)
        for i in cutlass.range_constexpr(cute.size(tile.O)):
            scaled[i] = tile.O[i] * inverse[i // 2 % 2]
        rounded = cute.make_rmem_tensor(tile.O.layout, ELEMENTS[OUTPUT])
        rounded.store(scaled.load().to(ELEMENTS[OUTPUT]))
        # The rows staged last have been read once this returns; then their slot is free.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if staged >= 0:
            arrive(tile.q_free + staged)
        cute.copy(tile.staging, tile.staging.retile(rounded), tile.staged_rows[None, None, None, slot])
        if task.cut != 0:
            if shared.tainted_from[task.parity] < self.block_size:
                self.taint(shared, tile, slot, task.parity)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        topk = Int32(tile.partial_lse.shape[1])
        of_warp = WARP_ROWS // self.rows.rows_per_token
        for r in cutlass.range_constexpr(of_warp):
            # A lane knows every edge of its warp: they are those of its rows.
            if tokens[r] >= 0:
                source = tile.boxes[None, None, None, None, None, tile.member * of_warp + r, slot]
                partial = query_of(tokens[r]) * topk + slot_of(tokens[r])
                self.rows.store(tile.out_atom, source, tile.partials, partial, task.head)
        cute.arch.cp_async_bulk_commit_group()
        # Behind the copies, whose fence would wait for it. Lanes 0 and 1 of the four that share two rows write one LSE
        # each.
        half = tile.lane % 4
        token = tokens[0]
        lse = softmax.log_sum(row_max[0], row_sum[0], task.scale_log2)
        if half == 1:
            token = tokens[1]
            lse = softmax.log_sum(row_max[1], row_sum[1], task.scale_log2)
        row = (tile.lane // 4 + half * 8) % self.rows.rows_per_token
        if (half < 2) & (token >= 0) & (row < self.group):
            tile.partial_lse[query_of(token), slot_of(token), task.head * self.group + row] = lse

    @cute.jit
    def taint(self, shared: Shared, tile: Tile, slot: Int32, parity: Int32):
        """NaN in the staged rows of this warp, in the columns where they see a value that was taken out."""
        cute.arch.sync_warp()
        for i in cutlass.range(WARP_ROWS * self.head_dim // WARP, unroll=1):
            place = i * WARP + tile.lane
            row = tile.member * WARP_ROWS + place // self.head_dim
            column = place % self.head_dim
            visible = last_column_of(shared.edges[slot, row // self.rows.rows_per_token])
            if Int32(shared.tainted[parity, column]) <= visible:
                shared.ring[row, column, slot] = ELEMENTS[OUTPUT](Float32.nan)
