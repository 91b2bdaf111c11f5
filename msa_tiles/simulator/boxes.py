"""Boxes of buffers, and their generic accesses by a whole frame: tile copies, fills and reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from msa_tiles.simulator.dtypes import converted, is_float
from msa_tiles.simulator.errors import OutOfBoundsError, UnsupportedError
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.memory import Fragment, GlobalMemory
from msa_tiles.simulator.shared import SharedMemory
from msa_tiles.simulator.tensor import LANES, READERS, TensorMemory

Memory = GlobalMemory | SharedMemory | Fragment | TensorMemory
# Rows of a 64-row register tile that one warp of a warpgroup owns.
WARP_ROWS = 16


@dataclass(frozen=True)
class Box:
    """A box of a buffer: first index and extent of every dimension."""

    memory: Memory
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The extents without those of 1."""
        return tuple(n for n in self.extent if n != 1)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index.

        Raises OutOfBoundsError when it leaves the buffer.
        """
        for dim, (first, n, extent) in enumerate(zip(self.start, self.extent, self.memory.shape, strict=True)):
            if first < 0 or first + n > extent:
                raise OutOfBoundsError(
                    f"{self.memory.name}: [{first}, {first + n}) in dimension {dim} of extent {extent}"
                )
        return tuple(slice(first, first + n) for first, n in zip(self.start, self.extent, strict=True))

    @property
    def places(self) -> np.ndarray:
        """Flat places of the elements of a box of shared memory."""
        assert isinstance(self.memory, SharedMemory)
        return self.memory.places[self.slices].reshape(-1)

    def overlap(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part inside the buffer, as an index of the buffer and as an index of the box."""
        inner, outer = [], []
        for first, n, extent in zip(self.start, self.extent, self.memory.shape, strict=True):
            low, high = min(max(first, 0), extent), min(max(first + n, 0), extent)
            inner.append(slice(low, high))
            outer.append(slice(low - first, high - first))
        return tuple(inner), tuple(outer)


def row_agents(frame: Frame, rows: int) -> np.ndarray | None:
    """The warp of every row of a warpgroup's register tile; None when the rows lie otherwise.

    Tiles of 64 rows are wgmma's. Where there is tensor memory, tiles of all its lanes are read from it.
    """
    if len(frame.warps) == READERS and rows == LANES and frame.cta.core is not None:
        return frame.warps[np.arange(rows) // WARP]
    if len(frame.warps) == 4 and rows == 4 * WARP_ROWS:
        return frame.warps[np.arange(rows) // WARP_ROWS]
    return None


def team(frame: Frame, what: str) -> int:
    """The agent of a frame that acts as one; a new statement of it begins.

    Raises DivergenceError when threads of its warps are missing.
    """
    order = frame.cta.order
    agent = order.team(frame.whole_warps(what))
    order.begin(agent)
    return agent


def read(frame: Frame, box: Box, agents: Any) -> np.ndarray:
    """The values of a box, squeezed."""
    memory = box.memory
    if isinstance(memory, TensorMemory):
        return memory.read(frame, box).reshape(box.squeezed)
    if isinstance(memory, SharedMemory):
        places = box.places
        memory.check_read(places, _of_rows(agents, len(places)))
        return memory.array[places].reshape(box.squeezed)
    if isinstance(memory, Fragment):
        memory.own(frame)
        memory.may_read()
        memory.use()
        memory.must_be_written(memory.complete or memory.written[box.slices])
    if isinstance(memory, GlobalMemory):
        memory.reach(frame)
    return memory.array[box.slices].reshape(box.squeezed)


def write(frame: Frame, box: Box, values: np.ndarray, agents: Any) -> None:
    """Store squeezed values, converted to the buffer's type."""
    memory = box.memory
    values = converted(np.broadcast_to(values, box.squeezed), memory.dtype)
    if isinstance(memory, TensorMemory):
        memory.store(frame, box, values.reshape(-1))
        return
    if isinstance(memory, SharedMemory):
        places = box.places
        memory.write(places, _of_rows(agents, len(places)), values.reshape(-1))
        return
    if isinstance(memory, Fragment):
        memory.own(frame)
        memory.may_write()
    if isinstance(memory, GlobalMemory):
        memory.reach(frame)
    memory.array[box.slices] = values.reshape(box.extent)
    if isinstance(memory, Fragment):
        memory.mark(box.slices)
        if box.extent == memory.shape:
            memory.products = []


def copy(frame: Frame, source: Box, target: Box) -> None:
    """T.copy between registers, shared and global memory, or of tensor memory and registers; done when it returns."""
    if source.squeezed != target.squeezed:
        raise UnsupportedError(f"copy of a box {source.extent} to a box {target.extent}")
    for box, other in ((source, target), (target, source)):
        if isinstance(box.memory, TensorMemory) and not isinstance(other.memory, Fragment):
            raise UnsupportedError(f"copy of {source.memory.name} to {target.memory.name}: wanted a fragment")
    agents: Any = team(frame, "a tile copy")
    if isinstance(source.memory, Fragment) != isinstance(target.memory, Fragment):
        rows = row_agents(frame, source.squeezed[0])
        agents = agents if rows is None else rows
    write(frame, target, read(frame, source, agents), agents)


def fill(frame: Frame, target: Box, value: Any) -> None:
    """T.fill."""
    if isinstance(target.memory, TensorMemory):
        raise UnsupportedError(f"fill of {target.memory.name}: wanted registers or shared memory")
    write(frame, target, np.asarray(value), team(frame, "a tile fill"))


_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    # fmax and fmin: the device functions drop NaN.
    "max": (np.fmax, np.maximum),
    "min": (np.fmin, np.minimum),
    "sum": (np.add, np.add),
}


def reduce(frame: Frame, source: Box, target: Box, kind: str, dim: int, clear: bool) -> None:
    """T.reduce_max, T.reduce_min or T.reduce_sum of a fragment, into a fragment."""
    if kind not in _REDUCTIONS:
        raise UnsupportedError(f"reduction {kind!r}")
    if not isinstance(source.memory, Fragment) or not isinstance(target.memory, Fragment):
        raise UnsupportedError(f"reduction of {source.memory.name} into {target.memory.name}: wanted fragments")
    agents = team(frame, "a reduction")
    function = _REDUCTIONS[kind][0 if is_float(source.memory.dtype) else 1]
    values = read(frame, source, agents).reshape(source.extent)
    values = converted(values, target.memory.dtype)
    if kind == "max" and is_float(values.dtype):
        # fmax starts from -inf, so that a row of NaN gives -inf.
        result = function.reduce(values, axis=dim, initial=-np.inf)
    elif kind == "min" and is_float(values.dtype):
        result = function.reduce(values, axis=dim, initial=np.inf)
    else:
        result = function.reduce(values, axis=dim)
    result = converted(result.reshape(target.squeezed), target.memory.dtype)
    if not clear:
        result = function(read(frame, target, agents), result)
    write(frame, target, result, agents)


def _of_rows(agents: Any, elements: int) -> Any:
    """Agents of rows as agents of elements."""
    return np.repeat(agents, elements // len(agents)) if isinstance(agents, np.ndarray) else agents
