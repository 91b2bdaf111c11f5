"""A call of an operator on meta tensors, from compile-time dims and sizes: what the command line asks about."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.quant import GROUPS, PACKED, QuantizedTensor
from msa_tiles.runtime.pairs import Pair
from msa_tiles.runtime.registry import Registry

# What the specs' workloads have where a kernel is not compiled for it.
DEFAULTS = {"num_kv_heads": 4, "topk": 16, "block_size": 128, "head_dim": 128, "group": 16, "splits": 4}


def call_of(
    op: str,
    dims: Mapping[str, int],
    pair: Pair,
    queries: int,
    keys: int,
    requests: int,
    registry: Registry,
) -> dict[str, Any]:
    """The arguments of a call of `requests` requests, each with so many queries and keys, by name.

    Dims that are not given are those of the specs' workloads.
    """
    d = {**DEFAULTS, **dims}
    heads, kv_heads, block = d["group"] * d["num_kv_heads"], d["num_kv_heads"], d["block_size"]
    index_heads, index_dim = kv_heads * d.get("heads_per_group", 1), d.get("index_dim", d["head_dim"])
    total, pages = queries * requests, d.get("pages_per_block", d.get("paged", 0))
    page = block // max(pages, 1)
    max_pages = -(-keys // page)
    rows: tuple[int, ...] = (requests * max_pages, kv_heads, page) if pages else (requests * keys, kv_heads)
    index_rows: tuple[int, ...] = (requests * max_pages, page) if pages else (requests * keys,)
    per_token = bool(d.get("token_scales", 0) or d.get("key_scales", 0))

    def stored(keys: str, role: str, *shape: int, per_token: bool = False) -> Any:
        name = registry.precisions[pair.attention if keys == "key_value" else pair.indexer].formats[role]
        if name in GROUPS:
            return _packed(name, *shape)
        dtype = getattr(torch, registry.formats[name]["storage"])
        value = _meta(*shape, dtype=dtype)
        return value if dtype.itemsize > 1 else QuantizedTensor(value, _float(*(shape[:-1] if per_token else ())))

    def ids() -> Tensor:
        return _meta(kv_heads, total, d["topk"], dtype=torch.int32)

    def cache(role: str, *heads: int) -> Any:
        return stored(role, role, -(-total // block), *heads, block, d["head_dim"], per_token=per_token)

    made = {
        "q": lambda: stored("key_value", "query", total, heads, d["head_dim"]),
        "k": lambda: stored("key_value", "key_value", *rows, d["head_dim"], per_token=per_token),
        "v": lambda: stored("key_value", "key_value", *rows, d["head_dim"], per_token=per_token),
        "idx_q": lambda: stored("index_key", "query", total, index_heads, index_dim),
        "idx_k": lambda: stored("index_key", "index_key", *index_rows, index_dim, per_token=per_token),
        "out": lambda: _meta(total, heads, d["head_dim"], dtype=torch.bfloat16),
        "dout": lambda: _meta(total, heads, d["head_dim"], dtype=torch.bfloat16),
        "lse": lambda: _float(total, heads),
        "block_indices": ids,
        "score": lambda: _float(index_heads, total, -(-keys // block)),
        "partial_out": lambda: _meta(d["splits"], total, heads, d["head_dim"], dtype=torch.bfloat16),
        "partial_lse": lambda: _float(d["splits"], total, heads),
        "topk": lambda: d["topk"],
        "slot_mapping": lambda: _meta(total, dtype=torch.int64),
        "k_cache": lambda: cache("key_value", kv_heads),
        "v_cache": lambda: cache("key_value", kv_heads),
        "cache": lambda: cache("index_key"),
        "positions": lambda: _meta(total, dtype=torch.int64),
        "cos_sin": lambda: _meta(
            keys, d["head_dim"] // 2, dtype=torch.float32 if d.get("float32_table") else torch.bfloat16
        ),
        "index_cache": lambda: (
            _meta(-(-total // block), block, d["head_dim"], dtype=torch.bfloat16)
            if d.get("bf16_index")
            else cache("key_value")
        ),
    }
    weights = ("q_weight", "k_weight", "idx_q_weight", "idx_k_weight")
    made |= dict.fromkeys(weights, lambda: _meta(d["head_dim"], dtype=torch.bfloat16))
    if "slot_mapping" in inspect.signature(getattr(ops, op)).parameters:
        # What is written is not quantised yet.
        element = torch.float32 if d.get("float32_rows") else torch.bfloat16
        made |= {name: lambda: _meta(total, kv_heads, d["head_dim"], dtype=element) for name in ("k", "v")}
        made["idx_k"] = lambda: _meta(total, index_dim, dtype=element)
        made["idx_q"] = lambda: _meta(total, index_heads, index_dim, dtype=element)
    parameters = inspect.signature(getattr(ops, op)).parameters
    # An index branch is there, also where it need not be.
    branch = ("idx_q", "idx_k", *weights, "index_cache") if "index_cache" in parameters else ()
    call = {
        name: made[name]()
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty or name in branch
    }
    further: dict[str, Any] = {"block_size": block, "num_kv_heads": kv_heads, "max_seqlen_q": queries}
    if requests > 1 or pages:
        further["cu_seqlens_q"] = _meta(requests + 1, dtype=torch.int32)
    if pages:
        further["page_table"] = _meta(requests, max_pages, dtype=torch.int32)
        further["seqused_k"] = _meta(requests, dtype=torch.int32)
    elif requests > 1 and {"k", "idx_k"} & call.keys():
        further["cu_seqlens_k"] = _meta(requests + 1, dtype=torch.int32)
    elif not {"k", "idx_k"} & call.keys():
        further["seqused_k"] = _meta(requests, dtype=torch.int32)
    further["max_seqlen_k"] = keys
    return call | {name: value for name, value in further.items() if name in parameters and name not in call}


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _packed(format: str, *shape: int) -> QuantizedTensor:
    """Values of 4 bits, in bytes; with a global scale where the format has one."""
    groups = GROUPS[format]
    data = _meta(*shape[:-1], shape[-1] // PACKED, dtype=torch.uint8)
    scale = _meta(*shape[:-1], shape[-1] // groups.size, dtype=groups.dtype)
    return QuantizedTensor(data, scale, format, global_scale=_float() if groups.has_global else None)


def _float(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)
