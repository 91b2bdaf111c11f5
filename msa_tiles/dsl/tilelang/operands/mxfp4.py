"""Keys or values of MXFP4: e2m1 with an e8m0 scale, a power of two, for 32 values.

All become bfloat16, whose exponents are those of e8m0: what is beyond its numbers is infinite there, as in float32.
"""

import tilelang.language as T

from msa_tiles.dsl.four_bits import MXFP4_GROUP, POWER_BF16
from msa_tiles.dsl.table import declares
from msa_tiles.dsl.tilelang import packed
from msa_tiles.dsl.tilelang.e2m1 import times
from msa_tiles.dsl.tilelang.packed import Held, Stored, fill, start, weigh

TENSORS = ("", "_scale")
STARTS = True
WHOLE = (127 + POWER_BF16) * 0x800080  # the power of two that codes lack, twice in a word

__all__ = [
    "STARTS",
    "TENSORS",
    "Held",
    "Operand",
    "Stored",
    "allocate",
    "fill",
    "multiplied",
    "parts",
    "start",
    "weigh",
]


@declares
def multiplied(name):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16"


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, own=True):
    """A ring of blocks as they are stored, and one decoded tile."""
    found = packed.ring(name, head_dim, block_size, stages, MXFP4_GROUP, producer)
    return packed.with_tile(found, name, head_dim, block_size, producer, readers) if own else found


class Format:
    """What the scales are, and how codes are decoded."""

    group = MXFP4_GROUP
    scale_element = "float8_e8m0fnu"

    def factor(self, code):
        """What the codes of a group are multiplied with, twice in a word; 255 becomes NaN."""
        whole = T.cast(code, "uint32")
        # 2**-127 is subnormal: half of the smallest normal number. The same bit makes NaN of infinity.
        half = T.if_then_else(((whole + T.uint32(1)) & T.uint32(255)) < T.uint32(2), T.uint32(64), T.uint32(0))
        return ((whole << T.uint32(7)) | half) * T.uint32(0x10001)

    def number(self, halves, factor):
        """Codes as they are, which may be subnormal only once they are scaled."""
        return times(times(halves, T.uint32(WHOLE)), factor)

    def whole(self, value, stored, head):
        return value


class Operand(Format, packed.Operand):
    """See msa_tiles.dsl.tilelang.operands."""

    def fold(self, value, stored, head):
        return value


def allocate(operand, table, stages, tiles=None):
    return packed.allocate(operand, table, tiles)
