"""Training calls as msa_tiles.ops launches them, with every kernel in the simulator, against the reference."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from simulated_calls import Call, kernel

from msa_tiles import reference
from msa_tiles.ops import _attention_kernels, _dispatch, _kl_kernels
from msa_tiles.ops._where import Where
from msa_tiles.simulator import simulate
from msa_tiles.verify import compare

# Of normal inputs, the gradients multiplied by T * Hkv: the probabilities are rounded to bfloat16 on the way.
LOSS, D_IDX_Q, D_IDX_K = 2e-3, 1e-2, 5e-2


class Launches:
    """Stands in for the kernels of a launch module: each runs in the simulator, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Call, ctas: int) -> None:
        self.ops: list[str] = []
        for module in (_attention_kernels, _kl_kernels):
            monkeypatch.setattr(module, "_find", self.find)
        properties = types.SimpleNamespace(multi_processor_count=ctas)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        self.call = call

    def find(self, facts: Any, backend: str, op: str, variant: dict[str, int]) -> Any:
        def launch(*arguments: Any) -> None:
            self.ops.append(op)
            simulate(kernel(op, **variant), *arguments, seed=self.call.seed, late=self.call.late)

        return launch


def index_kl(
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
    *,
    head_dim: int,
    index_dim: int,
    block_size: int,
    group: int,
    topk: int = 0,
    heads: int = 1,
    sticky: bool = False,
    windows: int = 1,
    gradients: bool = True,
    weighted: bool = False,
    ctas: int = 2,
) -> list[str]:
    """The ops launched; topk 0 is the whole prefix."""
    launches = Launches(monkeypatch, call, ctas)
    total_q = call.total_q
    q, idx_q = call.tensor(total_q, heads * group, head_dim), call.tensor(total_q, heads, index_dim)
    flat = call.tensor(call.total_k, heads, head_dim), call.tensor(call.total_k, index_dim)
    at, (k, idx_k), where = call.place(block_size, *flat)
    ids = None
    if topk:
        ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
        ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
        _, lse = reference.sparse_attention(
            q.float(), k.float(), k.float(), ids, block_size=block_size, softmax_scale=0.11, **where
        )
    else:
        _, lse = reference.dense_attention(q.float(), k.float(), k.float(), softmax_scale=0.11, **where)
    weights = call.source.values((total_q,), torch.float32).abs() if weighted else None
    window = -(-total_q // windows)
    monkeypatch.setattr(_kl_kernels, "_choose_window", lambda *arguments: window)
    variant = {"head_dim": head_dim, "index_dim": index_dim, "block_size": block_size, "group": group}
    variant["prefix"] = int(topk == 0)
    facts = _dispatch.call_facts(
        "index_kl", Where(*[None] * 8), torch.device("cpu"), "bf16", variant, queries=total_q
    )  # fmt: skip
    loss = torch.full((), torch.nan)
    d_idx_q, d_idx_k = (torch.full(tensor.shape, torch.nan).bfloat16() for tensor in (idx_q, idx_k))
    _kl_kernels.index_kl(
        dataclasses.replace(facts),
        "auto",
        q,
        k,
        lse,
        idx_q,
        idx_k,
        ids,
        at,
        block_size=block_size,
        softmax_scale=0.11,
        index_scale=0.09,
        token_weights=weights,
        longest_k=call.lengths.longest_k,
        schedule=None,
        workspace_bytes=1 << 30,
        deterministic=True,
        loss=loss,
        d_idx_q=d_idx_q if gradients else None,
        d_idx_k=d_idx_k if gradients else None,
    )
    return launches.ops, loss, d_idx_q, d_idx_k, (q, k, lse, idx_q, idx_k, ids, weights, where)
