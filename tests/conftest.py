"""Markers: `gpu` tests run where a Hopper GPU is, `slow` ones can be left out with `pytest -m "not slow"`.

Of the many cases of a test with `drawn(n)`, n are not slow: others in every run, drawn by MSA_TILES_SEED. `--seeds N`
runs each test that draws under N seeds; `--rehearse FILE` runs GPU tests without a GPU (tests/rehearsal.py).
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from order import longest_first
from rehearsal import Rehearsal
from seeds import MANY_SEEDS, QUICK, SHARE, Seeds, numbers_of, seed_all

CAPABILITY_MAJOR = 9
_LEFT_OUT = pytest.StashKey[int]()
# Tensors of tests are small, and tests run side by side: threads would wait for each other.
torch.set_num_threads(1)
# How long an example takes is the machine's business, not the code's. Nothing is kept between runs: an example that
# failed once would be tried again in that checkout for ever, whatever has become of it. The seed repeats a run, which
# hypothesis would not look at where CI is set.
hypothesis.settings.register_profile(
    "msa_tiles",
    deadline=None,
    database=None,
    print_blob=True,
    derandomize=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("msa_tiles")


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device, this machine has none"
    major, minor = torch.cuda.get_device_capability()
    if major != CAPABILITY_MAJOR:
        return f"needs a CUDA device of capability {CAPABILITY_MAJOR}.x, this one has {major}.{minor}"
    return None


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    """The seed of whatever a run draws by itself; workers are started later and take it over."""
    os.environ.setdefault("MSA_TILES_SEED", str(random.randrange(1 << 31)))
    if config.option.rehearse is not None:
        config.option.dist, config.option.tx = "no", []  # workers of xdist would keep what they note to themselves
    if config.getoption("--seeds") is not None:
        os.environ[SHARE] = str(MANY_SEEDS)
    elif "not slow" in config.option.markexpr:
        os.environ[SHARE] = str(QUICK)
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = os.environ["MSA_TILES_SEED"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse", metavar="FILE", type=Path, help="run GPU tests without a GPU (see tests/rehearsal.py)"
    )
    parser.addoption("--seeds", metavar="N", help="run each test that draws under N seeds (see tests/seeds.py)")


def pytest_sessionstart(session: pytest.Session) -> None:
    if (path := session.config.option.rehearse) is not None:
        session.config.pluginmanager.register(Rehearsal(path), "rehearsal of msa_tiles")
    if (text := session.config.option.seeds) is not None:
        session.config.pluginmanager.register(Seeds(numbers_of(text)), "seeds of msa_tiles")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_all(item.nodeid, item.get_closest_marker("gpu") is not None)


def pytest_report_header() -> str:
    return f"MSA_TILES_SEED={os.environ['MSA_TILES_SEED']}"


def pytest_xdist_auto_num_workers() -> int:
    """A worker for every core; where a GPU is, none, since its tests measure memory and time on it."""
    return 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are left out, and skipped where nothing else was asked for: thousands of reports cost."""
    _draw(items)
    if hasattr(config, "workerinput"):  # of xdist: what is alone keeps its order
        longest_first(items)
    found = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if found else None
    if reason is None:
        return
    if len(found) == len(items) or "gpu" in config.option.markexpr:
        for item in found:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=found)
    config.stash[_LEFT_OUT] = len(found)
    if hasattr(config, "workeroutput"):  # of xdist
        config.workeroutput["gpu tests"] = len(found)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every worker of xdist leaves out the same tests."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("gpu tests", 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays (below): garbage collections on the way would take a quarter of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _settle() -> None:
    """What is there by now stays: a garbage collection, as benchmarks and tests ask for them, need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _settle()


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """Whatever the file before has loaded: in a process that runs for minutes a collection takes over a second."""
    _settle()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for all GPU tests that did not run."""
    reason = _why_no_gpu()
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if str(reason) in str(report.longrepr)]
    if reason is not None and (count := len(skipped) + config.stash.get(_LEFT_OUT, 0)):
        terminalreporter.write_line(f"{count} GPU tests did not run: {reason}")


def _draw(items: list[pytest.Item]) -> None:
    """Marks the cases of `drawn` tests that this run did not draw as slow."""
    cases: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append((mark.args[0], item))
    for name, found in cases.items():
        quick = [item for _, item in found if not item.get_closest_marker("slow")]
        count = min(found[0][0], len(quick))
        kept = random.Random(f"{os.environ['MSA_TILES_SEED']} {name}").sample(range(len(quick)), count)
        for place, item in enumerate(quick):
            if place not in kept:
                item.add_marker(pytest.mark.slow)
