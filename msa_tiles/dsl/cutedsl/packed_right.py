"""Keys or values of 4 bits as the right side of products of 64-row tiles, decoded to a tile by one warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import decoded_right, packed, packed_tile
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.cutedsl.packed import Stored
from msa_tiles.dsl.table import declares


@declares
def parts(name, head_dim, block_size, element, *, producer, keeper, readers, group):
    """What TMA and copies of all lanes of the producer bring, and what the keeper makes of it for the readers."""
    return decoded_right.parts(
        name, element, head_dim, block_size, packed.buffers(name, head_dim, block_size, group),
        producer=producer, keeper=keeper, readers=readers, copies=True,
    )  # fmt: skip


class Right(decoded_right.Right, packed_tile.Decoder):
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
