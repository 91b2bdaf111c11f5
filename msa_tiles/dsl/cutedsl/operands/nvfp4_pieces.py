"""Keys and values of NVFP4 for kernels in which every consumer warpgroup takes 64 tokens of a block: see nvfp4."""

from msa_tiles.dsl.cutedsl import packed_pieces
from msa_tiles.dsl.cutedsl.decoded_left import Held
from msa_tiles.dsl.cutedsl.operands import nvfp4
from msa_tiles.dsl.cutedsl.operands.nvfp4 import TENSORS, Stored, multiplied, parts

PIECES = True

__all__ = ["PIECES", "TENSORS", "Held", "Left", "Stored", "multiplied", "parts"]


class Left(nvfp4.Format, packed_pieces.Left):
    """Pieces of blocks as the left side of products."""
