"""The indexer with two tiles of queries a warpgroup, and with the scales of quantised queries and keys.

Every block of keys is multiplied with both tiles in turn, so that keys are loaded half as often as with one, and a
lane of a consumer warp serves one row from its first block to its last. Rows of queries and keys take 64 or 128 bytes.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import maxima, tma, wgmma
from msa_tiles.dsl.cutedsl.elements import ELEMENTS as UNSCALED
from msa_tiles.dsl.cutedsl.indexer import GROUP, ROWS, Indexer

ELEMENTS = {**UNSCALED, "float8_e4m3fn": cutlass.Float8E4M3FN}
TALL = 2 * ROWS  # rows of a consumer warpgroup
WARPS = GROUP // 32
SCALES = 7  # where the scales stand among the arguments


class TallIndexer(Indexer):
    """Tiles of consumers * TALL queries; otherwise as `Indexer`, whose methods of the same names these replace.

    Only scales that can change a ranking are read. Those of queries do where a KV head has several index heads: rows'
    maxima are multiplied by them. One scale for all keys never does; scales of single keys (key_scales = 1) multiply
    the columns of a score tile.
    """

    def __init__(
        self, element, head_dim, block_size, heads, pages_per_block, key_scales, stages, consumers,
        producer_registers, consumer_registers,
    ):  # fmt: skip
        super().__init__(
            ELEMENTS[element], head_dim, block_size, heads, pages_per_block, stages, consumers, producer_registers,
            consumer_registers,
        )  # fmt: skip
        self.key_scales = key_scales
        self.tile = consumers * TALL
        self.tiles = 2 * consumers  # of ROWS queries of one head
        self.query_bytes = self.tile * heads * head_dim * self.element.width // 8

    def arguments(self, out_element, scalars):
        """The same with q_scale [total_q, num_index_heads] and k_scale, which has the rows of the keys.

        Without key_scales k_scale is some vector that nobody reads.
        """
        plain = super().arguments(out_element, scalars)
        scales = []
        for shape in (plain[0].shape[:2], plain[1].shape[: -1 if self.key_scales else 1]):
            strides = tuple(cute.sym_int64() for _ in shape)
            sizes = tuple(extent if isinstance(extent, int) else cute.sym_int() for extent in shape)
            scales.append(make_fake_tensor(Float32, sizes, strides))
        return (*plain[:SCALES], *scales, *plain[SCALES:])

    def describe(self, idx_q, idx_k):
        """On the host: copy atom and coordinates of the queries [token, dim, head] and of the keys."""
        keys = tma.described(idx_k, (1, 2, 0) if self.pages_per_block else (0, 1))
        queries = tma.described(idx_q, (0, 2, 1))
        return (*self.box_atom(queries, ROWS), *self.box_atom(keys, self.box_rows))

    def box_atom(self, tensor, rows):
        """The copy atom for boxes of whole rows, swizzled as wgmma wants them, and the tensor of its coordinates."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if self.head_dim * self.element.width == 1024 else kinds.K_SW64
        shape = (rows, self.head_dim)
        layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.element), shape, order=(0, 1))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, shape)

    def boxes(self, tiles, rows, boxes_per_tile, count):
        """Tiles in shared memory as boxes of `rows` whole rows: [rows, head_dim, box, tile]."""
        layout = cute.make_layout(
            (rows, self.head_dim, boxes_per_tile, count),
            stride=(self.head_dim, 1, rows * self.head_dim, rows * boxes_per_tile * self.head_dim),
        )
        return cute.make_tensor(tiles.iterator, layout)

    @cute.jit
    def prepare(self, memory: SmemAllocator, q_atom: cute.CopyAtom, k_atom: cute.CopyAtom):
        """Shared memory: queries [ROWS, head_dim, tile and head], keys [block_size, head_dim, stage], their scales
        [block_size, stage], those of queries [row, head], barriers.

        Barriers: q_full, then k_full of every stage, then k_free of every stage; ready for use on return.
        """
        tiler = (ROWS, self.block_size, self.head_dim)
        rows = LayoutEnum.ROW_MAJOR
        q_layout = hopper.make_smem_layout_a(rows, tiler, self.element, self.tiles * self.heads)
        k_layout = hopper.make_smem_layout_b(rows, tiler, self.element, self.stages)
        queries = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        keys = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        key_scale = memory.allocate_tensor(Float32, cute.make_layout((self.block_size, self.stages)), 128)
        query_scale = memory.allocate_tensor(Float32, cute.make_layout((self.tile, self.heads)), 128)
        barriers = memory.allocate_array(Int64, 1 + 2 * self.stages)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barriers, 1)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(barriers + 1 + stage, 1 + self.key_scales)
                cute.arch.mbarrier_init(barriers + 1 + self.stages + stage, self.consumers * WARPS)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
        cute.arch.sync_threads()
        return queries, keys, key_scale, query_scale, barriers, barriers + 1, barriers + 1 + self.stages

    @cute.jit
    def produce(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor, sQ: cute.Tensor,
        sK: cute.Tensor, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer, page_table: cute.Tensor,
        cu_seqlens_k: cute.Tensor, head: Int32, request: Int32, first_token: Int32, num_blocks: Int32,
    ):  # fmt: skip
        """The producer warp: all query tiles once, then one block of keys a stage."""
        pages_per_block = max(self.pages_per_block, 1)
        q_boxes = self.boxes(sQ, ROWS, 1, self.tiles * self.heads)
        k_boxes = self.boxes(sK, self.box_rows, pages_per_block, self.stages)
        if num_blocks > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, self.query_bytes)
            for tile in cutlass.range_constexpr(self.tiles):
                for r in cutlass.range_constexpr(self.heads):
                    target = q_boxes[None, None, 0, tile * self.heads + r]
                    queries = mQ[None, None, head * self.heads + r]
                    tma.load_box(q_atom, queries, first_token + tile * ROWS, 0, target, q_full)
        stage = Int32(0)
        phase = Int32(1)
        for block in cutlass.range(num_blocks, unroll=1):
            pages = self.pages(page_table, request, block)
            cute.arch.mbarrier_wait(k_free + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, self.block_bytes)
            if cutlass.const_expr(self.pages_per_block > 0):
                for p in cutlass.range_constexpr(self.pages_per_block):
                    target = k_boxes[None, None, p, stage]
                    tma.load_box(k_atom, mK[None, None, pages[p]], Int32(0), 0, target, k_full + stage)
            else:
                row = cu_seqlens_k[request] + block * self.block_size
                tma.load_box(k_atom, mK, row, 0, k_boxes[None, None, 0, stage], k_full + stage)
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def pages(self, page_table: cute.Tensor, request: Int32, block: Int32):
        """The pages of a block; nothing for flat keys."""
        found = []
        for p in cutlass.range_constexpr(self.pages_per_block):
            entry = cutlass.min(block * self.pages_per_block + p, Int32(page_table.shape[1]) - 1)
            found.append(page_table[request, entry])
        return found

    @cute.jit
    def produce_scales(
        self, k_scale: cute.Tensor, key_scale: cute.Tensor, k_full: cute.Pointer, k_free: cute.Pointer,
        page_table: cute.Tensor, cu_seqlens_k: cute.Tensor, request: Int32, num_blocks: Int32,
    ):  # fmt: skip
        """The second producer warp: the scales of the keys of a stage. Rows that no query sees get any scale."""
        lane = cute.arch.lane_idx()
        values = cute.make_rmem_tensor(self.block_size // 32, Float32)
        stage = Int32(0)
        phase = Int32(1)
        for block in cutlass.range(num_blocks, unroll=1):
            # Before the wait, so that the scales are there when the stage is free.
            for i in cutlass.range_constexpr(self.block_size // 32):
                key = lane + 32 * i
                if cutlass.const_expr(self.pages_per_block > 0):
                    entry = block * self.pages_per_block + key // self.box_rows
                    page = page_table[request, cutlass.min(entry, Int32(page_table.shape[1]) - 1)]
                    # An entry past the request's keys may name any page.
                    page = cutlass.min(cutlass.max(page, 0), Int32(k_scale.shape[0]) - 1)
                    values[i] = k_scale[page, key % self.box_rows]
                else:
                    row = cu_seqlens_k[request] + block * self.block_size + key
                    values[i] = k_scale[cutlass.min(row, Int32(k_scale.shape[0]) - 1)]
            cute.arch.mbarrier_wait(k_free + stage, phase)
            for i in cutlass.range_constexpr(self.block_size // 32):
                key_scale[lane + 32 * i, stage] = values[i]
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(k_full + stage)
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1

    def operands(self, sQ, sK):
        """The two multiplications (the first step of a product, the steps after it) and their operands in smem."""
        multiplications = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        return multiplications, wgmma.operand_a(multiplications, sQ), wgmma.operand_b(multiplications, sK)

    @cute.jit
    def multiply(self, operands, tile: Int32, stage: Int32, into: cute.Tensor):
        """Start into = queries of this tile x keys of this stage."""
        multiplications, queries, keys = operands
        wgmma.multiply(multiplications, into, queries[None, None, None, tile], keys[None, None, None, stage])

    @cute.jit
    def read_query_scales(
        self, q_scale: cute.Tensor, use_q_scale: Int32, query_scale: cute.Tensor, token: Int32, head: Int32, row: Int32
    ):
        """Store the scales of one row, or 1, for the heads of its group; row counts in the tile of the CTA.

        The lanes of a warp call it for the rows of their warp, which then are there for all of them.
        """
        for r in cutlass.range_constexpr(self.heads):
            scale = Float32(1)
            if use_q_scale != 0:
                scale = q_scale[token, head * self.heads + r]
            query_scale[row, r] = scale
        cute.arch.sync_warp()

    @cute.jit
    def sight(
        self, q_positions: cute.Tensor, use_positions: Int32, first_token: Int32, end_token: Int32,
        first_limit: Int32, length: Int32, warp: Int32,
    ):  # fmt: skip
        """What `row_limits` says of the upper and of the lower tile; warp counts in the warpgroup."""
        thread = warp * 32 + cute.arch.lane_idx()
        found = []
        for tile in cutlass.range_constexpr(2):
            first = tile * ROWS
            found.append(
                self.row_limits(
                    q_positions, use_positions, first_token + first, end_token, first_limit + first, length, thread
                )
            )
        return found

    @cute.jit
    def score_blocks(
        self, operands, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer, key_scale: cute.Tensor,
        query_scale: cute.Tensor, warp: Int32, sight, num_blocks: Int32, row,
    ):  # fmt: skip
        """Two score tiles: the upper one is reduced while the lower one is multiplied, then the other way round.

        Calls finish_block(row, block, score) after every block, with the score of this lane's row.
        """
        upper = wgmma.accumulator(operands[0], self.block_size)
        lower = wgmma.accumulator(operands[0], self.block_size)
        upper_max = cute.make_rmem_tensor(2, Float32)
        lower_max = cute.make_rmem_tensor(2, Float32)
        lane = cute.arch.lane_idx()
        first_tile = warp // WARPS * 2 * self.heads
        last = self.heads - 1
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(k_full, 0)
        self.multiply(operands, first_tile, stage, upper)
        for block in cutlass.range(num_blocks, unroll=1):
            next_stage = stage + 1
            if next_stage == self.stages:
                next_stage = Int32(0)
                phase = phase ^ 1
            scales = key_scale[None, stage]
            # Not unrolled: the compiler would keep the addresses of every head's queries in registers.
            for r in cutlass.range(self.heads, unroll=1):
                warpgroup.wait_group(0)
                self.multiply(operands, first_tile + self.heads + r, stage, lower)
                self.reduce(upper, upper_max, 0, sight[0], scales, query_scale, warp, r, block, row)
                following = first_tile + r + 1
                following_stage = stage
                if r == last:
                    following = first_tile
                    following_stage = next_stage
                    if block + 1 < num_blocks:
                        cute.arch.mbarrier_wait(k_full + next_stage, phase)
                warpgroup.wait_group(0)
                if cutlass.const_expr(not self.key_scales):
                    if r == last:
                        self.release(k_free + stage, lane)
                # Past the last block this multiplies a stale stage and the result is dropped: the waits stay uniform.
                self.multiply(operands, following, following_stage, upper)
                self.reduce(lower, lower_max, 1, sight[1], scales, query_scale, warp, r, block, row)
            if cutlass.const_expr(self.key_scales):
                # The scales lie in the stage until both tiles are reduced.
                cute.arch.sync_warp()
                self.release(k_free + stage, lane)
            stage = next_stage
            self.finish_block(row, block, maxima.row_of_lane(upper_max, lower_max, lane))
        warpgroup.wait_group(0)

    @cute.jit
    def score_blocks_singly(
        self, operands, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer, key_scale: cute.Tensor,
        query_scale: cute.Tensor, warp: Int32, sight, num_blocks: Int32, row,
    ):  # fmt: skip
        """The same with one score tile, for lists that leave no registers for a second one."""
        scores = wgmma.accumulator(operands[0], self.block_size)
        both = (cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
        lane = cute.arch.lane_idx()
        first_tile = warp // WARPS * 2 * self.heads
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
        for block in cutlass.range(num_blocks, unroll=1):
            cute.arch.mbarrier_wait(k_full + stage, phase)
            scales = key_scale[None, stage]
            for tile in cutlass.range_constexpr(2):
                for r in cutlass.range(self.heads, unroll=1):
                    self.multiply(operands, first_tile + tile * self.heads + r, stage, scores)
                    warpgroup.wait_group(0)
                    self.reduce(scores, both[tile], tile, sight[tile], scales, query_scale, warp, r, block, row)
            cute.arch.sync_warp()
            self.release(k_free + stage, lane)
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
            self.finish_block(row, block, maxima.row_of_lane(*both, lane))

    @cute.jit
    def reduce(
        self, scores: cute.Tensor, tile_max: cute.Tensor, tile: cutlass.Constexpr, sight, scales: cute.Tensor,
        query_scale: cute.Tensor, warp: Int32, head: Int32, block: Int32, row,
    ):  # fmt: skip
        """The row maxima of one head in the upper or the lower tile -> tile_max, where those of the heads before are.

        scales are the keys' of this block, sight is the tile's.
        """
        lane = cute.arch.lane_idx()
        limits, full_blocks = sight
        found = maxima.tile_maxima(
            scores, scales if cutlass.const_expr(self.key_scales) else None, limits, block * self.block_size,
            block >= full_blocks, row.positive[0], lane,
        )  # fmt: skip
        for half in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.heads == 1):
                tile_max[half] = found[half]
            else:
                place = warp // WARPS * TALL + tile * ROWS + warp % WARPS * 16 + half * 8 + lane // 4
                # Scales are positive, so that a row is multiplied once, after its maximum is taken.
                scaled = found[half] * query_scale[place, head]
                if head > 0:
                    scaled = cute.arch.fmax(scaled, tile_max[half])
                tile_max[half] = scaled
