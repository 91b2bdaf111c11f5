"""NaN and infinity where no query, or not every query, may look: on the CPU, for every operator that reads keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops import calls, training_calls
from ops.calls import TERMS
from ops.test_ops_defaults import tensors_of
from rounding import close

from msa_tiles import ops, reference
from msa_tiles.reference.batch import read_batch

VALUES = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
KEYS = ("k", "v", "idx_k")
WITH_KEYS = [*calls.WITH_KEYS, *training_calls.OPERATORS]


def arguments_of(op: str) -> dict[str, Any]:
    return (training_calls if op in training_calls.OPERATORS else calls).call(op)


def poisoned(arguments: dict[str, Any], rows: torch.Tensor, value: float) -> dict[str, Any]:
    """The same call with a value in these rows of all keys and values."""
    changed = dict(arguments)
    for name in KEYS:
        if name in changed:
            changed[name] = changed[name].clone()
            changed[name][rows] = value
    return changed


def last_keys(arguments: dict[str, Any]) -> torch.Tensor:
    """The row of every request's last key."""
    starts = arguments["cu_seqlens_k"]
    return (starts[1:] - 1)[starts.diff() > 0].long()


def check_same(op: str, arguments: dict[str, Any], changed: dict[str, Any]) -> None:
    pairs = list(zip(tensors_of(getattr(ops, op)(**changed)), tensors_of(getattr(ops, op)(**arguments)), strict=True))
    assert pairs
    for got, wanted in pairs:
        close(got, wanted, terms=TERMS)
        assert not wanted.is_floating_point() or not bool(wanted.isnan().any())


@VALUES
@pytest.mark.parametrize("op", [op for op in WITH_KEYS if op != "dense_attention"])
def test_keys_that_no_query_sees_reach_nothing(op: str, value: float) -> None:
    """Every query stands one position before its own, and so before its request's last key."""
    arguments = arguments_of(op)
    total = arguments["q" if "q" in arguments else "idx_q"].shape[0]
    starts = {name: arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    position = read_batch(total, torch.device("cpu"), total_k=int(starts["cu_seqlens_k"][-1]), **starts).position
    arguments["q_positions"] = (position - 1).to(torch.int32)
    if "lse" in arguments:
        # What the backward is given must be of the same call.
        forward = {name: arguments[name] for name in ("q", "k", "block_indices", "q_positions", "block_size", *starts)}
        out, lse = ops.sparse_attention(**forward, v=arguments.get("v", arguments["k"]), return_lse=True)
        arguments |= {"lse": lse, **({"out": out} if "out" in arguments else {})}
    check_same(op, arguments, poisoned(arguments, last_keys(arguments), value))


@VALUES
@pytest.mark.parametrize("op", ["dense_attention", *calls.ATTENTION])
def test_rows_that_do_not_see_a_key_do_not_change(op: str, value: float) -> None:
    """Only the last query of a request sees its last key, and its row alone is NaN, or what infinity makes of it."""
    arguments = arguments_of(op)
    ends = arguments["cu_seqlens_q"]
    rows = torch.ones(int(ends[-1]), dtype=torch.bool)
    rows[(ends[1:] - 1)[ends.diff() > 0].long()] = False
    wanted = getattr(ops, op)(**arguments, return_lse=True)
    got = getattr(ops, op)(**poisoned(arguments, last_keys(arguments), value), return_lse=True)
    for one, other in zip(got, wanted, strict=True):
        close(one[rows], other[rows], terms=TERMS)
    if math.isnan(value):
        assert bool(got[0][~rows].isnan().any())


@VALUES
@pytest.mark.parametrize("op", [op for op in WITH_KEYS if op not in training_calls.OPERATORS])
def test_tails_of_shortened_requests_reach_nothing(op: str, value: float) -> None:
    arguments = arguments_of(op)
    lengths = arguments["cu_seqlens_k"].diff().to(torch.int32)
    arguments["seqused_k"] = (lengths - 1).clamp_min(0)
    check_same(op, arguments, poisoned(arguments, last_keys(arguments), value))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_what_a_query_does_not_see(sparse: bool) -> None:
    """NaN in the last query and in its gradient makes those of all keys that it sees NaN, and of no other."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(12, 1, 8, generator=generator) for _ in range(4))
    ids = torch.tensor([[[0, -1]] * 12], dtype=torch.int32)
    ids[0, 11] = torch.tensor([2, -1])
    selection = {"block_indices": ids, "block_size": 4} if sparse else {}
    where = {"q_positions": torch.tensor([*range(11), 9], dtype=torch.int32)}
    forward, backward = (
        (reference.sparse_attention, reference.sparse_attention_backward)
        if sparse
        else (reference.dense_attention, reference.dense_attention_backward)
    )
    out, lse = forward(q, k, v, **selection, **where)
    clean = backward(dout, q, k, v, out, lse, **selection, **where)
    dout[11], q[11] = math.nan, math.nan
    dq, dk, dv = backward(dout, q, k, v, out, lse, **selection, **where)
    seen = torch.zeros(12, dtype=torch.bool)
    seen[8 if sparse else 0 : 10] = True
    assert bool(dk[seen].isnan().all()) and bool(dv[seen].isnan().all()) and bool(dq[11].isnan().all())
    for got, wanted, rows in zip((dq, dk, dv), clean, (torch.arange(12) < 11, ~seen, ~seen), strict=True):
        close(got[rows], wanted[rows], terms=TERMS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_sees_nothing_gives_no_gradient(value: float) -> None:
    call = training_calls.call("index_kl")
    for prefix in (False, True):
        arguments = {**call, "block_indices": None} if prefix else dict(call)
        arguments["q_positions"] = torch.cat([torch.tensor([-1]), torch.arange(1, 9), torch.arange(14)]).int()
        where = {name: arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "q_positions")}
        keys = {"q": call["q"], "k": call["k"], "v": call["k"]}
        attend = reference.dense_attention if prefix else reference.sparse_attention
        selection = {} if prefix else {"block_indices": call["block_indices"], "block_size": call["block_size"]}
        arguments["lse"] = attend(**keys, **selection, **where)[1]
        wanted = reference.index_kl(**arguments)
        for name in ("q", "idx_q"):
            arguments[name] = arguments[name].clone()
            arguments[name][0] = value
        for got, want in zip(reference.index_kl(**arguments), wanted, strict=True):
            close(got, want, terms=TERMS)
