"""Keys or values of 4 bits as the left side of products of few columns, decoded in registers.

`ldmatrix` hands out words of eight codes, which is not the order in which wgmma takes its left side from registers:
- Of 32 columns of keys a lane gets eight beside each other, whose codes i and i + 4 become a word: `prepare` moves the
  columns of the queries likewise.
- Of 32 columns of values a lane gets four beside each other of two tokens, and uses two of these: `row_of` says so.
A hidden value is made 0 by its scale: no code is infinite or NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import decoded_left, packed
from msa_tiles.dsl.cutedsl.decoding import aligned, column_of
from msa_tiles.dsl.cutedsl.packed import Stored, byte_at
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, declares

COLUMNS = 32  # of the 16 bytes that ldmatrix takes of a row


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, group):
    """One pipeline, which TMA fills; scales of groups come with copies of all lanes of the producer."""
    stored = packed.buffers(name, head_dim, block_size, group, stages=stages)
    return decoded_left.parts(name, stages, stored, producer=producer, readers=readers, copies=True)


class Left(decoded_left.Left, packed.Storage):
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    arranged = COLUMNS

    def scales_at(self, held, stage):
        return held.scales[None, None, stage].iterator

    @cute.jit
    def note_order(self, stored: Stored, scales: cute.Pointer):
        if cutlass.const_expr(self.transposed):
            self.order_in(scales)[0] = self.order(stored)

    @cute.jit
    def arrange(self, right: cute.Tensor, row: Int32, chunk: Int32):
        """32 columns of the right side as keys bring them.

        Four lanes beside each other bring eight columns each: of these, i and i + 4 stand where the product has columns
        2 j and the next one of its i-th eight, j being the lane.
        """
        units = [aligned(right.iterator + column_of(row, 4 * chunk + i, self.head_dim), Int32, 4) for i in range(4)]
        words = cute.make_rmem_tensor((4, 4), Int32)
        for j in cutlass.range_constexpr(4):
            for i in cutlass.range_constexpr(4):
                words[i, j] = units[j][i]
        for i in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(4):
                chosen = Int32(0x7632 if i % 2 else 0x5410)
                units[i][j] = Int32(cute.arch.prmt(words[i // 2, j], words[2 + i // 2, j], chosen))

    @cute.jit
    def decode_stage(
        self, registers: cute.Tensor, raw: cute.Pointer, scales: cute.Pointer, valid, member: Int32, lane: Int32,
        thread: Int32,
    ):  # fmt: skip
        """A lane's part of a stage."""
        if cutlass.const_expr(self.transposed):
            order = self.order_in(scales)[0]
            if valid < self.block_size:
                self.clear(scales, order, valid, thread)
            self.take_values(registers, raw, scales, order, member, lane)
        else:
            self.take_keys(registers, raw, scales, member, lane)

    @cute.jit
    def take_keys(self, registers: cute.Tensor, raw: cute.Pointer, scales: cute.Pointer, member: Int32, lane: Int32):
        """Rows are tokens: a lane has eight columns of two rows, of every chunk."""
        for m in cutlass.range_constexpr(self.rows // ROWS):
            first = ROWS * m + 16 * member
            factors = [self.key_factors(scales, first + lane // 4 + 8 * i, lane) for i in range(2)]
            for step in cutlass.range_constexpr(self.depth // (2 * COLUMNS)):
                four = self.matrices(raw, first + lane % 16, 2 * step + lane // 16)
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
                four = self.matrices(raw, WARP * step + lane, chunk)
                for number in cutlass.range_constexpr(4):
                    token = of_lane + (WARP * step + 8 * number) * self.groups
                    # Bytes come with a sign, which would reach into the other factor.
                    factor = self.value_factor(byte_at(token) & 255, byte_at(token + order) & 255)
                    word = four[number] >> 8 * (member % 2)
                    target = registers[None, m, 2 * step + number // 2]
                    for half in cutlass.range_constexpr(2):
                        target[2 * (number % 2) + half] = self.value(word, half, factor)

    @cute.jit
    def clear(self, scales: cute.Pointer, order: Int32, valid: Int32, thread: Int32):
        """Zero the scales of tokens from `valid` on; the readers meet."""
        for number in cutlass.range(
            valid * self.groups + thread, self.block_size * self.groups, self.threads, unroll=1
        ):
            place = scales + self.scale_of(number // self.groups, number % self.groups, order)
            cute.make_tensor(place, cute.make_layout(1))[0] = cutlass.Uint8(0)
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def row_of(self, member, lane, half):
        """The row, of 64, whose column a lane of warp `member` has in this half of an accumulator."""
        if self.transposed:
            return COLUMNS * (member // 2) + 4 * (lane // 4) + 2 * (member % 2) + half
        return 16 * member + lane // 4 + 8 * half

    def factors(self, held, stage, phase, first_row):
        """None: scales are a part of what is decoded."""
        return None
