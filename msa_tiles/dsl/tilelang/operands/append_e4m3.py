"""Caches of e4m3 with float32 scales, as rows are written into them: value / scale, rounded to nearest even.

The scale of a head is given, or with token_scales that of every token of a head is made of its largest magnitude and
written beside the row. What e4m3 cannot hold becomes its largest number; NaN stays NaN.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.tilelang.append import VECTOR, largest_of
from msa_tiles.dsl.tilelang.layout import strides

TENSORS = ("", "_scale")
LARGEST = 448.0  # e4m3's largest number
LEAST_SCALE, MOST = 2.0**-126, 3.4028234663852886e38  # float32's smallest normal number, and its largest
WORD = 4  # values


class Stored(NamedTuple):
    """A cache [pages, heads, page, head_dim], and scales [heads], or [pages, heads, page] with token_scales."""

    values: Any
    scales: Any


class Cache:
    """See msa_tiles.dsl.tilelang.operands."""

    def __init__(self, name, head_dim, *, token_scales):
        self.name = name
        self.head_dim = head_dim
        self.token_scales = token_scales

    def tensor(self, pages, heads, page):
        """The parameter of the kernel."""
        steps = strides(f"{self.name}_page, {self.name}_head, {self.name}_place")
        return T.StridedTensor((pages, heads, page, self.head_dim), (*steps, 1), "float8_e4m3fn")

    def scale(self, pages, heads, page):
        """That of the scales."""
        if self.token_scales:
            steps = strides(f"{self.name}_scale_page, {self.name}_scale_head, {self.name}_scale_place")
            return T.StridedTensor((pages, heads, page), steps, "float32")
        return T.StridedTensor((heads,), (strides(f"{self.name}_scale_head"),), "float32")


@T.macro
def find_scale(cache, stored, values, head, use_scale, scale):
    """scale[0] = the scale of a row, 1 where none is to be used. All threads call it."""
    if cache.token_scales:
        largest_of(values, cache.head_dim // VECTOR, scale)
        scale[0] = T.min(scale[0], MOST) / LARGEST
        if scale[0] < LEAST_SCALE:
            scale[0] = 1.0
    else:
        scale[0] = 1.0
        if use_scale != 0:
            scale[0] = stored.scales[head]


@T.macro
def write(cache, stored, values, scale, page, head, place, column, packed):
    """The eight columns of a lane, and by the first one the scale."""
    for i in T.unroll(VECTOR // WORD):
        packed[i] = T.uint32(0)
        for c in T.unroll(WORD):
            packed[i] = packed[i] | (code(values[WORD * i + c] / scale[0]) << T.uint32(8 * c))
    T.stg64(stored.values[page, head, place, column], packed[0 : VECTOR // WORD])
    if cache.token_scales:
        if column == 0:
            stored.scales[page, head, place] = scale[0]


def code(value):
    """A float32 rounded to e4m3, as the lowest byte of a uint32."""
    return T.cast(T.reinterpret(T.cast(saturated(value), "float8_e4m3fn"), "uint8"), "uint32")


def saturated(value):
    """A value within e4m3's range; NaN compares with nothing and stays."""
    return T.if_then_else(value > LARGEST, LARGEST, T.if_then_else(value < -LARGEST, -LARGEST, value))
