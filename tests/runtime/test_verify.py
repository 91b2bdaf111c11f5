"""The verification grid on the CPU, where the reference stands in for a kernel, whole or with a planted fault."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_tiles import paths, runtime, spec
from msa_tiles.call import backends
from msa_tiles.cli import main
from msa_tiles.commands import verify as verify_command
from msa_tiles.launch import dequantize
from msa_tiles.runtime import CallFacts, dispatch, evidence, packs, toolchain
from msa_tiles.runtime.accuracy import accuracies, in_words
from msa_tiles.runtime.evidence import is_verified, read_verified
from msa_tiles.runtime.facts import standing_for, target_facts
from msa_tiles.runtime.registry import Cell, default_registry
from msa_tiles.verify import compare, inputs, launched, operators, quantised, runner, selection
from msa_tiles.verify.cases import Case, Disagreement, cases, smallest

CPU = torch.device("cpu")
MOST_QUERIES = 200  # on two cores the larger workloads take minutes
SPECS = spec.load(paths.specs_dir())
CHECKED = [(op, precision) for op in sorted(operators.CHECKS) for precision in SPECS.operators[op].tolerance]
QUANTISED = [(op, precision) for op, precision in CHECKED if precision != "bf16"]


@pytest.fixture(scope="module")
def specs() -> spec.Specs:
    return spec.load(paths.specs_dir())


def cell_of(op: str, precision: str = "bf16") -> Cell:
    return Cell(
        id=f"{op}.tilelang.sm90.{precision}",
        op=op,
        dsl="tilelang",
        target="sm90",
        precision=precision,
        reads=(),
        mma="simt",
        arch="sm_90a",
        file=Path("absent.py"),
        digest="0123456789abcdef",
        variants=default_registry().select(op=op, precision=precision)[0].variants,
        capacity=frozenset(),
        features=frozenset(),
        entry={},
    )


def small_cases(op: str, specs: spec.Specs, precision: str = "bf16") -> list[Case]:
    """The workloads of few queries, with one KV head: enough to see that inputs, calls and comparisons fit together."""
    found = []
    for case in cases(cell_of(op, precision), specs):
        dims = {name: 1 if name == "num_kv_heads" else value for name, value in case.workload.dims.items()}
        small = dataclasses.replace(case, workload=dataclasses.replace(case.workload, dims=dims))
        if sum(queries for queries, _ in case.workload.sequences) <= MOST_QUERIES:
            found.append(small)
    return found


@pytest.mark.parametrize(("op", "precision"), CHECKED)
@pytest.mark.drawn(1)
def test_the_reference_passes_its_own_grid(op: str, precision: str, specs: spec.Specs) -> None:
    found = small_cases(op, specs, precision)
    labels = {case.workload.label: case for case in found if case.workload.label not in ("one_query", "most_blocks")}
    for case in labels.values():
        runner.run_case(case, CPU, seed=7, backend="reference")


@pytest.mark.parametrize("precision", ["q16k4", "q16k4m8"])
@pytest.mark.parametrize("asked", [True, False], ids=["its own", "whatever dispatch chooses"])
def test_a_case_is_run_by_its_own_cell(
    precision: str, asked: bool, specs: spec.Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels of one DSL take the same tensors; what verifies one of them is not what ran by the other."""
    point = {"head_dim": 128, "block_size": 128, "pages_per_block": 0}
    rivals = {
        cell.precision: next(case for case in cases(cell, specs) if case.point == point)
        for cell in default_registry().select(op="decode_score", dsl="cutedsl", target="sm90")
        if cell.precision in ("q16k4", "q16k4m8")
    }
    device = torch.device("cuda", 0)
    facts = CallFacts("decode_score", device, "q16k4", point)

    class Calls:
        def __init__(self, *_args: object) -> None:
            pass

        def run(self, into_buffers: bool) -> tuple[torch.Tensor, ...]:
            dispatch.find_kernel("decode_score", facts, "cutedsl")
            return ()

        def compare(self, outputs: tuple[torch.Tensor, ...]) -> compare.Errors:
            return {}

    def stand_in(*asked: Any) -> types.SimpleNamespace:
        chosen = dispatch._decide(*asked)[0].chosen
        assert chosen is not None
        return types.SimpleNamespace(cell=chosen.cell, variant=chosen.variant)

    monkeypatch.setattr(dispatch, "_find", stand_in)
    monkeypatch.setattr(dispatch, "_kernels", {})
    monkeypatch.setattr(toolchain, "missing", lambda _dsl: None)
    monkeypatch.setitem(runner.CHECKS, "decode_score", Calls)
    with standing_for(target_facts(default_registry().targets["sm90"])):
        if asked:
            assert runner.run_case(rivals[precision], CPU, 1, "cutedsl") == {}
            return
        monkeypatch.setattr(dispatch, "preferring", lambda _cell: contextlib.nullcontext())
        refused = []
        for each, case in rivals.items():
            try:
                runner.run_case(case, CPU, 1, "cutedsl")
            except Disagreement as error:
                assert "did not run; the calls found decode_score.cutedsl.sm90" in str(error)
                refused.append(each)
    assert len(refused) == 1


