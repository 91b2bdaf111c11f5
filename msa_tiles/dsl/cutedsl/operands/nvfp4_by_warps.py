"""Keys and values of NVFP4 for kernels in which several warps decode a block: see nvfp4."""

from msa_tiles.dsl.cutedsl.by_warps import KEEPERS, ByWarps, by_warps
from msa_tiles.dsl.cutedsl.decoded_right import HeldRight
from msa_tiles.dsl.cutedsl.operands import nvfp4
from msa_tiles.dsl.cutedsl.operands.nvfp4 import TENSORS, Stored, multiplied
from msa_tiles.dsl.table import declares

__all__ = ["KEEPERS", "TENSORS", "HeldRight", "Right", "Stored", "multiplied", "right_parts"]


@declares
def right_parts(name, head_dim, block_size, *, producer, keeper, readers, inspected):
    """What TMA brings, and what the warps of the keeper make of it for the readers."""
    found = nvfp4.right_parts(
        name, head_dim, block_size, producer=producer, keeper=keeper, readers=readers, inspected=inspected
    )
    return by_warps(found, keeper)


class Right(ByWarps, nvfp4.Right):
    """Blocks as the right side of products of 64-row tiles, decoded by several warps."""
