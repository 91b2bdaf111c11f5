"""Binding a call's arguments to a kernel's parameters: types, shapes and strides are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from msa_tiles.simulator.dtypes import converted, numpy_type
from msa_tiles.simulator.errors import ArgumentError
from msa_tiles.simulator.memory import GlobalMemory
from msa_tiles.simulator.program import Program

_VIEWED = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8}


def bind(function: Any, arguments: tuple[Any, ...], program: Program) -> tuple[dict[Any, Any], dict[int, GlobalMemory]]:
    """Values of the scalar parameters and of the symbolic dims and strides; tensors by buffer key.

    Raises ArgumentError.
    """
    parameters = list(function.params)
    if len(arguments) != len(parameters):
        raise ArgumentError(f"{len(arguments)} arguments came, wanted {len(parameters)}")
    values: dict[Any, Any] = {}
    tensors: dict[int, GlobalMemory] = {}
    bound: list[tuple[Any, torch.Tensor]] = []
    for parameter, argument in zip(parameters, arguments, strict=True):
        if parameter not in function.buffer_map:
            values[parameter] = _scalar(parameter, argument)
            continue
        buffer = function.buffer_map[parameter]
        info = program.declare(buffer, "global", ())
        tensors[info.key] = _tensor(info.name, argument, info.dtype, len(buffer.shape))
        bound.append((buffer, argument))
    # The symbols first, wherever they stand alone; then what is computed from them.
    for buffer, tensor in bound:
        for expression, value, _ in _extents(buffer, tensor):
            if type(expression).__name__ == "Var":
                values.setdefault(expression, converted(value, numpy_type(expression.dtype)))
    for buffer, tensor in bound:
        for expression, value, is_free in _extents(buffer, tensor):
            if is_free:
                continue
            held = converted(value, numpy_type(expression.dtype))
            if held != value:
                # Compiled kernels read it so and say nothing.
                cut = f"{expression} is {value}, of which {expression.dtype} holds {held}"
                tensors[program.buffer(buffer).key].cut = cut
                continue
            wanted = _evaluate(expression, values)
            if wanted != value:
                raise ArgumentError(
                    f"{buffer.name}: {expression} is {value} in a tensor {_layout(tensor)}, not {wanted}"
                )
    return values, tensors


def _extents(buffer: Any, tensor: torch.Tensor) -> list[tuple[Any, int, bool]]:
    """Declared extents and strides, the tensor's, and whether it is free: the stride of a dimension without a step."""
    found = [(expression, extent, False) for expression, extent in zip(buffer.shape, tensor.shape, strict=True)]
    if buffer.strides:
        steps = zip(buffer.strides, tensor.stride(), tensor.shape, strict=True)
        found += [(expression, stride, extent <= 1 or not tensor.numel()) for expression, stride, extent in steps]
    return found


def _scalar(parameter: Any, argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) or not isinstance(argument, bool | int | float | np.generic):
        raise ArgumentError(f"{parameter.name}: {type(argument).__name__} came, wanted a number")
    dtype = numpy_type(parameter.dtype)
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= int(argument) <= np.iinfo(dtype).max:
        raise ArgumentError(f"{parameter.name}: {argument} does not fit {dtype}")
    return converted(argument, dtype)


def _tensor(name: str, argument: Any, dtype: np.dtype[Any], rank: int) -> GlobalMemory:
    if not isinstance(argument, torch.Tensor) or argument.device.type != "cpu":
        raise ArgumentError(f"{name}: wanted a CPU tensor")
    if str(argument.dtype) != f"torch.{dtype.name}" or argument.dim() != rank:
        raise ArgumentError(
            f"{name}: {argument.dtype} of rank {argument.dim()} came, wanted {dtype.name} of rank {rank}"
        )
    if argument.dtype in _VIEWED:
        # numpy has no such type of its own; the view keeps the strides and shares the memory.
        array = argument.detach().view(_VIEWED[argument.dtype]).numpy().view(dtype)
    else:
        array = argument.detach().numpy()
    return GlobalMemory(name, array, argument.data_ptr())


def _evaluate(expression: Any, values: dict[Any, Any]) -> int:
    from msa_tiles.simulator.expressions import Expressions
    from msa_tiles.simulator.frame import Frame

    program = Program()
    closure = Expressions(program)(expression)
    frame = Frame.__new__(Frame)
    frame.variables = [values.get(var) for var in program.variables]
    frame.mask = None
    return int(closure(frame))


def _layout(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} with strides {tensor.stride()}"
