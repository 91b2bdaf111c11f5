"""The matrix: one walk over all cells, what torch is off by, what precisions cost, and the command that shows it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from msa_tiles import paths, reference
from msa_tiles.bench import agreement
from msa_tiles.cli import main
from msa_tiles.commands import matrix as command
from msa_tiles.matrix import picture, report, selection, torch_errors, walk
from msa_tiles.runtime.registry import default_registry
from msa_tiles.spec import load

pytestmark = pytest.mark.matrix

REGISTRY = default_registry()
SPECS = load(paths.specs_dir())
ENTRIES = walk.walk(REGISTRY, here=False)


def test_the_walk_has_every_cell_in_every_layout_of_its_keys() -> None:
    assert {entry.cell.id for entry in ENTRIES} == {cell.id for cell in REGISTRY.cells}
    found = {(entry.cell.id, entry.layout) for entry in ENTRIES}
    assert len(found) == len(ENTRIES)
    for cell in REGISTRY.select(op="sparse_decode"):
        assert {layout for name, layout in found if name == cell.id} == {"flat", "paged"}
    [topk] = {entry.layout for entry in ENTRIES if entry.cell.op == "topk_select"}
    assert topk == "-"


@pytest.mark.parametrize("cell", REGISTRY.cells, ids=lambda cell: cell.id)
def test_every_cell_is_what_its_spec_says_and_has_tolerances(cell) -> None:
    [status] = {entry.status for entry in ENTRIES if entry.cell == cell}
    assert status in walk.STATUSES and status != "out of date"
    assert SPECS.operators[cell.op].tolerance[cell.precision]
    for entry in ENTRIES:
        if entry.cell == cell and entry.status == "verified":
            assert entry.date and entry.card and entry.errors
            assert all(error.accepted is None or error.worst <= error.accepted for error in entry.errors)


def test_no_status_is_stronger_than_its_record(monkeypatch) -> None:
    [entry] = [entry for entry in ENTRIES if entry.cell.id == "topk_select.tilelang.sm90.bf16"]
    monkeypatch.setattr(walk.evidence, "verified_of", lambda registry: {})
    monkeypatch.setattr(walk.evidence, "is_simulated", lambda cell: True)
    assert walk.walk(REGISTRY, here=True, cells=[entry.cell])[0].status == "simulated"
    assert walk.walk(REGISTRY, here=False, cells=[entry.cell])[0].status in ("compiled", "generated")
    monkeypatch.setattr(walk.evidence, "is_recorded", lambda *_: False)
    assert walk.walk(REGISTRY, here=False, cells=[entry.cell])[0].status == "generated"
    monkeypatch.setattr(walk, "is_generated", lambda cell: False)
    assert walk.walk(REGISTRY, here=True, cells=[entry.cell])[0].status == "out of date"


def test_groups_come_in_the_order_of_the_specs() -> None:
    assert walk.groups_of(ENTRIES) == ["bf16", "fp8", "nvfp4", "fp4"]
    some = [entry for entry in ENTRIES if entry.group != "fp8"]
    assert walk.groups_of(some) == ["bf16", "nvfp4", "fp4"]


def test_torch_is_off_by_what_bfloat16_rounds_away() -> None:
    for precision in ("bf16", "q8k8", "q16k4", "q8kmx4"):
        assert 1e-3 < torch_errors.torch_error("decode_score", precision) < 0.5
    for precision in ("bf16", "q16kv8", "q16kv4", "q16kvmx4"):
        assert 1e-5 < torch_errors.torch_error("sparse_attention", precision) < 0.02
    assert torch_errors.torch_error("topk_select", "bf16") is None


@pytest.fixture(scope="module")
def costs() -> tuple[selection.Cost, ...]:
    return selection.costs(("bf16", "q8k8", "q16k4", "q16kmx4"))


def test_fewer_bits_choose_fewer_of_the_blocks_of_float32(costs) -> None:
    for kind in selection.KINDS:
        shares = {cost.precision: cost.overlap for cost in costs if cost.kind == kind}
        assert 0.7 < shares["q16kmx4"] < shares["q8k8"] < shares["bf16"] <= 1.0
        assert shares["q16k4"] < shares["q8k8"]
        for cost in costs:
            assert 0.3 < cost.mass <= 1.0 + 1e-6 and 0.3 < cost.mass_of_float32 <= 1.0 + 1e-6


def test_the_mass_inside_is_that_of_a_mask() -> None:
    """Against softmax over everything, key by key."""
    x = selection.inputs("gaussian", 1000)
    x = dataclasses.replace(x, idx_q=x.idx_q[-5:], q=x.q[-5:])
    ids = reference.select_blocks(x.idx_q, x.idx_k, 3)
    ids[0, 0, 1:] = -1
    wanted = 0.0
    for head in range(4):
        for row in range(5):
            seen = 1000 - 5 + row + 1
            weights = (x.k[:seen, head] @ x.q[row, head] * 128**-0.5).double().softmax(0)
            kept = torch.zeros(seen, dtype=torch.bool)
            for block in ids[head, row].tolist():
                if block >= 0:
                    kept[block * 128 : (block + 1) * 128] = True
            wanted += float(weights[kept].sum()) / 20
    assert selection.mass_inside(x, ids) == pytest.approx(wanted, rel=1e-5)
    everything = torch.arange(8, dtype=torch.int32).expand(4, 5, 8)
    assert selection.mass_inside(x, everything) == pytest.approx(1.0)


def test_overlap_counts_ids_and_not_places() -> None:
    wanted = torch.tensor([[[3, 1, -1]]])
    assert agreement.overlap(torch.tensor([[[1, 3, 0]]]), wanted) == 1.0
    assert agreement.overlap(torch.tensor([[[-1, 3, 0]]]), wanted) == 0.5


@pytest.fixture
def quick(monkeypatch, costs):
    monkeypatch.setattr(selection, "costs", lambda *_: costs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command_shows_cells_and_costs(quick, capsys, tmp_path) -> None:
    assert main(["matrix", "--op", "topk_select,decode_score", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "decode_score" in shown and "sparse_attention" not in shown
    assert "NVIDIA H200" in shown and "outliers" in shown and "text" in shown
    document = json.loads((tmp_path / "matrix.json").read_text())
    assert {row["op"] for row in document["cells"]} == {"topk_select", "decode_score"}
    assert document["selection"][0]["kind"] == "gaussian" and document["failures"] == []
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert main(["matrix", "--op", "combine", "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)["cells"]} <= set(walk.STATUSES)


def test_what_runs_here_goes_before_the_record(quick, monkeypatch, capsys) -> None:
    cell = REGISTRY.select(op="combine", dsl="tilelang", target="sm90")[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        command, "_run", lambda *_: ({cell.id: {"out": (0.5, 0.02, "absolute")}}, ["combine: wrong"], "here, a card")
    )
    assert main(["matrix", "--op", "combine", "--target", "sm90"]) == 1
    shown = capsys.readouterr()
    assert "0.5 out" in shown.out and "here, a card" in shown.out and "combine: wrong" in shown.err
    assert main(["matrix", "--op", "combine", "--target", "sm90", "--recorded"]) == 0
    assert "here, a card" not in capsys.readouterr().out


def test_a_line_shows_the_error_that_uses_most_of_its_tolerance() -> None:
    [entry] = [entry for entry in ENTRIES if entry.cell.id == "combine.tilelang.sm90.bf16"]
    ran = {entry.cell.id: {"lse": (4e-4, 5e-4, "absolute"), "out": (0.01, 0.02, "absolute")}}
    [_, line] = report.lines([report.describe(entry, ran, "here")])
    assert line[6:] == ("0.0004 lse", "0.0005", "", "here")


def test_the_picture_is_of_all_cells(tmp_path, costs) -> None:
    picture.draw(tmp_path / "all.png", ENTRIES, costs)
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
