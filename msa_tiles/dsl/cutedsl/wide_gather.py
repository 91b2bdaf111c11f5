"""Rows gathered by TMA into 128-row tiles for tcgen05, and rows on their way back.

Tokens, boxes and swizzle atoms are those of `Rows`; a tile holds twice as many of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.gather import ATOM, Rows
from msa_tiles.dsl.cutedsl.tcgen05 import ROWS
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide


class WideRows(Rows):
    """The shapes of gathered rows: `group` heads of `head_dim` elements for each token."""

    def __init__(self, element, head_dim, group):
        super().__init__(element, head_dim, group)
        self.tokens = ROWS // self.rows_per_token

    def boxes(self, tiles, count):
        """The boxes of `count` tiles: [box modes, box of the token, token, tile]."""
        layout = cute.make_layout(
            (*self.box, self.boxes_per_token, self.tokens, count),
            stride=(
                *self.box_stride, ATOM * tma.PANEL, self.rows_per_token * self.head_dim, ROWS * self.head_dim,
            ),
        )  # fmt: skip
        return cute.make_tensor(tiles.iterator, layout)

    def place(self, row, vector):
        """Where the vector-th 16 bytes of a row lie in a tile, in units of 16 bytes.

        Rows of an atom are 128 bytes apart; the swizzle exchanges the vectors of a row by its number in the atom.
        """
        of_panel = tma.PANEL // VECTOR
        atom = row // ATOM * (self.head_dim // tma.PANEL) + vector // of_panel
        return (atom * ATOM + row % ATOM) * of_panel + (vector % of_panel ^ row % ATOM)

    @cute.jit
    def stage(self, values: cute.Tensor, tile: cute.Pointer, row: Int32, first_column: cutlass.Constexpr):
        """values [columns] -> a row of the tile that begins at this address, from first_column on."""
        base = tile.toint()
        for v in cutlass.range_constexpr(cute.size(values) // VECTOR):
            address = base + self.place(row, first_column // VECTOR + v) * BYTES
            target = cute.make_ptr(self.element, address, cute.AddressSpace.smem, assumed_align=BYTES)
            source = cute.make_tensor(values.iterator + v * VECTOR, cute.make_layout(VECTOR))
            copy_wide(source, cute.make_tensor(target, cute.make_layout(VECTOR)))
