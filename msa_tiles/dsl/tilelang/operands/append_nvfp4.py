"""Caches of NVFP4, as rows are written into them: e2m1, an e4m3 scale for 16 values, and a given global scale.

The scale of a group is its largest magnitude / 6 / global scale, at most 448. Where it rounds to 0 the group is 0, and
a group that holds NaN has the scale NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append_groups import Groups, Stored, largest_in_group, write_codes
from msa_tiles.dsl.tilelang.operands.append_e4m3 import code

TENSORS = ("", "_scale", "_global_scale")
GROUP = 16
LARGEST_CODE = 6.0

__all__ = ["TENSORS", "Cache", "Stored", "find_scale", "write"]


class Cache(Groups):
    """See msa_tiles.dsl.tilelang.operands."""

    def __init__(self, name, head_dim):
        super().__init__(name, head_dim, GROUP)


@T.macro
def find_scale(cache, stored, values, head, use_scale, scale):
    """scale[0] = the scale of a group. All threads call it."""
    quotient = T.alloc_var("float64")
    near = T.alloc_var("float32")
    largest_in_group(values, GROUP, scale)
    quotient = T.cast(scale[0], "float64") / (T.float64(LARGEST_CODE) * T.cast(stored.outer[head], "float64"))
    # A float32 cut off, with its last bit set where something was lost, rounds to e4m3 as the quotient does.
    near = T.cast(quotient, "float32")
    if T.cast(near, "float64") > quotient:
        near = T.reinterpret((T.reinterpret(near, "uint32") - T.uint32(1)) | T.uint32(1), "float32")
    elif T.cast(near, "float64") < quotient:
        near = T.reinterpret(T.reinterpret(near, "uint32") | T.uint32(1), "float32")
    scale[0] = T.cast(T.reinterpret(T.cast(code(near), "uint8"), "float8_e4m3fn"), "float32")


@T.macro
def write(cache, stored, values, scale, page, head, place, column, packed):
    """The eight columns of a lane, and by the first one of a group its scale."""
    unit = T.alloc_var("float64")
    unit = T.cast(scale[0], "float64") * T.cast(stored.outer[head], "float64")
    byte = T.cast(code(scale[0]), "uint8")
    write_codes(cache, stored, values, unit, byte, page, head, place, column, packed)
