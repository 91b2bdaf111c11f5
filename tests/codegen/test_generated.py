"""The kernels in the repository are what the specs generate, and read like code that somebody wrote."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from few_specs import copy_specs

from msa_tiles import codegen, paths, spec
from msa_tiles.cli import main
from msa_tiles.codegen import emit
from msa_tiles.codegen.digest import recorded_digests
from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.codegen.toolchain import PINS
from msa_tiles.commands import support
from msa_tiles.runtime.registry import default_registry

ROOT = Path(__file__).parents[2]
SPECS = spec.load(paths.specs_dir())
CELLS = [cell["id"] for cell in json.loads((paths.generated_dir() / "index.json").read_text(encoding="utf-8"))["cells"]]


@functools.cache
def generated() -> codegen.Generated:
    """By the worker that runs this file alone, and not by all that collect it."""
    return codegen.produce(SPECS)


@pytest.fixture
def plan(request: pytest.FixtureRequest) -> codegen.KernelPlan:
    """Of a cell on record, which are those that are generated where nothing has drifted."""
    return next(plan for plan in generated().plans if plan.cell == request.param)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout


def test_the_repository_is_up_to_date() -> None:
    assert codegen.drift(generated(), paths.generated_dir()) == []


@pytest.mark.slow  # beside it, test_the_repository_is_up_to_date
def test_another_process_finds_the_same_bytes_fast_and_imports_no_torch() -> None:
    """Those of the files, which are the ones of this process (above), whatever the seed of hashes."""
    code = """
import sys, time
start = time.process_time()
from msa_tiles.cli import main
status = main(["generate", "--check"])
heavy = sorted({"torch", "tilelang", "tvm", "cutlass", "numpy"} & set(sys.modules))
print(status, heavy, time.process_time() - start < 10)
"""
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    assert run_python(code, PYTHONHASHSEED=other).splitlines()[-1] == "0 [] True"


@pytest.mark.parametrize("tool", [["check"], ["format", "--check"]])
@pytest.mark.parametrize("directory", [paths.generated_dir(), SKELETONS])
def test_generated_files_and_skeletons_are_linted_and_formatted(tool: list[str], directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *tool, str(directory)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("plan", CELLS, indirect=True)
@pytest.mark.drawn(15)
def test_a_kernel_file(plan: codegen.KernelPlan) -> None:
    text = generated().files[generated().paths[plan.cell]]
    (cell,) = (cell for cell in generated().index["cells"] if cell["id"] == plan.cell)
    assert (
        recorded_digests(text)[plan.cell]
        == cell["digest"]
        == codegen.digest_of(text, plan.dsl, SPECS.targets[plan.target].arch)
    )
    assert "# <-" not in text
    assert "# %" not in text
    operator = SPECS.operators[plan.op]
    points = operator.variants.of(SPECS.precisions[plan.precision]).ci
    points = tuple(point for point in points if all(point[name] in plan.variants[name] for name in plan.variants))
    (row,) = (row for row in operator.kernels if f"{plan.op}.{row.cell}" == plan.cell)
    if row.ci == "pairs":
        assert plan.ci == points
    else:
        assert len(plan.ci) < len(points) and all(point in points for point in plan.ci)
        for name, values in plan.variants.items():
            assert {point[name] for point in plan.ci} == set(values)
    assert plan.ci[0].items() <= operator.m3.items()


def test_support_shows_the_operands_that_generation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files of the kernels, whatever rows and formats say."""
    taken: dict[str, dict[str, str]] = {}
    find = emit._operand

    def noted(role: str, plan: codegen.KernelPlan, *where: Any) -> Path:
        found = find(role, plan, *where)
        taken.setdefault(plan.cell, {})[role] = found.stem
        return found

    monkeypatch.setattr(emit, "_operand", noted)
    codegen.produce(SPECS)
    registry = default_registry()
    rows = {f"{op.name}.{row.cell}": row for op in SPECS.operators.values() for row in op.kernels}
    for cell in registry.cells:
        shown = support.loaded_by(cell, registry)
        assert {each.role: each.operand for each in shown if each.operand} == taken.get(cell.id, {}), cell.id
        for each in shown:
            named = rows[cell.id].operands.get(each.role)
            assert (each.named_by == "the row") == (named is not None), each
            assert named in (None, each.operand)
    assert {"the row", "the format", "the kernel"} == {
        each.named_by for cell in registry.cells for each in support.loaded_by(cell, registry)
    }


