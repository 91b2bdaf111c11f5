"""The query side of hybrid attention: the blocks that neighbouring queries share, then the merge of the other results.

Grid: persistent CTAs, two a SM, which take the window's tiles in turn, head after head. A tile is 64 rows: neighbouring
queries, each with its `group` heads in the first of rows_per_token rows (see msa_tiles.dsl.cutedsl.gather). Rows past
`group` hold stale data and are never stored.

Launched while the kernel before ends (programmatic dependent launch). That is the window's sparse_attention, which
itself began when everything before it was there: only its partial results are waited for, by each role before it first
reads them, and nothing is written before. Q, keys and values of a CTA's first tile are on their way meanwhile.

The fields of the `shared` words are those that the split_selection kernel documents.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import softmax, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import EVICT_FIRST, Rows
from msa_tiles.dsl.cutedsl.gradients import HIGH
from msa_tiles.dsl.cutedsl.hidden import clean_column, unbounded_pair
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.operands import plain as key_value  # <- operands.key_value
from msa_tiles.dsl.cutedsl.pipeline import arrive, following
from msa_tiles.dsl.cutedsl.running import running_softmax
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.warp import ballot, count_bits
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Pipeline, Role, Table, buffer, declares, lane, warps
from msa_tiles.dsl.words import CUT, VALID_SHIFT

OUTPUT = "bfloat16"  # <- precision.output
STAGES = 3  # <- tile.stages
PRODUCER_REGISTERS = 48  # <- tile.producer_registers
CONSUMER_REGISTERS = 208  # <- tile.consumer_registers
CTAS_PER_SM = 2
TILES = 4
AHEAD = 4  # LSE that a lane reads at a time, of each of its rows
WARPS = 4  # of the consumer warpgroup
DECODERS = 3  # warps beside the producer's
WARP_ROWS = 16  # of a tile
TILE_ROWS = 64
LEAST_ROWS = 8  # of a query in a tile
MEETING, DECODERS_MEETING = 1, 2  # named barriers
VALID_MASK = 255
PARITY_SHIFT = 16  # of a tile's first fact
SUSPECT = -(1 << 31)  # in a word: look for what a query may not see
NO_TURN = 1 << 30
LOG2_E = 1.4426950408889634


def shared_attention(
    head_dim: int,
    block_size: int,
    group: int,
    pages_per_block: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or [pages, num_kv_heads, page,
    head_dim] with pages_per_block > 0 and page_table [requests, max_pages]; shared, shared_counts, rest_counts and
    last_rows as split_selection writes them; partial_out [window, topk, num_q_heads, head_dim] and partial_lse
    [window, topk, num_q_heads] (natural logarithm) of the window's rest, of which a query's first rest_counts slots
    are read, and none with LSE -inf -> out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads], the rows
    of the window. A row that sees nothing gets out 0 and lse -inf. scale_log2 is the softmax scale times log2(e). A
    window begins at a multiple of the queries of a tile.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SharedAttention(
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
    queries = TILE_ROWS // max(group, LEAST_ROWS)
    element = key_value.in_ring("k", **scales)
    arriving = key_value.query_parts(TILE_ROWS, producer="producer", decoder="decoder", readers="consumer", **scales)
    ring = key_value.ring_parts(STAGES, producer="producer", decoder="decoder", readers="consumer", **scales)
    return Table(
        roles=(
            Role(
                "consumer", WARPS,
                "S = Q K^T, running softmax and O += P V for every shared block; then O += weight * partial for every "
                "slot of the rest, and the store of the rows", CONSUMER_REGISTERS,
            ),
            Role(
                "producer", 1,
                "reads what a tile consists of, loads its Q, K and V of each shared block, then partial results",
                PRODUCER_REGISTERS,
            ),
            Role("decoder", DECODERS, "makes what the products read of stored K and V; else idle", PRODUCER_REGISTERS),
        ),
        pipelines=(
            Pipeline("tile", TILES, (lane("producer"),)),
            *arriving.pipelines,
            *ring.pipelines,
            Pipeline("done", 1, (warps("consumer"),)),
        ),
        buffers=(
            buffer(
                "queries", OUTPUT, align=1024, note="laid out as msa_tiles.dsl.cutedsl.gather says",
                rows=TILE_ROWS, head_dim=head_dim,
            ),
            buffer(
                "ring", element, align=1024, note="swizzled by 128 bytes, in panels of 64 columns",
                block_size=block_size, head_dim=head_dim, stages=STAGES,
            ),
            buffer(
                "tiles", "int32", facts=2 + 2 * queries, tiles=TILES,
                note="shared blocks and parity of Q, most slots, slots of each query, last row of each query",
            ),
            buffer("tainted", "uint8", head_dim=head_dim, note="the queries that see a value there that was taken out"),
            buffer("again", "int32", warps=WARPS, note="the first turn to be taken once more"),
            buffer("words", "int32", align=8, words=2, stages=STAGES, note="of the block whose K a stage holds"),
            *arriving.buffers,
        ),
    )  # fmt: skip


class Shared(NamedTuple):
    """What the CTA keeps in shared memory; the barriers are pointers to the first of each kind."""

    queries: Any
    keys: Any  # the ring as blocks of keys
    values: Any  # the ring as blocks of values
    parts: Any  # the ring as tiles of partial results
    tiles: Any
    words: Any
    tainted: Any
    again: Any
    query_powers: Any  # None where queries are read as they come
    tile_full: Any
    q_landing: Any  # where queries are awaited first
    q_full: Any
    q_free: Any
    landing: Any  # of the ring, where bytes are awaited
    full: Any
    free: Any
    done: Any


class Work(NamedTuple):
    """What the window's tiles are made of."""

    shared: Any
    shared_counts: Any
    rest_counts: Any
    last_rows: Any
    partial_lse: Any
    window_index: Any
    num_ctas: Any


