"""Caches of NVFP4, as rows are read out of them: code times scale of the group, exactly, times the global scale.

That last product, of float32, is rounded once to bfloat16, to nearest even; NaN stays NaN.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.append_groups import Stored
from msa_tiles.dsl.cutedsl.decoding import decode_f16, widen
from msa_tiles.dsl.cutedsl.dequantize_groups import ReadGroups
from msa_tiles.dsl.cutedsl.e2m1 import POWER_BF16, apart, as_bf16, both, times_bf16

TENSORS = ("", "_scale", "_global_scale")
# What the largest scale may be multiplied with: 448 is below 2**9, bfloat16 ends at 2**128.
SCALE_POWER = 118
LACKING = 2.0 ** (POWER_BF16 - SCALE_POWER)

__all__ = ["TENSORS", "Cache", "Stored"]


class Cache(ReadGroups):
    """See msa_tiles.dsl.cutedsl.operands."""

    group = 16
    has_global = True

    def outer_of(self, stored, head):
        return stored.outer[head]

    def numbers(self, word, scale, outer):
        factor = both(widen(decode_f16(scale)[0], Float32(2.0**SCALE_POWER)), 0)
        return [times_f32(times_bf16(as_bf16(pair), factor), outer) for pair in apart(word)]


def times_f32(pair, factor):
    """Two bfloat16, times the power of two that they lack and a float32 -> two bfloat16."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 low, high; .reg .f32 first, second; shl.b32 low, {$r0}, 16; and.b32 high, {$r0}, 0xFFFF0000; "
        "mov.b32 first, low; mov.b32 second, high; mul.f32 first, first, {$r2}; mul.f32 second, second, {$r2}; "
        "mul.f32 first, first, {$r1}; mul.f32 second, second, {$r1}; cvt.rn.bf16x2.f32 {$w0}, second, first; }",
        write_only_types=[Int32],
        read_only_args=[pair, factor, Float32(LACKING)],
    )