def test_operands_of_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["support", "--operands", "--target", "sm90", "--precision", "bf16"]
    assert main([*chosen, "--op", "select_blocks,sparse_decode"]) == 0
    heading, *lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [heading[0], heading[-1]] == ["cell", "named by"]
    assert [[words.strip() for words in line if words] for line in lines] == [
        ["select_blocks.tilelang.sm90.bf16", "index_key", "bf16", "-", "the kernel"],
        ["select_blocks.cutedsl.sm90.bf16", "index_key", "bf16", "index_plain", "the row"],
        ["sparse_decode.tilelang.sm90.bf16", "key_value", "bf16", "plain", "the format"],
        ["sparse_decode.cutedsl.sm90.bf16", "key_value", "bf16", "plain", "the format"],
    ]
    assert main([*chosen, "--op", "select_blocks", "--dsl", "cutedsl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "cell": "select_blocks.cutedsl.sm90.bf16",
            "role": "index_key",
            "format": "bf16",
            "operand": "index_plain",
            "named_by": "the row",
        }
    ]
    assert main([*chosen, "--op", "combine"]) == 0
    assert "no kernel that was asked for reads keys" in capsys.readouterr().out
    assert main([*chosen, "--accuracy"]) == 2
    assert "--accuracy and --operands are two tables" in capsys.readouterr().err


def test_a_precision_without_scales_has_no_part_in_them() -> None:
    names = ("bf16", "q8k8_two_tiles")
    plain, scaled = (generated().files[f"tilelang/sm90/select_blocks_{name}.py"] for name in names)
    for word in ("q_scale", "k_scale", "key_scales"):
        assert word not in plain and word in scaled
    assert re.search(r"^#   idx_q +\[total_q, num_index_heads, head_dim\] +float8_e4m3fn ", scaled, re.MULTILINE)


def test_an_operand_that_no_shipped_row_names_fits_its_kernel(tmp_path: Path) -> None:
    """e4m3_pairs, which makes the scores itself: a row of one's own may name it."""
    directory = copy_specs(tmp_path / "specs", ["shared_attention"])
    precisions, operator = directory / "precisions.yaml", directory / "operators/shared_attention.yaml"
    formats = "{query: bf16, key_value: e4m3, multiply: float8_e4m3fn, output: bfloat16}"
    precisions.write_text(f"{precisions.read_text()}  q16kv8m8: {formats}\n")
    row = """
  - dsl: cutedsl
    precisions: [q16kv8m8]
    mma: wgmma
    copy: [tma_load, tma_store]
    operands: {key_value: e4m3_pairs}
    only: {token_scales: [0]}
    tile: {stages: 3, producer_registers: 56, consumer_registers: 200}
    expect: [SYNCS, USETMAXREG]
    features: [paged, q_positions, expanded]
"""
    text = operator.read_text().replace("tolerance:\n", "tolerance:\n  q16kv8m8: {out: 0.03, lse: 0.005}\n")
    operator.write_text(text.rstrip("\n") + row)
    files = codegen.produce(spec.load(directory)).files
    plain, pairs = (files[f"cutedsl/sm90/shared_attention_{name}.py"] for name in ("q16kv8", "q16kv8m8"))
    assert plain == generated().files["cutedsl/sm90/shared_attention_q16kv8.py"]
    assert "import e4m3_pairs as key_value" in pairs
    operands = "(tile.score, tile.S, tile.queries, tile.keys[None, None, None, stage])"
    for text, product in ((plain, "wgmma.multiply"), (pairs, "self.keys.score")):
        assert (text.count(operands), text.count(product + operands)) == (2, 2)


