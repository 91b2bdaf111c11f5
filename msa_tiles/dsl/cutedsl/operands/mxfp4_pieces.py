"""Keys and values of MXFP4 for kernels in which every consumer warpgroup takes 64 tokens of a block: see mxfp4."""

from msa_tiles.dsl.cutedsl import packed_pieces
from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.e2m1_words import e8m0_pair, pairs_bf16
from msa_tiles.dsl.cutedsl.operands import mxfp4
from msa_tiles.dsl.cutedsl.operands.mxfp4 import TENSORS, Stored, multiplied, parts, scaled

PIECES = True

__all__ = ["PIECES", "TENSORS", "Held", "Left", "Stored", "multiplied", "parts"]


class Left(mxfp4.Format, packed_pieces.Left):
    """Pieces of blocks as the left side of products."""

    def value_factor(self, first, second):
        """What codes of two tokens are multiplied with."""
        return e8m0_pair(first, second)

    def key_pairs(self, word, factor):
        """The codes i and i + 4 of a word, for i from 0 to 3."""
        return [scaled(pair, factor) for pair in pairs_bf16(word)]

    value_pairs = key_pairs
