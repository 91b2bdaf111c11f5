"""Keys or values of bfloat16 without scales: TMA lays them down where the product reads them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import swap_ab, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive, arrive_alone
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, lane, warps

TENSORS = ("",)


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers):
    """One pipeline, which TMA fills."""
    tiles = f"{name}_tiles"
    return Parts(
        (Pipeline(name, stages, (lane(producer),), (warps(readers),), (tiles,)),),
        (
            buffer(
                tiles, "bfloat16", align=1024, note="swizzled by 128 bytes, in panels of 64 columns",
                stages=stages, block_size=block_size, head_dim=head_dim,
            ),
        ),
    )  # fmt: skip


@declares
def right_parts(name, head_dim, block_size, *, producer, keeper, readers, inspected):
    """One pipeline, which TMA fills; blocks to be inspected land by another barrier, and the keeper passes them on."""
    tiles = f"{name}_tiles"
    landing = (Pipeline(f"{name}_raw", 1, (lane(producer),), fills=(tiles,)),) if inspected else ()
    return Parts(
        (Pipeline(name, 1, (lane(producer),), tuple(warps(role) for role in readers), (tiles,)), *landing),
        (
            buffer(
                tiles, "bfloat16", align=1024, note="swizzled by 128 bytes, in panels of 64 columns",
                block_size=block_size, head_dim=head_dim,
            ),
        ),
    )  # fmt: skip


@declares
def ring_parts(stages, *, producer, decoder, readers):
    """A ring of blocks in memory of the kernel, which TMA fills."""
    return Parts((Pipeline("ring", stages, (lane(producer),), (warps(readers),)),), ())


@declares
def query_parts(rows, *, producer, decoder, readers):
    """A tile of queries, which TMA fills."""
    return Parts((Pipeline("q", 1, (lane(producer),), (warps(readers),)),), ())


@declares
def in_ring(name):
    """The element of the product, of a ring."""
    return multiplied(name)


@declares
def multiplied(name):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16"


class Stored(NamedTuple):
    """A tensor in global memory, as TMA sees it."""

    atom: Any
    rows: Any


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to those of the first stage."""

    tiles: Any
    full: Any
    free: Any


class Storage:
    """Blocks of [block_size, head_dim] in global memory."""

    element = cutlass.BFloat16

    def __init__(self, name, table, head_dim, block_size, pages_per_block):
        self.name = name
        self.table = table
        self.block_size = block_size
        self.head_dim = head_dim
        self.blocks = Blocks(self.element, head_dim, block_size, pages_per_block)

    def arguments(self, kv_heads):
        """Keys [total_k, kv_heads, head_dim], or [pages, kv_heads, page, head_dim]."""
        page = (self.blocks.box_rows,) if self.blocks.pages_per_block else ()
        return (stand_in(self.element, cute.sym_int(), kv_heads, *page, self.head_dim, align=tma.BYTES),)

    def stored(self, rows):
        return Stored(*self.blocks.described(rows))

    def atoms(self, stored):
        return (stored.atom,)

    def fold(self, value, stored, head):
        return value


class Left(Storage):
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    ahead = False

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed):
        super().__init__(name, table, head_dim, block_size, pages_per_block)
        self.stages = table.depth(name)
        self.threads = table.threads_of(readers)
        self.transposed = transposed

    def layouts(self):
        major, shape = LayoutEnum.ROW_MAJOR, (self.block_size, ROWS, self.head_dim)
        if self.transposed:
            major, shape = LayoutEnum.COL_MAJOR, shape[::-1]
        return {f"{self.name}_tiles": hopper.make_smem_layout_a(major, shape, self.element, self.stages)}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        return Held(buffers[f"{self.name}_tiles"], full, free)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: Held, stage: Int32, phase: Int32):
        """The block of one head that begins at a row of flat keys, or that has these pages. A whole warp calls it."""
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.tiles, self.stages)[None, None, None, None, stage]
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, boxes, full)

    def product(self, columns):
        """The multiplications of a block with [columns, K] (wgmma.product)."""
        major = OperandMajorMode.MN if self.transposed else OperandMajorMode.K
        return swap_ab.product(self.element, columns, major)

    def accumulator(self, product, columns):
        """Registers of the product of a block."""
        return swap_ab.accumulator(product, self.head_dim if self.transposed else self.block_size, columns)

    def operand(self, product, held):
        """The stages as the product takes them."""
        return wgmma.operand_a(product, held.tiles)

    def prepare(self, right, thread):
        """Nothing: columns of the product lie as they come."""

    @cute.jit
    def take(self, operand: cute.Tensor, held: Held, stage: Int32, phase: Int32, valid, thread: Int32):
        """Wait for a stage: the tile. Rows from `valid` on, if given, become zeros once the readers have met."""
        cute.arch.mbarrier_wait(held.full + stage, phase)
        if cutlass.const_expr(valid is not None):
            if valid < self.block_size:
                self.blocks.clear_rows(held.tiles[None, None, stage], valid, thread, self.threads)
        return operand[None, None, None, stage]

    def multiply(self, product, into, tile, right):
        """Start into = tile x right and close the group."""
        wgmma.multiply(product, into, tile, right)

    @cute.jit
    def release(self, held: Held, stage: Int32):
        """Behind the product, one arrival for each warp: waiting for a product brings a warp together."""
        arrive_alone(held.free + stage)

    def row_of(self, member, lane, half):
        """The row, of 64, whose column a lane of warp `member` has in this half of an accumulator."""
        return member * 16 + lane // 4 + half * 8

    def factors(self, held, stage, phase, first_row):
        return None


