"""The audit of machine code, against a real cubin and against planted faults."""

from __future__ import annotations

import dataclasses

import pytest

from msa_tiles.runtime import audit, toolchain
from msa_tiles.runtime.audit import complaints, has_opcode
from msa_tiles.runtime.cache import SOURCES, Cache, Entry
from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.runtime.toolchain import ToolchainError


@pytest.fixture
def measured(entry: Entry) -> dict:
    try:
        return audit.measured(entry)
    except ToolchainError as error:
        pytest.skip(str(error))


def test_a_cubin_is_measured(measured: dict) -> None:
    function = measured["functions"]["scale_rows_kernel_kernel"]
    assert 8 <= function["registers"] <= 64
    assert function["stack"] == 0
    assert function["static_shared_memory"] == 0
    assert measured["opcodes"]["EXIT"] >= 1
    assert has_opcode("LDG", measured["opcodes"])
    assert not has_opcode("HGMMA", measured["opcodes"])


def test_a_good_kernel_has_no_complaints(cell: Cell, target: Target, entry: Entry, measured: dict) -> None:
    assert complaints(cell, cell.ci[0], target, entry) == []


def test_what_was_measured_is_kept(entry: Entry, measured: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_disassembler", lambda name: pytest.fail(f"{name} was run again"))
    assert audit.measured(entry) == measured


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"expect": ["HGMMA"]}, "the plan promised HGMMA, the code has none"),
        ({"forbid": ["FMUL"]}, "the code has FMUL, which the plan forbids"),
        ({"threads": 128}, "scale_rows_kernel_kernel runs 64 threads, the plan says 128"),
        ({"threads": "width * 2"}, "scale_rows_kernel_kernel runs 64 threads, the plan says 128"),
        (
            {"registers": "threads * 200"},
            "registers, its warps ask for 12800 and would wait for ever",
        ),
        (
            {"shared_memory": "capacity * width"},
            "scale_rows_kernel_kernel uses 1024 bytes of shared memory, the plan says 256",
        ),
    ],
)
def test_a_broken_promise_is_a_complaint(  # type: ignore[no-untyped-def]
    cell: Cell, target: Target, entry: Entry, measured: dict, changes, complaint: str
) -> None:
    promised = dataclasses.replace(cell, entry={**cell.entry, **changes})
    [found] = complaints(promised, cell.ci[0], target, entry)
    assert found.endswith(complaint)


