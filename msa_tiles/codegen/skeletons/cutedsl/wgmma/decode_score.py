# % set decoded = precision.decoded
"""Indexer scores with block max-pool for few queries per request: the keys are split over all CTAs.

Grid: num_ctas CTAs, each of which takes a run of the blocks of all requests (split_indexer). A tile is
ROWS // num_index_heads consecutive queries of a request with all their index heads.

# % if decoded
The keys are read once from memory (once for each tile of a request from L2), and decoded beside that: they are the rows
of S^T = K Q^T, which wgmma takes from registers, with eight queries at a time as columns.
# % else
The keys are read once from memory (once for each tile of a request from L2), and that is the floor: the tensor cores
work on 64 rows however few of them hold a query.
# % endif
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper  # % if not decoded
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup  # % if not decoded
from cutlass.cute.nvgpu import warpgroup  # % if decoded
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum  # % if not decoded

from msa_tiles.dsl.cutedsl import scores, softmax, tma, wgmma  # % if not decoded
from msa_tiles.dsl.cutedsl import column_indexer, column_maxima, query_columns, scores, tma, wgmma  # % if decoded
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.column_indexer import GROUP, IN_TILE, Tile  # % if decoded
from msa_tiles.dsl.cutedsl.column_indexer import ColumnIndexer as Base  # % if decoded
from msa_tiles.dsl.cutedsl.elements import ELEMENTS  # % if decoded
from msa_tiles.dsl.cutedsl.operands import index_plain as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.pipeline import arrive, arrive_alone, following  # % if not decoded
from msa_tiles.dsl.cutedsl.pipeline import following  # % if decoded
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.split_indexer import Lengths
from msa_tiles.dsl.cutedsl.split_indexer import SplitIndexer as Base  # % if not decoded
from msa_tiles.dsl.cutedsl.topk import pick  # % if decoded
from msa_tiles.dsl.cutedsl.varlen import last_visible  # % if not decoded
from msa_tiles.dsl.cutedsl.vector import BYTES, copy_wide, vector_of, wide  # % if not decoded
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import Role, Table, buffer, declares, warps  # % if not decoded
from msa_tiles.dsl.table import Table, declares  # % if decoded

STAGES = 3  # <- tile.stages
# % if decoded
CTAS = 3  # <- tile.ctas
PRODUCER_REGISTERS = 24  # <- tile.producer_registers
CONSUMER_REGISTERS = 136  # <- tile.consumer_registers
STORED = "bfloat16"  # <- precision.query.element
# % else
WARPS = 4  # of the consumer warpgroup
GROUP = 128  # threads of it
WARP_ROWS = 16  # of a tile
SWIZZLED = 8  # times 16 bytes, which a swizzle moves about
# % endif


def decode_score(
    head_dim: int,
    block_size: int,
    pages_per_block: int,
    key_scales: int,  # % if "key_scales" in plan.variants
):
    """Build the kernel for one index dim, block size and page size.

    idx_q [total_q, num_index_heads, head_dim] with at most ROWS heads, idx_k [total_k, head_dim], or
    [pages, page, head_dim] with pages_per_block > 0 and page_table [requests, max_pages] -> out [num_index_heads,
    total_q, max_blocks] float32 with any strides on heads and tokens. Written are the blocks that hold keys of the
    query's request: the largest product of the block's visible keys, -inf for a block without one. The columns behind
    them, and the rows of no request, are left as they are.
    # % if "key_scales" in plan.variants
    Products are multiplied by q_scale [total_q, num_index_heads], where it is to be used, and by k_scale: [total_k] or
    [pages, page] with key_scales = 1, else its first element, where it is to be used. Scales are 0 or more.
    # % endif
    # % if decoded
    Keys come in bytes with the scales of their groups, and are decoded. Products are multiplied by q_scale [total_q,
    num_index_heads], where it is to be used, and by the first element of the keys' global scale, if they have one.
    # % endif

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = DecodeScore(
        head_dim,
        block_size,
        pages_per_block,
        key_scales=key_scales,  # % if "key_scales" in plan.variants
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, block_size, pages_per_block, **scales):
    """What a thread block is made of."""
    # % if decoded
    keys = index_key.parts("k", head_dim, block_size, STAGES, producer="producer", readers="consumer", **scales)
    # % else
    keys = index_key.parts("k", head_dim, block_size, STAGES, producer="producer", freed=warps("consumer"), **scales)
    # % endif
    return Table(
        roles=(
            # % if decoded
            *column_indexer.roles_of(PRODUCER_REGISTERS, CONSUMER_REGISTERS),
            # % else
            Role(
                "consumer", WARPS,
                "loads the rows of a tile, S = Q K^T one block at a time, row maxima, stores",
            ),
            Role("producer", 1, "streams the index keys, one block a stage; its lanes look up the pages of 32 blocks"),
            Role("idle", WARPS - 1, "nothing: wgmma goes with whole warpgroups"),
            # % endif
        ),
        pipelines=keys.pipelines,
        buffers=(
            # % if decoded
            *query_columns.buffers(ROWS, head_dim, index_key.multiplied()),
            *column_indexer.buffers(),
            *column_maxima.buffers(),
            # % else
            buffer(
                "queries", index_key.multiplied(), align=1024, note="swizzled, in panels of 128 bytes",
                rows=ROWS, head_dim=head_dim,
            ),
            # % endif
            *keys.buffers,
        ),
    )  # fmt: skip


