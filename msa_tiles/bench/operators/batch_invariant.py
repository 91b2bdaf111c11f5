"""What `batch_invariant=True` costs attention and decode: against the same call without it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from msa_tiles.bench import cases, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender
from msa_tiles.bench.operators import decode, decode_parts, sparse_attention
from msa_tiles.spec.work import Work

ATTENTION, DECODE = "batch_invariant_attention", "batch_invariant_decode"
ATTENTION_LABELS = ("prefill_4k_u", "prefill_32k_u", "prefill_32k_s", "chunk8k_1m_u")
DECODE_LABELS = decode_parts.LABELS
Prepare = Callable[..., Bench]


def prepare(of: Prepare, case: Any, device: torch.device, precision: str) -> Bench:
    """The bench of an operator with the flag; its one peer is that without, by whatever DSL serves it."""
    plain, ours = (of(case, device, precision, batch_invariant=flag) for flag in (False, True))
    without = Contender("without", lambda inputs: plain.ours("auto", inputs), plain.check)
    return dataclasses.replace(ours, peers=[without])


def find(label: str) -> cases.Case:
    return dataclasses.replace(cases.find("sparse_attention", label), op=ATTENTION)


def attention_work(label: str, precision: str) -> Sequence[Work]:
    return (cases.work("sparse_attention", label, precision),)


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        ATTENTION,
        ATTENTION_LABELS,
        find,
        functools.partial(prepare, sparse_attention.prepare),
        attention_work,
        ("sparse_attention",),
        precisions.ATTENTION,
    ),
    Benchmark(
        DECODE,
        DECODE_LABELS,
        functools.partial(decode.find, op=DECODE),
        functools.partial(prepare, decode_parts.prepare_attention),
        decode_parts.attention_work,
        ("sparse_decode",),
        precisions.ATTENTION,
    ),
)
