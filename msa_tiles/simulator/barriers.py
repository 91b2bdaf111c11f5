"""mbarriers and named barriers of a CTA, and what a coroutine yields when it has to wait.

A coroutine of the scheduler yields None to let others run, or a `Wait` until which it cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from msa_tiles.simulator.errors import BarrierError, DivergenceError
from msa_tiles.simulator.frame import WARP, Frame, threads_text
from msa_tiles.simulator.order import Order

# How often asynchronous work is done at once although it may be late: a phase that completes too early is a fault, too.
EARLY = 0.2


class Wait(Protocol):
    """A reason to stand still."""

    def over(self) -> bool:
        """Whether the coroutine may go on."""

    def reason(self) -> str:
        """What it waits for, for the report of a deadlock."""


class Mbarrier:
    """One slot: a phase completes when `count` threads have arrived and no announced byte is outstanding."""

    def __init__(self, name: str, count: int, agent: int, order: Order) -> None:
        self.name, self.count, self.agent, self.order = name, count, agent, order
        self.arrived = 0
        self.phase = 0
        self.bytes = 0
        self.loads: list[Callable[[], None]] = []  # on their way
        self.loaded = False
        self._gathered = np.zeros(order.agents, np.int32)
        self.published = np.zeros(order.agents, np.int32)

    def arrive(self, frame: Frame) -> None:
        """The active threads arrive.

        Raises BarrierError when there are more than the phase has room for.
        """
        threads = len(frame.active())
        if self.arrived + threads > self.count:
            raise BarrierError(
                f"{self.name}: {threads} threads arrive, {self.arrived} have arrived in phase {self.phase} already, "
                f"and the barrier counts {self.count}"
            )
        self.arrived += threads
        warps = frame.warps if frame.mask is None else np.unique(frame.active() // WARP)
        self._gathered = np.maximum(self._gathered, self.order.release(warps))
        self._advance()

    def signal(self, published: np.ndarray) -> None:
        """One arrival that nobody makes in person: a commit of tcgen05.

        Raises BarrierError.
        """
        if self.arrived == self.count:
            raise BarrierError(f"{self.name}: a commit arrives in phase {self.phase}, and the barrier has {self.count}")
        self.arrived += 1
        self._gathered = np.maximum(self._gathered, published)
        self._advance()

    def count_in(self, threads: int) -> None:
        """Arrivals that tell nothing of what the threads did before.

        Raises BarrierError.
        """
        if self.arrived + threads > self.count:
            raise BarrierError(f"{self.name}: {threads} copies arrive in phase {self.phase}, it counts {self.count}")
        self.arrived += threads
        self._advance()

    def expect(self, size: int) -> int:
        """A TMA load announces its bytes; the clock of its writes."""
        self.bytes += size
        self.loaded = True
        self.order.clock[self.agent] += 1
        return int(self.order.clock[self.agent])

    def land(self, size: int, clock: int) -> None:
        """The bytes of a TMA load have arrived."""
        self.bytes -= size
        self._gathered[self.agent] = max(self._gathered[self.agent], clock)
        self._advance()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete, as test_wait answers."""
        return self.phase & 1 != parity

    def _advance(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.phase += 1
            self.arrived = 0
            self.published = self._gathered.copy()

    def state(self) -> str:
        """`k_full[0]: phase 2, 0 of 128 arrived, 4096 bytes outstanding`."""
        return (
            f"{self.name}: phase {self.phase}, {self.arrived} of {self.count} arrived, {self.bytes} bytes outstanding"
        )


@dataclass
class PhaseWait:
    """mbarrier.try_wait.parity."""

    barrier: Mbarrier
    parity: int
    frame: Frame

    def over(self) -> bool:
        return self.barrier.passed(self.parity)

    def reason(self) -> str:
        return f"{threads_text(self.frame.tid)} wait for parity {self.parity} of {self.barrier.state()}"


def wait_phase(barrier: Mbarrier, parity: int, frame: Frame) -> Iterator[Wait | None]:
    """Wait for a phase, then know what was done before it."""
    if not barrier.passed(parity):
        yield PhaseWait(barrier, parity, frame)
    barrier.order.acquire(frame.warps, barrier.published)


@dataclass
class NamedBarrier:
    """bar.sync with one id: `count` threads wait for each other.

    Warps of a role come together here and one by one on a GPU. So a warp that was not in the turn before must know
    that turn to be over: else it could have come in the middle of it, and have let others go too early.
    """

    name: str
    order: Order
    count: int = 0
    waiting: int = 0
    turn: int = 0
    warps: list[np.ndarray] = field(default_factory=list)
    # The warps of the turn before, and their clocks when they came.
    last_warps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    last_clocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def check_turn(self, warps: np.ndarray) -> None:
        """Raises BarrierError when one of these warps may meet the turn before."""
        if len(self.last_warps) == 0:
            return
        over = (self.order.knows[np.ix_(warps, self.last_warps)] > self.last_clocks).any(1)
        if not over.all():
            raise BarrierError(
                f"{self.name}: warp {warps[~over][0]} may come while warps {self.last_warps.min()} to "
                f"{self.last_warps.max()} still meet there, since nothing tells it that they have gone on"
            )

    def complete(self) -> None:
        """All have come: they know of each other, and the next turn begins."""
        together = np.concatenate(self.warps)
        self.last_warps, self.last_clocks = together, self.order.clock[together]
        self.order.acquire(together, self.order.release(together))
        self.turn += 1
        self.waiting = 0
        self.warps = []


@dataclass
class NamedWait:
    """A thread's stay in a named barrier."""

    barrier: NamedBarrier
    turn: int
    frame: Frame

    def over(self) -> bool:
        return self.barrier.turn != self.turn

    def reason(self) -> str:
        b = self.barrier
        return f"{threads_text(self.frame.tid)} wait in {b.name}: {b.waiting} of {b.count} threads are there"


def sync(barrier: NamedBarrier, count: int, frame: Frame) -> Iterator[Wait | None]:
    """Arrive and wait.

    Raises BarrierError when threads disagree on the count, more than that come, or two turns may mix.
    """
    if count % WARP:
        raise DivergenceError(f"{barrier.name}: counts {count} threads, wanted whole warps")
    warps = frame.whole_warps(barrier.name)
    barrier.check_turn(warps)
    if barrier.waiting == 0:
        barrier.count = count
    elif barrier.count != count:
        raise BarrierError(f"{barrier.name}: counts {barrier.count} threads in some places and {count} in others")
    barrier.waiting += len(frame.tid)
    barrier.warps.append(warps)
    if barrier.waiting > count:
        raise BarrierError(f"{barrier.name}: {barrier.waiting} threads came, it counts {count}")
    if barrier.waiting == count:
        barrier.complete()
        yield None
    else:
        yield NamedWait(barrier, barrier.turn, frame)


@dataclass
class Children:
    """Parts of a frame that went separate ways; the frame goes on when all of them are done."""

    running: list[Any]

    def over(self) -> bool:
        return not any(task.alive for task in self.running)

    def reason(self) -> str:
        return "waiting for threads that took another branch"


@dataclass
class Fork:
    """Asks the scheduler to run coroutines and to resume the asker when they are done."""

    frames: list[tuple[Frame, Iterator[Wait | None]]]

    def over(self) -> bool:
        return False

    def reason(self) -> str:
        return "about to split"
