"""Runs the coroutines of CTAs side by side in random order, and lands TMA loads when nobody can go on without."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from msa_tiles.simulator.barriers import Children, Fork, PhaseWait, Wait
from msa_tiles.simulator.cta import Cta
from msa_tiles.simulator.errors import DeadlockError, SimulationError
from msa_tiles.simulator.frame import Frame, threads_text

# CTAs that are at work at the same time.
RESIDENT = 4


@dataclass
class Task:
    """A coroutine and what it waits for."""

    frame: Frame
    code: Iterator[Wait | None]
    is_role: bool
    wait: Wait | None = None
    alive: bool = True


class Scheduler:
    """All CTAs of a grid."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance
        self.tasks: list[Task] = []

    def run(self, ctas: Iterable[tuple[Cta, list[tuple[Frame, Iterator[Wait | None]]]]]) -> None:
        """Run every CTA to its end.

        Raises SimulationError.
        """
        coming = iter(ctas)
        resident: list[Cta] = []
        exhausted = False
        while True:
            while not exhausted and len(resident) < RESIDENT:
                entry = next(coming, None)
                if entry is None:
                    exhausted = True
                    break
                cta, roles = entry
                resident.append(cta)
                self.tasks += [Task(frame, code, is_role=True) for frame, code in roles]
            if not resident:
                return
            self._round(resident)
            for cta in [c for c in resident if not any(t.frame.cta is c for t in self.tasks)]:
                cta.end()
                resident.remove(cta)

    def _round(self, resident: list[Cta]) -> None:
        """Every coroutine that can runs until it yields."""
        ready = [task for task in self.tasks if task.wait is None or task.wait.over()]
        if not ready:
            self._land(resident)
            return
        self.random.shuffle(ready)
        for task in ready:
            # A fellow may have made it wait again, or ended it.
            if task.alive:
                self._step(task)
        self.tasks = [task for task in self.tasks if task.alive]

    def _step(self, task: Task) -> None:
        try:
            task.wait = next(task.code)
        except StopIteration:
            task.alive = False
            if task.is_role:
                task.frame.cta.leave(task.frame.role)
        except SimulationError as error:
            raise self._explained(error, task) from error
        if isinstance(task.wait, Fork):
            children = [Task(frame, code, is_role=False) for frame, code in task.wait.frames]
            task.wait = Children(children)
            self.tasks += children

    def _land(self, resident: list[Cta]) -> None:
        """All loads of one mbarrier that somebody waits for.

        Raises DeadlockError when there are none.
        """
        waited = [t.wait.barrier for t in self.tasks if isinstance(t.wait, PhaseWait) and t.wait.barrier.loads]
        if not waited:
            raise DeadlockError(self._report(resident))
        barrier = self.random.choice(waited)
        loads, barrier.loads = barrier.loads, []
        self.random.shuffle(loads)
        for load in loads:
            load()

    def _report(self, resident: list[Cta]) -> str:
        lines = ["every thread waits"]
        for task in self.tasks:
            assert task.wait is not None
            lines.append(f"  CTA {task.frame.cta.index}: {task.wait.reason()}; {_place(task.frame.at)}")
        return "\n".join(lines)

    def _explained(self, error: SimulationError, task: Task) -> SimulationError:
        frame: Any = task.frame
        where = f"{threads_text(frame.tid)} of CTA {frame.cta.index}, {_place(frame.at)}"
        return type(error)(f"{error}\n  {where}")


def _place(node: Any) -> str:
    if node is None:
        return "at the start"
    # The printer declares what a statement names before the statement itself.
    lines = [line for line in str(node).splitlines() if not re.match(r"\s*\w+ = T\.\w+\(", line)]
    return f"at {lines[0].strip()}" if lines else "at a declaration"
