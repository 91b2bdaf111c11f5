"""What differentiable operators share: when gradients are recorded, autocast, deterministic mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.library import registration

# What autocast casts; float64 stays float64, as in torch.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def records(*tensors: Tensor) -> bool:
    """Whether autograd will want gradients for one of these tensors."""
    if not torch.is_grad_enabled():
        return False
    # What torch.vmap wraps tensors in requires no gradient, whatever they do.
    plain = tensors if torch.compiler.is_compiling() else registration.unbatched(tensors)
    return any(tensor.requires_grad for tensor in plain)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where autocast is on for their device; anything else as it came."""
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CAST else value for value in tensors)


def deterministic(value: bool | None) -> bool:
    """The argument of that name: None follows ``torch.use_deterministic_algorithms``."""
    if value is None:
        return torch.are_deterministic_algorithms_enabled()
    validate.boolean("deterministic", value)
    return value


def unit_last_stride(gradient: Tensor) -> Tensor:
    """A gradient as kernels read it; autograd hands out expanded and transposed ones too."""
    if gradient.shape[-1] > 1 and gradient.stride(-1) != 1:
        return gradient.contiguous()
    return gradient


def no_buffers(**buffers: Any) -> None:
    """Refuse a caller's buffers in a call that autograd records: what is written into them has no gradient."""
    for name, value in buffers.items():
        if isinstance(value, Tensor):
            validate.refuse(name, "a buffer where gradients are recorded", "None, or a call under torch.no_grad()")


def register(
    operator: registration.Operator[Any],
    backward: Callable[..., Sequence[Tensor | None]],
    *,
    constants: tuple[int, ...] = (),
    keeps_inputs: bool = True,
) -> None:
    """Give an operator's functional form a gradient: ``backward(call, outputs, *gradients)``.

    ``backward`` answers for the leading tensors of a call; whatever follows them gets no gradient. The outputs numbered
    by ``constants`` have none either. Without ``keeps_inputs`` the call comes back without its tensors. A graph of the
    gradients (``create_graph=True``) is refused: without a formula of their own they would count as constants in it.
    """
    layout = operator.layout

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[number] for number in constants))
        tensors = [value if isinstance(value, Tensor) and keeps_inputs else None for value in inputs]
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*tensors, *outputs)

    def full(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{operator.name} is differentiable once: it has no gradient under create_graph=True")
        # Asked for once: checkpointing unpacks no tensor twice.
        saved, size = ctx.saved_tensors, len(ctx.others)
        tensors, outputs = saved[:size], saved[size:]
        inputs = [other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True)]
        found = tuple(backward(layout.unflatten(inputs), outputs, *gradients))
        return found + (None,) * (size - len(found))

    operator.registered_functional.register_autograd(full, setup_context=keep)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = operator.compute(layout.unflatten(arguments))
            keep(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            return full(ctx, *gradients)

    operator.differentiable = Differentiable