def test_errors_are_named_by_output_and_metric(specs: spec.Specs) -> None:
    """Whatever an operator is compared in, what is kept says which output it is of, in what, and what was accepted."""
    times = {"out, beside torch": compare.TIMES}
    for op, precision, wanted in (
        ("sparse_attention", "bf16", {"out": compare.ABSOLUTE, "lse": compare.ABSOLUTE, **times}),
        ("sparse_attention", "q16kv8", {"out": compare.OVER_SCALE, "lse": compare.ABSOLUTE, **times}),
        ("index_score", "q8k8", {"out": compare.OVER_SCALE, **times}),
        ("topk_select", "bf16", {"out": compare.EQUAL}),
        ("build_schedule", "bf16", {"edges": compare.EQUAL}),
    ):
        case = next(case for case in small_cases(op, specs, precision) if case.dims["total_q"] > 2)
        errors = runner.run_case(case, CPU, seed=3, backend="reference")
        assert {name: error.metric for name, error in errors.items()} == wanted, op
        for name, error in errors.items():
            accepted = 2.0 if name in times else case.tolerance.get(name, 0)
            assert 0 <= error.worst <= error.accepted == accepted, (op, name)
    assert sum(case.workload.values != "integer" for case in small_cases("select_blocks", specs))


def test_the_worst_error_of_each_output_is_kept() -> None:
    small, large = compare.Error(0.1, 1.0, compare.ABSOLUTE), compare.Error(0.2, 1.0, compare.ABSOLUTE)
    found = compare.largest([{"out": small, "lse": large}, {"out": large}, {"lse": small}, {}])
    assert found == {"out": large, "lse": large}


def test_every_operator_of_the_specs_has_a_check(specs: spec.Specs) -> None:
    assert set(operators.CHECKS) == set(specs.operators)


