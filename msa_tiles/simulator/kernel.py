"""A PrimFunc, taken apart: grid, allocations and body; and running it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from msa_tiles.simulator import arguments, roles
from msa_tiles.simulator.barriers import Wait
from msa_tiles.simulator.cta import Cta
from msa_tiles.simulator.errors import ArgumentError, UnsupportedError
from msa_tiles.simulator.expressions import Expressions
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.program import Program
from msa_tiles.simulator.scheduler import Scheduler
from msa_tiles.simulator.statements import Statements

THREAD_BINDING = 4


class Kernel:
    """A compiled kernel with its arguments."""

    def __init__(self, function: Any, given: tuple[Any, ...]) -> None:
        self.program = Program()
        values, self.tensors = arguments.bind(function, given, self.program)
        self._grid: list[tuple[str, Any, Any]] = []
        self._thread_indices: list[Any] = []
        block = self._outline(function.body)
        annotations = {str(key): value for key, value in block.annotations.items()}
        self.threads = self._launch(annotations.pop("tl.launch_threads", None))
        counts = {var: tuple(int(n) for n in sizes) for var, sizes in annotations.pop("barrier_init", {}).items()}
        if annotations:
            raise UnsupportedError(f"annotations of the kernel: {', '.join(annotations)}")
        for buffer in block.alloc_buffers:
            self._allocate(buffer, counts)
        compiler = Statements(self.program)
        self._prologue = [compiler(node) for node in self._thread_indices]
        self._body = compiler(block.body)
        self._roles = roles.partition(function.body, self.threads)
        self._extents = [Expressions(self.program)(extent) for _, _, extent in self._grid]
        self._blocks = [self.program.variable(var) for _, var, _ in self._grid]
        self._values: list[Any] = [None] * len(self.program.names)
        for var, value in values.items():
            if var in self.program.variables:
                self._values[self.program.variables[var]] = value

    def await_tensors(self, names: Collection[str]) -> None:
        """The kernel before works on these tensors, until pdl_sync returns.

        Raises ArgumentError.
        """
        known = {memory.name: memory for memory in self.tensors.values()}
        for name in names:
            if name not in known:
                raise ArgumentError(f"no tensor {name} to wait for; there are {', '.join(known)}")
            known[name].awaited = True

    def run(self, seed: int, late: bool) -> None:
        """Run the whole grid."""
        chance = random.Random(seed)
        frame = Frame.__new__(Frame)
        frame.variables, frame.mask = self._values, None
        indices = list(itertools.product(*(range(int(extent(frame))) for extent in self._extents)))
        chance.shuffle(indices)
        with np.errstate(all="ignore"):
            Scheduler(chance).run(self._cta(index, chance, late) for index in indices)

    def _cta(
        self, index: tuple[int, ...], chance: random.Random, late: bool
    ) -> tuple[Cta, list[tuple[Frame, Iterator[Wait | None]]]]:
        cta = Cta(index, self.threads, self.program.buffers, self.tensors, chance, late)
        variables = list(self._values)
        for place, value in zip(self._blocks, index, strict=True):
            variables[place] = value
        frames = [cta.role(tid, variables) for tid in self._roles]
        return cta, [(frame, self._start(frame)) for frame in frames]

    def _start(self, frame: Frame) -> Iterator[Wait | None]:
        for code in self._prologue:
            code.run(frame)
        yield from self._body.start(frame)

    def _outline(self, node: Any) -> Any:
        """Walk down to the block of the kernel, noting grid axes and thread indices on the way."""
        kind = type(node).__name__
        if kind == "SBlockRealize":
            block = node.block
            if str(block.name_hint) != "root":
                return block
            if block.alloc_buffers:
                raise UnsupportedError("allocations outside the kernel")
            return self._outline(block.body)
        if kind == "For" and int(node.kind) == THREAD_BINDING:
            tag = str(node.thread_binding.thread_tag)
            if not tag.startswith("blockIdx."):
                raise UnsupportedError(f"loop bound to {tag}")
            self._grid.append((tag, node.loop_var, node.extent))
            return self._outline(node.body)
        if kind == "SeqStmt":
            *bindings, last = node.seq
            if any(type(part).__name__ != "Bind" for part in bindings):
                raise UnsupportedError("statements outside the kernel")
            self._thread_indices += bindings
            return self._outline(last)
        raise UnsupportedError(f"{kind} around the kernel")

    def _launch(self, threads: Any) -> int:
        sizes = [] if threads is None else [int(n) for n in threads]
        if not sizes or any(n != 1 for n in sizes[1:]) or sizes[0] % WARP:
            raise UnsupportedError(f"launch with {sizes} threads: wanted whole warps along x")
        return sizes[0]

    def _allocate(self, buffer: Any, counts: dict[Any, tuple[int, ...]]) -> None:
        scope = str(buffer.scope())
        if any(type(n).__name__ != "IntImm" for n in buffer.shape):
            raise UnsupportedError(f"{buffer.name}: allocated with a shape that is no literal")
        shape = tuple(int(n) for n in buffer.shape)
        arrivals: tuple[int, ...] = ()
        if scope == "shared.barrier":
            arrivals = next((sizes for var, sizes in counts.items() if var.same_as(buffer.data)), ())
            if len(arrivals) != shape[0] or len(shape) != 1:
                raise UnsupportedError(f"{buffer.name}: {len(arrivals)} arrival counts for barriers {shape}")
        self.program.declare(buffer, scope, shape, arrivals)


def simulate(function: Any, *given: Any, seed: int = 0, late: bool = True, awaited: Collection[str] = ()) -> None:
    """Run a TileLang PrimFunc on the CPU; its output tensors are written in place.

    ``given`` are the kernel's arguments: CPU tensors of any strides and numbers. ``seed`` shuffles the order in which
    CTAs, warps and asynchronous work run. Without ``late``, asynchronous work is done at once, which hides missing
    waits but tells a wrong wait from a wrong formula. ``awaited`` names the tensors that the kernel before writes or
    still reads where this one is launched while that one ends: to touch one of them before pdl_sync is an error.

    Raises SimulationError, see `errors`.
    """
    kernel = Kernel(function, given)
    kernel.await_tensors(awaited)
    kernel.run(seed, late)


__all__ = ["Kernel", "simulate"]
