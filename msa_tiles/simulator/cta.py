"""One CTA: its memory, barriers and asynchronous work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from msa_tiles.simulator.barriers import Mbarrier, NamedBarrier
from msa_tiles.simulator.boxes import Memory
from msa_tiles.simulator.errors import DivergenceError, InFlightError, OutOfBoundsError, UnsupportedError
from msa_tiles.simulator.frame import WARP, WARPGROUP, Frame, Role
from msa_tiles.simulator.memory import Fragment, GlobalMemory, LocalMemory
from msa_tiles.simulator.order import Order
from msa_tiles.simulator.program import BufferInfo
from msa_tiles.simulator.shared import SharedMemory
from msa_tiles.simulator.tensor import TensorCore, TensorMemory
from msa_tiles.simulator.tma import Store

# How often a coroutine lets others run after an arrival, although it need not wait.
PAUSE = 0.25


class Cta:
    """The state of one CTA."""

    def __init__(
        self,
        index: tuple[int, ...],
        threads: int,
        buffers: Mapping[Any, BufferInfo],
        tensors: Mapping[int, GlobalMemory],
        chance: random.Random,
        late: bool,
    ) -> None:
        self.index, self.threads, self.random, self.late = index, threads, chance, late
        slots = sum(len(info.counts) for info in buffers.values())
        self.order = Order(threads // WARP, slots)
        self.memory: dict[int, Memory] = dict(tensors)
        self.barriers: dict[int, list[Mbarrier]] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.stores: dict[int, list[Store]] = {}
        self.landing: list[Store] = []
        self.core: TensorCore | None = None
        # The warps that have passed pdl_sync.
        self.synced: set[int] = set()
        # The arguments of set_max_nreg of each warp, in order.
        self.registers: list[list[tuple[int, ...]]] = [[] for _ in range(threads // WARP)]
        self._private: list[BufferInfo] = []
        slot = 0
        for info in buffers.values():
            if info.scope == "shared.barrier":
                self.barriers[info.key] = []
                for n, count in enumerate(info.counts):
                    name = f"{info.name}[{n}]"
                    self.barriers[info.key].append(Mbarrier(name, count, self.order.slot(slot), self.order))
                    slot += 1
            elif info.scope in ("shared", "shared.dyn"):
                self.memory[info.key] = SharedMemory(info.name, info.shape, info.dtype, self.order)
            elif info.scope == "shared.tmem":
                self.memory[info.key] = TensorMemory(info.name, info.shape, info.dtype, self.order)
                self.core = self.core or TensorCore(self.order, info.name)
            elif info.scope == "local.fragment":
                self.memory[info.key] = Fragment(info.name, info.shape, info.dtype)
            elif info.scope in ("local", "local.var"):
                self._private.append(info)
            elif info.scope != "global":
                raise UnsupportedError(f"{info.name}: memory scope {info.scope} is not simulated")

    def role(self, tid: np.ndarray, variables: list[Any]) -> Frame:
        """A frame of a new role of these threads."""
        role = Role(self, tid)
        for info in self._private:
            role.locals[info.key] = LocalMemory(info.name, info.shape, info.dtype, len(tid))
        return Frame(role, list(variables), tid, None)

    def slot(self, key: int, number: int) -> Mbarrier:
        """One mbarrier of a buffer of them."""
        slots = self.barriers[key]
        if not 0 <= number < len(slots):
            raise OutOfBoundsError(f"{slots[0].name.split('[')[0]}: slot {number} of {len(slots)}")
        return slots[number]

    def slots(self) -> Iterator[Mbarrier]:
        """All mbarriers."""
        for slots in self.barriers.values():
            yield from slots

    def pauses(self) -> bool:
        """Whether to let others run now."""
        return self.random.random() < PAUSE

    def land_stores(self) -> None:
        """Write the stores that have read their source to global memory; in any order, as the hardware may."""
        self.random.shuffle(self.landing)
        for store in self.landing:
            store.land()
        self.landing.clear()

    def leave(self, role: Role) -> None:
        """The threads of a role end.

        Raises InFlightError, RaceError.
        """
        if self.core is not None and 0 in role.tid:
            self.core.give_back(0, [memory for memory in self.memory.values() if isinstance(memory, TensorMemory)])
        if role.wgmmas:
            raise InFlightError(f"{role.name} end with {len(role.wgmmas)} wgmma groups in flight")
        if role.copies:
            raise InFlightError(f"{role.name} end, and no barrier waits for what they copy to {role.copies[0][0].name}")
        for thread in role.tid.tolist():
            if self.stores.get(thread):
                raise InFlightError(f"{role.name} end before a TMA store has read shared memory")

    def end(self) -> None:
        """All threads have ended.

        Raises DivergenceError, InFlightError.
        """
        for first in range(0, len(self.registers), WARPGROUP):
            group = self.registers[first : first + WARPGROUP]
            if any(calls != group[0] for calls in group) or (group[0] and len(group) < WARPGROUP):
                raise DivergenceError(f"CTA {self.index}: set_max_nreg by a part of warps {first} to {first + 3}")
        if self.core is not None:
            self.core.end()
        for barrier in self.slots():
            if barrier.loaded and self.order.knows[:, barrier.agent].max() < self.order.clock[barrier.agent]:
                raise InFlightError(f"CTA {self.index} ends and nobody has waited for the TMA loads of {barrier.name}")
        self.land_stores()
