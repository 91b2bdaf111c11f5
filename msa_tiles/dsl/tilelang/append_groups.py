"""Caches of 4 bits, as rows are written into them: e2m1 in pairs and, for every group of values, a scale of one byte.

Everything is rounded once, to nearest even, as `msa_tiles.quant` does it. A row's values are compared in float64 with
the places where e2m1 rounds up, times the scale of the group: products and comparisons are exact there, and a quotient
of float32 would be rounded twice.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.tilelang.append import VECTOR
from msa_tiles.dsl.tilelang.layout import strides

CODES = 2  # in a byte
MAGNITUDE, INFINITY, LARGEST = 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF  # of float32's bits
TURNS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where a magnitude becomes the next code


class Stored(NamedTuple):
    """Bytes [pages, heads, page, head_dim / 2], scales [pages, heads, page / n, n, groups], global ones [heads]."""

    values: Any
    scales: Any
    outer: Any = None


class Groups:
    """The `Cache` of a format with a scale of one byte for every `group` values; see the operands."""

    def __init__(self, name, head_dim, group):
        self.name = name
        self.head_dim = head_dim
        self.group = group

    def tensor(self, pages, heads, page):
        """The parameter of the kernel."""
        steps = strides(f"{self.name}_page, {self.name}_head, {self.name}_place")
        return T.StridedTensor((pages, heads, page, self.head_dim // CODES), (*steps, 1), "uint8")

    def scale(self, pages, heads, page):
        """That of the scales, whose tokens have two dimensions: strides tell linear scales from interleaved ones."""
        spans, span = T.dynamic(f"{self.name}_spans, {self.name}_span")
        names = ("page", "head", "spans", "span", "group")
        steps = strides(", ".join(f"{self.name}_scale_{part}" for part in names))
        return T.StridedTensor((pages, heads, spans, span, self.head_dim // self.group), steps, "uint8")

    def global_scale(self, heads):
        """That of the global scales."""
        return T.StridedTensor((heads,), (strides(f"{self.name}_outer_head"),), "float32")


@T.macro
def largest_in_group(values, group, largest):
    """largest[0] = the largest magnitude of a group, NaN where one is in it, float32's largest number for infinity.

    The lanes of a group are neighbours, and all threads call.
    """
    # As integers, magnitudes are in order, and NaN is the largest.
    largest[0] = 0.0
    for c in T.unroll(VECTOR):
        bits = T.reinterpret(values[c], "int32") & T.int32(MAGNITUDE)
        largest[0] = T.reinterpret(T.max(T.reinterpret(largest[0], "int32"), bits), "float32")
    for step in T.unroll((group // VECTOR).bit_length() - 1):
        other = T.shfl_xor(T.reinterpret(largest[0], "int32"), 1 << step)
        largest[0] = T.reinterpret(T.max(T.reinterpret(largest[0], "int32"), other), "float32")
    if T.reinterpret(largest[0], "int32") == INFINITY:
        largest[0] = T.reinterpret(T.int32(LARGEST), "float32")


@T.macro
def write_codes(cache, stored, values, unit, scale_byte, page, head, place, column, packed):
    """The eight columns of a lane in units of `unit` (float64), and by the first lane of a group its scale."""
    packed[0] = T.uint32(0)
    # Where a scale is 0 or NaN, codes are 0.
    if unit > T.float64(0.0):
        for c in T.unroll(VECTOR):
            packed[0] = packed[0] | (code_of(T.reinterpret(values[c], "uint32"), unit) << T.uint32(4 * c))
    T.stg32(stored.values[page, head, place, T.truncdiv(column, CODES)], packed[0])
    if T.truncmod(column, cache.group) == 0:
        span = stored.scales.shape[3]
        group = T.truncdiv(column, cache.group)
        stored.scales[page, head, T.truncdiv(place, span), T.truncmod(place, span), group] = scale_byte


def code_of(bits, unit):
    """The e2m1 code of a float32 that is no NaN, by its bits, in units of a float64 above 0: uint32."""
    size = T.cast(T.reinterpret(T.min(bits & T.uint32(MAGNITUDE), T.uint32(LARGEST)), "float32"), "float64")

    def turn(place):
        return unit * T.float64(TURNS[place])

    # Rounding to even gives a turn itself to the code above it where that is even.
    upper = size >= turn(3)
    middle = size >= T.if_then_else(upper, turn(5), turn(1))
    last = T.if_then_else(upper, T.if_then_else(middle, turn(6), turn(4)), T.if_then_else(middle, turn(2), turn(0)))
    code = bit(upper, 4) | bit(middle, 2) | bit(size > last, 1)
    return code | ((bits >> T.uint32(28)) & T.uint32(8))


def bit(holds, value):
    return T.if_then_else(holds, T.uint32(value), T.uint32(0))
