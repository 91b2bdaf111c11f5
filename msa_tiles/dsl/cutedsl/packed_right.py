"""Keys or values of 4 bits as the right side of products of 64-row tiles, decoded to a tile by one warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import decoded_right, packed
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.cutedsl.decoding import CHUNK, REPEAT, UNIT, byte_of, columns_at, words_at
from msa_tiles.dsl.cutedsl.packed import Stored, byte_at
from msa_tiles.dsl.table import WARP, declares


@declares
def parts(name, head_dim, block_size, element, *, producer, keeper, readers, group):
    """What TMA and copies of all lanes of the producer bring, and what the keeper makes of it for the readers."""
    return decoded_right.parts(
        name, element, head_dim, block_size, packed.buffers(name, head_dim, block_size, group),
        producer=producer, keeper=keeper, readers=readers, copies=True,
    )  # fmt: skip


class Right(decoded_right.Right, packed.Storage):
    """Blocks as the right side of products of 64-row tiles: see msa_tiles.dsl.cutedsl.operands."""

    def scales_at(self, held):
        return held.scales.iterator

    @cute.jit
    def note_order(self, stored: Stored, scales: cute.Pointer):
        if cutlass.const_expr(self.name == "v"):
            self.order_in(scales)[0] = self.order(stored)

    @cute.jit
    def decode_block(self, held: HeldRight):
        order = Int32(self.groups)
        if cutlass.const_expr(self.name == "v"):
            order = self.order_in(held.scales.iterator)[0]
        self.decode_rows(held.raw.iterator, held.tile.iterator, held.scales.iterator, order, Int32(0), 1)

    @cute.jit
    def decode_rows(
        self, raw: cute.Pointer, tile: cute.Pointer, scales: cute.Pointer, order: Int32, member: Int32,
        members: cutlass.Constexpr,
    ):  # fmt: skip
        """Rows of bytes, swizzled as byte_of says -> a tile of 16 bits in panels of 64 columns, by `members` warps.

        A lane takes the eight codes of a word at a time, of the same columns in all rows.
        """
        lane = cute.arch.lane_idx()
        per_row = self.head_dim // UNIT
        abreast = WARP // per_row  # rows
        unit = lane % per_row
        of_lane = scales + self.scale_of(Int32(0), unit * UNIT // self.group, order)
        for eight in cutlass.range(member, self.block_size // REPEAT, members, unroll=1):
            for step in cutlass.range_constexpr(REPEAT // abreast):
                row = REPEAT * eight + abreast * step + lane // per_row
                [word] = words_at(raw + byte_of(row, unit * 4 // CHUNK, self.row_bytes) + unit * 4 % CHUNK, 1)
                factor = self.factor(byte_at(of_lane + self.scale_of(row, 0, order)))
                target = columns_at(tile, row, unit, self.block_size)
                cute.autovec_copy(self.columns(word, factor), target)

    @cute.jit
    def columns(self, word: Int32, factor: Int32):
        """The codes of a word as eight numbers in their order, two a word."""
        pairs = [self.decode(word, code, factor) for code in range(4)]
        found = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(2):
            found[i] = Int32(cute.arch.prmt(pairs[2 * i], pairs[2 * i + 1], Int32(0x5410)))
            found[2 + i] = Int32(cute.arch.prmt(pairs[2 * i], pairs[2 * i + 1], Int32(0x7632)))
        return found

    def factor(self, code):
        """What the codes of a group are multiplied with, twice in a word."""
        return self.value_factor(code, code) if self.name == "v" else self.key_factor(code)

    def decode(self, word, code, factor):
        """Codes `code` and `code` + 4 of a word."""
        return self.value(word, code, factor) if self.name == "v" else self.key(word, code, factor)
