"""e4m3 keys or values in a ring of tiles of 16 bits, which decoding warps make of their bytes in place.

Keys become float16 in it, too, and queries with them: decoders make bfloat16 too slowly. With token_scales all stay
bfloat16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.decoding import PANEL, UNIT, column_of, words_at
from msa_tiles.dsl.cutedsl.e4m3_storage import Storage, Stored
from msa_tiles.dsl.cutedsl.gradients import HIGH, round_pair
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Parts, Pipeline, buffer, declares, lane, threads, warps

LEAST_SCALE = 1.0e-30
MAGNITUDE = 0x7FFF  # of a bfloat16
BIAS, MOST_POWER = 127, 253  # of a float32's exponent; of both a power of two and its inverse none is subnormal


@declares
def ring_parts(stages, *, producer, decoder, readers, token_scales):
    """A ring of blocks in memory of the kernel: what TMA brings, and what the decoder makes of it in its place."""
    copies = (threads(producer),) if token_scales else ()
    return Parts(
        (
            Pipeline("raw", stages, (lane(producer), *copies)),
            Pipeline("ring", stages, (warps(decoder),), (warps(readers),)),
        ),
        (),
    )


@declares
def query_parts(rows, *, producer, decoder, readers, token_scales):
    """A tile of queries, which TMA fills; for float16 keys the decoder makes float16 of it."""
    freed = (warps(readers),)
    if token_scales:
        return Parts((Pipeline("q", 1, (lane(producer),), freed),), ())
    return Parts(
        (Pipeline("q_raw", 1, (lane(producer),)), Pipeline("q", 1, (warps(decoder),), freed)),
        (buffer("query_powers", "uint8", rows=rows, note="the exponents of what a query's rows were multiplied with"),),
    )


@declares
def in_ring(name, token_scales):
    """The element of the product, of a ring, whose decoders make bfloat16 too slowly."""
    return "bfloat16" if token_scales else "float16"


class InRing(Storage):
    """Blocks as the right side of products, in a ring of tiles of the kernel's: see msa_tiles.dsl.cutedsl.operands.

    K and V come as bytes to the second half of their stage, with scales of tokens to its first bytes, and the decoders
    make 16 bits of them in place, times those scales: bfloat16 where tokens have scales, else float16, which takes
    fewer instructions. Decoded rows of two panels lie where their own bytes did; those of one panel are decoded in
    their order, by one warp, so that none is overwritten before it is read. For float16 keys the decoders make float16
    of Q in place, too, times a power of two for each row, which the softmax undoes. A scale that a head shares is
    folded into the softmax's (keys) and multiplies O behind the last shared block (values).
    """

    LANDING = "raw_full"  # where the bytes of a stage are awaited first
    decoded = True
    multiplied = staticmethod(in_ring)

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, token_scales):
        super().__init__(name, table, head_dim, block_size, pages_per_block, token_scales=token_scales)
        self.Q_LANDING = "q_full" if token_scales else "q_raw_full"  # likewise of queries

    def raw_of(self, tile):
        """The bytes of a tile."""
        half = self.block_size * self.head_dim
        return cute.make_ptr(self.stored_element, tile.toint() + half, tile.memspace, assumed_align=1024)

    def boxes(self, tiles, stages):
        """Where TMA writes in a ring of tiles: [rows, columns, box, panel, stage]."""
        of_stage = self.blocks.boxes_of(cute.make_tensor(self.raw_of(tiles.iterator), cute.make_layout(1)), 1)
        shape = (*of_stage.shape[:4], stages)
        stride = (*of_stage.stride[:4], 2 * self.block_size * self.head_dim)
        return cute.make_tensor(of_stage.iterator, cute.make_layout(shape, stride=stride))

    def scales_in(self, tile):
        start = cute.make_ptr(Float32, tile.toint(), tile.memspace, assumed_align=128)
        return cute.make_tensor(start, cute.make_layout(self.block_size))

    @cute.jit
    def load_scales(
        self, stored: Stored, row: Int32, page: Int32, head: Int32, tile: cute.Pointer, barrier: cute.Pointer
    ):
        """Scales of tokens, of which every lane takes some; lane i holds the block's i-th page."""
        if cutlass.const_expr(self.token_scales):
            pages = [cute.arch.shuffle_sync(page, p) for p in range(self.blocks.pages_per_block)]
            Storage.load_scales(self, stored, row, pages, head, self.scales_in(tile), barrier)

    def skip_scales(self, barrier):
        """The arrivals of a stage without scales."""
        if self.token_scales:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def decode_tile(self, tile: cute.Pointer, lane: Int32, member: Int32, members: cutlass.Constexpr, meeting: Int32):
        """One of the `members` decoding warps, which meet at a named barrier: a stage's bytes -> its tile."""
        scales = self.scales_of_lane(self.scales_in(tile), lane)
        if cutlass.const_expr(self.token_scales):
            cute.arch.barrier(barrier_id=meeting, number_of_threads=WARP * members)
        if cutlass.const_expr(self.head_dim == 2 * PANEL):
            self.decode_rows(self.raw_of(tile), tile, scales, lane, member, members)
        elif member == 0:
            self.decode_rows(self.raw_of(tile), tile, scales, lane, 0, 1)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def decode_queries(
        self, tile: cute.Pointer, powers, landed: cute.Pointer, phase: Int32, lane: Int32, member: Int32,
        members: cutlass.Constexpr,
    ):  # fmt: skip
        """One of the `members` decoding warps: rows of bfloat16 -> float16 in their place, for float16 keys.

        The largest of a row comes to lie between 2**14 and 2**15 by a power of two, whose exponent goes to `powers`:
        what is 2**31 times smaller loses nothing. Rows whose largest is infinite or NaN keep that and nothing else.
        """
        if cutlass.const_expr(not self.token_scales):
            cute.arch.mbarrier_wait(landed, phase)
            words = self.head_dim // PANEL  # of a lane
            unit, within = lane * words // (UNIT // 2), lane * words % (UNIT // 2)
            for row in cutlass.range(member, ROWS, members, unroll=2):
                place = tile + column_of(row, unit, self.head_dim) + 2 * within
                packed = words_at(place, words)
                largest = Int32(0)
                for i in cutlass.range_constexpr(words):
                    largest = cutlass.max(largest, cutlass.max(packed[i] & MAGNITUDE, (packed[i] >> 16) & MAGNITUDE))
                exponent = Int32(cute.arch.warp_redux_sync(largest, "max")) >> 7
                power = Int32(cutlass.min(2 * BIAS + 14 - exponent, MOST_POWER))
                factor = (power << 23).bitcast(Float32)
                scaled = cute.make_rmem_tensor(words, Int32)
                for i in cutlass.range_constexpr(words):
                    low, high = (packed[i] << 16).bitcast(Float32), (packed[i] & HIGH).bitcast(Float32)
                    scaled[i] = round_pair(low * factor, high * factor, cutlass.Float16)
                start = cute.make_ptr(Int32, place.toint(), place.memspace, assumed_align=4 * words)
                cute.autovec_copy(scaled, cute.make_tensor(start, cute.make_layout(words)))
                if lane == 0:
                    powers[row] = cutlass.Uint8(power)
            cute.arch.fence_view_async_shared()

    def pass_queries_on(self, full):
        """Queries are there as the products read them."""
        if not self.token_scales:
            arrive(full)

    @cute.jit
    def scale_rows(self, scales: cute.Tensor, powers, row: Int32):
        """scales[half], of rows row + 8 half of the queries that are there, times what undoes their powers of two.

        Not 0: LSE is divided by them. Where they would be as small, scores are small beside them as well.
        """
        if cutlass.const_expr(not self.token_scales):
            for half in cutlass.range_constexpr(2):
                inverse = ((2 * BIAS - Int32(powers[row + 8 * half])) << 23).bitcast(Float32)
                scales[half] = cute.arch.fmax(scales[half] * inverse, LEAST_SCALE)

    def fold(self, value, stored, head):
        """Not 0, by which LSE would be divided: a number that makes all scores 0 as well."""
        return value if self.token_scales else cute.arch.fmax(super().fold(value, stored, head), LEAST_SCALE)

    def of_head(self, stored, head):
        return None if self.token_scales else stored.scales[head]
