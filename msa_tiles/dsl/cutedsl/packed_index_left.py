"""Index keys of 4 bits as the left side of products of few columns, decoded in registers (packed_left).

In global memory they are what packed_index has; rows of bytes and their scales come to one ring.

A block is multiplied by units of ROWS keys, and a unit is decoded by pieces, of 64 columns where a block has two of
them. Registers hold two pieces: one is decoded while the other is multiplied.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl import packed_index, packed_left, swap_ab, tma
from msa_tiles.dsl.cutedsl.decoding import CHUNK, byte_of
from msa_tiles.dsl.cutedsl.packed import Stored
from msa_tiles.dsl.cutedsl.packed_left import COLUMNS
from msa_tiles.dsl.cutedsl.wgmma import ROWS

HELD = 2  # pieces
CHUNKS = 2  # that four matrices of ldmatrix have
STEPS = 2  # of a product, for the columns of a chunk


class IndexKeys(packed_left.Left):
    """Blocks of keys [total_k, head_dim / 2], or [pages, page, head_dim / 2] with pages_per_block > 0."""

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers):
        super().__init__(name, table, head_dim, block_size, pages_per_block, readers=readers, transposed=False)
        self.pages_per_block = pages_per_block
        self.divide()

    def divide(self):
        """Units of a block, pieces of a unit, and chunks of COLUMNS of a piece."""
        chunks = self.head_dim // COLUMNS
        self.units = self.block_size // ROWS
        self.chunks = min(CHUNKS, self.units * chunks // HELD)
        self.pieces = chunks // self.chunks

    arguments = packed_index.IndexKeys.arguments
    stored = packed_index.IndexKeys.stored
    pages = packed_index.IndexKeys.pages
    load_rows = packed_index.IndexKeys.load_rows
    row_factor = packed_index.IndexKeys.row_factor

    @cute.jit
    def load(self, stored: Stored, held: tuple, stage: Int32, phase: Int32, row: Int32, pages):
        """The block that begins at a row of flat keys, or that has these pages -> a stage, once it is free.

        A whole warp calls it.
        """
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)
        for p in cutlass.range_constexpr(max(self.pages_per_block, 1)):
            source, first = stored.rows, row
            if cutlass.const_expr(self.pages_per_block > 0):
                source, first = stored.rows[None, None, pages[p]], Int32(0)
            tma.load_box(stored.atom, source, first, 0, boxes[None, None, p, 0, stage], full)
        self.load_rows(stored, row, pages, self.scales_at(held, stage))
        self.arrive_with_scales(full)

    def operand(self, product, held):
        """Registers for the pieces that are held."""
        shape = product[0].partition_shape_A((ROWS, COLUMNS * self.chunks))
        return [product[0].make_fragment_A(shape) for _ in range(HELD)]

    def accumulator(self, product, columns):
        """Registers of the product of a unit."""
        return swap_ab.accumulator(product, ROWS, columns)

    def wait(self, held, stage: Int32, phase: Int32):
        """Until a stage is full."""
        cute.arch.mbarrier_wait(held.full + stage, phase)

    def unit_factors(self, held, stage, unit, member, lane):
        """What a lane's two rows of a unit are multiplied with."""
        scales, first = self.scales_at(held, stage), ROWS * unit + 16 * member + lane // 4
        return [self.key_factors(scales, first + 8 * i, lane) for i in range(2)]

    def offset_of(self, stage, member, lane):
        """Where a lane's row of the first four matrices of a stage begins."""
        return stage * (self.block_size * self.row_bytes) + byte_of(16 * member + lane % 16, lane // 16, self.row_bytes)

    def decode(self, operand, held, offset, unit, piece, factors):
        """A lane's part of a piece: eight columns of two rows, of every chunk.

        Products of the piece that was decoded before the last one must be there.
        """
        registers = cute.recast_tensor(self.place_of(operand, unit, piece), Int32)
        first = self.chunks * piece
        pair = first // CHUNKS * CHUNKS
        # Units begin where a swizzle does. Chunks change places within a row; worked out anew, an offset takes no
        # register from one unit to the next.
        start = held.raw.iterator + ((offset ^ pair * CHUNK) + ROWS * unit * self.row_bytes)
        four = self.matrices(start, Int32(0), Int32(0))
        for number in range(4):
            i, chunk = number % 2, pair + number // 2
            if 0 <= chunk - first < self.chunks:
                for code in range(4):
                    target = registers[None, 0, STEPS * (chunk - first) + code // 2]
                    target[i + 2 * (code % 2)] = self.key(four[number], code, factors[i][chunk])

    def place_of(self, operand, unit, piece):
        """The registers of a piece: neighbours have different ones."""
        return operand[(self.pieces * unit + piece) % HELD]

    def multiply(self, product, into, operand, unit, piece, right):
        """Start into (+)= piece x right, of which all columns are given, and close the group."""
        left = self.place_of(operand, unit, piece)
        warpgroup.fence()
        for step in range(STEPS * self.chunks):
            along = STEPS * self.chunks * piece + step
            mma = product[0] if along == 0 else product[1]
            cute.gemm(mma, into, left[None, None, step], right[None, None, along], into)
        warpgroup.commit_group()
