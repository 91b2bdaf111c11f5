"""Index keys of MXFP4 as the left side of products, decoded to bfloat16."""

from msa_tiles.dsl.cutedsl import packed_index_left
from msa_tiles.dsl.cutedsl.operands import mxfp4
from msa_tiles.dsl.cutedsl.operands.mxfp4 import parts
from msa_tiles.dsl.cutedsl.packed_index import Scales
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale")

__all__ = ["TENSORS", "IndexKeys", "Scales", "multiplied", "parts"]


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return mxfp4.multiplied("k")


class IndexKeys(mxfp4.Format, packed_index_left.IndexKeys):
    """Blocks of keys: see msa_tiles.dsl.cutedsl.operands."""
