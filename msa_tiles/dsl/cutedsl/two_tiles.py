"""The indexer with two tiles of queries a warpgroup, and with the scales of quantised queries and keys.

Every block of keys is multiplied with both tiles in turn, so that keys are loaded half as often as with one, and a
lane of a consumer warp serves one row from its first block to its last. Rows of queries and keys take 64 or 128 bytes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl import maxima
from msa_tiles.dsl.cutedsl.indexer import ROWS, WARPS, Indexer
from msa_tiles.dsl.cutedsl.pipeline import following
from msa_tiles.dsl.table import buffer, declares

GROUP_ROWS = 2 * ROWS  # rows of a consumer warpgroup


@declares
def query_scales_of(tiles, heads):
    """Scales of the queries of so many tiles, with a group of several heads."""
    return buffer("query_scales", "float32", align=128, rows=tiles * ROWS, heads=heads)


class TwoTileIndexer(Indexer):
    """Tiles of GROUP_ROWS queries a warpgroup; otherwise as `Indexer`, whose methods of the same names these replace.

    Only scales that can change a ranking are read. Those of queries do where a KV head has several index heads: rows'
    maxima are multiplied by them. One scale for all keys never does; scales of single keys (key_scales = 1) multiply
    the columns of a score tile.
    """

    def arguments(self, out_element, scalars):
        """The same, with the scales behind q_positions."""
        idx_q, q_scale, idx_k, k_scale, *places = super().arguments(out_element, scalars)
        return idx_q, idx_k, *places[:5], q_scale, k_scale, *places[5:]

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
        self, operands, q_full: cute.Pointer, held: tuple, query_scale: cute.Tensor, warp: Int32, sight,
        num_blocks: Int32, row,
    ):  # fmt: skip
        """Two score tiles: the upper one is reduced while the lower one is multiplied, then the other way round.

        Calls finish_block(row, block, score) after every block, with the score of this lane's row.
        """
        upper = self.score_tile(operands)
        lower = self.score_tile(operands)
        upper_max = cute.make_rmem_tensor(2, Float32)
        lower_max = cute.make_rmem_tensor(2, Float32)
        lane = cute.arch.lane_idx()
        first_tile = warp // WARPS * 2 * self.heads
        last = self.heads - 1
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(held.full, 0)
        self.multiply(operands, first_tile, stage, upper)
        for block in cutlass.range(num_blocks, unroll=1):
            next_stage, phase = following(stage, phase, self.stages)
            scales = self.keys.factors(held, stage)
            # Not unrolled: the compiler would keep the addresses of every head's queries in registers.
            for r in cutlass.range(self.heads, unroll=1):
                warpgroup.wait_group(0)
                self.multiply(operands, first_tile + self.heads + r, stage, lower)
                self.reduce(upper, upper_max, 0, sight[0], scales, query_scale, warp, r, block, row)
                next_tile = first_tile + r + 1
                product_stage = stage
                if r == last:
                    next_tile = first_tile
                    product_stage = next_stage
                    if block + 1 < num_blocks:
                        cute.arch.mbarrier_wait(held.full + next_stage, phase)
                warpgroup.wait_group(0)
                if r == last:
                    self.release_tile(held, stage, lane)
                # Past the last block this multiplies a stale stage and the result is dropped: the waits stay uniform.
                self.multiply(operands, next_tile, product_stage, upper)
                self.reduce(lower, lower_max, 1, sight[1], scales, query_scale, warp, r, block, row)
            self.release_factors(held, stage)
            stage = next_stage
            self.finish_block(row, block, maxima.row_of_lane(upper_max, lower_max, lane))
        warpgroup.wait_group(0)

    @cute.jit
    def score_blocks_singly(
        self, operands, q_full: cute.Pointer, held: tuple, query_scale: cute.Tensor, warp: Int32, sight,
        num_blocks: Int32, row,
    ):  # fmt: skip
        """The same with one score tile, for lists that leave no registers for a second one."""
        scores = self.score_tile(operands)
        both = (cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32))
        lane = cute.arch.lane_idx()
        first_tile = warp // WARPS * 2 * self.heads
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
        for block in cutlass.range(num_blocks, unroll=1):
            cute.arch.mbarrier_wait(held.full + stage, phase)
            scales = self.keys.factors(held, stage)
            for tile in cutlass.range_constexpr(2):
                for r in cutlass.range(self.heads, unroll=1):
                    self.multiply(operands, first_tile + tile * self.heads + r, stage, scores)
                    warpgroup.wait_group(0)
                    self.reduce(scores, both[tile], tile, sight[tile], scales, query_scale, warp, r, block, row)
            self.release_tile(held, stage, lane)
            self.release_factors(held, stage)
            stage, phase = following(stage, phase, self.stages)
            self.finish_block(row, block, maxima.row_of_lane(*both, lane))

    @cute.jit
    def reduce(
        self, scores: cute.Tensor, tile_max: cute.Tensor, tile: cutlass.Constexpr, sight, scales,
        query_scale: cute.Tensor, warp: Int32, head: Int32, block: Int32, row,
    ):  # fmt: skip
        """The row maxima of one head in the upper or the lower tile -> tile_max, where those of the heads before are.

        scales are the keys' of this block, sight is the tile's.
        """
        lane = cute.arch.lane_idx()
        limits, full_blocks = sight
        found = maxima.tile_maxima(
            scores, scales, limits, block * self.block_size, block >= full_blocks, row.positive[0], lane
        )  # fmt: skip
        for half in cutlass.range_constexpr(2):
            if cutlass.const_expr(self.heads == 1):
                tile_max[half] = found[half]
            else:
                place = warp // WARPS * GROUP_ROWS + tile * ROWS + warp % WARPS * 16 + half * 8 + lane // 4
                # Scales are positive, so that a row is multiplied once, after its maximum is taken.
                scaled = found[half] * query_scale[place, head]
                if head > 0:
                    scaled = cute.arch.fmax(scaled, tile_max[half])
                tile_max[half] = scaled
