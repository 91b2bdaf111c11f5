"""Caches of NVFP4, as rows are read out of them: code times scale of the group, exactly, times the global scale.

That last product, of float32, is rounded once to bfloat16, to nearest even; NaN stays NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.four_bits import POWER_BF16, SCALE_POWER
from msa_tiles.dsl.tilelang.append_groups import Stored
from msa_tiles.dsl.tilelang.dequantize_groups import codes_of, in_order, read
from msa_tiles.dsl.tilelang.e2m1 import times, upper_halves
from msa_tiles.dsl.tilelang.operands.append_nvfp4 import TENSORS, Cache
from msa_tiles.dsl.tilelang.packing import high_half, low_half, pack_halves

WORDS = 1  # of a lane's columns
LACKING = 2.0 ** (POWER_BF16 - SCALE_POWER)

__all__ = ["TENSORS", "WORDS", "Cache", "Stored", "decode", "find_outer", "read"]


@T.macro
def find_outer(cache, stored, head, outer):
    """outer[0] = what all rows of a head are multiplied with."""
    outer[0] = stored.outer[head]


@T.macro
def decode(cache, step, words, scales, outer, packed):
    """Four words of two bfloat16, in the order of columns."""
    factor = T.alloc_var("uint32")
    # Four significant bits: the upper half is all of it.
    bits = T.reinterpret(value_of(scales[step]) * T.float32(2.0**SCALE_POWER), "uint32")
    factor = upper_halves(bits, bits)
    pairs = in_order([times(codes, factor) for codes in codes_of(words[step])])
    packed[0] = whole(pairs[0], outer[0])
    packed[1] = whole(pairs[1], outer[0])
    packed[2] = whole(pairs[2], outer[0])
    packed[3] = whole(pairs[3], outer[0])


def value_of(code):
    """An e4m3 code as float32."""
    return T.cast(T.reinterpret(T.cast(code, "uint8"), "float8_e4m3fn"), "float32")


def whole(pair, outer):
    """Two bfloat16, times the power of two that they lack and a float32, in a word."""
    low, high = (half(pair) * T.float32(LACKING) * outer for half in (low_half, high_half))
    return pack_halves(low, high)
