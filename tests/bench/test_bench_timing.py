"""Timing arithmetic on a clock that lies in a known way."""

from __future__ import annotations

import pytest

from msa_tiles.bench.sensors import Condition
from msa_tiles.bench.timing import RUNS, SLOW_RUNS, measure, runs_for, sets_needed


class FakeClock:
    """Every play takes `ms`, each eleventh ten times as long; nothing is slept."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.plays = 0

    def load(self, calls):
        def play() -> None:
            for call in calls:
                call()

        return play, "fake"

    def run(self, play, times):
        each = []
        for _ in range(times):
            play()
            self.plays += 1
            each.append(self.ms * (10 if self.plays % 11 == 0 else 1))
        return each, sum(each)

    def condition(self):
        return Condition(1700 + self.plays, 650.0)


def test_figures_are_per_call_and_the_median_ignores_outliers():
    called = []
    timing = measure([lambda: called.append(0), lambda: called.append(1)], FakeClock(4.0), seconds=0.2)
    assert timing.runs == 50
    assert timing.median_ms == 2.0
    assert timing.condition == Condition(1754, 650.0), "read after the last play"
    outliers = sum((i + 4 + 1) % 11 == 0 for i in range(50))
    assert timing.sustained_ms == pytest.approx((50 - outliers + 10 * outliers) * 4.0 / 50 / 2)
    # Sets rotate: the second call's turn comes between two of the first.
    assert called == [0, 1] * (50 + 4)


@pytest.mark.parametrize(
    ("ms", "seconds", "runs"), [(0.01, 1.0, 100_000), (20, 1.0, 50), (90, 1.0, RUNS), (400, 1.0, SLOW_RUNS), (0, 0, 20)]
)
def test_at_least_twenty_runs_and_the_seconds_asked_for(ms, seconds, runs):
    assert runs_for(ms, seconds) == runs


@pytest.mark.parametrize(("size", "l2", "sets"), [(512, 50, 1), (101, 50, 1), (100, 50, 2), (42, 50, 3), (1, 50, 101)])
def test_rotation_touches_more_than_twice_the_l2_between_two_uses(size, l2, sets):
    assert sets_needed(size, l2) == sets
    assert sets * size > 2 * l2
