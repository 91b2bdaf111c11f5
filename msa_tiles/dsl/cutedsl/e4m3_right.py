"""e4m3 keys or values as the right side of products of 64-row tiles, decoded to a tile by a role of its own."""

import cutlass.cute as cute

from msa_tiles.dsl.cutedsl import decoded_right, e4m3_storage
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.table import declares


@declares
def right_parts(name, head_dim, block_size, *, producer, keeper, readers, inspected, token_scales):
    """What TMA brings, and what the keeper makes of it for the readers."""
    return decoded_right.parts(
        name, e4m3_storage.multiplied(name, token_scales), head_dim, block_size,
        e4m3_storage.buffers(name, head_dim, block_size, token_scales),
        producer=producer, keeper=keeper, readers=readers, copies=token_scales,
    )  # fmt: skip


class Right(decoded_right.Right, e4m3_storage.Storage):
    """Blocks as the right side of products of 64-row tiles, decoded by one warp: see msa_tiles.dsl.cutedsl.operands.

    K and V come as bytes, and the keeper decodes them: K to bfloat16, V to float16, or to bfloat16 where tokens have
    scales. Scales of tokens multiply what is decoded. A scale that a head shares is folded into the softmax's (keys)
    and into what a partial is normalised by (values).
    """

    @cute.jit
    def decode_block(self, held: HeldRight):
        lane = cute.arch.lane_idx()
        self.decode_rows(held.raw.iterator, held.tile.iterator, self.scales_of_lane(held.scales, lane), lane, 0, 1)

    def of_head(self, stored, head):
        return None if self.token_scales else stored.scales[head]
