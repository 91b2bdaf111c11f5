"""Keys or values of MXFP4: e2m1 with an e8m0 scale, a power of two, for 32 values.

All become bfloat16, whose exponents are those of e8m0: what is beyond its numbers is infinite there, as in float32.
"""

import cutlass
from cutlass import Int32

from msa_tiles.dsl.cutedsl import packed_left, packed_right, packed_ring
from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.cutedsl.e2m1 import CODE_BF16, POWER_BF16, apart, as_bf16, e8m0_bits, halves, times_bf16
from msa_tiles.dsl.cutedsl.packed import Stored
from msa_tiles.dsl.cutedsl.packed_ring import query_parts, ring_parts
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale")
GROUP = 32
WHOLE = (127 + POWER_BF16) * 0x800080  # the power of two that codes lack, twice

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
    return "bfloat16"


@declares
def in_ring(name):
    """The element of a ring's tiles."""
    return multiplied(name)


class Format:
    """What the scales are, and how codes are decoded. K of a left side has the factors of a lane at once."""

    group = GROUP
    scale_element = cutlass.Float8E8M0FNU
    multiplied = staticmethod(multiplied)

    def key_factors(self, scales, token, lane):
        """What codes are multiplied with, of a token's chunks of 32."""
        [word] = self.row_of_scales(scales, token)
        return [value_factor(code, code) for code in (word >> 8 * i & 255 for i in range(self.groups))]

    def key(self, word, code, factor):
        """Codes `code` and `code` + 4 of a word."""
        return number(word, code, factor)

    def value_factor(self, first, second):
        """What codes of two tokens are multiplied with."""
        return value_factor(first, second)

    def value(self, word, code, factor):
        return number(word, code, factor)

    def factors_of(self, codes):
        """What the codes of 16 bytes are multiplied with, of the scale of their group."""
        return [value_factor(codes, codes)]

    def numbers(self, word, factor):
        """The codes of a word in their order, two a word."""
        return [scaled(as_bf16(pair), factor) for pair in apart(word)]

    def fold(self, value, stored, head):
        return value

    def of_head(self, stored, head):
        return None


class Left(Format, packed_left.Left):
    """Blocks as the left side of products."""


class Right(Format, packed_right.Right):
    """Blocks as the right side of products of 64-row tiles."""


class InRing(Format, packed_ring.InRing):
    """The same in a ring of tiles of the kernel's.

    K and V come as bytes to the last quarter of their stage, with the scales of groups before it, and the decoders make
    bfloat16 of them in place, times those scales. What the last rows are made of is in registers before one of them is
    written.
    """


def value_factor(first, second):
    """Two e8m0 -> two bfloat16 in a word; 255 becomes NaN."""
    return e8m0_bits(first) | e8m0_bits(second) << 16


def number(word, code, factor):
    """Codes `code` and `code` + 4 of a word."""
    return scaled(halves(word, code, CODE_BF16), factor)


def scaled(codes, factor):
    """Two codes as they are, which may be subnormal only once they are scaled."""
    return times_bf16(times_bf16(codes, Int32(WHOLE)), factor)
