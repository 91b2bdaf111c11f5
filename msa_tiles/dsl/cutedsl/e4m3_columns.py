"""Queries of the indexer as columns of products of e4m3 with 4-bit keys whose groups are scaled behind the product.

Of a chunk of 32 numbers of a key `ldmatrix` gives a lane eight, those of a word, and the e4m3 of their even codes and
of their odd ones stand 16 apart in wgmma's left side. So lanes 0 and 1 of four have the first group of a chunk, 2 and 3
the second. Column i of a product, of COLUMNS, has query i where the first group is, and zeros elsewhere; column
i + COLUMNS has it where the second one is: what a column adds up to belongs to one scale of a key.

A row of bfloat16, times a power of two that moves its largest number below 2**8, becomes the sum of two rows of e4m3:
exact down to 2**-9. The tensor cores add products with 13 bits below the largest one and what has been added so far, so
the row of what the nearest e4m3 leave is multiplied first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl.decoding import aligned
from msa_tiles.dsl.cutedsl.operands.e4m3_pairs import split
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.vector import BYTES, copy_wide, vector_of, wide
from msa_tiles.dsl.table import buffer, declares

COLUMNS = 4  # queries of a product, which has a column for either group of a chunk
GROUPS = 2  # of 16 numbers, of a chunk
WIDTH = GROUPS * COLUMNS
PARTS = 2  # rows of e4m3 that add up to a row
DEPTH = 32  # of a product: a chunk
UNIT = 8  # codes of a word
TILE = WIDTH * DEPTH  # bytes of a chunk of a product
WORDS = BYTES // 4
FRACTION = 7  # bits of a bfloat16
# Biased exponents: of float32 numbers from 1 on, of what is no number, and of the lowest one that powers are made of.
ONE, NONE, LOWEST = 127, 255, 8
TOP = 7  # exponent of the largest number of a row
EVEN, ODD = 0x5410, 0x7632  # of two words the lower and the upper halves


@declares
def buffers(rows, head_dim):
    """Queries, and the power of two that makes up for what a row was multiplied with."""
    return (
        buffer(
            "queries", "float8_e4m3fn", align=1024,
            note="32 columns of four rows after the other, as msa_tiles.dsl.cutedsl.e4m3_columns says",
            rows=rows, groups=GROUPS, parts=PARTS, head_dim=head_dim,
        ),
        buffer("powers", "float32", rows=rows, note="of two, by which a row is too small"),
    )  # fmt: skip


class Columns:
    """`rows` queries of head_dim numbers of `stored`, bfloat16, multiplied as `element`, e4m3; `threads` bring them."""

    def __init__(self, rows, head_dim, stored, element, threads):
        self.rows, self.head_dim, self.threads = rows, head_dim, threads
        self.stored, self.element = stored, element
        self.pieces = head_dim // vector_of(stored)  # 16 bytes of a row

    def layout(self):
        """[WIDTH, parts x head_dim, products]."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, self.element)
        return cute.tile_to_shape(atom, (WIDTH, PARTS * self.head_dim, self.rows // COLUMNS), order=(0, 1, 2))

    def by_rows(self, queries):
        """What keys arrange, if they have to."""
        return queries

    @cute.jit
    def clear(self, queries: cute.Tensor, thread: Int32):
        """Zeros for the columns of the other group, and for rows that never hold a query."""
        size = self.rows // COLUMNS * WIDTH * PARTS * self.head_dim
        for number in cutlass.range(thread, size // BYTES, self.threads, unroll=1):
            aligned(queries.iterator + BYTES * number, Int32, WORDS).fill(0)

    @cute.jit
    def bring(self, idx_q: cute.Tensor, queries: cute.Tensor, powers: cute.Tensor, first_token: Int32, rows: Int32,
              thread: Int32):  # fmt: skip
        """The first rows of a tile; the others keep what they hold. All threads call it, between two barriers."""
        heads = Int32(idx_q.shape[1])
        for first in cutlass.range(0, rows * self.pieces, self.threads, unroll=1):
            row, piece = (first + thread) // self.pieces, (first + thread) % self.pieces
            got = cute.make_rmem_tensor(vector_of(self.stored), self.stored)
            words = cute.recast_tensor(got, Int32)
            words.fill(0)
            if row < rows:
                copy_wide(wide(idx_q[first_token + row // heads, row % heads, None], piece), got)
            power, inverse = self.power_of([words[i] for i in range(WORDS)])
            if (piece == 0) & (row < rows):
                powers[row] = inverse
            for odd in cutlass.range_constexpr(2):
                pairs = [Int32(cute.arch.prmt(words[i], words[i + 1], Int32(ODD if odd else EVEN))) for i in (0, 2)]
                nearest, rest = split(pairs, power)
                if row < rows:
                    for part, word in enumerate((rest, nearest)):
                        place = self.word_of(queries, row, piece, part, odd)
                        place[0] = word

    def power_of(self, words):
        """What a row, which the lanes of its pieces hold, is multiplied with, and its inverse.

        Of a row with infinity the inverse is infinite, too: e4m3 has none.
        """
        exponent = Int32(LOWEST)
        for word in words:
            for bits in (word >> 16 + FRACTION, word >> FRACTION):
                exponent = cutlass.max(exponent, bits & NONE)
        distance = 1
        while distance < self.pieces:
            exponent = cutlass.max(exponent, Int32(cute.arch.shuffle_sync_bfly(exponent, distance)))
            distance *= 2
        power, inverse = (Int32(bits << 23).bitcast(Float32) for bits in (2 * ONE + TOP - exponent, exponent - TOP))
        return power, pick_float(exponent == NONE, Float32.inf, inverse)

    def word_of(self, queries, row, piece, part, odd):
        """Where four numbers of a piece of a row go, the even ones or the odd ones."""
        chunk, word = piece // (DEPTH // UNIT), piece % (DEPTH // UNIT)
        group = word // 2
        tile = (row // COLUMNS * PARTS + part) * (self.head_dim // DEPTH) + chunk
        # Columns of 32 bytes, whose halves change places in the last four of eight.
        place = tile * TILE + (row % COLUMNS + group * COLUMNS) * DEPTH + (odd ^ group) * BYTES + 4 * word
        start = cute.make_ptr(Int32, (queries.iterator + place).toint(), queries.iterator.memspace, assumed_align=4)
        return cute.make_tensor(start, cute.make_layout(1))
