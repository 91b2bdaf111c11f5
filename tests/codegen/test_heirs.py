"""Targets and operators that inherit, rows of every target that can run them, specs of several directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toy import Toy

from msa_tiles.codegen import plans, produce
from msa_tiles.codegen.plan import CellMistakes
from msa_tiles.spec import SpecError, load

HEIR = "target: heir\ninherits: toy\nsummary: as the toy\n"
ABOVE = Path("above")


def write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def cells(*directories: Path, requested: tuple[str, ...] = ()) -> list[str]:
    return [plan.cell.removeprefix("scale.tilelang.") for plan in plans(load(*directories), requested, {})]


def test_an_heir_has_what_it_does_not_say_itself_and_its_parent_s_rows(toy: Toy) -> None:
    write("specs/targets/heir.yaml", HEIR + "threads_per_block: 512\n")
    specs = load(toy.specs)
    heir, parent = specs.targets["heir"], specs.targets["toy"]
    assert (heir.name, heir.inherits, heir.threads_per_block) == ("heir", "toy", 512)
    assert (heir.arch, dict(heir.devices), dict(heir.mma)) == (parent.arch, dict(parent.devices), dict(parent.mma))
    assert heir.shared_memory_per_block == parent.shared_memory_per_block
    assert cells(toy.specs) == ["heir.bf16", "toy.bf16"]
    made = toy.produce()
    assert (
        made.paths["scale.tilelang.heir.bf16"] == made.paths["scale.tilelang.toy.bf16"] == "tilelang/toy/scale_bf16.py"
    )


def test_an_heir_of_an_heir(toy: Toy) -> None:
    write("specs/targets/heir.yaml", HEIR)
    write("specs/targets/third.yaml", "target: third\ninherits: heir\nsummary: x\n")
    assert cells(toy.specs) == ["heir.bf16", "third.bf16", "toy.bf16"]


def test_a_row_of_its_own_goes_before_its_parent_s(toy: Toy) -> None:
    write("specs/targets/heir.yaml", HEIR)
    row = toy.operator.read_text().partition("kernels:\n")[2]
    toy.operator.write_text(toy.operator.read_text() + row.replace("[toy]", "[heir]").replace("rows: 8", "rows: 16"))
    found = {plan.target: plan.tile["rows"] for plan in plans(load(toy.specs))}
    assert found == {"heir": 16, "toy": 8}


def test_a_row_without_targets_is_of_all_that_can_run_it(toy: Toy) -> None:
    toy.edit(toy.operator, "    targets: [toy]\n", "")
    assert cells(toy.specs) == ["toy.bf16"]
    text = Path("specs/targets/toy.yaml").read_text()
    write("specs/targets/other.yaml", text.replace("target: toy", "target: other"))
    assert cells(toy.specs) == ["other.bf16", "toy.bf16"]
    write("specs/targets/other.yaml", text.replace("target: toy", "target: other").replace("  simt:", "  tmma:"))
    assert cells(toy.specs) == ["toy.bf16"]
    toy.edit(toy.operator, "mma: simt", "mma: simd")
    with pytest.raises(SpecError, match=r"scale\.yaml:\d+: unknown mma 'simd'; other has tmma; toy has simt"):
        load(toy.specs)


def test_what_an_heir_cannot_run_is_left_out_and_what_a_row_names_is_an_error(toy: Toy) -> None:
    write(
        "specs/targets/heir.yaml",
        HEIR + "shared_memory: {per_block: 16, per_sm: 1024}\nregisters: {per_thread: 255, per_sm: 1}\n",
    )
    made = toy.produce()
    assert [plan.cell for plan in made.plans] == ["scale.tilelang.toy.bf16"]
    [(cell, why)] = made.unfit.items()
    assert cell == "scale.tilelang.heir.bf16" and "exceed" in why
    toy.edit(toy.operator, "targets: [toy]", "targets: [toy, heir]")
    with pytest.raises(SpecError, match="exceed"):
        toy.produce()


def test_kernels_on_request(toy: Toy) -> None:
    write("specs/targets/heir.yaml", HEIR + "on_request: true\n")
    assert cells(toy.specs) == ["toy.bf16"]
    assert cells(toy.specs, requested=("heir",)) == ["heir.bf16", "toy.bf16"]


MISTAKES = {
    "specs/targets/heir.yaml": [
        ("target: heir\ninherits: roy\n", 2, "there is no 'roy' to inherit from; there is toy"),
        ("target: heir\ninherits: heir\n", 2, "'heir' inherits from itself; there is toy"),
        (HEIR + "colour: red\n", 4, "unknown key 'colour'"),
        (HEIR + "threads_per_block: 31\n", 4, "threads_per_block is 31; it must be at least 32"),
    ],
    "above/targets/heir.yaml": [("target: heir\ninherits: roy\n", 2, "there is no 'roy' to inherit from")],
    "above/operators/scale.yaml": [
        ("op: scale\ninherits: other\n", 2, "there is no 'other' to inherit from"),
        ("op: scale\n", 1, "the file lacks the keys 'summary', .*; with `inherits: scale` it has from there"),
    ],
    "above/heir.yaml": [
        (HEIR, 1, r"no specs are read from here, but from targets/\*\.yaml, operators/\*\.yaml and pre")
    ],
    "above/target/heir.yaml": [(HEIR, 1, "no specs are read from here")],
    "above/scale.py": [("", 1, "no specs are read from here")],
    "above/operators/scale.py": [("", 1, "no specs are read from here")],
    "above/targets/heir.YAML": [(HEIR, 1, r"specs end in \.yaml: rename it to heir\.yaml")],
    "above/operators/old/scale.yaml": [("", 1, "no specs are read from here")],
}


@pytest.mark.parametrize(
    ("file", "text", "line", "sentence"), [(f, *m) for f, several in MISTAKES.items() for m in several]
)
def test_mistakes_are_reported_where_they_stand(file: str, text: str, line: int, sentence: str, toy: Toy) -> None:
    write(file, text)
    # A directory has no lines.
    where = next(
        (folder for folder in ("above/target", "above/operators/old") if f"{folder}/" in file), f"{file}:{line}"
    )
    with pytest.raises(SpecError, match=rf"{where}: .*{sentence}"):
        load(toy.specs, *[ABOVE] * file.startswith("above"))


def test_all_that_nothing_reads_is_told_at_once(toy: Toy) -> None:
    for file in (
        "operators/a.py",
        "targets/b.yml",
        "c.yaml",
        "operators/old/d.yaml",
        "README.md",
        ".e.py",
        "__f__/g.py",
    ):
        write(ABOVE / file, "")
    with pytest.raises(SpecError) as caught:
        load(toy.specs, ABOVE)
    assert [line.split(":")[0].partition("above/")[2] for line in str(caught.value).splitlines()] == [
        "c.yaml", "operators/a.py", "operators/old", "targets/b.yml",
    ]  # fmt: skip


def test_a_value_that_does_not_go_with_what_is_inherited_is_the_heirs_mistake(toy: Toy) -> None:
    write("specs/targets/heir.yaml", HEIR + "capability: [7, 5]\n")
    told = r"targets/heir\.yaml:1, with what it inherits from \S*targets/toy\.yaml:\d+: arch must be sm_75"
    with pytest.raises(SpecError, match=told):
        load(toy.specs)


def test_a_mistake_beneath_is_told_once_where_it_stands(toy: Toy) -> None:
    text = (toy.specs / "targets/toy.yaml").read_text()
    (toy.specs / "targets/toy.yaml").write_text(text.replace("threads_per_block:", "threads_per_blocks:"))
    write("specs/targets/heir.yaml", HEIR)
    with pytest.raises(SpecError) as caught:
        load(toy.specs)
    assert "heir.yaml" not in str(caught.value) and str(caught.value).count("threads_per_blocks") == 1


def test_a_workload_or_a_row_that_an_heir_makes_wrong_is_told_of_the_heir(toy: Toy) -> None:
    operator = "op: scale\ninherits: scale\n"
    write(ABOVE / "operators/scale.yaml", operator + "rules: [total_q > 100000]\n")
    told = r"above/operators/scale\.yaml:1, with what it inherits from \S*specs/operators/scale\.yaml:\d+: workload"
    with pytest.raises(SpecError, match=told):
        load(toy.specs, ABOVE)


def test_of_an_operator_that_inherits_from_another_no_row_of_that_one_is_told(toy: Toy) -> None:
    text = toy.operator.read_text()
    (toy.specs / "operators/other.yaml").write_text(text.replace("op: scale", "op: other"))
    shutil.copy(toy.skeletons / "tilelang/simt/scale.py", toy.skeletons / "tilelang/simt/other.py")
    toy.edit(toy.skeletons / "tilelang/simt/other.py", "<- tile.unroll", "<- tile.rows")
    toy.edit(toy.skeletons / "tilelang/simt/other.py", "range(tile.unroll)", "range(2)")
    own = "kernels:\n  - {dsl: tilelang, targets: [tox], precisions: [bf16], mma: simt, tile: {rows: 8}}\n"
    file = write(ABOVE / "operators/other.yaml", "op: other\ninherits: scale\n" + own)
    with CellMistakes() as mistakes:
        specs = load(toy.specs, ABOVE, mistakes=mistakes)
        mistakes.read(produce, specs, [toy.skeletons])
        found, mistakes.found = mistakes.found, []
    assert [each.where.file for each in found] == [str(file)] * 2, found
    assert "an operator inherits from the one of its own name beneath, here 'other'" in found[0].sentence
    assert "unknown target 'tox'" in found[1].sentence


def test_files_that_inherit_from_each_other(toy: Toy) -> None:
    write("specs/targets/heir.yaml", HEIR.replace("toy", "third"))
    write("specs/targets/third.yaml", "target: third\ninherits: heir\n")
    with pytest.raises(SpecError, match=r"heir, third inherit from each other|third, heir inherit from each other"):
        load(toy.specs)


def test_directories_above_extend_and_replace(toy: Toy) -> None:
    write(ABOVE / "targets/heir.yaml", HEIR)
    write(ABOVE / "targets/toy.yaml", "target: toy\ninherits: toy\nsummary: another toy\n")
    write(
        ABOVE / "operators/scale.yaml",
        "op: scale\ninherits: scale\nsummary: another scale\nkernels:\n  - dsl: tilelang\n    targets: [heir]\n"
        "    precisions: [bf16]\n    mma: simt\n    tile: {rows: 2, unroll: 1}\n    threads: 32\n"
        "    shared_memory: 4096\n",
    )
    specs = load(toy.specs, ABOVE)
    assert (specs.targets["toy"].summary, specs.operators["scale"].summary) == ("another toy", "another scale")
    assert {plan.target: plan.tile["rows"] for plan in plans(specs)} == {"heir": 2, "toy": 8}
    assert cells(toy.specs) == ["toy.bf16"]


def test_formats_and_precisions_above_go_before_those_beneath(toy: Toy) -> None:
    beneath = load(toy.specs)
    write(
        ABOVE / "precisions.yaml",
        "precisions:\n  q16kv8: {query: bf16, key_value: bf16, multiply: float32, output: bfloat16}\n",
    )
    above = load(toy.specs, ABOVE)
    assert list(above.precisions) == list(beneath.precisions) and dict(above.formats) == dict(beneath.formats)
    assert above.precisions["q16kv8"].multiply == "float32" != beneath.precisions["q16kv8"].multiply
