"""Caches of MXFP4, as rows are written into them: e2m1 with an e8m0 scale, a power of two, for 32 values.

The scale of a group is the power of two at or below its largest magnitude, / 4, at least 2**-127; one that holds NaN
has the scale NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32

from msa_tiles.dsl.cutedsl.append_groups import INFINITY, Groups, Stored, largest_in_group

TENSORS = ("", "_scale")
NAN, LEAST = 255, 2.0**-127
FRACTION = 23  # bits of float32's

__all__ = ["TENSORS", "Cache", "Stored"]


class Cache(Groups):
    """See msa_tiles.dsl.cutedsl.operands."""

    group = 32

    @cute.jit
    def scale_of(self, values: cute.Tensor, stored: Stored, head: Int32, use_scale: Int32) -> Int32:
        """The code of a group's scale. All threads call it."""
        largest = largest_in_group(values, self.group)
        code = cutlass.max((largest >> FRACTION) - 2, Int32(0))
        if largest > INFINITY:
            code = Int32(NAN)
        return code

    @cute.jit
    def unit_of(self, scale: Int32, stored: Stored, head: Int32) -> Float64:
        """What a code of 1 stands for; 0 for NaN."""
        unit = Float64(LEAST)  # no normal number of float32
        if scale > 0:
            unit = Float64((scale << FRACTION).bitcast(Float32))
        if scale == NAN:
            unit = Float64(0.0)
        return unit
