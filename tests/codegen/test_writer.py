from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import Toy

from msa_tiles.codegen import Selection, drift, write

KERNEL = "tilelang/toy/scale_bf16.py"
OUT = Path("out")


@pytest.fixture
def written(toy: Toy) -> Toy:
    changes = write(toy.produce(), OUT)
    assert set(changes.written) == {KERNEL, "index.json"}
    return toy


def test_nothing_is_written_twice(written: Toy) -> None:
    before = {path: path.stat().st_mtime_ns for path in OUT.rglob("*") if path.is_file()}
    changes = write(written.produce(), OUT)
    assert (changes.written, changes.deleted, changes.unchanged) == ((), (), 2)
    assert {path: path.stat().st_mtime_ns for path in OUT.rglob("*") if path.is_file()} == before


def test_comments_and_layout_of_a_spec_change_nothing(written: Toy) -> None:
    written.edit(
        written.operator, "    tile: {rows: 8, unroll: 2}", "    tile:  # sizes\n      rows: 8\n      unroll: 2"
    )
    assert drift(written.produce(), OUT) == []


def test_no_drift_after_writing(written: Toy) -> None:
    assert drift(written.produce(), OUT) == []


def test_a_changed_spec_is_drift(written: Toy) -> None:
    written.edit(written.operator, "rows: 8", "rows: 16")
    generated = written.produce()
    assert drift(generated, OUT) == [
        f"{KERNEL} is not what its spec and skeleton say",
        "index.json is not what the specs declare",
    ]
    assert write(generated, OUT).written == (KERNEL, "index.json")
    assert drift(generated, OUT) == []


def test_a_changed_workload_touches_the_index_only(written: Toy) -> None:
    written.edit(written.operator, "[[3, 3]]", "[[4, 4]]")
    assert write(written.produce(), OUT).written == ("index.json",)


@pytest.mark.parametrize("old, new", [("ROWS = 8", "ROWS = 9"), ("return name", "return name("), ("Oracle", "oracle")])
def test_a_hand_edit(old: str, new: str, written: Toy) -> None:
    written.edit(OUT / KERNEL, old, new)
    (problem,) = drift(written.produce(), OUT)
    assert problem.startswith(KERNEL)
    assert ("edited by hand" in problem) == (old != "Oracle")  # a header's comment is compared, but has no digest
    assert write(written.produce(), OUT).written == (KERNEL,)


def test_a_missing_file(written: Toy) -> None:
    (OUT / KERNEL).unlink()
    assert drift(written.produce(), OUT) == [f"{KERNEL} is missing"]


def test_orphans(written: Toy) -> None:
    orphans = ["cutedsl/toy/old.py", "tilelang/toy/old_bf16.py"]
    for orphan in orphans:
        (OUT / orphan).parent.mkdir(parents=True, exist_ok=True)
        (OUT / orphan).write_text("old")
    for kept in ("verified.json", "tilelang/toy/__pycache__/scale_bf16.pyc"):
        (OUT / kept).parent.mkdir(exist_ok=True)
        (OUT / kept).write_text("kept")
    generated = written.produce()
    assert sorted(drift(generated, OUT)) == [f"{orphan} is an orphan: no spec asks for it" for orphan in orphans]
    assert write(generated, OUT, Selection(ops=["scale"])).deleted == ()
    assert sorted(write(generated, OUT).deleted) == orphans
    assert (OUT / "verified.json").read_text() == "kept"
    assert (OUT / "tilelang/toy/__pycache__/scale_bf16.pyc").exists()


@pytest.fixture
def two(written: Toy) -> Toy:
    """The toy with a second operator, whose kernel is not written yet."""
    text = written.operator.read_text()
    (written.operator.parent / "grow.yaml").write_text(text.replace("op: scale", "op: grow"))
    skeleton = written.skeleton.read_text()
    (written.skeleton.parent / "grow.py").write_text(skeleton.replace("def scale", "def grow"))
    return written


def test_a_filter_writes_its_cells_only(two: Toy) -> None:
    written_before = (OUT / KERNEL).read_text()
    two.edit(two.operator, "rows: 8", "rows: 16")
    generated = two.produce()
    only_grow = Selection(ops=["grow"])
    assert write(generated, OUT, only_grow).written == ("tilelang/toy/grow_bf16.py", "index.json")
    assert (OUT / KERNEL).read_text() == written_before
    cells = {cell["id"]: cell for cell in json.loads((OUT / "index.json").read_text())["cells"]}
    assert cells["scale.tilelang.toy.bf16"]["tile"] == {"rows": 8, "unroll": 2}
    assert cells["scale.tilelang.toy.bf16"]["digest"] in written_before
    assert drift(generated, OUT, only_grow) == []
    assert drift(generated, OUT) != []
    write(generated, OUT)
    assert drift(generated, OUT) == []


def test_the_index(written: Toy) -> None:
    index = json.loads((OUT / "index.json").read_text())
    (cell,) = index["cells"]
    digest = cell.pop("digest")
    assert f"digest: {digest}\n" in (OUT / KERNEL).read_text()
    assert index["format"] == 1
    assert index["targets"]["toy"]["arch"] == "sm_70"
    assert index["precisions"]["bf16"]["storage"] == "bfloat16"
    workloads = cell.pop("workloads")
    assert workloads["verify"] == [
        {
            "label": "small",
            "sequences": [[3, 3]],
            "dims": {},
            "parameters": {"factor": 2.0},
            "values": "normal",
            "selection": None,
            "points": "ci",
        }
    ]
    assert [workload["label"] for workload in workloads["bench"]] == ["large"]
    assert cell == {
        "id": "scale.tilelang.toy.bf16",
        "op": "scale",
        "dsl": "tilelang",
        "target": "toy",
        "precision": "bf16",
        "mma": "simt",
        "compute": "float32",
        "file": KERNEL,
        "summary": "Every row times a number.",
        "variants": {"width": [64, 128]},
        "capacity": [],
        "ci": [{"width": 64}, {"width": 128}],
        "tile": {"rows": 8, "unroll": 2},
        "threads": "rows * width / 16",
        "shared_memory": "2 * rows * width",
        "registers": "100 * rows * width / 16",
        "expect": ["FFMA", "UBLKCP", "MUFU"],
        "forbid": ["HMMA", "STL"],
        "features": ["negative"],
        "refuses": {"paged": "rows in pages"},
        "tolerance": {"out": 0.01},
        "roofline": {"flops": "total_q * width", "bytes": "4 * total_q * width"},
    }
