"""Caches of bfloat16 without scales, as rows are written into them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, wide

TENSORS = ("",)


class Stored(NamedTuple):
    """A cache [pages, heads, page, head_dim]."""

    values: Any


class Cache:
    """See msa_tiles.dsl.cutedsl.operands."""

    element = cutlass.BFloat16

    def __init__(self, head_dim):
        self.head_dim = head_dim

    def arguments(self, pages, heads, page):
        """Stand-ins for TENSORS."""
        return (stand_in(self.element, pages, heads, page, self.head_dim, align=BYTES),)

    def stored(self, values):
        return Stored(values)

    def scale_of(self, values, stored, head, use_scale):
        """None: values are stored as they are."""
        return

    @cute.jit
    def write(self, values: cute.Tensor, scale, stored: Stored, page: Int32, head: Int32, place: Int32, lane: Int32):
        """The VECTOR columns of a lane."""
        target = wide(stored.values[page, head, place, None], lane)
        if cutlass.const_expr(values.element_type is self.element):
            copy_wide(values, target)
        else:
            rounded = cute.make_rmem_tensor(VECTOR, self.element)
            for c in cutlass.range_constexpr(VECTOR):
                rounded[c] = values[c].to(self.element)
            copy_wide(rounded, target)
