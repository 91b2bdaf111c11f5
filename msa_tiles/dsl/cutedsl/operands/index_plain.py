"""Index keys of bfloat16 without scales: TMA lays them down where the product reads them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, lane

TENSORS = ("",)


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return "bfloat16"


@declares
def parts(name, head_dim, block_size, stages, *, producer, freed, element="bfloat16"):
    """One pipeline, which TMA fills."""
    tiles = f"{name}_tiles"
    return Parts(
        (Pipeline(name, stages, (lane(producer),), (freed,), (tiles,)),),
        (
            buffer(
                tiles, element, align=1024, note="swizzled, in panels of 128 bytes",
                stages=stages, block_size=block_size, head_dim=head_dim,
            ),
        ),
    )  # fmt: skip


class Stored(NamedTuple):
    """Index keys in global memory, as TMA sees them, with their scales."""

    atom: Any
    rows: Any
    scales: Any  # None without


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to the first of each kind."""

    tiles: Any
    scales: Any  # None where keys have none of their own
    full: Any
    free: Any


class IndexKeys:
    """Blocks of keys [total_k, head_dim], or [pages, page, head_dim] with pages_per_block > 0.

    What a page table's entry past the request's keys names does not matter: its rows are masked, and TMA answers a page
    outside the pool with zeros, as it does for rows past the keys.
    """

    element = cutlass.BFloat16
    scaled = False
    key_scales = 0

    def __init__(self, name, table, head_dim, block_size, pages_per_block):
        self.name = name
        self.table = table
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.stages = table.depth(name)
        self.box_rows = block_size // max(pages_per_block, 1)
        self.panel = tma.panel_columns(self.element, head_dim)

    def arguments(self):
        """Stand-ins for TENSORS."""
        page = (self.box_rows,) if self.pages_per_block else ()
        return (stand_in(self.element, cute.sym_int(), *page, self.head_dim, align=tma.BYTES),)

    def stored(self, keys, scales=None):
        modes = (1, 2, 0) if self.pages_per_block else (0, 1)
        return Stored(*tma.box_atom(tma.described(keys, modes), self.box_rows, self.panel), scales)

    def atoms(self, stored):
        return (stored.atom,)

    def layouts(self):
        shape = (ROWS, self.block_size, self.head_dim)
        return {f"{self.name}_tiles": hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.element, self.stages)}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        return Held(buffers[f"{self.name}_tiles"], buffers.get(f"{self.name}_scales"), full, free)

    @cute.jit
    def pages(self, page_table: cute.Tensor, request: Int32, block: Int32):
        """The pages of a block; nothing for flat keys."""
        entries = (block * self.pages_per_block + p for p in range(self.pages_per_block))
        return [page_table[request, cutlass.min(entry, Int32(page_table.shape[1]) - 1)] for entry in entries]

    @cute.jit
    def load(self, stored: Stored, held: Held, stage: Int32, phase: Int32, row: Int32, pages):
        """The block that begins at a row of flat keys, or that has these pages -> a stage, once it is free.

        A whole warp calls it.
        """
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = tma.boxes(held.tiles, self.box_rows, self.block_size, self.head_dim, self.stages, self.panel)
        for panel in cutlass.range_constexpr(self.head_dim // self.panel):
            if cutlass.const_expr(self.pages_per_block > 0):
                for p in cutlass.range_constexpr(self.pages_per_block):
                    source = stored.rows[None, None, pages[p]]
                    tma.load_box(stored.atom, source, Int32(0), panel, boxes[None, None, p, panel, stage], full)
            else:
                tma.load_box(stored.atom, stored.rows, row, panel, boxes[None, None, 0, panel, stage], full)
        self.load_scales(stored, held, stage, row, pages)

    def load_scales(self, stored, held, stage, row, pages):
        """Nothing."""

    def factors(self, held, stage):
        return None

    def row_factor(self, stored, scales, token, head):
        return None
