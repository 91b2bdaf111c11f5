"""Stored bytes as the right side of products of 64-row tiles, decoded to a tile by one warp: what formats share.

A format brings its storage (see msa_tiles.dsl.cutedsl.operands), with `row_bytes`, and its side of these:
  scales_at(held)   the block's scales, None where it has none
  note_order(stored, scales)   one lane, before the rows' bytes are expected: what the keeper must be told
  load_scales(stored, row, pages, head, scales, full)   the scales, if there are some, and the arrivals of all lanes
  decode_block(held)   the keeper: the bytes -> the tile
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, lane, threads, warps


@declares
def parts(name, element, head_dim, block_size, buffers, *, producer, keeper, readers, copies):
    """What TMA brings, and with `copies` all lanes of the producer, and what the keeper makes of it for the readers."""
    raw, tiles = f"{name}_raw", f"{name}_tiles"
    of_lanes = (threads(producer),) if copies else ()
    return Parts(
        (
            Pipeline(raw, 1, (lane(producer), *of_lanes), (warps(keeper),), (raw,)),
            Pipeline(name, 1, (lane(keeper),), tuple(warps(role) for role in readers)),
        ),
        (
            buffer(
                tiles, element, align=1024, note="swizzled by 128 bytes, in panels of 64 columns",
                block_size=block_size, head_dim=head_dim,
            ),
            *buffers,
        ),
    )  # fmt: skip


class HeldRight(NamedTuple):
    """A block in shared memory: decoded, and as it comes; with barriers, and scales if they come beside it."""

    tile: Any
    full: Any
    free: Any
    raw: Any
    raw_full: Any
    raw_free: Any
    scales: Any


class Right:
    """Blocks as the right side of products of 64-row tiles: see msa_tiles.dsl.cutedsl.operands."""

    def layouts(self):
        major, shape = LayoutEnum.ROW_MAJOR, (ROWS, self.block_size, self.head_dim)
        if self.name == "v":
            major, shape = LayoutEnum.COL_MAJOR, (ROWS, self.head_dim, self.block_size)
        raw = cute.make_ordered_layout((self.block_size, self.row_bytes), order=(1, 0))
        tiles = hopper.make_smem_layout_b(major, shape, self.element, 1)
        return {f"{self.name}_tiles": tiles, f"{self.name}_raw": raw}

    def held(self, buffers, barriers):
        full, free, raw_full, raw_free = (
            barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free", "raw_full", "raw_free")
        )
        tile, raw = (buffers[f"{self.name}_{kind}"] for kind in ("tiles", "raw"))
        return HeldRight(tile, full, free, raw, raw_full, raw_free, buffers.get(f"{self.name}_scales"))

    @cute.jit
    def load(self, stored, row: Int32, pages, head: Int32, held: HeldRight, parity: Int32, inspected: Int32):
        """The producer: the block that begins at a row of flat keys, or that has these pages, once there is room."""
        cute.arch.mbarrier_wait(held.raw_free, parity ^ 1)
        scales = self.scales_at(held)
        with cute.arch.elect_one():
            self.note_order(stored, scales)
            cute.arch.mbarrier_arrive_and_expect_tx(held.raw_full, self.table.bytes_of(f"{self.name}_raw"))
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, self.blocks.boxes(held.raw), held.raw_full)
        self.load_scales(stored, row, pages, head, scales, held.raw_full)

    def scales_at(self, held):
        return held.scales

    def note_order(self, stored, scales):
        """Nothing."""

    def end_of_loads(self, held, parity):
        """Nothing: the keeper wakes those who wait for another block."""

    @cute.jit
    def end_of_tasks(self, held: HeldRight, parity: Int32):
        """The keeper: wake those who wait for another block."""
        cute.arch.mbarrier_wait(held.free, parity ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(held.full)

    @cute.jit
    def bring(self, held: HeldRight, parity: Int32, phase: Int32, inspected: Int32):
        """The keeper: decode a block, once there is room; what came is free then."""
        cute.arch.mbarrier_wait(held.raw_full, parity)
        cute.arch.mbarrier_wait(held.free, parity ^ 1)
        self.decode_block(held)
        cute.arch.fence_view_async_shared()
        arrive(held.raw_free)
        return phase

    @cute.jit
    def pass_on(self, held: HeldRight, inspected: Int32):
        """The keeper: the block is ready for its readers."""
        arrive(held.full)
