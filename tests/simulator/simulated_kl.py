"""Calls of the kernels of index_kl in the simulator, compared with the reference."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import simulated_calls
import torch
from simulated_calls import TOKEN_MAJOR, Call

from msa_tiles import reference
from msa_tiles.call.kl import Divergence
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.call.where import Where
from msa_tiles.launch import kl, lookup
from msa_tiles.verify import compare, index_parts
from msa_tiles.verify.inputs import spread

OPERATORS = ("index_gradients", "index_kl", "index_lse")
SOFTMAX_SCALE, INDEX_SCALE = 0.11, 0.09


def index_lse(
    call: Call, *, index_dim: int, block_size: int, topk: int, heads: int = 1, window: int | None = None
) -> None:
    """All windows but the first in one launch."""
    idx_q, idx_k = call.tensor(call.total_q, heads, index_dim), call.tensor(call.total_k, index_dim)
    at, (idx_k,), where = call.place(block_size, idx_k)
    ids = selection(call, heads, topk, block_size, False)
    window = call.total_q if window is None else window
    made = simulated_calls.make_schedule(call, at, ids, block_size, window)
    schedule = WindowSchedule(made.edges, made.tasks, made.counts, window)
    first = min(1, len(made.edges) - 1)

    def run(*arguments: Any) -> None:
        call.run("index_lse", {"index_dim": index_dim, "block_size": block_size}, *arguments)

    lse = kl.edge_lse(run, idx_q, idx_k, schedule, topk, INDEX_SCALE, range(first, len(made.edges)))
    wanted = reference.index_lse(
        idx_q.float(), idx_k.float(), ids, block_size=block_size, index_scale=INDEX_SCALE, **where
    )
    compare.numbers("partial_lse", lse, wanted[first * window :], 1e-4)


def index_gradients(
    call: Call,
    *,
    index_dim: int,
    block_size: int,
    topk: int,
    num_tasks: int,
    heads: int = 1,
    schedule_heads: int = 1,
    first: bool = True,
) -> None:
    dims = {
        "total_q": call.total_q, "total_k": call.total_k, "num_kv_heads": heads, "index_dim": index_dim, "topk": topk,
        "block_size": block_size, "num_tasks": num_tasks,
    }  # fmt: skip
    given = index_parts.random_parts(call.source, dims, call.lengths, schedule_heads)
    wanted_dq, wanted_dk = reference.index_gradients(*given)
    before = torch.full(wanted_dq.shape, math.nan)
    if not first:
        before = call.source.values(wanted_dq.shape, torch.float32)
        wanted_dq = wanted_dq + before
    # The last rows of a window may lie behind the last query.
    count = call.total_q - 1
    dq = before[:count].clone()

    def run(*arguments: Any) -> None:
        call.run("index_gradients", {"index_dim": index_dim, "block_size": block_size}, *arguments)

    kl.add_gradients(
        run, *given[:5], call.lengths.cu_seqlens_k, dq, given.dk, window_index=0, first=first
    )  # fmt: skip
    compare.numbers("dq", dq, wanted_dq[:count], 1e-5)
    compare.numbers("dk", given.dk, wanted_dk, 1e-5)


@contextmanager
def launches(call: Call, ctas: int, window: int) -> Iterator[list[str]]:
    """What msa_tiles.ops launches on a GPU runs in the simulator; yields the operators launched so far."""
    launched: list[str] = []

    def find(facts: Any, backend: str, op: str, variant: Mapping[str, int], *_: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            launched.append(op)
            call.run(op, variant, *arguments)

        return launch

    properties = types.SimpleNamespace(multi_processor_count=ctas)
    with (
        mock.patch.object(lookup, "part_kernel", find),
        mock.patch.object(kl, "choose_window", lambda *arguments: window),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
    ):
        yield launched


def index_kl(
    call: Call,
    *,
    head_dim: int,
    index_dim: int,
    block_size: int,
    group: int,
    prefix: int = 0,
    topk: int = 2,
    heads: int = 1,
    sticky: bool = False,
    window: int | None = None,
    gradients: bool = True,
    weighted: bool = False,
    given: bool = False,
    ctas: int = 2,
    repeats: int = 1,
) -> None:
    """The whole call as msa_tiles.ops launches it; with `given` on the schedule of the forward call."""
    total_q = call.total_q
    q, idx_q = call.tensor(total_q, heads * group, head_dim), call.tensor(total_q, heads, index_dim)
    keys = call.tensor(call.total_k, heads, head_dim), call.tensor(call.total_k, index_dim)
    at, (k, idx_k), where = call.place(block_size, *keys)
    teacher = {"softmax_scale": SOFTMAX_SCALE, **where}
    ids = None if prefix else selection(call, heads, topk, block_size, sticky)
    if ids is None:
        _, lse = reference.dense_attention(q.float(), k.float(), k.float(), **teacher)
    else:
        _, lse = reference.sparse_attention(q.float(), k.float(), k.float(), ids, block_size=block_size, **teacher)
    lse = lse.T.contiguous().T if call.strided else lse
    weights = call.source.values((total_q,), torch.float32).abs() if weighted else None
    window = total_q if window is None else window
    schedule = None
    if given:
        assert ids is not None
        made = simulated_calls.make_schedule(call, at, ids, block_size, window)
        schedule = WindowSchedule(made.edges, made.tasks, made.counts, window)
    variant = {"head_dim": head_dim, "index_dim": index_dim, "block_size": block_size, "group": group, "prefix": prefix}
    facts = lookup.call_facts("index_kl", Where(), torch.device("cpu"), "bf16", variant, queries=total_q)
    kl_call = Divergence(
        q, k, lse, idx_q, idx_k, ids, Where(**where), weights, schedule, block_size, SOFTMAX_SCALE, INDEX_SCALE,
        1 << 40, gradients, True, "auto",
    )  # fmt: skip
    options = {"block_size": block_size, "softmax_scale": SOFTMAX_SCALE, "index_scale": INDEX_SCALE}
    found: list[tuple[torch.Tensor, ...]] = []
    for _ in range(repeats):
        loss = torch.full((), math.nan)
        d_idx_q, d_idx_k = (torch.full(tensor.shape, math.nan, dtype=torch.bfloat16) for tensor in (idx_q, idx_k))
        with launches(call, ctas, window) as launched:
            results = (loss, d_idx_q, d_idx_k) if gradients else (loss, None, None)
            kl.launch(facts, kl_call, at, call.lengths.longest_k, *results)
        assert ((launched[0] == "build_schedule") != given and "index_gradients" in launched) or not gradients
        found.append((loss, d_idx_q, d_idx_k))
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))
    tensors = (q.float(), k.float(), lse, idx_q.float(), idx_k.float(), ids)
    wanted = reference.index_kl(*tensors, **options, token_weights=weights, **where)
    # The gradients are those of a sum over queries and heads, and near the probabilities, which are rounded to BF16.
    share = total_q * heads
    compare.numbers("loss", found[0][0], wanted[0], 2e-4)
    for name, got, want, limit in zip(("d_idx_q", "d_idx_k"), found[0][1:], wanted[1:], (2e-3, 4e-3), strict=True):
        if gradients:
            assert want is not None
            compare.numbers(name, got.float() * share, want * share, limit)


def selection(call: Call, heads: int, topk: int, block_size: int, sticky: bool) -> torch.Tensor:
    ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
    ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
    return spread(ids, TOKEN_MAJOR) if call.strided else ids
