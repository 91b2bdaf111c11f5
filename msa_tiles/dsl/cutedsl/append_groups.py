"""Caches of 4 bits, as rows are written into them: e2m1 in pairs and, for every group of values, a scale of one byte.

Everything is rounded once, to nearest even, as `msa_tiles.quant` does it. A row's values are compared in float64 with
the places where e2m1 rounds up, times the scale of the group: products and comparisons are exact there, and a quotient
of float32 would be rounded twice.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32
from cutlass.cute.runtime import make_fake_tensor

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR

CODES = 2  # in a byte
WORD_BYTES = VECTOR // CODES
MAGNITUDE, INFINITY, LARGEST = 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF  # of float32's bits
TURNS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where a magnitude becomes the next code


class Stored(NamedTuple):
    """Bytes [pages, heads, page, head_dim / 2], scales [pages, heads, page / n, n, groups], global ones [heads]."""

    values: Any
    scales: Any
    outer: Any = None


class Groups:
    """The `Cache` of a format; see msa_tiles.dsl.cutedsl.operands.

    A format says of how many values a `group` is, whether it `has_global` scales, and has `scale_of` and `unit_of`.
    """

    group: int
    has_global = False

    def __init__(self, head_dim):
        self.head_dim = head_dim

    def arguments(self, pages, heads, page):
        """Stand-ins for TENSORS. Tokens of scales have two dimensions: strides tell linear ones from interleaved."""
        of_scales = (pages, heads, cute.sym_int(), cute.sym_int(), self.head_dim // self.group)
        outer = (make_fake_tensor(Float32, (heads,), (cute.sym_int64(),)),) if self.has_global else ()
        return (
            stand_in(cutlass.Uint8, pages, heads, page, self.head_dim // CODES, align=BYTES),
            make_fake_tensor(cutlass.Uint8, of_scales, tuple(cute.sym_int64() for _ in of_scales)),
            *outer,
        )

    def stored(self, *tensors):
        return Stored(*tensors)

    @cute.jit
    def write(
        self, values: cute.Tensor, scale: Int32, stored: Stored, page: Int32, head: Int32, place: Int32, lane: Int32
    ):
        """The VECTOR columns of a lane, and by the first lane of a group its scale."""
        unit = self.unit_of(scale, stored, head)
        words = cute.make_rmem_tensor(1, Int32)
        words[0] = Int32(0)
        # Where a scale is 0 or NaN, codes are 0.
        if unit > Float64(0.0):
            word = Int32(0)
            for c in cutlass.range_constexpr(VECTOR):
                word = word | (code_of(Float32(values[c]).bitcast(Int32), unit) << 4 * c)
            words[0] = word
        start = stored.values[page, head, place, None].iterator + lane * WORD_BYTES
        target = cute.make_ptr(Int32, start.toint(), start.memspace, assumed_align=WORD_BYTES)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(1)))
        lanes = self.group // VECTOR
        if lane % lanes == 0:
            span = Int32(stored.scales.shape[3])
            stored.scales[page, head, place // span, place % span, lane // lanes] = cutlass.Uint8(scale)


@cute.jit
def largest_in_group(values: cute.Tensor, group: cutlass.Constexpr) -> Int32:
    """The bits of a group's largest magnitude: NaN where one is in it, float32's largest number for infinity.

    The lanes of a group are neighbours, and all threads call.
    """
    # As integers, magnitudes are in order, and NaN is the largest.
    largest = Int32(0)
    for c in cutlass.range_constexpr(VECTOR):
        largest = cutlass.max(largest, Float32(values[c]).bitcast(Int32) & MAGNITUDE)
    for step in cutlass.range_constexpr((group // VECTOR).bit_length() - 1):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    if largest == INFINITY:
        largest = Int32(LARGEST)
    return largest


@cute.jit
def code_of(bits: Int32, unit: Float64) -> Int32:
    """The e2m1 code of a float32 that is no NaN, by its bits, in units of a float64 above 0."""
    size = Float64(cutlass.min(bits & MAGNITUDE, Int32(LARGEST)).bitcast(Float32))
    # Rounding to even gives a turn itself to the code above it where that is even.
    code = (bits >> 28) & 8
    middle, low, high = unit * TURNS[1], unit * TURNS[0], unit * TURNS[2]
    if size >= unit * TURNS[3]:
        code = code | 4
        middle, low, high = unit * TURNS[5], unit * TURNS[4], unit * TURNS[6]
    last = low
    if size >= middle:
        code = code | 2
        last = high
    if size > last:
        code = code | 1
    return code