def test_a_split_is_made_by_the_kernel_that_is_checked(specs: spec.Specs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_kernel(op: str, facts: CallFacts, backend: str = "auto", *, helper: bool = False) -> Callable[..., None]:
        asked.append((op, backend, helper))
        return lambda *_arguments: None

    monkeypatch.setattr(runtime, "find_kernel", find_kernel)
    case = next(case for case in small_cases("split_selection", specs) if case.workload.label == "ragged")
    check = operators.CHECKS["split_selection"](case, inputs.Source(CPU, 3, case.workload.values), False, "cutedsl")
    monkeypatch.setattr(backends, "runs_reference", lambda _backend, _device: False)
    check.run(into_buffers=False)
    assert asked == [("split_selection", "cutedsl", False)]


def test_points_ci_runs_every_declared_value(specs: spec.Specs) -> None:
    for operator in specs.operators.values():
        for precision in operator.tolerance:
            ran = [case.point for case in cases(cell_of(operator.name, precision), specs)]
            for dim, values in cell_of(operator.name, precision).variants.items():
                assert {point[dim] for point in ran} == set(values), (operator.name, precision, dim)


def planted(op: str, specs: spec.Specs, spoil) -> None:  # type: ignore[no-untyped-def]
    """Run one small case of an operator and spoil its outputs before they are compared."""
    case = next(case for case in small_cases(op, specs) if case.workload.label in ("ragged", "one_split"))
    check = operators.CHECKS[op](case, inputs.Source(CPU, 3, case.workload.values), False, "reference")
    outputs = [output.clone() for output in check.run(into_buffers=False)]
    check.compare(tuple(outputs))
    spoil(outputs)
    with pytest.raises(Disagreement):
        check.compare(tuple(outputs))


def spoil_first(value: float):  # type: ignore[no-untyped-def]
    def spoil(outputs: list[torch.Tensor]) -> None:
        outputs[0].view(-1)[0] = value

    return spoil


def spoil_last(value: float):  # type: ignore[no-untyped-def]
    def spoil(outputs: list[torch.Tensor]) -> None:
        outputs[-1].view(-1)[-1] = value

    return spoil


def swap_two_ids(outputs: list[torch.Tensor]) -> None:
    # The last row of the decode cases has no keys and so no ids.
    outputs[0][0, -2, [0, 1]] = outputs[0][0, -2, [1, 0]]


def drop_an_edge(outputs: list[torch.Tensor]) -> None:
    outputs[0] = outputs[0][1:]


def move_an_edge(outputs: list[torch.Tensor]) -> None:
    outputs[0][5, 3] += 1


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        ("index_score", spoil_first(torch.nan)),
        ("index_score", spoil_first(1e3)),
        ("decode_score", spoil_first(torch.nan)),
        ("decode_score", spoil_first(1e3)),
        ("decode_topk", swap_two_ids),
        ("decode_topk", spoil_first(-1)),
        ("sparse_decode", spoil_first(torch.nan)),
        ("sparse_decode", spoil_first(10.0)),
        ("topk_select", swap_two_ids),
        ("select_blocks", swap_two_ids),
        ("topk_select", spoil_first(-1)),
        ("select_blocks", spoil_first(-1)),
        ("select_blocks", spoil_first(1 << 20)),
        ("sparse_attention", spoil_first(torch.nan)),
        ("sparse_attention", spoil_first(10.0)),
        ("combine", spoil_first(torch.inf)),
        ("combine", lambda outputs: outputs[1].add_(0.01)),
        ("sparse_attention_backward", spoil_first(torch.nan)),
        ("sparse_attention_backward", spoil_first(10.0)),
        ("sparse_attention_backward", lambda outputs: outputs[1].mul_(1.5)),
        ("sparse_attention_backward", lambda outputs: outputs[2].mul_(1.05)),
        ("index_kl", lambda outputs: outputs[0].add_(0.01)),
        ("index_kl", lambda outputs: outputs[1].add_(0.01)),
        ("index_kl", lambda outputs: outputs[2].mul_(1.5)),
        ("index_kl", spoil_last(torch.nan)),
        ("build_schedule", drop_an_edge),
        ("build_schedule", move_an_edge),
    ],
)
@pytest.mark.drawn(3)
def test_a_wrong_answer_is_noticed(op: str, spoil, specs: spec.Specs) -> None:  # type: ignore[no-untyped-def]
    planted(op, specs, spoil)


def test_a_select_that_prefers_another_block_is_noticed(specs: spec.Specs) -> None:
    def replace(outputs: list[torch.Tensor]) -> None:
        row = outputs[0][0, 60]  # sees few enough blocks to choose all: an id beyond them cannot be right
        row[row >= 0] = row[row >= 0] + 1

    planted("select_blocks", specs, replace)


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
def test_scales_that_a_kernel_forgets_are_noticed(name: str, specs: spec.Specs) -> None:
    """Exact values, several heads in a group and a scale for every key: the ids are those of the scaled scores."""
    found = (case for case in cases(cell_of("select_blocks", "q8k8"), specs) if case.workload.label == "by_score")
    case = next(case for case in found if case.point["key_scales"] and case.point["heads_per_group"] > 1)
    workload = dataclasses.replace(case.workload, sequences=((70, 1300),), dims={"num_kv_heads": 4})
    case = dataclasses.replace(case, workload=workload)
    for strided in (False, True):
        check = selection.SelectBlocks(case, inputs.Source(CPU, 5, case.workload.values), strided, "reference")
        check.compare(check.run(into_buffers=False))
        del check.options[name]
        (wrong,) = check.run(into_buffers=False)
        check.options[name] = check.scales[name]
        with pytest.raises(Disagreement, match="elements differ"):
            check.compare((wrong,))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("token_scales", [0, 1])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.drawn(2)
def test_scales_that_decoding_forgets_are_noticed(
    name: str, token_scales: int, strided: bool, specs: spec.Specs
) -> None:
    found = (case for case in small_cases("sparse_decode", specs, "q16kv8") if case.workload.label == "partial_block")
    case = next(case for case in found if case.point["token_scales"] == token_scales and not case.dims["scored_blocks"])
    workload = dataclasses.replace(case.workload, dims={**case.workload.dims, "num_kv_heads": 4})
    case = dataclasses.replace(case, workload=workload)
    check = operators.SparseDecode(case, inputs.Source(CPU, 5, case.workload.values), strided, "reference")
    check.compare(check.run(into_buffers=False))
    check.scales[name] = torch.ones_like(check.scales[name])
    wrong = check.run(into_buffers=False)
    with pytest.raises(Disagreement, match=r"error|places"):
        check.compare(wrong)


def test_a_step_that_forgets_the_scales_of_the_indexer_is_noticed(specs: spec.Specs) -> None:
    case = next(c for c in small_cases("sparse_decode", specs, "q16kv8")
                if c.dims["scored_blocks"] and c.workload.label == "ragged")  # fmt: skip
    workload = dataclasses.replace(case.workload, sequences=((3, 5000),), dims={"topk": 4, "num_kv_heads": 2})
    case = dataclasses.replace(case, workload=workload)
    check = operators.SparseDecode(case, inputs.Source(CPU, 3, case.workload.values), True, "reference")
    check.compare(check.run(into_buffers=True))
    for name, scale in check.index_scales.items():
        check.index_scales[name] = torch.ones_like(scale)
        wrong = check.run(into_buffers=True)
        check.index_scales[name] = scale
        with pytest.raises(Disagreement, match="block_indices"):
            check.compare(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_spoilt(dtype: torch.dtype) -> None:
    """Every row that no request uses, and two elements that some queries see; all NaN codes of e4m3 are among them."""
    source = inputs.Source(CPU, 0, "normal")
    lengths = source.lengths([(1, 3000), (1, 0), (1, 500)], shortened=True)
    keys = source.values((3500, 2, 16), dtype)
    quantised.spoil(source, lengths, keys)
    used = lengths.seqused_k.tolist()
    hidden = [*range(used[0], 3000), *range(3000 + used[2], 3500)]
    nan = keys.float().isnan()
    assert hidden and bool(nan[hidden].all()) and int(nan.sum()) == len(hidden) * 32 + 2
    assert bool(nan[: used[0]].any()) and not bool(nan[3000 : 3000 + used[2]].any()), "of few keys none is spoilt"
    if dtype.itemsize == 1:
        assert {0x7F, 0xFF} == set(keys.view(torch.uint8)[nan].tolist())


def test_one_head_is_louder(specs: spec.Specs) -> None:
    dims = {"num_kv_heads": 4, "total_k": 100, "block_size": 64, "pages_per_block": 2, "token_scales": 1}
    source = inputs.Source(CPU, 0, "normal")
    lengths = source.lengths([(1, 100)], shortened=False)
    for stored, rows in quantised.key_scales(source, dims, lengths, strided=False):
        assert stored.shape[1:] == (4, 32) and rows.shape == (100, 4)
        present = stored[~stored.isnan()]
        assert torch.equal(present.sort().values, rows.flatten().sort().values), "NaN in every gap of the pages"
        quiet, *_, loud = rows.amax(0).sort().values.tolist()
        assert loud > 200 * quiet


def test_slow_tools_get_a_small_case_of_a_few_points(specs: spec.Specs) -> None:
    found = smallest(cases(cell_of("sparse_decode", "q16kv8"), specs))
    assert len(found) == 4 == len({tuple(case.point.items()) for case in found})
    assert all(0 < sum(keys for _, keys in case.workload.sequences) < 3000 for case in found)


def test_the_sanitizer_watches_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(verify_command.shutil, "which", lambda name: "/cuda/compute-sanitizer")
    monkeypatch.setattr(verify_command.subprocess, "run", lambda command, check: ran.append(command) or Done())
    assert (
        main(["verify", "--sanitizer", "memcheck", "--op", "sparse_decode", "--precision", "fp8", "--seed", "3"]) == 1
    )
    assert [command[:7] for command in ran] == [
        ["/cuda/compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "23", "--kernel-name", f"kns={name}"]
        for name in ("main_kernel", "_msa_tiles_kernel_")
    ]
    for command, dsl in zip(ran, ("tilelang", "cutedsl"), strict=True):
        given = " ".join(command[8:])
        assert given.startswith("-m msa_tiles verify --smallest --op sparse_decode ")
        assert f"--dsl {dsl} " in given and "--precision fp8 " in given and given.endswith("--seed 3")


class Done:
    returncode = 23


def test_what_a_pack_has_is_not_compiled(monkeypatch: pytest.MonkeyPatch, specs: spec.Specs) -> None:
    registry = default_registry()
    [cell] = registry.select("combine", "cutedsl", "sm90")
    grid = [(cell, cases(cell, specs))]
    wanted = launched.launched(grid, registry)
    packed = wanted[0]
    monkeypatch.setattr(packs, "find", lambda cell, variant: (cell, variant) == (packed.cell, packed.variant) or None)
    assert wanted[1:] and launched.to_compile(grid, registry) == wanted[1:]


def test_what_is_not_verified_may_be_packed_before(monkeypatch: pytest.MonkeyPatch, specs: spec.Specs) -> None:
    registry = default_registry()
    [cell] = registry.select("sparse_decode", "cutedsl", "sm90", "bf16")
    monkeypatch.setattr(evidence, "is_verified", lambda other, verified: other.id != cell.id)
    jobs = launched.unverified(registry, specs, "sm90", ["tilelang", "cutedsl"])
    own = [tuple(job.variant.items()) for job in jobs if job.cell.id == cell.id]
    assert {*own} >= {tuple(point.items()) for point in cell.ci} and len(own) == len({*own})
    assert {job.cell.op for job in jobs} == {"sparse_decode", "combine"}
    with pytest.raises(ValueError, match="for sm90 are verified as they are now"):
        launched.unverified(registry, specs, "sm90", ["tilelang"])


def test_cells_are_shared_out_to_processes(monkeypatch: pytest.MonkeyPatch, specs: spec.Specs) -> None:
    """The longest first; one that says nothing of use counts as a failure."""
    ran: list[list[str]] = []
    said = {
        "combine": '{"cells": [], "failures": []}',
        "topk_select": '{"cells": [], "failures": [{"cell": "c", "case": "k", "seed": 7, "failure": "out: error 3"}]}',
        "select_blocks": "",
    }

    def stand_in(command: list[str], **_: object) -> types.SimpleNamespace:
        ran.append(command)
        op = command[command.index("--op") + 1]
        return types.SimpleNamespace(returncode=-11, stdout=said[op], stderr="first\nSegmentation fault\n")

    monkeypatch.setattr(verify_command.subprocess, "run", stand_in)
    grid = [(cell_of(op), cases(cell_of(op), specs)) for op in said]
    args = argparse.Namespace(processes=2, device="cuda:1", stale=True, beneath=True, seed=3, tree=["mine"])
    failures = list(verify_command._side_by_side(args, grid))
    assert sorted((failure["cell"], failure["failure"]) for failure in failures) == [
        ("c", "out: error 3"),
        ("select_blocks.tilelang.sm90.bf16", "ended with -11: Segmentation fault"),
    ]
    longest = max(grid, key=lambda row: len(row[1]))[0].op
    assert f"--op {longest} --dsl tilelang --target sm90 --precision bf16" in " ".join(ran[0])
    for command in ran:
        assert " ".join(command).endswith("--device cuda:1 --jobs 1 --stale --beneath --seed 3 --tree mine")


@pytest.mark.parametrize("option", [["--smallest"], ["--sanitizer", "memcheck"]])
def test_processes_are_for_whole_runs(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--processes", "2", *option]) == 2
    assert "--processes is 2; with --smallest and --sanitizer it is 1" in capsys.readouterr().err


def test_two_writers_of_the_record_lose_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        cell = dataclasses.replace(cell_of("combine"), id=f"cell {number}")
        runner._write(tmp_path, cell, {"digest": str(number)}, tmp_path / "locks")

    processes = [multiprocessing.get_context("fork").Process(target=write, args=(number,)) for number in range(12)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert read_verified(tmp_path) == {f"cell {number}": {"digest": str(number)} for number in range(12)}


def test_the_m3_shape_is_verified_with_every_kind_of_scales(specs: spec.Specs) -> None:
    ran = [case.point["key_scales"] for case in cases(cell_of("select_blocks", "q8k8"), specs)
           if case.workload.label == "long"]  # fmt: skip
    assert sorted(ran) == [0, 1]


def test_scores_of_fp8_have_a_tolerance_of_their_own(specs: spec.Specs) -> None:
    tolerance = {
        precision: small_cases("select_blocks", specs, precision)[0].score_tolerance for precision in ("bf16", "q8k8")
    }
    assert tolerance["q8k8"] == 0.1 > tolerance["bf16"] == specs.operators["index_score"].tolerance["bf16"]["out"]


def scored(specs: spec.Specs) -> operators.SparseDecode:
    """A case of sparse_decode whose ids msa_decode chooses."""
    found = (case for case in small_cases("sparse_decode", specs) if case.dims["scored_blocks"])
    case = next(case for case in found if case.workload.label == "ragged")
    return operators.SparseDecode(case, inputs.Source(CPU, 3, case.workload.values), False, "reference")


@pytest.mark.parametrize(("part", "name"), [(0, "out"), (1, "lse"), (2, "block_indices")])
def test_every_output_of_a_decode_step_is_compared(part: int, name: str, specs: spec.Specs) -> None:
    check = scored(specs)
    for into_buffers in (False, True):
        outputs = [output.clone() for output in check.run(into_buffers)]
        assert len(outputs) == 3
        check.compare(tuple(outputs))
        outputs[part].view(-1)[0] += 7
        with pytest.raises(Disagreement, match=name):
            check.compare(tuple(outputs))


def test_writing_outside_a_buffer_is_noticed() -> None:
    buffer = inputs.Buffer((2, 3, 8), torch.bfloat16, CPU, (1, 0, 2))
    buffer.view.zero_()
    buffer.check_gaps("out")
    buffer.view.as_strided((1,), (1,), 8).fill_(0)
    with pytest.raises(Disagreement, match="outside"):
        buffer.check_gaps("out")


class TestRunner:
    """Journal and `verified.json`, with counted and failing stand-ins for a run."""

    @pytest.fixture
    def grid(self, specs: spec.Specs) -> list[tuple[Cell, list[Case]]]:
        return [(cell_of("combine"), small_cases("combine", specs))]

    def run(self, grid, tmp_path: Path, **options) -> list[runner.Result]:  # type: ignore[no-untyped-def]
        return list(
            runner.run(grid, CPU, tmp_path, seed=lambda: 5, backend="reference", root=tmp_path / "cache", **options)
        )

    def test_a_cell_that_passes_is_verified_with_its_digest(self, grid, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        results = self.run(grid, tmp_path)
        cell, found = grid[0]
        assert len(results) == len(found)
        entry = json.loads((tmp_path / "verified.json").read_text())[cell.id]
        assert entry["digest"] == cell.digest
        assert entry["cases"] == len(found)
        assert list(entry["errors"]) == ["lse", "out", "out, beside torch"]
        for output, accepted in (("out", 0.02), ("lse", 0.0005)):
            error = entry["errors"][output]
            assert 0 <= error["worst"] < error["accepted"] == accepted and error["metric"] == "absolute"
        lse, out, _ = accuracies([cell], read_verified(tmp_path))
        assert (out.worst, out.card, out.current) == (entry["errors"]["out"]["worst"], "cpu", True)
        assert out.worst > 0 and (lse.output, lse.worst) == ("lse", 0.0)
        assert entry["card"] == "cpu"
        assert in_words([lse, out], {}) == (
            f"worst errors on record (cpu, {entry['date']}): lse 0, accepted 0.0005; out {out.worst:.2g}, accepted 0.02"
        )
        earlier = dataclasses.replace(out, metric="equal", current=False)
        assert in_words([earlier], {}) == f"worst errors on record (cpu, {entry['date']}, of other code): out equal"
        assert in_words([], {"out": 0.1, "lse": 0}) == "no errors on record; accepted: out 0.1, lse 0"
        assert is_verified(cell, read_verified(tmp_path))
        changed = dataclasses.replace(cell, digest="f" * 16)
        assert not is_verified(changed, read_verified(tmp_path))

    def test_a_stopped_run_goes_on_where_it_stopped(self, grid, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        results = runner.run(grid, CPU, tmp_path, seed=lambda: 5, backend="reference", root=tmp_path / "cache")
        first = next(results)
        second = next(results)
        results.close()
        assert not (tmp_path / "verified.json").exists()
        done = {first.case.key, second.case.key}
        rest = {result.case.key for result in self.run(grid, tmp_path)}
        assert not done & rest
        assert done | rest == {case.key for case in grid[0][1]}
        assert len(self.run(grid, tmp_path)) == len(grid[0][1]), "a complete run leaves no journal behind"

    def test_a_failure_is_reported_and_takes_verified_away(
        self,
        grid,  # type: ignore[no-untyped-def]
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.run(grid, tmp_path)
        assert is_verified(grid[0][0], read_verified(tmp_path))

        def fail(*_args: object) -> compare.Errors:
            raise Disagreement("out: error 3 at (0, 0), accepted 0.02")

        monkeypatch.setattr(runner, "run_case", fail)
        results = self.run(grid, tmp_path)
        assert all(result.failure == "out: error 3 at (0, 0), accepted 0.02" for result in results)
        assert read_verified(tmp_path) == {}


@pytest.mark.parametrize("cell", default_registry().select(op="dequantize_kv", dsl="cutedsl"), ids=lambda cell: cell.id)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.drawn(3)
def test_kernels_take_what_cases_of_dequantize_kv_hand_them(cell: Cell, strided: bool) -> None:
    """Values that began anywhere in a pool were refused on a GPU, where nobody reads them so."""
    for number, case in enumerate(cases(cell, SPECS)):
        if case.workload.label in ("medium",):
            continue
        check = operators.CHECKS["dequantize_kv"](
            case, inputs.Source(torch.device("cpu"), number, "normal"), strided, "reference"
        )
        facts = dequantize.facts(check.whole, *(buffer.view for buffer in check.buffers()))
        assert facts.features <= set(cell.features), case
