"""Calls of the kernels of training in the simulator, compared with the reference."""

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
from msa_tiles.call.attention import Gradients
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.call.where import Where
from msa_tiles.launch import backward, lookup
from msa_tiles.verify import compare, gradient_parts
from msa_tiles.verify.inputs import spread

OPERATORS = ("gradient_rows", "merge_gradients", "sparse_attention_backward")


def gradient_rows(call: Call, *, head_dim: int, heads: int, with_dlse: bool = True) -> None:
    dims = {"total_q": call.total_q, "num_q_heads": heads, "head_dim": head_dim}
    given = gradient_parts.random_rows(call.source, dims, call.strided)
    rows = torch.full((call.total_q, heads, 2), math.nan)
    call.run("gradient_rows", {"head_dim": head_dim}, *given, rows, int(with_dlse))
    wanted = reference.gradient_rows(*given[:3], dlse=given.dlse if with_dlse else None)
    compare.numbers("rows", rows, wanted, 1e-4)


def merge_gradients(call: Call, *, head_dim: int, group: int, topk: int, num_tasks: int, heads: int = 1) -> None:
    dims = {
        "total_q": call.total_q, "total_k": call.total_k, "num_kv_heads": heads, "num_q_heads": heads * group,
        "head_dim": head_dim, "topk": topk, "block_size": 64, "num_tasks": num_tasks,
        "num_sums": call.total_k + 64 * num_tasks,
    }  # fmt: skip
    given = gradient_parts.random_parts(call.source, dims)
    wanted = reference.merge_gradients(*given)
    dq = torch.full((call.total_q, heads * group, head_dim), math.nan).bfloat16()
    call.run("merge_gradients", {"head_dim": head_dim}, *given, dq, 0, 64)
    compare.numbers("dq", dq.float(), wanted[0].float(), 0.04)
    compare.numbers("sums", given.sums, wanted[1], 1e-5)


@contextmanager
def launches(call: Call, ctas: int) -> Iterator[None]:
    """What msa_tiles.ops launches on a GPU runs in the simulator, on so many multiprocessors."""

    def find(facts: Any, backend: str, op: str, variant: Mapping[str, int], *_: Any) -> Callable[..., None]:
        return lambda *arguments: call.run(op, variant, *arguments)

    with (
        mock.patch.object(lookup, "part_kernel", find),
        mock.patch.object(backward, "_num_ctas", lambda device: ctas),
    ):
        yield


def sparse_attention_backward(
    call: Call,
    *,
    head_dim: int,
    block_size: int,
    group: int,
    topk: int,
    heads: int = 1,
    window: int | None = None,
    ctas: int = 2,
    sticky: bool = False,
    given: bool = False,
    repeats: int = 1,
) -> None:
    """The whole call as msa_tiles.ops launches it; with `given` on the schedule of the forward call."""
    q = call.tensor(call.total_q, heads * group, head_dim)
    k, v = (call.tensor(call.total_k, heads, head_dim) for _ in range(2))
    # Behind the keys of a request anything may stand.
    for tensor in (k, v):
        call.poison_behind(tensor)
    ids = call.source.selection(call.lengths, heads, topk, block_size, sticky)
    ids = torch.cat([ids, torch.zeros((heads, call.rows_behind, topk), dtype=torch.int32)], 1)
    ids = spread(ids, TOKEN_MAJOR) if call.strided else ids
    at, _, where = call.place(block_size)
    options = {"block_size": block_size, **where}
    out, lse = reference.sparse_attention(q.float(), k.float(), v.float(), ids, **options)
    empty = lse == -math.inf
    out, dout = out.bfloat16(), call.tensor(*q.shape)
    dout.masked_fill_(empty[..., None], math.nan)
    dlse = call.source.values(lse.shape, torch.float32).masked_fill(empty, math.nan)
    if call.strided:
        out = spread(out)
    window = call.total_q if window is None else window
    schedule = None
    if given:
        made = simulated_calls.make_schedule(call, at, ids, block_size, window)
        schedule = WindowSchedule(made.edges, made.tasks, made.counts, window)
    shape = {"block_size": block_size, "group": group}
    bytes_per_query = backward.bytes_per_query(topk, heads * group, heads, head_dim, block_size)
    variant = {"head_dim": head_dim, **shape}
    facts = types.SimpleNamespace(op="sparse_attention_backward", variant=variant, features=frozenset())
    gradients = Gradients(
        dout, q, k, v, out, lse, ids, dlse, Where(**where), schedule, block_size, head_dim**-0.5,
        bytes_per_query * window, True, "auto",
    )  # fmt: skip
    found: list[tuple[torch.Tensor, ...]] = []
    for _ in range(repeats):
        outputs = tuple(torch.full(tensor.shape, math.nan, dtype=torch.bfloat16) for tensor in (q, k, v))
        with launches(call, ctas):
            backward.launch(facts, gradients, at, call.lengths.longest_k, *outputs)
        found.append(outputs)
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))
    arguments = (tensor.float() for tensor in (dout, q, k, v, out))
    wanted = reference.sparse_attention_backward(*arguments, lse, ids, dlse=dlse, **options)
    for name, got, want, limit in zip(("dq", "dk", "dv"), found[0], wanted, (0.05, 0.1, 0.1), strict=True):
        compare.numbers(name, got, want, limit)
