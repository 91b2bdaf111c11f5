"""Tensor memory, and the tcgen05 products that accumulate in it.

Products are done in the order in which they are issued, as late as the barriers to which they are committed allow. Who
has passed such a barrier knows that everything committed to it before is done: its operands are free, its result there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msa_tiles.simulator.barriers import EARLY, Mbarrier
from msa_tiles.simulator.dtypes import poisoned
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
        if len(shape) < 2 or shape[-2] != LANES or dtype != np.float32:
            raise UnsupportedError(f"{name}: tensor memory {shape} of {dtype}; wanted {LANES} rows of float32")
        self.name, self.shape, self.dtype, self.order = name, shape, dtype, order
        size = int(np.prod(shape))
        self.array = poisoned((size,), dtype)
        self.places = np.arange(size).reshape(shape)
        self.writer = np.zeros(size, np.int32)  # the last product of each element; 0 for none
        self.reads = np.zeros((order.warps, size), np.int32)
        self.products: dict[int, Product] = {}

    def read(self, frame: Frame, box: Box) -> np.ndarray:
        """The values of a box of all lanes, each read by the warp that can; flat.

        Raises UninitialisedError, RaceError.
        """
        warps = frame.whole_warps("a copy from tensor memory")
        if len(warps) != READERS or warps[0] % READERS or box.extent[-2] != LANES:
            raise UnsupportedError(f"{self.name}: {len(warps)} warps read a box {box.extent}; wanted a warpgroup")
        places = self.places[box.slices]
        agents = np.broadcast_to(warps[np.arange(LANES) // WARP][:, None], places.shape).reshape(-1)
        places = places.reshape(-1)
        writer = self.writer[places]
        if not writer.all():
            raise UninitialisedError(f"{self.name}: read before a product was written there")
        if (writer > self.order.knows[agents, self.order.tensor]).any():
            raise RaceError(f"{self.name}: read before the product that writes it is known to be done, {NO_BARRIER}")
        for number in np.unique(writer).tolist():
            self.products[number].use()
        self.reads[agents, places] = self.order.clock[agents]
        return self.array[places]

    def check_over(self, warp: int, what: str) -> None:
        """Raises RaceError when a warp does not know all reads to be over."""
        known = self.order.knows[warp, : self.order.warps, None]
        if (self.reads > known).any():
            raise RaceError(f"{self.name}: {what} while another warp may still read it, {NO_BARRIER}")


class Product(WatchedProduct):
    """One issued product C = A B^T or the like, or C += the same."""

    hint = "what a tcgen05 product reads; wanted a barrier to which the product was committed"

    def __init__(self, frame: Frame, number: int, a: Box, b: Box, c: Box, transposed: tuple[bool, bool], clear: bool):
        memory = c.memory
        if not isinstance(memory, TensorMemory) or c.extent[-2] != LANES:
            raise UnsupportedError(
                f"tcgen05 product into {memory.name}{c.extent}: wanted {LANES} rows of tensor memory"
            )
        self.order = frame.cta.order
        self.number, self.a, self.b, self.transposed, self.clear = number, a, b, transposed, clear
        self.memory, self.shape = memory, c.extent[-2:]
        self.places = memory.places[c.slices].reshape(-1)
        warp = int(frame.warps[0])
        knows = self.order.knowledge(warp)
        for operand in (a, b):
            self._check_operand(operand, knows)
        if (memory.reads[:, self.places] > knows[: self.order.warps, None]).any():
            raise RaceError(f"{memory.name}: a tcgen05 product over what another warp reads, {NO_BARRIER}")
        if not clear and not memory.writer[self.places].all():
            raise UninitialisedError(f"{memory.name}: a product is added to what nobody wrote")
        memory.writer[self.places] = number
        memory.products[number] = self
        if clear:
            memory.array[self.places] = poisoned(self.places.shape, memory.dtype)

    def _check_operand(self, operand: Box, knows: np.ndarray) -> None:
        memory = operand.memory
        if not isinstance(memory, SharedMemory):
            raise UnsupportedError(f"tcgen05 operand {memory.name}: wanted shared memory")
        places = operand.places
        if not memory.clock[0, places].all():
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
        assert isinstance(memory, SharedMemory)
        return memory.array[box.places].astype(np.float32).reshape(box.extent[-2:])


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
