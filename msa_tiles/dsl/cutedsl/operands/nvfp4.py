"""Keys or values of NVFP4: e2m1 with an e4m3 scale for 16 values and a float32 scale for a head, or for all of them.

A code times the scale of its group is exact in 16 bits: keys become bfloat16, as queries are, values become float16, as
weights do then. Both come out smaller by a power of two, by which e2m1 codes as they stand in 16 bits are too small and
scales cannot make up for; `fold` does, with the scale of the head.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl import packed_left, packed_right, packed_ring
from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.cutedsl.decoding import decode_f16, widen
from msa_tiles.dsl.cutedsl.e2m1 import (
    CODE_BF16,
    CODE_F16,
    POWER_BF16,
    POWER_F16,
    apart,
    as_bf16,
    as_f16,
    both,
    halves,
    times_bf16,
    times_f16,
)
from msa_tiles.dsl.cutedsl.packed import Stored
from msa_tiles.dsl.cutedsl.packed_ring import query_parts, ring_parts
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale", "_global_scale")
GROUP = 16
# Of keys, what the largest scale may be multiplied with: 448 is below 2**9, bfloat16 ends at 2**128.
KEY_POWER = 118

__all__ = [
    "TENSORS",
    "Held",
    "HeldRight",
    "InRing",
    "Left",
    "Right",
    "Stored",
    "in_ring",
    "multiplied",
    "parts",
    "query_parts",
    "right_parts",
    "ring_parts",
]


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers):
    """One pipeline, which TMA and the copies of the producer's lanes fill."""
    return packed_left.parts(name, head_dim, block_size, stages, producer=producer, readers=readers, group=GROUP)


@declares
def right_parts(name, head_dim, block_size, *, producer, keeper, readers, inspected):
    """What TMA and copies bring, and what the keeper makes of it for the readers."""
    return packed_right.parts(
        name, head_dim, block_size, multiplied(name), producer=producer, keeper=keeper, readers=readers, group=GROUP
    )


@declares
def multiplied(name):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16" if name == "k" else "float16"


@declares
def in_ring(name):
    """The element of a ring's tiles."""
    return multiplied(name)


class Format:
    """What the scales are, and how codes are decoded. K of a left side has the factors of a lane at once."""

    group = GROUP
    scale_element = cutlass.Float8E4M3FN
    has_global = True
    multiplied = staticmethod(multiplied)

    def key_factors(self, scales, token, lane):
        """What the codes of a lane are multiplied with, of a token's chunks of 32: it has one of two groups in each."""
        words = self.row_of_scales(scales, token)
        chosen = Int32(0x6420) + lane % 4 // 2 * 0x1111
        return key_factors(Int32(cute.arch.prmt(words[0], words[-1], chosen)))

    def key(self, word, code, factor):
        """Codes `code` and `code` + 4 of a word."""
        return times_bf16(halves(word, code, CODE_BF16), factor)

    def value_factor(self, first, second):
        """What codes of two tokens are multiplied with."""
        return value_factor(first, second)

    def value(self, word, code, factor):
        return times_f16(halves(word, code, CODE_F16), factor)

    def factors_of(self, codes):
        """What the codes of 16 bytes are multiplied with, half by half, of the scales of their groups."""
        pair = decode_f16(codes)[0]
        if self.name != "v":
            pair = widen(pair, Float32(2.0**KEY_POWER))
        return [both(pair, half) for half in range(2)]

    def numbers(self, word, factor):
        """The codes of a word in their order, two a word."""
        if self.name == "v":
            return [times_f16(as_f16(pair), factor) for pair in apart(word)]
        return [times_bf16(as_bf16(pair), factor) for pair in apart(word)]

    def fold(self, value, stored, head):
        return value * self.of_head(stored, head)

    def of_head(self, stored, head):
        lacking = POWER_F16 if self.name == "v" else POWER_BF16 - KEY_POWER
        return stored.of_heads[head] * 2.0**lacking


class Left(Format, packed_left.Left):
    """Blocks as the left side of products."""


class Right(Format, packed_right.Right):
    """Blocks as the right side of products of 64-row tiles."""


class InRing(Format, packed_ring.InRing):
    """The same in a ring of tiles of the kernel's.

    K and V come as bytes to the last quarter of their stage, with the scales of groups before it, and the decoders make
    16 bits of them in place, times those scales: K becomes bfloat16, V float16. What the last rows are made of is in
    registers before one of them is written. The scale of a head is folded into the softmax's (keys) and multiplies O
    behind the last shared block (values).
    """

    def fold(self, value, stored, head):
        return packed_ring.least_scale(super().fold(value, stored, head))


def key_factors(scales):
    """Four e4m3 -> each of them twice in a word, as bfloat16 times a power of two; NaN stays NaN."""
    pairs = [widen(half, Float32(2.0**KEY_POWER)) for half in decode_f16(scales)]
    return [both(pair, half) for pair in pairs for half in range(2)]


def value_factor(first, second):
    """Two e4m3 -> two float16 in a word; NaN stays NaN."""
    return decode_f16(first | second << 8)[0]
