"""Keys or values of 4 bits with a scale for a group of values along D, as the left side of products.

Blocks lie in shared memory as they are stored: rows of head_dim / 2 bytes, swizzled, and beside them the bytes of their
scales, of four tokens after those of other four, in the order that global memory has: "linear", the groups of a token
beside each other, or "interleaved", the same group of four tokens. Strides tell which one it is, and who loads tells
those who read. Scales of keys are linear.

`ldmatrix` hands out words of eight codes, which is not the order in which wgmma takes its left side from registers:
- Of 32 columns of keys a lane gets eight beside each other, whose codes i and i + 4 become a word: `prepare` moves
  the columns of the queries likewise.
- Of 32 columns of values a lane gets four beside each other of two tokens, and uses two of these: `row_of` says so.
A hidden value is made 0 by its scale: no code is infinite or NaN.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor

from msa_tiles.dsl.cutedsl import swap_ab, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.operands.e4m3 import aligned, column_of, words_at
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.row_scales import page_of
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Parts, Pipeline, buffer, declares, lane, threads, warps

CHUNK = 16  # bytes of a row of ldmatrix
CODES = 2  # in a byte
COLUMNS = CHUNK * CODES
TOKENS = 4  # whose scales lie together
SWIZZLES = {64: (2, 4, 3), 32: (1, 4, 3)}  # of rows of so many bytes
LEAST_COPY = 4  # bytes that may be copied past registers


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, group):
    """One pipeline, which TMA fills; scales of groups come with copies of all lanes of the producer."""
    raw, scales = f"{name}_raw", f"{name}_scales"
    order = (buffer(f"{name}_order", "int32", numbers=1, note="bytes from a token's scale to the next one's"),)
    return Parts(
        (Pipeline(name, stages, (lane(producer), threads(producer)), (warps(readers),), (raw,)),),
        (
            buffer(
                raw, "uint8", align=1024, note="two codes a byte, swizzled by 64 bytes, or 32 where a row is no longer",
                stages=stages, block_size=block_size, row_bytes=head_dim // 2,
            ),
            buffer(
                scales, "uint8", align=128, note="in the order of global memory",
                groups=head_dim // group, block_size=block_size, stages=stages,
            ),
            *(order if name == "v" else ()),
        ),
    )  # fmt: skip


class Stored(NamedTuple):
    """A tensor in global memory, as TMA sees it, the scales of its groups, and those of heads."""

    atom: Any
    rows: Any
    scales: Any
    of_heads: Any  # None where the format has none


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to those of the first stage."""

    raw: Any
    scales: Any
    order: Any  # of values: how far apart the scales of two tokens are, 1 where they are interleaved
    full: Any
    free: Any


class Rows(Blocks):
    """Blocks of rows of head_dim / 2 bytes, of which a box holds whole ones."""

    def __init__(self, head_dim, block_size, pages_per_block):
        super().__init__(cutlass.Uint8, head_dim // CODES, block_size, pages_per_block)

    def described(self, keys):
        modes = (2, 3, 1, 0) if self.pages_per_block else (0, 2, 1)
        swizzle = cute.make_swizzle(*SWIZZLES[self.head_dim])
        plain = cute.make_ordered_layout((self.box_rows, self.head_dim), order=(1, 0))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tma.described(keys, modes),
            cute.make_composed_layout(swizzle, 0, plain), (self.box_rows, self.head_dim),
        )  # fmt: skip


