"""Keys or values of 4 bits as the left side of products of few columns, decoded in registers.

`ldmatrix` hands out words of eight codes, which is not the order in which wgmma takes its left side from registers:
- Of 32 columns of keys a lane gets eight beside each other, whose codes i and i + 4 become a word: `prepare` moves the
  columns of the queries likewise.
- Of 32 columns of values a lane gets four beside each other of two tokens, and uses two of these: `row_of` says so.
A hidden value is made 0 by its scale: no code is infinite or NaN.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from msa_tiles.dsl.cutedsl import packed, swap_ab, wgmma
from msa_tiles.dsl.cutedsl.operands.e4m3 import aligned, column_of
from msa_tiles.dsl.cutedsl.packed import CODES, LEAST_COPY, Stored, byte_at, byte_of
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Parts, Pipeline, declares, lane, threads, warps

COLUMNS = 32  # of the 16 bytes that ldmatrix takes of a row


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, group):
    """One pipeline, which TMA fills; scales of groups come with copies of all lanes of the producer."""
    return Parts(
        (Pipeline(name, stages, (lane(producer), threads(producer)), (warps(readers),), (f"{name}_raw",)),),
        packed.buffers(name, head_dim, block_size, group, stages=stages),
    )


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to those of the first stage."""

    raw: Any
    scales: Any
    full: Any
    free: Any