TABLE = """

from msa_tiles.dsl.table import Pipeline, Role, Table, buffer, declares, lane


@declares
def cta(**dims):
    return Table((Role("all", 2, "everything"),), (), (buffer("rows", "float32", values=256),))
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("values=256", "values=256", None),
        ('"all", 2,', '"all", 3,', "scale_rows_kernel_kernel runs 64 threads, the plan says 96"),
        ("values=256", "values=192", "uses 1024 bytes of shared memory, the plan says 768"),
        ("values=256", "values=320", "uses 1024 bytes of shared memory, the plan says 1280"),
        (
            '(), (buffer("rows", "float32", values=256),)',
            '(Pipeline("rows", 2, (lane("all"),)),), (buffer("rows", "float32", values=252),)',
            "the code makes 0 barriers, the kernel's table has 2",
        ),
    ],
)
def test_a_table_is_held_against_the_code(  # type: ignore[no-untyped-def]
    cell: Cell, target: Target, entry: Entry, measured: dict, tmp_path, old: str, new: str, complaint: str | None
) -> None:
    file = tmp_path / "kernel.py"
    assert old in TABLE
    file.write_text(cell.file.read_text() + TABLE.replace(old, new))
    promised = dataclasses.replace(cell, file=file, entry={**cell.entry, "threads": None, "shared_memory": None})
    found = complaints(promised, cell.ci[0], target, entry)
    assert [sentence.endswith(str(complaint)) for sentence in found] == ([] if complaint is None else [True])


@pytest.mark.parametrize(
    ("columns", "found"), [(128, []), (64, ["takes 128 columns of tensor memory, the plan says 64"])]
)
def test_a_tables_tensor_memory(  # type: ignore[no-untyped-def]
    cell: Cell, target: Target, entry: Entry, measured: dict, tmp_path, columns: int, found: list[str]
) -> None:
    text = TABLE.replace("import Pipeline", "import Columns, Pipeline")
    text = text.replace("values=256),))", f'values=256),), (Columns("S", 1, {columns}),))')
    file = tmp_path / "kernel.py"
    file.write_text(cell.file.read_text() + text)
    with_source = Entry(tmp_path, entry.meta)
    (tmp_path / SOURCES["cutedsl"]).write_text(ALLOCATION["cutedsl"])
    with_source.write_audit(measured)
    promised = dataclasses.replace(cell, dsl="cutedsl", file=file, entry={**cell.entry, "threads": None})
    roomy = dataclasses.replace(target, tensor_memory_columns=512)
    assert complaints(promised, cell.ci[0], roomy, with_source) == found


@pytest.mark.parametrize(
    ("limit", "value", "complaint"),
    [
        ("shared_memory_per_block", 1000, "uses 1024 bytes of shared memory, sm90 allows 1000"),
        ("registers_per_thread", 4, "registers, sm90 allows 4"),
        ("registers_per_sm", 512, "registers for a block, sm90 has 512"),
        ("threads_per_block", 32, "runs 64 threads, sm90 allows 32"),
    ],
)
def test_exceeding_the_target_is_a_complaint(  # type: ignore[no-untyped-def]
    cell: Cell, target: Target, entry: Entry, measured: dict, limit: str, value: int, complaint: str
) -> None:
    [found] = complaints(cell, cell.ci[0], dataclasses.replace(target, **{limit: value}), entry)
    assert found.endswith(complaint)


def test_a_spill_is_a_complaint(cell: Cell, target: Target, entry: Entry, measured: dict, tmp_path) -> None:  # type: ignore[no-untyped-def]
    spilled = Entry(tmp_path, entry.meta)
    function = {**measured["functions"]["scale_rows_kernel_kernel"], "stack": 48}
    spilled.write_audit({**measured, "functions": {"scale_rows_kernel_kernel": function}})
    assert complaints(cell, cell.ci[0], target, spilled) == [
        "scale_rows_kernel_kernel spills or keeps arrays on a stack of 48 bytes, wanted none"
    ]


ALLOCATION = {
    "tilelang": "    tl::tmem_allocate((&(S[0])), 128);\n",
    "cutedsl": "mov.b32 \t%r65, 128;\n\ttcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 \t[%r6], %r65;\n",
}


@pytest.mark.parametrize("dsl", ALLOCATION)
@pytest.mark.parametrize(
    ("promised", "columns", "times", "found"),
    [
        ("width * 2", 512, 1, []),
        (None, 512, 0, []),
        (None, 512, 1, ["takes 128 columns of tensor memory, the plan says 0"]),
        ("64", 512, 1, ["takes 128 columns of tensor memory, the plan says 64"]),
        ("256", 512, 0, ["takes 0 columns of tensor memory, the plan says 256"]),
        ("256", 128, 2, ["takes 256 columns of tensor memory, sm90 allows 128"]),
    ],
)
def test_tensor_memory(  # type: ignore[no-untyped-def]
    cell: Cell, target: Target, entry: Entry, measured: dict, tmp_path, dsl: str, promised, columns, times, found
) -> None:
    other = dataclasses.replace(cell, dsl=dsl, entry={**cell.entry, "tensor_memory": promised})
    with_source = Entry(tmp_path, entry.meta)
    with_source.write_audit(measured)
    parts = ALLOCATION[dsl].split("\n\t")
    (tmp_path / SOURCES[dsl]).write_text("\n\t".join(parts[:-1] + parts[-1:] * times))
    assert (
        complaints(other, cell.ci[0], dataclasses.replace(target, tensor_memory_columns=columns), with_source) == found
    )


def test_tensor_memory_of_unknown_size_is_a_complaint(  # type: ignore[no-untyped-def]
    cell: Cell, target: Target, entry: Entry, measured: dict, tmp_path
) -> None:
    other = dataclasses.replace(cell, dsl="cutedsl")
    with_source = Entry(tmp_path, entry.meta)
    with_source.write_audit(measured)
    (tmp_path / SOURCES["cutedsl"]).write_text(ALLOCATION["cutedsl"].replace("128", "%r64"))
    [found] = complaints(other, cell.ci[0], dataclasses.replace(target, tensor_memory_columns=512), with_source)
    assert found == "allocates tensor memory of a size that is known at run time only"


def test_opcodes_match_with_their_modifiers() -> None:
    opcodes = ["UTCOMMA.2CTA.4X", "HGMMA.64x128x16.F32.BF16", "STL.64"]
    assert has_opcode("HGMMA", opcodes)
    assert has_opcode("UTCOMMA.4X", opcodes)
    assert has_opcode("STL", opcodes)
    assert not has_opcode("HMMA", opcodes)
    assert not has_opcode("UTCOMMA.2X", opcodes)
    assert not has_opcode("ST", opcodes)


def test_a_missing_disassembler_is_named(entry: Entry, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_wheel_directories", lambda: iter([]))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match="needs cuobjdump: `pip install nvidia-cuda-cuobjdump`"):
        audit.measure(entry.cubin)