class Left:
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands.

    A format says of how many values a `group` is, its `scale_element`, whether heads have a scale besides, and decodes.
    """

    ahead = True
    group = None
    scale_element = None
    has_global = False

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed):
        self.name = name
        self.table = table
        self.block_size = block_size
        self.head_dim = head_dim
        self.groups = head_dim // self.group
        self.blocks = Rows(head_dim, block_size, pages_per_block)
        self.element = ELEMENTS[self.multiplied(name)]
        self.stages = table.depth(name)
        self.threads = table.threads_of(readers)
        self.transposed = transposed
        # Of the product: rows and what they are multiplied along.
        self.rows, self.depth = (head_dim, block_size) if transposed else (block_size, head_dim)

    def arguments(self, kv_heads):
        """Bytes [total_k, kv_heads, head_dim / 2], or [pages, kv_heads, page, head_dim / 2]; scales [total_k, kv_heads,
        groups], or [pages, kv_heads, page / 4, 4, groups]; those of heads [kv_heads], if there are any.
        """
        page, quads = (), ()
        if self.blocks.pages_per_block:
            page, quads = (self.blocks.box_rows,), (self.blocks.box_rows // TOKENS, TOKENS)
        of_groups = (cute.sym_int(), kv_heads, *quads, self.groups)
        strides = tuple(cute.sym_int64() for _ in of_groups)
        of_heads = (make_fake_tensor(cutlass.Float32, (kv_heads,), (cute.sym_int64(),)),) if self.has_global else ()
        return (
            stand_in(cutlass.Uint8, cute.sym_int(), kv_heads, *page, self.head_dim // CODES, align=tma.BYTES),
            make_fake_tensor(self.scale_element, of_groups, strides),
            *of_heads,
        )

    def stored(self, rows, scales, of_heads=None):
        return Stored(*self.blocks.described(rows), scales, of_heads)

    def atoms(self, stored):
        return (stored.atom,)

    def layouts(self):
        shape = (self.stages, self.block_size, self.head_dim // CODES)
        return {f"{self.name}_raw": cute.make_ordered_layout(shape, order=(2, 1, 0))}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        raw, scales = (buffers[f"{self.name}_{kind}"] for kind in ("raw", "scales"))
        return Held(raw, scales, buffers.get(f"{self.name}_order"), full, free)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: Held, stage: Int32, phase: Int32):
        """The block of one head that begins at a row of flat keys, or that has these pages. A whole warp calls it."""
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            if cutlass.const_expr(self.transposed):
                # The same for every block; the arrival makes it known.
                held.order[0] = self.order(stored)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)[None, None, None, None, stage]
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, boxes, full)
        self.load_scales(stored, row, pages, head, held.scales[None, None, stage].iterator)
        if cutlass.const_expr(self.groups < LEAST_COPY):
            cute.arch.mbarrier_arrive(full)
        else:
            cute.arch.cp_async_mbarrier_arrive_noinc(full)

    @cute.jit
    def order(self, stored: Stored):
        """How many bytes further on the scale of a group of the next token is, among four of them."""
        found = Int32(self.groups)
        if cutlass.const_expr(self.blocks.pages_per_block > 0):
            if stored.scales.stride[4] != 1:
                found = Int32(1)
        return found

    @cute.jit
    def load_scales(self, stored: Stored, row: Int32, pages, head: Int32, target: cute.Pointer):
        """Scales of as many bytes as a token has, of which every lane takes some; of rows that nobody sees, any."""
        lane = cute.arch.lane_idx()
        last = Int32(stored.scales.shape[0]) - 1
        for i in cutlass.range_constexpr(self.block_size // WARP):
            token = WARP * i + lane
            if cutlass.const_expr(self.blocks.pages_per_block > 0):
                # An entry past the request's keys may name any page.
                page = cutlass.min(cutlass.max(page_of(pages, WARP * i, lane, self.blocks.box_rows), 0), last)
                quad, within = token % self.blocks.box_rows // TOKENS, token % TOKENS
                step = Int64(stored.scales.stride[3])
                if stored.scales.stride[4] != 1:
                    step = Int64(self.groups)
                source = stored.scales[page, head, quad, 0, None].iterator + within * step
            else:
                source = stored.scales[cutlass.min(row + token, last), head, None].iterator
            self.copy(source, target + self.groups * token)

    @cute.jit
    def copy(self, source: cute.Pointer, target: cute.Pointer):
        """The bytes of a token: past registers where such a copy is as small, else through them."""
        unit = {8: Int64, 4: Int32, 2: cutlass.Int16}[self.groups]
        come_from, to = (
            cute.make_tensor(
                cute.make_ptr(unit, place.toint(), place.memspace, assumed_align=self.groups), cute.make_layout(1)
            )
            for place in (source, target)
        )
        if cutlass.const_expr(self.groups < LEAST_COPY):
            to[0] = come_from[0]
        else:
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), unit, num_bits_per_copy=8 * self.groups)
            cute.copy(atom, come_from, to)

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
            order = held.order[0]
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

    def scale_of(self, token, group, order):
        """Where the scale of a token's group stands among those of a block."""
        quad = token // TOKENS * (TOKENS * self.groups)
        return quad + token % TOKENS * order + group * pick(order == 1, Int32(TOKENS), Int32(1))

    @cute.jit
    def clear(self, scales: cute.Pointer, order: Int32, valid: Int32, thread: Int32):
        """Zero the scales of tokens from `valid` on; the readers meet."""
        for number in cutlass.range(
            valid * self.groups + thread, self.block_size * self.groups, self.threads, unroll=1
        ):
            place = scales + self.scale_of(number // self.groups, number % self.groups, order)
            cute.make_tensor(place, cute.make_layout(1))[0] = cutlass.Uint8(0)
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def row_of_scales(self, scales, token):
        """The scales of a token's groups, in words."""
        place = scales + self.groups * token
        if self.groups < LEAST_COPY:
            start = cute.make_ptr(cutlass.Uint16, place.toint(), place.memspace, assumed_align=self.groups)
            return [Int32(cute.make_tensor(start, cute.make_layout(1))[0])]
        return words_at(place, self.groups // 4)

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


def byte_at(place):
    return Int32(cute.make_tensor(place, cute.make_layout(1))[0])


def byte_of(row, chunk, row_bytes):
    """Where 16 bytes of a row begin in a block of rows of 64 bytes, swizzled by as many, or of 32 bytes likewise."""
    return row * row_bytes + (chunk ^ row * row_bytes // 128 % (row_bytes // CHUNK)) * CHUNK
