"""Calls seen before: what validation and dispatch found for the same shapes, strides, dtypes and scalars.

Checking every argument of a decode step takes longer than launching its kernels, and a server repeats the same call.

An operator asks for the `signature` of a call first. Where something is remembered for it, the call has passed every
check before, and what was remembered launches the kernels on this call's tensors. Elsewhere the call goes its whole
way, and at its end the operator keeps what it prepared. So a signature holds all that validation and dispatch look at
on the host, and what is remembered holds no tensor of a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from msa_tiles import trees
from msa_tiles.library import registration

_ALIGNMENT = 16
_ORDINARY = (Tensor, torch.nn.Parameter)
_Found = TypeVar("_Found")
_EVERY: weakref.WeakSet[Remembered] = weakref.WeakSet()


class Remembered(Generic[_Found]):
    """What was found for a call's signature; forgets everything once it holds ``most`` calls."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._found: dict[Hashable, _Found] = {}
        self._epoch = trees.epoch()
        _EVERY.add(self)

    def get(self, signature: Hashable | None) -> _Found | None:
        if self._epoch != trees.epoch():  # other trees may have other kernels
            self.forget()
        return None if signature is None else self._found.get(signature)

    def keep(self, signature: Hashable | None, found: _Found | None) -> None:
        """Without a signature there is nothing to know the call by again, and nothing found is nothing to keep."""
        if signature is None or found is None or self._epoch != trees.epoch():
            return
        if len(self._found) >= self._most:
            self._found.clear()
        self._found[signature] = found

    def forget(self) -> None:
        self._found.clear()
        self._epoch = trees.epoch()


def forget_all() -> None:
    """For whoever puts other kernels in the place of those that were found."""
    for remembered in _EVERY:
        remembered.forget()


def signature(tensors: Sequence[Any], scalars: tuple[Hashable, ...]) -> Hashable | None:
    """All that validation and dispatch look at on the host.

    None for a call that is traced, transformed or differentiated, or that holds something unusual.
    """
    if not registration.untraced():
        return None
    recording = torch.is_grad_enabled()
    marks: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            marks.append(None)
        elif type(tensor) not in _ORDINARY or (recording and tensor.requires_grad):
            return None
        else:
            try:
                aligned = tensor.data_ptr() % _ALIGNMENT == 0
                marks += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned)
            except RuntimeError:  # a sparse tensor has neither an address nor strides
                return None
    try:
        hash(scalars)
    except TypeError:
        return None
    # 1 and True are equal, and only one of them is a number of blocks.
    return (*marks, *scalars, *map(type, scalars))
