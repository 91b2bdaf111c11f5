"""Which code runs a call: kernels of a DSL, or the reference."""

from __future__ import annotations

import contextvars
from contextlib import AbstractContextManager
from typing import Any

import torch

from msa_tiles.call import validate
from msa_tiles.scoped import held

BACKENDS = ("auto", "tilelang", "cutedsl", "reference")


_rehearsed: contextvars.ContextVar[bool] = contextvars.ContextVar("rehearsed", default=False)


def rehearsing() -> AbstractContextManager[None]:
    """Tensors of any device are taken for CUDA tensors: for whoever asks what a call would do, and runs nothing."""
    return held(_rehearsed, True)


def rehearsed() -> bool:
    """Whether somebody asks what a call would do."""
    return not torch.compiler.is_compiling() and _rehearsed.get()  # Dynamo traces no context variable


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