class Tile(NamedTuple):
    """What a consumer warp works with: atoms, operands in shared memory, registers, and where results go."""

    score: Any  # S = queries x keys
    weigh: Any  # O += P x values
    queries: Any
    keys: Any
    values: Any
    S: Any
    P: Any
    O: Any
    row_max: Any
    row_sum: Any  # the lane's share while there are blocks, then the row's
    reading: Any
    partials: Any
    staging: Any
    staged_rows: Any
    boxes: Any
    out_atom: Any
    out: Any
    lse: Any
    member: Any  # this warp among those of its warpgroup
    lane: Any


class SharedAttention:
    """
    # <- cta

    Tiles need no counterpart: a tile takes a stage of the ring at least and TILES is more than STAGES, so that the
    producer never overwrites what is still to be read. `done` says that a warp has been through all tiles.

    A stage of the ring holds K of a block, then the next one its V, in panels of 64 columns. Behind the blocks come
    partial results, block_size // 64 slots of all rows a stage, laid out as msa_tiles.dsl.cutedsl.gather says: the rows
    of a query with fewer slots are not loaded, and stay out of the sum. Every tile ends with at least one such stage,
    in which its rows are staged on their way out; it is free once the next tile's first product is under way. A warp
    has the same 16 rows in S, O, the partial results and the stores, so what it stages needs no barrier with others.

    # <- InRing of operands.key_value

    The next block's S is issued behind the current P V, so that one wait covers both. While a tile is merged its Q is
    free, so that the next tile is on its way: the memory never waits for a tile to end, and while one CTA of a SM
    merges the other one multiplies.

    The maximum of a row starts as the largest LSE of its slots, so that the merge never rescales O.

    A warp is excused from what its queries have no part in: the softmax of a block that none of them selects, a slot
    that none of them has. Masks are for warps whose queries differ or see a block in part.

    Infinite and NaN values of a block reach queries that do not see their rows, as 0 times infinity or NaN, and leave
    all rows of a tile so in their column. Nobody looks for them beforehand: a warp that finds such a number in its
    first rows at the end of a tile notes the turn, and the CTA goes through its tiles once more from the first turn
    that was noted. There the producer marks blocks that some query sees in part or not at all; such values are
    taken out of them, and queries that do see one get NaN in its column.
    """

    def __init__(self, head_dim, block_size, group, pages_per_block, **scales):
        self.cta = cta(head_dim, block_size, group, pages_per_block, **scales)
        self.keys, self.values = (
            key_value.InRing(name, self.cta, head_dim, block_size, pages_per_block, **scales) for name in "kv"
        )
        self.element = self.keys.element  # of Q K^T
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.rows = Rows(ELEMENTS[OUTPUT], head_dim, group)
        self.blocks = Blocks(self.values.element, head_dim, block_size, pages_per_block)
        self.queries = self.rows.tokens
        self.parts = block_size // ROWS  # slots of partial results in a stage

    def arguments(self):
        """Stand-ins for cute.compile: tensors, 3 scalars and the stream."""
        total_q, q_heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        tiles, window, topk = cute.sym_int(), cute.sym_int(), cute.sym_int()

        return (
            stand_in(ELEMENTS[OUTPUT], total_q, q_heads, self.head_dim, align=tma.BYTES),
            *self.keys.arguments(kv_heads),
            *self.values.arguments(kv_heads),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, kv_heads, tiles, cute.sym_int(), 2),
            stand_in(Int32, kv_heads, tiles),
            stand_in(Int32, kv_heads, total_q),
            stand_in(Int32, total_q),
            stand_in(ELEMENTS[OUTPUT], window, topk, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, window, topk, q_heads),
            stand_in(ELEMENTS[OUTPUT], total_q, q_heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, total_q, q_heads, last=cute.sym_int64()),
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
        shared: cute.Tensor,
        shared_counts: cute.Tensor,
        rest_counts: cute.Tensor,
        last_rows: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale_log2: Float32,
        window_index: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launch, as early as the kernel before allows. With flat keys any table will do."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        keys = self.keys.stored(
            k,  # <- tensors of operands.key_value
        )
        values = self.values.stored(
            v,  # <- tensors of operands.key_value
        )
        q_atom, mQ = self.rows.atom(load, self.rows.described(q))
        # [window * topk, heads, dim]: TMA has no dimension to spare for the slots.
        window, topk, heads, dim = partial_out.shape
        flat = cute.make_layout((window * topk, heads, dim), stride=(Int64(heads) * dim, dim, 1))
        part_atom, mP = self.rows.atom(load, self.rows.described(cute.make_tensor(partial_out.iterator, flat)))
        out_atom, mO = self.rows.atom(cpasync.CopyBulkTensorTileS2GOp(), self.rows.described(out))
        self.kernel(
            q_atom, mQ, keys, values, part_atom, mP, out_atom, mO, page_table, shared, shared_counts, rest_counts,
            last_rows, partial_lse, lse, scale_log2, window_index, num_ctas,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.cta.threads, 1, 1),
            min_blocks_per_mp=CTAS_PER_SM,
            # All of it, for two CTAs; unsaid, the compiler asks the GPU present how much there is.
            preferred_smem_carveout=100,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k: tuple, v: tuple, part_atom: cute.CopyAtom, mP: cute.Tensor,
        out_atom: cute.CopyAtom, mO: cute.Tensor, page_table: cute.Tensor, shared: cute.Tensor,
        shared_counts: cute.Tensor, rest_counts: cute.Tensor, last_rows: cute.Tensor, partial_lse: cute.Tensor,
        lse: cute.Tensor, scale_log2: Float32, window_index: Int32, num_ctas: Int32,
    ):  # fmt: skip
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        atoms = (q_atom, part_atom, out_atom, *self.keys.atoms(k), *self.values.atoms(v))
        memory = self.allocate(SmemAllocator(), atoms)
        work = Work(shared, shared_counts, rest_counts, last_rows, partial_lse, window_index, num_ctas)
        producer, decoder = self.cta.first_warp("producer"), self.cta.first_warp("decoder")
        if warp_index >= producer:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index < decoder:
                self.produce(q_atom, mQ, k, v, part_atom, mP, page_table, memory, work)
            elif cutlass.const_expr(self.keys.decoded):
                self.decode(memory, work, warp_index - decoder)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(k, v, out_atom, mO, memory, work, lse, scale_log2, warp_index)

    @cute.jit
    def allocate(self, memory: SmemAllocator, atoms: tuple):
        """Shared memory, with barriers ready for use on return."""
        k_tiler = (ROWS, self.block_size, self.head_dim)
        v_tiler = (ROWS, self.head_dim, self.block_size)
        k_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, k_tiler, self.element, STAGES)
        v_layout = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, v_tiler, self.values.element, STAGES)
        facts = 2 + 2 * self.queries
        layouts = {
            "queries": self.rows.tiles_layout(1),
            "ring": k_layout,
            "tiles": cute.make_layout((TILES, facts), stride=(facts, 1)),
            "words": cute.make_layout((STAGES, 2), stride=(2, 1)),
        }
        found = make_buffers(self.cta, memory, layouts)
        keys = found["ring"]
        p_layout = self.rows.tiles_layout(STAGES * self.parts)
        values, parts = (
            cute.make_tensor(cute.recast_ptr(keys.iterator, layout.inner, dtype=element), layout.outer)
            for layout, element in ((v_layout, self.values.element), (p_layout, ELEMENTS[OUTPUT]))
        )
        thread, _, _ = cute.arch.thread_idx()
        if thread < self.head_dim:
            found["tainted"][thread] = Uint8(0)
        if thread < WARPS:
            found["again"][thread] = Int32(NO_TURN)
        barriers = make_barriers(self.cta, memory, atoms)
        names = (
            "tile_full", self.keys.Q_LANDING, "q_full", "q_free",
            self.keys.LANDING, "ring_full", "ring_free", "done_full",
        )  # fmt: skip
        return Shared(
            found["queries"], keys, values, parts, found["tiles"], found["words"], found["tainted"], found["again"],
            found.get("query_powers"), *(barriers + self.cta.place(name) for name in names),
        )  # fmt: skip

    @cute.jit
    def find(self, work: Work, turn: Int32):
        """Head, first token and number among all tiles of the CTA's tile, and the window's first and last token."""
        total_q = Int32(work.rest_counts.shape[1])
        first, last = self.window(work)
        tiles = (last - first + self.queries - 1) // self.queries
        index, _, _ = cute.arch.block_idx()
        index = index + turn * work.num_ctas
        head = index // tiles
        place = index - head * tiles
        return head, first + place * self.queries, first // self.queries + place, first, cutlass.min(last, total_q)

    def window(self, work):
        """The window's first token and the one behind its last."""
        # The window of the partial results may be longer than what is left of the queries.
        window = Int32(work.partial_lse.shape[0])
        first = work.window_index * window
        return first, cutlass.min(first + window, Int32(work.rest_counts.shape[1]))

    @cute.jit
    def takes(self, work: Work, turn: Int32):
        """Whether the CTA has a tile in this turn."""
        first, last = self.window(work)
        tiles = (last - first + self.queries - 1) // self.queries * Int32(work.rest_counts.shape[0])
        index, _, _ = cute.arch.block_idx()
        return index + turn * work.num_ctas < tiles

    @cute.jit
    def repeated(self, shared: Shared, turns: Int32) -> Int32:
        """How many of the turns are to be taken once more, the last ones."""
        cute.arch.mbarrier_wait(shared.done, 0)
        first = shared.again[0]
        for member in cutlass.range_constexpr(1, WARPS):
            first = cutlass.min(first, shared.again[member])
        return cutlass.max(turns - first, 0)

    @cute.jit
    def load_rows(
        self, atom: cute.CopyAtom, source: cute.Tensor, token: Int32, head: Int32, target: cute.Tensor,
        full: cute.Pointer,
    ):  # fmt: skip
        """As Rows.load, for what nobody reads again."""
        for box in cutlass.range_constexpr(self.rows.boxes_per_token):
            to, come_from = self.rows.partition(atom, source, token, head, box, target)
            cute.copy(atom, come_from, to, tma_bar_ptr=full, cache_policy=Int64(EVICT_FIRST))

    @cute.jit
    def page_of_lane(self, page_table: cute.Tensor, row: Int32, lane: Int32) -> Int32:
        """Lane i holds the i-th page of the block that begins at a virtual row, as in Blocks.pages."""
        page = Int32(0)
        if cutlass.const_expr(self.blocks.pages_per_block > 0):
            columns = Int32(page_table.shape[1])
            request = row // (columns * self.block_size)
            entry = row % (columns * self.block_size) // self.blocks.box_rows
            if lane < self.blocks.pages_per_block:
                page = page_table[request, cutlass.min(entry + lane, columns - 1)]
        return page

    @cute.jit
    def load_block(
        self, operand: cutlass.Constexpr, stored: tuple, row: Int32, page: Int32, head: Int32, shared: Shared,
        boxes: cute.Tensor, stage: Int32,
    ):  # fmt: skip
        """As Blocks.load, with one page a lane: eight of them would be registers that the producer does not have."""
        blocks, keys, full = operand.blocks, stored.rows, shared.landing + stage
        boxes = boxes[None, None, None, None, stage]
        if cutlass.const_expr(blocks.pages_per_block == 0):
            blocks.load(stored.atom, keys, row, [], head, boxes, full)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, blocks.block_bytes)
            for p in cutlass.range_constexpr(blocks.pages_per_block):
                of_page = keys[None, None, head, cute.arch.shuffle_sync(page, p)]
                # % if not declared.key_value.get("GROUP")
                for panel in cutlass.range_constexpr(self.head_dim // blocks.panel):
                    tma.load_box(stored.atom, of_page, Int32(0), panel, boxes[None, None, p, panel], full)
                # % else
                tma.load_box(stored.atom, of_page, Int32(0), 0, boxes[None, None, p, 0], full)
                # % endif
        operand.load_scales(stored, row, page, head, self.tile_of(shared, stage), full)

    def tile_of(self, shared, stage):
        """Where a stage of the ring begins."""
        return shared.keys.iterator + stage * (self.block_size * self.head_dim)

    @cute.jit
    def produce(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k: tuple, v: tuple, part_atom: cute.CopyAtom, mP: cute.Tensor,
        page_table: cute.Tensor, shared: Shared, work: Work,
    ):  # fmt: skip
        """The producer warp: one tile after the other, as fast as the ring takes them."""
        lane = cute.arch.lane_idx()
        k_boxes, v_boxes = self.keys.boxes(shared.keys, STAGES), self.values.boxes(shared.keys, STAGES)
        parts = self.rows.boxes(shared.parts, STAGES * self.parts)
        queries = self.rows.boxes(shared.queries, 1)
        topk = Int32(work.partial_lse.shape[1])
        stage = Int32(0)
        phase = Int32(1)
        q_phase = Int32(1)
        turn = Int32(0)
        # Not 0 once the tiles of that many turns are taken again.
        back = Int32(0)
        running = self.takes(work, turn)
        while running:
            head, token, place, first, last = self.find(work, turn - back)
            num = work.shared_counts[head, place]
            # A lane stands for a query; those past the tile's or the window's last one have no slots.
            slots = Int32(0)
            if (lane < self.queries) & (token + lane < last):
                slots = work.rest_counts[head, token + lane]
            most = cutlass.max(Int32(cute.arch.warp_redux_sync(slots, "max")), 1)
            entry = turn % TILES
            if lane == 0:
                shared.tiles[entry, 0] = num | (q_phase ^ 1) << PARITY_SHIFT
                shared.tiles[entry, 1] = most
            if lane < self.queries:
                shared.tiles[entry, 2 + lane] = slots
                shared.tiles[entry, 2 + self.queries + lane] = work.last_rows[cutlass.min(token + lane, last - 1)]
            arrive(shared.tile_full + entry)
            if num > 0:
                cute.arch.mbarrier_wait(shared.q_free, q_phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.q_landing, self.queries * self.rows.token_bytes)
                for r in cutlass.range_constexpr(self.queries):
                    target = queries[None, None, None, None, None, r, 0]
                    self.load_rows(q_atom, mQ, cutlass.min(token + r, last - 1), head, target, shared.q_landing)
                q_phase = q_phase ^ 1
            for u in cutlass.range(num, unroll=1):
                row = work.shared[head, place, u, 0]
                word = work.shared[head, place, u, 1]
                if (back > 0) & ((word & CUT) != 0):
                    word = word | SUSPECT
                page = self.page_of_lane(page_table, row, lane)
                cute.arch.mbarrier_wait(shared.free + stage, phase)
                if lane == 0:
                    shared.words[stage, 0] = row
                    shared.words[stage, 1] = word
                cute.arch.sync_warp()
                self.load_block(self.keys, k, row, page, head, shared, k_boxes, stage)
                stage, phase = following(stage, phase, STAGES)
                cute.arch.mbarrier_wait(shared.free + stage, phase)
                self.load_block(self.values, v, row, page, head, shared, v_boxes, stage)
                stage, phase = following(stage, phase, STAGES)
            if turn == 0:
                cute.arch.griddepcontrol_wait()
            for m in cutlass.range((most + self.parts - 1) // self.parts, unroll=1):
                present = [ballot(m * self.parts + part < slots) for part in range(self.parts)]
                rows = count_bits(present[0])
                if cutlass.const_expr(self.parts > 1):
                    rows = rows + count_bits(present[1])
                cute.arch.mbarrier_wait(shared.free + stage, phase)
                landing = shared.landing + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(landing, rows * self.rows.token_bytes)
                self.keys.skip_scales(landing)
                for part in cutlass.range_constexpr(self.parts):
                    for r in cutlass.range_constexpr(self.queries):
                        if (present[part] >> r) & 1 != 0:
                            target = parts[None, None, None, None, None, r, stage * self.parts + part]
                            source = (token - first + r) * topk + m * self.parts + part
                            self.load_rows(part_atom, mP, source, head, target, landing)
                stage, phase = following(stage, phase, STAGES)
            turn = turn + 1
            running = self.takes(work, turn - back)
            if (not running) & (back == 0):
                back = self.repeated(shared, turn)
                running = back > 0

    @cute.jit
    def decode(self, shared: Shared, work: Work, member: Int32):
        """A decoding warp: every stage as it comes; partial results are as they should be."""
        lane = cute.arch.lane_idx()
        stage = Int32(0)
        phase = Int32(0)
        turn = Int32(0)
        back = Int32(0)
        running = self.takes(work, turn)
        while running:
            entry = turn % TILES
            cute.arch.mbarrier_wait(shared.tile_full + entry, (turn // TILES) & 1)
            num, q_phase = self.shared_blocks(shared, entry)
            most = shared.tiles[entry, 1]
            if num > 0:
                landed, queries = shared.q_landing, shared.queries.iterator
                self.keys.decode_queries(queries, shared.query_powers, landed, q_phase, lane, member, DECODERS)
                self.keys.pass_queries_on(shared.q_full)
            for _ in cutlass.range(num, unroll=1):
                for operand in (self.keys, self.values):
                    cute.arch.mbarrier_wait(shared.landing + stage, phase)
                    operand.decode_tile(self.tile_of(shared, stage), lane, member, DECODERS, DECODERS_MEETING)
                    arrive(shared.full + stage)
                    stage, phase = following(stage, phase, STAGES)
            for _ in cutlass.range((most + self.parts - 1) // self.parts, unroll=1):
                cute.arch.mbarrier_wait(shared.landing + stage, phase)
                arrive(shared.full + stage)
                stage, phase = following(stage, phase, STAGES)
            turn = turn + 1
            running = self.takes(work, turn - back)
            if (not running) & (back == 0):
                back = self.repeated(shared, turn)
                running = back > 0

    @cute.jit
    def consume(
        self, k: tuple, v: tuple, out_atom: cute.CopyAtom, mO: cute.Tensor, shared: Shared, work: Work,
        lse: cute.Tensor, scale_log2: Float32, member: Int32,
    ):  # fmt: skip
        """A warp of the consumer."""
        lane = cute.arch.lane_idx()
        tile = self.prepare(out_atom, mO, shared, lse, member, lane)
        # The stage of the ring that comes next and its phase; the one in which the last tile's rows are staged.
        stage = Int32(0)
        phase = Int32(0)
        staged = Int32(-1)
        turn = Int32(0)
        back = Int32(0)
        running = self.takes(work, turn)
        while running:
            head, token, _, first, last = self.find(work, turn - back)
            entry = turn % TILES
            cute.arch.mbarrier_wait(shared.tile_full + entry, (turn // TILES) & 1)
            num, q_phase = self.shared_blocks(shared, entry)
            most = shared.tiles[entry, 1]
            numbers = self.tokens_of(member)
            slots = [shared.tiles[entry, 2 + number] for number in numbers]
            heads = [(lane // 4 + 8 * half) % self.rows.rows_per_token for half in range(2)]
            if turn == 0:
                cute.arch.griddepcontrol_wait()
            own = [
                work.partial_lse[token - first + numbers[half], None, head * self.group + heads[half] % self.group]
                for half in range(2)
            ]
            # On their way while the first product is made.
            scale = self.keys.fold(scale_log2, k, head)
            out_scale = self.values.of_head(v, head)
            logs = self.logs_from(tile, own, slots, Int32(0))
            used = stage
            scales = cute.make_rmem_tensor(2, Float32)
            scales.fill(scale)
            if num > 0:
                cute.arch.mbarrier_wait(shared.q_full, q_phase)
                self.keys.scale_rows(scales, shared.query_powers, member * WARP_ROWS + lane // 4)
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                # % if not declared.key_value.get("SCORES")
                wgmma.multiply(tile.score, tile.S, tile.queries, tile.keys[None, None, None, stage])
                # % else
                self.keys.score(tile.score, tile.S, tile.queries, tile.keys[None, None, None, stage])
                # % endif
                stage, phase = following(stage, phase, STAGES)
            # Each warp's own stores: the stage is free once all have arrived.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            if staged >= 0:
                arrive(shared.free + staged)
            self.start(tile, scale, scales, logs, own, slots, most)
            for _ in cutlass.range(num - 1, unroll=1):
                stage, phase, used = self.step(False, shared, tile, scales, entry, stage, phase, used)
            if num > 0:
                stage, phase, used = self.step(True, shared, tile, scales, entry, stage, phase, used)
            if cutlass.const_expr(out_scale is not None):
                for i in cutlass.range_constexpr(cute.size(tile.O)):
                    tile.O[i] = tile.O[i] * out_scale
            for half in cutlass.range_constexpr(2):
                tile.row_sum[half] = softmax.quad_sum(tile.row_sum[half])
            # Read again, for the sake of registers.
            most = shared.tiles[entry, 1]
            stage, phase, staged = self.merge(shared, tile, scales, own, slots, most, stage, phase)
            self.emit(shared, tile, scales, head, token, last, numbers, heads, staged, turn, back)
            turn = turn + 1
            running = self.takes(work, turn - back)
            if (not running) & (back == 0):
                arrive(shared.done)
                back = self.repeated(shared, turn)
                running = back > 0
                if running:
                    # The same rows are to be written again.
                    cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def prepare(
        self, out_atom: cute.CopyAtom, mO: cute.Tensor, shared: Shared, lse: cute.Tensor, member: Int32, lane: Int32
    ):
        """What does not change from tile to tile."""
        # % if not declared.key_value.get("SCORES")
        score = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        # % else
        score = self.keys.product(self.block_size)
        # % endif
        weigh = wgmma.product(self.values.element, self.head_dim, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), ELEMENTS[OUTPUT])
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), ELEMENTS[OUTPUT])
        # % if not declared.key_value.get("SCORES")
        q_layout = self.rows.tiles_layout(1)
        queries = cute.recast_ptr(shared.queries.iterator, q_layout.inner, dtype=self.element)
        # % endif
        thread = member * WARP + lane
        staging = cute.make_tiled_copy_C(stmatrix, weigh[0]).get_slice(thread)
        reading = cute.make_tiled_copy_C(ldmatrix, weigh[0]).get_slice(thread)
        return Tile(
            score,
            (weigh[1], weigh[1]),
            # % if not declared.key_value.get("SCORES")
            wgmma.operand_a(score, cute.make_tensor(queries, q_layout.outer))[None, None, None, 0],
            wgmma.operand_b(score, shared.keys),
            # % else
            self.keys.left_sides(score, shared.queries.iterator),
            self.keys.stages_of(score, shared.keys, STAGES),
            # % endif
            wgmma.operand_b(weigh, shared.values),
            wgmma.accumulator(score, self.block_size),
            cute.make_rmem_tensor(weigh[0].partition_shape_A((ROWS, self.block_size)), self.values.element),
            wgmma.accumulator(weigh, self.head_dim),
            cute.make_rmem_tensor(2, Float32),
            cute.make_rmem_tensor(2, Float32),
            reading,
            reading.partition_S(shared.parts),
            staging,
            staging.partition_D(shared.parts),
            self.rows.boxes(shared.parts, STAGES * self.parts),
            out_atom,
            mO,
            lse,
            member,
            lane,
        )

    def shared_blocks(self, shared, entry):
        """How many a tile has, and the parity of its Q, which only tiles with shared blocks have."""
        fact = shared.tiles[entry, 0]
        return fact & (1 << PARITY_SHIFT) - 1, fact >> PARITY_SHIFT

    def tokens_of(self, member):
        """Which queries of the tile the two rows of a lane belong to: the same one with a group of 16."""
        of_warp = WARP_ROWS // self.rows.rows_per_token
        return [member * of_warp + half * (of_warp - 1) for half in range(2)]

    @cute.jit
    def logs_from(self, tile: Tile, own, slots, first: Int32):
        """The LSE [step, half] of 4 AHEAD slots of a lane's two rows; a row's four lanes take every fourth each."""
        logs = cute.make_rmem_tensor((AHEAD, 2), Float32)
        for step in cutlass.range_constexpr(AHEAD):
            for half in cutlass.range_constexpr(2):
                logs[step, half] = self.lse_of(own[half], slots[half], first + 4 * step + tile.lane % 4)
        return logs

    @cute.jit
    def start(self, tile: Tile, scale_log2: Float32, scales: cute.Tensor, logs: cute.Tensor, own, slots, most: Int32):
        """Row maxima of the slots' LSE, in units of scores, `logs` being those of the first ones; no sum yet, O = 0."""
        tile.row_max.fill(-Float32.inf)
        self.fold_logs(tile, logs)
        for first in cutlass.range(4 * AHEAD, most, 4 * AHEAD, unroll=1):
            self.fold_logs(tile, self.logs_from(tile, own, slots, first))
        for half in cutlass.range_constexpr(2):
            largest = softmax.quad_max(tile.row_max[half])
            tile.row_max[half] = cute.arch.fmax(largest * LOG2_E, softmax.LOWEST * scale_log2) / scales[half]
            tile.row_sum[half] = Float32(0.0)
        tile.O.fill(0.0)

    @cute.jit
    def fold_logs(self, tile: Tile, logs: cute.Tensor):
        """Row maxima grow to the largest of these LSE, [AHEAD, half], natural logarithm."""
        for step in cutlass.range_constexpr(AHEAD):
            for half in cutlass.range_constexpr(2):
                tile.row_max[half] = cute.arch.fmax(tile.row_max[half], logs[step, half])

    @cute.jit
    def lse_of(self, own: cute.Tensor, slots: Int32, slot: Int32) -> Float32:
        """The LSE of a row's slot, -inf where it has none."""
        found = -Float32.inf
        if slot < slots:
            found = own[slot]
        return found

    @cute.jit
    def step(
        self, last: cutlass.Constexpr, shared: Shared, tile: Tile, scales: cute.Tensor, entry: Int32, stage: Int32,
        phase: Int32, used: Int32,
    ):  # fmt: skip
        """One block, its S under way from stage `used`, and the start of the next one's unless it is the last."""
        row, word = shared.words[used, 0], shared.words[used, 1]
        rescale = cute.make_rmem_tensor(2, Float32)
        state = tile.row_max, tile.row_sum, rescale
        weights = cute.recast_tensor(tile.P, Int32)
        numbers = self.tokens_of(tile.member)
        warpgroup.wait_group(0)
        arrive(shared.free + used)
        if cutlass.const_expr(last):
            arrive(shared.q_free)
        # The last column that each of a lane's two rows sees: block_size - 1 or more for the whole block, -1 for none.
        rooms = [Int32(self.block_size - 1) for _ in range(2)]
        if (word & CUT) != 0:
            for half in cutlass.range_constexpr(2):
                end = shared.tiles[entry, 2 + self.queries + numbers[half]]
                rooms[half] = pick((word >> numbers[half]) & 1 != 0, end - row, -1)
        if ballot(cutlass.max(rooms[0], rooms[1]) >= 0) == 0:
            weights.fill(0)
            rescale.fill(1.0)
        elif ballot(cutlass.min(rooms[0], rooms[1]) < self.block_size - 1) == 0:
            running_softmax(tile.S, weights, *state, scales, None, self.values.element)
        else:
            rooms = [room - tile.lane % 4 * 2 for room in rooms]
            running_softmax(tile.S, weights, *state, scales, rooms, self.values.element)
        for i in cutlass.range_constexpr(cute.size(tile.O)):
            tile.O[i] = tile.O[i] * rescale[i // 2 % 2]
        cute.arch.mbarrier_wait(shared.full + stage, phase)
        valid = word >> VALID_SHIFT
        if valid < self.block_size:
            # Rows past the request's end may hold NaN, and 0 * NaN would reach O.
            values = shared.values[None, None, stage]
            thread = tile.member * WARP + tile.lane
            if word < 0:
                self.take_out(shared, entry, values, row, word, thread)
            self.blocks.clear_rows(values, valid & VALID_MASK, thread, WARPS * WARP)
            cute.arch.barrier(barrier_id=MEETING, number_of_threads=WARPS * WARP)
        wgmma.multiply(tile.weigh, tile.O, tile.P, tile.values[None, None, None, stage])
        held = stage
        stage, phase = following(stage, phase, STAGES)
        used = stage
        if cutlass.const_expr(last):
            warpgroup.wait_group(0)
        else:
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            # % if not declared.key_value.get("SCORES")
            wgmma.multiply(tile.score, tile.S, tile.queries, tile.keys[None, None, None, stage])
            # % else
            self.keys.score(tile.score, tile.S, tile.queries, tile.keys[None, None, None, stage])
            # % endif
            stage, phase = following(stage, phase, STAGES)
            warpgroup.wait_group(1)
        arrive(shared.free + held)
        return stage, phase, used

    @cute.jit
    def take_out(self, shared: Shared, entry: Int32, values: cute.Tensor, row: Int32, word: Int32, thread: Int32):
        """Zero a block's infinite and NaN values, and note the queries that see one in the thread's column."""
        if thread < self.head_dim:
            first = clean_column(values, thread, (word >> VALID_SHIFT) & VALID_MASK, self.block_size)
            seeing = Int32(shared.tainted[thread])
            for number in cutlass.range_constexpr(self.queries):
                end = shared.tiles[entry, 2 + self.queries + number]
                if (first < self.block_size) & ((word >> number) & 1 != 0) & (row + first <= end):
                    seeing = seeing | (1 << number)
            shared.tainted[thread] = Uint8(seeing)

    @cute.jit
    def merge(
        self, shared: Shared, tile: Tile, scales: cute.Tensor, own, slots, most: Int32, stage: Int32, phase: Int32
    ):
        """O += weight * partial of every slot, and the sum likewise. Returns the stage of the last ones too."""
        staged = stage
        loaded = cute.make_rmem_tensor(tile.O.layout, ELEMENTS[OUTPUT])
        # [part, half]; they are read one stage ahead of need.
        logs = cute.make_rmem_tensor((self.parts, 2), Float32)
        weights = cute.make_rmem_tensor((self.parts, 2), Float32)
        self.read_logs(logs, own, slots, 0)
        for m in cutlass.range((most + self.parts - 1) // self.parts, unroll=1):
            if m > 0:
                arrive(shared.free + staged)
            for part in cutlass.range_constexpr(self.parts):
                for half in cutlass.range_constexpr(2):
                    shifted = logs[part, half] * LOG2_E - tile.row_max[half] * scales[half]
                    weights[part, half] = cute.math.exp2(shifted, fastmath=True)
            self.read_logs(logs, own, slots, m + 1)
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            for part in cutlass.range_constexpr(self.parts):
                slot = m * self.parts + part
                if ballot(slot < cutlass.max(slots[0], slots[1])) != 0:
                    source = tile.partials[None, None, None, stage * self.parts + part]
                    cute.copy(tile.reading, source, tile.reading.retile(loaded))
                    of_part = [weights[part, half] for half in range(2)]
                    # What was not loaded may be anything.
                    if ballot(slot >= cutlass.min(slots[0], slots[1])) == 0:
                        self.add_partial(tile, loaded, of_part, None)
                    else:
                        self.add_partial(tile, loaded, of_part, [slot < slots[half] for half in range(2)])
            staged = stage
            stage, phase = following(stage, phase, STAGES)
        return stage, phase, staged

    @cute.jit
    def add_partial(self, tile: Tile, loaded: cute.Tensor, weights, there):
        """O += weights[half] * loaded, and the sum likewise; of rows that were loaded, or of all for None."""
        pairs = cute.recast_tensor(loaded, Int32)
        for half in cutlass.range_constexpr(2):
            tile.row_sum[half] = tile.row_sum[half] + weights[half]
        for i in cutlass.range_constexpr(cute.size(tile.O) // 2):
            half = i % 2
            values = [(pairs[i] << 16).bitcast(Float32), (pairs[i] & HIGH).bitcast(Float32)]
            for column in cutlass.range_constexpr(2):
                value = values[column]
                if cutlass.const_expr(there is not None):
                    value = pick_float(there[half], value, Float32(0.0))
                tile.O[2 * i + column] = tile.O[2 * i + column] + weights[half] * value

    @cute.jit
    def read_logs(self, logs: cute.Tensor, own, slots, stage: Int32):
        """The LSE of the slots that the tile's `stage`-th stage of partial results holds."""
        for part in cutlass.range_constexpr(self.parts):
            for half in cutlass.range_constexpr(2):
                logs[part, half] = self.lse_of(own[half], slots[half], stage * self.parts + part)

    @cute.jit
    def emit(
        self, shared: Shared, tile: Tile, scales: cute.Tensor, head: Int32, token: Int32, last: Int32, numbers, heads,
        staged: Int32, turn: Int32, back: Int32,
    ):  # fmt: skip
        """Normalise the rows, stage them in the stage of the last partial results, and send them on their way."""
        inverse = []
        sums = []
        for half in cutlass.range_constexpr(2):
            scale = Float32(0.0)
            total = -Float32.inf
            if tile.row_sum[half] != 0.0:
                scale = 1.0 / tile.row_sum[half]
                total = softmax.log_sum(tile.row_max[half], tile.row_sum[half], scales[half])
            inverse.append(scale)
            sums.append(total)
        scaled = cute.make_rmem_tensor(tile.O.layout, Float32)
        for i in cutlass.range_constexpr(cute.size(tile.O)):
            scaled[i] = tile.O[i] * inverse[i // 2 % 2]
        rounded = cute.make_rmem_tensor(tile.O.layout, ELEMENTS[OUTPUT])
        rounded.store(scaled.load().to(ELEMENTS[OUTPUT]))
        self.note(shared, tile, rounded, (token + numbers[0] < last) & (heads[0] < self.group), turn)
        cute.arch.sync_warp()
        cute.copy(tile.staging, tile.staging.retile(rounded), tile.staged_rows[None, None, None, staged * self.parts])
        if back > 0:
            self.taint(shared, tile, staged)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        of_warp = WARP_ROWS // self.rows.rows_per_token
        for r in cutlass.range_constexpr(of_warp):
            number = tile.member * of_warp + r
            if token + number < last:
                source = tile.boxes[None, None, None, None, None, number, staged * self.parts]
                self.rows.store(tile.out_atom, source, tile.out, token + number, head)
        cute.arch.cp_async_bulk_commit_group()
        # Lanes 0 and 1 of the four that share two rows write one LSE each.
        half = tile.lane % 4
        number, member, total = numbers[0], heads[0], sums[0]
        if half == 1:
            number, member, total = numbers[1], heads[1], sums[1]
        if (half < 2) & (token + number < last) & (member < self.group):
            tile.lse[token + number, head * self.group + member] = total

    @cute.jit
    def note(self, shared: Shared, tile: Tile, rounded: cute.Tensor, stored: Boolean, turn: Int32):
        """Note the turn if one of the warp's first rows, of those that are stored, is not finite."""
        pairs = cute.recast_tensor(rounded, Int32)
        found = Int32(0)
        for j in cutlass.range_constexpr(cute.size(rounded) // 4):
            found = found | unbounded_pair(pairs[2 * j])
        if (ballot(stored & (found != 0)) != 0) & (tile.lane == 0):
            shared.again[tile.member] = cutlass.min(shared.again[tile.member], turn)

    @cute.jit
    def taint(self, shared: Shared, tile: Tile, staged: Int32):
        """NaN in the staged rows of this warp, in the columns where they see a value that was taken out."""
        # Until here other warps may note what their columns held, and from the second one on what comes next.
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=WARPS * WARP)
        for i in cutlass.range(WARP_ROWS * self.head_dim // WARP, unroll=1):
            place = i * WARP + tile.lane
            row = tile.member * WARP_ROWS + place // self.head_dim
            column = place % self.head_dim
            if (Int32(shared.tainted[column]) >> (row // self.rows.rows_per_token)) & 1 != 0:
                shared.parts[row, column, staged * self.parts] = ELEMENTS[OUTPUT](Float32.nan)
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=WARPS * WARP)
        thread = tile.member * WARP + tile.lane
        if thread < self.head_dim:
            shared.tainted[thread] = Uint8(0)
