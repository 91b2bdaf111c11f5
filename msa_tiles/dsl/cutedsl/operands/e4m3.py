"""Keys or values of e4m3 with float32 scales, decoded to 16 bits in the registers of the warps that multiply them.

A scale belongs to a head (to the tensor, with a stride of 0) or, with token_scales, to each token of a head. Queries
are bfloat16, so keys become it, too; values become float16, which one instruction makes of two of them. With
token_scales values become bfloat16 as well: a weight times the scale of a token is no number for float16.

Blocks lie in shared memory as they are stored, a row of bytes for each token. `ldmatrix` hands them out in pairs of
bytes, which is not quite the order in which wgmma takes its left side from registers; what is left is turned round on
the other side:
- Of 16 columns of keys a lane gets four beside each other, wgmma counts them as two and two further on: `prepare` moves
  the columns of the queries likewise.
- Of 16 columns of values a lane gets two beside each other, wgmma counts them as rows 8 apart: `row_of` says so.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor

from msa_tiles.dsl.cutedsl import swap_ab, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.row_scales import copy_scales
from msa_tiles.dsl.cutedsl.table import WARP, Parts, Pipeline, buffer, declares, lane, threads, warps
from msa_tiles.dsl.cutedsl.wgmma import ROWS

TENSORS = ("", "_scale")
CHUNK = 16  # bytes, that is values, of a row of ldmatrix
REPEAT = 8  # rows after which a swizzle repeats
HALF_PANEL = 64  # columns of a panel of 16 bits


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, token_scales):
    """One pipeline, which TMA fills; scales of tokens come with copies of all lanes of the producer."""
    raw, scales = f"{name}_raw", f"{name}_scales"
    copies = (threads(producer),) if token_scales else ()
    of_tokens = (buffer(scales, "float32", align=128, block_size=block_size, stages=stages),) if token_scales else ()
    return Parts(
        (Pipeline(name, stages, (lane(producer), *copies), (warps(readers),), (raw,)),),
        (
            buffer(
                raw, "float8_e4m3fn", align=1024, note="swizzled by 128 bytes, or 64 where a row is no longer",
                stages=stages, block_size=block_size, head_dim=head_dim,
            ),
            *of_tokens,
        ),
    )  # fmt: skip


@declares
def multiplied(name, token_scales):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16" if name == "k" or token_scales else "float16"


class Stored(NamedTuple):
    """A tensor in global memory, as TMA sees it, and its scales."""

    atom: Any
    rows: Any
    scales: Any


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to those of the first stage."""

    raw: Any
    scales: Any  # None where a head has one
    full: Any
    free: Any


