"""Inputs of the benchmarks, and the layouts that the baselines want."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles.bench.cases import Case
from msa_tiles.bench.selections import GENERATORS


@dataclass(frozen=True)
class Indexer:
    """`idx_q [T, Hi, Di]` and `idx_k [Tk, Di]`."""

    idx_q: Tensor
    idx_k: Tensor


@dataclass(frozen=True)
class Attention:
    """`q [T, Hq, D]`, `k v [Tk, Hkv, D]` and `block_indices [Hkv, T, k]`; of quantised k and v the scales, all 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor

    @functools.cached_property
    def scales(self) -> Mapping[str, Any]:
        return unit_scales(self.k)


def unit_scales(keys: Tensor) -> dict[str, Tensor]:
    """The scales that a call of attention gets beside quantised keys: of 1, as peers take them that know none."""
    if keys.dtype.itemsize > 1:
        return {}
    one = torch.ones((), device=keys.device)
    return {"k_scale": one, "v_scale": one}


def normal(seed: int, device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Standard normal values: integers would toggle fewer bits and let the GPU clock higher than real data does."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def indexer(
    case: Case, heads: int, dim: int, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Indexer:
    idx_q, idx_k = normal(2 * seed, device, case.num_q, heads, dim), normal(2 * seed + 1, device, case.num_k, dim)
    return Indexer(idx_q.to(dtype), idx_k.to(dtype))


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
    dtype: torch.dtype = torch.bfloat16,
) -> Attention:
    """q in bfloat16, k and v in `dtype`, and the case's selection; an empty one (k = 0) where the indexer makes it."""
    dim, heads, topk = case["head_dim"], case["num_kv_heads"], case["topk"]
    if with_selection:
        torch.manual_seed(seed)
        ids = selection(case, heads, topk, case["block_size"], device)
    else:
        ids = torch.empty((heads, case.num_q, 0), dtype=torch.int32, device=device)
    k, v = (normal(3 * seed + part, device, case.num_k, heads, dim).to(dtype) for part in (1, 2))
    return Attention(normal(3 * seed, device, case.num_q, case["num_q_heads"], dim), k, v, ids)


def sample_rows(num_q: int, count: int, device: torch.device) -> Tensor:
    """About `count` rows to check, ascending: the ends, both sides of the first block border, evenly spread ones."""
    corners = torch.tensor([0, 1, 127, 128, 129, num_q - 1])
    spread = torch.linspace(0, num_q - 1, count).long()
    rows = torch.cat([corners, spread])
    return torch.unique(rows[(rows >= 0) & (rows < num_q)]).to(device)
