"""Records which cells were simulated: a cell whose every case passed in this session, none left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from msa_tiles.commands.support import is_generated
from msa_tiles.runtime import evidence
from msa_tiles.runtime.registry import default_registry

PASSED: set[tuple[str, str]] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if report.when == "call" and report.passed and {"cell", "case"} <= parameters.keys():
        PASSED.add((parameters["cell"].id, parameters["case"]))


def pytest_sessionfinish() -> None:
    if not PASSED:
        return
    from simulated_calls import name_of
    from test_simulator_kernels import CASES

    for cell in default_registry().select(dsl="tilelang"):
        cases = {(cell.id, case) for case in CASES.get(name_of(cell), ())}
        if cases and cases <= PASSED and is_generated(cell):
            evidence.mark_simulated(cell)
