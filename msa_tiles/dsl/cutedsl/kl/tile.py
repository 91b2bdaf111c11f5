"""What a consumer warp of the index_kl kernel works with."""

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import swap_ab, wgmma
from msa_tiles.dsl.cutedsl.kl.layout import WARP_ROWS, WARPS, Layout, Shared
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP


class Tile(NamedTuple):
    """What a consumer warp works with: products, their operands and results, and which part of a tile is its own."""

    score: Any  # S = K Q^T
    K: Any
    queries: Any
    S: tuple  # of even tiles, and of odd ones
    teacher: Any
    score_product: Any  # scores = idx_k idx_q^T
    keys: Any
    index_queries: Any
    scores: Any
    dS: Any
    index_columns: Any
    dk: Any  # += dS idx_q
    query_product: Any  # dq = idx_k^T dS
    key_columns: Any
    weights: Any
    dq: Any
    row_loss: Any
    loading: tuple
    staging: tuple
    scale_log2: Any
    index_scale_log2: Any
    consumer: Any
    row: Any  # the lane's first one among the consumer's 64
    lane: Any


class Tiles(Layout):
    """Makes them."""

    @cute.jit
    def tile(self, shared: Shared, scale_log2: Float32, index_scale_log2: Float32, warp_index: Int32):
        """Products, operands and registers of a consumer warp."""
        consumer = warp_index // WARPS
        lane = cute.arch.lane_idx()
        thread = warp_index % WARPS * WARP + lane
        score = wgmma.product(self.element, ROWS, OperandMajorMode.K, warpgroup.OperandSource.RMEM)
        score_product = swap_ab.product(self.element, self.chunk_edges, OperandMajorMode.K)
        sum_keys = self.sum_keys()
        query_product = swap_ab.product(self.element, self.chunk_edges, OperandMajorMode.MN)
        # The same bytes, along their other side.
        by_column = LayoutEnum.COL_MAJOR
        index_columns = hopper.make_smem_layout_b(
            by_column, (ROWS, self.index_dim, self.chunk_edges), self.element, self.chunks
        )
        key_columns = hopper.make_smem_layout_a(by_column, (self.index_dim, ROWS, self.block_size), self.element, 2)
        by_key = cute.make_tensor(shared.dS.iterator, cute.select(shared.dS.layout, mode=[1, 0, 2]))
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.element)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.element)
        loading = cute.make_tiled_copy_A(ldmatrix, score[0]).get_slice(thread)
        staging = cute.make_tiled_copy_C(stmatrix, score_product[0]).get_slice(thread)
        scores = swap_ab.accumulator(score_product, ROWS, self.chunk_edges)
        row_loss = cute.make_rmem_tensor(2, Float32)
        row_loss.fill(0.0)
        return Tile(
            score,
            cute.make_rmem_tensor(score[0].partition_shape_A((ROWS, self.head_dim)), self.element),
            wgmma.operand_b(score, shared.ring),
            (wgmma.accumulator(score, ROWS), wgmma.accumulator(score, ROWS)),
            cute.make_rmem_tensor(scores.layout, Float32),
            score_product,
            wgmma.operand_a(score_product, shared.keys),
            wgmma.operand_b(score_product, shared.index_queries),
            scores,
            cute.make_rmem_tensor(sum_keys[0].partition_shape_A((ROWS, self.chunk_edges)), self.element),
            wgmma.operand_b(sum_keys, cute.make_tensor(shared.index_queries.iterator, index_columns.outer)),
            wgmma.accumulator(sum_keys, self.index_dim),
            query_product,
            wgmma.operand_a(query_product, cute.make_tensor(shared.keys.iterator, key_columns.outer)),
            wgmma.operand_b(query_product, shared.dS),
            swap_ab.accumulator(query_product, self.own_tiles * ROWS, self.chunk_edges),
            row_loss,
            (ldmatrix, loading, loading.partition_S(shared.k_tile)),
            (stmatrix, staging, staging.partition_D(by_key)),
            scale_log2,
            index_scale_log2,
            consumer,
            warp_index % WARPS * WARP_ROWS + lane // 4,
            lane,
        )

    def sum_keys(self):
        """The multiplications of dS and idx_q."""
        return wgmma.product(self.element, self.index_dim, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
