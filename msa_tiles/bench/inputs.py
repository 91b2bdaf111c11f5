"""Inputs of the benchmarks, and the layouts that the baselines want."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles.bench import precisions
from msa_tiles.bench.cases import Case
from msa_tiles.bench.precisions import BF16
from msa_tiles.bench.selections import GENERATORS
from msa_tiles.quant import FP8, QuantizedTensor, quantize_fp8, quantize_mxfp4, quantize_nvfp4

Stored = Tensor | QuantizedTensor
"""BF16, e4m3 without scales, or a format of 4 bits."""


@dataclass(frozen=True)
class Indexer:
    """`idx_q [T, Hi, Di]` and `idx_k [Tk, Di]`."""

    idx_q: Tensor
    idx_k: Stored


@dataclass(frozen=True)
class Attention:
    """`q [T, Hq, D]`, `k v [Tk, Hkv, D]` and `block_indices [Hkv, T, k]`; of quantised k and v the scales, all 1."""

    q: Tensor
    k: Stored
    v: Stored
    block_indices: Tensor

    @functools.cached_property
    def scales(self) -> Mapping[str, Any]:
        return unit_scales(self.k)


def unit_scales(keys: Stored) -> dict[str, Tensor]:
    """The scales that a call of attention gets beside e4m3 keys: of 1, as peers take them that know none."""
    if not isinstance(keys, Tensor) or keys.dtype.itemsize > 1:
        return {}
    one = torch.ones((), device=keys.device)
    return {"k_scale": one, "v_scale": one}


def in_format(values: Tensor, form: str, *, fitted: bool = False) -> Stored:
    """Values in a format of the specs: e4m3 without scales, NVFP4 with a global scale of 1.

    Or ``fitted``, for accuracy: e4m3 with a scale for every row, NVFP4 with the global scale that fits.
    """
    if form == "nvfp4":
        return quantize_nvfp4(values) if fitted else quantize_nvfp4(values, 1.0)
    if form == "mxfp4":
        return quantize_mxfp4(values)
    if form == "e4m3" and fitted:
        return quantize_fp8(values, "token_head")
    return values.to({"bf16": torch.bfloat16, "e4m3": FP8}[form])


def wide(stored: Stored) -> Tensor:
    """The values in bfloat16, which holds all of them: an element of 4 bits times its scale has six bits at most."""
    return stored.to(torch.bfloat16) if isinstance(stored, Tensor) else stored.dequantize(torch.bfloat16)


def pages_of(pool: Stored, pages: Tensor) -> Stored:
    """Some pages of a pool."""
    if isinstance(pool, Tensor):
        return pool[pages]
    scale = pool.scale.view(torch.uint8)[pages].view(pool.scale.dtype)
    return dataclasses.replace(pool, data=pool.data[pages], scale=scale)


def is_e4m3(stored: Stored) -> bool:
    return isinstance(stored, Tensor) and stored.dtype == FP8


def normal(seed: int, device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Standard normal values: integers would toggle fewer bits and let the GPU clock higher than real data does."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def indexer(case: Case, heads: int, dim: int, device: torch.device, seed: int, precision: str = BF16) -> Indexer:
    """Queries and keys in the formats of a precision."""
    idx_q, idx_k = normal(2 * seed, device, case.num_q, heads, dim), normal(2 * seed + 1, device, case.num_k, dim)
    query, key = (precisions.stored(precision, role) for role in ("index_query", "index_key"))
    return Indexer(idx_q.to(getattr(torch, query.storage)), in_format(idx_k, key.name))


def indexer_bytes(case: Case, heads: int, dim: int, precision: str) -> int:
    """Bytes of all queries and keys, scales of groups included."""
    query, key = (precisions.stored(precision, role).bits_with_scales for role in ("index_query", "index_key"))
    return int(dim * (query * case.num_q * heads + key * case.num_k)) // 8


def selection(case: Case, num_kv_heads: int, topk: int, block_size: int, device: torch.device) -> Tensor:
    """The selection that the case names, `[Hkv, T, k]`."""
    if case.selection is None:
        raise ValueError(f"{case.op}: {case.label} names no selection")
    return GENERATORS[case.selection](num_kv_heads, case.num_q, case.num_k, topk, block_size, device)


def attention(
    case: Case,
    device: torch.device,
    seed: int,
    with_selection: bool = True,
    precision: str = BF16,
) -> Attention:
    """q in bfloat16, k and v in the format of a precision, and the case's selection.

    That is an empty one (k = 0) where the indexer makes it.
    """
    dim, heads, topk = case["head_dim"], case["num_kv_heads"], case["topk"]
    if with_selection:
        torch.manual_seed(seed)
        ids = selection(case, heads, topk, case["block_size"], device)
    else:
        ids = torch.empty((heads, case.num_q, 0), dtype=torch.int32, device=device)
    form = precisions.stored(precision, "key_value").name
    k, v = (in_format(normal(3 * seed + part, device, case.num_k, heads, dim), form) for part in (1, 2))
    return Attention(normal(3 * seed, device, case.num_q, case["num_q_heads"], dim), k, v, ids)


def sample_rows(num_q: int, count: int, device: torch.device) -> Tensor:
    """About `count` rows to check, ascending: the ends, both sides of the first block border, evenly spread ones."""
    corners = torch.tensor([0, 1, 127, 128, 129, num_q - 1])
    spread = torch.linspace(0, num_q - 1, count).long()
    rows = torch.cat([corners, spread])
    return torch.unique(rows[(rows >= 0) & (rows < num_q)]).to(device)