class Left:
    """Blocks of [block_size, head_dim] as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    stored_element = cutlass.Float8E4M3FN
    ahead = True

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed, token_scales):
        self.name = name
        self.table = table
        self.stages = table.depth(name)
        self.block_size = block_size
        self.head_dim = head_dim
        self.blocks = Blocks(self.stored_element, head_dim, block_size, pages_per_block)
        self.threads = table.threads_of(readers)
        self.transposed = transposed
        self.token_scales = token_scales
        self.element = ELEMENTS[multiplied(name, token_scales)]
        # Of the product: rows and what they are multiplied along.
        self.rows, self.depth = (head_dim, block_size) if transposed else (block_size, head_dim)

    def arguments(self, kv_heads):
        """Values [total_k, kv_heads, head_dim], or [pages, kv_heads, page, head_dim]; scales [kv_heads], or of the
        values' shape without head_dim.
        """
        page = (self.blocks.box_rows,) if self.blocks.pages_per_block else ()
        shape = (cute.sym_int(), kv_heads, *page, self.head_dim)
        of_scales = shape[:-1] if self.token_scales else (kv_heads,)
        return (
            stand_in(self.stored_element, *shape, align=tma.BYTES),
            make_fake_tensor(Float32, of_scales, tuple(cute.sym_int64() for _ in of_scales)),
        )

    def stored(self, rows, scales):
        return Stored(*self.blocks.described(rows), scales)

    def atoms(self, stored):
        return (stored.atom,)

    def layouts(self):
        shape = (self.stages, self.block_size, self.head_dim)
        return {f"{self.name}_raw": cute.make_ordered_layout(shape, order=(2, 1, 0))}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        return Held(buffers[f"{self.name}_raw"], buffers.get(f"{self.name}_scales"), full, free)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: Held, stage: Int32, phase: Int32):
        """The block of one head that begins at a row of flat keys, or that has these pages. A whole warp calls it."""
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)[None, None, None, None, stage]
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, boxes, full)
        if cutlass.const_expr(self.token_scales):
            of_head = stored.scales[(None, head, None) if self.blocks.pages_per_block else (None, head)]
            copy_scales(of_head, row, pages, held.scales[None, stage], self.blocks.box_rows)
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
        """Of every 16 columns of the right side, put pairs 0, 2, 4, 6 before 1, 3, 5, 7; the readers meet."""
        if cutlass.const_expr(not self.transposed):
            columns = cute.size(right, mode=[0])
            for number in cutlass.range(thread, columns * (self.head_dim // 16), self.threads, unroll=1):
                row, chunk = number % columns, number // columns
                low, high = (
                    aligned(right.iterator + column_of(row, 2 * chunk + i, self.head_dim), Int32, 4) for i in range(2)
                )
                pairs = cute.make_rmem_tensor(8, Int32)
                for i in cutlass.range_constexpr(4):
                    pairs[i] = low[i]
                    pairs[4 + i] = high[i]
                for i in cutlass.range_constexpr(4):
                    low[i] = pairs[2 * i]
                    high[i] = pairs[2 * i + 1]
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    @cute.jit
    def take(self, operand: cute.Tensor, held: Held, stage: Int32, phase: Int32, valid, thread: Int32):
        """Wait for a stage and decode it, rows from `valid` on as zeros; then hand it back."""
        cute.arch.mbarrier_wait(held.full + stage, phase)
        lane = cute.arch.lane_idx()
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw = held.raw[stage, None, None].iterator
        if cutlass.const_expr(valid is not None):
            if valid < self.block_size:
                self.clear(raw, valid, member, lane)
        registers = cute.recast_tensor(operand, Int32)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(self.transposed, 4), cutlass.BFloat16)
        for m in cutlass.range_constexpr(self.rows // ROWS):
            for step in cutlass.range_constexpr(self.depth // 32):
                if cutlass.const_expr(self.transposed):
                    row, chunk = 32 * step + lane, ROWS // CHUNK * m + member
                else:
                    row, chunk = ROWS * m + CHUNK * member + lane % 16, 2 * step + lane // 16
                four = cute.make_rmem_tensor(4, Int32)
                source = aligned(raw + byte_of(row, chunk, self.head_dim), cutlass.BFloat16, 8)
                cute.copy(atom, source, cute.recast_tensor(four, cutlass.BFloat16))
                for i in cutlass.range_constexpr(4):
                    self.put(four[i], i, registers[None, m, 2 * step + i // 2])
        arrive(held.free + stage)
        return operand

    def decode(self, word):
        """Four stored values -> two words of two of `element`."""
        return decode_f16(word) if self.element is cutlass.Float16 else decode_bf16(word)

    @cute.jit
    def put(self, word: Int32, number: cutlass.Constexpr, target: cute.Tensor):
        """The word of matrix `number` of four, decoded, to its place in the four registers of 16 columns."""
        i = number % 2
        if cutlass.const_expr(self.transposed):
            # Two columns of two tokens -> two tokens of the one, and of the other.
            target[2 * i], target[2 * i + 1] = self.decode(Int32(cute.arch.prmt(word, Int32(0), Int32(0x3120))))
        else:
            target[i], target[2 + i] = self.decode(word)

    @cute.jit
    def clear(self, raw: cute.Pointer, valid: Int32, member: Int32, lane: Int32):
        """Zero the rows from `valid` on, of the columns that a warp reads."""
        for m in cutlass.range_constexpr(self.rows // ROWS):
            for row in cutlass.range(valid + lane, self.block_size, WARP, unroll=1):
                aligned(raw + byte_of(row, ROWS // CHUNK * m + member, self.head_dim), Int32, 4).fill(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    def multiply(self, product, into, tile, right):
        """Start into = tile x right and close the group."""
        wgmma.multiply(product, into, tile, right)

    def release(self, held, stage):
        """The stage went back when it was decoded."""

    def row_of(self, member, lane, half):
        """The row, of 64, whose column a lane of warp `member` has in this half of an accumulator."""
        return 16 * member + (2 * (lane // 4) + half if self.transposed else lane // 4 + 8 * half)

    def fold(self, value, stored, head):
        return value if self.token_scales else value * stored.scales[head]

    @cute.jit
    def factors(self, held: Held, stage: Int32, phase: Int32, first_row: Int32):
        found = None
        if cutlass.const_expr(self.token_scales):
            cute.arch.mbarrier_wait(held.full + stage, phase)
            tokens = [first_row + ROWS * m + 8 * half for m in range(self.block_size // ROWS) for half in range(2)]
            found = [held.scales[token, stage] for token in tokens]
        return found


def byte_of(row, chunk, head_dim):
    """Where 16 bytes of a row begin in a block of rows of 128 bytes, swizzled by as many, or of 64 bytes likewise."""
    return row * head_dim + (chunk ^ (row * head_dim // 128) % (head_dim // CHUNK)) * CHUNK


def column_of(row, unit, head_dim):
    """Where 8 columns of a row of 16 bits begin, as msa_tiles.dsl.cutedsl.gather lays them down: in columns."""
    panel = row // REPEAT * (head_dim // HALF_PANEL) + unit // 8
    return panel * (REPEAT * HALF_PANEL) + row % REPEAT * HALF_PANEL + (unit % 8 ^ row % REPEAT) * 8


def aligned(place, element, count):
    """16 bytes from a place that is a multiple of as many."""
    start = cute.make_ptr(element, place.toint(), place.memspace, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout(count))


def decode_f16(word):
    """Four e4m3 -> two words of two float16, exact; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; "
        "cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def decode_bf16(word):
    """Four e4m3 -> two words of two bfloat16, exact, through float16 and float32; NaN stays NaN."""
    return [widen(half) for half in decode_f16(word)]


def widen(pair):
    """Two float16 -> two bfloat16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .f32 first, second; mov.b32 {low, high}, {$r0}; cvt.f32.f16 first, low; "
        "cvt.f32.f16 second, high; cvt.rn.bf16x2.f32 {$w0}, second, first; }",
        write_only_types=[Int32],
        read_only_args=[pair],
    )
