"""Keys or values of 4 bits as the left side of products, decoded in registers by a warpgroup for each piece of a block.

A piece is the 64 tokens of a block that a warpgroup multiplies: rows of keys, or what values are multiplied along. With
one warpgroup for whole blocks a scheduler has one warp, and nothing to issue while that waits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import packed_left
from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.packed import byte_at
from msa_tiles.dsl.cutedsl.packed_left import COLUMNS
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP

WARPS = 4  # that read a piece


class Left(packed_left.Left):
    """Pieces as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed):
        super().__init__(name, table, head_dim, block_size, pages_per_block, readers=readers, transposed=transposed)
        self.readers = self.threads
        self.pieces = block_size // ROWS
        self.threads = self.readers // self.pieces
        self.rows, self.depth = (head_dim, ROWS) if transposed else (ROWS, head_dim)

    @cute.jit
    def prepare(self, right: cute.Tensor, thread: Int32):
        """The columns of the right side in the order that decoded keys have, by all readers, which meet."""
        columns = cute.size(right, mode=[0])
        for number in cutlass.range(thread, columns * (self.head_dim // self.arranged), self.readers, unroll=1):
            self.arrange(right, number % columns, number // columns)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + self.pieces, number_of_threads=self.readers)

    @cute.jit
    def wait(self, held: Held, stage: Int32, phase: Int32):
        """Until a stage is there."""
        cute.arch.mbarrier_wait(held.full + stage, phase)

    @cute.jit
    def take(
        self, operand: cute.Tensor, held: Held, stage: Int32, phase: Int32, valid, thread: Int32, member: Int32,
        piece: Int32,
    ):  # fmt: skip
        """Wait for a stage and decode a piece of it, values from its row `valid` on, if given, as zeros."""
        cute.arch.mbarrier_wait(held.full + stage, phase)
        lane = cute.arch.lane_idx()
        raw = held.raw[stage, None, None].iterator + piece * (ROWS * self.row_bytes)
        of_block = self.scales_at(held, stage)
        scales = of_block + piece * (ROWS * self.groups)
        registers = cute.recast_tensor(operand, Int32)
        if cutlass.const_expr(self.transposed):
            order = self.order_in(of_block)[0]
            if valid < ROWS:
                self.clear_piece(scales, order, cutlass.max(valid, 0), thread, piece)
            self.take_values(registers, raw, scales, order, member, lane)
        else:
            self.take_keys(registers, raw, scales, member, lane)
        return operand

    @cute.jit
    def clear_piece(self, scales: cute.Pointer, order: Int32, valid: Int32, thread: Int32, piece: Int32):
        """Zero the scales of a piece's tokens from `valid` on; its readers meet."""
        for number in cutlass.range(valid * self.groups + thread, ROWS * self.groups, self.threads, unroll=1):
            place = scales + self.scale_of(number // self.groups, number % self.groups, order)
            cute.make_tensor(place, cute.make_layout(1))[0] = cutlass.Uint8(0)
        cute.arch.barrier(barrier_id=1 + piece, number_of_threads=self.threads)

    @cute.jit
    def take_keys(self, registers: cute.Tensor, raw: cute.Pointer, scales: cute.Pointer, member: Int32, lane: Int32):
        """A lane has eight columns of two tokens, of every chunk."""
        first = 16 * member
        factors = [self.key_factors(scales, first + lane // 4 + 8 * i, lane) for i in range(2)]
        for step in cutlass.range_constexpr(self.depth // (2 * COLUMNS)):
            four = self.matrices(raw, first + lane % 16, 2 * step + lane // 16)
            for number in cutlass.range_constexpr(4):
                i, chunk = number % 2, 2 * step + number // 2
                for code, pair in enumerate(self.key_pairs(four[number], factors[i][chunk])):
                    registers[None, 0, 2 * chunk + code // 2][i + 2 * (code % 2)] = pair

    @cute.jit
    def take_values(
        self, registers: cute.Tensor, raw: cute.Pointer, scales: cute.Pointer, order: Int32, member: Int32, lane: Int32
    ):
        """A warp has a chunk of columns, and a lane all four codes of two tokens: see `column_of`.

        Where there are fewer chunks than warps, it has half of one, as packed_left has it.
        """
        if cutlass.const_expr(self.head_dim == WARPS * COLUMNS):
            of_group = (COLUMNS * member + 4 * (lane // 4)) // self.group
            of_lane = scales + self.scale_of(2 * (lane % 4), of_group, order)
            for step in cutlass.range_constexpr(self.depth // WARP):
                four = self.matrices(raw, WARP * step + lane, member)
                for number in cutlass.range_constexpr(4):
                    token = of_lane + (WARP * step + 8 * number) * self.groups
                    factor = self.value_factor(byte_at(token) & 255, byte_at(token + order) & 255)
                    for code, pair in enumerate(self.value_pairs(four[number], factor)):
                        target = registers[None, code // 2, 2 * step + number // 2]
                        target[2 * (number % 2) + code % 2] = pair
        else:
            packed_left.Left.take_values(self, registers, raw, scales, order, member, lane)

    def column_of(self, member, lane, half, m):
        """Which column of values a lane of warp `member` has in this half of an accumulator, of the m-th 64 rows."""
        if self.head_dim == WARPS * COLUMNS:
            return COLUMNS * member + 4 * (lane // 4) + 2 * m + half
        return ROWS * m + self.row_of(member, lane, half)
