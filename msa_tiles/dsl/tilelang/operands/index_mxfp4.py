"""Index keys of MXFP4, decoded to bfloat16 by the producer."""

from msa_tiles.dsl.table import declares
from msa_tiles.dsl.tilelang import packed_index
from msa_tiles.dsl.tilelang.operands import mxfp4
from msa_tiles.dsl.tilelang.packed import Stored
from msa_tiles.dsl.tilelang.packed_index import allocate, begin, column, finish, send

TENSORS = mxfp4.TENSORS

__all__ = ["TENSORS", "IndexKeys", "Stored", "allocate", "begin", "column", "finish", "parts", "send"]


@declares
def parts(name, head_dim, block_size, stages, *, producer):
    """A ring of blocks as they are stored; the tiles and their pipeline are the kernel's."""
    return mxfp4.parts(name, head_dim, block_size, stages, producer=producer, readers=(), own=False)


class IndexKeys(mxfp4.Format, packed_index.Operand):
    """Blocks of keys: see msa_tiles.dsl.tilelang.packed_index."""
