"""Caches of e4m3 with float32 scales, as rows are written into them: value / scale, rounded to nearest even.

The scale of a head is given, or with token_scales that of every token of a head is made of its largest magnitude and
written beside the row. What e4m3 cannot hold becomes its largest number; NaN stays NaN.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from msa_tiles.dsl.cutedsl.append import largest_of
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR

TENSORS = ("", "_scale")
LARGEST = 448.0  # e4m3's largest number
LEAST_SCALE, MOST = 2.0**-126, 3.4028234663852886e38  # float32's smallest normal number, and its largest
WORD = 4  # values


class Stored(NamedTuple):
    """A cache [pages, heads, page, head_dim], and scales [heads], or [pages, heads, page] with token_scales."""

    values: Any
    scales: Any


class Cache:
    """See msa_tiles.dsl.cutedsl.operands."""

    element = cutlass.Float8E4M3FN

    def __init__(self, head_dim, *, token_scales):
        self.head_dim = head_dim
        self.token_scales = token_scales

    def arguments(self, pages, heads, page):
        """Stand-ins for TENSORS."""
        of_scales = (pages, heads, page) if self.token_scales else (heads,)
        return (
            stand_in(self.element, pages, heads, page, self.head_dim, align=BYTES),
            make_fake_tensor(Float32, of_scales, tuple(cute.sym_int64() for _ in of_scales)),
        )

    def stored(self, values, scales):
        return Stored(values, scales)

    @cute.jit
    def scale_of(self, values: cute.Tensor, stored: Stored, head: Int32, use_scale: Int32) -> Float32:
        """The scale of a row, 1 where none is to be used. All threads call it."""
        scale = Float32(1.0)
        if cutlass.const_expr(self.token_scales):
            own = cutlass.min(largest_of(values, self.head_dim // VECTOR), Float32(MOST)) / Float32(LARGEST)
            if own >= LEAST_SCALE:
                scale = own
        elif use_scale != 0:
            scale = stored.scales[head]
        return scale

    @cute.jit
    def write(
        self, values: cute.Tensor, scale: Float32, stored: Stored, page: Int32, head: Int32, place: Int32, lane: Int32
    ):
        """The VECTOR columns of a lane, and by the first one the scale."""
        words = cute.make_rmem_tensor(VECTOR // WORD, Int32)
        for i in cutlass.range_constexpr(VECTOR // WORD):
            words[i] = round_e4m3(*(Float32(values[WORD * i + c]) / scale for c in range(WORD)))
        start = stored.values[page, head, place, None].iterator + lane * VECTOR
        target = cute.make_ptr(Int32, start.toint(), start.memspace, assumed_align=VECTOR)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(VECTOR // WORD)))
        if cutlass.const_expr(self.token_scales):
            if lane == 0:
                stored.scales[page, head, place] = scale


def round_e4m3(first, second, third, fourth):
    """Four float32 -> a word of four e4m3, to nearest even, the first one lowest."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Int32],
        read_only_args=[first, second, third, fourth],
    )
