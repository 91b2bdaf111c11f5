"""Rows of 4-bit codes in shared memory, decoded to a tile of 16 bits that products read.

A lane takes the 32 codes of 16 bytes at a time: one load of them, one of the scales of their groups, four stores. Lanes
beside each other have rows beside each other, so that neither loads nor stores meet in a bank, and what a swizzle adds
to a place is the same in every group of rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import packed
from msa_tiles.dsl.cutedsl.decoding import CHUNK, PANEL, REPEAT, UNIT, byte_of, columns_at, words_at
from msa_tiles.dsl.cutedsl.packed import CODES, byte_at
from msa_tiles.dsl.table import WARP

WORDS = CHUNK // 4  # of 16 bytes


class Decoder(packed.Storage):
    """Blocks that become tiles. A format says what factors its scales are, and what numbers the codes of a word."""

    def abreast(self):
        """Rows that a warp takes at a time."""
        return WARP * CHUNK * CODES // self.head_dim

    def place_of(self, lane):
        """Row and chunk of a lane in the first rows."""
        return lane // (WARP * REPEAT // self.abreast()) * REPEAT + lane % REPEAT, lane // REPEAT % self.chunks()

    def chunks(self):
        """16 bytes of a row."""
        return self.row_bytes // CHUNK

    @cute.jit
    def read_rows(self, raw: cute.Pointer, scales: cute.Pointer, order: Int32, number: Int32, lane: Int32):
        """What a lane takes of the rows of this number: four words of codes, and the scales of their groups."""
        row, chunk = self.place_of(lane)
        before = self.abreast() * number
        words = words_at(raw + before * self.row_bytes + byte_of(row, chunk, self.row_bytes), WORDS)
        count = CHUNK * CODES // self.group
        of_rows = scales + before * self.groups
        if cutlass.const_expr(count == 2 and self.name != "v"):
            place = of_rows + self.scale_of(row, count * chunk, Int32(self.groups))
            start = cute.make_ptr(cutlass.Uint16, place.toint(), place.memspace, assumed_align=count)
            codes = Int32(cute.make_tensor(start, cute.make_layout(1))[0])
        else:
            codes = byte_at(of_rows + self.scale_of(row, count * chunk, order)) & 255
            for i in cutlass.range_constexpr(1, count):
                codes = codes | (byte_at(of_rows + self.scale_of(row, count * chunk + i, order)) & 255) << 8 * i
        return [*words, codes]

    @cute.jit
    def write_rows(self, tile: cute.Pointer, taken, number: Int32, lane: Int32):
        """The same, decoded -> rows of panels of 64 columns, swizzled by 128 bytes."""
        row, chunk = self.place_of(lane)
        words, factors = taken[:WORDS], self.factors_of(taken[WORDS])
        target = tile + self.abreast() * number * PANEL
        for i in cutlass.range_constexpr(WORDS):
            found = cute.make_rmem_tensor(UNIT // 2, Int32)
            for j, pair in enumerate(self.numbers(words[i], factors[i * len(factors) // WORDS])):
                found[j] = pair
            cute.autovec_copy(found, columns_at(target, row, WORDS * chunk + i, self.block_size))

    @cute.jit
    def decode_rows(
        self, raw: cute.Pointer, tile: cute.Pointer, scales: cute.Pointer, order: Int32, member: Int32,
        members: cutlass.Constexpr,
    ):  # fmt: skip
        """Rows of bytes, swizzled as byte_of says -> a tile, by `members` warps."""
        lane = cute.arch.lane_idx()
        for number in cutlass.range(member, self.block_size // self.abreast(), members, unroll=1):
            self.write_rows(tile, self.read_rows(raw, scales, order, number, lane), number, lane)
