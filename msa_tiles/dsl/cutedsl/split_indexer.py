"""What forms of decode_score share: the keys of all requests are split over the CTAs.

The unit of work is one KV block for one query tile; the units of all requests stand in one list, request after request,
tile after tile, block after block, and every CTA takes a run of it, equal to within one unit, whatever the lengths are.
A kernel derives from `SplitIndexer` and has `keys`, `block_size` and `pages_per_block`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.pipeline import following
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.varlen import key_length
from msa_tiles.dsl.cutedsl.warp import ballot, count_bits, inclusive_sum
from msa_tiles.dsl.table import WARP


class Lengths(NamedTuple):
    """What says how many units a request has."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    use_seqused: Any
    tile_queries: Any
    max_blocks: Any


class SplitIndexer:
    """Finds the run of a CTA, and streams its keys."""

    @cute.jit
    def measure(self, lengths: Lengths, request: Int32):
        """Keys, query tiles and blocks of a request."""
        length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
        tokens = lengths.cu_seqlens_q[request + 1] - lengths.cu_seqlens_q[request]
        tiles = (tokens + lengths.tile_queries - 1) // lengths.tile_queries
        blocks = (cutlass.max(length, 0) + self.block_size - 1) // self.block_size
        return length, tiles, cutlass.min(blocks, lengths.max_blocks)

    @cute.jit
    def measure_any(self, lengths: Lengths, request: Int32):
        """The same; nothing for a request behind the last one."""
        length, tiles, blocks = Int32(0), Int32(0), Int32(0)
        if request < Int32(cute.size(lengths.cu_seqlens_q)) - 1:
            length, tiles, blocks = self.measure(lengths, request)
        return length, tiles, blocks

    @cute.jit
    def find_run(self, lengths: Lengths):
        """This CTA's run, `left` units long: (left, request, tile, first block) and what `measure` says of the request.

        All lanes of a warp must call it.
        """
        lane = cute.arch.lane_idx()
        cta = cute.arch.block_idx()[0]
        num_ctas = cute.arch.grid_dim()[0]
        # Lane i measures request i, and keeps what it found: mostly there are no more than 32.
        length, tiles, blocks = self.measure_any(lengths, lane)
        total = Int32(cute.arch.warp_redux_sync(tiles * blocks, "add"))
        for first in cutlass.range(WARP, Int32(cute.size(lengths.cu_seqlens_q)) - 1, WARP, unroll=1):
            _, more_tiles, more_blocks = self.measure_any(lengths, first + lane)
            total = total + Int32(cute.arch.warp_redux_sync(more_tiles * more_blocks, "add"))
        share = total // num_ctas
        longer = total - share * num_ctas
        left = share + pick(cta < longer, 1, 0)
        skip = cta * share + cutlass.min(cta, longer)
        request = Int32(0)
        searching = left
        while searching > 0:
            own = tiles * blocks
            until = inclusive_sum(own, lane)
            passed = cute.arch.shuffle_sync(until, WARP - 1)
            if skip < passed:
                place = count_bits(ballot(until <= skip))
                passed = cute.arch.shuffle_sync(until - own, place)
                request = request + place
                length, tiles, blocks = (cute.arch.shuffle_sync(x, place) for x in (length, tiles, blocks))
                searching = Int32(0)
            else:
                request = request + WARP
                length, tiles, blocks = self.measure_any(lengths, request + lane)
            skip = skip - passed
        tile = skip // cutlass.max(blocks, 1)
        return left, request, tile, skip - tile * blocks, length, tiles, blocks

    @cute.jit
    def advance(
        self, lengths: Lengths, left: Int32, request: Int32, tile: Int32, length: Int32, tiles: Int32, blocks: Int32
    ):
        """The next tile; where a request has no more, the first one of the next request that has units."""
        tile = tile + 1
        if (left > 0) & (tile == tiles):
            tile = Int32(0)
            tiles = Int32(0)
            while tiles * blocks == 0:
                request = request + 1
                length, tiles, blocks = self.measure(lengths, request)
        return request, tile, length, tiles, blocks

    @cute.jit
    def produce(self, stored: tuple, held: tuple, page_table: cute.Tensor, lengths: Lengths, run):
        """The producer warp: one block of keys a stage."""
        lane = cute.arch.lane_idx()
        left, request, tile, first_block, length, tiles, blocks = run
        stage = Int32(0)
        phase = Int32(1)
        while left > 0:
            taken = cutlass.min(left, blocks - first_block)
            for first in cutlass.range(first_block, first_block + taken, WARP, unroll=1):
                count = cutlass.min(first_block + taken - first, WARP)
                pages = self.keys.pages(page_table, request, first + cutlass.min(lane, count - 1))
                for i in cutlass.range(count, unroll=1):
                    row = Int32(0)
                    if cutlass.const_expr(self.pages_per_block == 0):
                        row = lengths.cu_seqlens_k[request] + (first + i) * self.block_size
                    of_block = [cute.arch.shuffle_sync(page, i) for page in pages]
                    self.keys.load(stored, held, stage, phase, row, of_block)
                    stage, phase = following(stage, phase, self.keys.stages)
            left = left - taken
            first_block = Int32(0)
            request, tile, length, tiles, blocks = self.advance(lengths, left, request, tile, length, tiles, blocks)
