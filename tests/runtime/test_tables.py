"""The tables of all kernels in CuTe DSL as the audit reads them: nothing of a table may be left out unnoticed."""

from __future__ import annotations

import re

import pytest

from msa_tiles import paths
from msa_tiles.runtime.registry import Cell, default_registry
from msa_tiles.sources import PACKAGE
from msa_tiles.spec import load
from msa_tiles.tables import Table, TableError, constants_of, table_of

IN_TILE = re.findall(r"^IN_TILE = \((.*?)\)$", (PACKAGE / "dsl/cutedsl/column_indexer.py").read_text(), re.MULTILINE)
CELLS = {cell.id: cell for cell in default_registry().cells if cell.dsl == "cutedsl"}


def text_of(cell: Cell) -> str:
    return cell.file.read_text(encoding="utf-8")


def table(cell: Cell) -> Table:
    table_of_variant = table_of(text_of(cell))
    assert table_of_variant is not None, f"{cell.id} does not say what its thread block is made of"
    return table_of_variant(**cell.ci[0])


@pytest.mark.parametrize("name", CELLS)
def test_a_buffer_or_a_pipeline_left_out(name: str) -> None:
    """It contradicts the rest of the table, or the audit finds other bytes of shared memory and other barriers.

    What lies in the gap before an aligned buffer takes no bytes: there the kernel asks for it by its name, in vain.
    """
    whole = table(CELLS[name])
    roles, pipelines, buffers = (tuple(part.values()) for part in (whole.roles, whole.pipelines, whole.buffers))
    for left_out in buffers:
        rest = tuple(each for each in buffers if each is not left_out)
        try:
            if Table(roles, pipelines, rest).shared_memory == whole.shared_memory:
                wanted = re.findall(r"buffers\[name\] for name in \((.*?)\)", text_of(CELLS[name]))
                wanted += IN_TILE if "buffers[name] for name in IN_TILE" in text_of(CELLS[name]) else []
                assert any(f'"{left_out.name}"' in names for names in wanted), left_out.name
        except TableError as error:
            assert left_out.name in str(error)
    for pipeline in pipelines:
        rest_of_pipelines = tuple(each for each in pipelines if each is not pipeline)
        assert len(Table(roles, rest_of_pipelines, buffers).barriers) < len(whole.barriers)


@pytest.mark.parametrize("name", CELLS)
def test_a_role_left_out(name: str) -> None:
    """Somebody waits for it, or the audit finds another number of threads."""
    whole = table(CELLS[name])
    roles, pipelines, buffers = (tuple(part.values()) for part in (whole.roles, whole.pipelines, whole.buffers))
    for role in roles:
        rest = tuple(each for each in roles if each is not role)
        try:
            assert Table(rest, pipelines, buffers).threads < whole.threads
        except TableError as error:
            assert f"waits for {role.name}" in str(error)


def test_rows_say_nothing_of_it() -> None:
    said = ("threads", "shared_memory", "registers", "tensor_memory")
    assert [name for name, cell in CELLS.items() if any(cell.entry[key] is not None for key in said)] == []


RESERVED = 1024  # bytes that the system takes of a multiprocessor's shared memory for each thread block
RESIDENT = re.compile(r"min_blocks_per_mp=(\w+),|annotate_min_blocks_per_sm\((\w+)\)")


@pytest.mark.parametrize("name", [cell.id for cell in default_registry().cells if RESIDENT.search(text_of(cell))])
@pytest.mark.drawn(10)
def test_as_many_thread_blocks_fit_as_the_kernel_counts_on(name: str) -> None:
    """Nothing else would say that only one fits: the kernel runs, at half its speed."""
    [cell] = [cell for cell in default_registry().cells if cell.id == name]
    text = text_of(cell)
    [found] = {a or b for a, b in RESIDENT.findall(text)}
    blocks = int(found) if found.isdigit() else constants_of(cell.file)[found]
    whole, per_sm = table_of(text), load(paths.specs_dir()).targets[cell.target].shared_memory_per_sm
    assert whole is not None
    for variant in cell.ci:
        assert blocks * (whole(**variant).shared_memory + RESERVED) <= per_sm, variant
