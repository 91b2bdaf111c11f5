"""Benchmarks whose cases and work are those of one operator's spec."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from msa_tiles.bench import cases
from msa_tiles.bench.harness import Bench, Benchmark
from msa_tiles.bench.precisions import BF16
from msa_tiles.spec.work import Work


def of_spec(
    op: str, prepare: Callable[[cases.Case, torch.device, str], Bench], precisions: tuple[str, ...] = (BF16,)
) -> Benchmark:
    """The benchmark of an operator as its spec describes it."""

    def work(label: str, precision: str) -> Sequence[Work]:
        return (cases.work(op, label, precision),)

    labels = tuple(cases.labels(op))
    return Benchmark(op, labels, functools.partial(cases.find, op), prepare, work, (op,), precisions)