class Left(packed.Storage):
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    ahead = True

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed):
        super().__init__(name, table, head_dim, block_size, pages_per_block)
        self.stages = table.depth(name)
        self.threads = table.threads_of(readers)
        self.transposed = transposed
        # Of the product: rows and what they are multiplied along.
        self.rows, self.depth = (head_dim, block_size) if transposed else (block_size, head_dim)

    def layouts(self):
        shape = (self.stages, self.block_size, self.head_dim // CODES)
        return {f"{self.name}_raw": cute.make_ordered_layout(shape, order=(2, 1, 0))}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        raw, scales = (buffers[f"{self.name}_{kind}"] for kind in ("raw", "scales"))
        return Held(raw, scales, full, free)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: Held, stage: Int32, phase: Int32):
        """The block of one head that begins at a row of flat keys, or that has these pages. A whole warp calls it."""
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        scales = held.scales[None, None, stage].iterator
        with cute.arch.elect_one():
            if cutlass.const_expr(self.transposed):
                self.order_in(scales)[0] = self.order(stored)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)[None, None, None, None, stage]
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, boxes, full)
        self.load_scales(stored, row, pages, head, scales)
        if cutlass.const_expr(self.groups < LEAST_COPY):
            cute.arch.mbarrier_arrive(full)
        else:
            cute.arch.cp_async_mbarrier_arrive_noinc(full)

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
        """Of every 32 columns of the right side, those that keys bring; the readers meet.

        Four lanes beside each other bring eight columns each: of these, i and i + 4 stand where the product has columns
        2 j and the next one of its i-th eight, j being the lane.
        """
        if cutlass.const_expr(not self.transposed):
            columns = cute.size(right, mode=[0])
            for number in cutlass.range(thread, columns * (self.head_dim // COLUMNS), self.threads, unroll=1):
                row, chunk = number % columns, number // columns
                units = [
                    aligned(right.iterator + column_of(row, 4 * chunk + i, self.head_dim), Int32, 4) for i in range(4)
                ]
                words = cute.make_rmem_tensor((4, 4), Int32)
                for j in cutlass.range_constexpr(4):
                    for i in cutlass.range_constexpr(4):
                        words[i, j] = units[j][i]
                for i in cutlass.range_constexpr(4):
                    for j in cutlass.range_constexpr(4):
                        chosen = Int32(0x7632 if i % 2 else 0x5410)
                        units[i][j] = Int32(cute.arch.prmt(words[i // 2, j], words[2 + i // 2, j], chosen))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    @cute.jit
    def take(self, operand: cute.Tensor, held: Held, stage: Int32, phase: Int32, valid, thread: Int32):
        """Wait for a stage and decode it, rows from `valid` on as zeros; then hand it back."""
        cute.arch.mbarrier_wait(held.full + stage, phase)
        lane = cute.arch.lane_idx()
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw = held.raw[stage, None, None].iterator
        scales = held.scales[None, None, stage].iterator
        registers = cute.recast_tensor(operand, Int32)
        if cutlass.const_expr(self.transposed):
            order = self.order_in(scales)[0]
            if valid < self.block_size:
                self.clear(scales, order, valid, thread)
            self.take_values(registers, raw, scales, order, member, lane)
        else:
            self.take_keys(registers, raw, scales, member, lane)
        arrive(held.free + stage)
        return operand

    @cute.jit
    def take_keys(self, registers: cute.Tensor, raw: cute.Pointer, scales: cute.Pointer, member: Int32, lane: Int32):
        """Rows are tokens: a lane has eight columns of two rows, of every chunk."""
        for m in cutlass.range_constexpr(self.rows // ROWS):
            first = ROWS * m + 16 * member
            factors = [self.key_factors(scales, first + lane // 4 + 8 * i, lane) for i in range(2)]
            for step in cutlass.range_constexpr(self.depth // (2 * COLUMNS)):
                four = self.matrices(raw, first + lane % 16, 2 * step + lane // 16, False)
                for number in cutlass.range_constexpr(4):
                    i, chunk = number % 2, 2 * step + number // 2
                    for code in cutlass.range_constexpr(4):
                        target = registers[None, m, 2 * chunk + code // 2]
                        target[i + 2 * (code % 2)] = self.key(four[number], code, factors[i][chunk])

    @cute.jit
    def take_values(
        self, registers: cute.Tensor, raw: cute.Pointer, scales: cute.Pointer, order: Int32, member: Int32, lane: Int32
    ):
        """Rows are columns of values: a warp has two of every four codes of a chunk, of two tokens a lane."""
        for m in cutlass.range_constexpr(self.rows // ROWS):
            chunk = 2 * m + member // 2
            of_group = (COLUMNS * chunk + 4 * (lane // 4)) // self.group
            of_lane = scales + self.scale_of(2 * (lane % 4), of_group, order)
            cute.arch.sync_warp()  # or the scales of all rows come before the first is needed, and registers end
            for step in cutlass.range_constexpr(self.depth // WARP):
                four = self.matrices(raw, WARP * step + lane, chunk, True)
                for number in cutlass.range_constexpr(4):
                    token = of_lane + (WARP * step + 8 * number) * self.groups
                    factor = self.value_factor(byte_at(token), byte_at(token + order))
                    word = four[number] >> 8 * (member % 2)
                    target = registers[None, m, 2 * step + number // 2]
                    for half in cutlass.range_constexpr(2):
                        target[2 * (number % 2) + half] = self.value(word, half, factor)

    @cute.jit
    def matrices(self, raw: cute.Pointer, row: Int32, chunk: Int32, transposed: cutlass.Constexpr):
        """Four matrices of 8 rows of 16 bytes: a lane says where one of them begins."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), cutlass.BFloat16)
        four = cute.make_rmem_tensor(4, Int32)
        source = aligned(raw + byte_of(row, chunk, self.head_dim // CODES), cutlass.BFloat16, 8)
        cute.copy(atom, source, cute.recast_tensor(four, cutlass.BFloat16))
        return [four[i] for i in range(4)]

    @cute.jit
    def clear(self, scales: cute.Pointer, order: Int32, valid: Int32, thread: Int32):
        """Zero the scales of tokens from `valid` on; the readers meet."""
        for number in cutlass.range(
            valid * self.groups + thread, self.block_size * self.groups, self.threads, unroll=1
        ):
            place = scales + self.scale_of(number // self.groups, number % self.groups, order)
            cute.make_tensor(place, cute.make_layout(1))[0] = cutlass.Uint8(0)
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def multiply(self, product, into, tile, right):
        """Start into = tile x right and close the group."""
        wgmma.multiply(product, into, tile, right)

    def release(self, held, stage):
        """The stage went back when it was decoded."""

    def row_of(self, member, lane, half):
        """The row, of 64, whose column a lane of warp `member` has in this half of an accumulator."""
        if self.transposed:
            return COLUMNS * (member // 2) + 4 * (lane // 4) + 2 * (member % 2) + half
        return 16 * member + lane // 4 + 8 * half

    def factors(self, held, stage, phase, first_row):
        """None: scales are a part of what is decoded."""
        return None
