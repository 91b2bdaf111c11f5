"""Registration with torch.library: every operator is a functional one and a mutating twin for the caller's buffers.

One that only ever writes into the caller's tensors has the twin alone.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _get_current_dispatch_mode

from msa_tiles.call import backends
from msa_tiles.call.workspace import check_alignment
from msa_tiles.library.layout import Call, Layout
from msa_tiles.library.overlap import refuse_overlaps
from msa_tiles.scoped import held

NAMESPACE = "msa_tiles"


@dataclass(eq=False)
class Operator(Generic[Call]):
    """``functional(call)`` returns fresh outputs; ``mutating(call, *outputs)`` returns nothing.

    torch's dispatcher takes longer on the host than the kernels of a decode step on the GPU. A call that nobody traces
    or transforms goes past it; one whose gradients are recorded, through `differentiable`. Besides, the dispatcher's
    first call of an operator imports torch._dynamo, which takes a second or two.
    """

    name: str
    layout: Layout[Call]
    allocate: Callable[[Call], tuple[Tensor, ...]]
    write: Callable[..., None]
    buffers: tuple[str, ...]  # names of what the caller may give to be written
    registered_functional: Any
    registered_mutating: Any
    differentiable: type[torch.autograd.Function] | None = None  # see `msa_tiles.library.autograd.register`

    def compute(self, call: Call) -> Any:
        """Fresh outputs, for whom nobody records gradients."""
        results = self.allocate(call)
        self.write(call, *results)
        return results if len(results) > 1 else results[0]

    def functional(self, call: Call) -> Any:
        arguments = self.layout.flatten(call)
        if plain(arguments):
            return self.compute(call)
        if self.differentiable is not None and untraced() and ordinary(arguments):
            return self.differentiable.apply(*arguments)
        _refuse_gradients(self.name, arguments)
        results = self.registered_functional(*arguments)
        _refuse_tangents(self.name, arguments, results if isinstance(results, tuple) else (results,))
        return results

    def mutating(self, call: Call, *outputs: Tensor | None) -> None:
        arguments = self.layout.flatten(call)
        if plain((*arguments, *outputs)):
            refuse_overlaps(self.layout.names, arguments, self.buffers, outputs)
            self.write(call, *outputs)
            written(outputs)
        else:
            _refuse_tangents(self.name, arguments, outputs)
            self.registered_mutating(*arguments, *outputs)


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
        return not torch.compiler.is_compiling() and _rehearsed.get()
    recording = torch.is_grad_enabled()
    for value in arguments:
        if not isinstance(value, Tensor):
            continue
        if type(value) not in _ORDINARY or value.is_meta or (recording and value.requires_grad):
            return False
    return True


def ordinary(arguments: Sequence[Any]) -> bool:
    """Are all tensors among these torch's own, with memory?"""
    tensors = (value for value in arguments if isinstance(value, Tensor))
    return all(type(value) in _ORDINARY and not value.is_meta for value in tensors)


_ORDINARY = (Tensor, torch.nn.Parameter)
_rehearsed: contextvars.ContextVar[bool] = contextvars.ContextVar("rehearsed", default=False)


def rehearsing() -> AbstractContextManager[None]:
    """Calls on fake tensors go the way of eager ones, past the dispatcher. The reference, which reads values, rests."""
    return held(_rehearsed, True)


def _refuse_gradients(name: str, arguments: Sequence[Any]) -> None:
    """Transforms that take gradients record them for a second derivative, which no operator has.

    Ids are constants for them, too, and torch yet wants a rule for the operator that finds them.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return
    if any(map(is_gradtrackingtensor, unbatched(arguments))):
        raise RuntimeError(f"{name} does not run under torch.func.grad or vjp; torch.autograd (backward) takes it")


def _refuse_tangents(name: str, arguments: Sequence[Any], results: Sequence[Tensor | None]) -> None:
    """Operators have no derivative in forward mode, and torch would take theirs for 0 without a word.

    Ids are constants in any mode: an operator that returns nothing else may be called.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if not any(result is not None and result.is_floating_point() for result in results):
        return
    if any(forward_ad.unpack_dual(value).tangent is not None for value in unbatched(arguments)):
        raise RuntimeError(f"{name} has no derivative in forward mode (torch.func.jvp), only in backward")


