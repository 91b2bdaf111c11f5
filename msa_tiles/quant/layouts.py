"""How the scales of groups are laid out in memory, and the ways between the layouts.

With R tokens of G groups each:
- "linear": [..., R, G], the groups of a token beside each other.
- "interleaved": [..., R / 4, G, 4], the same group of four tokens beside each other, as vLLM keeps the scales of V.
- "swizzled": [..., ceil(R / 128), ceil(G / 4), 32, 4, 4], in tiles of 128 tokens by 4 groups, as block-scaled products
  of SM100 read them: token 32 a + b of a tile, group c, stands at [b, a, c]. What fills up tiles is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("linear", "interleaved", "swizzled")
TOKENS = 4  # that interleaved scales belong to
TILE_ROWS, TILE_GROUPS, LANES = 128, 4, 32


def shape_in(layout: str, rows: int, groups: int) -> tuple[int, ...]:
    """What the last dimensions of scales of ``rows`` tokens with ``groups`` groups each are in a layout.

    Raises ValueError for an unknown layout, and for tokens that do not fill it.
    """
    if layout == "linear":
        return rows, groups
    if layout == "interleaved":
        if rows % TOKENS:
            raise ValueError(f"layout: got 'interleaved' for {rows} tokens; wanted a multiple of {TOKENS} of them")
        return rows // TOKENS, groups, TOKENS
    if layout == "swizzled":
        return -(-rows // TILE_ROWS), -(-groups // TILE_GROUPS), LANES, TILE_ROWS // LANES, TILE_GROUPS
    raise ValueError(f"layout: got {layout!r}; wanted one of {', '.join(map(repr, LAYOUTS))}")


def from_linear(scale: Tensor, layout: str) -> Tensor:
    """Scales [..., R, G] in another layout, contiguous."""
    *_, rows, groups = scale.shape
    shape_in(layout, rows, groups)
    if layout == "linear":
        return scale.contiguous()
    stored = scale.view(torch.uint8)  # torch moves no 8-bit floats about
    if layout == "interleaved":
        moved = stored.unflatten(-2, (rows // TOKENS, TOKENS)).transpose(-1, -2)
    else:
        filled = torch.nn.functional.pad(stored, (0, -groups % TILE_GROUPS, 0, -rows % TILE_ROWS))
        tiles = filled.unflatten(-2, (-1, TILE_ROWS // LANES, LANES)).unflatten(-1, (-1, TILE_GROUPS))
        moved = tiles.movedim((-2, -3, -4), (-4, -3, -2))
    return moved.contiguous().view(scale.dtype)


def to_linear(scale: Tensor, layout: str, rows: int, groups: int) -> Tensor:
    """Scales of a layout as [..., R, G]. Linear ones come back as they are."""
    if layout == "linear":
        return scale
    stored = scale.view(torch.uint8)
    if layout == "interleaved":
        moved = stored.transpose(-1, -2).flatten(-3, -2)
    else:
        tiles = _words(stored).movedim((-4, -3, -2), (-2, -3, -4)).contiguous()
        moved = tiles.view(torch.uint8).flatten(-2).flatten(-4, -2)[..., :rows, :groups].contiguous()
    return moved.view(scale.dtype)


def _words(stored: Tensor) -> Tensor:
    """Bytes [..., 4] as int32 [..., 1], so that the four of a tile's row are moved together."""
    stored = stored.contiguous()
    return (stored.clone() if stored.storage_offset() % TILE_GROUPS else stored).view(torch.int32)
