"""What the two compilers share: places of variables and buffers, and the types of closures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msa_tiles.simulator.dtypes import numpy_type
from msa_tiles.simulator.errors import UnsupportedError
from msa_tiles.simulator.frame import Frame

Closure = Callable[[Frame], Any]


@dataclass
class BufferInfo:
    """A buffer that a kernel allocates or gets as an argument."""

    key: int
    name: str
    scope: str
    shape: tuple[int, ...]  # of allocated buffers
    dtype: Any
    counts: tuple[int, ...] = ()  # arrival counts of an mbarrier buffer


@dataclass
class Program:
    """Numbering of a PrimFunc's variables and buffers."""

    variables: dict[Any, int] = field(default_factory=dict)
    buffers: dict[Any, BufferInfo] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def variable(self, var: Any) -> int:
        """The place of a variable in `Frame.variables`."""
        if var not in self.variables:
            self.variables[var] = len(self.names)
            self.names.append(str(var.name))
        return self.variables[var]

    def declare(self, buffer: Any, scope: str, shape: tuple[int, ...], counts: tuple[int, ...] = ()) -> BufferInfo:
        """Number a buffer."""
        dtype = None if scope == "shared.barrier" else numpy_type(buffer.dtype)
        info = BufferInfo(len(self.buffers), str(buffer.name), scope, shape, dtype, counts)
        self.buffers[buffer] = info
        return info

    def buffer(self, buffer: Any) -> BufferInfo:
        """The buffer, or the argument that it is a view of: of the same shape, described by other strides.

        Raises UnsupportedError for a buffer that is neither.
        """
        for known, info in self.buffers.items():
            if buffer.same_as(known) or _is_view(buffer, known, info):
                return info
        raise UnsupportedError(f"buffer {buffer.name} is neither an argument nor allocated")


def _is_view(buffer: Any, known: Any, info: BufferInfo) -> bool:
    if info.scope != "global" or not buffer.data.same_as(known.data) or buffer.dtype != known.dtype:
        return False
    return len(buffer.shape) == len(known.shape) and all(map(_same, buffer.shape, known.shape))


def _same(extent: Any, other: Any) -> bool:
    return bool(extent.same_as(other)) or (type(extent).__name__ == "IntImm" and extent == other)


def kind_of(node: Any) -> str:
    """The class of a TIR node, or the name of the intrinsic of a call."""
    kind = type(node).__name__
    return str(node.op.name) if kind == "Call" else kind


def reads_memory(node: Any) -> bool:
    """Whether evaluating an expression can go wrong in lanes that must not evaluate it, or has effects."""
    from tilelang import tvm

    found = False

    def visit(part: Any) -> None:
        nonlocal found
        found = found or type(part).__name__ in ("BufferLoad", "Call", "Div", "FloorDiv", "Mod", "FloorMod")

    tvm.tirx.stmt_functor.post_order_visit(node, visit)
    return found
