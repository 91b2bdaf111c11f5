"""KV-outer sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2.

Edges and tasks are the words that msa_tiles.dsl.words describes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu.tcgen05 import OperandSource, commit
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import softmax, tcgen05, tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.claims import first_claim, next_claim
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import ATOM
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive, following
from msa_tiles.dsl.cutedsl.row_softmax import exponentials, hide, scaled
from msa_tiles.dsl.cutedsl.shared import barriers_of, by_rows, make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.tcgen05 import COLUMNS, ROWS
from msa_tiles.dsl.cutedsl.tensor_memory import fence_after_sync, fence_before_sync
from msa_tiles.dsl.cutedsl.wide_gather import WideRows
from msa_tiles.dsl.table import WARP, Columns, Pipeline, Role, Table, buffer, commits, declares, lane, warps
from msa_tiles.dsl.words import last_column_of, query_of, slot_of

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 3  # <- tile.stages
BLOCKS = 3  # <- tile.blocks
RECORDS = 8  # <- tile.records
AHEAD = 2  # <- tile.ahead
SOFTMAX_REGISTERS = 192  # <- tile.softmax_registers
EPILOGUE_REGISTERS = 80  # <- tile.epilogue_registers
ISSUER_REGISTERS = 48  # <- tile.issuer_registers
WARPS = 4  # of a warpgroup
SOFTMAXES = 2  # warpgroups, and tiles between their scores and their output
# Columns of tensor memory: room for the largest of each, so that all variants have one map.
S_COLUMNS, P_COLUMNS, O_COLUMNS = 128, 64, 128
# Flags of a record, below the valid rows of its block.
FIRST, LAST, CUT, FLAG_BITS = 1, 2, 4, 3


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


@declares
def cta(head_dim, block_size, group, pages_per_block):
    """What a thread block is made of."""
    gathered = "laid out as msa_tiles.dsl.cutedsl.wide_gather says"
    softmax_does = "thread i turns row i of S into P, for every second tile"
    # The warps of either softmax warpgroup, whose turn it is.
    softmax_turn = warps("softmax_even")
    return Table(
        roles=(
            Role("softmax_even", WARPS, f"{softmax_does} from the first on", SOFTMAX_REGISTERS),
            Role("softmax_odd", WARPS, f"{softmax_does} from the second on", SOFTMAX_REGISTERS),
            Role(
                "epilogue", WARPS,
                "thread i rounds row i of O; a warp stores the partial results of its queries, by TMA",
                EPILOGUE_REGISTERS,
            ),
            Role("claimer", 1, "claims tasks, loads K and V", ISSUER_REGISTERS),
            Role("gatherer", 1, "gathers query rows of every tile, by TMA, and writes its record", ISSUER_REGISTERS),
            Role("scorer", 1, "multiplies S = Q K^T; owns the tensor memory", ISSUER_REGISTERS),
            Role("weigher", 1, "multiplies O = P V", ISSUER_REGISTERS),
        ),
        pipelines=(
            Pipeline("task_wanted", 1, (lane("gatherer"),)),
            Pipeline("task", 1, (lane("claimer"),)),
            Pipeline(
                "record", RECORDS, (lane("gatherer"),),
                (lane("scorer"), lane("weigher"), softmax_turn, warps("epilogue")),
                note="of softmax the warpgroup whose tile it is",
            ),
            Pipeline("q", STAGES, (lane("gatherer"),), (commits("scorer"),), ("queries",)),
            Pipeline(
                "block", BLOCKS, (lane("claimer"),), (commits("scorer"),), ("blocks",),
                note="behind its task's last S, and values by weigher behind the last O",
            ),
            Pipeline("s", SOFTMAXES, (commits("scorer"),), (softmax_turn,), note="stage 1 is softmax_odd's"),
            Pipeline("p", SOFTMAXES, (softmax_turn,), (commits("weigher"),), note="likewise"),
            Pipeline("o", 1, (commits("weigher"),), (warps("epilogue"),)),
        ),
        buffers=(
            buffer("queries", ELEMENT, align=1024, note=gathered, stages=STAGES, rows=ROWS, head_dim=head_dim),
            buffer(
                "blocks", ELEMENT, align=1024,
                note="swizzled by 128 bytes, in panels of 64 columns: K and V of a task, K and V of the next",
                stages=BLOCKS, block_size=block_size, head_dim=head_dim,
            ),
            buffer("staging", ELEMENT, align=1024, note=gathered, rows=ROWS, head_dim=head_dim),
            buffer("task", "int32", note="first edge, edges or -1 at the end, head, extent", numbers=4),
            buffer("records", "int32", stages=RECORDS, numbers=2),
            buffer("edges", "int32", stages=RECORDS, queries=ROWS // max(group, ATOM)),
            buffer("address", "int32", note="of the tensor memory", ids=1),
        ),
        tensor_memory=(
            Columns("S", SOFTMAXES, S_COLUMNS, "float32"),
            Columns("P", SOFTMAXES, P_COLUMNS, "pairs of elements"),
            Columns("O", 1, O_COLUMNS, "float32"),
        ),
    )  # fmt: skip


class Shared(NamedTuple):
    """What the CTA keeps in shared memory: the table's buffers, and pointers to the first of its barriers of a kind."""

    queries: Any
    blocks: Any
    staging: Any
    task: Any
    records: Any
    edges: Any
    address: Any
    task_wanted_full: Any
    task_full: Any
    record_full: Any
    record_free: Any
    q_full: Any
    q_free: Any
    block_full: Any
    block_free: Any
    s_full: Any
    s_free: Any
    p_full: Any
    p_free: Any
    o_full: Any
    o_free: Any


