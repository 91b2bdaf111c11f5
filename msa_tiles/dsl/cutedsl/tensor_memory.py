"""Scores of 128 queries accumulated in tensor memory: what takes the place of the wgmma loops of `Indexer` on SM100.

Roles: a producer warp (TMA), a multiplying warp, whose elected thread starts every product, and an epilogue warpgroup,
whose thread i reads row i of a product. A kernel derives from `TensorIndexer` and calls its methods in the order in
which they stand here; finding the tile and describing the tensors to TMA are those of `Indexer`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.indexer import GROUP, ROWS, Indexer
from msa_tiles.dsl.cutedsl.operands.index_native import IndexKeys
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.varlen import tile_limits

QUERIES = 128  # rows of a tile: the lanes of tensor memory
DEPTH = 16  # columns of the operands that one multiplication takes
COLUMNS = 32  # of tensor memory that a thread reads at a time
CHAINS = 4  # of maxima, so that one need not wait for the last
PRODUCER, MULTIPLIER = 4, 5  # warps; the epilogue's come first, because warp i reads lanes 32 (i % 4) and up


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

    def __init__(self, element, head_dim, block_size, heads, pages_per_block, stages, accumulators):
        """`heads` index heads are reduced to one maximum; the rest are the plan's tile sizes."""
        # TMA brings the queries in boxes of ROWS, as on SM90. With so few threads each may have all the registers there
        # are, so that nothing is redistributed.
        keys = IndexKeys(element, head_dim, block_size, pages_per_block, None, stages, 1)
        super().__init__(keys, heads, QUERIES // ROWS, 0, 0)
        self.pages_per_block = pages_per_block
        self.accumulators = accumulators
        self.threads = 2 * GROUP

    def describe(self, idx_q, idx_k):
        """On the host: copy atom and coordinates of the queries [token, dim, head] and of the keys."""
        queries, keys = self.described(idx_q), self.keys.stored(idx_k)
        return *queries, keys.atom, keys.rows

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

    @cute.jit
    def prepare(self, memory: SmemAllocator, q_atom: cute.CopyAtom, k_atom: cute.CopyAtom):
        """Queries and keys in shared memory, the accumulators [QUERIES, block_size, accumulator], and the barriers.

        Barriers: q_full, k_full and k_free of every stage, s_full and s_free of every accumulator; ready on return.
        """
        mma = self.multiplications()[0]
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, self.element)
        tiles = []
        for shape, count in (
            (mma.partition_shape_A((QUERIES, self.head_dim)), self.heads),
            (mma.partition_shape_B((self.block_size, self.head_dim)), self.stages),
        ):
            # Row by row within a panel of 64 columns, then the next panel: as TMA brings them.
            layout = tcgen05.tile_to_mma_shape(atom, cute.append(shape, count), order=(1, 2, 3))
            tiles.append(memory.allocate_tensor(self.element, layout.outer, 1024, layout.inner))
        barriers = memory.allocate_array(Int64, 1 + 2 * self.stages + 2 * self.accumulators)
        address = memory.allocate_array(Int32, 1)
        q_full = barriers
        k_full = q_full + 1
        k_free = k_full + self.stages
        s_full = k_free + self.stages
        s_free = s_full + self.accumulators
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cute.arch.thread_idx()[0] == 0:
            for arrivals, first, count in (
                (1, q_full, 1),
                (1, k_full, self.stages),
                (1, k_free, self.stages),
                (1, s_full, self.accumulators),
                (GROUP // 32, s_free, self.accumulators),
            ):
                for place in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(first + place, arrivals)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
        if warp == MULTIPLIER:
            cute.arch.alloc_tmem(self.accumulators * self.block_size, address)
            cute.arch.relinquish_tmem_alloc_permit()
            fence_before_sync()
        cute.arch.sync_threads()
        fence_after_sync()
        shape = cute.append(mma.partition_shape_C((QUERIES, self.block_size)), self.accumulators)
        layout = mma.make_fragment_C(shape).layout
        scores = cute.make_tensor(cute.arch.retrieve_tmem_ptr(Float32, 16, address), layout)
        return *tiles, scores, q_full, k_full, k_free, s_full, s_free

    @cute.jit
    def produce(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor, sQ: cute.Tensor,
        sK: cute.Tensor, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer, page_table: cute.Tensor,
        cu_seqlens_k: cute.Tensor, head: Int32, request: Int32, first_token: Int32, num_blocks: Int32,
    ):  # fmt: skip
        """The producer warp: the queries of every head once, then one block of keys a stage."""
        q_boxes = tma.boxes(sQ, ROWS, QUERIES, self.head_dim, self.heads)
        k_boxes = tma.boxes(sK, self.keys.box_rows, self.block_size, self.head_dim, self.stages)
        panels = self.head_dim // tma.PANEL
        if num_blocks > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, self.query_bytes)
            for r in cutlass.range_constexpr(self.heads):
                queries = mQ[None, None, head * self.heads + r]
                for panel in cutlass.range_constexpr(panels):
                    for box in cutlass.range_constexpr(QUERIES // ROWS):
                        target = q_boxes[None, None, box, panel, r]
                        tma.load_box(q_atom, queries, first_token + box * ROWS, panel, target, q_full)
        stage = Int32(0)
        phase = Int32(1)
        for block in cutlass.range(num_blocks, unroll=1):
            pages = []
            if cutlass.const_expr(self.pages_per_block > 0):
                for p in cutlass.range_constexpr(self.pages_per_block):
                    entry = cutlass.min(block * self.pages_per_block + p, Int32(page_table.shape[1]) - 1)
                    pages.append(page_table[request, entry])
            cute.arch.mbarrier_wait(k_free + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, self.keys.block_bytes)
            for panel in cutlass.range_constexpr(panels):
                if cutlass.const_expr(self.pages_per_block > 0):
                    for p in cutlass.range_constexpr(self.pages_per_block):
                        target = k_boxes[None, None, p, panel, stage]
                        tma.load_box(k_atom, mK[None, None, pages[p]], Int32(0), panel, target, k_full + stage)
                else:
                    row = cu_seqlens_k[request] + block * self.block_size
                    tma.load_box(k_atom, mK, row, panel, k_boxes[None, None, 0, panel, stage], k_full + stage)
            stage, phase = self.advance(stage, phase, self.stages)

    @cute.jit
    def multiply_all(
        self, sQ: cute.Tensor, sK: cute.Tensor, scores: cute.Tensor, q_full: cute.Pointer, k_full: cute.Pointer,
        k_free: cute.Pointer, s_full: cute.Pointer, s_free: cute.Pointer, num_blocks: Int32,
    ):  # fmt: skip
        """The multiplying warp: for every block and every head a product into the next accumulator."""
        first, rest = self.multiplications()
        queries = first.make_fragment_A(sQ)
        keys = first.make_fragment_B(sK)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
        stage = Int32(0)
        phase = Int32(0)
        place = Int32(0)
        free_phase = Int32(1)
        for _ in cutlass.range(num_blocks, unroll=1):
            cute.arch.mbarrier_wait(k_full + stage, phase)
            for r in cutlass.range(self.heads, unroll=1):
                cute.arch.mbarrier_wait(s_free + place, free_phase)
                fence_after_sync()
                into = scores[None, None, None, place]
                for step in cutlass.range_constexpr(self.head_dim // DEPTH):
                    mma = first if cutlass.const_expr(step == 0) else rest
                    cute.gemm(mma, into, queries[None, None, step, r], keys[None, None, step, stage], into)
                with cute.arch.elect_one():
                    if r == self.heads - 1:
                        tcgen05.commit(k_free + stage)
                    # Last, so that whoever has seen the last product leaves with nothing under way.
                    tcgen05.commit(s_full + place)
                place, free_phase = self.advance(place, free_phase, self.accumulators)
            stage, phase = self.advance(stage, phase, self.stages)

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
                if lane == 0:
                    cute.arch.mbarrier_arrive(s_free + place)
            for column in cutlass.range_constexpr(COLUMNS):
                score = parts[step % 2][column]
                if cutlass.const_expr(room is not None):
                    score = pick_float(room >= step * COLUMNS + column, score, -Float32.inf)
                chains[column % CHAINS] = cute.arch.fmax(chains[column % CHAINS], score)

    @cute.jit
    def advance(self, place: Int32, phase: Int32, depth: cutlass.Constexpr) -> tuple[Int32, Int32]:
        """The next place of a ring and its phase."""
        place = place + 1
        if place == depth:
            place = Int32(0)
            phase = phase ^ 1
        return place, phase

    @cute.jit
    def finish(self, scores: cute.Tensor):
        """Give the tensor memory back; every thread of the block calls it."""
        fence_before_sync()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == MULTIPLIER:
            fence_after_sync()
            cute.arch.dealloc_tmem(scores.iterator, self.accumulators * self.block_size)
