"""Runs the device code of a CuTe DSL kernel on the CPU: its source as plain Python, a thread for every lane.

Only one lane runs at a time; wherever lanes can wait, a seeded scheduler goes by priorities that now and then change to
pick the next one, or the copy or product that completes. The lane that waits does so itself, and hands over: to go
through a thread for that would double the switches. What is asynchronous reads its operands when it completes.
Memory begins as NaN, barriers count what arrives, and a state in which nobody can go on is an error.
"""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from msa_tiles.dsl import table as vocabulary
from msa_tiles.dsl import words
from msa_tiles.dsl.table import Table
from msa_tiles.sources import PACKAGE

CHANGES = 0.02  # how often what was chosen gets another priority


class Deadlock(Exception):
    """Every lane waits and nothing is under way."""


class Stopped(BaseException):
    """Unwinds the lanes that are left when a run ends early."""


def held() -> threading.Lock:
    """A lock that another thread releases."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Machine:
    """The lanes of one thread block and what they started."""

    def __init__(self, warps: int, lanes: int, seed: int) -> None:
        self.warps, self.lanes = warps, lanes
        self.random = random.Random(seed)
        self.local = threading.local()
        # What was started; a queue completes in order. Those that are not empty are under way.
        self.queues: dict[Any, list[Callable[[], None]]] = {}
        self.under_way: dict[Any, list[Callable[[], None]]] = {}
        # Of warps and queues. Those above run or complete before the others, however long that takes: so races show.
        self.priorities: dict[Any, float] = {}
        self.barriers: dict[int, Barrier] = {}
        self.meeting: dict[Any, Meeting] = {}
        self.shown: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        self.failure: BaseException | None = None

    def run(self, program: Callable[[], None]) -> None:
        """All lanes run the program to its end."""
        self.turns = [held() for _ in range(self.warps * self.lanes)]
        self.over = held()
        self.conditions: list[Callable[[], bool] | None] = [lambda: True] * len(self.turns)
        self.running = len(self.turns)
        self.order = sorted(range(self.warps), key=self._priority, reverse=True)
        threads = [threading.Thread(target=self._lane, args=(i, program), daemon=True) for i in range(len(self.turns))]
        for thread in threads:
            thread.start()
        self._hand_over()
        self.over.acquire()
        failure = self.failure
        self.failure = failure or Stopped()
        for turn, condition in zip(self.turns, self.conditions, strict=True):
            if condition:
                turn.release()
                self.over.acquire()
        if failure is not None:
            raise failure
        if self.under_way:
            raise AssertionError("something is under way when the block has left")

    def _priority(self, name: Any) -> float:
        if name not in self.priorities:
            self.priorities[name] = self.random.random()
        return self.priorities[name]

    def _next(self) -> int | None:
        """The lane whose turn it is, when whatever comes before it is complete; none when the run is over."""
        while self.failure is None and self.running:
            ready: list[int] = []
            chosen = max(self.under_way, key=self._priority, default=None)
            for warp in self.order:
                if chosen is not None and self.priorities[warp] < self.priorities[chosen]:
                    break
                first = warp * self.lanes
                conditions = self.conditions[first : first + self.lanes]
                # Lanes that wait for the same thing share a condition.
                holding = {condition for condition in set(conditions) if condition and condition()}
                if holding:
                    ready = [i for i, condition in enumerate(conditions, first) if condition in holding]
                    chosen = warp
                    break
            if chosen is None:
                self.failure = Deadlock(f"{self.running} lanes wait for ever")
                break
            if self.random.random() < CHANGES:
                self.priorities[chosen] = self.random.random()
                self.order.sort(key=self.priorities.__getitem__, reverse=True)
            if ready:
                return self.random.choice(ready)
            self._complete(chosen)
        return None

    def _complete(self, name: Any) -> None:
        """What was started first of a queue; it is no lane's, whichever thread this is."""
        queue = self.under_way[name]
        action = queue.pop(0)
        if not queue:
            del self.under_way[name]
        index = self.local.__dict__.pop("index", None)
        try:
            action()
        finally:
            if index is not None:
                self.local.index = index

    def _hand_over(self, own: int | None = None) -> None:
        """Let the next lane run, or the run end; a lane that is still there comes back when it is its turn."""
        try:
            following = self._next()
        except BaseException as error:
            following, self.failure = None, self.failure or error
        if following is not None and following == own:
            return
        (self.over if following is None else self.turns[following]).release()
        if own is not None:
            self.turns[own].acquire()

    def _lane(self, index: int, program: Callable[[], None]) -> None:
        self.turns[index].acquire()
        self.local.index = index
        try:
            program()
        except Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        self.conditions[index] = None
        self.running -= 1
        self._hand_over()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Let others run until the condition holds."""
        self.conditions[self.local.index] = condition
        self._hand_over(self.local.index)
        if self.failure is not None:
            raise Stopped

    def meet(self, name: Any, members: int) -> None:
        """Wait for `members` lanes to come here."""
        self.wait(self.meeting.setdefault(name, Meeting()).come(members))

    def later(self, queue: Any, action: Callable[[], None]) -> None:
        """Start something asynchronous; things of one queue complete in order."""
        self.under_way[queue] = self.queues.setdefault(queue, [])
        self.under_way[queue].append(action)

    @property
    def lane(self) -> int:
        return int(self.local.index) % self.lanes

    @property
    def warp(self) -> int:
        return int(self.local.index) // self.lanes


class Meeting:
    """A place where lanes wait for each other, time and again."""

    def __init__(self) -> None:
        self.here = 0
        self.conditions: dict[int, Callable[[], bool]] = {}

    def come(self, members: int) -> Callable[[], bool]:
        """Whether all have come that this lane waits for."""
        self.here += 1
        target = -(-self.here // members) * members
        return self.conditions.setdefault(target, lambda: self.here >= target)


class Barrier:
    """An mbarrier: arrivals and bytes of the phase under way."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0
        self.conditions = tuple(partial(self.passed, parity) for parity in range(2))

    def arrive(self, size: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the barrier was made for"
        self.pending -= 1
        self.bytes += size
        self._turn()

    def receive(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.arrivals
            self.phase += 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Pointer:
    """A place in an array of barriers, or a column of tensor memory."""

    def __init__(self, of: Any, place: int = 0) -> None:
        self.of, self.place = of, place

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.of, self.place + offset)


class Array:
    """A tensor: None selects a whole dimension."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape = self.layout = values.shape
        self.element_type = float
        self.iterator = Pointer(self)

    @staticmethod
    def _index(index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        return tuple(slice(None) if i is None else i for i in index)

    def __getitem__(self, index: Any) -> Any:
        found = self.values[self._index(index)]
        return Array(found) if isinstance(found, np.ndarray) else found.item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[self._index(index)] = value

    def load(self) -> Array:
        return Array(self.values.copy())

    def to(self, _element: Any) -> Array:
        return self

    def fill(self, value: Any) -> None:
        self.values[...] = value

    def store(self, other: Array) -> None:
        self.values[...] = other.values


class Arch:
    """What kernels call `cute.arch`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def lane_idx(self) -> int:
        return self.machine.lane

    def warp_idx(self) -> int:
        return self.machine.warp

    def thread_idx(self) -> tuple[int, int, int]:
        return self.machine.local.index, 0, 0

    def make_warp_uniform(self, value: Any) -> Any:
        assert self.gather(value).count(value) == self.machine.lanes, "lanes of a warp disagree"
        return value

    def shuffle_sync(self, value: Any, lane: int) -> Any:
        return self.gather(value)[lane]

    def shuffle_sync_bfly(self, value: Any, distance: int) -> Any:
        return self.gather(value)[self.machine.lane ^ distance]

    def vote_ballot_sync(self, condition: bool) -> int:
        return sum(1 << lane for lane, holds in enumerate(self.gather(bool(condition))) if holds)

    def popc(self, bits: int) -> int:
        return bits.bit_count()

    def warp_redux_sync(self, value: int, kind: str) -> int:
        return {"max": max, "min": min}[kind](self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        """The values of all lanes of the warp."""
        machine = self.machine
        box = machine.shown.setdefault(machine.warp, ({}, {}))
        turn = machine.local.__dict__.setdefault("turn", 0)
        machine.local.turn = turn ^ 1
        box[turn][machine.lane] = value
        self.sync_warp()
        return [box[turn][lane] for lane in range(machine.lanes)]

    def elected(self) -> bool:
        """One lane of the warp; elect.sync waits for all of them."""
        self.sync_warp()
        return self.machine.lane == 0

    def sync_warp(self) -> None:
        self.machine.meet(("warp", self.machine.warp), self.machine.lanes)

    def sync_threads(self) -> None:
        self.machine.meet("block", self.machine.warps * self.machine.lanes)

    def mbarrier_init(self, barrier: Pointer, arrivals: int) -> None:
        self.machine.barriers[barrier.place] = Barrier(arrivals)

    def mbarrier_wait(self, barrier: Pointer, parity: int) -> None:
        self.machine.wait(self.machine.barriers[barrier.place].conditions[parity])

    def mbarrier_arrive(self, barrier: Pointer) -> None:
        self.machine.barriers[barrier.place].arrive()

    def mbarrier_arrive_and_expect_tx(self, barrier: Pointer, size: int) -> None:
        self.machine.barriers[barrier.place].arrive(size)

    def atomic_add(self, place: Pointer, value: int) -> int:
        before = int(place.of.values[place.place])
        place.of.values[place.place] += value
        return before

    def fmax(self, a: float, b: float) -> float:
        return float(np.fmax(a, b))

    def rcp_approx(self, value: float) -> float:
        return 1.0 / value

    def fma_packed_f32x2(self, a: Any, b: Any, c: Any) -> tuple[float, ...]:
        return tuple(x * y + z for x, y, z in zip(a, b, c, strict=True))

    def add_packed_f32x2(self, a: Any, b: Any) -> tuple[float, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def mul_packed_f32x2(self, a: Any, b: Any) -> tuple[float, ...]:
        return tuple(x * y for x, y in zip(a, b, strict=True))

    def cp_async_bulk_commit_group(self) -> None:
        """Stores belong to the thread that issues them; here lane 0 issues those of its warp."""

    def cp_async_bulk_wait_group(self, _left: int, read: bool = False) -> None:
        machine = self.machine
        stores = machine.queues.setdefault(("stores", machine.warp), [])
        machine.wait(lambda: not stores)

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Fences, and what only says where registers or tensor memory go.
        if name.startswith(("fence_", "setmaxregister_", "mbarrier_init_fence", "alloc_", "dealloc_", "relinquish_")):
            return lambda *_arguments: None
        raise AttributeError(name)


class Anything:
    """What does not matter here, and whatever is done to it."""

    shape = (1, 1, 1)

    def __getattr__(self, _name: str) -> Anything:
        return self

    def __call__(self, *_what: Any, **_more: Any) -> Anything:
        return self

    def __getitem__(self, _index: Any) -> Anything:
        return self

    def __setitem__(self, _index: Any, _value: Any) -> None:
        """It does not matter either."""

    def __mul__(self, _other: Any) -> Anything:
        return self


class Elections(ast.NodeTransformer):
    """`with elect_one()` becomes a condition: a context cannot skip its body."""

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.items[0].context_expr) != "cute.arch.elect_one()":
            return node
        test = ast.parse("cute.arch.elected()", mode="eval").body
        return ast.copy_location(ast.If(test, node.body, []), node)


def load(path: Path, source: str | None = None, **names: Any) -> dict[str, Any]:
    """Run a module, or `source` in its place, without its imports, which `names` stand in for."""
    namespace = dict(names)
    exec(_code(path, source or path.read_text()), namespace)
    return namespace


@lru_cache
def _code(path: Path, source: str) -> Any:
    tree = Elections().visit(ast.parse(source))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    # This module's own `annotations` feature holds for what it compiles: annotations name types that are not there.
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def tables(chip: Any) -> dict[str, Any]:
    """The words of a thread block's table, and what sets up its buffers and barriers, over the chip's memory."""

    def make_buffers(table: Table, memory: Any, layouts: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, each in table.buffers.items():
            layout = layouts.get(name, tuple(each.dims.values()))
            element = int if each.element.startswith("int") else float
            found[name] = memory.allocate_tensor(element, getattr(layout, "outer", layout), each.align)
        return found

    def make_barriers(table: Table, memory: Any, _atoms: tuple[Any, ...]) -> Pointer:
        first = memory.allocate_array(None, len(table.barriers))
        if chip.thread_idx()[0] == 0:
            for i, (_, arrivals) in enumerate(table.barriers):
                chip.mbarrier_init(first + i, arrivals)
        chip.sync_threads()
        return first

    return {
        **{name: value for name, value in vars(vocabulary).items() if not name.startswith("_")},
        "make_buffers": make_buffers,
        "make_barriers": make_barriers,
        "barriers_of": lambda table, first: {name: first + table.place(name) for name, _ in table.barriers},
        "by_rows": lambda _table, *_names: {},
    }


def changed(table: Table, name: str, **changes: Any) -> Table:
    """The same table but for a pipeline."""
    pipelines = tuple(each._replace(**changes) if each.name == name else each for each in table.pipelines.values())
    return Table(tuple(table.roles.values()), pipelines, tuple(table.buffers.values()), tuple(table.columns.values()))


def motions(**names: Any) -> dict[str, Any]:
    """What kernels do alike, over the same stand-ins: rings, arrivals, claims, and the words between kernels."""
    found: dict[str, Any] = {}
    for helper, wanted in (
        ("pipeline", ("arrive", "arrive_alone", "following", "preceding")),
        ("claims", ("first_claim", "next_claim")),
    ):
        module = load(PACKAGE / "dsl/cutedsl" / f"{helper}.py", **names)
        found |= {name: module[name] for name in wanted}
    return found | {name: value for name, value in vars(words).items() if not name.startswith("_")}
