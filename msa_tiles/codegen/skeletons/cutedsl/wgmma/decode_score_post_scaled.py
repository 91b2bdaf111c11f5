"""Indexer scores with block max-pool for few queries per request: the keys are split over all CTAs.

Grid: num_ctas CTAs, each of which takes a run of the blocks of all requests (split_indexer). A tile is
ROWS // num_index_heads consecutive queries of a request with all their index heads.

The keys are read once from memory (once for each tile of a request from L2), and decoded beside that: they are the rows
of S^T = K Q^T, which wgmma takes from registers. Four queries at a time are its columns, each of them twice: for either
group of a chunk of keys there is a column, whose sums are scaled behind the product.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import column_indexer, e4m3_columns, group_maxima, scores, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.column_indexer import GROUP, IN_TILE, ColumnIndexer, Tile
from msa_tiles.dsl.cutedsl.e4m3_columns import COLUMNS
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.operands import index_plain as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.pipeline import following
from msa_tiles.dsl.cutedsl.registers import anew
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.split_indexer import Lengths
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import Table, declares

STAGES = 3  # <- tile.stages
CTAS = 3  # <- tile.ctas
PRODUCER_REGISTERS = 24  # <- tile.producer_registers
CONSUMER_REGISTERS = 136  # <- tile.consumer_registers
STORED = "bfloat16"  # <- precision.query.element


def decode_score(
    head_dim: int,
    block_size: int,
    pages_per_block: int,
):
    """Build the kernel for one index dim, block size and page size.

    idx_q [total_q, num_index_heads, head_dim] with at most ROWS heads, idx_k [total_k, head_dim], or
    [pages, page, head_dim] with pages_per_block > 0 and page_table [requests, max_pages] -> out [num_index_heads,
    total_q, max_blocks] float32 with any strides on heads and tokens. Written are the blocks that hold keys of the
    query's request: the largest product of the block's visible keys, -inf for a block without one. The columns behind
    them, and the rows of no request, are left as they are.
    Keys come in bytes with the scales of their groups, and are decoded. Products are multiplied by q_scale [total_q,
    num_index_heads], where it is to be used, and by the first element of the keys' global scale, if they have one.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = DecodeScore(
        head_dim,
        block_size,
        pages_per_block,
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, block_size, pages_per_block, **scales):
    """What a thread block is made of."""
    keys = index_key.parts("k", head_dim, block_size, STAGES, producer="producer", readers="consumer", **scales)
    return Table(
        roles=column_indexer.roles_of(PRODUCER_REGISTERS, CONSUMER_REGISTERS),
        pipelines=keys.pipelines,
        buffers=(
            *e4m3_columns.buffers(ROWS, head_dim),
            *column_indexer.buffers(),
            *group_maxima.buffers(),
            *keys.buffers,
        ),
    )  # fmt: skip


