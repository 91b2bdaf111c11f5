"""Keys and values of 4 bits, made of drawn ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msa_tiles.quant import QuantizedTensor, quantize_index_pages, quantize_mxfp4, quantize_nvfp4, quantize_pages


def keys_of(
    format: str, keys: tuple[Tensor, Tensor], flat: tuple[Tensor, ...], strided: bool
) -> tuple[tuple[QuantizedTensor, QuantizedTensor], tuple[Tensor, ...]]:
    """k and v of a call, quantised, and what they stand for as flat tensors in bfloat16.

    ``flat`` are the same values that ``keys`` hold, [total_k, H, D]. Groups are NaN where values are. `strided` calls
    have pages of a pool of several layers, in vLLM's order where the format is its, or else scales of values that are
    interleaved; flat keys then have gaps between heads.
    """
    outer = [None if format == "mxfp4" else _global(part) for part in flat]

    def quantized(parts: Sequence[Tensor]) -> list[QuantizedTensor]:
        if format == "mxfp4":
            return [quantize_mxfp4(part) for part in parts]
        return [quantize_nvfp4(part, scale) for part, scale in zip(parts, outer, strict=True)]

    made = quantized(keys)
    of_flat = made if made[0].data.dim() == flat[0].dim() else quantized(flat)
    stand_for = tuple(part.dequantize(torch.bfloat16) for part in of_flat)
    k, v = made
    if strided and k.data.dim() == 3:
        k, v = (_spread(part) for part in made)
    elif strided and format == "nvfp4":
        num_pages, heads, page, dim = k.shape
        pool = torch.zeros((num_pages, 3, 2 * heads, page, dim // 16 * 9), dtype=torch.uint8, device=k.data.device)
        _, k, v = quantize_pages(
            *keys, "vllm", k_global_scale=k.global_scale, v_global_scale=v.global_scale, pool=pool[:, 1]
        )
    elif strided:
        v = v.with_layout("interleaved")
    return (k, v), stand_for


def index_keys_of(format: str, keys: Tensor, strided: bool, integers: bool) -> QuantizedTensor:
    """Index keys [total_k, D] or [pages, page, D] of a call; if `strided`, pages of nvfp4 lie as SGLang has them.

    Of `integers` products and sums stay exact, so that scores tie in any order of additions.
    """
    if format == "mxfp4":
        return quantize_mxfp4(keys)
    outer = torch.ones((), device=keys.device) if integers else _global(keys)
    if strided and keys.dim() == 3:
        return quantize_index_pages(keys, global_scale=outer)[1]
    return quantize_nvfp4(keys, outer)


def _global(values: Tensor) -> Tensor:
    """A scale under which the largest finite magnitude is the largest number."""
    largest = torch.where(values.isfinite(), values, 0.0).abs().amax().float() if values.numel() else torch.tensor(0.0)
    return torch.where(largest > 0, largest / 2688, 1.0).to(values.device)


def _spread(made: QuantizedTensor) -> QuantizedTensor:
    """The same with a head more in memory, whose scales are NaN."""
    data = torch.nn.functional.pad(made.data, (0, 0, 0, 1), value=0x77)
    scale = torch.nn.functional.pad(made.scale.view(torch.uint8), (0, 0, 0, 1), value=0xFF).view(made.scale.dtype)
    return QuantizedTensor(data[:, :-1], scale[:, :-1], made.format, made.layout, made.global_scale)
