"""Trees of one's own: what they declare goes before what is shipped, as long as they are in use, and no longer."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from few_specs import copy_specs

import msa_tiles
from msa_tiles import cli, names, ops, paths, trees
from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.commands._options import without_oversized
from msa_tiles.dsl.cutedsl import operands
from msa_tiles.launch import lookup
from msa_tiles.library.remember import Remembered
from msa_tiles.runtime import dispatch, evidence, parts, toolchain, tuned
from msa_tiles.runtime.blocks import excess
from msa_tiles.runtime.build import Job, Outcome, ci_jobs
from msa_tiles.runtime.dispatch import decide, find_kernel
from msa_tiles.runtime.facts import CallFacts, DeviceFacts, device_facts, target_facts
from msa_tiles.runtime.registry import Registry, RegistryError, default_registry

CELL = "sparse_decode.cutedsl.sm90.bf16"
OPERATOR = """op: sparse_decode
inherits: sparse_decode
rules:
  - num_q_heads % num_kv_heads == 0
  - topk <= 64
  - num_kv_heads <= 1000
kernels:
  - dsl: cutedsl
    targets: [sm90]
    precisions: [bf16]
    mma: wgmma
    copy: [tma_load]
    tile: {stages: 3}
    expect: [SYNCS]
    features: [paged, q_positions, expanded]
"""
TARGET = """target: sm90small
inherits: sm90
summary: a made-up Hopper with less shared memory
shared_memory: {per_block: 101376, per_sm: 102400}
"""
TINY = """target: sm120
inherits: sm90
summary: a made-up card that no kernel fits
arch: sm_120a
capability: [12, 0]
threads_per_block: 64
mma: {simt: {thread_group: 32, elements: {float32: [], int32: []}}}
devices: {Tiny: {sm_count: 8, memory_gb_per_s: 100, peak_tflops: {float32: 1}}}
default_device: Tiny
"""
COMBINE = """op: combine
inherits: combine
kernels:
  - dsl: cutedsl
    targets: [sm103]
    precisions: [bf16]
    compute: float32
    mma: simt
    tile: {rows: 8, unroll: 16}
"""


PRECISION = "precisions:\n  q16k: {query: bf16, index_key: e4m3, multiply: bfloat16, output: bfloat16}\n"
WITHOUT_KERNELS = {
    "specs/precisions.yaml": (PRECISION, r"it has precisions \(q16k\) alone, .*`inherits: OPERATOR`, a `tolerance`"),
    "operands/cutedsl/mine.py": ("", r"it has operands \(mine\) alone, .*`inherits: OPERATOR` and `kernels:`"),
    "specs/operators/combine.yaml": ("op: combine\ninherits: combine\n", "what operators/combine.yaml of it says"),
}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.suffix in (".py", ".json", ".yaml")}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row of an operator with another tile and another rule, and a target that inherits, generated."""
    directory = tmp_path_factory.mktemp("own").resolve()
    write(directory / "specs/operators/sparse_decode.yaml", OPERATOR)
    write(directory / "specs/targets/sm90small.yaml", TARGET)
    shipped = [paths.specs_dir(), paths.generated_dir()]
    before = list(map(contents, shipped))
    assert cli.main(["generate", "--tree", str(directory)]) == 0
    assert list(map(contents, shipped)) == before, "the installation was written to"
    return directory


