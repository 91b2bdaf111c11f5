"""Which code runs a call: kernels of a DSL, or the reference."""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from msa_tiles.call import validate
from msa_tiles.scoped import held

BACKENDS = ("auto", "tilelang", "cutedsl", "reference")


@dataclass
class Rehearsal:
    """Of a call that is rehearsed: for how many launches the next one stands."""

    times: int = 1


_rehearsed: contextvars.ContextVar[Rehearsal | None] = contextvars.ContextVar("rehearsed", default=None)


def rehearsing(rehearsal: Rehearsal) -> AbstractContextManager[None]:
    """Tensors of any device are taken for CUDA tensors: for whoever asks what a call would do, and runs nothing."""
    return held(_rehearsed, rehearsal)


def rehearsed() -> bool:
    """Whether somebody asks what a call would do."""
    return not torch.compiler.is_compiling() and _rehearsed.get() is not None  # Dynamo traces no context variable


def turns(steps: range) -> Iterable[int]:
    """The steps of a loop over launches, whose first and last may differ from the others, and these in nothing that a
    rehearsal tells: it takes one for all.
    """
    return steps if len(steps) <= 3 or not rehearsed() else _shortened(steps)


def _shortened(steps: range) -> Iterator[int]:
    rehearsal, alike = _rehearsed.get(), len(steps) - 2
    assert rehearsal is not None
    yield steps[0]
    rehearsal.times *= alike
    yield steps[1]
    rehearsal.times //= alike
    yield steps[-1]


def has_kernels(device: torch.device) -> bool:
    """Whether calls of tensors on a device run on kernels, where none is named."""
    return device.type == "cuda" or rehearsed()


def check(value: Any, device: torch.device) -> None:
    """A known backend that the device can have."""
    validate.one_of("backend", value, BACKENDS)
    if not has_kernels(device) and value not in ("auto", "reference"):
        wanted = "'auto' or 'reference', kernels need CUDA tensors"
        validate.refuse("backend", f"{value!r} for tensors on {device}", wanted)


def runs_reference(backend: str, device: torch.device) -> bool:
    """CPU tensors run on the reference; CUDA tensors only when it is asked for."""
    return backend == "reference" or not has_kernels(device)
