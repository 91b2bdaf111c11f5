"""Keys, values and queries of 4 bits as other packages hand them over, as `msa_tiles.quant.QuantizedTensor`: views."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from msa_tiles.quant import QuantizedTensor, layouts

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
GROUP = {"nvfp4": (E4M3, 16), "mxfp4": (E8M0, 32)}
TOKENS = 4  # whose scales of V lie together


def of_pages(
    name: str, stored: Tensor, scale: Tensor | None, global_scale: Tensor | None, *, turned: bool
) -> QuantizedTensor:
    """NVFP4 of planar pages: uint8 ``stored`` [pages, Hkv, P, D / 2] and ``scale`` [pages, Hkv, P, D / 16].

    Scales are e4m3 or their bytes, a region [P, D / 16] of a page and head contiguous, token after token, or ``turned``
    as those of values are: the scales of a group of four tokens beside each other. ``global_scale`` float32 [].

    Raises ``ValueError`` that names ``name`` for another layout.
    """
    if stored.dim() != 4:
        raise ValueError(f"{name}: got shape {list(stored.shape)}; wanted NVFP4 in pages [pages, Hkv, P, D / 2]")
    *most, tokens, half = stored.shape
    wanted = (*most, tokens, half // 8)
    if scale is None or tuple(scale.shape) != wanted or scale.dtype not in (torch.uint8, E4M3):
        came = "None" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        raise ValueError(
            f"{name}_scale: got {came}; wanted e4m3 or its bytes {list(wanted)}, the scales of planar pages: scales in "
            "tiles of 128x4 are not served"
        )
    if scale.stride()[-2:] != (wanted[-1], 1) or tokens % TOKENS:
        came = f"strides {list(scale.stride())} of {tokens} tokens"
        raise ValueError(f"{name}_scale: got {came}; wanted contiguous scales of each page and head")
    read = scale.view(E4M3)
    if turned:
        read = read.flatten(-2).unflatten(-1, (tokens // TOKENS, wanted[-1], TOKENS))
    return QuantizedTensor(stored, read, "nvfp4", "interleaved" if turned else "linear", global_scale)


def by_rows(name: str, stored: Tensor, scale: Tensor) -> Tensor:
    """NVFP4 scales of uint8 ``stored`` [..., D / 2] in tiles of 128x4, row after row: e4m3 [..., D / 16].

    A row is one of all leading dimensions. Raises ``ValueError`` that names ``name`` for another number of scales.
    """
    groups = _groups(name, stored)
    rows = math.prod(stored.shape[:-1])
    tiles = _tiles(name, scale, (), rows, groups)
    return layouts.to_linear(tiles, "swizzled", rows, groups).view(*stored.shape[:-1], groups)


def by_rows_of_pages(name: str, stored: Tensor, scale: Tensor, page_table: Tensor) -> Tensor:
    """The same of pages [pages, H, 128, D / 2], of which a head has whole tiles: e4m3 [pages, H, 128, D / 16].

    Those of pages that int32 ``page_table`` does not name are left undefined.
    """
    groups = _groups(name, stored)
    num_pages, heads, page = stored.shape[:-1]
    tiles = _tiles(name, scale, (num_pages, heads), page, groups)
    found = tiles.new_empty((num_pages, heads, page, groups))
    if num_pages and page_table.numel():
        named = page_table.long().clamp(0, num_pages - 1)  # what is no page is read by nobody
        some = layouts.to_linear(tiles.view(torch.int32)[named].view(E4M3), "swizzled", page, groups)
        word = torch.uint8 if groups % layouts.TILE_GROUPS else torch.int32
        found.view(word)[named] = some.view(word)
    return found


def _groups(name: str, stored: Tensor) -> int:
    size = GROUP["nvfp4"][1]
    if 2 * stored.shape[-1] % size:
        raise ValueError(f"{name}: got scales of head dim {2 * stored.shape[-1]}; wanted a multiple of {size}")
    return 2 * stored.shape[-1] // size


def _tiles(name: str, scale: Tensor, outer: tuple[int, ...], rows: int, groups: int) -> Tensor:
    """Contiguous scales as tiles [*outer, row tiles, group tiles, 32, 4, 4] of e4m3."""
    shape = (*outer, *layouts.shape_in("swizzled", rows, groups))
    if scale.dtype not in (torch.uint8, E4M3) or scale.numel() != math.prod(shape) or not scale.is_contiguous():
        came = f"{'' if scale.is_contiguous() else 'strided '}{scale.dtype} {list(scale.shape)}"
        raise ValueError(f"{name}: got {came}; wanted {math.prod(shape)} contiguous scales, e4m3 or bytes, in tiles")
    aligned = scale.clone() if scale.storage_offset() % layouts.TILE_GROUPS else scale
    return aligned.view(E4M3).view(shape)


def widened(name: str, stored: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Queries uint8 [T, H, D / 2] with ``scale`` [T, H, groups] as bfloat16, which holds their values exactly.

    ``kind`` is "nvfp4" or "mxfp4". Raises ``ValueError`` for scales of another shape.
    """
    return grouped(name, stored, scale, kind).dequantize(torch.bfloat16)


def grouped(name: str, stored: Tensor, scale: Tensor, kind: str, global_scale: Tensor | None = None) -> QuantizedTensor:
    """uint8 [..., D / 2] with linear scales [..., groups], e4m3 (e8m0 for "mxfp4") or their bytes.

    float32 ``global_scale`` [] multiplies all values of "nvfp4".
    """
    dtype, group = GROUP[kind]
    wanted = (*stored.shape[:-1], 2 * stored.shape[-1] // group)
    if tuple(scale.shape) != wanted or scale.dtype not in (torch.uint8, dtype):
        raise ValueError(f"{name}: got {scale.dtype} {list(scale.shape)}; wanted {dtype} or bytes {list(wanted)}")
    return QuantizedTensor(stored.view(torch.uint8), scale.view(dtype), kind, global_scale=global_scale)
