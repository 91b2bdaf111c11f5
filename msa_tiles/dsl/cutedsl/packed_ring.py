"""Keys or values of 4 bits in a ring of tiles of 16 bits that belongs to the kernel, decoded there by several warps.

Bytes come to the last quarter of their tile, scales right before them. Decoded rows take four times as much room: the
first ones leave bytes and scales as they are, and what the last ones are made of is in registers before one of them is
written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl import packed_tile
from msa_tiles.dsl.cutedsl.decoding import PANEL
from msa_tiles.dsl.cutedsl.e4m3_ring import LEAST_SCALE
from msa_tiles.dsl.cutedsl.packed import ORDER_BYTES, Stored
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.table import WARP, Parts, Pipeline, declares, lane, threads, warps

ROW_BYTES = 2 * PANEL  # of a panel


@declares
def ring_parts(stages, *, producer, decoder, readers):
    """What TMA and copies of all lanes of the producer bring, and what the decoder makes of it in its place.

    A lane tells the order of scales, and arrives behind that.
    """
    return Parts(
        (
            Pipeline("raw", stages, (lane(producer), threads(producer), lane(producer))),
            Pipeline("ring", stages, (warps(decoder),), (warps(readers),)),
        ),
        (),
    )


@declares
def query_parts(rows, *, producer, decoder, readers):
    """A tile of queries, which TMA fills and the products read."""
    return Parts((Pipeline("q", 1, (lane(producer),), (warps(readers),)),), ())


class InRing(packed_tile.Decoder):
    """Blocks as the right side of products, in a ring of tiles of the kernel's: see msa_tiles.dsl.cutedsl.operands."""

    LANDING = "raw_full"  # where the bytes of a stage are awaited first
    Q_LANDING = "q_full"  # likewise of queries
    decoded = True

    def before_raw(self):
        """Bytes of a tile before those that come."""
        return 3 * self.block_size * self.row_bytes

    def before_scales(self):
        return self.before_raw() - self.groups * self.block_size

    def raw_of(self, tile):
        """The bytes of a tile."""
        return self.behind(tile, self.before_raw(), 1024)

    def scales_of(self, tile):
        """The scales of their groups."""
        return self.behind(tile, self.before_scales(), 128)

    def order_in(self, tile):
        """Where it is told how far apart the scales of two tokens are, in rows that are written last."""
        end = ROW_BYTES * self.block_size if self.head_dim > PANEL else self.before_scales()
        place = self.behind(tile, end - ORDER_BYTES, ORDER_BYTES)
        start = cute.make_ptr(Int32, place.toint(), place.memspace, assumed_align=4)
        return cute.make_tensor(start, cute.make_layout(1))

    def behind(self, tile, count, align):
        return cute.make_ptr(cutlass.Uint8, tile.toint() + count, tile.memspace, assumed_align=align)

    def boxes(self, tiles, stages):
        """Where TMA writes in a ring of tiles: [rows, columns, box, panel, stage]."""
        of_stage = self.blocks.boxes_of(cute.make_tensor(self.raw_of(tiles.iterator), cute.make_layout(1)), 1)
        shape = (*of_stage.shape[:4], stages)
        stride = (*of_stage.stride[:4], 2 * self.block_size * self.head_dim)
        return cute.make_tensor(of_stage.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def load_scales(
        self, stored: Stored, row: Int32, page: Int32, head: Int32, tile: cute.Pointer, barrier: cute.Pointer
    ):
        """Scales of groups, of which every lane takes some; lane i holds the block's i-th page."""
        pages = [cute.arch.shuffle_sync(page, p) for p in range(self.blocks.pages_per_block)]
        if cutlass.const_expr(self.name == "v"):
            told, order = self.order_in(tile), self.order(stored)
            if cute.arch.lane_idx() == 0:
                told[0] = order
        arrive(barrier)
        packed_tile.Decoder.load_scales(self, stored, row, pages, head, self.scales_of(tile), barrier)

    @cute.jit
    def skip_scales(self, barrier: cute.Pointer):
        """The arrivals of a stage without scales."""
        arrive(barrier)
        cute.arch.mbarrier_arrive(barrier)

    def first_rows(self):
        """How many times the rows that a warp takes leave bytes, scales and their order as they are."""
        of_one = ROW_BYTES * self.block_size
        room = self.before_scales() - (of_one if self.head_dim > PANEL else ORDER_BYTES)
        return room // (ROW_BYTES * self.abreast())

    @cute.jit
    def decode_tile(self, tile: cute.Pointer, lane: Int32, member: Int32, members: cutlass.Constexpr, meeting: Int32):
        """One of the `members` decoding warps, which meet at a named barrier: a stage's bytes -> its tile."""
        raw, scales = self.raw_of(tile), self.scales_of(tile)
        order = Int32(self.groups)
        if cutlass.const_expr(self.name == "v"):
            order = self.order_in(tile)[0]
        first, all_rows = self.first_rows(), self.block_size // self.abreast()
        for number in cutlass.range(member, first, members, unroll=1):
            self.write_rows(tile, self.read_rows(raw, scales, order, number, lane), number, lane)
        kept = []
        for turn in cutlass.range_constexpr((all_rows - first + members - 1) // members):
            number = cutlass.min(first + members * turn + member, all_rows - 1)
            kept.append(self.read_rows(raw, scales, order, number, lane))
        cute.arch.barrier(barrier_id=meeting, number_of_threads=WARP * members)
        for turn in cutlass.range_constexpr((all_rows - first + members - 1) // members):
            number = first + members * turn + member
            if number < all_rows:
                self.write_rows(tile, kept[turn], number, lane)
        cute.arch.fence_view_async_shared()

    def decode_queries(self, tile, powers, landed, phase, lane, member, members):
        """Nothing: products read them as they come."""

    def pass_queries_on(self, full):
        """Nothing."""

    def scale_rows(self, scales, powers, row):
        """Nothing."""


def least_scale(value):
    """Not 0, by which LSE would be divided: a number that makes all scores 0 as well."""
    return cute.arch.fmax(value, Float32(LEAST_SCALE))
