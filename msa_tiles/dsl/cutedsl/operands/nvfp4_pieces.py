"""Keys and values of NVFP4 for kernels in which every consumer warpgroup takes 64 tokens of a block: see nvfp4."""

from msa_tiles.dsl.cutedsl import packed_pieces
from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.e2m1 import times_bf16, times_f16
from msa_tiles.dsl.cutedsl.e2m1_words import pairs_bf16, pairs_f16
from msa_tiles.dsl.cutedsl.operands import nvfp4
from msa_tiles.dsl.cutedsl.operands.nvfp4 import TENSORS, Stored, multiplied, parts

PIECES = True

__all__ = ["PIECES", "TENSORS", "Held", "Left", "Stored", "multiplied", "parts"]


class Left(nvfp4.Format, packed_pieces.Left):
    """Pieces of blocks as the left side of products."""

    def key_pairs(self, word, factor):
        """The codes i and i + 4 of a word, for i from 0 to 3."""
        return [times_bf16(pair, factor) for pair in pairs_bf16(word)]

    def value_pairs(self, word, factor):
        return [times_f16(pair, factor) for pair in pairs_f16(word)]
