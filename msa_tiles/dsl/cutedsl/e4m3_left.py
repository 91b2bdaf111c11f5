"""e4m3 keys or values as the left side of products of few columns, decoded in registers.

`ldmatrix` hands blocks out in pairs of bytes, which is not quite the order in which wgmma takes its left side from
registers; what is left is turned round on the other side:
- Of 16 columns of keys a lane gets four beside each other, wgmma counts them as two and two further on: `prepare` moves
  the columns of the queries likewise.
- Of 16 columns of values a lane gets two beside each other, wgmma counts them as rows 8 apart: `row_of` says so.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import decoded_left, e4m3_storage
from msa_tiles.dsl.cutedsl.decoding import CHUNK, aligned, byte_of, column_of
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, declares


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, token_scales):
    """One pipeline, which TMA fills; scales of tokens come with copies of all lanes of the producer."""
    stored = e4m3_storage.buffers(name, head_dim, block_size, token_scales, stages=stages)
    return decoded_left.parts(name, stages, stored, producer=producer, readers=readers, copies=token_scales)


class Left(decoded_left.Left, e4m3_storage.Storage):
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands.

    K and V are decoded from bytes in registers, which are the left side of the products: K to bfloat16, V to float16,
    or to bfloat16 where tokens have scales (P likewise). Scales of tokens multiply the rows of S^T, and of P^T behind
    the sum. A scale that a head shares is folded into the softmax's (keys) and into what O is normalised by.
    """

    arranged = 16  # columns

    def scales_at(self, held, stage):
        return held.scales[None, stage] if self.token_scales else None

    @cute.jit
    def arrange(self, right: cute.Tensor, row: Int32, chunk: Int32):
        """Of 16 columns of the right side, put pairs 0, 2, 4, 6 before 1, 3, 5, 7."""
        low, high = (aligned(right.iterator + column_of(row, 2 * chunk + i, self.head_dim), Int32, 4) for i in range(2))
        pairs = cute.make_rmem_tensor(8, Int32)
        for i in cutlass.range_constexpr(4):
            pairs[i] = low[i]
            pairs[4 + i] = high[i]
        for i in cutlass.range_constexpr(4):
            low[i] = pairs[2 * i]
            high[i] = pairs[2 * i + 1]

    @cute.jit
    def decode_stage(
        self, registers: cute.Tensor, raw: cute.Pointer, scales, valid, member: Int32, lane: Int32, thread: Int32
    ):
        """A lane's part of a stage."""
        if cutlass.const_expr(valid is not None):
            if valid < self.block_size:
                self.clear(raw, valid, member, lane)
        for m in cutlass.range_constexpr(self.rows // ROWS):
            for step in cutlass.range_constexpr(self.depth // 32):
                if cutlass.const_expr(self.transposed):
                    row, chunk = 32 * step + lane, ROWS // CHUNK * m + member
                else:
                    row, chunk = ROWS * m + CHUNK * member + lane % 16, 2 * step + lane // 16
                four = self.matrices(raw, row, chunk)
                for i in cutlass.range_constexpr(4):
                    self.put(four[i], i, registers[None, m, 2 * step + i // 2])

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

    def row_of(self, member, lane, half):
        """The row, of 64, whose column a lane of warp `member` has in this half of an accumulator."""
        return 16 * member + (2 * (lane // 4) + half if self.transposed else lane // 4 + 8 * half)

    @cute.jit
    def factors(self, held: decoded_left.Held, stage: Int32, phase: Int32, first_row: Int32):
        found = None
        if cutlass.const_expr(self.token_scales):
            cute.arch.mbarrier_wait(held.full + stage, phase)
            tokens = [first_row + ROWS * m + 8 * half for m in range(self.block_size // ROWS) for half in range(2)]
            found = [held.scales[token, stage] for token in tokens]
        return found
