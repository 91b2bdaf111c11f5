"""Which accesses of shared memory by the lanes of one warp are in order: sync_warp and barriers separate them.

A thread is a number, SEVERAL, or MAPPED: the lane to which a parallel loop gives the element. Two loops over the same
rows are taken to map alike. A value that several lanes store at once is taken to be each lane's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from msa_tiles.simulator.order import Order

SEVERAL, MAPPED, TOGETHER = -1, -2, -3


class _Last:
    """The last access of each element: warp, its clock and thread."""

    def __init__(self, size: int) -> None:
        self.warp = np.full(size, -1, np.int16)
        self.clock = np.zeros(size, np.int32)
        self.thread = np.zeros(size, np.int16)


class Lanes:
    """The accesses of one shared buffer within each warp."""

    def __init__(self, size: int, order: Order) -> None:
        self.order = order
        self._written, self._read = _Last(size), _Last(size)

    def read(self, places: np.ndarray, agents: Any, threads: Any) -> np.ndarray:
        """Note a read; which elements another lane has written since the lanes last met."""
        if not self._are_warps(agents):
            return np.zeros(len(places), bool)
        bad = self._apart(self._written, places, agents, threads)
        last = self._read
        who = np.where(self._apart(last, places, agents, threads), SEVERAL, threads)
        last.warp[places], last.clock[places] = agents, self.order.clock[agents]
        last.thread[places] = who
        last.thread[places[last.thread[places] != who]] = SEVERAL
        return bad

    def write(self, places: np.ndarray, agents: Any, threads: Any) -> np.ndarray:
        """Note a write; which elements another lane has written or read since the lanes last met."""
        if not self._are_warps(agents):
            self.forget(places)
            return np.zeros(len(places), bool)
        bad = self._apart(self._written, places, agents, threads) | self._apart(self._read, places, agents, threads)
        last = self._written
        last.warp[places], last.clock[places] = agents, self.order.clock[agents]
        last.thread[places] = threads
        last.thread[places[last.thread[places] != threads]] = TOGETHER
        return bad

    def forget(self, places: np.ndarray) -> None:
        """Something else wrote these elements."""
        self._written.warp[places] = -1

    def _are_warps(self, agents: Any) -> bool:
        return isinstance(agents, np.ndarray) or agents < self.order.warps

    def _apart(self, last: _Last, places: np.ndarray, agents: Any, threads: Any) -> np.ndarray:
        unmet = (last.warp[places] == agents) & (last.clock[places] > self.order.met[agents])
        return unmet & (last.thread[places] != threads) & (last.thread[places] != TOGETHER)