@pytest.fixture
def few(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation's specs are those of the smallest operator, so that generating takes no time."""
    specs = copy_specs(tmp_path_factory.mktemp("few") / "specs", ["combine"])
    monkeypatch.setattr(paths, "specs_dir", lambda: specs)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """No test leaves a tree in use."""
    before, path = trees.stack(), list(operands.__path__)
    yield
    assert (trees.stack(), operands.__path__) == (before, path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_TILES_CACHE_DIR", str(tmp_path / "cache"))


def call(registry: Registry, target: str) -> CallFacts:
    [cell] = registry.select("sparse_decode", "cutedsl", "sm90", "bf16")
    return CallFacts("sparse_decode", torch.device("cuda"), "bf16", cell.ci[0])


def test_a_tree_generates_what_is_other_than_beneath(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = json.loads((tree / "generated/index.json").read_text())
    assert list(index["targets"]) == ["sm90small"] and not index["precisions"] and not index["formats"]
    ids = {cell["id"] for cell in index["cells"]}
    assert {each for each in ids if ".sm90small." not in each} == {CELL}
    assert "topk_select.tilelang.sm90small.bf16" in ids
    assert not any(each.startswith("sparse_attention.") for each in ids), "its tiles do not fit"
    text = (tree / "generated/cutedsl/sm90/sparse_decode_bf16.py").read_text()
    shipped = (paths.generated_dir() / "cutedsl/sm90/sparse_decode_bf16.py").read_text()
    assert "\nSTAGES = 3\n" in text and "\nSTAGES = 2\n" in shipped
    assert cli.main(["generate", "--check", "--tree", str(tree)]) == 0
    assert f"{len(ids)} kernels are what their specs say" in capsys.readouterr().out


def test_its_kernels_win_for_what_it_declares_and_go_with_it(tree: Path) -> None:
    before = default_registry()
    [shipped] = before.select("sparse_decode", "cutedsl", "sm90", "bf16")
    with msa_tiles.use_tree(tree) as used:
        assert used.directory == tree
        registry = default_registry()
        [cell] = registry.select("sparse_decode", "cutedsl", "sm90", "bf16")
        assert (cell.tree, cell.replaces, cell.file) == (
            tree,
            True,
            tree / "generated/cutedsl/sm90/sparse_decode_bf16.py",
        )
        others = [each for each in registry.cells if each.tree is None]
        assert others == [each for each in before.cells if each.id != CELL]
        chosen = decide(call(registry, "sm90"), target_facts(registry.targets["sm90"]), registry, "cutedsl").chosen
        assert chosen is not None and chosen.cell is cell
        assert registry.directory == tree / "generated" and registry.below == (paths.generated_dir(),)
        [broken] = lookup.broken_rules("sparse_decode", num_kv_heads=1001)
        assert broken == "num_kv_heads = 1001, wanted num_kv_heads <= 1000"
    assert default_registry() is before
    assert lookup.broken_rules("sparse_decode", num_kv_heads=1001) == ()
    assert shipped in default_registry().cells


def test_a_call_on_the_cpu_is_what_it_was(tree: Path) -> None:
    q, k = torch.randn(3, 8, 64, generator=torch.manual_seed(0)), torch.randn(256, 4, 64)
    ids = torch.zeros(4, 3, 1, dtype=torch.int32)
    plain = ops.sparse_decode(q, k, k, ids)
    with msa_tiles.use_tree(tree):
        assert torch.equal(ops.sparse_decode(q, k, k, ids), plain)


def test_what_dispatch_has_found_is_there_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "obtain", lambda *_: None)
    monkeypatch.setattr(dispatch, "Kernel", lambda cell, *_: types.SimpleNamespace(cell=cell))
    monkeypatch.setattr(dispatch, "device_facts", lambda *_: target_facts(default_registry().targets["sm90"]))
    monkeypatch.setattr(dispatch, "_kernels", {})
    monkeypatch.setattr(toolchain, "missing", lambda _: None)
    facts = call(default_registry(), "sm90")
    before = find_kernel("sparse_decode", facts, "cutedsl")
    with msa_tiles.use_tree(tree):
        during = find_kernel("sparse_decode", facts, "cutedsl")
        assert (before.cell.tree, during.cell.tree) == (None, tree)
        assert find_kernel("sparse_decode", facts, "cutedsl") is during
    assert find_kernel("sparse_decode", facts, "cutedsl") is before
    with msa_tiles.use_tree(tree):
        assert find_kernel("sparse_decode", facts, "cutedsl") is not during, "the tree may have been generated anew"


def test_operators_forget_the_calls_that_they_remember(tree: Path) -> None:
    remembered: Remembered[str] = Remembered()
    remembered.keep("call", "shipped")
    with msa_tiles.use_tree(tree):
        assert remembered.get("call") is None
        remembered.keep("call", "own")
        assert remembered.get("call") == "own"
    assert remembered.get("call") is None


def test_explain_and_support_say_where_a_kernel_comes_from(
    tree: Path, capsys: pytest.CaptureFixture[str], own_cache: None
) -> None:
    assert cli.main(["explain", "sparse_decode", "--device", "sm90", "--backend", "cutedsl", "--tree", str(tree)]) == 0
    out = capsys.readouterr().out
    assert f"  {CELL} (of the tree {tree}, in place of the one beneath): serves it" in out
    assert f"Runs {CELL}, from {tree}/generated/cutedsl/sm90/sparse_decode_bf16.py" in out
    assert cli.main(["support", "--op", "sparse_decode", "--json", "--tree", str(tree)]) == 0
    rows = {(row["dsl"], row["target"], row["precision"]): row["tree"] for row in json.loads(capsys.readouterr().out)}
    assert rows.pop(("cutedsl", "sm90", "bf16")) == str(tree)
    assert all((whence is None) == (target == "sm90") for (_, target, _), whence in rows.items())
    assert cli.main(["support", "--op", "sparse_decode", "--tree", str(tree)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.endswith(" from") and len(lines) == len(rows) + 1
    own = [line for line in lines if line.endswith(str(tree))]
    assert [line.split()[1:4] for line in own if " sm90 " in line] == [["cutedsl", "sm90", "bf16"]]
    assert all(line.endswith("shipped") for line in lines if line not in own)
    assert cli.main(["explain", "sparse_decode", "--device", "sm90"]) == 0
    assert str(tree) not in capsys.readouterr().out


def test_explain_says_that_times_are_of_the_shipped_kernel(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"Times are estimates from what shipped kernels took: {CELL} of {tree} is another one."
    for requests, timed in (("1024", False), ("16", True)):  # nothing as large as that was measured
        sizes = ["--queries", "4", "--keys", "4096", "--requests", requests, "--device", "sm90", "--backend", "cutedsl"]
        assert cli.main(["explain", "sparse_decode", *sizes, "--tree", str(tree)]) == 0
        out = capsys.readouterr().out
        assert ("\n  about " in out) == (said in out) == timed
    assert cli.main(["explain", "sparse_decode", *sizes]) == 0
    assert "estimates" not in capsys.readouterr().out


def test_sources_of_a_tree_that_have_changed_since_are_told_by_every_command(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], own_cache: None
) -> None:
    operator = write(
        tmp_path / "specs/operators/combine.yaml", "op: combine\ninherits: combine\nkernels: []\nsummary: own words\n"
    )
    named = ["--tree", str(tmp_path)]
    asked = {
        "support": 0,
        "explain combine --device sm90": 0,
        "matrix --op none": 2,
        "demo --steps 0": 2,
        "build --op none": 2,
        "build --for combine --op combine": 2,
        "pack --target sm90 --out pack --jobs 0": 2,
        "verify --op none": 2,
        "tune --op none": 2,
    }
    assert cli.main(["generate", *named]) == 0

    def told() -> list[bool]:
        capsys.readouterr()
        found = []
        for command, status in asked.items():
            assert cli.main([*command.split(), *named]) == status
            err = capsys.readouterr().err
            found.append(trees.told_outdated(tmp_path.resolve()) in err)
        return found

    others = {"generate", "bench"}  # the one that mends it, and the one of the next test
    assert {command.split()[0] for command in asked} == {
        each.__name__.rpartition(".")[2] for each in cli.COMMANDS
    } - others
    assert not any(told())
    operator.write_text(operator.read_text().replace("own", "other"))
    assert all(told())
    assert cli.main(["generate", "--op", "combine", "--dsl", "tilelang", *named]) == 0
    assert all(told()), "other cells stay as they were"
    assert cli.main(["generate", "--op", "combine", "--dsl", "cutedsl", *named]) == 0
    assert not any(told()), "no cell is left as it was"
    assert cli.main(["generate", *named]) == cli.main(["generate", "--check", *named]) == 0
    assert not any(told())
    skeleton = write(
        tmp_path / "skeletons/cutedsl/simt/combine.py", (SKELETONS / "cutedsl/simt/combine.py").read_text()
    )
    assert all(told())
    assert cli.main(["generate", *named]) == 0
    assert not any(told())
    skeleton.write_text(skeleton.read_text() + "# more\n")
    assert all(told())
    assert cli.main(["generate", *named]) == 0
    operand = write(tmp_path / "operands/cutedsl/mine.py", "TENSORS = ()\n")
    assert all(told())
    assert cli.main(["generate", *named]) == 0
    assert not any(told())
    operand.unlink()
    assert all(told())
    assert cli.main(["generate", *named]) == 0
    write(tmp_path / "specs/targets/sm90small.yaml", TARGET)
    assert all(told())


def test_what_is_timed_is_told_that_specs_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cpu", "--tree", str(tmp_path)]) == 2
    assert "have changed" not in capsys.readouterr().err
    empty = {"format": 2, "targets": {}, "formats": {}, "precisions": {}, "cells": [], "specs": "others"}
    write(tmp_path / "generated/index.json", json.dumps(empty))
    assert cli.main(["bench", "--device", "cpu", "--tree", str(tmp_path)]) == 2
    assert trees.told_outdated(tmp_path.resolve()) in capsys.readouterr().err


def test_kernels_of_a_copied_tree_whose_spec_was_edited_are_out_of_date_in_every_answer(
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = tmp_path.resolve() / "copy"
    shutil.copytree(tree, copy)
    spec = copy / "specs/operators/sparse_decode.yaml"
    told = trees.told_outdated(copy)
    filters = "--op sparse_decode --dsl cutedsl --precision bf16 --target sm90"

    def lines(command: str) -> list[str]:
        capsys.readouterr()
        cli.main([*command.split(), "--tree", str(copy)])
        return capsys.readouterr().out.splitlines()

    def last_lines() -> list[bool]:
        return [
            " outdated " in lines(f"support {filters}")[-1],
            "out of date" in "".join(line for line in lines(f"matrix {filters}") if line.startswith("sparse_decode")),
            told in lines("explain sparse_decode --device sm90 --backend cutedsl")[-1],
            told in lines("explain sparse_decode --device sm90 --backend cutedsl --variant group=7")[-1],
            any(
                told in line
                for line in lines("explain sparse_decode --device sm90 --backend cutedsl --queries 1 --keys 4096")
            ),
        ]

    assert not any(last_lines())
    spec.write_text(spec.read_text().replace("stages: 3", "stages: 2"))
    assert all(last_lines())
    [row] = json.loads("\n".join(lines(f"support {filters} --json")))
    assert row["status"] == "outdated" and "generated" not in row["flags"]

    def made(jobs: list[Job], *_: object, **__: object) -> Iterator[Outcome]:
        return iter([Outcome(job, None, 0.0, ()) for job in jobs])

    monkeypatch.setattr("msa_tiles.runtime.build.build", made)
    monkeypatch.setattr(toolchain, "missing", lambda dsl: None)
    assert cli.main(["build", *filters.split(), "--tree", str(copy)]) == 0
    assert capsys.readouterr().err.rstrip().endswith(told), "it is told behind the table, too"
    monkeypatch.setattr(dispatch, "obtain", lambda *_: None)
    monkeypatch.setattr(dispatch, "Kernel", lambda cell, *_: cell)
    monkeypatch.setattr(
        dispatch, "device_facts", lambda device, targets: target_facts(default_registry().targets["sm90"])
    )
    with msa_tiles.use_tree(copy):
        ci = default_registry().select("sparse_decode", "cutedsl", "sm90", "bf16")[0].ci[0]
        facts = CallFacts("sparse_decode", torch.device("cuda"), "bf16", ci)
        caplog.clear()
        assert find_kernel("sparse_decode", facts, "cutedsl").tree == copy  # type: ignore[attr-defined]
        assert told in caplog.text
        with pytest.raises(dispatch.NoKernelError, match=re.escape(told)):
            find_kernel("sparse_decode", dataclasses.replace(facts, variant={**ci, "group": 7}), "cutedsl")


def test_a_target_of_the_same_architecture_goes_first_and_shipped_kernels_serve_it(tree: Path) -> None:
    with msa_tiles.use_tree(tree):
        registry = default_registry()
        small = target_facts(registry.targets["sm90small"])
        [topk] = registry.select("topk_select", "cutedsl", "sm90small")
        facts = CallFacts("topk_select", torch.device("cuda"), "bf16", topk.ci[0])
        assert decide(facts, small, registry, "cutedsl").chosen.cell is topk  # type: ignore[union-attr]
        fits = call(registry, "sm90small")
        fits = dataclasses.replace(fits, variant={**fits.variant, "head_dim": 64, "block_size": 64})
        decision = decide(fits, small, registry, "cutedsl")
        assert decision.chosen.cell.id == CELL  # type: ignore[union-attr]
        called = "sparse_decode,head_dim=64,block_size=64"
        wanted = {job.cell.id for job in parts.jobs_for(called, registry, "sm90small")}
        assert {each.split(".")[2] for each in wanted if each.startswith("combine.")} == {"sm90small"}
        assert {each.split(".")[2] for each in wanted if each.startswith("sparse_decode.")} == {"sm90"}
        blackwell = target_facts(registry.targets["sm100"])
        assert decide(facts, blackwell, registry, "cutedsl").chosen is None


@pytest.mark.parametrize("head_dim, served", [(128, False), (64, True)])
def test_a_kernel_whose_block_is_too_large_for_another_target_refuses(
    head_dim: int, served: bool, tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TARGET.replace("101376", "166912").replace("102400", "167936")
    write(tmp_path / "specs/targets/sm90small.yaml", text)
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    with msa_tiles.use_tree(tmp_path):
        registry = default_registry()
        [cell] = registry.select("sparse_attention", "cutedsl", "sm90", "bf16")
        facts = CallFacts(cell.op, torch.device("cuda"), "bf16", {**cell.ci[0], "head_dim": head_dim})
        decision = decide(facts, target_facts(registry.targets["sm90small"]), registry, "cutedsl")
        assert (decision.chosen is not None) == served
        [refusal] = (each.refusal for each in decision.candidates if each.cell is cell)
        at = "head_dim=128, block_size=128, group=16, pages_per_block=0"
        sentence = f"230056 bytes of shared memory at {at} exceed the 166912 that a block can have on sm90small"
        assert refusal == (None if served else sentence)
        assert decide(facts, target_facts(registry.targets["sm90"]), registry, "cutedsl").chosen is not None


def test_a_device_is_of_the_targets_of_a_tree_first(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = type("Properties", (), {"major": 9, "minor": 0, "name": "a card", "multi_processor_count": 1})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: made_up)
    cuda = torch.device("cuda", 0)
    assert device_facts(cuda, default_registry().targets.values()).target == "sm90"
    with msa_tiles.use_tree(tree):
        found: DeviceFacts = device_facts(cuda, default_registry().targets.values())
        assert found.target == "sm90small"


def test_trees_stack_and_leave_in_any_order(tree: Path, tmp_path: Path) -> None:
    empty = tmp_path.resolve()
    first = msa_tiles.use_tree(tree)
    epoch = trees.epoch()
    second = msa_tiles.use_tree(empty)
    assert [each.directory for each in trees.stack()] == [empty, tree]
    # Nothing is generated there yet: kernels are those beneath, evidence would be the tree's own.
    registry = default_registry()
    assert registry.directories == (empty / "generated", tree / "generated", paths.generated_dir())
    assert next(cell for cell in registry.cells if cell.id == CELL).tree == tree
    with msa_tiles.use_tree(tree):
        assert [each.directory for each in trees.stack()] == [tree, empty]
    assert [each.directory for each in trees.stack()] == [empty, tree]
    first.__exit__()
    assert [each.directory for each in trees.stack()] == [empty]
    second.__exit__()
    assert trees.epoch() != epoch
    for left in trees.stack():
        trees.use(left.directory).__exit__()


def test_the_variable_names_trees_as_path_does(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_state", None)
    monkeypatch.setenv(trees.VARIABLE, os.pathsep.join(["", str(tmp_path), str(tree), str(tmp_path)]))
    assert [each.directory for each in trees.stack()] == [tmp_path.resolve(), tree]
    monkeypatch.setattr(trees, "_state", None)
    monkeypatch.setenv(trees.VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(trees.TreeError, match=rf"{trees.VARIABLE}: there is no directory {tmp_path}/missing"):
        trees.stack()
    assert cli.main(["support"]) == 2
    monkeypatch.setattr(trees, "_state", None)
    monkeypatch.delenv(trees.VARIABLE)


def test_a_tree_that_goes_while_it_is_in_use_is_named(tree: Path, tmp_path: Path) -> None:
    """Calls do not fall back to what lies beneath, and whoever ends its use goes on."""
    copy = Path(shutil.copytree(tree, tmp_path / "copy"))
    gone = re.escape(f"the tree {copy} is in use and is no longer there: put it back, or leave it out")
    with msa_tiles.use_tree(copy):
        cell = default_registry().select("sparse_decode", "cutedsl", "sm90", "bf16")[0]
        cell.file.unlink()
        with pytest.raises(RegistryError, match=f"cannot be read .*; run `msa-tiles generate --tree {copy}`"):
            cell.source_hash()
        shutil.rmtree(copy)
        with pytest.raises(trees.TreeError, match=gone):
            cell.source_hash()
    with msa_tiles.use_tree(write(copy / "specs/operators/combine.yaml", COMBINE).parents[2]):
        shutil.rmtree(copy)
        for read in (default_registry, trees.specs_dirs):
            with pytest.raises(trees.TreeError, match=gone):
                read()
    assert default_registry().select("sparse_decode", "cutedsl", "sm90", "bf16")[0].tree is None


def test_what_is_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "notes.txt", "")
    for path, sentence in (
        (tmp_path / "none", "there is no directory"),
        (tmp_path / "notes.txt", "notes.txt is a file, and a tree is a directory"),
        (Path(os.devnull), "null is no directory, and a tree is a directory"),
        (tmp_path, "it has none of the folders specs, skeletons, operands, generated"),
        (paths.generated_dir().parent, "is what is used without a tree: leave it out"),
        ("", "the path of a tree is empty: name its directory"),
    ):
        with pytest.raises(trees.TreeError, match=sentence):
            msa_tiles.use_tree(path)
    for value in (None, 3, False):
        with pytest.raises(TypeError, match=f"path is {value!r}, wanted the directory of a tree, as text or as a path"):
            msa_tiles.use_tree(value)
    assert cli.main(["support", "--tree", str(tmp_path / "none")]) == 2
    assert f"msa-tiles support: there is no directory {tmp_path.resolve()}/none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part", ["", "specs", "specs/targets", "specs/targets/sm90small.yaml", "generated/__pycache__/a.pyc"]
)
def test_a_tree_that_others_may_write_to_is_refused(part: str, tmp_path: Path) -> None:
    write(tmp_path / "specs/targets/sm90small.yaml", TARGET)
    write(tmp_path / "generated/__pycache__/a.pyc", "")
    path = tmp_path / part
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(trees.TreeError, match=r"may be written to by others \(mode .*a tree is code; `chmod -R go-w"):
        msa_tiles.use_tree(tmp_path)
    path.chmod(path.stat().st_mode & ~0o022)
    msa_tiles.use_tree(tmp_path).__exit__()


def test_a_link_in_a_tree_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "specs/targets/sm90small.yaml", TARGET)
    (tmp_path / "skeletons").symlink_to(SKELETONS)
    with pytest.raises(
        trees.TreeError, match=r"skeletons is a symbolic link, and a tree is code; put there what it leads to$"
    ):
        msa_tiles.use_tree(tmp_path)


def test_a_part_of_a_tree_that_is_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "specs/targets/sm90small.yaml", TARGET)
    monkeypatch.setattr("msa_tiles.trust.trusted_users", lambda: frozenset({-1}))
    with pytest.raises(trees.TreeError, match=r"belongs to user .* trusts that user, and a tree is code$"):
        msa_tiles.use_tree(tmp_path)


def test_what_python_made_for_bytecode_is_closed_to_others(tmp_path: Path) -> None:
    made = write(tmp_path / "generated/cutedsl/__pycache__/a.pyc", "").parent
    made.chmod(0o775)
    msa_tiles.use_tree(tmp_path).__exit__()
    assert made.stat().st_mode & 0o777 == 0o755


def test_evidence_is_of_the_highest_tree_that_knows_the_digest(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "own")
    with msa_tiles.use_tree(tmp_path / "own"):
        registry = default_registry()
        own = next(cell for cell in registry.cells if cell.id == CELL)
        other = registry.select("combine", "cutedsl", "sm90")[0]
        shipped = evidence.read_compiled(paths.generated_dir()).get(other.id)
        # What an earlier state of the tree left behind hides nothing.
        evidence.record_compiled(registry.directory, {own.id: {"digest": own.digest}, other.id: {"digest": "old"}})
        found = evidence.compiled_of(registry)
        assert found[own.id] == {"digest": own.digest}
        assert found[other.id] == (shipped if shipped and shipped["digest"] == other.digest else {"digest": "old"})
        assert (registry.directory / "compiled.json").is_file()
    assert CELL not in evidence.compiled_of(default_registry()) or default_registry() is not registry


@pytest.mark.usefixtures("few")
def test_evidence_beneath_is_not_that_of_a_kernel_of_the_tree(tmp_path: Path) -> None:
    """The code may be the same where points or tolerances are others: nobody has run or compiled those."""
    spec = paths.specs_dir() / "operators/combine.yaml"
    text = spec.read_text(encoding="utf-8")
    bound = re.search(r"bf16: \{out: ([0-9.e-]+)", text)
    assert bound is not None
    write(tmp_path / "specs/operators/combine.yaml", text.replace(bound[0], "bf16: {out: 1.0e-7", 1))
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    shipped = {cell.id: cell for cell in default_registry().select("combine")}
    known = evidence.verified_of(default_registry())
    assert any(evidence.is_verified(cell, known) for cell in shipped.values())
    with msa_tiles.use_tree(tmp_path):
        registry = default_registry()
        own = [cell for cell in registry.select("combine") if cell.digest == shipped[cell.id].digest]
        assert own and all(cell.tree is not None for cell in own)
        assert not any(evidence.is_verified(cell, evidence.verified_of(registry)) for cell in own)
        assert not any(cell.id in evidence.compiled_of(registry) for cell in own)


def test_a_tree_of_which_nothing_is_generated_is_said_to_be_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    row = write(tmp_path / "specs/operators/combine.yml", "inherits: combine\n")
    assert cli.main(["explain", "combine", "--tree", str(tmp_path), "--device", "sm90"]) == 0
    assert f"none are generated: run `msa-tiles generate --tree {tmp_path}`" in caplog.text
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 2
    assert f"{row}:1: specs end in .yaml: rename it to combine.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("support", "--target"),
        ("build", "--target"),
        ("build", "--for", "combine", "--target"),
        ("pack", "--out", "nowhere", "--target"),
        ("explain", "combine", "--device"),
    ],
)
def test_of_a_target_of_a_tree_without_kernels_it_is_told_why(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write(tmp_path / "specs/targets/sm95.yaml", TARGET.replace("sm90small", "sm95") + "colour: red\n")
    ask = [*command, "sm95", "--tree", str(tmp_path)]
    assert cli.main(ask) == 2
    error = capsys.readouterr().err
    assert f"{target}:5: unknown key 'colour' in the file" in error and "did you mean sm90" not in error
    declared = f"{command[-1]} sm95: {target} declares it, and nothing is generated of that as yet; run `msa-tiles "
    for more, asked in (("", ""), ("on_request: true\n", " --target sm95")):
        write(target, TARGET.replace("sm90small", "sm95") + more)
        assert cli.main(ask) == 2
        assert f"{declared}generate --tree DIR{asked}`" in capsys.readouterr().err
    assert cli.main([*ask[:-3], "sm96", *ask[-2:]]) == 2
    assert "sm96" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [(), ("--target", "sm120"), ("--op", "combine")])
@pytest.mark.usefixtures("few")
def test_a_target_of_a_tree_that_can_run_nothing_is_told_why(
    asked: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "specs/targets/sm120.yaml", TINY)
    generate = ["generate", "--tree", str(tmp_path), *asked]
    assert cli.main([*generate, "--check"]) == 1
    assert "generated/index.json is missing" in capsys.readouterr().err
    assert cli.main(generate) == 1
    made, none, _, title, heading, *lines = capsys.readouterr().out.splitlines()[1:]
    assert made.startswith("0 kernels, 1 file written")
    assert none == "sm120 has no kernel: it can run none of those that there are"
    assert title == "sm120 has no kernels of" and heading.split()[:2] == ["operator", "because"]
    assert [line.split()[0] for line in lines] == ["combine"] and "threads" in lines[0]
    assert cli.main([*generate, "--check"]) == 0
    capsys.readouterr()
    assert cli.main(["support", "--tree", str(tmp_path), "--target", "sm120"]) == 0
    assert title in capsys.readouterr().out


@pytest.mark.usefixtures("few")
def test_a_row_of_a_tree_that_names_a_target_on_request_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It alone, again and again, until the target is requested; and it goes with the row."""
    row = write(tmp_path / "specs/operators/combine.yaml", COMBINE)
    named, index = ["--tree", str(tmp_path)], tmp_path / "generated/index.json"

    def made(*options: str) -> set[str]:
        assert cli.main(["generate", *named, *options]) == cli.main(["generate", "--check", *named]) == 0
        return {cell["id"] for cell in json.loads(index.read_text())["cells"]}

    assert made() == made() == {"combine.cutedsl.sm103.bf16"}
    row.write_text(row.read_text().replace("[sm103]", "[sm90]"))
    assert "combine.cutedsl.sm103.bf16" not in made()
    row.write_text(COMBINE)
    assert made() == {"combine.cutedsl.sm103.bf16"}
    both = {"combine.cutedsl.sm103.bf16", "combine.tilelang.sm103.bf16"}
    assert made("--target", "sm103") == made() == both


def test_figures_of_a_tree_go_before_those_beneath(tmp_path: Path) -> None:
    low, high = tmp_path / "low", tmp_path / "high"
    figure = tuned.Figure("combine", "sm90", "bf16", "w", 1, "card", "2026-01-01", {"a": 1.0}, {})
    tuned.write(low, [figure, dataclasses.replace(figure, workload="v")])
    tuned.write(high, [dataclasses.replace(figure, ms={"a": 2.0})])
    assert sorted((each.workload, each.ms["a"]) for each in tuned.figures_of(high, low)) == [("v", 1.0), ("w", 2.0)]


def test_nothing_is_written_to_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trees, "INSTALLATION", paths.generated_dir().parent)
    assert cli.main(["generate"]) == 2
    assert "came with the installation, which is not written to: name a tree of your own" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"is not written to: name a tree of your own, --tree DIR or MSA_TILES_TREE"):
        evidence.record_compiled(paths.generated_dir(), {})
    assert cli.main(["generate", "--specs", str(tmp_path)]) == 2
    assert "say where to write, --out DIR" in capsys.readouterr().err
    assert cli.main(["generate", "--tree", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "leave out --specs and --out" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("verify",), ("verify", "--smallest"), ("tune",)])
def test_an_installation_without_a_gpu_is_told_that_first(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trees, "INSTALLATION", paths.generated_dir().parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main([*command, "--op", "combine"]) == 2
    assert re.fullmatch(rf"msa-tiles {command[0]}: there is no CUDA device here; .*\n", capsys.readouterr().err)


def test_an_index_of_a_tree_that_cannot_be_read_names_the_tree(tmp_path: Path) -> None:
    write(tmp_path / "generated/index.json", "{}")
    sentence = rf"index\.json has not format 2; run `msa-tiles generate --tree {tmp_path}`"
    with msa_tiles.use_tree(tmp_path), pytest.raises(RegistryError, match=sentence):
        default_registry()


def test_a_target_without_kernels_is_told_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--target", "sm103", "--op", "combine,sparse_decode,topk_select"]) == 0
    _, title, heading, *lines = capsys.readouterr().out.splitlines()
    assert title == "sm103 has no kernels of" and heading.split()[0] == "operator"
    assert [" ".join(line.split()) for line in lines] == [
        "combine it can be generated and is not nothing: msa-tiles generate --tree DIR --target sm103",
        "sparse_decode it multiplies with wgmma; sm103 has tcgen05, simt "
        "skeletons/<dsl>/tcgen05/sparse_decode.py, a row in specs/operators/sparse_decode.yaml",
        "topk_select its rows are for sm90 alone a row with targets: [sm103] in specs/operators/topk_select.yaml",
    ]
    assert cli.main(["support", "--target", "sm103", "--op", "combine,sparse_decode", "--json"]) == 0
    combine, decode = json.loads(capsys.readouterr().out)
    assert combine == {
        "id": None, "op": "combine", "target": "sm103", "precisions": ["bf16"], "status": "missing",
        "because": "it can be generated and is not", "remedy": "nothing: msa-tiles generate --tree DIR --target sm103",
    }  # fmt: skip
    assert (decode["op"], decode["because"]) == ("sparse_decode", "it multiplies with wgmma; sm103 has tcgen05, simt")
    assert decode["precisions"] == ["bf16", "q16kv8", "q16kv4", "q16kvmx4"] and decode["remedy"].startswith(
        "skeletons/"
    )
    assert cli.main(["support", "--target", "sm100", "--op", "sparse_attention", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["dsl"] for row in rows[:-1]} == {"tilelang", "cutedsl"} and {row["target"] for row in rows} == {"sm100"}
    assert rows[-1]["status"] == "missing" and rows[-1]["precisions"] == ["q16kv8", "q16kv4", "q16kvmx4"]
    for table in ("--accuracy", "--operands"):
        assert cli.main(["support", "--target", "sm103", table]) == 2
    for options in ([], ["--json"]):
        capsys.readouterr()
        assert cli.main(["support", "--target", "sm103", "--op", "combin", *options]) == 2
        assert "combine" in capsys.readouterr().err
    assert cli.main(["generate", "--target", "sm103"]) == 2
    assert "kernels of sm103 are generated into a tree of your own alone: --tree DIR" in capsys.readouterr().err


def test_a_skeleton_that_there_is_has_to_be_extended(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--target", "B200", "--op", "sparse_attention,sparse_decode"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "multiplies with" in line]
    [quantised, decode] = [line.partition("skeletons/")[2] for line in lines]
    assert quantised == (
        "<dsl>/tcgen05/sparse_attention.py extended, or an algorithm of its own beside it, a row in "
        "specs/operators/sparse_attention.yaml"
    )
    assert decode == "<dsl>/tcgen05/sparse_decode.py, a row in specs/operators/sparse_decode.yaml"


@pytest.mark.usefixtures("few")
def test_a_hand_edit_of_a_target_that_lies_beneath_is_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--tree", str(tmp_path), "--target", "sm103", "--op", "combine"]) == 0
    kernel = tmp_path / "generated/cutedsl/sm103/combine_bf16.py"
    kernel.write_text(kernel.read_text() + "\nEDITED = 1\n")
    capsys.readouterr()
    assert cli.main(["generate", "--check", "--tree", str(tmp_path), "--op", "combine"]) == 1
    assert f"{kernel} does not match its own digest: it was edited by hand" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"targets": {}, "formats": {}, "precisions": {}, "cells": [{"id": "a"}]}'])
@pytest.mark.usefixtures("few")
def test_a_damaged_index_is_written_anew(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the kernels of targets on request that lie in the tree, though nothing but their headers tells of them."""
    one = ["--tree", str(tmp_path / "a")]
    (tmp_path / "a").mkdir()
    assert cli.main(["generate", *one, "--target", "sm103"]) == 0
    index = tmp_path / "a/generated/index.json"
    whole, others = index.read_text(), contents(tmp_path / "a/generated/cutedsl")
    index.write_text(text)
    (tmp_path / "b").mkdir()
    capsys.readouterr()
    assert cli.main(["generate", *one, "--tree", str(tmp_path / "b")]) == 2
    sentence = f"{index} is no index of kernels; run `msa-tiles generate --tree {tmp_path}/a`"
    assert (sentence in capsys.readouterr().err) == ("id" not in text)
    assert cli.main(["generate", "--check", *one]) == 1
    assert f"{index} is not what the specs declare" in capsys.readouterr().err
    assert cli.main(["generate", *one]) == 0
    assert (index.read_text(), contents(tmp_path / "a/generated/cutedsl")) == (whole, others)


@pytest.mark.parametrize(
    "command, status, names",
    [
        ("explain sparse_attention --device B300", 1, "sparse_attention can be generated for sm103 and is not"),
        ("explain sparse_attention --device sm103 --precision fp8", 1, ""),
        ("explain sparse_decode --device sm103", 1, ""),
        ("build --target sm103 --op combine", 2, "combine can be generated for sm103 and is not"),
        ("build --target sm103 --op combine --precision fp8", 2, ""),
        ("build --target sm103 --op topk_select", 2, ""),
        ("build --for sparse_attention --target sm103", 2, "sparse_attention can be generated for sm103 and is not"),
        ("build --for sparse_attention,precision=fp8 --target sm103", 2, ""),
        ("build --for msa_decode --target sm103", 2, ""),
        (
            "explain sparse_attention --device sm103 --queries 256",
            1,
            "sparse_attention can be generated for sm103 and is not",
        ),
        ("build --for sparse_attention,no --target sm103", 2, ""),
    ],
)
def test_what_can_be_generated_is_said_to_be_so(
    command: str, status: int, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == status
    text = "".join(capsys.readouterr())
    assert ("generate --tree" in text) == bool(names)
    assert not names or f"{names}: msa-tiles generate --tree DIR --target sm103" in text


def test_what_a_tree_declares_no_longer_goes(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that says what the shipped one says, after one that said something else."""
    own = tmp_path / "own"
    row = write(own / "specs/operators/sparse_decode.yaml", OPERATOR.replace("<= 1000", "<= 1001"))
    shutil.copytree(tree / "generated", own / "generated")
    shutil.rmtree(own / "generated/cutedsl/sm90small")
    shutil.rmtree(own / "generated/tilelang")
    index = json.loads((own / "generated/index.json").read_text())
    cells = [cell for cell in index["cells"] if cell["id"] == CELL]
    (own / "generated/index.json").write_text(json.dumps({**index, "targets": {}, "cells": cells}))
    row.write_text("op: sparse_decode\ninherits: sparse_decode\n")
    kernel = own / "generated/cutedsl/sm90/sparse_decode_bf16.py"
    assert kernel.is_file()
    assert cli.main(["generate", "--check", "--tree", str(own)]) == 1
    complaints = capsys.readouterr().err
    assert f"{kernel} is an orphan: no spec asks for it" in complaints
    assert f"{own}/generated/index.json is not what the specs declare" in complaints
    assert f"2 of the generated files need `msa-tiles generate --tree {own}`" in complaints
    assert cli.main(["generate", "--tree", str(own)]) == 0
    out = capsys.readouterr().out
    assert f"deleted {kernel}, which no spec asks for" in out
    assert f"{own} declares no kernel beyond what lies beneath" in out
    assert not kernel.exists()
    with msa_tiles.use_tree(own):
        assert all(cell.tree is None for cell in default_registry().cells)
    assert cli.main(["generate", "--check", "--tree", str(own)]) == 0


@pytest.mark.usefixtures("few")
def test_trees_on_one_another_are_checked_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low, high, empty = tmp_path / "low", tmp_path / "high", tmp_path / "empty"
    combine = "cutedsl/simt/combine.py"
    text = (SKELETONS / combine).read_text()
    write(low / "skeletons" / combine, text + "\n\nOWN = 1\n")
    write(high / "skeletons" / combine, text + "\n\nOWN = 2\n")
    empty.mkdir()
    both = ["--tree", str(low), "--tree", str(high)]
    assert cli.main(["generate", "--tree", str(low)]) == 0
    assert cli.main(["generate", *both]) == 0
    capsys.readouterr()
    assert cli.main(["generate", "--check", *both, "--tree", str(empty)]) == 0
    assert "4 kernels are what their specs say" in capsys.readouterr().out
    for tree, named in ((low, f"--tree {low}"), (high, f"--tree {low} --tree {high}")):
        kernel = tree / "generated/cutedsl/sm90/combine_bf16.py"
        kernel.write_text(kernel.read_text() + "\nEDITED = 1\n")
        assert cli.main(["generate", "--check", *both]) == 1
        complaints = capsys.readouterr().err
        assert f"{kernel} does not match its own digest" in complaints
        assert f"1 of the generated files needs `msa-tiles generate {named}`" in complaints
    assert f"{low}/generated/cutedsl" in complaints


@pytest.mark.usefixtures("few")
def test_a_tree_that_declares_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 2
    assert "declares no kernel beyond what lies beneath" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", WITHOUT_KERNELS)
def test_a_tree_of_which_no_kernel_comes_is_told_what_it_has(
    file: str, tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text, sentence = WITHOUT_KERNELS[file]
    write(tmp_path / "own" / file, text)
    assert cli.main(["generate", "--tree", str(tmp_path / "own")]) == 2
    assert re.search(f"own declares no kernel beyond what lies beneath: {sentence}", capsys.readouterr().err)
    with msa_tiles.use_tree(tmp_path / "own"):
        default_registry()
    # Where generating makes nothing, it is not recommended.
    assert ("none are generated" in caplog.text) == ("operators" in file)


@pytest.mark.usefixtures("few")
def test_a_skeleton_of_a_tree_replaces_the_shipped_one_of_its_cells_alone(tmp_path: Path) -> None:
    name = "cutedsl/simt/combine.py"
    text = (SKELETONS / name).read_text()
    write(tmp_path / "skeletons" / name, text + "\n\nOWN = 1\n")
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    index = json.loads((tmp_path / "generated/index.json").read_text())
    assert {cell["id"] for cell in index["cells"]} == {f"combine.cutedsl.{target}.bf16" for target in ("sm90", "sm100")}
    assert [path.name for path in (tmp_path / "generated").rglob("*.py")] == ["combine_bf16.py"]
    assert "\nOWN = 1\n" in (tmp_path / "generated/cutedsl/sm90/combine_bf16.py").read_text()


SKELETON = "cutedsl/simt/combine.py"
MISPLACED = {
    "skeleton/cutedsl/simt/combine.py": "skeleton: nothing reads it: .*; did you mean 'skeletons'",
    "Skeletons/cutedsl/simt/combine.py": "Skeletons: nothing reads it: .*; did you mean 'skeletons'",
    "operand/cutedsl/mine.py": "operand: nothing reads it: .*; did you mean 'operands'",
    "spec/operators/combine.yaml": "spec: nothing reads it: .*; did you mean 'specs'",
    "operators/combine.yaml": "operators: nothing reads it: it belongs into specs",
    "precisions.yaml": "precisions.yaml:1: nothing reads it: it belongs into specs",
    "combine.yaml": "combine.yaml:1: nothing reads it: it belongs into specs/operators",
    "sm120.YML": "sm120.YML:1: nothing reads it: it belongs into specs/targets",
    "cutedsl/simt/combine.py": "cutedsl: nothing reads it: skeletons are read from skeletons/<dsl>/<mma>",
    "skeletons/cutedsl/smt/combine.py": f"smt/combine.py:1: nothing reads it: .*; did you mean '{SKELETON}'",
    "skeletons/cutedsl/simt/combin.py": f"simt/combin.py:1: nothing reads it: .*; did you mean '{SKELETON}'",
    "skeletons/cutedls/simt/combine.py": f"cutedls/simt/combine.py:1: nothing reads it: .*; did you mean '{SKELETON}'",
    "skeletons/cutedsl/combine.py": "cutedsl/combine.py:1: nothing reads it",
    "skeletons/cutedsl/simt/old/combine.py": f"old/combine.py:1: nothing reads it: .*; did you mean '{SKELETON}'",
    "skeletons/cutedsl/simt/combine.PY": "combine.PY:1: nothing reads it",
    "skeletons/combine.yaml": "skeletons/combine.yaml:1: nothing reads it",
    "operands/mine.py": "mine.py:1: nothing reads it: operands are read from operands/<dsl>/<name>.py",
    "operands/cutedls/mine.py": "cutedls/mine.py:1: nothing reads it: .*; did you mean 'cutedsl/mine.py'",
    "operands/cutedsl/more/mine.py": "more/mine.py:1: nothing reads it: .*; did you mean 'cutedsl/mine.py'",
}
# What tells a spec from another YAML file.
HEADS = {
    "combine.yaml": "# mine\nop: combine\n",
    "sm120.YML": "target: sm120\n",
}
# Of no concern, though they lie in a tree.
OTHERS = (
    ".git/skeletons/a.py",
    "skeletons/.ipynb_checkpoints/combine.py",
    "skeletons/cutedsl/simt/__pycache__/combine.cpython-312.pyc",
    "skeletons/cutedsl/simt/.combine.py.swp",
    "skeletons/cutedsl/__init__.py",
    "skeletons/README.md",
    "skeletons_old/cutedsl/simt/combin.py",
    "mkdocs.yml",
    "combine.py",
    "skeletal/notes.txt",
    "README.md",
    "packs/sm90/manifest.json",
    "tests/test_mine.py",
    "cutedsl/setup.py",
    "operands/README",
    "generated/verified.json",
)


@pytest.mark.usefixtures("few")
def test_what_nothing_reads_is_refused_with_the_place_where_it_is_read_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "skeletons" / SKELETON, (SKELETONS / SKELETON).read_text() + "\n\nOWN = 1\n")
    for other in OTHERS:
        write(tmp_path / other, "{}")
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    assert "skeletons" not in capsys.readouterr().err.replace(str(tmp_path), "")
    for file, sentence in MISPLACED.items():
        path = write(tmp_path / file, HEADS.get(file, ""))
        assert cli.main(["generate", "--tree", str(tmp_path)]) == 2, file
        assert re.search(f"{re.escape(str(tmp_path))}/.*{sentence}", capsys.readouterr().err), file
        path.unlink()
        if file.partition("/")[0] not in trees.FOLDERS:
            shutil.rmtree(tmp_path / file.partition("/")[0], ignore_errors=True)
            for other in OTHERS:
                write(tmp_path / other, "{}")
    # All at once, and with the mistakes of specs.
    for file in MISPLACED:
        write(tmp_path / file, HEADS.get(file, ""))
    write(tmp_path / "specs/operators/combine.yaml", "op: combine\ninherits: combine\nkernel: []\n")
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "specs/operators/combine.yaml:3: " in told
    # Whether there is such a family nobody knows where specs cannot be read.
    places = {file for file in MISPLACED if "/smt/" not in file}
    assert len(re.findall("nothing reads it", told)) == len(places)


@pytest.mark.usefixtures("few")
def test_a_skeleton_that_is_as_shipped_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "skeletons" / SKELETON, (SKELETONS / SKELETON).read_text())
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 2
    told = f"it has skeletons ({SKELETON}) alone, as shipped: what you change in them makes kernels of your own"
    assert told in capsys.readouterr().err
    path.write_text(path.read_text() + "\n\nOWN = 1\n")
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0


@pytest.mark.usefixtures("few")
def test_a_skeleton_that_no_row_takes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (SKELETONS / SKELETON).read_text()
    write(tmp_path / "skeletons" / SKELETON, text + "\n\nOWN = 1\n")
    path = write(tmp_path / "skeletons/cutedsl/simt/combine_faster.py", text)
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    assert f"{path}: no row takes this skeleton; did you mean '{SKELETON}'?" in capsys.readouterr().err


def test_operands_of_a_tree_are_found_while_it_is_in_use(tmp_path: Path) -> None:
    write(tmp_path / "a/generated/operands/cutedsl/bytes.py", "WHERE = 'a'\n")
    write(tmp_path / "b/generated/operands/cutedsl/bytes.py", "WHERE = 'b'\n")
    name = f"{operands.__name__}.bytes"
    for place in "ab":
        with msa_tiles.use_tree(tmp_path / place):
            assert place == importlib.import_module(name).WHERE
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    for place in "ab":
        shutil.copy(paths.generated_dir() / "index.json", tmp_path / place / "generated")
        index = json.loads((tmp_path / place / "generated/index.json").read_text())
        (tmp_path / place / "generated/index.json").write_text(json.dumps({**index, "cells": []}))
    sentence = r"bytes\.py has the name of .*give one of them another name"
    a, b = tmp_path / "a", tmp_path / "b"
    with msa_tiles.use_tree(a), msa_tiles.use_tree(b), pytest.raises(RegistryError, match=sentence):
        default_registry()


OWN_OPERAND = """from msa_tiles.dsl.cutedsl.operands import e4m3
from msa_tiles.dsl.table import declares

TENSORS = ("", "_scale")
Stored, Held, Left = e4m3.Stored, e4m3.Held, e4m3.Left


@declares
def parts(name, head_dim, block_size, stages, **more):
    return e4m3.parts(name, head_dim, block_size, stages, **more)


@declares
def multiplied(name, token_scales):
    return e4m3.multiplied(name, token_scales)
"""
OWN_PRECISION = """formats:
  own:
    summary: e4m3 by another name
    group: fp8
    element: float8_e4m3fn
    bits: 8
    storage: float8_e4m3fn
    scale: {dtype: float32, per: [head, token_head]}
precisions:
  q16own: {query: bf16, key_value: own, multiply: bfloat16, output: bfloat16}
"""
OWN_ROW = """op: sparse_decode
inherits: sparse_decode
tolerance:
  q16own: {out: 0.03, lse: 0.005}
kernels:
  - {dsl: cutedsl, precisions: [q16own], mma: wgmma, copy: [tma_load], tile: {stages: 3}, expect: [SYNCS, LDSM]}
"""


@pytest.fixture
def own_format(tmp_path: Path) -> Path:
    """A tree with a format whose operand lies in it."""
    write(tmp_path / "own/operands/cutedsl/own.py", OWN_OPERAND)
    write(tmp_path / "own/specs/precisions.yaml", OWN_PRECISION)
    write(tmp_path / "own/specs/operators/sparse_decode.yaml", OWN_ROW)
    assert cli.main(["generate", "--tree", str(tmp_path / "own")]) == 0
    return tmp_path / "own"


def test_a_format_of_a_tree(own_format: Path) -> None:
    index = json.loads((own_format / "generated/index.json").read_text())
    assert [cell["id"] for cell in index["cells"]] == ["sparse_decode.cutedsl.sm90.q16own"]
    assert (list(index["formats"]), list(index["precisions"]), index["targets"]) == (["own"], ["q16own"], {})
    copy = (own_format / "generated/operands/cutedsl/own.py").read_text()
    assert copy.startswith("# Generated by") and copy.endswith(OWN_OPERAND)
    with msa_tiles.use_tree(own_format):
        assert default_registry().precisions["q16own"].formats["key_value"] == "own"
        # A call says how its tensors are stored, and the shipped precision has the same storage.
        assert lookup.precision(query=torch.empty(0, dtype=torch.bfloat16)) == "bf16"
    assert "q16own" not in default_registry().precisions


def test_a_format_that_calls_do_not_tell_from_others_is_said(
    own_format: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that are stored alike calls have the last; of bytes only those that have a name."""
    capsys.readouterr()
    assert cli.main(["generate", "--tree", str(own_format)]) == 0
    [said] = [line for line in capsys.readouterr().err.splitlines() if "rendering" not in line]
    assert "own is stored as e4m3 is, in float8_e4m3fn, and a call does not say which" in said
    lost = said.removesuffix(" serve no call").partition("kernels of ")[2].split(", ")
    with msa_tiles.use_tree(own_format):
        registry = default_registry()
        for name, precision in registry.precisions.items():
            storages = {role: registry.formats[each]["storage"] for role, each in precision.formats.items()
                        if role != "output"}  # fmt: skip
            names = {role: each for role, each in precision.formats.items() if storages.get(role) == "uint8"}
            found = registry.precisions.get(registry.precision_of(storages | names))
            assert (found is None or not found.agrees(precision, storages)) == (name in lost), name
    text = (own_format / "specs/precisions.yaml").read_text()
    text = text.replace("storage: float8_e4m3fn", "storage: int8")
    write(own_format / "specs/precisions.yaml", text)
    assert cli.main(["generate", "--tree", str(own_format)]) == 0
    assert "precisions.yaml:2: no call passes tensors of the format own, of int8\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_format_of_a_tree_compiles_in_another_process(own_format: Path, own_cache: None) -> None:
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    one = ["--op", "sparse_decode", "--precision", "q16own", "--variant", "group=8", "--tree", str(own_format)]
    assert cli.main(["build", "--audit", *one]) == 0


@pytest.mark.slow
def test_a_kernel_of_a_tree_compiles_and_its_audit_is_recorded_there(
    tree: Path, tmp_path: Path, own_cache: None
) -> None:
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    own = tmp_path / "own"
    shutil.copytree(tree, own)
    index = json.loads((own / "generated/index.json").read_text())
    [cell] = (cell for cell in index["cells"] if cell["id"] == CELL)
    cell["ci"] = cell["ci"][:1]
    (own / "generated/index.json").write_text(json.dumps(index))
    one = ["--op", "sparse_decode", "--dsl", "cutedsl", "--target", "sm90", "--precision", "bf16", "--tree", str(own)]
    assert cli.main(["build", "--audit", *one]) == 0
    assert list(json.loads((own / "generated/compiled.json").read_text())) == [CELL]
    with msa_tiles.use_tree(own):
        registry = default_registry()
        [made] = registry.select("sparse_decode", "cutedsl", "sm90", "bf16")
        assert evidence.is_recorded(made, registry.targets["sm90"], evidence.compiled_of(registry))


LIMITS = "target: sm90\ninherits: sm90\nshared_memory: {per_block: 166912, per_sm: 167936}\n"


@pytest.mark.slow
def test_a_tree_that_changes_the_limits_of_a_shipped_target(
    tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (tmp_path / "own").resolve()
    write(own / "specs/targets/sm90.yaml", LIMITS)
    generate = ["generate", "--tree", str(own)]
    assert cli.main([*generate, "--check"]) == 1
    assert cli.main([*generate, "--target", "sm90"]) == 0
    sentence = f"{own} changes the limits of sm90, and has no kernels of its own"
    assert sentence in capsys.readouterr().out
    assert cli.main(generate) == 0
    out = capsys.readouterr().out
    assert sentence in out and "0 kernels, 0 files written" in out and "has no kernels of\n" not in out
    assert cli.main([*generate, "--check"]) == 0
    monkeypatch.undo()

    at = "head_dim=128, block_size=128, group=16, pages_per_block=0"
    refusal = f"230056 bytes of shared memory at {at} exceed the 166912 that a block can have on sm90"
    explain = ["explain", "sparse_attention", "--device", "sm90", "--backend", "cutedsl"]
    assert cli.main(explain) == 0
    for command in ("support", "matrix"):
        capsys.readouterr()
        assert cli.main([command, "--op", "combine", "--target", "sm90", "--tree", str(own)]) == 0
        assert "sm90 is as a tree describes it, and the evidence is not" in capsys.readouterr().out
        assert cli.main([command, "--op", "combine", "--target", "sm90"]) == 0
        assert "as a tree describes it" not in capsys.readouterr().out
    for asked in ([], ["--queries", "256"]):
        capsys.readouterr()
        assert cli.main([*explain, *asked, "--tree", str(own)]) == 1
        out = capsys.readouterr().out
        assert f"sparse_attention.cutedsl.sm90.bf16: refuses: {refusal}" in out and "Runs" not in out
        assert cli.main([*explain, *asked, "--variant", "head_dim=64", "--tree", str(own)]) == 0

    (tmp_path / "higher").mkdir()
    with msa_tiles.use_tree(own), msa_tiles.use_tree(tmp_path / "higher"):
        registry = default_registry()
        [cell] = registry.select("sparse_attention", "cutedsl", "sm90", "bf16")
        facts, device = (
            CallFacts(cell.op, torch.device("cuda"), "bf16", cell.ci[0]),
            target_facts(registry.targets["sm90"]),
        )
        assert decide(facts, device, registry, "cutedsl").chosen is None
        # What it takes is read once.
        monkeypatch.setattr("msa_tiles.tables._read", lambda *_: pytest.fail("read again"))
        assert decide(facts, device, registry, "cutedsl").chosen is None
        monkeypatch.undo()
        # Nor is it compiled or packed.
        jobs = ci_jobs([cell])
        capsys.readouterr()
        kept = without_oversized(jobs, registry)
        assert kept == [job for job in jobs if excess(cell, job.variant, registry.targets["sm90"]) is None]
        left_out = [job for job in jobs if job not in kept]
        assert kept and left_out
        assert f"{len(left_out)} of {len(jobs)} kernels cannot fit, such as {left_out[0]}: " in capsys.readouterr().err
        with pytest.raises(ValueError, match=r"1 of 1 kernel cannot fit, such as .*: 230056 bytes"):
            without_oversized(left_out[:1], registry)
    registry = default_registry()
    assert decide(facts, target_facts(registry.targets["sm90"]), registry, "cutedsl").chosen is not None
    assert without_oversized(jobs, registry) == jobs


def test_a_tree_that_describes_a_shipped_target_alone(
    tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "specs/targets/sm90.yaml", "target: sm90\ninherits: sm90\nsummary: in other words\n")
    assert cli.main(["generate", "--tree", str(tmp_path)]) == 0
    assert f"{tmp_path.resolve()} changes the description of sm90, and has no kernels" in capsys.readouterr().out
    assert cli.main(["explain", "combine", "--device", "sm90", "--tree", str(tmp_path)]) == 0


def test_build_takes_the_kernels_of_the_tree_that_is_named_and_with_beneath_the_others(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[set[str]] = []

    def built(jobs: list[Job], *_: object, **__: object) -> list[Outcome]:
        taken.append({job.cell.id for job in jobs})
        return [Outcome(job, None, 0.0, ()) for job in jobs]

    def told(*arguments: str) -> str:
        assert cli.main(["build", *arguments]) == 0
        return capsys.readouterr().err

    monkeypatch.setattr("msa_tiles.runtime.build.build", built)
    monkeypatch.setattr(toolchain, "missing", lambda dsl: None)
    own = {cell["id"] for cell in json.loads((tree / "generated/index.json").read_text())["cells"]}
    shipped = {cell.id for cell in default_registry().cells}
    filters = {
        (): lambda name: True,
        ("--target", "sm90"): lambda name: ".sm90." in name,
        ("--op", "combine"): lambda name: name.startswith("combine."),
    }
    for given, matches in filters.items():
        here, beneath = set(filter(matches, own)), set(filter(matches, shipped - own))
        said = told("--tree", str(tree), *given)
        assert taken[-1] == here and here and beneath
        count = f"the {names.counted(len(here), 'kernel')} of {tree}, of {len(here | beneath)} that match; --beneath"
        assert count in said and "that lie beneath" not in said
        # Whoever is about to compile what was shipped hears of it first.
        said = told("--tree", str(tree), *given, "--beneath")
        assert taken[-1] == here | beneath
        kernels = r"(\d+) kernels? \([\d,]+ variants?\)"
        counts = re.search(rf"{kernels} of {tree} and {kernels} that lie beneath", said)
        assert counts and [int(count) for count in counts.groups()] == [len(here), len(beneath)]
        assert said.index(counts[0]) < said.index("compiling")
    assert "that lie beneath" not in told() and taken[-1] == shipped
    with msa_tiles.use_tree(tree):
        assert "that lie beneath" in told() and taken[-1] == shipped | own
    for command, sentence in {
        ("--tree", str(tmp_path)): f"{tmp_path} has no kernels of its own; --beneath takes those beneath it",
        ("--tree", str(tree), "--op", "index_kl"): f"{tree} has no kernels of its own that match --op index_kl; --bene",
        ("--beneath",): "--beneath is given without --tree",
    }.items():
        for name in ("build", "verify"):
            assert cli.main([name, *command]) == 2
            assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("check", [False, True])
def test_filters_that_match_nothing_of_a_tree_are_answered_with_the_command_for_all(
    check: bool, tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "cutedsl/simt/combine.py"
    write(tmp_path / "skeletons" / name, (SKELETONS / name).read_text() + "\n\nOWN = 1\n")
    command = ["generate", *["--check"] * check, "--tree", str(tmp_path)]
    assert cli.main([*command, "--dsl", "tilelang"]) == 2
    verb = "checks" if check else "writes"
    assert f"matches --dsl tilelang; `msa-tiles {' '.join(command)}` {verb} all" in capsys.readouterr().err
    assert cli.main(command) == int(check)


def test_limits_of_every_kind_hold_for_shipped_kernels(tmp_path: Path, few: None) -> None:
    limits = {
        "shared_memory: {per_block: 4096, per_sm: 233472}": "bytes of shared memory",
        "registers: {per_thread: 255, per_sm: 8192}": "registers",
        "threads_per_block: 256": "threads",
        "tensor_memory_columns: 64": "columns of tensor memory",
    }
    for number, (text, what) in enumerate(limits.items()):
        own = tmp_path / str(number)
        write(own / "specs/targets/sm100.yaml", f"target: sm100\ninherits: sm100\n{text}\n")
        assert cli.main(["generate", "--tree", str(own)]) == 0
        with msa_tiles.use_tree(own):
            registry = default_registry()
            for cell in registry.select("sparse_attention", target="sm100"):
                facts = CallFacts(cell.op, torch.device("cuda"), "bf16", cell.ci[0])
                decision = decide(facts, target_facts(registry.targets["sm100"]), registry)
                [refusal] = (each.refusal for each in decision.candidates if each.cell is cell)
                assert re.search(rf"\d+ {what} at .* exceed the \d+ that a block can have on sm100", refusal or "")


def test_cells_that_do_not_fit_are_told(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of an MMA family make kernels for the targets that can run them, which may be none."""
    specs = copy_specs(tmp_path_factory.mktemp("few") / "specs", ["decode_score"])
    row = specs / "operators/decode_score.yaml"
    row.write_text(row.read_text().replace("tile: {stages: 4, batch: 4}", "tile: {stages: 40, batch: 4}"))
    command = ["generate", "--specs", str(specs), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    complaints = capsys.readouterr().err
    assert re.search(r"left out decode_score\.tilelang\.sm90\.q8k8: \d+ bytes of shared memory .* exceed", complaints)
    assert complaints.count("left out") == 1
    assert cli.main([*command, "--dsl", "cutedsl"]) == 0
    assert "left out" not in capsys.readouterr().err
