"""Caches of MXFP4, as rows are read out of them: code times power of two, which bfloat16 holds.

What is beyond its numbers is infinite, as in float32; a group whose scale is NaN is NaN.
"""

from cutlass import Int32

from msa_tiles.dsl.cutedsl.append_groups import Stored
from msa_tiles.dsl.cutedsl.dequantize_groups import ReadGroups
from msa_tiles.dsl.cutedsl.e2m1 import POWER_BF16, apart, as_bf16, e8m0_bits, times_bf16

TENSORS = ("", "_scale")
WHOLE = (127 + POWER_BF16) * 0x800080  # the power of two that codes lack, twice

__all__ = ["TENSORS", "Cache", "Stored"]


class Cache(ReadGroups):
    """See msa_tiles.dsl.cutedsl.operands."""

    group = 32

    def numbers(self, word, scale, outer):
        bits = e8m0_bits(scale)
        factor = bits | bits << 16
        # Codes as they are, which may be subnormal only once they are scaled.
        return [times_bf16(times_bf16(as_bf16(pair), Int32(WHOLE)), factor) for pair in apart(word)]
