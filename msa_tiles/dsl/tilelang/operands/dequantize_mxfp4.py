"""Caches of MXFP4, as rows are read out of them: code times power of two, which bfloat16 holds.

What is beyond its numbers is infinite, as in float32; a group whose scale is NaN is NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.four_bits import POWER_BF16
from msa_tiles.dsl.tilelang.append_groups import Stored
from msa_tiles.dsl.tilelang.dequantize_groups import codes_of, in_order, read
from msa_tiles.dsl.tilelang.e2m1 import times
from msa_tiles.dsl.tilelang.operands.append_mxfp4 import TENSORS, Cache

WORDS = 1  # of a lane's columns
WHOLE = (127 + POWER_BF16) * 0x800080  # the power of two that codes lack, twice in a word

__all__ = ["TENSORS", "WORDS", "Cache", "Stored", "decode", "find_outer", "read"]


@T.macro
def find_outer(cache, stored, head, outer):
    """Nothing: groups alone have scales."""


@T.macro
def decode(cache, step, words, scales, outer, packed):
    """Four words of two bfloat16, in the order of columns."""
    factor = T.alloc_var("uint32")
    # 2**-127 is subnormal: half of the smallest normal number. The same bit makes NaN of infinity.
    half = T.if_then_else(((scales[step] + T.uint32(1)) & T.uint32(255)) < T.uint32(2), T.uint32(64), T.uint32(0))
    factor = ((scales[step] << T.uint32(7)) | half) * T.uint32(0x10001)
    # Codes as they are, which may be subnormal only once they are scaled.
    pairs = in_order([times(times(codes, T.uint32(WHOLE)), factor) for codes in codes_of(words[step])])
    packed[0] = pairs[0]
    packed[1] = pairs[1]
    packed[2] = pairs[2]
    packed[3] = pairs[3]
