"""Caches of bfloat16 without scales, as rows are written into them."""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.packing import pack_halves

TENSORS = ("",)


class Stored(NamedTuple):
    """A cache [pages, heads, page, head_dim]."""

    values: Any


class Cache:
    """See msa_tiles.dsl.tilelang.operands."""

    def __init__(self, name, head_dim):
        self.name = name
        self.head_dim = head_dim

    def tensor(self, pages, heads, page):
        """The parameter of the kernel."""
        steps = strides(f"{self.name}_page, {self.name}_head, {self.name}_place")
        return T.StridedTensor((pages, heads, page, self.head_dim), (*steps, 1), "bfloat16")


@T.macro
def find_scale(cache, stored, values, head, use_scale, scale):
    """Nothing: values are stored as they are."""


@T.macro
def write(cache, stored, values, scale, page, head, place, column, packed):
    """The eight columns of a lane."""
    for c in T.unroll(4):
        packed[c] = pack_halves(values[2 * c], values[2 * c + 1])
    T.stg128(stored.values[page, head, place, column], packed[0:4])
