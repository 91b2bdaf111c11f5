"""A decode step that verifies drafts: several queries of each request, through `msa_decode` and vLLM's operators.

Index queries of a request are independent, so that each query selects blocks of its own, or alike as those of
neighbouring tokens are, so that the queries of a request share most of their blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from msa_tiles.bench import precisions
from msa_tiles.bench.harness import Bench, Benchmark
from msa_tiles.bench.inputs import normal
from msa_tiles.bench.operators import decode
from msa_tiles.bench.operators.decode import Inputs
from msa_tiles.spec.work import Work

OP = "drafts"
QUERIES = 4
BATCHES = {"drafts_32k_b8": (8, 1 << 15), "drafts_32k_b64": (64, 1 << 15)}
ALIKE = {label.replace("drafts", "alike"): label for label in BATCHES}
LABELS = (*BATCHES, *ALIKE)
SPREAD = 0.1
"""Standard deviation within a request where queries are alike, of what is 1 between requests: at 32K the 64 blocks
that its 4 queries select are 24 distinct ones, and 58 where they are independent."""


@dataclass(frozen=True)
class Case(decode.Case):
    """`alike` says that the queries of a request are."""

    alike: bool = False


def find(label: str) -> Case:
    """Raises ValueError for an unknown case."""
    if label not in LABELS:
        raise ValueError(f"--cases: {OP} has no case {label!r}; it has {', '.join(LABELS)}")
    base = decode.find(ALIKE.get(label, label), OP, BATCHES)
    return Case(label, base.batch, base.keys, base.dims, OP, QUERIES, label in ALIKE)


def make(case: Case, device: torch.device, precision: str, seed: int) -> Inputs:
    """The caches of `decode.make`, with the queries of every request one after the other."""
    x = decode.make(case, device, precision, seed)
    total = case.batch * case.queries
    idx_q = normal(8 * seed + 5, device, total, *x.idx_q.shape[1:]).float()
    if case.alike:
        of_requests = normal(8 * seed + 4, device, *x.idx_q.shape).float()
        idx_q = of_requests.repeat_interleave(case.queries, 0) + SPREAD * idx_q
    return dataclasses.replace(
        x,
        q=normal(8 * seed + 6, device, total, *x.q.shape[1:]),
        idx_q=idx_q.to(x.idx_q.dtype),
        cu_seqlens_q=case.queries * x.cu_seqlens_q,
    )


def work(label: str, precision: str) -> list[Work]:
    """Bytes are those of one query of each request: the others may select the same blocks."""
    case = find(label)
    return [dataclasses.replace(part, flops=case.queries * part.flops) for part in decode.step_work(case, precision)]


def prepare(case: Case, device: torch.device, precision: str) -> Bench:
    return Bench(
        case=case,
        make=functools.partial(make, case, device, precision),
        bytes_per_set=decode.index_bytes(case, precision),
        ours=functools.partial(decode.ours, case),
        check=functools.partial(decode.check, case),
        peers=[decode.vllm(case)],
    )


BENCHMARK = Benchmark(OP, LABELS, find, prepare, work, decode.PARTS, precisions.SERVED)
