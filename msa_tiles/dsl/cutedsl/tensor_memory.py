"""Scores of 128 queries accumulated in tensor memory: what takes the place of the wgmma loops of `Indexer` on SM100.

A producer warp loads, the elected thread of a multiplying warp starts every product, and thread i of an epilogue
warpgroup reads row i of a product: its warps come first, because warp i reads lanes 32 (i % 4) and up. A kernel derives
from `TensorIndexer` and calls its methods in the order in which they stand here; finding the tile and the producer are
those of `Indexer`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.indexer import ROWS, Indexer
from msa_tiles.dsl.cutedsl.pipeline import arrive_alone, following
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.varlen import tile_limits

QUERIES = 128  # rows of a tile: the lanes of tensor memory
DEPTH = 16  # columns of the operands that one multiplication takes
COLUMNS = 32  # of tensor memory that a thread reads at a time
CHAINS = 4  # of maxima, so that one need not wait for the last


@dsl_user_op
def fence_before_sync(*, loc=None, ip=None):
    """Order what this thread did in tensor memory before its next arrival."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_sync(*, loc=None, ip=None):
    """Order what this thread does in tensor memory after its last wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


class TensorIndexer(Indexer):
    """Scores of tiles of QUERIES consecutive queries of one request, by blocks of keys; keys as in `Indexer`."""

    def __init__(self, table, keys, heads):
        """`heads` index heads are reduced to one maximum."""
        # TMA brings the queries in boxes of ROWS, as on SM90. With so few threads each may have all the registers there
        # are, so that nothing is redistributed.
        super().__init__(table, keys, QUERIES // ROWS, heads)
        self.accumulators = table.depth("s")

    def multiplications(self):
        """The first step of a product, which forgets what was there, and the steps after it."""
        major = OperandMajorMode.K
        op = tcgen05.MmaF16BF16Op(
            self.element, Float32, (QUERIES, self.block_size, DEPTH), tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.SMEM, major, major,
        )  # fmt: skip
        first, rest = (cute.make_tiled_mma(op) for _ in range(2))
        first.set(tcgen05.Field.ACCUMULATE, False)
        rest.set(tcgen05.Field.ACCUMULATE, True)
        return first, rest

    def layouts(self):
        """Of queries and keys: row by row within a panel of 64 columns, then the next panel, as TMA brings them."""
        mma = self.multiplications()[0]
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, self.element)
        return {
            name: tcgen05.tile_to_mma_shape(atom, cute.append(shape, count), order=(1, 2, 3))
            for name, shape, count in (
                ("queries", mma.partition_shape_A((QUERIES, self.head_dim)), self.heads),
                (f"{self.keys.name}_tiles", mma.partition_shape_B((self.block_size, self.head_dim)), self.stages),
            )
        }

    def query_boxes(self, queries):
        """Where TMA writes queries: [rows, columns, box of a tile, head, panel]."""
        layout = cute.make_layout(
            (ROWS, self.panel, self.tiles, self.heads, self.head_dim // self.panel),
            stride=(self.panel, 1, ROWS * self.panel, QUERIES * self.head_dim, QUERIES * self.panel),
        )
        return cute.make_tensor(queries.iterator, layout)

    @cute.jit
    def prepare(self, memory: SmemAllocator, atoms: tuple):
        """Queries in shared memory, what the keys hold, the accumulators [QUERIES, block_size, accumulator] in tensor
        memory, and the barriers of queries and accumulators; ready on return.
        """
        mma = self.multiplications()[0]
        buffers = make_buffers(self.cta, memory, self.layouts())
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.cta.first_warp("multiplier"):
            cute.arch.alloc_tmem(self.cta.tensor_memory, buffers["address"].iterator)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_sync()
        barriers = make_barriers(self.cta, memory, atoms)
        fence_after_sync()
        shape = cute.append(mma.partition_shape_C((QUERIES, self.block_size)), self.accumulators)
        layout = mma.make_fragment_C(shape).layout
        scores = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, buffers["address"].iterator), layout)
        q_full, s_full, s_free = (barriers + self.cta.place(name) for name in ("q_full", "s_full", "s_free"))
        return buffers["queries"], self.keys.held(buffers, barriers), scores, q_full, s_full, s_free

    @cute.jit
    def multiply_all(
        self, sQ: cute.Tensor, held: tuple, scores: cute.Tensor, q_full: cute.Pointer, s_full: cute.Pointer,
        s_free: cute.Pointer, num_blocks: Int32,
    ):  # fmt: skip
        """The multiplying warp: for every block and every head a product into the next accumulator."""
        first, rest = self.multiplications()
        queries = first.make_fragment_A(sQ)
        keys = first.make_fragment_B(held.tiles)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
        stage = Int32(0)
        phase = Int32(0)
        place = Int32(0)
        free_phase = Int32(1)
        for _ in cutlass.range(num_blocks, unroll=1):
            cute.arch.mbarrier_wait(held.full + stage, phase)
            for r in cutlass.range(self.heads, unroll=1):
                cute.arch.mbarrier_wait(s_free + place, free_phase)
                fence_after_sync()
                into = scores[None, None, None, place]
                for step in cutlass.range_constexpr(self.head_dim // DEPTH):
                    mma = first if cutlass.const_expr(step == 0) else rest
                    cute.gemm(mma, into, queries[None, None, step, r], keys[None, None, step, stage], into)
                with cute.arch.elect_one():
                    if r == self.heads - 1:
                        tcgen05.commit(held.free + stage)
                    # Last, so that whoever has seen the last product leaves with nothing under way.
                    tcgen05.commit(s_full + place)
                place, free_phase = following(place, free_phase, self.accumulators)
            stage, phase = following(stage, phase, self.stages)

    @cute.jit
    def full_blocks(
        self, q_positions: cute.Tensor, use_positions: Int32, first_token: Int32, end_token: Int32,
        first_limit: Int32, length: Int32,
    ) -> Int32:  # fmt: skip
        """The number of blocks that all rows of the tile see whole; all lanes of a warp must call it."""
        last_token = cutlass.min(first_token + self.tile, end_token) - 1
        least, _ = tile_limits(q_positions, use_positions, first_token, last_token, first_limit, length)
        return cutlass.max(least + 1, 0) // self.block_size

    def reader(self, scores, thread):
        """How a thread of the epilogue reads its row: the copy, the row [values, 1, (1, step, accumulator)], and the
        shape of a step in registers.
        """
        rows = scores[(None, None), 0, 0, None]
        boxes = cute.zipped_divide(rows, (QUERIES, COLUMNS))
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COLUMNS)), Float32)
        copy = tcgen05.make_tmem_copy(atom, boxes[None, (0, 0, 0)]).get_slice(thread)
        columns = cute.zipped_divide(cute.make_identity_tensor((QUERIES, COLUMNS)), (QUERIES, COLUMNS))
        return copy, copy.partition_S(boxes), copy.partition_D(columns)[None, None, (0, 0)].shape

    @cute.jit
    def fold_product(
        self, reader, place: Int32, s_free: cute.Pointer, chains: cute.Tensor, room: Int32, whole: Boolean, lane: Int32
    ):  # fmt: skip
        """Fold the row of this thread in one accumulator into its maxima, and give the accumulator back.

        The row sees the columns up to `room`, or all of them if `whole`, which is the same for all lanes of a warp. NaN
        products are ignored (fmax).
        """
        if whole:
            self.fold_row(reader, place, s_free, chains, None, lane)
        else:
            self.fold_row(reader, place, s_free, chains, room, lane)

    @cute.jit
    def fold_row(self, reader, place: Int32, s_free: cute.Pointer, chains: cute.Tensor, room, lane: Int32):
        """The same, for all columns where `room` is None."""
        copy, source, shape = reader
        steps = self.block_size // COLUMNS
        parts = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        cute.copy(copy, source[None, None, (0, 0, place)], parts[0])
        for step in cutlass.range_constexpr(steps):
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(step + 1 < steps):
                cute.copy(copy, source[None, None, (0, step + 1, place)], parts[(step + 1) % 2])
            else:
                fence_before_sync()
                arrive_alone(s_free + place)
            for column in cutlass.range_constexpr(COLUMNS):
                score = parts[step % 2][column]
                if cutlass.const_expr(room is not None):
                    score = pick_float(room >= step * COLUMNS + column, score, -Float32.inf)
                chains[column % CHAINS] = cute.arch.fmax(chains[column % CHAINS], score)

    @cute.jit
    def finish(self, scores: cute.Tensor):
        """Give the tensor memory back; every thread of the block calls it."""
        fence_before_sync()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.cta.first_warp("multiplier"):
            fence_after_sync()
            cute.arch.dealloc_tmem(scores.iterator, self.cta.tensor_memory)