class SparseAttention:
    """
    # <- cta

    A record is (KV head or -1 at the end, valid rows << 3 | cut << 2 | last of its task << 1 | first of it) and the
    tile's edges, -1 where there is none: all that its readers know of tasks. The end takes two, one for each softmax.
    The next task is claimed when AHEAD tiles of the one before are still to be gathered: early enough for its claim to
    be answered, late enough that no CTA hoards work.

    A softmax warp reads its rows of S whole and gives S back, so that the tile after next is multiplied meanwhile. P is
    normalised before it is rounded: what O holds is the partial result. Rows of a tile that belong to no edge hold
    stale data and are never stored. Between tensor memory and TMA an epilogue warp has the same 32 rows, so what it
    stages needs no barrier with other warps.
    """

    def __init__(self, head_dim, block_size, group, pages_per_block):
        self.cta = cta(head_dim, block_size, group, pages_per_block)
        self.element = ELEMENTS[ELEMENT]
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.rows = WideRows(self.element, head_dim, group)
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
            block=(self.cta.threads, 1, 1),
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
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        score = tcgen05.product(self.element, self.block_size, OperandMajorMode.K, OperandSource.SMEM)
        weigh = tcgen05.product(self.element, self.head_dim, OperandMajorMode.MN, OperandSource.TMEM)
        epilogue, claimer, gatherer, scorer = map(self.cta.first_warp, ("epilogue", "claimer", "gatherer", "scorer"))
        shared = self.allocate(SmemAllocator(), score, warp)
        if warp < epilogue:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            self.normalise(shared, partial_lse, scale_log2, warp)
        elif warp < claimer:
            cute.arch.setmaxregister_decrease(EPILOGUE_REGISTERS)
            self.store(out_atom, mO, shared, Int32(partial_lse.shape[1]), warp - epilogue)
        else:
            cute.arch.setmaxregister_decrease(ISSUER_REGISTERS)
            if warp == claimer:
                self.claim(k_atom, mK, v_atom, mV, shared, page_table, tasks, counts, claims, window_index)
            elif warp == gatherer:
                self.gather(q_atom, mQ, shared, edges, window_index, window_index * window)
            elif warp == scorer:
                self.score(score, shared)
            else:
                self.weigh(weigh, shared)
        # Whoever saw the last tile of all leaves with nothing under way in tensor memory.
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == scorer:
            fence_after_sync()
            cute.arch.dealloc_tmem(self.memory(shared), self.cta.tensor_memory)

    @cute.jit
    def allocate(self, memory: SmemAllocator, score, warp: Int32):
        """Shared and tensor memory, with barriers ready for use on return."""
        layouts = {
            "queries": tcgen05.left_layout(score, self.element, self.head_dim, STAGES),
            "blocks": tcgen05.right_layout(
                score, self.element, OperandMajorMode.K, self.block_size, self.head_dim, BLOCKS
            ),
            "staging": tcgen05.left_layout(score, self.element, self.head_dim, 1),
            **by_rows(self.cta, "records", "edges"),
        }
        found = make_buffers(self.cta, memory, layouts)
        if warp == self.cta.first_warp("scorer"):
            cute.arch.alloc_tmem(self.cta.tensor_memory, found["address"].iterator)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_sync()
        barriers = make_barriers(self.cta, memory, ())
        fence_after_sync()
        return Shared(**found, **barriers_of(self.cta, barriers))

    def memory(self, shared: Shared):
        """The first column of tensor memory; read by who needs it, so that the others keep no register for it."""
        return cute.arch.retrieve_tmem_ptr(Float32, 16, shared.address.iterator)

    @cute.jit
    def claim(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, v_atom: cute.CopyAtom, mV: cute.Tensor, shared: Shared,
        page_table: cute.Tensor, tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, window_index: Int32,
    ):  # fmt: skip
        """The claiming warp: one task after the other, its entry, then its keys and values."""
        lane = cute.arch.lane_idx()
        heads = Int32(counts.shape[1])
        boxes = tma.boxes(shared.blocks, self.blocks.box_rows, self.block_size, self.head_dim, BLOCKS)
        cpasync.prefetch_descriptor(k_atom)
        cpasync.prefetch_descriptor(v_atom)
        claim = first_claim(counts, window_index)
        place = Int32(0)
        phase = Int32(1)
        wanted = Int32(1)
        running = Int32(1)
        while running > 0:
            cute.arch.mbarrier_wait(shared.task_wanted_full, wanted)
            wanted = wanted ^ 1
            claim = next_claim(claim, claims, counts, window_index, heads, lambda head: head)
            head = claim.head
            if head < heads:
                task = tasks[window_index, head, claim.place, None]
                row = task[0]
                if lane == 0:
                    shared.task[0] = task[1]
                    shared.task[1] = task[2]
                    shared.task[2] = head
                    shared.task[3] = task[3]
                arrive(shared.task_full)
                pages = self.blocks.pages(page_table, row)
                cute.arch.mbarrier_wait(shared.block_free + place, phase)
                target = boxes[None, None, None, None, place]
                self.blocks.load(k_atom, mK, row, pages, head, target, shared.block_full + place)
                place, phase = following(place, phase, BLOCKS)
                cute.arch.mbarrier_wait(shared.block_free + place, phase)
                target = boxes[None, None, None, None, place]
                self.blocks.load(v_atom, mV, row, pages, head, target, shared.block_full + place)
                place, phase = following(place, phase, BLOCKS)
            else:
                running = Int32(0)
                if lane == 0:
                    shared.task[1] = Int32(-1)
                arrive(shared.task_full)

    @cute.jit
    def gather(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, shared: Shared, edges: cute.Tensor, window_index: Int32,
        first_token: Int32,
    ):  # fmt: skip
        """The gathering warp: record and query rows of every tile of each task, as fast as the rings take them."""
        lane = cute.arch.lane_idx()
        cpasync.prefetch_descriptor(q_atom)
        boxes = self.rows.boxes(shared.queries, STAGES)
        slot = Int32(0)
        phase = Int32(1)
        record = Int32(0)
        record_phase = Int32(1)
        full = Int32(0)
        running = Int32(1)
        while running > 0:
            cute.arch.mbarrier_wait(shared.task_full, full)
            full = full ^ 1
            # Known to be uniform, so that no copy below is guarded against lanes that have parted.
            first_edge, num, head, extent = (cute.arch.make_warp_uniform(shared.task[i]) for i in range(4))
            # The entry is the next task's as soon as lane 0 asks for it.
            cute.arch.sync_warp()
            if num < 0:
                running = Int32(0)
            else:
                of_head = edges[window_index, head, None]
                tiles = self.tiles_of(num)
                # Lane i holds the edge of the tile's i-th query, or -1; it is read one tile ahead of need.
                mine = lane
                edge = Int32(-1)
                if (lane < self.queries) & (mine < num):
                    edge = of_head[first_edge + mine]
                for tile in cutlass.range(tiles, unroll=1):
                    if (lane == 0) & (tile == cutlass.max(tiles - AHEAD, 0)):
                        cute.arch.mbarrier_arrive(shared.task_wanted_full)
                    current = edge
                    queries = cutlass.min(num - tile * self.queries, self.queries)
                    mine = mine + self.queries
                    edge = Int32(-1)
                    if (lane < self.queries) & (mine < num):
                        edge = of_head[first_edge + mine]
                    cute.arch.mbarrier_wait(shared.record_free + record, record_phase)
                    if lane < self.queries:
                        shared.edges[record, lane] = current
                    if lane == 0:
                        shared.records[record, 0] = head
                        shared.records[record, 1] = self.flags_of(extent, tile, tiles)
                    arrive(shared.record_full + record)
                    record, record_phase = following(record, record_phase, RECORDS)
                    cute.arch.mbarrier_wait(shared.q_free + slot, phase)
                    full_slot = shared.q_full + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full_slot, queries * self.rows.token_bytes)
                    # No lane may load before the barrier knows how much will come.
                    cute.arch.sync_warp()
                    for r in cutlass.range_constexpr(self.queries):
                        token = first_token + query_of(cute.arch.shuffle_sync(current, r))
                        if r < queries:
                            target = boxes[None, None, None, None, None, r, slot]
                            self.rows.load(q_atom, mQ, token, head, target, full_slot)
                    slot, phase = following(slot, phase, STAGES)
        for _ in cutlass.range_constexpr(SOFTMAXES):
            cute.arch.mbarrier_wait(shared.record_free + record, record_phase)
            if lane == 0:
                shared.records[record, 0] = Int32(-1)
            arrive(shared.record_full + record)
            record, record_phase = following(record, record_phase, RECORDS)

    def tiles_of(self, num):
        """How many tiles a task of `num` edges has."""
        return (num + self.queries - 1) // self.queries

    def flags_of(self, extent, tile, tiles):
        """The second word of a record, for one of the `tiles` tiles of a task; extent is the task's."""
        return (extent << 2) + cutlass.min(tile + 1, 2) % 2 * FIRST + cutlass.max(tile + 2 - tiles, 0) * LAST

    @cute.jit
    def read_record(self, shared: Shared, record: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The two words of a record, once it is there; whoever calls it gives the record back when done with it."""
        cute.arch.mbarrier_wait(shared.record_full + record, phase)
        head = cute.arch.make_warp_uniform(shared.records[record, 0])
        flags = cute.arch.make_warp_uniform(shared.records[record, 1])
        return head, flags

    @cute.jit
    def score(self, score, shared: Shared):
        """The warp that multiplies queries and keys."""
        memory = self.memory(shared)
        queries = score[0].make_fragment_A(shared.queries)
        keys = score[0].make_fragment_B(shared.blocks)
        record = Int32(0)
        record_phase = Int32(0)
        slot = Int32(0)
        phase = Int32(0)
        block = Int32(0)
        block_phase = Int32(0)
        place = Int32(0)
        free_phase = Int32(1)
        running = Int32(1)
        while running > 0:
            head, flags = self.read_record(shared, record, record_phase)
            arrive(shared.record_free + record)
            record, record_phase = following(record, record_phase, RECORDS)
            if head < 0:
                running = Int32(0)
            else:
                if (flags & FIRST) != 0:
                    cute.arch.mbarrier_wait(shared.block_full + block, block_phase)
                if (flags & LAST) != 0:
                    # The values too, which are not this warp's: it waits for every phase of a place, or keys would be
                    # taken for there that are still to come where others had the same parity. And now, while the
                    # product to come keeps the values in their place.
                    values, values_phase = following(block, block_phase, BLOCKS)
                    cute.arch.mbarrier_wait(shared.block_full + values, values_phase)
                cute.arch.mbarrier_wait(shared.q_full + slot, phase)
                cute.arch.mbarrier_wait(shared.s_free + place, free_phase)
                fence_after_sync()
                into = tcgen05.accumulator(score, self.block_size, memory + place * S_COLUMNS)
                tcgen05.multiply(score, into, queries[None, None, None, slot], keys[None, None, None, block])
                with cute.arch.elect_one():
                    commit(shared.q_free + slot)
                    if (flags & LAST) != 0:
                        commit(shared.block_free + block)
                    # Last, so that whoever has seen the last product leaves with nothing under way.
                    commit(shared.s_full + place)
                if (flags & LAST) != 0:
                    # Past the task's values.
                    for _ in cutlass.range_constexpr(2):
                        block, block_phase = following(block, block_phase, BLOCKS)
                slot, phase = following(slot, phase, STAGES)
                place, free_phase = following(place, free_phase, SOFTMAXES)

    @cute.jit
    def weigh(self, weigh, shared: Shared):
        """The warp that multiplies probabilities and values."""
        memory = self.memory(shared)
        lane = cute.arch.lane_idx()
        layout = tcgen05.right_layout(
            weigh, self.element, OperandMajorMode.MN, self.head_dim, self.block_size, BLOCKS
        )  # fmt: skip
        values = weigh[0].make_fragment_B(cute.make_tensor(shared.blocks.iterator, layout.outer))
        into = tcgen05.accumulator(weigh, self.head_dim, memory + self.cta.column("O"))
        record = Int32(0)
        record_phase = Int32(0)
        # The values of a task come behind its keys.
        block, block_phase = following(Int32(0), Int32(0), BLOCKS)
        place = Int32(0)
        full_phase = Int32(0)
        free_phase = Int32(1)
        running = Int32(1)
        while running > 0:
            head, flags = self.read_record(shared, record, record_phase)
            arrive(shared.record_free + record)
            record, record_phase = following(record, record_phase, RECORDS)
            if head < 0:
                running = Int32(0)
            else:
                if (flags & FIRST) != 0:
                    cute.arch.mbarrier_wait(shared.block_full + block, block_phase)
                    valid = flags >> FLAG_BITS
                    if valid < self.block_size:
                        self.blocks.clear_rows(shared.blocks[None, None, None, block], valid, lane, WARP)
                        cute.arch.sync_warp()
                cute.arch.mbarrier_wait(shared.p_full + place, full_phase)
                cute.arch.mbarrier_wait(shared.o_free, free_phase)
                fence_after_sync()
                left = tcgen05.left_operand(
                    weigh, self.element, self.block_size, memory + (self.cta.column("P") + place * P_COLUMNS)
                )  # fmt: skip
                tcgen05.multiply(weigh, into, left, values[None, None, None, block])
                with cute.arch.elect_one():
                    commit(shared.p_free + place)
                    if (flags & LAST) != 0:
                        commit(shared.block_free + block)
                    # Last, as above.
                    commit(shared.o_full)
                if (flags & LAST) != 0:
                    for _ in cutlass.range_constexpr(2):
                        block, block_phase = following(block, block_phase, BLOCKS)
                place, full_phase = following(place, full_phase, SOFTMAXES)
                free_phase = free_phase ^ 1

    @cute.jit
    def normalise(self, shared: Shared, partial_lse: cute.Tensor, scale_log2: Float32, warp: Int32):
        """A warp of a softmax warpgroup; its number is the place of its tiles in S and in P."""
        memory = self.memory(shared)
        lane = cute.arch.lane_idx()
        place = warp // WARPS
        thread = warp % WARPS * WARP + lane
        query = thread // self.rows.rows_per_token
        row = thread % self.rows.rows_per_token
        scores = cute.make_rmem_tensor(self.block_size, Float32)
        probabilities = cute.make_rmem_tensor(COLUMNS, self.element)
        record = place
        record_phase = Int32(0)
        phase = Int32(0)
        running = Int32(1)
        while running > 0:
            head, flags = self.read_record(shared, record, record_phase)
            edge = shared.edges[record, query]
            arrive(shared.record_free + record)
            for _ in cutlass.range_constexpr(SOFTMAXES):
                record, record_phase = following(record, record_phase, RECORDS)
            if head < 0:
                running = Int32(0)
            else:
                cute.arch.mbarrier_wait(shared.s_full + place, phase)
                fence_after_sync()
                # The read stands in both branches, or the compiler would make the mask's instructions conditional and
                # issue them for every tile.
                if (flags & CUT) != 0:
                    tcgen05.read(memory + place * S_COLUMNS, thread, scores)
                    cute.arch.fence_view_async_tmem_load()
                    hide(scores, last_column_of(edge))
                else:
                    tcgen05.read(memory + place * S_COLUMNS, thread, scores)
                    cute.arch.fence_view_async_tmem_load()
                fence_before_sync()
                arrive(shared.s_free + place)
                largest, total = exponentials(scores, scale_log2)
                inverse = cute.arch.rcp_approx(total)
                cute.arch.mbarrier_wait(shared.p_free + place, phase ^ 1)
                fence_after_sync()
                for step in cutlass.range_constexpr(self.block_size // COLUMNS):
                    scaled(scores, step * COLUMNS, inverse, probabilities)
                    columns = self.cta.column("P") + place * P_COLUMNS + step * COLUMNS // 2
                    tcgen05.write(probabilities, memory + columns, thread)
                cute.arch.fence_view_async_tmem_store()
                fence_before_sync()
                arrive(shared.p_full + place)
                if (edge >= 0) & (row < self.group):
                    lse = softmax.log_sum(largest, total, scale_log2)
                    partial_lse[query_of(edge), slot_of(edge), head * self.group + row] = lse
                phase = phase ^ 1

    @cute.jit
    def store(self, out_atom: cute.CopyAtom, mO: cute.Tensor, shared: Shared, topk: Int32, member: Int32):
        """A warp of the epilogue."""
        memory = self.memory(shared)
        cpasync.prefetch_descriptor(out_atom)
        thread = member * WARP + cute.arch.lane_idx()
        of_warp = WARP // self.rows.rows_per_token
        boxes = self.rows.boxes(shared.staging, 1)
        exact = cute.make_rmem_tensor(COLUMNS, Float32)
        rounded = cute.make_rmem_tensor(COLUMNS, self.element)
        steps = self.head_dim // COLUMNS
        record = Int32(0)
        record_phase = Int32(0)
        phase = Int32(0)
        running = Int32(1)
        while running > 0:
            head, _ = self.read_record(shared, record, record_phase)
            edges = [shared.edges[record, member * of_warp + r] for r in range(of_warp)]
            arrive(shared.record_free + record)
            record, record_phase = following(record, record_phase, RECORDS)
            if head < 0:
                running = Int32(0)
            else:
                # The rows staged last have been read once this returns.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                cute.arch.mbarrier_wait(shared.o_full, phase)
                phase = phase ^ 1
                fence_after_sync()
                for step in cutlass.range_constexpr(steps):
                    tcgen05.read(memory + (self.cta.column("O") + step * COLUMNS), thread, exact)
                    cute.arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(step == steps - 1):
                        fence_before_sync()
                        arrive(shared.o_free)
                    rounded.store(exact.load().to(self.element))
                    self.rows.stage(rounded, shared.staging.iterator, thread, step * COLUMNS)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                for r in cutlass.range_constexpr(of_warp):
                    if edges[r] >= 0:
                        source = boxes[None, None, None, None, None, member * of_warp + r, 0]
                        partial = query_of(edges[r]) * topk + slot_of(edges[r])
                        self.rows.store(out_atom, source, mO, partial, head)
                cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
