"""Threads that run together: a role (one coroutine's threads) and the frame in which they execute statements.

A value is a Python int or bool or a numpy float when all threads of the frame agree on it, else an array with one
entry a thread. Inside a parallel loop the lanes are the iterations instead, and an array has the loop's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from msa_tiles.simulator.dtypes import scalar
from msa_tiles.simulator.errors import DivergenceError
from msa_tiles.simulator.lanes import MAPPED

if TYPE_CHECKING:
    from msa_tiles.simulator.cta import Cta
    from msa_tiles.simulator.memory import LocalMemory
    from msa_tiles.simulator.shared import SharedMemory
    from msa_tiles.simulator.wgmma import Wgmma

WARP = 32
WARPGROUP = 4  # warps


class Role:
    """The threads of one coroutine, with their private memory and their wgmma groups in flight."""

    def __init__(self, cta: Cta, tid: np.ndarray) -> None:
        self.cta = cta
        self.tid = tid
        self.locals: dict[int, LocalMemory] = {}
        self.wgmmas: list[Wgmma] = []
        # Copies past registers that no barrier knows of yet: where to, which places, what values.
        self.copies: list[tuple[SharedMemory, np.ndarray, np.ndarray]] = []

    @property
    def name(self) -> str:
        """`threads 0-127 of CTA (3, 1)`."""
        return f"{threads_text(self.tid)} of CTA {self.cta.index}"


class Frame:
    """What a statement needs to run: the threads, their variables, and which of them are active.

    lanes: place of the threads in their role, None for the whole role. mask: active lanes, None for all of them.
    shape: the lanes' shape. agents and threads: who accesses shared memory, see `order.Order` and `lanes.Lanes`.
    """

    __slots__ = ("agents", "at", "cta", "lanes", "mask", "role", "shape", "threads", "tid", "variables", "warps")

    def __init__(self, role: Role, variables: list[Any], tid: np.ndarray, lanes: np.ndarray | None) -> None:
        self.role = role
        self.cta = role.cta
        self.variables = variables
        self.tid = tid
        self.lanes = lanes
        self.mask: np.ndarray | None = None
        self.shape: tuple[int, ...] = tid.shape
        self.warps = np.unique(tid // WARP)
        self.agents: Any = int(self.warps[0]) if len(self.warps) == 1 else tid // WARP
        self.threads: Any = tid
        self.at: Any = None

    def split(self, chosen: np.ndarray) -> Frame:
        """A frame of the chosen threads alone, with its own copy of the variables."""
        places = np.flatnonzero(chosen)
        lanes = places if self.lanes is None else self.lanes[places]
        variables = [v[places] if isinstance(v, np.ndarray) else v for v in self.variables]
        child = Frame(self.role, variables, self.tid[places], lanes)
        child.at = self.at
        return child

    def iterations(self, shape: tuple[int, ...], agents: Any) -> Frame:
        """A frame whose lanes are the iterations of a parallel loop."""
        child = Frame.__new__(Frame)
        child.role, child.cta, child.variables = self.role, self.cta, list(self.variables)
        child.tid, child.lanes, child.warps = self.tid, self.lanes, self.warps
        child.mask, child.shape, child.agents, child.at = None, shape, agents, self.at
        child.threads = MAPPED
        return child

    def active(self) -> np.ndarray:
        """Ids of the active threads."""
        return self.tid if self.mask is None else self.tid[self.mask]

    def whole_warps(self, what: str) -> np.ndarray:
        """The warps of the frame, which must be complete and active.

        Raises DivergenceError.
        """
        if self.mask is not None or len(self.tid) != WARP * len(self.warps):
            raise DivergenceError(f"{what} by {threads_text(self.active())}: wanted whole warps")
        return self.warps


def uniform(value: Any, what: str) -> Any:
    """The one value that all threads agree on.

    Raises DivergenceError.
    """
    if isinstance(value, np.ndarray):
        first = value.flat[0]
        if not (value == first).all():
            raise DivergenceError(f"{what} differs between threads: {first} and {value[value != first].flat[0]}")
        return scalar(first)
    return value


def threads_text(tid: np.ndarray) -> str:
    """`threads 0-127`."""
    if len(tid) == 1:
        return f"thread {tid[0]}"
    if len(tid) == tid[-1] - tid[0] + 1:
        return f"threads {tid[0]}-{tid[-1]}"
    return f"{len(tid)} threads of {tid[0]}-{tid[-1]}"
