"""In which order workers get the files of a run: a long one that comes last leaves the others without work."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

# Over half a minute each, the longest first.
LONG = (
    "pack/test_pack_launches.py",
    "runtime/test_cells.py",
    "simulator/test_simulator_kernels.py",
    "ops/test_ops_cutedsl.py",
    "spec/test_mutations.py",
    "runtime/test_verify.py",
    "dsl/test_dsl_shared_attention.py",
    "dsl/test_dsl_backward.py",
    "packaging/test_wheel.py",
    "dsl/test_dsl_lanes.py",
    "runtime/test_trees.py",
    "pack/test_release_wheel.py",
    "dsl/test_dsl_cutedsl.py",
    "runtime/test_surroundings.py",
    "packaging/test_dependencies.py",
    "runtime/test_compiler.py",
    "packaging/test_your_gpu.py",
    "test_rehearsal.py",
)
TESTS = Path(__file__).parent


def longest_first(items: list[pytest.Item]) -> None:
    """Put the tests of long files first, then those of files with many tests. A file's tests stay as they are."""
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    numbers = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(item.path, len(LONG)), -numbers[item.path]))
