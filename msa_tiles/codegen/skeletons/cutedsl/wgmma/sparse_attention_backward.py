"""Gradients of sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2. K and V of the task stay in shared memory, the sums of dK and dV in registers.

Edges are those of the sparse_attention kernel. Tasks are (row where the block begins, first edge, number of edges,
valid rows << 1 | cut, row of the sums), where cut says that some edge sees only a part of the block. The row of the
sums is that of the block in the task that owns it, which goes on from the sums of the windows before; the block's other
tasks write theirs to rows behind the keys, which merge_gradients adds in order. Windows follow each other, and dQ
leaves in parts, one for every edge. So no sum depends on timing.
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

from msa_tiles.dsl.cutedsl import gradients, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.claims import first_claim, next_claim
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import ATOM, Rows
from msa_tiles.dsl.cutedsl.gradients import Panels
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive, following
from msa_tiles.dsl.cutedsl.shared import barriers_of, by_rows, make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Pipeline, Role, Table, buffer, declares, lane, warps
from msa_tiles.dsl.words import is_cut, last_column_of, query_of, slot_of, valid_rows_of

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 3  # <- tile.stages
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
GROUP = 128  # threads of a warpgroup
WARPS = 4  # of it
WARP_ROWS = 16  # of a tile
KEYS = 64  # of a consumer
# Stands for the edge of no query: negative, and with the first key as its last, which every block has.
MISSING = -128


def sparse_attention_backward(head_dim: int, block_size: int, group: int):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    The kernel takes q and dout [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], rows
    [total_q, num_q_heads, 2] (LSE times log2(e), delta) and the window's schedule. It writes partial_dq [window, topk,
    num_q_heads, head_dim] and marks [window, num_kv_heads, topk] = window_index + 1 for every edge, adds to
    sums [2, num_kv_heads, num_sums, head_dim] (dK without the softmax scale, dV), of which the first total_k rows are
    those of the keys. scale is the softmax scale, scale_log2 that times log2(e).

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SparseAttentionBackward(head_dim, block_size, group)
    return kernel, kernel.arguments()


@declares
def cta(head_dim, block_size, group):
    """What a thread block is made of."""
    consumers = block_size // KEYS
    in_panels = "swizzled by 128 bytes, in panels of 64 columns"
    gathered = "laid out as msa_tiles.dsl.cutedsl.gather says"
    return Table(
        roles=(
            Role(
                "consumer", consumers * WARPS,
                "64 keys of the block a warpgroup. For every tile of 64 query rows, keys along the rows of the "
                "products: S' = K Q^T, dP' = V dO^T, P' = exp(S' scale - lse), dV += P' dO, dS' = P' (dP' - delta), "
                "dK += dS' Q; and dQ = dS K of the tile before, for its share of the columns",
                CONSUMER_REGISTERS,
            ),
            Role("claimer", 1, "claims tasks, loads K and V", PRODUCER_REGISTERS),
            Role("q_gatherer", 1, "gathers the rows of Q, by TMA", PRODUCER_REGISTERS),
            Role("do_gatherer", 1, "gathers the rows of dO likewise", PRODUCER_REGISTERS),
            Role("copier", 1, "copies LSE, delta and edges of every tile, and marks their slots", PRODUCER_REGISTERS),
        ),
        pipelines=(
            Pipeline("task", 2, (lane("claimer"),)),
            Pipeline("task_gathered", 1, (lane("q_gatherer"), lane("do_gatherer"), lane("copier"))),
            Pipeline("k", 1, (lane("claimer"),), (warps("consumer"),), ("keys",)),
            Pipeline("v", 1, (lane("claimer"),), (warps("consumer"),), ("values",)),
            Pipeline(
                "ring", STAGES, (lane("q_gatherer"), lane("do_gatherer"), lane("copier")), (warps("consumer"),),
                ("queries", "outputs"),
            ),
            Pipeline(
                "scores", 2, (warps("consumer"),),
                note="once the warp's dS is written and its dQ of the tile before is made",
            ),
        ),
        buffers=(
            buffer("keys", ELEMENT, align=1024, note=in_panels, block_size=block_size, head_dim=head_dim),
            buffer("values", ELEMENT, align=1024, note=in_panels, block_size=block_size, head_dim=head_dim),
            buffer("queries", ELEMENT, align=1024, note=gathered, stages=STAGES, rows=ROWS, head_dim=head_dim),
            buffer("outputs", ELEMENT, align=1024, note=f"dO, {gathered}", stages=STAGES, rows=ROWS, head_dim=head_dim),
            buffer(
                "tiles", ELEMENT, align=1024, note="swizzled by 128 bytes: dS of every consumer, twice, then its dQ",
                tiles=3 * consumers, rows=KEYS, columns=ROWS,
            ),
            buffer("lse", "float32", note="of the rows of a tile", pair=2, lanes=4, eights=ROWS // 8, stages=STAGES),
            buffer("delta", "float32", note="likewise", pair=2, lanes=4, eights=ROWS // 8, stages=STAGES),
            buffer(
                "tasks", "int32",
                note="first edge, edges or -1 at the end, head, valid rows << 1 | cut, row of the sums, owner",
                tasks=2, numbers=6,
            ),
            buffer("edges", "int32", note="of a tile", stages=STAGES, queries=ROWS // max(group, ATOM)),
        ),
    )  # fmt: skip


class Shared(NamedTuple):
    """What the CTA keeps in shared memory: the table's buffers, and pointers to the first of its barriers of a kind."""

    keys: Any
    values: Any
    queries: Any
    outputs: Any
    tiles: Any
    lse: Any
    delta: Any
    tasks: Any
    edges: Any
    task_full: Any
    task_gathered_full: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    ring_full: Any
    ring_free: Any
    scores_full: Any