@pytest.mark.parametrize("dsl", PINS)
@pytest.mark.drawn(1)
def test_another_toolchain_is_another_digest(dsl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cells of its DSL, and of no other."""
    before = {cell["id"]: cell["digest"] for cell in generated().index["cells"]}
    monkeypatch.setitem(PINS, dsl, {name: "0" for name in PINS[dsl]})
    after = {cell["id"]: cell["digest"] for cell in codegen.produce(SPECS).index["cells"]}
    changed = {cell for cell, digest in after.items() if digest != before[cell]}
    assert changed == {plan.cell for plan in generated().plans if plan.dsl == dsl}


def test_another_architecture_is_another_digest() -> None:
    """Of the cells of its target, and of no other: what ran was compiled for something else."""
    before = {cell["id"]: cell["digest"] for cell in generated().index["cells"]}
    targets = {**SPECS.targets, "sm100": dataclasses.replace(SPECS.targets["sm100"], arch="sm_100f")}
    made = codegen.produce(dataclasses.replace(SPECS, targets=targets))
    changed = {cell["id"] for cell in made.index["cells"] if cell["digest"] != before[cell["id"]]}
    assert changed == {plan.cell for plan in generated().plans if plan.target == "sm100"}


@pytest.mark.parametrize("plan", CELLS, indirect=True)
@pytest.mark.drawn(4)
def test_the_digest_covers_the_helpers(plan: codegen.KernelPlan, tmp_path: Path) -> None:
    text = generated().files[generated().paths[plan.cell]]
    imported = re.findall(rf"^from msa_tiles\.dsl\.{plan.dsl}\.(?!operands)(\w+) import", text, re.MULTILINE)
    for folder, names in re.findall(rf"^from msa_tiles\.dsl\.{plan.dsl}(\.operands)? import (.+)", text, re.MULTILINE):
        imported += [folder.replace(".", "") + "/" * bool(folder) + name.split()[0] for name in names.split(",")]
    arch = SPECS.targets[plan.target].arch
    package = tmp_path / "msa_tiles"
    shutil.copytree(Path(codegen.__file__).parents[1] / "dsl", package / "dsl")
    assert codegen.digest_of(text, plan.dsl, arch, package) == recorded_digests(text)[plan.cell]
    assert imported or "msa_tiles.dsl" not in text
    for name in imported:
        helper = package / "dsl" / plan.dsl / f"{name}.py"
        before = codegen.digest_of(text, plan.dsl, arch, package)
        helper.write_text(helper.read_text() + "changed = 1\n")
        assert codegen.digest_of(text, plan.dsl, arch, package) != before, name


def test_every_skeleton_is_used() -> None:
    present = {path.relative_to(SKELETONS).as_posix() for path in SKELETONS.rglob("*.py")}
    assert present - {plan.skeleton for plan in generated().plans} == set()


def test_pins_are_those_of_the_project() -> None:
    dependencies = (ROOT / "pyproject.toml").read_text()
    for pins in PINS.values():
        for name, version in pins.items():
            assert f'"{name}=={version}"' in dependencies


# Kernels that sparse_attention, its backward and index_kl call and users do not.
INSIDE = ("gradient_rows", "index_gradients", "index_lse", "merge_gradients", "shared_attention", "split_selection")


@pytest.mark.parametrize("operator", SPECS.operators.values(), ids=lambda operator: operator.name)
def test_specs_and_operators_agree(operator: spec.Operator) -> None:
    """What a spec names exists in the library, with the same defaults."""
    ops, reference = importlib.import_module("msa_tiles.ops"), importlib.import_module("msa_tiles.reference")
    assert callable(getattr(reference, operator.reference))
    if operator.name in INSIDE:
        assert not hasattr(ops, operator.name)
        return
    signature = inspect.signature(getattr(ops, operator.name)).parameters
    for name in operator.inputs:
        assert name in signature, f"ops.{operator.name} has no argument {name}"
    for parameter in operator.parameters.values():
        default = signature[parameter.name].default
        assert default == (inspect.Parameter.empty if parameter.required else parameter.default), parameter.name


def test_targets_and_devices_of_the_index_follow_the_specs() -> None:
    index = json.loads((paths.generated_dir() / "index.json").read_text())
    assert index["targets"]["sm90"]["devices"]["NVIDIA H100 80GB HBM3"]["sm_count"] == 132
    assert index["targets"]["sm100"]["mma"]["tcgen05"]["elements"]["nvfp4"] == ["UTCOMMA.4X"]


class TestCommand:
    def test_writes_then_checks_and_fails_on_drift(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        specs = copy_specs(tmp_path / "specs", ["combine"])
        made, out = codegen.produce(spec.load(specs)), tmp_path / "out"
        into = ["generate", "--specs", str(specs), "--out", str(out)]
        assert main(into) == 0
        count, files = len(made.plans), len(set(made.paths.values()))
        assert files < count
        assert f"{count} kernels, {files + 1} files written, 0 unchanged" in capsys.readouterr().out
        assert main([*into, "--check"]) == 0
        assert f"{count} kernels are what their specs say" in capsys.readouterr().out
        path = made.paths[made.plans[0].cell]
        changed = out / path
        changed.write_text(changed.read_text() + "BY_HAND = 1\n")
        (out / "tilelang" / "left_over.py").write_text("")
        assert main([*into, "--check"]) == 1
        complaints = capsys.readouterr().err
        assert f"{path} does not match its own digest" in complaints
        assert "tilelang/left_over.py was not generated" in complaints
        assert changed.read_text().endswith("BY_HAND = 1\n")

    @pytest.mark.parametrize(
        ("given", "written"),
        [
            (["--target", "sm90"], {"tilelang/sm90/combine_bf16.py", "cutedsl/sm90/combine_bf16.py"}),
            *((["--dsl", dsl], {f"{dsl}/sm90/combine_bf16.py"}) for dsl in PINS),
        ],
        ids=lambda names: " ".join(sorted(names)),
    )
    @pytest.mark.drawn(1)
    def test_filters(self, given: list[str], written: set[str], tmp_path: Path) -> None:
        assert main(["generate", "--out", str(tmp_path), "--op", "combine", *given]) == 0
        assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")} == written

    def test_unknown_filter(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "--out", str(tmp_path), "--target", "sm91"]) == 2
        assert "--target sm91 is unknown; did you mean sm90? Known: sm100, sm103, sm90" in capsys.readouterr().err

    def test_specs_of_the_user(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "specs").mkdir()
        assert main(["generate", "--specs", str(tmp_path / "specs"), "--out", str(tmp_path)]) == 2
        message = capsys.readouterr().err
        assert re.search(r"msa-tiles generate: \S+/specs/targets: there is no such directory of specs", message)
