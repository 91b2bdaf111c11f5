"""Registration with torch.library: every operator is a functional one and a mutating twin for the caller's buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _get_current_dispatch_mode

NAMESPACE = "msa_tiles"


@dataclass(frozen=True)
class OperatorPair:
    """``functional(*arguments)`` returns fresh outputs; ``mutating(*arguments, *outputs)`` returns nothing.

    torch's dispatcher takes longer on the host than the kernels of a decode step on the GPU. A call that nobody traces,
    transforms or differentiates goes past it.
    """

    name: str
    registered_functional: Any
    registered_mutating: Any
    compute: Callable[..., Any]
    write: Callable[..., None]
    mutated: int

    def functional(self, *arguments: Any) -> Any:
        if plain(arguments):
            return self.compute(*arguments)
        results = self.registered_functional(*arguments)
        _refuse_tangents(self.name, arguments, results if isinstance(results, tuple) else (results,))
        return results

    def mutating(self, *arguments: Any) -> None:
        if plain(arguments):
            self.write(*arguments)
            written(arguments[-self.mutated :])
        else:
            _refuse_tangents(self.name, arguments[: -self.mutated], arguments[-self.mutated :])
            self.registered_mutating(*arguments)


def written(buffers: Sequence[Tensor | None]) -> None:
    """Tell autograd that a call past the dispatcher wrote these: what it saved of them is stale."""
    increment_version([buffer for buffer in buffers if buffer is not None])


def untraced() -> bool:
    """Does nobody trace or transform what is called now?"""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    if forward_ad._current_level >= 0 or torch._C._is_tracing():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def plain(arguments: Sequence[Any]) -> bool:
    """Is this an eager call on ordinary tensors, without gradients?"""
    if not untraced():
        return False
    recording = torch.is_grad_enabled()
    for value in arguments:
        if not isinstance(value, Tensor):
            continue
        if type(value) not in _ORDINARY or value.is_meta or (recording and value.requires_grad):
            return False
    return True


_ORDINARY = (Tensor, torch.nn.Parameter)


def _refuse_tangents(name: str, arguments: Sequence[Any], results: Sequence[Tensor | None]) -> None:
    """Operators have no derivative in forward mode, and torch would take theirs for 0 without a word.

    Ids are constants in any mode: an operator that returns nothing else may be called.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if not any(result is not None and result.is_floating_point() for result in results):
        return
    for value in arguments:
        while isinstance(value, Tensor) and is_batchedtensor(value):
            value = get_unwrapped(value)
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(f"{name} has no derivative in forward mode (torch.func.jvp), only in backward")


def _without_autocast(write: Callable[..., None]) -> Callable[..., None]:
    """``write`` with autocast off: it would recast the steps inside an operator, and their accumulators with them."""

    def plainly(*args: Any) -> None:
        device = args[0].device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                write(*args)
        else:
            write(*args)

    return plainly


def define(
    name: str,
    arguments: str,
    outputs: tuple[str, ...],
    allocate: Callable[..., tuple[Tensor, ...]],
    write: Callable[..., None],
    scratch: str | None = None,
) -> OperatorPair:
    """Register ``msa_tiles::<name>`` and ``msa_tiles::<name>_out``.

    ``arguments`` is the schema of the arguments that both take. ``allocate(*arguments)`` makes uninitialised outputs
    from shapes alone and is therefore the fake kernel too; ``write(*arguments, *outputs)`` fills them. ``scratch``
    names an optional tensor that only the twin takes, behind the outputs, and may overwrite.
    """
    write = _without_autocast(write)

    def compute(*args: Any) -> Any:
        results = allocate(*args)
        write(*args, *results)
        return results if len(results) > 1 else results[0]

    def fake(*args: Any) -> Any:
        results = allocate(*args)
        return results if len(results) > 1 else results[0]

    def fake_write(*args: Any) -> None:
        return None

    returns = ", ".join(["Tensor"] * len(outputs))
    functional = torch.library.custom_op(
        f"{NAMESPACE}::{name}", compute, mutates_args=(), schema=f"({arguments}) -> ({returns})"
    )
    functional.register_fake(fake)

    mutated = [f"Tensor({chr(ord('a') + index)}!) {output}" for index, output in enumerate(outputs)]
    if scratch is not None:
        mutated.append(f"Tensor(z!)? {scratch}")
    mutating = torch.library.custom_op(
        f"{NAMESPACE}::{name}_out",
        write,
        mutates_args=(*outputs, scratch) if scratch is not None else outputs,
        schema=f"({arguments}, {', '.join(mutated)}) -> ()",
    )
    mutating.register_fake(fake_write)
    return OperatorPair(f"{NAMESPACE}::{name}", functional, mutating, compute, write, len(mutated))
