"""Where the index_kl kernel stores its partial results, and how consumers do it."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl import softmax
from msa_tiles.dsl.cutedsl.kl.layout import LN_2, Layout, Shared
from msa_tiles.dsl.cutedsl.kl.tile import Tile
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.words import query_of, slot_of


class Results(NamedTuple):
    """Where the partial results go."""

    present: Any
    losses: Any
    partial_dq: Any
    partial_dk: Any
    factor: Any


class Writers(Layout):
    """Losses and gradients of tasks and edges, from registers to memory."""

    @cute.jit
    def store_loss(self, shared: Shared, results: Results, tile: Tile, buffer: Int32):
        """Add the loss of a task's keys to what stands there, and begin with 0 again."""
        losses = results.losses[shared.headers[buffer, 1], shared.headers[buffer, 2], None]
        for half in cutlass.range_constexpr(2):
            total = softmax.quad_sum(tile.row_loss[half]) * LN_2
            if tile.lane % 4 == 0:
                # One addition to each place in a launch: their order is that of the launches.
                cute.arch.atomic_add(losses.iterator + (tile.consumer * ROWS + tile.row + 8 * half), total)
            tile.row_loss[half] = Float32(0.0)

    @cute.jit
    def store_queries(self, shared: Shared, results: Results, tile: Tile, buffer: Int32):
        """d_idx_q of a chunk's edges -> memory: eight neighbouring dims of four edges at a time."""
        head = shared.headers[buffer, 1]
        for j in cutlass.range_constexpr(self.chunk_edges // 8):
            for c in cutlass.range_constexpr(2):
                edge = shared.edges[buffer, 8 * j + 2 * (tile.lane % 4) + c]
                own = edge >= 0
                if cutlass.const_expr(self.index_dim == ROWS):
                    # All consumers have the same.
                    own = own & (tile.consumer == 0)
                if own:
                    row = results.partial_dq[query_of(edge), slot_of(edge), head, None]
                    for m in cutlass.range_constexpr(self.own_tiles):
                        for half in cutlass.range_constexpr(2):
                            value = tile.dq[(c, half, j), m, 0] * results.factor
                            row[self.tile_of(tile.consumer, m) * ROWS + tile.row + 8 * half] = value

    @cute.jit
    def store_keys(self, shared: Shared, results: Results, tile: Tile, buffer: Int32):
        """d_idx_k of a task -> memory."""
        partial = results.partial_dk[shared.headers[buffer, 1], shared.headers[buffer, 2], None, None]
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=64)
        for half in cutlass.range_constexpr(2):
            row = partial[tile.consumer * ROWS + tile.row + 8 * half, None]
            start = (row.iterator + 2 * (tile.lane % 4)).toint()
            pairs = cute.make_tensor(
                cute.make_ptr(Float32, start, row.memspace, assumed_align=8),
                cute.make_layout((2, self.index_dim // 8), stride=(1, 8)),
            )
            for j in cutlass.range_constexpr(self.index_dim // 8):
                pair = cute.make_rmem_tensor(2, Float32)
                for c in cutlass.range_constexpr(2):
                    pair[c] = tile.dk[(c, half, j), 0, 0] * results.factor
                cute.copy(atom, pair, pairs[None, j])

    def tile_of(self, consumer, own):
        """Which 64 rows of d_idx_q^T a consumer's own-th tile is."""
        if self.index_dim == ROWS:
            return 0
        return consumer if self.own_tiles == 1 else own
