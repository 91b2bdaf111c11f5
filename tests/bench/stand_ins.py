"""A bench that computes nothing, and a clock that takes the milliseconds from the calls themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msa_tiles.bench.cases import Case
from msa_tiles.bench.harness import Bench, Contender, Skipped
from msa_tiles.bench.sensors import Condition

CASE = Case("prefill_32k_u", "select_blocks", 8, 8, None, {})


class FakeClock:
    """Remembers who was timed when."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def load(self, calls):
        names = {call.name for call in calls}
        assert len(names) == 1
        self.order.append(names.pop())
        return lambda: sum(call() for call in calls), "graph"

    def run(self, play, times):
        each = [play() for _ in range(times)]
        return each, sum(each)

    def condition(self):
        return Condition(1980, 512.3)


def named_call(name: str, ms: float | Exception) -> Callable[[], float]:
    """A call that takes this long, or raises this."""

    def call():
        if isinstance(ms, Exception):
            raise ms
        return ms

    call.name = name
    return call


def contender(name: str, ms: float, wrong: str | None = None, error: Exception | None = None) -> Contender:
    return Contender(name, lambda inputs: named_call(name, error or ms), lambda inputs, result: wrong)


def ours(times: Mapping[str, float | Exception]) -> Callable[[str, Any], Callable[[], float]]:
    return lambda dsl, inputs: named_call(dsl, times[dsl])


def bench(
    *peers: Contender | Skipped,
    mine: Mapping[str, float | Exception] | None = None,
    size: int = 40,
    check: Callable[[Any, Any], str | None] = lambda inputs, result: None,
    call: Callable[[str, Any], Callable[[], float]] | None = None,
) -> Bench:
    return Bench(CASE, lambda seed: seed, size, call or ours(mine or {"tilelang": 2.0}), check, peers)