class DecodeScore(ColumnIndexer):
    """
    # <- cta

    CTAS of them share a multiprocessor. A warp reads codes and scales of a whole block at once, decodes a unit of 64
    keys while the one before is multiplied, and reduces that one's products while its own are under way: each unit has
    registers and accumulators of its own. Further columns of queries, of as many as a tile has, are multiplied with a
    unit one after the other. What lanes found of blocks meets in shared memory, for many at a time (named barrier 1, of
    the consumers). Each warp that is not idle finds the CTA's run by itself, 32 requests at a time.

    Whatever all lanes of a warp have in common is said to be uniform.

    TMA brings the rows of a stage, and every lane of the producer copies some of its scales: both fill it. A stage is
    handed back when the last product of its block has been reduced, and not when it has been read: an arrival may
    overtake loads of shared memory whose results nobody has used.
    Codes are multiplied as e4m3, and so are queries, of which each is the sum of two rows.
    """

    def __init__(self, head_dim, block_size, pages_per_block, **scales):
        self.cta = cta(head_dim, block_size, pages_per_block, **scales)
        self.keys = index_key.IndexKeys(
            "k", self.cta, head_dim, block_size, pages_per_block, readers="consumer", **scales
        )
        self.columns = e4m3_columns.Columns(ROWS, head_dim, ELEMENTS[STORED], self.keys.element, GROUP)
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block

    def arguments(self):
        """Stand-ins for cute.compile: tensors, scalars and the stream, in the order of `__call__`."""
        total_q, heads = cute.sym_int(), cute.sym_int()
        return (
            stand_in(ELEMENTS[STORED], total_q, heads, self.head_dim, align=tma.BYTES),
            stand_in(Float32, total_q, heads, last=cute.sym_int64()),
            *self.keys.arguments(),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(Float32, heads, total_q, cute.sym_int()),
            *(Int32(0) for _ in range(2)),
            *(Int32(0) for _ in range(2)),
            *(Int32(0) for _ in range(2)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        idx_q: cute.Tensor,
        q_scale: cute.Tensor,
        idx_k: cute.Tensor,  # <- tensors of operands.index_key
        page_table: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,
        q_positions: cute.Tensor,
        out: cute.Tensor,
        use_seqused: Int32,
        use_positions: Int32,
        use_q_scale: Int32,
        use_k_scale: Int32,
        causal: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launch, as early as the kernel before allows. An absent tensor is any other of its rank and type."""
        keys = self.keys.stored(
            idx_k,  # <- tensors of operands.index_key
        )
        scales = index_key.Scales(q_scale, use_q_scale, use_k_scale)
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

    @cute.kernel
    def kernel(
        self, stored: tuple, idx_q: cute.Tensor, scales, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, causal: Int32,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer = self.cta.first_warp("producer")
        memory = SmemAllocator()
        q_layout = self.columns.layout()
        buffers = make_buffers(self.cta, memory, {"queries": q_layout, **self.keys.layouts()})
        barriers = make_barriers(self.cta, memory, self.keys.atoms(stored))
        tile = Tile(*(buffers[name] for name in IN_TILE))
        held = self.keys.held(buffers, barriers)
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        lengths = Lengths(
            cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, ROWS // Int32(idx_q.shape[1]), Int32(out.shape[2])
        )
        if warp >= producer:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == producer:
                self.produce(stored, held, page_table, lengths, self.find_run(lengths))
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            run = self.find_run(lengths)
            self.consume(stored, held, idx_q, scales, q_positions, tile, lengths, run, use_positions, causal, out)

    @cute.jit
    def consume(
        self, stored: tuple, held: tuple, idx_q: cute.Tensor, scales, q_positions: cute.Tensor, tile: Tile,
        lengths: Lengths, run, use_positions: Int32, causal: Int32, out: cute.Tensor,
    ):  # fmt: skip
        """A consumer warp, of rows 16 warp to 16 warp + 15 of every 64 keys."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        score = self.keys.product(COLUMNS)
        operands = self.keys.operand(score, held)
        right = wgmma.operand_b(score, tile.queries)
        S = self.keys.accumulators(score)
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
                COLUMNS,
            )  # fmt: skip
            last_unit = self.keys.units - 1
            last_column = COLUMNS * (groups - 1)
            # Where the maxima of the block before go; of none, a negative place.
            slot = Int32(-1)
            written = Int32(0)
            # Of its units that were reduced, and the scales of the last one.
            found = -Float32.inf
            near_scales, far_scales = Int32(0), Int32(0)
            for block in cutlass.range(first_block, end_block, unroll=1):
                self.keys.wait(held, stage, phase)
                offset = self.keys.offset_of(stage, member, lane)
                codes = [self.keys.fetch(held, offset, unit) for unit in range(self.keys.units)]
                of_groups = [self.keys.group_scales(held, stage, unit, member, lane) for unit in range(self.keys.units)]
                # Described anew, from a number that is uniform: else descriptors wait in registers of each lane.
                nearest = right[None, None, None, cute.arch.make_warp_uniform(anew(Int32(0)))]
                # The last unit of the block before. Before a tile's first block nothing is in flight, and what S holds
                # is dropped.
                warpgroup.wait_group(0)
                one = self.reduce(
                    S[last_unit], (near_scales, far_scales), tile, last_column, block - 1, last_unit, full_blocks,
                    first_row, lane,
                )  # fmt: skip
                if slot < 0:
                    slot = Int32(0)
                else:
                    group_maxima.put(cute.arch.fmax(found, one), tile.maxima, slot + groups - 1, member, lane, False)
                    self.keys.release(held, pick(stage == 0, STAGES - 1, stage - 1))
                    slot = slot + groups
                    if slot + groups > group_maxima.SLOTS:
                        self.emit(tile, slot, written, groups, thread, out)
                        written = written + slot
                        slot = Int32(0)
                found = -Float32.inf
                for unit in cutlass.range_constexpr(self.keys.units):
                    self.keys.decode(operands[unit], codes[unit])
                    self.keys.multiply(score, S[unit], operands[unit], nearest)
                    if cutlass.const_expr(unit > 0):
                        warpgroup.wait_group(1)
                        one = self.reduce(
                            S[unit - 1], of_groups[unit - 1], tile, last_column, block, unit - 1, full_blocks,
                            first_row, lane,
                        )  # fmt: skip
                        found = cute.arch.fmax(found, one)
                    for group in cutlass.range(1, groups, unroll=1):
                        warpgroup.wait_group(0)
                        column = COLUMNS * (group - 1)
                        one = self.reduce(
                            S[unit], of_groups[unit], tile, column, block, unit, full_blocks, first_row, lane
                        )
                        # Said to be uniform, so that its descriptors are made once for a warp.
                        uniform = cute.arch.make_warp_uniform(group)
                        self.keys.multiply(score, S[unit], operands[unit], right[None, None, None, uniform])
                        group_maxima.put(one, tile.maxima, slot + group - 1, member, lane, unit > 0)
                near_scales, far_scales = of_groups[last_unit]
                stage, phase = following(stage, phase, STAGES)
            warpgroup.wait_group(0)
            one = self.reduce(
                S[last_unit], (near_scales, far_scales), tile, last_column, end_block - 1, last_unit, full_blocks,
                first_row, lane,
            )  # fmt: skip
            group_maxima.put(cute.arch.fmax(found, one), tile.maxima, slot + groups - 1, member, lane, False)
            self.keys.release(held, pick(stage == 0, STAGES - 1, stage - 1))
            self.emit(tile, slot + groups, written, groups, thread, out)
            left, request, number, first_block, length, tiles, blocks = self.next_tile(lengths, tile)

    def reduce(self, S, of_groups, tile, first_column, block, unit, full_blocks, first_row, lane):
        """The products of a unit, which must be there -> the maximum of a lane's rows for its query."""
        first_key = block * self.block_size + ROWS * unit + first_row
        return group_maxima.reduce(
            self.keys, S, of_groups, tile.limits, first_column, first_key, block >= full_blocks, lane
        )

    @cute.jit
    def emit(self, tile: Tile, count: Int32, written: Int32, groups: Int32, thread: Int32, out: cute.Tensor):
        """The maxima of `count` products, behind `written` ones of the tile, one a thread. All consumers meet twice."""
        self.meet()
        slot, column = thread // COLUMNS, thread % COLUMNS
        product = written + slot
        row = product % groups * COLUMNS + column
        if slot < count:
            place = tile.places[row]
            if place >= 0:
                largest = group_maxima.largest(tile.maxima, slot, column)
                score = cute.make_tensor(out.iterator + (place + product // groups), cute.make_layout(1))
                score[0] = scores.scaled(largest, tile.factors[row])
        self.meet()
