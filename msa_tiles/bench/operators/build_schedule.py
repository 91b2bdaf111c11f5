"""`build_schedule` against the same reverse index by torch operations (stable sort, counts, prefix sums)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.bench import cases, checks, inputs
from msa_tiles.bench.harness import Bench, Contender
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call
from msa_tiles.call.where import Where
from msa_tiles.ops.build_schedule import build_on

OP = "build_schedule"


def selection(case: cases.Case, device: torch.device, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return inputs.selection(case, case["num_kv_heads"], case["topk"], case["block_size"], device)


def torch_index(block_indices: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """`(order, start)` per KV head: edges `query * k + slot` sorted by block, and where each block's edges start.

    Absent ids count as block `num_blocks`, so that they come last.
    """
    flat = block_indices.flatten(1).long()
    flat = torch.where(flat >= 0, flat, num_blocks)
    order = flat.sort(dim=1, stable=True).indices.int()
    counts = torch.zeros(flat.shape[0], num_blocks + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    return order, counts.cumsum(1) - counts


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    num_blocks = -(-case.num_k // case["block_size"])
    lengths: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, case.num_q], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, case.num_k], dtype=torch.int32, device=device),
        "max_seqlen_q": case.num_q,
        "max_seqlen_k": case.num_k,
    }

    where = Where(**lengths)

    def ours(dsl: str, ids: Tensor) -> Call:
        return lambda: build_on(dsl, ids, where, case["block_size"])

    def bind_torch(ids: Tensor) -> Call:
        return lambda: torch_index(ids, num_blocks)

    return Bench(
        case=case,
        make=functools.partial(selection, case, device),
        bytes_per_set=4 * case["num_kv_heads"] * case.num_q * case["topk"],
        ours=ours,
        check=functools.partial(check, case, lengths),
        peers=[Contender("torch", bind_torch, functools.partial(check_torch, num_blocks))],
    )


def check(case: cases.Case, lengths: Mapping[str, Any], ids: Tensor, schedule: ops.Schedule) -> str | None:
    """How edges and tasks are encoded is the kernels' own matter, so attention by this schedule is what is compared."""
    attention = dataclasses.replace(cases.find("sparse_attention", case.label), selection=None)
    x = inputs.attention(attention, ids.device, 0, with_selection=False)
    x = dataclasses.replace(x, block_indices=ids)
    out = ops.sparse_attention(x.q, x.k, x.v, ids, block_size=case["block_size"], schedule=schedule, **lengths)
    return checks.attended(attention, x, cast(Tensor, out))


def check_torch(num_blocks: int, ids: Tensor, index: tuple[Tensor, Tensor]) -> str | None:
    order, start = index
    blocks = torch.where(ids >= 0, ids, num_blocks).flatten(1).gather(1, order.long())
    if not bool((blocks.diff(dim=1) >= 0).all()):
        return "edges are not sorted by block"
    counts = torch.stack([row.bincount(minlength=num_blocks + 1) for row in blocks])
    return None if torch.equal(counts.cumsum(1) - counts, start) else "block starts are wrong"


BENCHMARK = of_spec(OP, prepare)
