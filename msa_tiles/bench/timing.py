"""How a call is timed, apart from what is timed and on which clock."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from msa_tiles.bench.sensors import Condition, Sensors

Call = Callable[[], object]

RUNS = 20
SLOW_MS = 100.0
SLOW_RUNS = 3
"""Fewest timed runs of a call, and of a call that takes longer than SLOW_MS (dense attention on long prompts)."""


class Clock(Protocol):
    """Times a round of calls on a device."""

    def load(self, calls: Sequence[Call]) -> tuple[Call, str]:
        """`(play, how)`: `play()` runs all `calls` once in turn; `how` is "graph", or why it is not one."""

    def run(self, play: Call, times: int) -> tuple[list[float], float]:
        """Milliseconds of each of `times` plays in a row, and of all of them from the first start to the last end."""

    def condition(self) -> Condition | None:
        """The card's condition towards the end of the latest run, where it can be read."""


class CudaClock:
    """CUDA events around replays of a CUDA graph; around eager calls where a call cannot be captured."""

    def __init__(self, sensors: Sensors | None = None) -> None:
        self._sensors = sensors
        self._condition: Condition | None = None

    def load(self, calls: Sequence[Call]) -> tuple[Call, str]:
        def eager() -> None:
            for call in calls:
                call()

        # Once before capture, after the call that was checked: autotuners and library handles must have settled.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                eager()
        except Exception as error:  # whatever a peer raises, its eager time is still worth having
            torch.cuda.synchronize()
            return eager, f"eager: {str(error).strip().splitlines()[0]}" if str(error).strip() else f"eager: {error!r}"
        return graph.replay, "graph"

    def run(self, play: Call, times: int) -> tuple[list[float], float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            play()
            mark.record()
        # The host runs ahead of the device, which still has the last plays to do.
        self._condition = None if self._sensors is None else self._sensors.read()
        torch.cuda.synchronize()
        each = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
        return each, marks[0].elapsed_time(marks[-1])

    def condition(self) -> Condition | None:
        return self._condition


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: `sustained_ms` over at least a second, `median_ms` of single plays."""

    sustained_ms: float
    median_ms: float
    runs: int
    how: str
    condition: Condition | None = None


def runs_for(estimate_ms: float, seconds: float) -> int:
    """Plays that last at least `seconds` and are at least RUNS (SLOW_RUNS for slow ones)."""
    fewest = RUNS if estimate_ms <= SLOW_MS else SLOW_RUNS
    return max(fewest, math.ceil(seconds * 1e3 / max(estimate_ms, 1e-3)))


def measure(calls: Sequence[Call], clock: Clock, seconds: float) -> Timing:
    """Time `calls` (the same work on inputs of their own) played in turn; figures are per call."""
    play, how = clock.load(calls)
    estimate = clock.run(play, 1)[0][0]
    if estimate <= SLOW_MS:  # the first play warms up, and is off by too much where plays are short
        estimate = statistics.median(clock.run(play, 3)[0])
    runs = runs_for(estimate, seconds)
    each, total = clock.run(play, runs)
    # One mark per play costs next to nothing, so that one run gives both figures.
    return Timing(total / runs / len(calls), statistics.median(each) / len(calls), runs, how, clock.condition())


def sets_needed(bytes_per_set: int, l2_bytes: int) -> int:
    """Input sets to rotate through so that more than twice the L2 is touched before the first one comes round again."""
    return 1 + 2 * l2_bytes // max(1, bytes_per_set)
