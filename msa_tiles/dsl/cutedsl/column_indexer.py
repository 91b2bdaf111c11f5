"""What forms of decode_score share whose queries are columns of products: a tile of queries in shared memory.

A kernel derives from `ColumnIndexer` and has `columns`, which bring queries, besides what split_indexer wants. What of
a run and of the output is of no use from block to block lies in shared memory: registers are for keys.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from msa_tiles.dsl.cutedsl.registers import anew
from msa_tiles.dsl.cutedsl.split_indexer import Lengths, SplitIndexer
from msa_tiles.dsl.cutedsl.varlen import last_visible
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Role, buffer, declares

WARPS = 4  # of the consumer warpgroup
GROUP = 128  # threads of it
RUN = 6  # values of a run that are of no use within a tile
IN_TILE = ("queries", "powers", "limits", "factors", "places", "run", "maxima")


@declares
def roles_of(producer_registers, consumer_registers):
    """One warpgroup that computes, and one of which a warp loads."""
    return (
        Role(
            "consumer", WARPS, "loads the rows of a tile, S^T = K Q^T 64 keys at a time, column maxima, stores",
            consumer_registers,
        ),
        Role(
            "producer", 1, "streams the index keys, one block a stage; its lanes look up the pages of 32 blocks",
            producer_registers,
        ),
        Role("idle", WARPS - 1, "nothing: wgmma goes with whole warpgroups", producer_registers),
    )  # fmt: skip


@declares
def buffers():
    """What is told of the rows of a tile."""
    return (
        buffer("limits", "int32", rows=ROWS, note="the last key that a query sees"),
        buffer("factors", "float32", rows=ROWS, note="of all products of a query"),
        buffer("places", "int64", rows=ROWS, note="of a query's scores in the output, -1 for no query"),
        buffer("run", "int32", values=RUN, note="what is to come behind a tile"),
    )


class Tile(NamedTuple):
    """What the consumers keep of a tile of queries in shared memory, and where they meet."""

    queries: Any
    powers: Any
    limits: Any
    factors: Any
    places: Any
    run: Any
    maxima: Any


class ColumnIndexer(SplitIndexer):
    """Brings the queries of a tile."""

    def meet(self):
        """Until all consumers are here."""
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)

    @cute.jit
    def begin(
        self, stored: tuple, idx_q: cute.Tensor, scales, q_positions: cute.Tensor, tile: Tile, lengths: Lengths, run,
        use_positions: Int32, causal: Int32, thread: Int32, out: cute.Tensor, columns: cutlass.Constexpr,
    ):  # fmt: skip
        """Bring the tile that a run has come to -> the block behind its last one, the products that it takes, of
        `columns` queries each, and the number of blocks that all of its queries see whole.
        """
        left, request, number, first_block, length, tiles, blocks = run
        heads = Int32(idx_q.shape[1])
        taken = cutlass.min(left, blocks - first_block)
        end_token = cute.arch.make_warp_uniform(lengths.cu_seqlens_q[request + 1])
        first_token = cute.arch.make_warp_uniform(lengths.cu_seqlens_q[request]) + number * lengths.tile_queries
        rows = cutlass.min(end_token - first_token, lengths.tile_queries) * heads
        groups = cute.arch.make_warp_uniform((rows + columns - 1) // columns)
        self.meet()
        self.columns.bring(idx_q, tile.queries, tile.powers, first_token, rows, anew(thread))
        self.meet()
        self.keys.prepare(self.columns.by_rows(tile.queries), anew(thread))
        if thread == 0:
            for i, value in enumerate((left - taken, request, number, length, tiles, blocks)):
                tile.run[i] = value
        least = self.note_rows(
            stored, scales, q_positions, tile, first_token, end_token, rows, heads, length, use_positions, causal,
            first_block, thread, out,
        )  # fmt: skip
        full_blocks = cutlass.max(cute.arch.make_warp_uniform(least) + 1, 0) // self.block_size
        return first_block + taken, groups, full_blocks

    @cute.jit
    def note_rows(
        self, stored: tuple, scales, q_positions: cute.Tensor, tile: Tile, first_token: Int32, end_token: Int32,
        rows: Int32, heads: Int32, length: Int32, use_positions: Int32, causal: Int32, first_block: Int32,
        thread: Int32, out: cute.Tensor,
    ):  # fmt: skip
        """What a tile's queries see and are multiplied with, and where scores go; the last key that all of them see."""
        least = length - 1
        for first in cutlass.range_constexpr(0, ROWS, WARP):
            row = first + thread % WARP
            token = cutlass.min(first_token + row // heads, end_token - 1)
            limit = length - 1
            if causal != 0:
                limit = last_visible(q_positions, use_positions, token, end_token, length, length)
            least = cutlass.min(least, limit)
            if thread < WARP:
                tile.limits[row] = limit
                tile.places[row] = Int64(-1)
                if row < rows:
                    of_head = Int64(row % heads) * out.stride[0]
                    tile.places[row] = of_head + Int64(token) * out.stride[1] + Int64(first_block)
                    tile.factors[row] = self.keys.row_factor(stored, scales, token, row % heads) * tile.powers[row]
        self.meet()
        return Int32(cute.arch.warp_redux_sync(least, "min"))

    def next_tile(self, lengths: Lengths, tile: Tile):
        """The run behind a tile."""
        left, request, number, length, tiles, blocks = (tile.run[i] for i in range(RUN))
        request, number, length, tiles, blocks = self.advance(lengths, left, request, number, length, tiles, blocks)
        return left, request, number, Int32(0), length, tiles, blocks
