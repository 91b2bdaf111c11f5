"""Index keys of MXFP4 as the left side of products, decoded to bfloat16."""

import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import packed_index_left
from msa_tiles.dsl.cutedsl.operands import mxfp4
from msa_tiles.dsl.cutedsl.operands.mxfp4 import parts
from msa_tiles.dsl.cutedsl.packed_index import Scales
from msa_tiles.dsl.cutedsl.registers import lane_anew
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale")
SEVEN = 0x7F7F7F7F  # bits of four bytes

__all__ = ["TENSORS", "IndexKeys", "Scales", "multiplied", "parts"]


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return mxfp4.multiplied("k")


class IndexKeys(mxfp4.Format, packed_index_left.IndexKeys):
    """Blocks of keys: see msa_tiles.dsl.cutedsl.operands."""

    def offset_of(self, stage, member, lane):
        # Worked out for each block: powers of two of two rows leave no register for it.
        return super().offset_of(stage, member, lane_anew(lane))

    def key_factors(self, scales, token, lane):
        """What codes are multiplied with, of a token's chunks of 32, each made where it is first used."""
        [word] = self.row_of_scales(scales, token)
        ends = alike(word)
        return [(word, ends, chunk) for chunk in range(self.groups)]

    def key(self, word, code, factor):
        """Codes `code` and `code` + 4 of a word."""
        return mxfp4.number(word, code, power(*factor))


def alike(word):
    """The highest bit of each byte of a word whose bits are alike: 0 and 255."""
    return ~(((word >> 1 ^ word) & SEVEN) + SEVEN) & ~SEVEN


def power(word, ends, byte):
    """The e8m0 in a byte of a word as two bfloat16: e2m1.e8m0_bits, which has one more bit for 0 and 255."""
    return Int32(cute.arch.prmt(word, ends, Int32(0x0404 + 0x1111 * byte))) >> 1 & 0x7FFFFFFF
