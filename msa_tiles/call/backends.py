"""Which code runs a call: kernels of a DSL, or the reference."""

from __future__ import annotations

from typing import Any

import torch

from msa_tiles.call import validate

BACKENDS = ("auto", "tilelang", "cutedsl", "reference")


def check(value: Any, device: torch.device) -> None:
    """A known backend that the device can have."""
    validate.one_of("backend", value, BACKENDS)
    if device.type != "cuda" and value not in ("auto", "reference"):
        wanted = "'auto' or 'reference', kernels need CUDA tensors"
        validate.refuse("backend", f"{value!r} for tensors on {device}", wanted)


def runs_reference(backend: str, device: torch.device) -> bool:
    """CPU tensors run on the reference; CUDA tensors only when it is asked for."""
    return backend == "reference" or device.type != "cuda"
