"""Shared memory that remembers who wrote and read each element, and whether the async proxy may see it.

Two writes are remembered for each element: the one that set its value, and another agent's write of the same bytes,
which changes nothing and makes the value that agent's as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from msa_tiles.simulator.dtypes import bits, poisoned, scalar
from msa_tiles.simulator.errors import ProxyFenceError, RaceError, UninitialisedError
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.memory import Index, active_lanes, inside, scatter
from msa_tiles.simulator.order import Order

UNFENCED = np.iinfo(np.int32).max


class SharedMemory:
    """One shared buffer of a CTA. Elements are named by their flat place."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], order: Order) -> None:
        self.name, self.shape, self.dtype, self.order = name, shape, dtype, order
        size = int(np.prod(shape))
        self.array = poisoned((size,), dtype)
        self.places = np.arange(size).reshape(shape)
        self.writer = np.zeros((2, size), np.int16)
        self.clock = np.zeros((2, size), np.int32)
        # Clock at which the writer published the value to the async proxy; 0 when no generic write is behind it.
        self.fence = np.zeros((2, size), np.int32)
        self.reads = np.zeros((order.readers, size), np.int32)
        self.unfenced: dict[int, list[np.ndarray]] = {}

    def load(self, frame: Frame, index: Index) -> Any:
        checked, same = inside(frame, index, self.shape, self.name)
        if same:
            place = self._flat(checked)
            self.check_read(np.array([place]), self._whole_agents(frame))
            return scalar(self.array[place])
        place = self._flat(checked)
        if frame.mask is None and np.shape(place) == frame.shape:
            places, agents = place.reshape(-1), self._lane_agents(frame)
            if isinstance(agents, np.ndarray):
                agents = np.broadcast_to(agents, frame.shape).reshape(-1)
        else:
            places, agents = active_lanes(frame, [place, frame.agents])
            if not isinstance(frame.agents, np.ndarray):
                agents = frame.agents
        self.check_read(places, agents)
        return self.array[place]

    def store(self, frame: Frame, index: Index, value: Any) -> None:
        checked, _ = inside(frame, index, self.shape, self.name)
        places, values, agents = active_lanes(frame, [self._flat(checked), value, frame.agents])
        self.write(places, agents if isinstance(frame.agents, np.ndarray) else frame.agents, values)

    def write(self, places: np.ndarray, agents: Any, values: np.ndarray) -> None:
        """A generic write, by one agent or by one agent an element; what it does not change is no write."""
        before = self.array[places]
        scatter(self.array, (places,), values, self.name)
        changed = bits(before) != bits(self.array[places])
        one = not isinstance(agents, np.ndarray)
        fresh = changed | (self.clock[0, places] == 0)
        self._write_again(places[~fresh], agents if one else agents[~fresh])
        places, agents = places[fresh], agents if one else agents[fresh]
        if len(places) == 0:
            return
        self.check_write(places, agents, "a store")
        self.writer[:, places] = agents
        self.clock[:, places] = self.order.clock[agents]
        self.fence[:, places] = UNFENCED
        self._note_unfenced(places, agents)

    def _write_again(self, places: np.ndarray, agents: Any) -> None:
        """The same bytes once more: keep the agent as a second author where it does not know the first."""
        if len(places) == 0:
            return
        unknown = self._unknown(0, places, self.order.knowledge(agents))
        places = places[unknown]
        agents = agents[unknown] if isinstance(agents, np.ndarray) else agents
        self.writer[1, places] = agents
        self.clock[1, places] = self.order.clock[agents]
        self.fence[1, places] = UNFENCED
        self._note_unfenced(places, agents)

    def _note_unfenced(self, places: np.ndarray, agents: Any) -> None:
        if isinstance(agents, np.ndarray):
            for agent in np.unique(agents):
                self.unfenced.setdefault(int(agent), []).append(places[agents == agent])
        elif len(places):
            self.unfenced.setdefault(agents, []).append(places)

    def publish(self, agent: int) -> None:
        """fence_proxy_async by an agent: its writes so far are visible to the async proxy."""
        for places in self.unfenced.pop(agent, ()):
            for author in (0, 1):
                mine = places[(self.writer[author, places] == agent) & (self.fence[author, places] == UNFENCED)]
                self.fence[author, mine] = self.order.clock[agent]

    def check_read(self, places: np.ndarray, agents: Any) -> None:
        """A generic read, by one agent or by one agent an element.

        Raises UninitialisedError, RaceError.
        """
        if not self.clock[0, places].all():
            raise UninitialisedError(f"{self.name}{self._at(places, self.clock[0, places] == 0)}: nobody wrote it")
        if isinstance(agents, tuple):  # all of these warps read the same elements
            for agent in agents:
                self.check_read(places, agent)
            return
        bad = self.unordered(places, self.order.knowledge(agents))
        if bad.any():
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: {self._who(agents, bad)} reads what "
                f"{self._author(places, bad)} wrote, and no barrier is between"
            )
        self.reads[agents, places] = self.order.clock[agents]

    def check_write(self, places: np.ndarray, agents: Any, what: str, knows: np.ndarray | None = None) -> None:
        """Raises RaceError when an earlier access is not known to be over."""
        if knows is None:
            knows = self.order.knowledge(agents)
        bad = self.unordered(places, knows)
        if bad.any():
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: {what} of {self._who(agents, bad)} over what "
                f"{self._author(places, bad)} wrote, and no barrier is between"
            )
        known = np.moveaxis(knows, -1, 0)[: self.order.readers]
        late = self.reads[:, places] > (known[:, None] if known.ndim == 1 else known)
        if not isinstance(agents, np.ndarray) and agents >= self.order.warps:
            # Iterations of one parallel loop read and write their own elements.
            late[agents] &= self.reads[agents, places] != self.order.clock[agents]
        if late.any():
            reader = int(late.any(1).argmax())
            raise RaceError(
                f"{self.name}{self._at(places, late.any(0))}: {what} of {self._who(agents, late.any(0))} over what "
                f"{self._agent(reader)} reads, and no barrier is between"
            )

    def check_published(self, places: np.ndarray, knows: np.ndarray, what: str) -> None:
        """Raises ProxyFenceError when the async proxy meets generic writes without a fence of their author."""
        missing = self.fence[0, places] > knows[self.writer[0, places]]
        if missing.any():
            missing &= self.fence[1, places] > knows[self.writer[1, places]]
        if missing.any():
            raise ProxyFenceError(
                f"{self.name}{self._at(places, missing)}: {what} meets what {self._author(places, missing)} stored; "
                "wanted fence_proxy_async by the threads that stored, then a barrier"
            )

    def unordered(self, places: np.ndarray, knows: np.ndarray) -> np.ndarray:
        """Which elements were written by somebody whose write is not known to be over."""
        bad = self._unknown(0, places, knows)
        if bad.any():
            bad &= self._unknown(1, places, knows)
        return bad

    def _unknown(self, author: int, places: np.ndarray, knows: np.ndarray) -> np.ndarray:
        writer = self.writer[author, places]
        known = knows[writer] if knows.ndim == 1 else knows[np.arange(len(places)), writer]
        return self.clock[author, places] > known

    def _flat(self, index: list[Any]) -> Any:
        place = index[0]
        for i, extent in zip(index[1:], self.shape[1:], strict=True):
            place = place * extent + i
        return place

    def _lane_agents(self, frame: Frame) -> Any:
        return frame.agents

    def _whole_agents(self, frame: Frame) -> Any:
        """Who reads one element together."""
        if not isinstance(frame.agents, np.ndarray):
            return frame.agents
        if frame.shape == frame.tid.shape:
            return tuple(np.unique(frame.active() // WARP).tolist())
        return tuple(np.unique(frame.agents).tolist())

    def _at(self, places: np.ndarray, bad: np.ndarray) -> str:
        return "[" + ", ".join(str(int(i)) for i in np.unravel_index(places[bad].flat[0], self.shape)) + "]"

    def _who(self, agents: Any, bad: np.ndarray) -> str:
        return self._agent(int(agents[bad].flat[0]) if isinstance(agents, np.ndarray) else agents)

    def _author(self, places: np.ndarray, bad: np.ndarray) -> str:
        return self._agent(int(self.writer[0, places[bad].flat[0]]))

    def _agent(self, agent: int) -> str:
        if agent < self.order.warps:
            return f"warp {agent}"
        return "a TMA load" if agent >= self.order.readers else "a group of warps"
