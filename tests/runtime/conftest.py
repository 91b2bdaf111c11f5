"""A registry with one tiny kernel, and a cache in which it is compiled once for all tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import compile_variant
from msa_tiles.runtime.registry import Cell, Registry, Target
from msa_tiles.runtime.toolchain import find_nvcc

DATA = Path(__file__).parent / "data" / "generated"


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.read(DATA)


@pytest.fixture(scope="session")
def cell(registry: Registry) -> Cell:
    return registry.cells[0]


@pytest.fixture(scope="session")
def cute(cell: Cell) -> Cell:
    """The tiny kernel in CuTe DSL; its index entry is TileLang's."""
    file = cell.file.parents[2] / "cutedsl" / "sm90" / cell.file.name
    return dataclasses.replace(cell, id="scale_rows.cutedsl.sm90.bf16", dsl="cutedsl", file=file)


@pytest.fixture(scope="session")
def target(registry: Registry) -> Target:
    return registry.targets["sm90"]


@pytest.fixture(scope="session")
def nvcc() -> Path:
    found = find_nvcc()
    if found is None:
        pytest.skip("needs nvcc: install the CUDA toolkit or the extra `cuda`")
    return found


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def entry(cell: Cell, target: Target, cache: Cache, nvcc: Path) -> Entry:
    """The first variant, compiled."""
    return compile_variant(cell, cell.ci[0], target.arch, cache)
