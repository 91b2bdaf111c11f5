"""`combine` against the same weighted sum by torch operations."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.bench import cases, checks
from msa_tiles.bench.harness import Bench, Contender
from msa_tiles.bench.inputs import normal, sample_rows
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

OP = "combine"
Partials = tuple[Tensor, Tensor]


def partials(case: cases.Case, device: torch.device, seed: int) -> Partials:
    """`[S, T, Hq, D]` outputs and `[S, T, Hq]` LSEs of the splits."""
    splits, heads = case["num_splits"], case["num_q_heads"]
    return (
        normal(2 * seed, device, splits, case.num_q, heads, case["head_dim"]),
        normal(2 * seed + 1, device, splits, case.num_q, heads, dtype=torch.float32),
    )


def torch_combine(partial_out: Tensor, partial_lse: Tensor) -> Partials:
    lse = partial_lse.logsumexp(0)
    weights = (partial_lse - lse).exp().to(partial_out.dtype)
    return (weights[..., None] * partial_out).sum(0), lse


def check(inputs: Partials, result: Partials) -> str | None:
    rows = sample_rows(inputs[0].shape[1], checks.ROWS, inputs[0].device)
    out, lse = reference.combine(inputs[0][:, rows].float(), inputs[1][:, rows])
    error = (result[1][rows] - lse).abs().max().item()
    if not error <= 1e-4:
        return f"lse is off by {error:.3g}"
    return checks.close(result[0][rows], out)


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    def ours(dsl: str, inputs: Partials) -> Call:
        return lambda: ops.combine(*inputs, backend=dsl)

    elements = case["num_splits"] * case.num_q * case["num_q_heads"]
    return Bench(
        case=case,
        make=functools.partial(partials, case, device),
        bytes_per_set=elements * (2 * case["head_dim"] + 4),
        ours=ours,
        check=check,
        peers=[Contender("torch", lambda inputs: lambda: torch_combine(*inputs), check)],
    )


BENCHMARK = of_spec(OP, prepare)