class Tile(NamedTuple):
    """What a consumer warp works with: atoms, operands in shared memory, registers, and where results go."""

    score: Any  # keys x queries, values x dO
    weigh: Any  # P x dO, dS x queries: they accumulate from a task's first tile on
    spread: Any  # dS' x keys
    keys: Any
    values: Any
    queries: Any
    outputs: Any
    transposed_queries: Any
    transposed_outputs: Any
    transposed_scores: Any
    transposed_keys: Any
    S: Any
    dP: Any
    P: Any
    dS: Any
    dQ: Any
    dK: Any
    dV: Any
    writing: Any
    written: Any
    boxes: Any
    atom: Any
    partials: Any
    topk: Any
    scale: Any
    scale_log2: Any
    consumer: Any
    member: Any  # this warp among those of its warpgroup
    lane: Any


class SparseAttentionBackward:
    """
    # <- cta

    A task is claimed when all tiles of the one before are gathered or on their way. Its entry is overwritten two tasks
    later. By then nobody needs it: consumers read it before they free K, which the task in between has to wait for.

    P' and dS' are operands from registers. dS' goes through shared memory once more for dQ, which needs the keys of
    every consumer, and so is made one tile later: a consumer may be up to a tile ahead of the other. Two buffers in
    turn are enough: who writes to one has passed scores_full of the other one, where everybody arrives only after the
    dQ that read the first. The first tile of a task makes dQ of whatever the buffer holds, which goes nowhere.

    A tile has 64 rows, rows_per_token for each of its queries, whose `group` heads come first. Rows past `group` stay
    zero, and queries behind a task's last edge repeat it: both have LSE +inf, so that their P and dS are 0.
    """

    def __init__(self, head_dim, block_size, group):
        self.cta = cta(head_dim, block_size, group)
        self.element = ELEMENTS[ELEMENT]
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.consumers = block_size // KEYS
        self.rows = Rows(self.element, head_dim, group)
        self.partials = Panels(self.element, head_dim, group)
        self.blocks = Blocks(self.element, head_dim, block_size, 0)
        self.queries = self.rows.tokens
        # A consumer makes its share of the panels of dQ; two take turns at a single one.
        panels = head_dim // tma.PANEL
        self.in_turns = self.consumers > panels
        self.parts = 1 if self.in_turns else panels // self.consumers

    def arguments(self):
        """Stand-ins for cute.compile: 12 tensors, 4 scalars and the stream."""
        total_q, total_k, q_heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()
        windows, window, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()

        return (
            stand_in(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(self.element, total_k, kv_heads, self.head_dim, align=tma.BYTES),
            stand_in(self.element, total_k, kv_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, total_q, q_heads, 2),
            stand_in(Int32, windows, kv_heads, cute.sym_int()),
            stand_in(Int32, windows, kv_heads, cute.sym_int(), 5),
            stand_in(Int32, windows, kv_heads),
            stand_in(Int32, windows),
            stand_in(self.element, window, topk, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(Int32, window, kv_heads, topk),
            stand_in(Float32, 2, kv_heads, cute.sym_int(), self.head_dim, align=tma.BYTES),
            Float32(0.0),
            Float32(0.0),
            Int32(0),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, dout: cute.Tensor, k: cute.Tensor, v: cute.Tensor, rows: cute.Tensor, edges: cute.Tensor,
        tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, partial_dq: cute.Tensor, marks: cute.Tensor,
        sums: cute.Tensor, scale: Float32, scale_log2: Float32, window_index: Int32, num_ctas: Int32, stream,
    ):  # fmt: skip
        """Launch. Everything but q, dout, k and v is contiguous."""
        k_atom, mK = self.blocks.described(k)
        v_atom, mV = self.blocks.described(v)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_atom, mQ = self.rows.atom(load, self.rows.described(q))
        do_atom, mdO = self.rows.atom(load, self.rows.described(dout))
        # [window * topk, heads, dim]: TMA has no dimension to spare for the slots.
        window, topk, heads, dim = partial_dq.shape
        flat = cute.make_layout((window * topk, heads, dim), stride=(Int64(heads) * dim, dim, 1))
        partials = self.partials.described(cute.make_tensor(partial_dq.iterator, flat))
        dq_atom, mdQ = self.partials.atom(store, partials)
        self.kernel(
            q_atom, mQ, do_atom, mdO, k_atom, mK, v_atom, mV, dq_atom, mdQ, rows, edges, tasks, counts, claims, marks,
            sums, scale, scale_log2, window_index, Int32(window),
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.cta.threads, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, do_atom: cute.CopyAtom, mdO: cute.Tensor, k_atom: cute.CopyAtom,
        mK: cute.Tensor, v_atom: cute.CopyAtom, mV: cute.Tensor, dq_atom: cute.CopyAtom, mdQ: cute.Tensor,
        rows: cute.Tensor, edges: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor,
        marks: cute.Tensor, sums: cute.Tensor, scale: Float32, scale_log2: Float32, window_index: Int32, window: Int32,
    ):  # fmt: skip
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        claimer, q_gatherer, do_gatherer = map(self.cta.first_warp, ("claimer", "q_gatherer", "do_gatherer"))
        shared = self.allocate(SmemAllocator())
        if warp_index >= claimer:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            first_token = window_index * window
            if warp_index == claimer:
                self.claim(k_atom, mK, v_atom, mV, shared, tasks, counts, claims, window_index)
            elif warp_index == q_gatherer:
                self.gather(q_atom, mQ, shared.queries, shared, edges, window_index, first_token)
            elif warp_index == do_gatherer:
                self.gather(do_atom, mdO, shared.outputs, shared, edges, window_index, first_token)
            else:
                self.copy_rows(rows, marks, shared, edges, window_index, first_token)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(dq_atom, mdQ, shared, sums, Int32(marks.shape[2]), scale, scale_log2, warp_index)

    @cute.jit
    def allocate(self, memory: SmemAllocator):
        """Shared memory, with barriers ready for use on return."""
        shape = (ROWS, self.block_size, self.head_dim)
        block = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.element, 1)
        ring = self.rows.tiles_layout(STAGES)
        layouts = {
            **{"keys": block, "values": block, "queries": ring, "outputs": ring},
            "tiles": self.partials.tiles_layout(3 * self.consumers),
            **by_rows(self.cta, "tasks", "edges"),
        }
        found = make_buffers(self.cta, memory, layouts)
        barriers = make_barriers(self.cta, memory, ())
        return Shared(**found, **barriers_of(self.cta, barriers))

    @cute.jit
    def claim(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, v_atom: cute.CopyAtom, mV: cute.Tensor, shared: Shared,
        tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, window_index: Int32,
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
            cute.arch.mbarrier_wait(shared.task_gathered_full, parity ^ 1)
            claim = next_claim(claim, claims, counts, window_index, heads, lambda head: head)
            head = claim.head
            row = Int32(0)
            if head < heads:
                task = tasks[window_index, head, claim.place, None]
                row = task[0]
                if lane == 0:
                    shared.tasks[parity, 0] = task[1]
                    shared.tasks[parity, 1] = task[2]
                    shared.tasks[parity, 2] = head
                    shared.tasks[parity, 3] = task[3]
                    shared.tasks[parity, 4] = task[4]
                    shared.tasks[parity, 5] = Int32(task[4] == row)
            else:
                running = Int32(0)
                if lane == 0:
                    shared.tasks[parity, 1] = Int32(-1)
            if lane == 0:
                cute.arch.mbarrier_arrive(shared.task_full + parity)
            if running > 0:
                cute.arch.mbarrier_wait(shared.v_free, parity ^ 1)
                self.blocks.load(v_atom, mV, row, [], head, v_boxes, shared.v_full)
                cute.arch.mbarrier_wait(shared.k_free, parity ^ 1)
                self.blocks.load(k_atom, mK, row, [], head, k_boxes, shared.k_full)
            turn = turn + 1

    @cute.jit
    def gather(
        self, atom: cute.CopyAtom, source: cute.Tensor, ring: cute.Tensor, shared: Shared, edges: cute.Tensor,
        window_index: Int32, first_token: Int32,
    ):  # fmt: skip
        """A gathering warp: the rows of Q or dO of every tile of each task, as fast as the ring takes them."""
        lane = cute.arch.lane_idx()
        cpasync.prefetch_descriptor(atom)
        if cutlass.const_expr(self.group < self.rows.rows_per_token):
            self.clear_ring(ring)
        boxes = self.rows.boxes(ring, STAGES)
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
                of_head = edges[window_index, head, None]
                # Lane i holds the edge of the tile's i-th query, or the last one; it is read one tile ahead of need.
                mine = lane % self.queries
                edge = of_head[first_edge + cutlass.min(mine, num - 1)]
                for _ in cutlass.range(self.tiles_of(num), unroll=1):
                    current = edge
                    mine = mine + self.queries
                    edge = of_head[first_edge + cutlass.min(mine, num - 1)]
                    cute.arch.mbarrier_wait(shared.ring_free + slot, phase)
                    full = shared.ring_full + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.queries * self.rows.token_bytes)
                    for r in cutlass.range_constexpr(self.queries):
                        token = first_token + query_of(cute.arch.shuffle_sync(current, r))
                        target = boxes[None, None, None, None, None, r, slot]
                        self.rows.load(atom, source, token, head, target, full)
                    slot, phase = following(slot, phase, STAGES)
                arrive(shared.task_gathered_full)
            turn = turn + 1

    @cute.jit
    def clear_ring(self, ring: cute.Tensor):
        """Zero the ring: no box ever reaches the rows past `group`, and what they hold is multiplied."""
        words = STAGES * ROWS * self.head_dim * self.element.width // 64
        plain = cute.make_tensor(cute.recast_ptr(ring.iterator, dtype=Int64), cute.make_layout(words))
        for word in cutlass.range(cute.arch.lane_idx(), words, WARP, unroll=1):
            plain[word] = Int64(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    @cute.jit
    def copy_rows(
        self, rows: cute.Tensor, marks: cute.Tensor, shared: Shared, edges: cute.Tensor, window_index: Int32,
        first_token: Int32,
    ):  # fmt: skip
        """The warp that copies what consumers need to know of every row, two rows a lane."""
        lane = cute.arch.lane_idx()
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
                of_head = edges[window_index, head, None]
                # Edges are read two tiles ahead of need, rows one.
                place = lane
                edge = self.edge_at(of_head, first_edge, place, num)
                place = place + self.queries
                later = self.edge_at(of_head, first_edge, place, num)
                upper_lse, upper_delta = self.row_at(rows, edge, 0, first_token, head)
                lower_lse, lower_delta = self.row_at(rows, edge, 1, first_token, head)
                for _ in cutlass.range(self.tiles_of(num), unroll=1):
                    current = edge
                    lses, deltas = (upper_lse, lower_lse), (upper_delta, lower_delta)
                    edge = later
                    place = place + self.queries
                    later = self.edge_at(of_head, first_edge, place, num)
                    upper_lse, upper_delta = self.row_at(rows, edge, 0, first_token, head)
                    lower_lse, lower_delta = self.row_at(rows, edge, 1, first_token, head)
                    cute.arch.mbarrier_wait(shared.ring_free + slot, phase)
                    for half in cutlass.range_constexpr(2):
                        row = lane + WARP * half
                        shared.lse[row % 2, row // 2 % 4, row // 8, slot] = lses[half]
                        shared.delta[row % 2, row // 2 % 4, row // 8, slot] = deltas[half]
                    if lane < self.queries:
                        shared.edges[slot, lane] = current
                        if current >= 0:
                            marks[query_of(current), head, slot_of(current)] = window_index + 1
                    arrive(shared.ring_full + slot)
                    slot, phase = following(slot, phase, STAGES)
                arrive(shared.task_gathered_full)
            turn = turn + 1

    @cute.jit
    def edge_at(self, edges: cute.Tensor, first_edge: Int32, place: Int32, num: Int32) -> Int32:
        """The edge of a lane that has one in this tile."""
        edge = Int32(MISSING)
        if (cute.arch.lane_idx() < self.queries) & (place < num):
            edge = edges[first_edge + place]
        return edge

    @cute.jit
    def row_at(self, rows: cute.Tensor, edges: Int32, half: cutlass.Constexpr, first_token: Int32, head: Int32):
        """LSE and delta of row `lane` + 32 `half` of the tile whose edges the lanes hold."""
        row = cute.arch.lane_idx() + WARP * half
        edge = cute.arch.shuffle_sync(edges, row // self.rows.rows_per_token)
        member = row % self.rows.rows_per_token
        lse = Float32.inf
        delta = Float32(0.0)
        if (edge >= 0) & (member < self.group):
            found = rows[first_token + query_of(edge), head * self.group + member, None]
            lse = found[0]
            delta = found[1]
        return lse, delta

    def tiles_of(self, num):
        """How many tiles a task of `num` edges has."""
        return (num + self.queries - 1) // self.queries

    @cute.jit
    def consume(
        self, dq_atom: cute.CopyAtom, mdQ: cute.Tensor, shared: Shared, sums: cute.Tensor, topk: Int32,
        scale: Float32, scale_log2: Float32, warp_index: Int32,
    ):  # fmt: skip
        """A warp of a consumer."""
        cpasync.prefetch_descriptor(dq_atom)
        # Uniform in a warp, as what addresses its stores must be.
        member = warp_index % WARPS
        consumer = warp_index // WARPS
        lane = cute.arch.lane_idx()
        tile = self.prepare(dq_atom, mdQ, shared, topk, scale, scale_log2, consumer, member, lane)
        first_key = warp_index * WARP_ROWS + lane // 4
        # The slot of the next tile and its phase; how many tiles have been; the edges of the last one's rows.
        slot = Int32(0)
        phase = Int32(0)
        number = Int32(0)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            num = shared.tasks[parity, 1]
            if num < 0:
                running = Int32(0)
            else:
                head = shared.tasks[parity, 2]
                extent = shared.tasks[parity, 3]
                first_row = shared.tasks[parity, 4]
                known = shared.tasks[parity, 5] * valid_rows_of(extent)
                key_sums, value_sums = (
                    cute.domain_offset((first_row, 0), sums[side, head, None, None]) for side in range(2)
                )
                gradients.load_sums(key_sums, first_key, known, tile.dK)
                gradients.load_sums(value_sums, first_key, known, tile.dV)
                cute.arch.mbarrier_wait(shared.v_full, parity)
                cute.arch.mbarrier_wait(shared.k_full, parity)
                if valid_rows_of(extent) < self.block_size:
                    # Rows past the request's end may hold NaN, and 0 * NaN would reach dQ and dK.
                    # From the first key, which a consumer has at hand: `member` would be one register too many.
                    thread = first_key % KEYS // WARP_ROWS * WARP + lane
                    self.blocks.clear_rows(shared.keys, valid_rows_of(extent), thread, GROUP)
                    self.blocks.clear_rows(shared.values, valid_rows_of(extent), thread, GROUP)
                    cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=GROUP)
                # Before the first tile there is none that has edges: what is made for its dQ goes nowhere.
                upper, lower = Int32(MISSING), Int32(MISSING)
                for _ in cutlass.range(self.tiles_of(num), unroll=1):
                    upper, lower, slot, phase = self.step(
                        shared, tile, head, is_cut(extent), first_key, number, slot, phase, upper, lower
                    )
                    number = number + 1
                arrive(shared.v_free)
                self.finish(shared, tile, head, number - 1, upper, lower)
                gradients.store_sums(tile.dK, key_sums, first_key, valid_rows_of(extent))
                gradients.store_sums(tile.dV, value_sums, first_key, valid_rows_of(extent))
            turn = turn + 1
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def prepare(
        self, dq_atom: cute.CopyAtom, mdQ: cute.Tensor, shared: Shared, topk: Int32, scale: Float32,
        scale_log2: Float32, consumer: Int32, member: Int32, lane: Int32,
    ):  # fmt: skip
        """What does not change from tile to tile."""
        shared_memory, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        score = wgmma.product(self.element, ROWS, OperandMajorMode.K, shared_memory)
        weigh = wgmma.product(self.element, self.head_dim, OperandMajorMode.MN, registers)
        spread = gradients.transposed_product(self.element, tma.PANEL)
        thread = member * WARP + lane
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element)
        writing = cute.make_tiled_copy_C(stmatrix, score[0]).get_slice(thread)
        keys, values = (
            cute.local_tile(block[None, None, 0], (KEYS, self.head_dim), (None, 0))
            for block in (shared.keys, shared.values)
        )
        by_row = [gradients.transposed(x, self.head_dim, ROWS, STAGES) for x in (shared.queries, shared.outputs)]
        by_key = gradients.transposed(shared.keys, self.head_dim, self.block_size, 1, panels_apart=True)
        return Tile(
            score,
            (weigh[1], weigh[1]),
            spread,
            wgmma.operand_a(score, keys)[None, None, None, consumer],
            wgmma.operand_a(score, values)[None, None, None, consumer],
            wgmma.operand_b(score, shared.queries),
            wgmma.operand_b(score, shared.outputs),
            wgmma.operand_b(weigh, by_row[0]),
            wgmma.operand_b(weigh, by_row[1]),
            wgmma.operand_a(spread, gradients.transposed(shared.tiles, ROWS, self.block_size, 2)),
            wgmma.operand_b(spread, cute.local_tile(by_key[None, None, 0], (tma.PANEL, self.block_size), (None, 0))),
            wgmma.accumulator(score, ROWS),
            wgmma.accumulator(score, ROWS),
            *(cute.make_rmem_tensor(weigh[0].partition_shape_A((KEYS, ROWS)), self.element) for _ in range(2)),
            wgmma.accumulator(spread, tma.PANEL),
            wgmma.accumulator(weigh, self.head_dim),
            wgmma.accumulator(weigh, self.head_dim),
            writing,
            writing.partition_D(shared.tiles),
            self.partials.boxes(shared.tiles, 3 * self.consumers),
            dq_atom,
            mdQ,
            topk,
            scale,
            scale_log2,
            consumer,
            member,
            lane,
        )

    @cute.jit
    def step(
        self, shared: Shared, tile: Tile, head: Int32, cut: Int32, first_key: Int32, number: Int32, slot: Int32,
        phase: Int32, upper: Int32, lower: Int32,
    ):  # fmt: skip
        """One tile, and dQ of the one before, which has the edges `upper` and `lower`."""
        cute.arch.mbarrier_wait(shared.ring_full + slot, phase)
        wgmma.multiply(tile.score, tile.S, tile.keys, tile.queries[None, None, None, slot])
        wgmma.multiply(tile.score, tile.dP, tile.values, tile.outputs[None, None, None, slot])
        edges = shared.edges[slot, None]
        weights, gains = cute.recast_tensor(tile.P, Int32), cute.recast_tensor(tile.dS, Int32)
        row_lse = cute.make_rmem_tensor((2, ROWS // 8), Float32)
        cute.autovec_copy(shared.lse[None, tile.lane % 4, None, slot], row_lse)
        warpgroup.wait_group(1)
        if cut != 0:
            rooms = [last_column_of(edges[8 * j // self.rows.rows_per_token]) - first_key for j in range(ROWS // 8)]
            gradients.probabilities(tile.S, weights, row_lse, tile.scale_log2, rooms)
        else:
            gradients.probabilities(tile.S, weights, row_lse, tile.scale_log2, None)
        wgmma.multiply(tile.weigh, tile.dV, tile.P, tile.transposed_outputs[None, None, None, slot])
        row_delta = cute.make_rmem_tensor((2, ROWS // 8), Float32)
        cute.autovec_copy(shared.delta[None, tile.lane % 4, None, slot], row_delta)
        warpgroup.wait_group(1)
        gradients.score_gradients(weights, tile.dP, row_delta, gains)
        self.spread(shared, tile, number - 1, 0)
        wgmma.multiply(tile.weigh, tile.dK, tile.dS, tile.transposed_queries[None, None, None, slot])
        buffer = number & 1
        self.write(tile, cute.make_tensor(tile.dS.iterator, tile.S.layout), buffer)
        new_upper, new_lower = self.edges_of(edges, tile.member)
        warpgroup.wait_group(1)
        if cutlass.const_expr(self.parts == 1):
            arrive(shared.scores_full + buffer)
            self.emit(shared, tile, head, number - 1, upper, lower)
        else:
            self.emit(shared, tile, head, number - 1, upper, lower)
            arrive(shared.scores_full + buffer)
        warpgroup.wait_group(0)
        arrive(shared.ring_free + slot)
        slot, phase = following(slot, phase, STAGES)
        return new_upper, new_lower, slot, phase

    @cute.jit
    def write(self, tile: Tile, rounded: cute.Tensor, which: Int32):
        """A tile of this consumer -> its dS of buffer `which`, or its dQ (2), for TMA or wgmma to read."""
        target = tile.written[None, None, None, which * self.consumers + tile.consumer]
        cute.copy(tile.writing, tile.writing.retile(rounded), target)
        cute.arch.fence_view_async_shared()

    def edges_of(self, edges, member):
        """The edges of the first and of the last row of a warp: the same one with a group of 16."""
        of_warp = WARP_ROWS // self.rows.rows_per_token
        return edges[member * of_warp], edges[member * of_warp + of_warp - 1]

    @cute.jit
    def spread(self, shared: Shared, tile: Tile, number: Int32, part: cutlass.Constexpr):
        """Start dQ of a tile, for a part of this consumer's columns."""
        buffer = number & 1
        if cutlass.const_expr(part == 0):
            cute.arch.mbarrier_wait(shared.scores_full + buffer, (number >> 1) & 1)
        panel = tile.consumer * self.parts + part
        if cutlass.const_expr(self.in_turns):
            panel = Int32(0)
        scores = tile.transposed_scores[None, None, None, buffer]
        wgmma.multiply(tile.spread, tile.dQ, scores, tile.transposed_keys[None, None, None, panel])

    @cute.jit
    def finish(self, shared: Shared, tile: Tile, head: Int32, number: Int32, upper: Int32, lower: Int32):
        """dQ of a task's last tile."""
        self.spread(shared, tile, number, 0)
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.parts == 1):
            arrive(shared.k_free)
            self.emit(shared, tile, head, number, upper, lower)
        else:
            self.emit(shared, tile, head, number, upper, lower)
            arrive(shared.k_free)

    @cute.jit
    def emit(self, shared: Shared, tile: Tile, head: Int32, number: Int32, upper: Int32, lower: Int32):
        """Round dQ of a tile, stage it and send it on its way; then the consumer's other parts."""
        edges = [upper, lower]
        of_warp = WARP_ROWS // self.rows.rows_per_token
        for part in cutlass.range_constexpr(self.parts):
            if cutlass.const_expr(part > 0):
                self.spread(shared, tile, number, part)
                warpgroup.wait_group(0)
            scaled = cute.make_rmem_tensor(tile.dQ.layout, Float32)
            for i in cutlass.range_constexpr(cute.size(tile.dQ)):
                scaled[i] = tile.dQ[i] * tile.scale
            rounded = cute.make_rmem_tensor(tile.dQ.layout, self.element)
            rounded.store(scaled.load().to(self.element))
            # What was staged last has been read once this returns.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.write(tile, rounded, 2)
            cute.arch.sync_warp()
            panel = tile.consumer * self.parts + part
            mine = Int32(1)
            if cutlass.const_expr(self.in_turns):
                panel = Int32(0)
                mine = Int32((number & 1) == tile.consumer)
            for r in cutlass.range_constexpr(of_warp):
                if (edges[r] >= 0) & (mine > 0):
                    source = tile.boxes[
                        None, None, None, None, tile.member * of_warp + r, 2 * self.consumers + tile.consumer
                    ]
                    slot = query_of(edges[r]) * tile.topk + slot_of(edges[r])
                    self.partials.store_panel(tile.atom, source, tile.partials, slot, head, panel)
            cute.arch.cp_async_bulk_commit_group()
