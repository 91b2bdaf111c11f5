"""Caches of e4m3 with float32 scales, as rows are read out of them: the element times the scale, as bfloat16.

The product of float32 is rounded once, to nearest even; NaN stays NaN.
"""

import cutlass
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.decoding import decode_bf16, words_at
from msa_tiles.dsl.cutedsl.operands import append_e4m3
from msa_tiles.dsl.cutedsl.operands.append_e4m3 import TENSORS, Stored
from msa_tiles.dsl.cutedsl.vector import VECTOR

WORDS = VECTOR // 4

__all__ = ["TENSORS", "Cache", "Stored"]


class Cache(append_e4m3.Cache):
    """See msa_tiles.dsl.cutedsl.operands."""

    def read(self, stored, page, head, place, lane):
        """The words of a lane's VECTOR columns, and their scale."""
        start = stored.values[page, head, place, None].iterator + lane * VECTOR
        scale = stored.scales[page, head, place] if cutlass.const_expr(self.token_scales) else Float32(0.0)
        return words_at(start, WORDS), scale

    def outer_of(self, stored, head):
        """What all rows of a head are multiplied with."""
        return Float32(0.0) if cutlass.const_expr(self.token_scales) else stored.scales[head]

    def decode(self, words, scale, outer):
        """Four words of two bfloat16, in the order of columns."""
        factor = scale if cutlass.const_expr(self.token_scales) else outer
        return [Int32(pair) for word in words for pair in decode_bf16(word, factor)]
