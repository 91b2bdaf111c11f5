"""What all layers of a forward share: the table of pages, lengths in int32, and where queries sit.

SGLang hands each layer the same tensors, and a layer's step would make the same things of them: three launches beside
the three of a decode step. Here they are made by the first layer of a forward and read by the others.

A forward begins where SGLang's backend prepares its metadata, which a hook tells. Nothing is shared before that was
heard once, nor between a forward that a graph records and one that runs, nor where a layer comes again: then it is
another forward whatever the hook says.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import Tensor

BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend"
PREPARES = ("init_forward_metadata_out_graph", "init_forward_metadata_in_graph")
_REGISTRY = "sglang.srt.plugins.hook_registry"
_Made = TypeVar("_Made")


class Shared(Generic[_Made]):
    """What was made in the forward that runs, if it can be told which one that is."""

    def __init__(self) -> None:
        self._heard = False
        self.forget()

    def forget(self) -> None:
        """Another forward begins."""
        self._made: _Made | None = None
        self._of: tuple[Tensor, ...] = ()
        self._key: Hashable = None
        self._layers: set[int] = set()

    def begin(self, *given: Any, **named: Any) -> None:
        """The hook: whatever SGLang prepares, a forward begins."""
        self._heard = True
        self.forget()

    def of(self, layer: Tensor, tensors: tuple[Tensor, ...], key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What ``make`` makes of ``tensors``, made by this layer, whose keys are ``layer``, or by one before it."""
        place = layer.data_ptr()
        same = len(tensors) == len(self._of) and all(one is other for one, other in zip(tensors, self._of, strict=True))
        if self._made is None or not self._heard or not same or key != self._key or place in self._layers:
            self.forget()
            # Kept, so that no other tensor is taken for one of them.
            self._made, self._of, self._key = make(), tensors, key
        self._layers.add(place)
        return self._made


def listen(log: logging.Logger, begin: Callable[..., None]) -> None:
    """Have SGLang's backend tell when it prepares a forward. Its module is loaded by whoever calls a layer."""
    module, registry = sys.modules.get(BACKEND), sys.modules.get(_REGISTRY)
    if module is None or registry is None:
        return
    try:
        for name in PREPARES:
            target = f"{BACKEND}.MiniMaxSparseAttnBackend.{name}"
            registry.HookRegistry.register(target, begin, registry.HookType.BEFORE)
        registry.HookRegistry.apply_hooks()
    except Exception:
        log.warning("msa_tiles cannot tell SGLang's forwards apart: each layer makes its own tables", exc_info=True)