def unbatched(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among these, out of what torch.vmap wraps them in."""
    for value in arguments:
        while isinstance(value, Tensor) and is_batchedtensor(value):
            value = get_unwrapped(value)
        if isinstance(value, Tensor):
            yield value


def define(
    name: str,
    kind: type[Call],
    outputs: tuple[str, ...],
    *,
    allocate: Callable[[Call], tuple[Tensor, ...]],
    reference: Callable[..., None],
    kernels: Callable[..., None],
    scratch: str | None = None,
) -> Operator[Call]:
    """Register ``msa_tiles::<name>`` and ``msa_tiles::<name>_out`` for calls of a ``kind``, a NamedTuple.

    A call says its ``device`` and ``backend``. ``allocate(call)`` makes uninitialised outputs from shapes alone and is
    therefore the fake kernel too; ``reference(call, *outputs)`` and ``kernels(call, *outputs)`` fill them, each where
    the call runs on it. ``scratch`` names an optional tensor that only the twin takes, behind the outputs, and may
    overwrite.
    """
    layout = Layout(kind)
    write = _writer(reference, kernels, len(outputs), scratch)

    written_to = [f"Tensor({chr(ord('a') + index)}!) {output}" for index, output in enumerate(outputs)]
    if scratch is not None:
        written_to.append(f"Tensor(z!)? {scratch}")
    buffers = (*outputs, scratch) if scratch is not None else tuple(outputs)
    mutating = _mutating(f"{name}_out", layout, buffers, written_to, write)
    operator = Operator(f"{NAMESPACE}::{name}", layout, allocate, write, buffers, None, mutating)

    def fake(*arguments: Any) -> Any:
        results = allocate(layout.unflatten(arguments))
        return results if len(results) > 1 else results[0]

    def compute(*arguments: Any) -> Any:
        return operator.compute(layout.unflatten(arguments))

    returns = ", ".join(["Tensor"] * len(outputs))
    operator.registered_functional = torch.library.custom_op(
        f"{NAMESPACE}::{name}", compute, mutates_args=(), schema=f"({layout.schema}) -> ({returns})"
    )
    operator.registered_functional.register_fake(fake)

    def refuse(*arguments: Any) -> NoReturn:
        wanted = "sparse_attention, dense_attention, index_kl and msa_attention are"
        raise RuntimeError(f"{operator.name} is not differentiable; {wanted}")

    # Until `msa_tiles.library.autograd.register` gives it a gradient.
    operator.registered_functional.register_autograd(refuse)
    return operator


def define_in_place(
    name: str,
    kind: type[Call],
    buffers: tuple[str, ...],
    *,
    optional: tuple[str, ...] = (),
    reference: Callable[..., None],
    kernels: Callable[..., None],
) -> Operator[Call]:
    """Register ``msa_tiles::<name>``, which returns nothing and writes parts of these buffers of the caller.

    The ``optional`` ones may be None. `Operator.functional` is not there.
    """
    layout = Layout(kind)
    write = _writer(reference, kernels, len(buffers), None)
    marks = ("?" if buffer in optional else "" for buffer in buffers)
    written_to = [f"Tensor({chr(ord('a') + i)}!){mark} {buffers[i]}" for i, mark in enumerate(marks)]
    mutating = _mutating(name, layout, buffers, written_to, write)
    return Operator(f"{NAMESPACE}::{name}", layout, _nothing, write, buffers, None, mutating)


def _nothing(call: Any) -> tuple[Tensor, ...]:
    raise TypeError(f"{type(call).__name__} is of an operator that writes into the caller's tensors alone")


def _writer(
    reference: Callable[..., None], kernels: Callable[..., None], outputs: int, scratch: str | None
) -> Callable[..., None]:
    """What fills the results of a call where it runs: on the reference or on kernels."""

    def write(call: Any, *results: Tensor | None) -> None:
        if scratch is not None and len(results) > outputs and (given := results[-1]) is not None:
            check_alignment(scratch, given)
        fill = kernels
        if backends.runs_reference(call.backend, call.device):
            if _rehearsed.get():
                return
            fill = reference
        device = call.device.type
        if torch.is_autocast_enabled(device):
            # It would recast the steps inside an operator, and their accumulators with them.
            with torch.autocast(device, enabled=False):
                fill(call, *results)
        else:
            fill(call, *results)

    return write


def _mutating(
    name: str, layout: Layout[Any], buffers: tuple[str, ...], written_to: Sequence[str], write: Callable[..., None]
) -> Any:
    """The registered operator that writes into the caller's buffers."""

    def overwrite(*arguments: Any) -> None:
        size = len(layout.fields)
        write(layout.unflatten(arguments[:size]), *arguments[size:])

    def fake_overwrite(*arguments: Any) -> None:
        return None

    mutating = torch.library.custom_op(
        f"{NAMESPACE}::{name}",
        overwrite,
        mutates_args=buffers,
        schema=f"({layout.schema}, {', '.join(written_to)}) -> ()",
    )
    mutating.register_fake(fake_overwrite)
    return mutating
