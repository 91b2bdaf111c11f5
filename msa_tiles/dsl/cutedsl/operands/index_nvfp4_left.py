"""Index keys of NVFP4 as the left side of products, decoded to float16: a code times the scale of its group is exact.

The global scale, and a power of two, multiply products.
"""

import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import packed_index_left
from msa_tiles.dsl.cutedsl.decoding import decode_f16
from msa_tiles.dsl.cutedsl.e2m1 import CODE_F16, POWER_F16, shifted
from msa_tiles.dsl.cutedsl.operands import nvfp4
from msa_tiles.dsl.cutedsl.operands.nvfp4 import parts
from msa_tiles.dsl.cutedsl.packed_index import Scales
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale", "_global_scale")

BYTES = 0x01010101
SIGNS = BYTES * 0x80 - (1 << 32)  # of four bytes

__all__ = ["TENSORS", "IndexKeys", "Scales", "multiplied", "parts"]


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return nvfp4.multiplied("v")


class IndexKeys(nvfp4.Format, packed_index_left.IndexKeys):
    """Blocks of keys: see msa_tiles.dsl.cutedsl.operands."""

    @staticmethod
    def multiplied(_name):
        return multiplied()

    def key_factors(self, scales, token, lane):
        """What the codes of a lane are multiplied with, of a token's chunks of 32: it has one of two groups in each.

        A factor is a half of two float16.
        """
        words = self.row_of_scales(scales, token)
        chosen = Int32(0x6420) + lane % 4 // 2 * 0x1111
        pairs = decode_f16(Int32(cute.arch.prmt(words[0], words[-1], chosen)))
        return [(pair, half) for pair in pairs for half in range(2)]

    def key(self, word, code, factor):
        """Codes `code` and `code` + 4 of a word."""
        return times_half(both_bytes(upper_bytes(word, code % 2), code // 2), *factor)

    def of_head(self, stored, head):
        return stored.of_heads[head] * 2.0**POWER_F16


def upper_bytes(word, odd):
    """Codes 0, 2, 4 and 6 of a word, or 1, 3, 5 and 7: each the upper byte of a float16, whose lower one is 0."""
    lowest = CODE_F16 - 8
    return shifted(word, 4 - 4 * odd) & SIGNS | shifted(word, lowest - 4 * odd) & BYTES * (7 << lowest)


def both_bytes(word, first):
    """Bytes `first` and `first` + 2 of a word as the upper ones of its halves."""
    return Int32(cute.arch.prmt(word, Int32(0), Int32(0x3414 if first else 0x2404)))


def times_half(pair, factors, half):
    """Two float16 times one of two others, which the instruction takes from its half of a register."""
    chosen = "upper, upper" if half else "lower, lower"
    return cute.arch.inline_ptx(
        "{ .reg .b16 lower, upper; .reg .b32 factor; mov.b32 {lower, upper}, {$r1}; "
        f"mov.b32 factor, {{ {chosen} }}; mul.rn.f16x2 {{$w0}}, {{$r0}}, factor; }}",
        write_only_types=[Int32],
        read_only_args=[pair, factors],
    )
