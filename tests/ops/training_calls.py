"""Calls of the differentiable operators, small; tests change one argument at a time."""

from __future__ import annotations

from typing import Any

import torch
from ops.calls import BLOCK
from torch import Tensor

from msa_tiles import ops

NAMES = ("q", "k", "v", "idx_q", "idx_k")
OPERATORS = {
    name: getattr(ops, name) for name in ("dense_attention", "index_kl", "msa_attention", "sparse_attention_backward")
}


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def tensors(
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] = (9, 0, 14),
    group: int = 2,
    requires_grad: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k, v, idx_q and idx_k of self-attention over packed sequences: 2 KV heads, head dim 8, index dim 4."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    shapes = ((total, 2 * group, 8), (total, 2, 8), (total, 2, 8), (total, 2, 4), (total, 4))
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return {name: tensor.requires_grad_(requires_grad) for name, tensor in zip(NAMES, made, strict=True)}


def place(*lengths: int) -> dict[str, Tensor]:
    return {"cu_seqlens_q": starts(*lengths), "cu_seqlens_k": starts(*lengths)}


def call(op: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments, by name, of a valid call of ``op``."""
    data, where = tensors(dtype), place(9, 0, 14)
    if op == "dense_attention":
        return {**{name: data[name] for name in ("q", "k", "v")}, **where}
    where["block_size"] = BLOCK // 2
    if op == "msa_attention":
        return {**data, "topk": 2, **where}
    ids = ops.select_blocks(data["idx_q"], data["idx_k"], 2, backend="reference", **where)
    main = {name: data[name] for name in ("q", "k", "v")}
    out, lse = ops.sparse_attention(**main, block_indices=ids, return_lse=True, backend="reference", **where)
    if op == "index_kl":
        del main["v"]
        return {**main, "lse": lse, "idx_q": data["idx_q"], "idx_k": data["idx_k"], "block_indices": ids, **where}
    assert op == "sparse_attention_backward", op
    return {"dout": torch.ones_like(out), **main, "out": out, "lse": lse, "block_indices": ids, **where}
