"""Index keys of NVFP4 as the left side of products of e4m3, whose groups are scaled behind the product.

A code becomes an e4m3 by moving its bits: half as many registers as of 16 bits, and no product with the scale. A chunk
of 32 numbers of a key has an accumulator of its own: columns 0 to 3 of it are sums of the first group, the others of
the second (e4m3_columns), and their sums, scaled, are scores. The global scale, and a power of two, multiply those.

A warp reads all units of a block, of ROWS keys each, at once: what it waits for then is there when it decodes.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl import packed_index_left, wgmma
from msa_tiles.dsl.cutedsl.decoding import decode_f16
from msa_tiles.dsl.cutedsl.e2m1 import NIBBLES
from msa_tiles.dsl.cutedsl.e4m3_columns import WIDTH
from msa_tiles.dsl.cutedsl.operands import nvfp4
from msa_tiles.dsl.cutedsl.operands.e4m3_pairs import halves
from msa_tiles.dsl.cutedsl.operands.nvfp4 import parts
from msa_tiles.dsl.cutedsl.packed_index import Scales
from msa_tiles.dsl.cutedsl.packed_index_left import CHUNK, CHUNKS, ROWS
from msa_tiles.dsl.cutedsl.packed_left import COLUMNS
from msa_tiles.dsl.cutedsl.registers import anew
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale", "_global_scale")
POWER = 6  # of two, by which a code as it stands in an e4m3 is too small
BYTES = 0x01010101
SIGN = BYTES * 0x80 - (1 << 32)  # of four bytes
NUMBER = BYTES * 0x1C  # of four bytes: where exponent and mantissa meet

__all__ = ["TENSORS", "IndexKeys", "Scales", "multiplied", "parts"]


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return "float8_e4m3fn"


class IndexKeys(nvfp4.Format, packed_index_left.IndexKeys):
    """Blocks of keys: see msa_tiles.dsl.cutedsl.operands."""

    @staticmethod
    def multiplied(_name):
        return multiplied()

    def divide(self):
        """Units of a block, and chunks of COLUMNS of a key."""
        self.units = self.block_size // ROWS
        self.chunks = self.head_dim // COLUMNS

    def product(self, _queries):
        """The multiplications of 64 keys with the columns of a product."""
        return super().product(WIDTH)

    def operand(self, product, _held):
        """Registers of each unit."""
        shape = product[0].partition_shape_A((ROWS, COLUMNS * self.chunks))
        return [product[0].make_fragment_A(shape) for _ in range(self.units)]

    def accumulators(self, product):
        """Registers of the products of each unit: [.., .., chunk]."""
        return [wgmma.accumulator(product, WIDTH * self.chunks) for _ in range(self.units)]

    @cute.jit
    def prepare(self, _right: cute.Tensor, _thread: Int32):
        """Columns come as keys want them: the readers meet."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def fetch(self, held, offset, unit):
        """What a lane has of a unit's codes: eight columns of two rows, of every chunk."""
        found = []
        for pair in range(0, self.chunks, CHUNKS):
            start = held.raw.iterator + ((offset ^ pair * CHUNK) + ROWS * unit * self.row_bytes)
            found.append(self.matrices(start, Int32(0), Int32(0)))
        return found

    def decode(self, operand, words):
        """What was fetched of a unit, even columns in one register. Products of its registers must be there."""
        registers = cute.recast_tensor(operand, Int32)
        for pair, four in enumerate(words):
            for number in range(4):
                target = registers[None, 0, CHUNKS * pair + number // 2]
                i = number % 2
                target[i], target[i + 2] = even_codes(four[number]), odd_codes(four[number])

    def multiply(self, product, into, operand, right):
        """Start into = a unit x right, of which all columns are given, and close the group."""
        warpgroup.fence()
        for chunk in range(self.chunks):
            for part in range(cute.size(right, mode=[2]) // self.chunks):
                mma = product[0] if part == 0 else product[1]
                place = cute.append_ones(into[None, None, chunk], up_to_rank=3)
                cute.gemm(mma, place, operand[None, None, chunk], right[None, None, self.chunks * part + chunk], place)
        warpgroup.commit_group()

    def group_scales(self, held, stage, unit, member, lane):
        """Of a lane's two rows of a unit the scales of the groups that its columns have, one of each chunk: words."""
        scales, first = self.scales_at(held, stage), ROWS * unit + 16 * member + lane // 4
        chosen = Int32(0x6420) + lane % 4 // 2 * 0x1111
        found = []
        for half in range(2):
            words = self.row_of_scales(scales, first + 8 * half)
            found.append(Int32(cute.arch.prmt(words[0], words[-1], chosen)))
        return found

    def scaled(self, S, factors, c, half):
        """What column 2 (lane % 4) + c of the row lane // 4 + 8 half adds up to, of the lane's groups."""
        total = None
        for chunk, factor in enumerate(factors[half]):
            found = S[c + 2 * half, 0, chunk] * factor
            total = found if total is None else total + found
        return total

    def factors_of_rows(self, scales):
        """The numbers that group_scales gave, of either row."""
        return [[factor for pair in decode_f16(word) for factor in halves(pair)][: self.chunks] for word in scales]

    def of_head(self, stored, head):
        return stored.of_heads[head] * 2.0**POWER


def even_codes(word):
    """Codes 0, 2, 4 and 6 of a word as e4m3 that are 2**POWER times too small.

    The sign, 8 of a code, is 32 of four times it: 96 more carry it to its place, and are masked where there is none.
    """
    # Of a number that the compiler does not know: else it would shift first, and take one step more.
    return (anew(word & NIBBLES) * 4 + BYTES * 96) & (SIGN | NUMBER)


def odd_codes(word):
    """Codes 1, 3, 5 and 7."""
    return word & SIGN | word >> 2 & NUMBER
