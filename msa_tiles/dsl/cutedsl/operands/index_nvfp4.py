"""Index keys of NVFP4, decoded to bfloat16; the global scale, and a power of two, multiply products."""

from msa_tiles.dsl.cutedsl import packed_index
from msa_tiles.dsl.cutedsl.operands import nvfp4
from msa_tiles.dsl.cutedsl.packed_index import Scales
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale", "_global_scale")

__all__ = ["TENSORS", "IndexKeys", "Scales", "multiplied", "parts"]


@declares
def multiplied():
    """The element of the product that index keys are part of."""
    return nvfp4.multiplied("k")


@declares
def parts(name, head_dim, block_size, stages, *, producer, freed, decoder="decoder"):
    """What comes, and what the decoder makes of it."""
    return packed_index.parts(
        name, head_dim, block_size, stages, multiplied(), producer=producer, decoder=decoder, freed=freed,
        group=nvfp4.GROUP,
    )  # fmt: skip


class IndexKeys(nvfp4.Format, packed_index.IndexKeys):
    """Blocks of keys: see msa_tiles.dsl.cutedsl.operands."""
