"""Keys or values of bfloat16 without scales: TMA lays them down where the product reads them."""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, threads
from msa_tiles.dsl.tilelang.keys import block_keys
from msa_tiles.dsl.tilelang.shared import make_buffer
from msa_tiles.dsl.tilelang.stages import load_stage

TENSORS = ("",)
STARTS = False


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, own=True):
    """A ring of tiles, which TMA fills."""
    if not own:
        return Parts((), ())
    tiles = buffer(f"{name}_tiles", "bfloat16", align=1024, stages=stages, block_size=block_size, head_dim=head_dim)
    return Parts(
        (Pipeline(name, stages, (threads(producer),), tuple(map(threads, readers)), fills=(tiles.name,)),), (tiles,)
    )


@declares
def multiplied(name):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16"


class Stored(NamedTuple):
    """Keys or values in global memory."""

    values: Any


class Held(NamedTuple):
    """A ring in shared memory, [stages, block_size, head_dim]."""

    tiles: Any


class Operand:
    """See msa_tiles.dsl.tilelang.operands."""

    element = "bfloat16"

    def __init__(self, name, head_dim, block_size, pages_per_block, element=None):
        assert element in (None, self.element)
        self.name = name
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block

    def tensor(self, heads):
        """[total_k, heads, head_dim], or [pages, heads, page, head_dim] with pages_per_block > 0."""
        layout = block_keys(heads, self.head_dim, self.block_size, self.pages_per_block, self.name)
        return T.StridedTensor(*layout, self.element)

    def fold(self, value, stored, head):
        return value


def allocate(operand, table, stages, tiles=None):
    return Held(make_buffer(table, f"{operand.name}_tiles") if tiles is None else tiles)


@T.macro
def start(operand, stored, page_table, row, head, held, stage, rows, thread):
    pass


@T.macro
def fill(operand, stored, page_table, row, head, held, full, place, stage, phase, thread):
    load_stage(
        stored.values, page_table, row, head, held.tiles, full, place, operand.block_size, operand.head_dim,
        operand.pages_per_block,
    )  # fmt: skip


@T.macro
def weigh(operand, held, S, rows):
    pass
