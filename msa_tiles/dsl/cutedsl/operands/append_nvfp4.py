"""Caches of NVFP4, as rows are written into them: e2m1, an e4m3 scale for 16 values, and a given global scale.

The scale of a group is its largest magnitude / 6 / global scale, at most 448. Where it rounds to 0 the group is 0, and
a group that holds NaN has the scale NaN.
"""

import cutlass.cute as cute
from cutlass import Float32, Float64, Int32

from msa_tiles.dsl.cutedsl.append_groups import Groups, Stored, largest_in_group
from msa_tiles.dsl.cutedsl.operands.append_e4m3 import round_e4m3

TENSORS = ("", "_scale", "_global_scale")
LARGEST_CODE = 6.0
NAN, LEAST_STEP = 0x7F, 2.0**-9  # of e4m3: the code, and the step of its smallest numbers
SHIFT, BIAS = 20, 120 << 23  # from the bits of e4m3 to those of float32

__all__ = ["TENSORS", "Cache", "Stored"]


class Cache(Groups):
    """See msa_tiles.dsl.cutedsl.operands."""

    group = 16
    has_global = True

    @cute.jit
    def scale_of(self, values: cute.Tensor, stored: Stored, head: Int32, use_scale: Int32) -> Int32:
        """The code of a group's scale. All threads call it."""
        largest = Float64(largest_in_group(values, self.group).bitcast(Float32))
        quotient = largest / (Float64(stored.outer[head]) * LARGEST_CODE)
        # A float32 cut off, with its last bit set where something was lost, rounds to e4m3 as the quotient does.
        near = Float32(quotient)
        bits = near.bitcast(Int32)
        if Float64(near) > quotient:
            bits = (bits - 1) | 1
        elif Float64(near) < quotient:
            bits = bits | 1
        return Int32(round_e4m3(bits.bitcast(Float32), Float32(0.0), Float32(0.0), Float32(0.0))) & 0xFF

    @cute.jit
    def unit_of(self, scale: Int32, stored: Stored, head: Int32) -> Float64:
        """What a code of 1 stands for; 0 for NaN."""
        value = Float64(((scale << SHIFT) + BIAS).bitcast(Float32))
        if scale < 8:
            value = Float64(scale) * LEAST_STEP
        if scale == NAN:
            value = Float64(0.0)
        return value * Float64(stored.outer[head])
