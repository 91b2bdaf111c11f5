"""TMA: loads land as late as their mbarrier allows, stores read their source as late as tma_store_wait allows."""

from __future__ import annotations

import numpy as np

from msa_tiles.simulator.barriers import EARLY, Mbarrier
from msa_tiles.simulator.boxes import Box
from msa_tiles.simulator.errors import RaceError, UninitialisedError, UnsupportedError
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.memory import GlobalMemory
from msa_tiles.simulator.shared import SharedMemory

ALIGNMENT = 16  # bytes, of the base address, of the strides and of the inner extent of a box
MOST_EXTENT = 256


def load(frame: Frame, source: Box, target: Box, barrier: Mbarrier, steps: tuple[int, ...]) -> None:
    """Global to shared. The target is undefined from now until the phase of the barrier completes."""
    memory = target.memory
    assert isinstance(memory, SharedMemory)
    leader, knows = _issue(frame, source, target, steps)
    places = target.places
    memory.check_write(places, leader, "a TMA load")
    memory.check_published(places, knows, "a TMA load over this")
    size = len(places) * memory.dtype.itemsize
    clock = barrier.expect(size)
    memory.write_async(places, barrier.agent, clock)

    def land() -> None:
        values = np.zeros(source.extent, memory.dtype)
        inner, outer = source.overlap()
        values[outer] = source.memory.array[inner]
        memory.array[places] = values.reshape(-1)
        barrier.land(size, clock)

    if frame.cta.late and frame.cta.random.random() >= EARLY:
        barrier.loads.append(land)
    else:
        land()


class Store:
    """Shared to global, a bulk group of its own."""

    def __init__(self, frame: Frame, source: Box, target: Box, steps: tuple[int, ...]) -> None:
        memory = source.memory
        assert isinstance(memory, SharedMemory)
        self.cta, self.source, self.target = frame.cta, source, target
        self.leader, knows = _issue(frame, target, source, steps)
        places = source.places
        if not memory.clock[0, places].all():
            raise UninitialisedError(f"{memory.name}: a TMA store reads what nobody wrote")
        missing = memory.unordered(places, knows)
        if missing.any():
            raise RaceError(
                f"{memory.name}: a TMA store by warp {self.leader} reads what another warp wrote, "
                "and no barrier is between"
            )
        memory.check_published(places, knows, "a TMA store")
        self.values: np.ndarray | None = None

    def read(self) -> None:
        """Read the source now; the leader's warp knows afterwards that it is free."""
        memory, places = self.source.memory, self.source.places
        assert isinstance(memory, SharedMemory)
        self.values = memory.array[places].reshape(self.target.extent)
        memory.reads[self.leader, places] = self.cta.order.clock[self.leader]

    def land(self) -> None:
        """Write to global memory; what lies outside the tensor is dropped."""
        assert self.values is not None
        inner, outer = self.target.overlap()
        self.target.memory.array[inner] = self.values[outer]


def store(frame: Frame, source: Box, target: Box, steps: tuple[int, ...]) -> None:
    """Start a store and commit it."""
    operation = Store(frame, source, target, steps)
    frame.cta.stores.setdefault(int(frame.tid[0]), []).append(operation)
    if not frame.cta.late:
        operation.read()
        operation.land()
        frame.cta.stores[int(frame.tid[0])].remove(operation)


def wait(frame: Frame, most: int, read_only: bool) -> None:
    """T.tma_store_wait: of each waiting thread's stores, all but the last `most` have read their source.

    Unless `read_only` they are in global memory as well; else that happens when the CTA ends.
    """
    cta = frame.cta
    for thread in frame.active().tolist():
        pending = cta.stores.get(thread, [])
        while len(pending) > most:
            operation = pending.pop(0)
            operation.read()
            cta.landing.append(operation)
            if not read_only:
                cta.land_stores()


def _issue(frame: Frame, outer: Box, inner: Box, steps: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """Check a copy; the warp that issues it and what that warp knows. TMA is told these strides of the outer tensor."""
    if not isinstance(outer.memory, GlobalMemory) or not isinstance(inner.memory, SharedMemory):
        raise UnsupportedError(
            f"tma_copy between {outer.memory.name} and {inner.memory.name}: wanted global and shared"
        )
    if outer.squeezed != inner.squeezed or outer.memory.dtype != inner.memory.dtype:
        raise UnsupportedError(f"tma_copy between boxes {outer.extent} and {inner.extent} of different shape or type")
    frame.whole_warps("tma_copy")
    memory = outer.memory
    memory.reach(frame)
    width = memory.dtype.itemsize
    if memory.address % ALIGNMENT or any(step <= 0 or step * width % ALIGNMENT for step in steps[:-1]):
        raise UnsupportedError(
            f"{memory.name}: TMA wants addresses and strides in positive multiples of {ALIGNMENT} bytes, not {steps}"
        )
    if steps[-1] != 1:
        raise UnsupportedError(f"{memory.name}: TMA wants the last stride to be 1")
    for step, stride, extent in zip(steps, memory.array.strides, memory.shape, strict=True):
        if extent > 1 and step * width != stride:
            raise UnsupportedError(f"{memory.name}: TMA is told strides {steps}, which are not the tensor's")
    if outer.extent[-1] * memory.dtype.itemsize % ALIGNMENT or max(outer.extent) > MOST_EXTENT:
        raise UnsupportedError(f"{memory.name}: TMA cannot copy a box {outer.extent}")
    leader = int(frame.tid[0]) // WARP
    return leader, frame.cta.order.knowledge(leader)
