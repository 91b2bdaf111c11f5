"""Small constants on a device, made once and kept for the life of the process.

A captured graph reads what it was captured with, so a constant is never freed or overwritten. Making one launches a
kernel and copies nothing from the host, which would wait for the device. While a graph is being captured nothing is
kept: memory that is taken then belongs to the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS: dict[tuple[torch.device, int], Tensor] = {}
_OUTGROWN: list[Tensor] = []
_SCALARS: dict[tuple[torch.device, float], Tensor] = {}
_FEWEST = 1024


def multiples(step: int, count: int, device: torch.device) -> Tensor:
    """0, step, 2 * step, … : int32 [count], where requests of ``step`` queries each begin."""
    key = (device, step)
    kept = _STEPS.get(key)
    if kept is None or kept.shape[0] < count:
        if capturing(device):
            return torch.arange(0, count * step, step, dtype=torch.int32, device=device)
        if kept is not None:
            _OUTGROWN.append(kept)
        held = max(_FEWEST, 1 << (count - 1).bit_length())
        kept = _STEPS[key] = torch.arange(0, held * step, step, dtype=torch.int32, device=device)
    return kept[:count]


def scalar(value: float, device: torch.device) -> Tensor:
    """The number as float32 []."""
    key = (device, value)
    kept = _SCALARS.get(key)
    if kept is None:
        kept = torch.full((), value, dtype=torch.float32, device=device)
        if not capturing(device):
            _SCALARS[key] = kept
    return kept


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
