"""`--rehearse FILE`: GPU tests on a machine without a GPU, with the reference in the place of kernels.

Tensors that a test puts on a GPU lie on the CPU. A call of an operator first looks for its kernels as it would on the
card, and raises what it would raise there; then the reference computes it. So mistakes of tests show before a GPU is
at hand, and FILE holds the kernels that they need: `msa-tiles pack --target sm90 --points FILE` makes them beforehand.

What only a GPU has (graphs, streams, its memory) skips the test where it asks for it, and so does a test that takes
longer than LIMIT. A test of what kernels alone promise fails here, such as equal bits where other keys change. Kernels
of the backward pass and those that other processes launch are not noted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from msa_tiles import explain, ops
from msa_tiles.call import backends
from msa_tiles.runtime import NoKernelError, default_registry, dispatch, facts

CARD = "H200"
LIMIT = 60  # seconds of a test
_PRESENT = {
    "is_available": lambda: True,
    "get_device_capability": lambda device=None: (9, 0),
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "get_sync_debug_mode": lambda: 0,
    "set_sync_debug_mode": lambda mode: None,
    "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
}
_MISSING = (
    *("CUDAGraph", "Event", "Stream", "_sleep", "current_stream", "graph", "max_memory_allocated", "memory_allocated"),
    *("memory_stats", "reset_peak_memory_stats", "stream"),
)


def _moved(device: Any) -> Any:
    """Where a tensor lies in a rehearsal."""
    return "cpu" if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, _moved(device))


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"])
        return func(*[arg if isinstance(arg, torch.Tensor) else _moved(arg) for arg in args], **kwargs)


class Rehearsal:
    """Plugin; ``path`` is where the points go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: dict[str, dict[str, Any]] = {}
        self._inside = False
        for name, replacement in _PRESENT.items():
            setattr(torch.cuda, name, replacement)
        for name in _MISSING:
            setattr(torch.cuda, name, functools.partial(_missing, name))
        torch.Generator = _Generator  # type: ignore[misc]
        check = backends.check
        backends.check = lambda value, device: check(value if backends.rehearsed() else "auto", device)
        backends.runs_reference = lambda backend, device: backend == "reference" or not backends.rehearsed()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Calls are met wherever a module has taken an operator to."""
        operators = [getattr(ops, name) for name in ops.__all__]
        wrapped = {each: self._met(each) for each in operators if "backend" in inspect.signature(each).parameters}
        wrapped[ops.decode_workspace_bytes] = _as_on_the_card(ops.decode_workspace_bytes)
        for module in [each for each in sys.modules.values() if type(each) is types.ModuleType]:
            for name, value in list(vars(module).items()):
                if type(value) is types.FunctionType and value in wrapped:
                    setattr(module, name, wrapped[value])

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with _on_the_cpu():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        with _on_the_cpu():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        def late(signum: int, frame: Any) -> None:
            pytest.skip(f"longer than {LIMIT} s without a GPU")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(LIMIT)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps([self.points[key] for key in sorted(self.points)], indent=0) + "\n")

    def _met(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operator)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or kwargs.get("backend") == "reference":
                return operator(*args, **kwargs)
            self._inside = True
            try:
                with torch._C.DisableTorchFunction():
                    self._note(operator, args, kwargs)
                return operator(*args, **kwargs)
            finally:
                self._inside = False

        return call

    def _note(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> None:
        name = operator.__name__
        wrapper = getattr(ops, name)
        setattr(ops, name, operator)
        try:
            told = explain(operator, *args, **kwargs, device=CARD)
        finally:
            setattr(ops, name, wrapper)
        for kernel in told.kernels:
            if kernel.cell is not None:
                [cell] = [cell for cell in default_registry().cells if cell.id == kernel.cell]
                variant = dict(kernel.variant)
                point = {"op": cell.op, "dsl": cell.dsl, "precision": cell.precision, "variant": variant}
                self.points[json.dumps(point, sort_keys=True)] = point
                for found in dispatch._watching:
                    found.append(SimpleNamespace(cell=cell, variant=variant))  # type: ignore[arg-type]
        if not told.served:
            raise NoKernelError(str(told))


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    card = facts.card_facts(CARD)
    assert card is not None
    with facts.standing_for(card), _OnTheCpu():
        yield


def _as_on_the_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose answer would be another on the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with backends.rehearsing(backends.Rehearsal()):
            return function(*args, **kwargs)

    return call


def _missing(name: str, *args: Any, **kwargs: Any) -> None:
    pytest.skip(f"torch.cuda.{name} needs a GPU")
