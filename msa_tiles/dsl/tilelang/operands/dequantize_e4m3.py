"""Caches of e4m3 with float32 scales, as rows are read out of them: the element times the scale, as bfloat16.

The product of float32 is rounded once, to nearest even; NaN stays NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.operands.append_e4m3 import TENSORS, Cache, Stored
from msa_tiles.dsl.tilelang.packing import pack_halves

WORDS = 2  # of a lane's columns

__all__ = ["TENSORS", "WORDS", "Cache", "Stored", "decode", "find_outer", "read"]


@T.macro
def find_outer(cache, stored, head, outer):
    """outer[0] = what all rows of a head are multiplied with."""
    outer[0] = 1.0
    if not cache.token_scales:
        outer[0] = stored.scales[head]


@T.macro
def read(cache, stored, page, head, place, column, step, words, scales):
    """The words of a lane's eight columns, and their scale, of a row of this number."""
    words[WORDS * step : WORDS * step + WORDS] = T.ldg64(stored.values[page, head, place, column])
    if cache.token_scales:
        scales[step] = T.reinterpret(stored.scales[page, head, place], "uint32")


@T.macro
def decode(cache, step, words, scales, outer, packed):
    """Four words of two bfloat16, in the order of columns."""
    factor = T.alloc_var("float32")
    factor = outer[0]
    if cache.token_scales:
        factor = T.reinterpret(scales[step], "float32")
    for i in T.unroll(4):
        pair = words[WORDS * step + i // 2] >> T.uint32(16 * (i % 2))
        packed[i] = pack_halves(value_of(pair) * factor, value_of(pair >> T.uint32(8)) * factor)


def value_of(word):
    """The e4m3 in the lowest byte of a uint32, as float32."""
    return T.cast(T.reinterpret(T.cast(word & T.uint32(255), "uint8"), "float8_e4m3fn"), "float32")
