"""Keys or values of NVFP4: e2m1 with an e4m3 scale for 16 values and a float32 scale for a head, or for all of them.

A code times the scale of its group is exact in bfloat16. What is decoded is smaller by a power of two, by which e2m1
codes as they stand in bfloat16 are too small and scales cannot make up for; `fold` does, with the scale of the head.
"""

import tilelang.language as T

from msa_tiles.dsl.four_bits import NVFP4_GROUP, POWER_BF16, SCALE_POWER
from msa_tiles.dsl.table import declares
from msa_tiles.dsl.tilelang import packed
from msa_tiles.dsl.tilelang.e2m1 import times, upper_halves
from msa_tiles.dsl.tilelang.operands.e4m3 import LEAST_SCALE
from msa_tiles.dsl.tilelang.packed import Held, Stored, fill, start, weigh

TENSORS = ("", "_scale", "_global_scale")
STARTS = True

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
    found = packed.ring(name, head_dim, block_size, stages, NVFP4_GROUP, producer)
    return packed.with_tile(found, name, head_dim, block_size, producer, readers) if own else found


class Format:
    """What the scales are, and how codes are decoded."""

    group = NVFP4_GROUP
    scale_element = "float8_e4m3fn"

    def factor(self, code):
        """What the codes of a group are multiplied with, twice in a word; NaN stays NaN."""
        scale = T.cast(T.reinterpret(code, "float8_e4m3fn"), "float32") * T.float32(2.0**SCALE_POWER)
        # Four significant bits: the upper half is all of it.
        bits = T.reinterpret(scale, "uint32")
        return upper_halves(bits, bits)

    def number(self, halves, factor):
        return times(halves, factor)

    def whole(self, value, stored, head):
        """Times the scale of a head, and the power of two that numbers lack."""
        return value * (stored.of_heads[head] * T.float32(2.0 ** (POWER_BF16 - SCALE_POWER)))


class Operand(Format, packed.Operand):
    """See msa_tiles.dsl.tilelang.operands."""

    def fold(self, value, stored, head):
        """Not 0 for keys, whose scores may be -inf: the least scale makes scores 0 as well."""
        folded = self.whole(value, stored, head)
        return T.max(folded, LEAST_SCALE) if self.name == "k" else folded


def allocate(operand, table, stages, tiles=None):
    return packed.allocate(operand, table, tiles)
