"""Index keys that are multiplied as they are stored: bfloat16, or e4m3 with float32 scales.

The contract of index keys. Tensors: `arguments` stand in for what a call passes, `stored` makes of it what the kernel
takes, `atoms` are its descriptors. Memory: `allocate` takes what the keys keep in shared memory, `arrivals` says what
their barriers count, `held` joins both. The producer warp finds the `pages` of a block and calls `load`. Readers wait
for `full`, multiply `tiles` [block_size, head_dim, stage] of `element`, multiply column j of the product by
`factors`[j] where there are any, and arrive at `free`; `row_factor` multiplies all products of a query.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.row_scales import copy_scales
from msa_tiles.dsl.cutedsl.warp import WARP
from msa_tiles.dsl.cutedsl.wgmma import ROWS


class Stored(NamedTuple):
    """Index keys in global memory, as TMA sees them, with their scales."""

    atom: Any
    rows: Any
    scales: Any


class Scales(NamedTuple):
    """The scales of queries [total_q, num_index_heads], and whether they, and one of all keys, are to be used."""

    q_scale: Any
    use_q_scale: Any
    use_k_scale: Any


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to the first of each kind."""

    tiles: Any
    scales: Any
    full: Any
    free: Any


class IndexKeys:
    """Blocks of keys [total_k, head_dim], or [pages, page, head_dim] with pages_per_block > 0.

    key_scales is 1 for a scale for every key, 0 for one that all keys share, None for keys without scales. What a page
    table's entry past the request's keys names does not matter: its rows are masked, and TMA answers a page outside the
    pool with zeros, as it does for rows past the keys.

    Pipeline  full: stages, 1 producer lane + TMA bytes, and with key_scales the copies of all its lanes
              free: stages, 1 lane of each reading warp
    Memory    tiles [stages, block_size, head_dim], swizzled by 128 bytes, or by 64 where a row is no longer
              scales [stages, block_size] with key_scales
    """

    def __init__(self, element, head_dim, block_size, pages_per_block, key_scales, stages, reading_warps):
        self.element = element
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.key_scales = key_scales
        self.stages = stages
        self.box_rows = block_size // max(pages_per_block, 1)
        self.panel = tma.panel_columns(self.element, head_dim)
        self.block_bytes = block_size * head_dim * self.element.width // 8
        self.arrivals = [*[1 + WARP * (key_scales or 0)] * stages, *[reading_warps] * stages]

    def arguments(self):
        """Stand-ins: the keys, and k_scale with their rows, or a vector whose first element counts for all keys."""
        shape = (cute.sym_int(), self.head_dim)
        if self.pages_per_block:
            shape = (cute.sym_int(), self.box_rows, self.head_dim)
        keys = stand_in(self.element, *shape, align=tma.BYTES)
        if self.key_scales is None:
            return (keys,)
        return keys, stand_in(Float32, cute.sym_int(), *shape[1 : -1 if self.key_scales else 1], last=cute.sym_int64())

    def stored(self, keys, scales=None):
        modes = (1, 2, 0) if self.pages_per_block else (0, 1)
        return Stored(*tma.box_atom(tma.described(keys, modes), self.box_rows, self.panel), scales)

    def atoms(self, stored):
        return (stored.atom,)

    def allocate(self, memory: SmemAllocator):
        layout = hopper.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (ROWS, self.block_size, self.head_dim), self.element, self.stages
        )
        scales = None
        tiles = memory.allocate_tensor(self.element, layout.outer, 1024, layout.inner)
        if self.key_scales:
            scales = memory.allocate_tensor(Float32, cute.make_layout((self.block_size, self.stages)), 128)
        return tiles, scales

    def held(self, allocated, barriers):
        return Held(*allocated, barriers, barriers + self.stages)

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
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.block_bytes)
        boxes = tma.boxes(held.tiles, self.box_rows, self.block_size, self.head_dim, self.stages, self.panel)
        for panel in cutlass.range_constexpr(self.head_dim // self.panel):
            if cutlass.const_expr(self.pages_per_block > 0):
                for p in cutlass.range_constexpr(self.pages_per_block):
                    source = stored.rows[None, None, pages[p]]
                    tma.load_box(stored.atom, source, Int32(0), panel, boxes[None, None, p, panel, stage], full)
            else:
                tma.load_box(stored.atom, stored.rows, row, panel, boxes[None, None, 0, panel, stage], full)
        if cutlass.const_expr(self.key_scales):
            copy_scales(stored.scales, row, pages, held.scales[None, stage], self.box_rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)

    def factors(self, held: Held, stage):
        """The scales of a stage's keys, or None; they stay there until all readers have arrived at `free`."""
        return held.scales[None, stage] if self.key_scales else None

    @cute.jit
    def row_factor(self, stored: Stored, scales, token: Int32, head: Int32):
        """What all products of a query are to be multiplied by, or None; `scales` are None or `Scales`."""
        factor = None
        if cutlass.const_expr(scales is not None):
            factor = Float32(1.0)
            if scales.use_q_scale != 0:
                factor = Float32(scales.q_scale[token, head])
            if cutlass.const_expr(not self.key_scales):
                if scales.use_k_scale != 0:
                    factor = factor * stored.scales[0]
        return factor
