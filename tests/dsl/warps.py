"""Runs the device code of a CuTe DSL kernel on the CPU: its source as plain Python, a thread for every lane.

Only one lane runs at a time; wherever lanes can wait, a seeded scheduler goes by priorities that now and then change to
pick the next one, or the copy or product that completes. What is asynchronous reads its operands when it completes.
Memory begins as NaN, barriers count what arrives, and a state in which nobody can go on is an error.
"""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable
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


class Machine:
    """The lanes of one thread block and what they started."""

    def __init__(self, warps: int, lanes: int, seed: int) -> None:
        self.warps, self.lanes = warps, lanes
        self.random = random.Random(seed)
        self.local = threading.local()
        # What is under way; a queue completes in order.
        self.queues: dict[Any, list[Callable[[], None]]] = {}
        # Of warps and queues. Those above run or complete before the others, however long that takes: so races show.
        self.priorities: dict[Any, float] = {}
        self.barriers: dict[int, Barrier] = {}
        self.meeting: dict[Any, list[int]] = {}
        self.failure: BaseException | None = None

    def run(self, program: Callable[[], None]) -> None:
        """All lanes run the program to its end."""
        self.turns = [threading.Semaphore(0) for _ in range(self.warps * self.lanes)]
        self.back = threading.Semaphore(0)
        self.conditions: list[Callable[[], bool] | None] = [lambda: True] * len(self.turns)
        threads = [threading.Thread(target=self._lane, args=(i, program), daemon=True) for i in range(len(self.turns))]
        for thread in threads:
            thread.start()
        while self.failure is None and any(self.conditions):
            ready = {key: queue for key, queue in self.queues.items() if queue}
            for i, condition in enumerate(self.conditions):
                if condition and condition():
                    ready.setdefault(i // self.lanes, []).append(i)
            if not ready:
                self.failure = Deadlock(f"{sum(map(bool, self.conditions))} lanes wait for ever")
                break
            chosen = max(ready, key=self._priority)
            if self.random.random() < CHANGES:
                self.priorities[chosen] = self.random.random()
            if chosen in self.queues:
                self.queues[chosen].pop(0)()
            else:
                self._resume(self.random.choice(ready[chosen]))
        failure = self.failure
        self.failure = failure or Stopped()
        for i, condition in enumerate(self.conditions):
            if condition:
                self._resume(i)
        if failure is not None:
            raise failure
        if any(self.queues.values()):
            raise AssertionError("something is under way when the block has left")

    def _priority(self, name: Any) -> float:
        return self.priorities.setdefault(name, self.random.random())

    def _resume(self, index: int) -> None:
        self.turns[index].release()
        self.back.acquire()

    def _lane(self, index: int, program: Callable[[], None]) -> None:
        self.local.index = index
        self.turns[index].acquire()
        try:
            program()
        except Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        self.conditions[index] = None
        self.back.release()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Let others run until the condition holds."""
        index = self.local.index
        self.conditions[index] = condition
        self.back.release()
        self.turns[index].acquire()
        if self.failure is not None:
            raise Stopped

    def meet(self, name: Any, members: int) -> None:
        """Wait for `members` lanes to come here."""
        meetings = self.meeting.setdefault(name, [0])
        meetings[0] += 1
        target = -(-meetings[0] // members) * members
        self.wait(lambda: meetings[0] >= target)

    def later(self, queue: Any, action: Callable[[], None]) -> None:
        """Start something asynchronous; things of one queue complete in order."""
        self.queues.setdefault(queue, []).append(action)

    @property
    def lane(self) -> int:
        return int(self.local.index) % self.lanes

    @property
    def warp(self) -> int:
        return int(self.local.index) // self.lanes


class Barrier:
    """An mbarrier: arrivals and bytes of the phase under way."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0

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
        box = machine.meeting.setdefault(("values", machine.warp), [{}, {}])  # type: ignore[list-item]
        turn = machine.local.__dict__.setdefault("turn", 0)
        machine.local.turn = turn ^ 1
        box[turn][machine.lane] = value  # type: ignore[index]
        self.sync_warp()
        return [box[turn][lane] for lane in range(machine.lanes)]  # type: ignore[index]

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
        found = self.machine.barriers[barrier.place]
        self.machine.wait(lambda: found.passed(parity))

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
    tree = Elections().visit(ast.parse(source or path.read_text()))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    namespace = dict(names)
    # This module's own `annotations` feature holds for what it compiles: annotations name types that are not there.
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), namespace)
    return namespace


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
