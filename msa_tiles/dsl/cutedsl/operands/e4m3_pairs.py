"""e4m3 keys and values for the query side of attention, whose keys are multiplied as they are stored.

Queries of bfloat16 become pairs of e4m3 for it: what is nearest to a value, and the rest. Both have 4 significant bits,
bfloat16 has 8, so that nothing is lost of what is at least 2**-9 of its row's largest. S = Q K^T is the sum of two
products of 8 bits, which take as long as one of 16. Values become float16, as e4m3 has them. Where tokens have scales
this operand does not serve: they are part of a decoded key.

No shipped row names it. Tensor cores add products of e4m3 with 13 bits below the largest, so that scores of 135 come
out too small by up to 0.09. The other blocks of a query go through `sparse_attention`, whose scores are right, and the
merge then gives both parts wrong weights. `decode_score` makes pairs of its queries by `split` (e4m3_columns).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from msa_tiles.dsl.cutedsl import e4m3_ring, wgmma
from msa_tiles.dsl.cutedsl.decoding import CHUNK, REPEAT, UNIT, byte_of, column_of, decode_f16, words_at
from msa_tiles.dsl.cutedsl.e4m3_ring import BIAS, MAGNITUDE, MOST_POWER, in_ring, query_parts, ring_parts
from msa_tiles.dsl.cutedsl.gradients import HIGH
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP

TENSORS = ("", "_scale")
SCORES = True  # S = Q K^T is this operand's
PAIR = 2  # tiles of e4m3 that a tile of queries becomes
LANES = WARP // REPEAT  # of a row, where a warp has eight of them
LARGEST = 7  # the exponent of a row's largest value: 448 is the largest e4m3
UNBOUNDED = 255  # the exponent of what is infinite or NaN

__all__ = ["SCORES", "TENSORS", "InRing", "in_ring", "query_parts", "ring_parts"]


class InRing(e4m3_ring.InRing):
    """Blocks as the right side of products, in a ring of tiles of the kernel's: see msa_tiles.dsl.cutedsl.operands.

    K and V come as bytes to the second half of their stage. K is multiplied as it is: the decoders pass it on, and make
    two tiles of e4m3 of Q in place, times a power of two for each row, whose products with K add up to S; the softmax
    undoes those powers. Of V the decoders make float16 in place. The scale of a head is folded into the softmax's
    (keys) and multiplies O behind the last shared block (values).
    """

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, token_scales):
        if token_scales:
            raise ValueError(
                "token_scales is 1, and keys with a scale each are decoded; wanted a row of token_scales 0 only"
            )
        super().__init__(name, table, head_dim, block_size, pages_per_block, token_scales=token_scales)

    @cute.jit
    def decode_tile(self, tile: cute.Pointer, lane: Int32, member: Int32, members: cutlass.Constexpr, meeting: Int32):
        """Values become float16; keys need nothing."""
        if cutlass.const_expr(self.name == "v"):
            e4m3_ring.InRing.decode_tile(self, tile, lane, member, members, meeting)

    def product(self, columns):
        """The multiplications of S = Q K^T (wgmma.product)."""
        return wgmma.product(self.stored_element, columns, OperandMajorMode.K, warpgroup.OperandSource.SMEM)

    def bytes_layout(self, rows):
        """Rows of bytes in shared memory as wgmma takes them: [rows, head_dim]."""
        kind = "K_SW128" if self.head_dim == 128 else "K_SW64"
        atom = warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, kind), self.stored_element)
        return cute.tile_to_shape(atom, (rows, self.head_dim), order=(0, 1))

    def stages_of(self, score, tiles, stages):
        """The keys of a ring of tiles as right sides of S: [mma, n, k, stage]."""
        of_block = self.bytes_layout(self.block_size)
        apart = cute.make_layout(stages, stride=2 * self.block_size * self.head_dim)
        start = cute.recast_ptr(self.raw_of(tiles.iterator), of_block.inner, dtype=self.stored_element)
        return wgmma.operand_b(score, cute.make_tensor(start, cute.append(of_block.outer, apart)))

    def left_sides(self, score, queries):
        """A tile of queries as the left sides whose products make up S."""
        of_pair = self.pairs_layout()
        start = cute.recast_ptr(queries, of_pair.inner, dtype=self.stored_element)
        both = wgmma.operand_a(score, cute.make_tensor(start, of_pair.outer))
        return tuple(both[None, None, None, part] for part in range(PAIR))

    def pairs_layout(self):
        """A tile of queries as e4m3, [ROWS, head_dim, PAIR]: of eight rows the nearest values, then the rests."""
        eight = self.bytes_layout(REPEAT)
        return cute.tile_to_shape(eight, (ROWS, self.head_dim, PAIR), order=(2, 0, 1))

    @cute.jit
    def score(self, product: tuple, into: cute.Tensor, left: tuple, right: cute.Tensor):
        """Start S = the sum of the left sides x right, and close the group."""
        warpgroup.fence()
        for part in cutlass.range_constexpr(len(left)):
            for step in cutlass.range_constexpr(cute.size(right, mode=[2])):
                mma = product[0] if cutlass.const_expr(part + step == 0) else product[1]
                cute.gemm(mma, into, left[part][None, None, step], right[None, None, step], into)
        warpgroup.commit_group()

    @cute.jit
    def decode_queries(
        self, tile: cute.Pointer, powers, landed: cute.Pointer, phase: Int32, lane: Int32, member: Int32,
        members: cutlass.Constexpr,
    ):  # fmt: skip
        """One of the `members` decoding warps: rows of bfloat16 -> pairs of e4m3 in their place.

        Eight rows at a time, whose 16 bits lie beside each other and become twice eight bits there. A power of two
        brings the largest of a row to between 2**7 and 2**8, and its exponent goes to `powers`. Rows that hold
        something infinite or NaN become NaN there and 0 elsewhere.
        """
        cute.arch.mbarrier_wait(landed, phase)
        units = self.head_dim // (UNIT * LANES)  # of 8 values, of a lane
        quarter, of_eight = lane % LANES, lane // LANES
        for eight in cutlass.range(member, ROWS // REPEAT, members, unroll=1):
            row = REPEAT * eight + of_eight
            words = cute.make_rmem_tensor(units * UNIT // 2, Int32)
            largest = Int32(0)
            for unit in cutlass.range_constexpr(units):
                read = words_at(tile + column_of(row, quarter * units + unit, self.head_dim), UNIT // 2)
                for i in cutlass.range_constexpr(UNIT // 2):
                    words[unit * (UNIT // 2) + i] = read[i]
                    largest = cutlass.max(largest, read[i] & MAGNITUDE)
                    largest = cutlass.max(largest, (read[i] >> 16) & MAGNITUDE)
            for level in cutlass.range_constexpr(2):
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1 << level))
            exponent = largest >> 7
            power = Int32(cutlass.min(2 * BIAS + LARGEST - exponent, MOST_POWER))
            factor = (power << 23).bitcast(Float32)
            if exponent == UNBOUNDED:
                factor = Float32(0.0)  # infinity times it is NaN
            start = e4m3_at(tile, 2 * REPEAT * self.head_dim * eight)
            cute.arch.sync_warp()
            for chunk in cutlass.range_constexpr(units * UNIT // CHUNK):
                nearest = cute.make_rmem_tensor(CHUNK // 4, Int32)
                rest = cute.make_rmem_tensor(CHUNK // 4, Int32)
                for i in cutlass.range_constexpr(CHUNK // 4):
                    of_four = [words[chunk * (CHUNK // 2) + 2 * i + half] for half in range(2)]
                    nearest[i], rest[i] = split(of_four, factor)
                place = byte_of(of_eight, quarter * (units * UNIT // CHUNK) + chunk, self.head_dim)
                for part, held in enumerate((nearest, rest)):
                    target = e4m3_at(start, part * REPEAT * self.head_dim + place)
                    words_of = cute.make_ptr(Int32, target.toint(), target.memspace, assumed_align=CHUNK)
                    cute.autovec_copy(held, cute.make_tensor(words_of, cute.make_layout(CHUNK // 4)))
            if quarter == 0:
                powers[row] = cutlass.Uint8(power)
            cute.arch.sync_warp()
        cute.arch.fence_view_async_shared()


def e4m3_at(start, count):
    """The byte `count` behind a pointer."""
    return cute.make_ptr(cutlass.Float8E4M3FN, start.toint() + count, start.memspace, assumed_align=CHUNK)


def split(words, factor):
    """Two words of two bfloat16, times a factor -> a word of the four e4m3 that are nearest, and one of the rests'."""
    values = []
    for word in words:
        values += [(word << 16).bitcast(Float32) * factor, (word & HIGH).bitcast(Float32) * factor]
    nearest = four_e4m3(values)
    return nearest, four_e4m3([value - near for value, near in zip(values, four_f32(nearest), strict=True)])


def four_e4m3(values):
    """Four float32, below 464 -> the nearest e4m3, in a word.

    The halves of the word are joined by a sum: where `mov.b32` joins them and the low half is read besides, ptxas of
    CUDA 12 lets its readers have the register's value of the loop's turn before.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .b32 above; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; cvt.u32.u16 above, high; cvt.u32.u16 {$w0}, low; "
        "mad.lo.u32 {$w0}, above, 65536, {$w0}; }",
        write_only_types=[Int32],
        read_only_args=values,
    )


def four_f32(word):
    """Four e4m3 -> as many float32."""
    return [part for pair in decode_f16(word) for part in halves(pair)]


def halves(pair):
    """Two float16 -> two float32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )
