"""The matrix: one walk over all cells, what torch is off by, what precisions cost, and the command that shows it."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

from msa_tiles import paths, reference
from msa_tiles.bench import agreement, precisions
from msa_tiles.cli import main
from msa_tiles.commands import matrix as command
from msa_tiles.matrix import layouts, picture, report, selection, torch_errors, values, walk
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry
from msa_tiles.spec import load
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Disagreement, cases
from msa_tiles.verify.inputs import Source
from msa_tiles.verify.operators import CHECKS

pytestmark = pytest.mark.matrix

REGISTRY = default_registry()
SPECS = load(paths.specs_dir())


@functools.cache
def entries() -> list[walk.Entry]:
    return walk.walk(REGISTRY, here=False)


def test_the_walk_has_every_cell_in_every_layout_of_its_keys() -> None:
    assert {entry.cell.id for entry in entries()} == {cell.id for cell in REGISTRY.cells}
    found = {(entry.cell.id, str(entry.layout)) for entry in entries()}
    assert len(found) == len(entries())
    for cell in REGISTRY.select(op="sparse_decode"):
        keys = {entry.layout.keys for entry in entries() if entry.cell == cell}
        assert keys == {layouts.FLAT, layouts.OF_BLOCKS, layouts.SMALLER}
    [topk] = {str(entry.layout) for entry in entries() if entry.cell.op == "topk_select"}
    assert topk == "-"
    some = REGISTRY.cells[::4]
    apart = walk.walk(REGISTRY, here=False, cells=some, scales=False)
    assert {(entry.cell.id, entry.layout.keys) for entry in apart} == {
        (name, layout.split(",")[0]) for name, layout in found if name in {cell.id for cell in some}
    }
    assert not any(entry.layout.scales or entry.status == walk.REFUSED for entry in apart)


def test_the_layout_is_that_of_the_keys_which_an_operator_reads_or_writes() -> None:
    """A dash stands for none, in the table and as JSON."""
    read = {op: {role for cell in REGISTRY.of(op) for role in cell.reads} for op in SPECS.operators}
    described = [report.describe(entry, {}, "") for entry in entries()]
    place = report.HEADING.index("layout")
    assert [line[place] for line in report.lines(described)[1:]] == [row["layout"] for row in described]
    for row in described:
        assert (row["layout"] == "-") == read[row["op"]].isdisjoint({"key_value", "index_key"}), row["id"]
    for op, wanted in {
        "dequantize_kv": {layouts.FLAT, layouts.CACHE},
        "append_kv": {layouts.CACHE},
        "norm_rope_append": {layouts.CACHE},
        "sparse_attention_backward": {layouts.FLAT},
        "index_kl": {layouts.FLAT},
        "index_lse": {layouts.FLAT},
    }.items():
        for cell in REGISTRY.of(op):
            assert {entry.layout.keys for entry in entries() if entry.cell == cell} == wanted, cell.id


def test_what_scales_are_refused_is_asked_of_the_operators() -> None:
    """Keys of 4 bits in each layout of their scales: interleaved ones are those of values in pages."""
    packed = [entry for entry in entries() if entry.layout.scales]
    assert {entry.group for entry in packed} == {"nvfp4", "fp4"}
    for entry in packed:
        keys, scales, refusal = entry.layout
        attends = entry.cell.op in ("sparse_attention", "shared_attention", "sparse_decode", "dequantize_kv")
        served = scales == "linear" or (
            scales == "interleaved" and keys != layouts.FLAT and (attends or keys == layouts.CACHE)
        )
        assert (refusal == "") == served, (entry.cell.id, entry.layout)
        assert (entry.status == walk.REFUSED) != served
        assert scales != "swizzled" or "with_layout" in refusal
    shown = report.refusals([report.describe(entry, {}, "") for entry in packed])
    assert any("sparse_decode (flat, swizzled scales)" in line for line in shown)


def test_a_row_that_is_refused_has_the_number_of_its_reason_and_no_figures() -> None:
    rows = [report.describe(entry, {}, "") for entry in entries()]
    told = dict(sentence.split(": ", 1) for sentence in report.refusals(rows))
    assert list(told) == [f"refused ({number})" for number in range(1, len(told) + 1)] and len(told) > 3
    status, figures = report.HEADING.index("status"), slice(report.HEADING.index("worst error"), None)
    for row, line in zip(rows, report.lines(rows)[1:], strict=True):
        assert (row["refusal"] is None) == (line[status] == row["status"])
        if row["refusal"] is not None:
            assert told[line[status]].startswith(f"{row['refusal']}: ") and not any(line[figures])
            assert f"{row['op']} ({row['layout']})" in told[line[status]]


@pytest.mark.parametrize("op", ["index_score", "decode_score", "select_blocks", "sparse_attention", "shared_attention",
                                "sparse_decode", "combine"])  # fmt: skip
@pytest.mark.drawn(1)
def test_every_cell_is_compared_with_torch_on_the_same_inputs(op: str) -> None:
    """In each precision, by the check that `verify` runs on a GPU; an error of more than twice torch's is refused."""
    for precision in dict.fromkeys(cell.precision for cell in REGISTRY.select(op=op)):
        cell = REGISTRY.select(op=op, precision=precision)[0]
        [case, *_] = layouts.samples(
            case for case in cases(cell, SPECS) if case.workload.values != "integer" and case.dims["total_q"] < 400
        )
        check = CHECKS[op](case, Source(torch.device("cpu"), 5, case.workload.values), False, "reference")
        outputs = check.run(into_buffers=False)
        [times] = [error for error in check.compare(outputs).values() if error.metric == compare.TIMES]
        assert times.worst <= times.accepted == 2.0
        if op != "select_blocks":
            wrong = outputs[0] + 0.05 * outputs[0].nan_to_num(0.0, 0.0, 0.0).abs().max()
            with pytest.raises(Disagreement):
                check.compare((wrong, *outputs[1:]))


def test_a_sample_has_every_layout_of_keys() -> None:
    for cell in REGISTRY.select(target="sm90"):
        found = layouts.samples(cases(cell, SPECS))
        wanted = {entry.layout.keys for entry in entries() if entry.cell == cell}
        assert [layouts.of_case(case) for case in found] == list(dict.fromkeys(map(layouts.of_case, found)))
        assert set(map(layouts.of_case, found)) == wanted, cell.id


def test_what_is_on_record_needs_no_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TileLang is not installed its cells are not refused for that; what they refuse is refused still."""
    [cell] = REGISTRY.select(op="sparse_decode", dsl="tilelang", precision="q16kv4")
    there = {str(each): each.refusal for each in layouts.of_cell(cell, REGISTRY)}
    missing = toolchain.missing
    monkeypatch.setattr(
        toolchain,
        "missing",
        lambda dsl: "needs tilelang, which is not installed" if dsl == "tilelang" else missing(dsl),
    )
    monkeypatch.setattr(layouts, "_refusal", layouts._refusal.__wrapped__)  # not what is remembered
    assert {str(each): each.refusal for each in layouts.of_cell(cell, REGISTRY)} == there


def test_more_than_twice_torchs_error_is_refused() -> None:
    wanted = torch.linspace(-3.0, 3.0, 100)
    of_torch = compare.error_of(wanted.bfloat16(), wanted)
    assert of_torch == pytest.approx(2.0**-7, rel=0.2)
    [error] = compare.beside_torch("out", wanted + 1.9 * of_torch, wanted, wanted.bfloat16()).values()
    assert error.worst == pytest.approx(1.9, rel=1e-3) and error.accepted == 2.0
    with pytest.raises(Disagreement, match="2 times that of the same in bfloat16"):
        compare.beside_torch("out", wanted + 2.1 * of_torch, wanted, wanted.bfloat16())
    assert compare.beside_torch("out", wanted[:9] + 1.0, wanted[:9], wanted[:9]) == {}  # too few to tell


@pytest.mark.parametrize("cell", REGISTRY.cells, ids=lambda cell: cell.id)
def test_every_cell_is_what_its_spec_says_and_has_tolerances(cell) -> None:
    [status] = {entry.status for entry in entries() if entry.cell == cell} - {walk.REFUSED}
    assert status in walk.STATUSES and status != "out of date"
    assert SPECS.operators[cell.op].tolerance[cell.precision]
    for entry in entries():
        if entry.cell == cell and entry.status == "verified":
            assert entry.date and entry.card and entry.errors
            assert all(error.accepted is None or error.worst <= error.accepted for error in entry.errors)


def test_no_status_is_stronger_than_its_record(monkeypatch) -> None:
    [entry] = [entry for entry in entries() if entry.cell.id == "topk_select.tilelang.sm90.bf16"]
    monkeypatch.setattr(walk.evidence, "verified_of", lambda registry: {})
    monkeypatch.setattr(walk.evidence, "is_simulated", lambda cell: True)
    assert walk.walk(REGISTRY, here=True, cells=[entry.cell])[0].status == "simulated"
    assert walk.walk(REGISTRY, here=False, cells=[entry.cell])[0].status in ("compiled", "generated")
    monkeypatch.setattr(walk.evidence, "is_recorded", lambda *_: False)
    assert walk.walk(REGISTRY, here=False, cells=[entry.cell])[0].status == "generated"
    monkeypatch.setattr(walk, "is_generated", lambda cell: False)
    assert walk.walk(REGISTRY, here=True, cells=[entry.cell])[0].status == "out of date"


def test_groups_come_in_the_order_of_the_specs() -> None:
    assert walk.groups_of(entries()) == ["bf16", "fp8", "nvfp4", "fp4"]
    some = [entry for entry in entries() if entry.group != "fp8"]
    assert walk.groups_of(some) == ["bf16", "nvfp4", "fp4"]


def test_torch_is_off_by_what_bfloat16_rounds_away() -> None:
    for precision in ("bf16", "q8k8", "q16k4", "q8kmx4"):
        assert 1e-3 < torch_errors.torch_error("decode_score", precision) < 0.5
    for precision in ("bf16", "q16kv8", "q16kv4", "q16kvmx4"):
        assert 1e-5 < torch_errors.torch_error("sparse_attention", precision) < 0.02
    assert torch_errors.torch_error("topk_select", "bf16") is None


@pytest.fixture(scope="module")
def values_costs() -> tuple[values.Cost, ...]:
    return values.costs()


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


def test_fewer_bits_of_keys_and_values_change_attention_more(values_costs) -> None:
    for kind in selection.KINDS:
        errors = {cost.precision: cost.error for cost in values_costs if cost.kind == kind}
        assert errors["bf16"] < errors["q16kv8"] < errors["q16kv4"] < errors["q16kvmx4"] < 1


def test_the_error_of_a_format_is_that_of_softmax_over_what_it_holds() -> None:
    """One query and one head, key by key."""
    x = selection.inputs("gaussian", 300)
    x = dataclasses.replace(x, topk=3, q=x.q[-1:, :1], idx_q=x.idx_q[-1:, :1], k=x.k[:, :1], v=x.v[:, :1])

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (k[:, 0].double() @ x.q[0, 0].double() * 128**-0.5).softmax(0) @ v[:, 0].double()

    exact, held = attend(x.k, x.v), attend(values.stored(x.k, "q16kv4"), values.stored(x.v, "q16kv4"))
    plain, found = values.errors(x, ("bf16", "q16kv4"))
    assert found == pytest.approx(float((held - exact).norm() / exact.norm()), rel=1e-4)
    assert plain < 0.01 < found


def test_the_readme_says_what_formats_of_keys_and_values_cost(values_costs) -> None:
    text = " ".join((Path(__file__).resolve().parents[2] / "README.md").read_text().split())
    for kind in selection.KINDS:
        shown = [f"{100 * cost.error:.1f}%" for cost in values_costs if cost.kind == kind and cost.precision != "bf16"]
        assert f"{shown[0]} (e4m3), {shown[1]} (NVFP4) and {shown[2]} (MXFP4)" in text, shown


def test_overlap_counts_ids_and_not_places() -> None:
    wanted = torch.tensor([[[3, 1, -1]]])
    assert agreement.overlap(torch.tensor([[[1, 3, 0]]]), wanted) == 1.0
    assert agreement.overlap(torch.tensor([[[-1, 3, 0]]]), wanted) == 0.5


@pytest.fixture
def quick(monkeypatch, costs):
    monkeypatch.setattr(selection, "costs", lambda names: [cost for cost in costs if cost.precision in names])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command_shows_cells_and_costs(quick, capsys, tmp_path) -> None:
    assert main(["matrix", "--op", "topk_select,decode_score", "--out", str(tmp_path)]) == 0
    shown, progress = capsys.readouterr()
    assert "reading what is known of kernels" in progress and "measuring which blocks" in progress
    assert "decode_score" in shown and "sparse_attention" not in shown
    assert "NVIDIA H200" in shown and "outliers" in shown and "text" in shown
    document = json.loads((tmp_path / "matrix.json").read_text())
    assert {row["op"] for row in document["cells"]} == {"topk_select", "decode_score"}
    assert document["selection"][0]["kind"] == "gaussian" and document["failures"] == []
    assert {cost["precision"] for cost in document["values"]} == set(precisions.ATTENTION)
    assert "attention off by" in shown
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert main(["matrix", "--op", "combine", "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)["cells"]} <= set(walk.STATUSES)


def test_costs_are_those_of_the_precisions_asked_for(quick, capsys, tmp_path) -> None:
    assert main(["matrix", "--precision", "q16k4", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "matrix.json").read_text())
    assert {cost["precision"] for cost in document["selection"]} == {"q16k4"} and document["values"] == []
    assert "selection from" in (shown := capsys.readouterr().out) and "attention off by" not in shown
    assert main(["matrix", "--op", "combine", "--precision", "bf16", "--target", "sm100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {cost["precision"] for cost in document["selection"] + document["values"]} == {"bf16"}


def test_a_form_costs_what_the_precision_costs_that_stores_the_same(quick, capsys) -> None:
    said = "q16k4m8 stores what q16k4 stores and only multiplies differently"
    assert main(["matrix", "--precision", "q16k4m8"]) == 0
    shown = capsys.readouterr().out
    assert said in shown and "\nselection from" in shown and "\nq16k4 " in shown
    assert main(["matrix", "--precision", "q16k4m8", "--json"]) == 0
    captured = capsys.readouterr()
    assert {cost["precision"] for cost in json.loads(captured.out)["selection"]} == {"q16k4"} and said in captured.err
    assert "how far off attention" not in captured.err, "nothing is announced that is not measured"


def test_without_matplotlib_it_names_the_extra(quick, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("msa_tiles.demo.picture.available", lambda: False)
    assert main(["matrix", "--op", "combine", "--out", str(tmp_path)]) == 0
    assert "matplotlib is not installed (pip install 'msa-tiles[demo]')" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["matrix.json"]


def test_what_runs_here_goes_before_the_record(quick, monkeypatch, capsys) -> None:
    cell = REGISTRY.select(op="combine", dsl="tilelang", target="sm90")[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        command,
        "_run",
        lambda *_: ({(cell.id, "-"): {"out": (0.5, 0.02, "absolute")}}, ["combine: wrong"], "here, a card"),
    )
    assert main(["matrix", "--op", "combine", "--target", "sm90"]) == 1
    shown = capsys.readouterr()
    assert "0.5 out" in shown.out and "here, a card" in shown.out and "combine: wrong" in shown.err
    assert main(["matrix", "--op", "combine", "--target", "sm90", "--recorded"]) == 0
    assert "here, a card" not in capsys.readouterr().out


def test_a_line_shows_the_error_that_uses_most_of_its_tolerance() -> None:
    [entry] = [entry for entry in entries() if entry.cell.id == "combine.tilelang.sm90.bf16"]
    ran = {(entry.cell.id, "-"): {"lse": (4e-4, 5e-4, "absolute"), "out": (0.01, 0.02, "absolute")}}
    ran[entry.cell.id, "-"]["out, beside torch"] = (1.75, 2.0, compare.TIMES)
    [_, line] = report.lines([report.describe(entry, ran, "here")])
    assert line[6:] == ("0.0004 lse", "absolute", "0.0005", "1.8", "", "here")
    ran[entry.cell.id, "-"]["out"] = (0.019, 0.02, compare.OVER_SCALE)
    [_, line] = report.lines([report.describe(entry, ran, "here")])
    assert line[6:9] == ("0.019 out", "absolute / scale", "0.02")


def test_the_picture_is_of_all_cells(tmp_path, costs) -> None:
    picture.draw(tmp_path / "all.png", entries(), costs)
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
