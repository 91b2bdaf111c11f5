"""Caches of MXFP4, as rows are written into them: e2m1 with an e8m0 scale, a power of two, for 32 values.

The scale of a group is the power of two at or below its largest magnitude, / 4, at least 2**-127; one that holds NaN
has the scale NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append_groups import INFINITY, Groups, Stored, largest_in_group, write_codes

TENSORS = ("", "_scale")
GROUP = 32
NAN, LEAST = 255, 2.0**-127
FRACTION = 23  # bits of float32's

__all__ = ["TENSORS", "Cache", "Stored", "find_scale", "write"]


class Cache(Groups):
    """See msa_tiles.dsl.tilelang.operands."""

    def __init__(self, name, head_dim):
        super().__init__(name, head_dim, GROUP)


@T.macro
def find_scale(cache, stored, values, head, use_scale, scale):
    """scale[0] = the largest magnitude of a group, whose exponent is that of the scale, but for 2. All threads call."""
    largest_in_group(values, GROUP, scale)


@T.macro
def write(cache, stored, values, scale, page, head, place, column, packed):
    """The eight columns of a lane, and by the first one of a group its scale."""
    power = T.alloc_var("int32")
    unit = T.alloc_var("float64")
    power = T.max((T.reinterpret(scale[0], "int32") >> FRACTION) - 2, 0)
    if T.reinterpret(scale[0], "int32") > INFINITY:
        power = NAN
        unit = T.float64(0.0)
    else:
        # Of float32, 2**-127 is no normal number.
        near = T.cast(T.reinterpret(T.max(power, 1) << FRACTION, "float32"), "float64")
        unit = T.if_then_else(power == 0, T.float64(LEAST), near)
    write_codes(cache, stored, values, unit, T.cast(power, "uint8"), page, head, place, column, packed)
