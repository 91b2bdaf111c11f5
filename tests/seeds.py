"""`--seeds N`: each test that draws runs under N seeds, one after the other, and stops at the first that fails.

Tests seed what they draw, by a constant or by MSA_TILES_SEED (a generator's by `torch.randint(1 << 31, ())`).
In run number 0 these seeds are what is written; in run number n each becomes another one, which n and the old one
decide: of torch and NumPy generators, of `random`, and of hypothesis. Nothing in a test need know of it. A test whose
first run draws nothing runs once, and so does one that is marked as `planted`: that some draw shows a fault does not
mean that every draw does.

What a fixture of a module or a session draws, and what a module draws as it is imported, is that of run number 0.
A test of many draws makes a twentieth of them under each seed (`examples`): 200 seeds are ten times a run's draws.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol
from hypothesis import core

_SEEDS = 1 << 31
# In the environment of a run, and of its workers: how many draws of a test make up for one that is made.
SHARE = "MSA_TILES_DRAWS_SHARE"
QUICK, MANY_SEEDS = 3, 20  # where slow tests are left out; where a test runs under many seeds


def seed_of(*parts: object) -> int:
    """A number that follows from these parts."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:8], "little") % _SEEDS


def examples(count: int) -> int:
    """How many draws a test makes that makes ``count`` where everything runs once."""
    return -(-count // int(os.environ.get(SHARE, "1")))


def seed_all(test: str, on_gpu: bool = False) -> None:
    """Seed what a test draws from without a generator of its own, alone or after others: on the CPU, or on GPUs too."""
    seed = seed_of(os.environ["MSA_TILES_SEED"], test)
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def numbers_of(text: str) -> range:
    """The runs that an option names: `200` are numbers 0 to 199, `7-7` is number 7."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


class Seeds:
    """Plugin that runs each test that draws once for each of these numbers."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.number = 0
        self.draws = False
        self._before = _state()
        self._seed, self._forced = os.environ["MSA_TILES_SEED"], core.global_force_seed
        self._replace()

    def other(self, seed: Any) -> Any:
        """What a seed becomes in this run. To ask is to draw."""
        if seed is None:
            return None
        self.draws = True
        return seed_of(self.number, seed) if self.number else seed

    def _replace(self) -> None:
        """Let whatever is seeded ask for its seed here."""
        other = self.other

        class Generator(torch.Generator):
            def manual_seed(self, seed: int) -> torch.Generator:
                return super().manual_seed(other(seed))

        class Random(random.Random):
            def seed(self, a: Any = None, version: int = 2) -> None:
                super().seed(other(a), version)

        def asking(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda seed=None, *rest: function(other(seed), *rest)

        torch.Generator, random.Random = Generator, Random  # type: ignore[misc]
        torch.manual_seed = torch.random.manual_seed = asking(torch.manual_seed)
        np.random.default_rng = asking(np.random.default_rng)

    def _under(self, number: int) -> None:
        self.number = number
        os.environ["MSA_TILES_SEED"] = str(seed_of(number, self._seed)) if number else self._seed
        core.global_force_seed = seed_of(number, self._forced) if number else self._forced

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        """What is shared is drawn once, whatever the run that needs it first."""
        number, draws = self.number, self.draws
        if fixturedef.scope != "function":
            self._under(0)
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._under(number)
                self.draws = draws

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        seed_all(item.nodeid)
        self._before = _state()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """What is drawn without a generator counts, and whatever hypothesis draws."""
        self.draws |= hasattr(getattr(item, "obj", None), "hypothesis")
        try:
            return (yield)
        finally:
            self.draws |= _state() != self._before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        # After each run goes what is the test's own, after the last what the next test does not need.
        sibling: Any = _Sibling(item)
        for number in self.numbers if item.get_closest_marker("planted") is None else range(1):
            self._under(number)
            self.draws = False
            item._initrequest()  # type: ignore[attr-defined]
            reports = runtestprotocol(item, log=False, nextitem=sibling)
            if not self.draws or any(not report.passed for report in reports):
                break
        count = max(number + 1 - self.numbers.start, 1) if self.draws else 0
        self._under(0)
        call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
        if call.excinfo is not None:
            reports.append(item.ihook.pytest_runtest_makereport(item=item, call=call))
        # Whether it draws, and how often it ran, in a report of `--junit-xml`.
        reports[-1].user_properties.append(("seeds", count))
        for report in reports:
            if report.failed:
                place = f"MSA_TILES_SEED={self._seed} pytest --seeds {number}-{number} '{item.nodeid}'"
                report.sections.append(
                    ("seed", f"run {number} of {self.numbers[0]} to {self.numbers[-1]}; again: {place}")
                )
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


class _Sibling:
    """A test beside another one, that needs the fixtures of its module."""

    def __init__(self, item: pytest.Item) -> None:
        self._chain = item.listchain()[:-1]

    def listchain(self) -> list[Any]:
        return self._chain


def _state() -> tuple[Any, ...]:
    return (bytes(torch.default_generator.get_state().numpy()), random.getstate(), np.random.get_state()[2])