class DecodeScore(Base):
    """
    # <- cta

    # % if decoded
    CTAS of them share a multiprocessor: decoding takes nearly as long as loads, and wants warps that wait in turn. A
    warp decodes one piece of a block (packed_index_left says what that is) while another is multiplied, and reduces the
    product of a unit of 64 keys when the first piece of the next one is decoded. Further columns of queries, of as many
    as a tile has, take the pieces of a unit one after the other. What the warps found of blocks meets in shared memory,
    for many at a time (named barrier 1, of the consumers). Each warp that is not idle finds the CTA's run by itself, 32
    requests at a time.

    Registers are for two pieces: what of a run and of the output is of no use from block to block lies in shared
    memory, and whatever all lanes of a warp have in common is said to be uniform.

    TMA brings the rows of a stage, and every lane of the producer copies some of its scales: both fill it. A stage is
    handed back when the last product of its block is there, and not when it has been decoded: an arrival may overtake
    loads of shared memory whose results nobody has used. Queries and keys are multiplied in 16 bits that hold codes
    times scales exactly, float16 for NVFP4; a power of two of its own keeps each row of queries within them.
    # % else
    Two CTAs share a multiprocessor. With more than 64 KB in flight for each, DRAM delivers less. Each warp that is not
    idle finds the CTA's run by itself, 32 requests at a time.
    # % endif
    """

    def __init__(self, head_dim, block_size, pages_per_block, **scales):
        self.cta = cta(head_dim, block_size, pages_per_block, **scales)
        # % if decoded
        self.keys = index_key.IndexKeys(
            "k", self.cta, head_dim, block_size, pages_per_block, readers="consumer", **scales
        )
        self.columns = query_columns.Columns(ROWS, head_dim, ELEMENTS[STORED], self.keys.element, GROUP)
        # % else
        self.keys = index_key.IndexKeys("k", self.cta, head_dim, block_size, pages_per_block, **scales)
        self.element = self.keys.element
        # % endif
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.panel = tma.panel_columns(self.element, head_dim)  # % if not decoded

    def arguments(self):
        """Stand-ins for cute.compile: tensors, scalars and the stream, in the order of `__call__`."""
        total_q, heads = cute.sym_int(), cute.sym_int()
        return (
            stand_in(self.element, total_q, heads, self.head_dim, align=tma.BYTES),  # % if not decoded
            stand_in(ELEMENTS[STORED], total_q, heads, self.head_dim, align=tma.BYTES),  # % if decoded
            stand_in(Float32, total_q, heads, last=cute.sym_int64()),  # % if precision.scale
            *self.keys.arguments(),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Float32, heads, total_q, cute.sym_int()),
            *(Int32(0) for _ in range(2)),
            *(Int32(0) for _ in range(2)),  # % if precision.scale
            *(Int32(0) for _ in range(2)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        idx_q: cute.Tensor,
        q_scale: cute.Tensor,  # % if precision.scale
        idx_k: cute.Tensor,  # <- tensors of operands.index_key
        page_table: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,
        q_positions: cute.Tensor,
        out: cute.Tensor,
        use_seqused: Int32,
        use_positions: Int32,
        use_q_scale: Int32,  # % if precision.scale
        use_k_scale: Int32,  # % if precision.scale
        causal: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launch, as early as the kernel before allows. An absent tensor is any other of its rank and type."""
        keys = self.keys.stored(
            idx_k,  # <- tensors of operands.index_key
        )
        scales = None  # % if not precision.scale
        scales = index_key.Scales(q_scale, use_q_scale, use_k_scale)  # % if precision.scale
        # % if decoded
        self.kernel(
            keys, idx_q, scales, page_table, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, out, use_seqused,
            use_positions, causal,
        ).launch(
            # num_ctas is two for each multiprocessor.
            grid=(num_ctas * CTAS // 2, 1, 1),
            block=(self.cta.threads, 1, 1),
            min_blocks_per_mp=CTAS,
            # Stated, because the compiler would ask the GPU of this machine otherwise.
            preferred_smem_carveout=100,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip
        # % else
        self.kernel(
            keys, idx_q, scales, page_table, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, out, use_seqused,
            use_positions, causal,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.cta.threads, 1, 1),
            min_blocks_per_mp=2,
            # Stated, because the compiler would ask the GPU of this machine otherwise.
            preferred_smem_carveout=100,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip
        # % endif

    @cute.kernel
    def kernel(
        self, stored: tuple, idx_q: cute.Tensor, scales, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, causal: Int32,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer = self.cta.first_warp("producer")
        memory = SmemAllocator()
        # % if decoded
        q_layout = self.columns.layout()
        # % else
        tiler = (ROWS, self.block_size, self.head_dim)
        q_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, self.element, 1)
        # % endif
        buffers = make_buffers(self.cta, memory, {"queries": q_layout, **self.keys.layouts()})
        barriers = make_barriers(self.cta, memory, self.keys.atoms(stored))
        # % if decoded
        tile = Tile(*(buffers[name] for name in IN_TILE))
        held = self.keys.held(buffers, barriers)
        # % else
        queries, held = buffers["queries"], self.keys.held(buffers, barriers)
        # % endif
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        lengths = Lengths(
            cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, ROWS // Int32(idx_q.shape[1]), Int32(out.shape[2])
        )
        # % if decoded
        if warp >= producer:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == producer:
                self.produce(stored, held, page_table, lengths, self.find_run(lengths))
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            run = self.find_run(lengths)
            self.consume(stored, held, idx_q, scales, q_positions, tile, lengths, run, use_positions, causal, out)
        # % else
        if warp == producer:
            self.produce(stored, held, page_table, lengths, self.find_run(lengths))
        elif warp < producer:
            run = self.find_run(lengths)
            self.consume(stored, held, idx_q, scales, q_positions, queries, lengths, run, use_positions, causal, out)
        # % endif
        # % if decoded

    @cute.jit
    def consume(
        self, stored: tuple, held: tuple, idx_q: cute.Tensor, scales, q_positions: cute.Tensor, tile: Tile,
        lengths: Lengths, run, use_positions: Int32, causal: Int32, out: cute.Tensor,
    ):  # fmt: skip
        """A consumer warp, of rows 16 warp to 16 warp + 15 of every 64 keys."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        score = self.keys.product(query_columns.COLUMNS)
        operand = self.keys.operand(score, held)
        right = wgmma.operand_b(score, tile.queries)
        S = self.keys.accumulator(score, query_columns.COLUMNS)
        first_row = self.keys.row_of(member, lane, 0)
        left, request, number, first_block, length, tiles, blocks = run
        stage = Int32(0)
        phase = Int32(0)
        self.columns.clear(tile.queries, thread)
        while left > 0:
            left, request, number, first_block, length, tiles, blocks = (
                cute.arch.make_warp_uniform(each)
                for each in (left, request, number, first_block, length, tiles, blocks)
            )
            end_block, groups, full_blocks = self.begin(
                stored, idx_q, scales, q_positions, tile, lengths,
                (left, request, number, first_block, length, tiles, blocks), use_positions, causal, thread, out,
                query_columns.COLUMNS,
            )  # fmt: skip
            last_column = query_columns.COLUMNS * (groups - 1)
            # Where the maxima of the block before go; of none, a negative place.
            slot = Int32(-1)
            turn = Int32(0)
            written = Int32(0)
            # Of the keys of a block whose products were reduced, with the last columns.
            first, second = -Float32.inf, -Float32.inf
            for block in cutlass.range(first_block, end_block, unroll=1):
                self.keys.wait(held, stage, phase)
                offset = self.keys.offset_of(stage, member, lane)
                for unit in cutlass.range_constexpr(self.keys.units):
                    factors = self.keys.unit_factors(held, stage, unit, member, lane)
                    self.keys.decode(operand, held, offset, unit, 0, factors)
                    # The unit before, of the block before where this is the first one. Before a tile's first block
                    # nothing is in flight, and what S holds is dropped.
                    before = block - 1 if cutlass.const_expr(unit == 0) else block
                    a, b = self.reduce(
                        S, tile, last_column, before, (unit - 1) % self.keys.units, full_blocks, first_row, lane
                    )
                    first, second = cute.arch.fmax(first, a), cute.arch.fmax(second, b)
                    self.keys.multiply(score, S, operand, unit, 0, right[None, None, None, 0])
                    if cutlass.const_expr(unit == 0):
                        if slot < 0:
                            slot = Int32(0)
                        else:
                            self.keys.release(held, pick(stage == 0, STAGES - 1, stage - 1))
                            column_maxima.fold(
                                first, second, member, lane, tile.maxima[None, None, slot + groups - 1, turn], False
                            )
                            slot = slot + groups
                            if slot + groups > column_maxima.SLOTS:
                                self.emit(tile, turn, slot, written, groups, thread, out)
                                written = written + slot
                                slot = Int32(0)
                                turn = turn ^ 1
                        first, second = -Float32.inf, -Float32.inf
                    for piece in cutlass.range_constexpr(1, self.keys.pieces):
                        self.keys.decode(operand, held, offset, unit, piece, factors)
                        self.keys.multiply(score, S, operand, unit, piece, right[None, None, None, 0])
                    for group in cutlass.range(1, groups, unroll=1):
                        a, b = self.reduce(
                            S, tile, query_columns.COLUMNS * (group - 1), block, unit, full_blocks, first_row, lane
                        )
                        # Said to be uniform, so that its descriptors are made once for a warp.
                        uniform = cute.arch.make_warp_uniform(group)
                        for piece in cutlass.range_constexpr(self.keys.pieces):
                            self.keys.multiply(score, S, operand, unit, piece, right[None, None, None, uniform])
                        column_maxima.fold(
                            a, b, member, lane, tile.maxima[None, None, slot + group - 1, turn], unit > 0
                        )
                    if cutlass.const_expr(self.keys.pieces > 1):
                        warpgroup.wait_group(1)
                stage, phase = following(stage, phase, STAGES)
            a, b = self.reduce(S, tile, last_column, end_block - 1, self.keys.units - 1, full_blocks, first_row, lane)
            first, second = cute.arch.fmax(first, a), cute.arch.fmax(second, b)
            self.keys.release(held, pick(stage == 0, STAGES - 1, stage - 1))
            column_maxima.fold(first, second, member, lane, tile.maxima[None, None, slot + groups - 1, turn], False)
            self.emit(tile, turn, slot + groups, written, groups, thread, out)
            left, request, number, first_block, length, tiles, blocks = self.next_tile(lengths, tile)

    def reduce(self, S, tile, first_column, block, unit, full_blocks, first_row, lane):
        """Wait for the product of a unit -> the maxima of a lane's rows in two columns."""
        first_key = block * self.block_size + ROWS * unit + first_row
        return column_maxima.wait(S, tile.limits, first_column, first_key, block >= full_blocks, lane)

    @cute.jit
    def emit(
        self, tile: Tile, turn: Int32, count: Int32, written: Int32, groups: Int32, thread: Int32, out: cute.Tensor
    ):
        """The maxima of `count` products, behind `written` ones of the tile, one a thread."""
        self.meet()
        slot, column = thread // query_columns.COLUMNS, thread % query_columns.COLUMNS
        product = written + slot
        row = product % groups * query_columns.COLUMNS + column
        if slot < count:
            place = tile.places[row]
            if place >= 0:
                largest = column_maxima.of_warps(tile.maxima[None, None, slot, turn], column)
                score = cute.make_tensor(out.iterator + (place + product // groups), cute.make_layout(1))
                score[0] = scores.scaled(largest, tile.factors[row])
            # % else

    @cute.jit
    def consume(
        self, stored: tuple, held: tuple, idx_q: cute.Tensor, scales, q_positions: cute.Tensor, queries: cute.Tensor,
        lengths: Lengths, run, use_positions: Int32, causal: Int32, out: cute.Tensor,
    ):  # fmt: skip
        """A consumer warp, of rows 16 warp to 16 warp + 15 of a tile."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        first_row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * WARP_ROWS
        heads = Int32(idx_q.shape[1])
        score = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        left_operand = wgmma.operand_a(score, queries)[None, None, None, 0]
        right_operand = wgmma.operand_b(score, held.tiles)
        S = wgmma.accumulator(score, self.block_size)
        limits = cute.make_rmem_tensor(2, Int32)
        maxima = cute.make_rmem_tensor(2, Float32)
        # Of the four lanes that share two rows, the first two write one each.
        half = lane % 4
        my_row = first_row + lane // 4 + half % 2 * 8
        left, request, tile, first_block, length, tiles, blocks = run
        stage = Int32(0)
        phase = Int32(0)
        self.clear_queries(queries, thread)
        while left > 0:
            taken = cutlass.min(left, blocks - first_block)
            end_token = lengths.cu_seqlens_q[request + 1]
            first_token = lengths.cu_seqlens_q[request] + tile * lengths.tile_queries
            rows = cutlass.min(end_token - first_token, lengths.tile_queries) * heads
            self.load_queries(idx_q, queries, first_token, rows, thread)
            for h in cutlass.range_constexpr(2):
                token = cutlass.min(first_token + (first_row + lane // 4 + h * 8) // heads, end_token - 1)
                limits[h] = length - 1
                if causal != 0:
                    limits[h] = last_visible(q_positions, use_positions, token, end_token, length, length)
            least = Int32(cute.arch.warp_redux_sync(cutlass.min(limits[0], limits[1]), "min"))
            full_blocks = cutlass.max(least + 1, 0) // self.block_size
            my_head, my_token = my_row % heads, cutlass.min(first_token + my_row // heads, end_token - 1)
            my_scores = out[my_head, my_token, None]
            factor = self.keys.row_factor(stored, scales, my_token, my_head)
            for block in cutlass.range(first_block, first_block + taken, unroll=1):
                cute.arch.mbarrier_wait(held.full + stage, phase)
                wgmma.multiply(score, S, left_operand, right_operand[None, None, None, stage])
                warpgroup.wait_group(0)
                factors = self.keys.factors(held, stage)
                if cutlass.const_expr(factors is None):
                    # Waiting for a product brings the warp together.
                    arrive_alone(held.free + stage)
                if first_row < rows:
                    maxima.fill(-Float32.inf)
                    scores.block_max(S, maxima, limits, block * self.block_size, block, full_blocks, lane, factors)
                    upper, lower = softmax.quad_max(maxima[0]), softmax.quad_max(maxima[1])
                    if (half < 2) & (my_row < rows):
                        my_scores[block] = scores.scaled(scores.pick_float(half == 1, lower, upper), factor)
                if cutlass.const_expr(factors is not None):
                    # They lie in the stage until all lanes have read them.
                    arrive(held.free + stage)
                stage, phase = following(stage, phase, STAGES)
            left = left - taken
            first_block = Int32(0)
            request, tile, length, tiles, blocks = self.advance(lengths, left, request, tile, length, tiles, blocks)

    @cute.jit
    def clear_queries(self, queries: cute.Tensor, thread: Int32):
        """Zeros for rows that never hold a query: products with them cost the least power, and so the memory's clock
        stays up. `load_queries` puts a barrier between these and its rows.
        """
        vector = vector_of(self.element)
        zeros = cute.make_rmem_tensor(BYTES // 4, Int32)
        zeros.fill(0)
        zeros = cute.make_tensor(cute.recast_ptr(zeros.iterator, dtype=self.element), cute.make_layout(vector))
        chunks = self.head_dim // vector
        for i in cutlass.range_constexpr(ROWS * chunks // GROUP):
            place = i * GROUP + thread
            copy_wide(zeros, self.wide_of_tile(queries, place // chunks, place % chunks))

    @cute.jit
    def load_queries(self, idx_q: cute.Tensor, queries: cute.Tensor, first_token: Int32, rows: Int32, thread: Int32):
        """The rows of a tile, by all consumer warps, for wgmma to read. The others keep what they hold: no row's
        products depend on another row, and theirs are dropped.
        """
        heads = Int32(idx_q.shape[1])
        vector = vector_of(self.element)
        chunks = self.head_dim // vector
        passes = ROWS * chunks // GROUP
        got = cute.make_rmem_tensor((vector, passes), self.element)
        # All loads before the first store: they are in flight together.
        for i in cutlass.range_constexpr(passes):
            row = (i * GROUP + thread) // chunks
            if row < rows:
                source = idx_q[first_token + row // heads, row % heads, None]
                copy_wide(wide(source, thread % chunks), got[None, i])
        # The rows of the tile before are read until every warp has waited for its last product.
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)
        for i in cutlass.range_constexpr(passes):
            row = (i * GROUP + thread) // chunks
            if row < rows:
                copy_wide(got[None, i], self.wide_of_tile(queries, row, thread % chunks))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)

    @cute.jit
    def wide_of_tile(self, queries: cute.Tensor, row: Int32, place: Int32) -> cute.Tensor:
        """The 16 bytes of this number in a row of a tile: like `wide`, for swizzled panels."""
        vector = vector_of(self.element)
        in_panel = self.panel // vector
        # Rows of 64 bytes change places after two of them, those of 128 bytes after each.
        swizzled = (place ^ row // (SWIZZLED // in_panel)) % in_panel
        offset = (place // in_panel * ROWS + row) * self.panel + swizzled * vector
        start = queries.iterator.toint() + offset * self.element.width // 8
        aligned = cute.make_ptr(self.element, start, queries.iterator.memspace, assumed_align=BYTES)
        return cute.make_tensor(aligned, cute.make_layout(vector))
        # % endif
