"""Queries of the indexer as columns of products: rows of 16 bits in shared memory, eight of them a product.

Rows that become float16 are multiplied by a power of two first, which moves their largest number below 2**15: float16
has all bits of a bfloat16, but not its range.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl.decoding import aligned, column_of, decode_bf16, decode_f16
from msa_tiles.dsl.cutedsl.vector import BYTES, copy_wide, vector_of, wide
from msa_tiles.dsl.table import buffer, declares

COLUMNS = 8  # of a product
WORDS = BYTES // 4
FRACTION = 7  # bits of a bfloat16
# Biased exponents: of float32 numbers from 1 on, and of the lowest one that powers are made of.
ONE, LOWEST = 127, 15
TOP = 14  # exponent of the largest number of a row


@declares
def buffers(rows, head_dim, element):
    """Queries, and the power of two that makes up for what a row was multiplied with."""
    return (
        buffer(
            "queries", element, align=1024, note="eight rows after the other, as msa_tiles.dsl.cutedsl.gather says",
            rows=rows, head_dim=head_dim,
        ),
        buffer("powers", "float32", rows=rows, note="of two, by which a row is too small"),
    )  # fmt: skip


class Columns:
    """`rows` queries of head_dim numbers of `stored`, multiplied as `element`; `threads` threads bring them."""

    def __init__(self, rows, head_dim, stored, element, threads):
        self.rows, self.head_dim, self.threads = rows, head_dim, threads
        self.stored, self.element = stored, element
        self.chunks = head_dim // vector_of(stored)  # 16 bytes of a row

    def layout(self):
        """[COLUMNS, head_dim, products]."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        return cute.tile_to_shape(atom, (COLUMNS, self.head_dim, self.rows // COLUMNS), order=(1, 0, 2))

    def by_rows(self, queries):
        """The same memory, a row after the other: for places that msa_tiles.dsl.cutedsl.decoding knows."""
        return cute.make_tensor(queries.iterator, cute.make_layout((self.rows, self.head_dim)))

    @cute.jit
    def clear(self, queries: cute.Tensor, thread: Int32):
        """Zeros for rows that never hold a query: products with them cost the least power."""
        for number in cutlass.range(thread, self.rows * self.head_dim * 2 // BYTES, self.threads, unroll=1):
            aligned(queries.iterator + BYTES // 2 * number, Int32, WORDS).fill(0)

    @cute.jit
    def bring(self, idx_q: cute.Tensor, queries: cute.Tensor, powers: cute.Tensor, first_token: Int32, rows: Int32,
              thread: Int32):  # fmt: skip
        """The first rows of a tile; the others keep what they hold. All threads call it, between two barriers."""
        heads = Int32(idx_q.shape[1])
        for first in cutlass.range(0, rows * self.chunks, self.threads, unroll=1):
            row, chunk = (first + thread) // self.chunks, (first + thread) % self.chunks
            got = cute.make_rmem_tensor(vector_of(self.stored), self.stored)
            words = cute.recast_tensor(got, Int32)
            words.fill(0)
            if row < rows:
                copy_wide(wide(idx_q[first_token + row // heads, row % heads, None], chunk), got)
            found = self.rounded([words[i] for i in range(WORDS)], powers, row, rows, chunk)
            if row < rows:
                units = len(found) // WORDS
                for unit in cutlass.range_constexpr(units):
                    target = queries.iterator + column_of(row, units * chunk + unit, self.head_dim)
                    place = aligned(target, Int32, WORDS)
                    for i in cutlass.range_constexpr(WORDS):
                        place[i] = found[WORDS * unit + i]

    def rounded(self, words, powers, row, rows, chunk):
        """16 stored bytes as words of two numbers of `element`; notes the row's power of two."""
        inverse = Float32(1.0)
        if self.stored is Float8E4M3FN:
            decode = decode_f16 if self.element is Float16 else decode_bf16
            words = [pair for word in words for pair in decode(word)]
        elif self.element is Float16:
            power, inverse = self.power_of(words)
            words = [narrow(word, power) for word in words]
        note(powers, row, rows, chunk, inverse)
        return words

    def power_of(self, words):
        """What a row of bfloat16, which the lanes of its chunks hold, is multiplied with, and its inverse."""
        exponent = Int32(LOWEST)
        for word in words:
            for bits in (word >> 16 + FRACTION, word >> FRACTION):
                exponent = cutlass.max(exponent, bits & 255)
        distance = 1
        while distance < self.chunks:
            exponent = cutlass.max(exponent, Int32(cute.arch.shuffle_sync_bfly(exponent, distance)))
            distance *= 2
        biased = ((2 * ONE + TOP - exponent), exponent - TOP)
        return [Int32(bits << 23).bitcast(Float32) for bits in biased]


@cute.jit
def note(powers: cute.Tensor, row: Int32, rows: Int32, chunk: Int32, inverse: Float32):
    if (chunk == 0) & (row < rows):
        powers[row] = inverse


def narrow(pair, power):
    """Two bfloat16 times a power of two -> two float16."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 first, second; .reg .b32 low; shl.b32 low, {$r0}, 16; mov.b32 first, low; "
        "and.b32 low, {$r0}, 0xFFFF0000; mov.b32 second, low; mul.f32 first, first, {$r1}; "
        "mul.f32 second, second, {$r1}; cvt.rn.f16x2.f32 {$w0}, second, first; }",
        write_only_types=[Int32],
        read_only_args=[pair, power],
    )
