"""Tensor memory, and the tcgen05 products that accumulate in it and may read their left operand from it.

Products are done in the order in which they are issued, as late as the barriers to which they are committed allow. Who
has passed such a barrier knows that everything committed to it before is done: its operands are free, its result there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msa_tiles.simulator.barriers import EARLY, Mbarrier
from msa_tiles.simulator.dtypes import is_float, poisoned
from msa_tiles.simulator.errors import InFlightError, RaceError, UninitialisedError, UnsupportedError
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.order import Order
from msa_tiles.simulator.product import WatchedProduct
from msa_tiles.simulator.shared import NO_BARRIER, SharedMemory

if TYPE_CHECKING:
    from msa_tiles.simulator.boxes import Box

LANES = 128  # rows of tensor memory
READERS = LANES // WARP  # warps that read all of them: warp i those from 32 (i % 4) on


class TensorMemory:
    """One buffer [..., LANES, columns]. Elements are named by their flat place."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], order: Order) -> None:
        if len(shape) < 2 or shape[-2] != LANES or not is_float(dtype):
            raise UnsupportedError(f"{name}: tensor memory {shape} of {dtype}; wanted {LANES} rows of floats")
        self.name, self.shape, self.dtype, self.order = name, shape, dtype, order
        size = int(np.prod(shape))
        self.array = poisoned((size,), dtype)
        self.places = np.arange(size).reshape(shape)
        self.written = np.zeros(size, bool)
        self.writer = np.zeros(size, np.int32)  # the product whose result an element is; 0 for none
        self.reader = np.zeros(size, np.int32)  # the last product that reads each element; 0 for none
        self.reads = np.zeros((order.warps, size), np.int32)
        self.stores = np.zeros((order.warps, size), np.int32)
        self.products: dict[int, Product] = {}

    def read(self, frame: Frame, box: Box) -> np.ndarray:
        """The values of a box of all lanes, each read by the warp that can; flat.

        Raises UninitialisedError, RaceError.
        """
        places, agents = self._lanes(frame, box, "read")
        if not self.written[places].all():
            raise UninitialisedError(f"{self.name}: read before a product was written there")
        self._after_products(self.writer[places], agents, "read before the product that writes it")
        self._after_warps(self.stores[:, places], self.order.knows[agents].T, "read", "stores")
        for number in np.unique(self.writer[places]).tolist():
            if number:
                self.products[number].use()
        self.reads[agents, places] = self.order.clock[agents]
        return self.array[places]

    def store(self, frame: Frame, box: Box, values: np.ndarray) -> None:
        """Set a box of all lanes, each by the warp that can.

        Raises RaceError.
        """
        places, agents = self._lanes(frame, box, "store")
        knows = self.order.knows[agents].T
        self._after_products(self.writer[places], agents, "stored before the product that writes it")
        self._after_products(self.reader[places], agents, "stored before the product that reads it")
        self._after_warps(self.reads[:, places], knows, "stored", "reads")
        self._after_warps(self.stores[:, places], knows, "stored", "stores")
        self.array[places] = values
        self.written[places] = True
        self.writer[places] = 0
        self.stores[agents, places] = self.order.clock[agents]

    def result(self, product: Product, places: np.ndarray, knows: np.ndarray) -> None:
        """A product sets these elements, or adds to them.

        Raises RaceError, UninitialisedError.
        """
        self._after_warps(self.reads[:, places], knows[:, None], "a tcgen05 product", "reads")
        self._after_warps(self.stores[:, places], knows[:, None], "a tcgen05 product", "stores")
        if not product.clear and not self.written[places].all():
            raise UninitialisedError(f"{self.name}: a product is added to what nobody wrote")
        self.written[places] = True
        self.writer[places] = product.number
        self.products[product.number] = product
        if product.clear:
            self.array[places] = poisoned(places.shape, self.dtype)

    def operand(self, product: Product, places: np.ndarray, knows: np.ndarray) -> None:
        """A product reads these elements.

        Raises RaceError, UninitialisedError.
        """
        if not self.written[places].all():
            raise UninitialisedError(f"{self.name}: a tcgen05 product reads what nobody wrote")
        self._after_warps(self.stores[:, places], knows[:, None], "a tcgen05 product", "stores")
        self.reader[places] = product.number

    def check_over(self, warp: int, what: str) -> None:
        """Raises RaceError when a warp does not know all accesses to be over."""
        known = self.order.knows[warp, :, None]
        self._after_warps(self.reads, known, what, "reads")
        self._after_warps(self.stores, known, what, "stores")

    def _lanes(self, frame: Frame, box: Box, what: str) -> tuple[np.ndarray, np.ndarray]:
        """The places of a box, and the warp of each."""
        warps = frame.whole_warps("a copy of tensor memory")
        if len(warps) != READERS or warps[0] % READERS or box.extent[-2] != LANES:
            raise UnsupportedError(f"{self.name}: {len(warps)} warps {what} a box {box.extent}; wanted a warpgroup")
        places = self.places[box.slices]
        agents = np.broadcast_to(warps[np.arange(LANES) // WARP][:, None], places.shape).reshape(-1)
        return places.reshape(-1), agents

    def _after_products(self, numbers: np.ndarray, agents: np.ndarray, what: str) -> None:
        if (numbers > self.order.knows[agents, self.order.tensor]).any():
            raise RaceError(f"{self.name}: {what} is known to be done, {NO_BARRIER}")

    def _after_warps(self, clocks: np.ndarray, knows: np.ndarray, what: str, doing: str) -> None:
        """Clocks of accesses [warps, n] against what is known of all agents [agents, n or 1]."""
        if (clocks > knows[: self.order.warps]).any():
            raise RaceError(f"{self.name}: {what} over what another warp {doing}, {NO_BARRIER}")


class Product(WatchedProduct):
    """One issued product C = A B^T or the like, or C += the same."""

    hint = "what a tcgen05 product reads; wanted a barrier to which the product was committed"

    def __init__(self, frame: Frame, number: int, a: Box, b: Box, c: Box, transposed: tuple[bool, bool], clear: bool):
        memory = c.memory
        if not isinstance(memory, TensorMemory) or c.extent[-2] != LANES:
            raise UnsupportedError(
                f"tcgen05 product into {memory.name}{c.extent}: wanted {LANES} rows of tensor memory"
            )
        if memory.dtype != np.float32:
            raise UnsupportedError(f"{memory.name}: a tcgen05 product accumulates in {memory.dtype}; wanted float32")
        self.order = frame.cta.order
        self.number, self.a, self.b, self.transposed, self.clear = number, a, b, transposed, clear
        self.memory, self.shape = memory, c.extent[-2:]
        self.places = memory.places[c.slices].reshape(-1)
        knows = self.order.knowledge(int(frame.warps[0]))
        if isinstance(a.memory, TensorMemory):
            if transposed[0] or a.extent[-2] != LANES:
                raise UnsupportedError(f"{a.memory.name}{a.extent}: a left operand has all {LANES} rows")
            a.memory.operand(self, a.memory.places[a.slices].reshape(-1), knows)
        else:
            self._check_shared(a, knows, None if transposed[0] else a.extent[-2])
        self._check_shared(b, knows, None)
        memory.result(self, self.places, knows)

    def _check_shared(self, operand: Box, knows: np.ndarray, rows: int | None) -> None:
        """With `rows`, some rows may be empty: they are poison, and so is what is multiplied from them."""
        memory = operand.memory
        if not isinstance(memory, SharedMemory):
            raise UnsupportedError(f"tcgen05 operand {memory.name}: wanted shared memory")
        places = operand.places
        filled = memory.clock[0, places] > 0
        if not filled.all():
            by_row = filled.reshape(rows or 1, -1)
            if not by_row.any() or (by_row.any(1) != by_row.all(1)).any():
                raise UninitialisedError(f"{memory.name}: a tcgen05 product reads what nobody wrote")
        if memory.unordered(places, knows).any():
            raise RaceError(f"{memory.name}: a tcgen05 product reads what somebody writes, {NO_BARRIER}")
        memory.check_published(places, knows, "a tcgen05 operand")
        memory.note_product(self, places, self.order.tensor)

    def retire(self) -> None:
        """Do the product now."""
        a, b = (self._operand(box) for box in (self.a, self.b))
        left, right = (m.T if turned else m for m, turned in zip((a, b), self.transposed, strict=True))
        product = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy().reshape(-1)
        self.memory.array[self.places] = product if self.clear else self.memory.array[self.places] + product

    def retired_at(self, agent: int) -> int:
        """The clock of the tensor core when this is over."""
        return self.number

    def _operand(self, box: Box) -> np.ndarray:
        memory = box.memory
        assert isinstance(memory, SharedMemory | TensorMemory)
        places = box.places if isinstance(memory, SharedMemory) else memory.places[box.slices]
        return memory.array[places].astype(np.float32).reshape(box.extent[-2:])


class Commit:
    """One arrival on a barrier, once the products before it are done."""

    def __init__(self, core: TensorCore, barrier: Mbarrier, warp: int) -> None:
        self.core, self.barrier = core, barrier
        order = core.order
        # What the products waited for came before them; what their warp did itself is not published.
        self.published = order.knows[warp].copy()
        self.published[warp] = 0
        self.published[order.tensor] = order.clock[order.tensor]

    def __call__(self) -> None:
        """What the scheduler calls when somebody waits for the barrier."""
        self.core.catch_up(self)

    def arrive(self) -> None:
        """The arrival."""
        if self in self.barrier.loads:
            self.barrier.loads.remove(self)
        self.barrier.signal(self.published)


class TensorCore:
    """The tcgen05 work of a CTA that is under way, in order."""

    def __init__(self, order: Order, name: str) -> None:
        self.order, self.name = order, name
        self.queue: list[Product | Commit] = []
        self.issuer: int | None = None

    def multiply(self, frame: Frame, a: Box, b: Box, c: Box, transposed: tuple[bool, bool], clear: bool) -> None:
        """T.tcgen05_gemm: issue a product."""
        warp = self._warp(frame, "tcgen05_gemm")
        if self.issuer not in (None, warp):
            raise UnsupportedError(f"tcgen05 products issued by warps {self.issuer} and {warp}: wanted one warp")
        self.issuer = warp
        self.order.clock[self.order.tensor] += 1
        product = Product(frame, int(self.order.clock[self.order.tensor]), a, b, c, transposed, clear)
        if frame.cta.late:
            self.queue.append(product)
        else:
            product.retire()

    def commit(self, frame: Frame, barrier: Mbarrier) -> None:
        """T.tcgen05_mma_arrive: the barrier gets an arrival when this warp's products are done."""
        warp = self._warp(frame, "tcgen05_mma_arrive")
        commit = Commit(self, barrier, warp)
        if self.issuer not in (None, warp):
            raise UnsupportedError(f"warp {warp} commits the products of warp {self.issuer}")
        if not frame.cta.late:
            commit.arrive()
            return
        self.queue.append(commit)
        barrier.loads.append(commit)
        if frame.cta.random.random() < EARLY:
            self.catch_up(commit)

    def catch_up(self, last: Commit) -> None:
        """Do everything up to a commit."""
        while last in self.queue:
            work = self.queue.pop(0)
            if isinstance(work, Product):
                work.retire()
            else:
                work.arrive()

    def give_back(self, warp: int, memories: list[TensorMemory]) -> None:
        """What TileLang does in warp 0 at the end, without a barrier of its own.

        Raises InFlightError, RaceError.
        """
        if self.order.knows[warp, self.order.tensor] < self.order.clock[self.order.tensor] and self.issuer is not None:
            raise InFlightError(f"{self.name}: given back before warp {warp} knows that the products are done")
        for memory in memories:
            memory.check_over(warp, "given back")

    def end(self) -> None:
        """Raises InFlightError."""
        if self.queue:
            raise InFlightError(f"{self.name}: the CTA ends with {len(self.queue)} products or commits under way")

    def _warp(self, frame: Frame, what: str) -> int:
        warps = frame.whole_warps(what)
        if len(warps) != 1:
            raise UnsupportedError(f"{what} by {len(warps)} warps: wanted one")
        return int(warps[0])
