"""Calls seen before: what validation and dispatch found for the same shapes, strides, dtypes and scalars.

Checking every argument of a decode step takes longer than launching its kernels, and a server repeats the same call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 16
_ORDINARY = (Tensor, torch.nn.Parameter)
_Found = TypeVar("_Found")


class Remembered(Generic[_Found]):
    """What was found for a call's signature; forgets everything once it holds ``most`` calls."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._found: dict[Hashable, _Found] = {}

    def get(self, signature: Hashable | None) -> _Found | None:
        return None if signature is None else self._found.get(signature)

    def keep(self, signature: Hashable | None, found: _Found) -> None:
        if signature is None:
            return
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[signature] = found


def signature(tensors: Sequence[Tensor | None], scalars: tuple[Hashable, ...]) -> Hashable | None:
    """All that validation and dispatch look at on the host; None for a call that holds something unusual."""
    marks: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            marks.append(None)
        elif type(tensor) in _ORDINARY:
            aligned = tensor.data_ptr() % _ALIGNMENT == 0
            marks.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned))
        else:
            return None
    # 1 and True are equal, and only one of them is a number of blocks.
    made = (tuple(marks), scalars, tuple(map(type, scalars)))
    try:
        hash(made)
    except TypeError:
        return None
    return made