class HeldRight(NamedTuple):
    """A block in shared memory, the barriers of who reads it, and the one by which it lands to be inspected."""

    tile: Any
    full: Any
    free: Any
    raw_full: Any  # None where blocks are not inspected


class Right(Storage):
    """Blocks as the right side of products of 64-row tiles: see msa_tiles.dsl.cutedsl.operands."""

    def layouts(self):
        major, shape = LayoutEnum.ROW_MAJOR, (ROWS, self.block_size, self.head_dim)
        if self.name == "v":
            major, shape = LayoutEnum.COL_MAJOR, (ROWS, self.head_dim, self.block_size)
        return {f"{self.name}_tiles": hopper.make_smem_layout_b(major, shape, self.element, 1)}

    def held(self, buffers, barriers):
        raw_full = None
        if f"{self.name}_raw" in self.table.pipelines:
            raw_full = barriers + self.table.place(f"{self.name}_raw_full")
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        return HeldRight(buffers[f"{self.name}_tiles"], full, free, raw_full)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: HeldRight, parity: Int32, inspected: Int32):
        """The producer: the block that begins at a row of flat keys, or that has these pages, once there is room."""
        cute.arch.mbarrier_wait(held.free, parity ^ 1)
        landing = held.full
        if cutlass.const_expr(held.raw_full is not None):
            if inspected != 0:
                landing = held.raw_full
        self.blocks.load(stored.atom, stored.rows, row, pages, head, self.blocks.boxes(held.tile), landing)

    @cute.jit
    def end_of_loads(self, held: HeldRight, parity: Int32):
        """The producer: wake those who wait for another block."""
        cute.arch.mbarrier_wait(held.free, parity ^ 1)
        arrive_alone(held.full)

    @cute.jit
    def bring(self, held: HeldRight, parity: Int32, phase: Int32, inspected: Int32):
        """The keeper: until an inspected block is there, which `phase` is for and then the next one's."""
        if cutlass.const_expr(held.raw_full is not None):
            if inspected != 0:
                cute.arch.mbarrier_wait(held.raw_full, phase)
                phase = phase ^ 1
        return phase

    @cute.jit
    def pass_on(self, held: HeldRight, inspected: Int32):
        """The keeper: an inspected block is ready for its readers."""
        if cutlass.const_expr(held.raw_full is not None):
            if inspected != 0:
                arrive(held.full)

    def end_of_tasks(self, held, parity):
        """Nothing: who loads wakes those who wait."""

    def of_head(self, stored, head):
        return None


class InRing(Storage):
    """Blocks as the right side of products, in a ring of tiles of the kernel's: see msa_tiles.dsl.cutedsl.operands."""

    LANDING = "ring_full"  # where the bytes of a stage are awaited first
    Q_LANDING = "q_full"  # likewise of queries
    decoded = False

    def boxes(self, tiles, stages):
        """Where TMA writes in a ring of tiles: [rows, columns, box, panel, stage]."""
        return self.blocks.boxes_of(tiles, stages)

    def load_scales(self, stored, row, page, head, tile, barrier):
        """Nothing."""

    def skip_scales(self, barrier):
        """Nothing."""

    def scale_rows(self, scales, powers, row):
        """Nothing."""

    def of_head(self, stored, head):
        return None
