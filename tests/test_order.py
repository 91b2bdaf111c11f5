"""Workers get long files first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from order import LONG, TESTS, longest_first


def item(path: Path, number: int) -> Any:
    return SimpleNamespace(path=path, number=number)


def test_files_that_take_long_are_there() -> None:
    assert [name for name in LONG if not (TESTS / name).is_file()] == []


def test_long_files_come_first_and_small_ones_last() -> None:
    few, many, longest = TESTS / "test_few.py", TESTS / "a" / "test_many.py", TESTS / LONG[0]
    next_longest = TESTS / LONG[1]
    found = [item(few, 0), *(item(many, n) for n in range(3)), item(next_longest, 0)]
    found += [item(longest, n) for n in range(2)]
    longest_first(found)
    assert [(each.path, each.number) for each in found] == [
        *((longest, n) for n in range(2)), (next_longest, 0), *((many, n) for n in range(3)), (few, 0)
    ]  # fmt: skip


def test_xdist_keeps_the_order(pytestconfig: pytest.Config) -> None:
    """By itself it begins with the files that have most tests; its option says that it does not."""
    assert pytestconfig.getoption("loadscopereorder", False) is False
