"""Shared memory that remembers who wrote and read each element, and whether the async proxy may see it.

Two writes are remembered for each element: the one that set its value, and another agent's write of the same bytes,
which changes nothing and makes the value that agent's as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from msa_tiles.simulator.dtypes import bits, poisoned, scalar
from msa_tiles.simulator.errors import ProxyFenceError, RaceError, UninitialisedError
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.lanes import MAPPED, SEVERAL, Lanes
from msa_tiles.simulator.memory import Index, active_lanes, inside, scatter
from msa_tiles.simulator.order import Order

if TYPE_CHECKING:
    from msa_tiles.simulator.tensor import Product
    from msa_tiles.simulator.wgmma import Wgmma

UNFENCED = np.iinfo(np.int32).max
NO_BARRIER = "and no barrier is between"


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
        self.lanes = Lanes(size, order)
        self.unfenced: dict[int, list[np.ndarray]] = {}
        # By agent: the last product that reads each element, as a place in the list.
        self._products: list[Wgmma | Product] = []
        self._multiplied: dict[int, np.ndarray] = {}

    def load(self, frame: Frame, index: Index) -> Any:
        checked, same = inside(frame, index, self.shape, self.name)
        place = self._flat(checked)
        if same and isinstance(frame.agents, np.ndarray):
            # All active warps read one element.
            readers = frame.active() // WARP if frame.threads is not MAPPED else frame.agents
            for agent in np.unique(readers).tolist():
                self.check_read(np.array([place]), agent, SEVERAL)
        else:
            self.check_read(*self._lanes(frame, place))
        return scalar(self.array[place]) if same else self.array[place]

    def store(self, frame: Frame, index: Index, value: Any) -> None:
        checked, _ = inside(frame, index, self.shape, self.name)
        places, agents, threads = self._lanes(frame, self._flat(checked))
        (values,) = active_lanes(frame, [value])
        self.write(places, agents, values, threads)

    def _lanes(self, frame: Frame, place: Any) -> tuple[np.ndarray, Any, Any]:
        """Places, agents and threads of the active lanes."""
        (places,) = active_lanes(frame, [place])
        agents, threads = (
            active_lanes(frame, [who])[0] if isinstance(who, np.ndarray) else who
            for who in (frame.agents, frame.threads)
        )
        return places, agents, threads

    def write(self, places: np.ndarray, agents: Any, values: np.ndarray, threads: Any = MAPPED) -> None:
        """A generic write, by one agent or by one agent an element; what it does not change is no write."""
        before = self.array[places]
        scatter(self.array, (places,), values, self.name)
        fresh = (bits(before) != bits(self.array[places])) | (self.clock[0, places] == 0)
        self._write_again(places[~fresh], _some(agents, ~fresh))
        places, agents, threads = places[fresh], _some(agents, fresh), _some(threads, fresh)
        if len(places) == 0:
            return
        self.check_write(places, agents, "a store")
        bad = self.lanes.write(places, agents, threads)
        if bad.any():
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: one lane of {self._who(agents, bad)} stores what another lane "
                "accesses, and no sync_warp is between"
            )
        self.writer[:, places] = agents
        self.clock[:, places] = self.order.clock[agents]
        self.fence[:, places] = UNFENCED
        self._note_unfenced(places, agents)

    def write_async(self, places: np.ndarray, agent: int, clock: int) -> None:
        """A TMA load owns these elements from now on; until it lands they hold poison."""
        self.array[places] = poisoned(places.shape, self.dtype)
        self.lanes.forget(places)
        self.writer[:, places] = agent
        self.clock[:, places] = clock
        self.fence[:, places] = 0

    def _write_again(self, places: np.ndarray, agents: Any) -> None:
        """The same bytes once more: keep the agent as a second author where it does not know the first."""
        if len(places) == 0:
            return
        unknown = self._unknown(0, places, self.order.knowledge(agents))
        places, agents = places[unknown], _some(agents, unknown)
        self.writer[1, places] = agents
        self.clock[1, places] = self.order.clock[agents]
        self.fence[1, places] = UNFENCED
        self._note_unfenced(places, agents)

    def _note_unfenced(self, places: np.ndarray, agents: Any) -> None:
        for agent in np.unique(agents).tolist():
            mine = places[agents == agent] if isinstance(agents, np.ndarray) else places
            self.unfenced.setdefault(agent, []).append(mine)

    def publish(self, agent: int) -> None:
        """fence_proxy_async by an agent: its writes so far are visible to the async proxy."""
        for places in self.unfenced.pop(agent, ()):
            for author in (0, 1):
                mine = places[(self.writer[author, places] == agent) & (self.fence[author, places] == UNFENCED)]
                self.fence[author, mine] = self.order.clock[agent]

    def check_read(self, places: np.ndarray, agents: Any, threads: Any = MAPPED) -> None:
        """A generic read, by one agent or by one agent an element.

        Raises UninitialisedError, RaceError.
        """
        empty = self.clock[0, places] == 0
        if empty.any():
            raise UninitialisedError(f"{self.name}{self._at(places, empty)}: read before it was written")
        bad = self.unordered(places, self.order.knowledge(agents))
        if bad.any():
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: {self._who(agents, bad)} reads what "
                f"{self._author(places, bad)} wrote, {NO_BARRIER}"
            )
        bad = self.lanes.read(places, agents, threads)
        if bad.any():
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: one lane of {self._who(agents, bad)} reads what another lane "
                "stored, and no sync_warp is between"
            )
        self.reads[agents, places] = self.order.clock[agents]

    def check_write(self, places: np.ndarray, agents: Any, what: str) -> None:
        """Raises RaceError when an earlier access is not known to be over."""
        knows = self.order.knowledge(agents)
        bad = self.unordered(places, knows)
        if bad.any():
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: {what} of {self._who(agents, bad)} over what "
                f"{self._author(places, bad)} wrote, {NO_BARRIER}"
            )
        known = np.moveaxis(knows, -1, 0)[: self.order.readers]
        late = self.reads[:, places] > (known[:, None] if known.ndim == 1 else known)
        if not isinstance(agents, np.ndarray) and agents >= self.order.warps:
            # Iterations of one parallel loop read and write their own elements.
            late[agents] &= self.reads[agents, places] != self.order.clock[agents]
        if late.any():
            reader, bad = int(late.any(1).argmax()), late.max(0)
            raise RaceError(
                f"{self.name}{self._at(places, bad)}: {what} of {self._who(agents, bad)} over what "
                f"{self._agent(reader)} reads, {NO_BARRIER}"
            )

        self._spoil_products(places, knows, what)

    def note_product(self, product: Wgmma | Product, places: np.ndarray, agents: Any) -> None:
        """A product reads these elements until it retires."""
        self._products.append(product)
        for agent in np.unique(agents).tolist():
            mine = places[agents == agent] if isinstance(agents, np.ndarray) else places
            numbers = self._multiplied.setdefault(agent, np.full(len(self.array), -1, np.int32))
            numbers[mine] = len(self._products) - 1

    def _spoil_products(self, places: np.ndarray, knows: np.ndarray, what: str) -> None:
        """A write that does not know a product to be over spoils its result: an error once somebody uses it."""
        for agent, numbers in self._multiplied.items():
            reading = numbers[places]
            for number in np.unique(reading[reading >= 0]).tolist():
                known = knows[agent] if knows.ndim == 1 else knows[reading == number, agent].min()
                product = self._products[number]
                if known < product.retired_at(agent):
                    product.spoil(
                        f"{self.name}{self._at(places, reading == number)}: {what} over "
                        + product.hint.format(agent=self._agent(agent))
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


def _some(values: Any, chosen: np.ndarray) -> Any:
    """The chosen of an array's elements; a single agent or thread stays."""
    return values[chosen] if isinstance(values, np.ndarray) else values
