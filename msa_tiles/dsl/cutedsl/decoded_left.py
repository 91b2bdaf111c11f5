"""Stored bytes as the left side of products of few columns, decoded in registers: what formats have in common.

A format brings its storage (see msa_tiles.dsl.cutedsl.operands), with `row_bytes`, and its side of these:
  scales_at(held, stage)   a stage's scales, None where it has none
  note_order(stored, scales)   one lane, before the rows' bytes are expected: what readers must be told
  load_scales(stored, row, pages, head, scales, full)   the scales, if there are some, and the arrivals of all lanes
  decode_stage(registers, raw, scales, valid, member, lane, thread)   a stage -> the registers of wgmma
  arrange(right, row, chunk)   `arranged` columns of the queries in the order of decoded keys
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from msa_tiles.dsl.cutedsl import swap_ab, wgmma
from msa_tiles.dsl.cutedsl.decoding import aligned, byte_of
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.table import Parts, Pipeline, declares, lane, threads, warps


@declares
def parts(name, stages, buffers, *, producer, readers, copies):
    """One pipeline, which TMA fills, and with `copies` those of all lanes of the producer."""
    of_lanes = (threads(producer),) if copies else ()
    pipeline = Pipeline(name, stages, (lane(producer), *of_lanes), (warps(readers),), (f"{name}_raw",))
    return Parts((pipeline,), buffers)


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to those of the first stage."""

    raw: Any
    scales: Any  # None where a head has one
    full: Any
    free: Any


class Left:
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    ahead = True

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed, **scales):
        super().__init__(name, table, head_dim, block_size, pages_per_block, **scales)
        self.stages = table.depth(name)
        self.threads = table.threads_of(readers)
        self.transposed = transposed
        # Of the product: rows and what they are multiplied along.
        self.rows, self.depth = (head_dim, block_size) if transposed else (block_size, head_dim)

    def layouts(self):
        shape = (self.stages, self.block_size, self.row_bytes)
        return {f"{self.name}_raw": cute.make_ordered_layout(shape, order=(2, 1, 0))}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        return Held(buffers[f"{self.name}_raw"], buffers.get(f"{self.name}_scales"), full, free)

    @cute.jit
    def load(self, stored, row: Int32, pages, head: Int32, held: Held, stage: Int32, phase: Int32):
        """The block of one head that begins at a row of flat keys, or that has these pages. A whole warp calls it."""
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        scales = self.scales_at(held, stage)
        with cute.arch.elect_one():
            self.note_order(stored, scales)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)[None, None, None, None, stage]
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, boxes, full)
        self.load_scales(stored, row, pages, head, scales, full)

    def note_order(self, stored, scales):
        """Nothing."""

    def product(self, columns):
        """The multiplications of a block with [columns, K] (wgmma.product)."""
        return swap_ab.product(self.element, columns, OperandMajorMode.K, warpgroup.OperandSource.RMEM)

    def accumulator(self, product, columns):
        """Registers of the product of a block."""
        return swap_ab.accumulator(product, self.rows, columns)

    def operand(self, product, held):
        """Registers for a decoded block."""
        mma = product[0]
        return mma.make_fragment_A(mma.partition_shape_A((self.rows, self.depth)))

    @cute.jit
    def prepare(self, right: cute.Tensor, thread: Int32):
        """The columns of the right side in the order that decoded keys have; the readers meet."""
        if cutlass.const_expr(not self.transposed):
            columns = cute.size(right, mode=[0])
            for number in cutlass.range(thread, columns * (self.head_dim // self.arranged), self.threads, unroll=1):
                self.arrange(right, number % columns, number // columns)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    @cute.jit
    def take(self, operand: cute.Tensor, held: Held, stage: Int32, phase: Int32, valid, thread: Int32):
        """Wait for a stage and decode it, rows of values from `valid` on, if given, as zeros."""
        cute.arch.mbarrier_wait(held.full + stage, phase)
        lane = cute.arch.lane_idx()
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw = held.raw[stage, None, None].iterator
        scales = self.scales_at(held, stage)
        registers = cute.recast_tensor(operand, Int32)
        self.decode_stage(registers, raw, scales, valid, member, lane, thread)
        return operand

    @cute.jit
    def matrices(self, raw: cute.Pointer, row: Int32, chunk: Int32):
        """Four matrices of 8 rows of 16 bytes: a lane says where a row of one of them begins."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(self.transposed, 4), cutlass.BFloat16)
        four = cute.make_rmem_tensor(4, Int32)
        source = aligned(raw + byte_of(row, chunk, self.row_bytes), cutlass.BFloat16, 8)
        cute.copy(atom, source, cute.recast_tensor(four, cutlass.BFloat16))
        return [four[i] for i in range(4)]

    def multiply(self, product, into, tile, right):
        """Start into = tile x right and close the group."""
        wgmma.multiply(product, into, tile, right)

    @cute.jit
    def release(self, held: Held, stage: Int32):
        """Hand a stage back, once its product is there.

        Not when it has been read: loads of shared memory that are issued may still be on their way behind an arrival,
        and copies of scales that hit L1 overtook them.
        """
        arrive(held.free + stage)
