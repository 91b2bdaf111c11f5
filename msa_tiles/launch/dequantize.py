"""How dequantize_kv is launched on CUDA: one launch, no allocation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import trees
from msa_tiles.call import formats
from msa_tiles.call.caches import Whole
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, operands, packed
from msa_tiles.runtime import CallFacts, default_registry

# Kernels count rows, and thread blocks, in int32.
MOST_ROWS = 1 << 31


def run(call: Whole, k_out: Tensor, v_out: Tensor) -> None:
    """Write keys and values."""
    kernel = lookup.find_kernel(facts(call, k_out, v_out), call.backend)
    if k_out.numel() == 0:
        return
    if call.k.numel() == 0:  # no entry of a table names a page
        k_out.zero_()
        v_out.zero_()
        return
    kernel(*arguments(call, k_out, v_out))


def facts(call: Whole, *out: Tensor) -> CallFacts:
    """The facts of a call into ``out``, or into buffers that begin and lie as kernels want them."""
    return lookup.call_facts(
        "dequantize_kv",
        Where(page_table=call.page_table),
        call.device,
        lookup.precision(key_value=formats.stored(call.k, call.k_scale)),
        variant(call),
        (call.k, call.v, *out),
        _oversized(call),
        queries=call.shape[0],
    )


def variant(call: Whole) -> dict[str, int]:
    """The compile-time dims of a call."""
    return {
        "head_dim": formats.width(call.k),
        "paged": int(call.page_table is not None),
        **operands.token_scales(call.k, call.k_scale, call.v_scale),
    }


def _oversized(call: Whole) -> tuple[str, ...]:
    rows, heads, _ = call.shape
    requests = 1 if call.page_table is None else call.page_table.shape[0]
    tiles = _tiles()
    if (rows // min(tiles) + requests) * heads < MOST_ROWS and rows < MOST_ROWS - max(tiles):
        return ()
    return (f"{rows} rows of {heads} heads, wanted fewer than 2**31 rows and thread blocks",)


@trees.cached(maxsize=1)
def _tiles() -> tuple[int, ...]:
    """Rows of a thread block of each kernel."""
    tiles = (cell.entry["tile"] for cell in default_registry().of("dequantize_kv"))
    return tuple(tile["rows"] * tile["steps"] for tile in tiles) or (1,)


def arguments(call: Whole, k_out: Tensor, v_out: Tensor) -> tuple[Any, ...]:
    """What the kernel takes; flat keys are one page. What is not there is replaced by what is not read."""
    table, lengths = call.page_table, call.seqused_k
    if table is None or lengths is None:
        lengths = k_out[0, 0, :2].view(torch.int32)
        table = lengths[None]
    keys = _pages(call.k, call.k_scale, call.k_global_scale, call)
    return *keys, *_pages(call.v, call.v_scale, call.v_global_scale, call), table, lengths, k_out, v_out


def _pages(values: Tensor, scale: Tensor, global_scale: Tensor | None, call: Whole) -> tuple[Tensor, ...]:
    """Keys or values [pages, H, page, D] and their scales, as kernels take them."""
    flat = call.page_table is None
    if formats.is_packed(values):
        if flat:
            values, scale = values.transpose(0, 1)[None], scale.transpose(0, 1)[None]
        return packed.to_write(values, scale, global_scale)
    by_token = bool(variant(call)["token_scales"])
    if scale.dim() == 1 and by_token and not flat:
        scale = scale[:, None]
    scale = scale.expand(values.shape[:-1] if by_token else values.shape[1:2])
    if flat:
        values = values.transpose(0, 1)[None]
        scale = scale.transpose(0, 1)[None] if by_token else scale
    return values, scale
