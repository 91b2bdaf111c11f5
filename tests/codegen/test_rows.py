"""One row of a spec, several cells: lists of targets and precisions, adjustments, algorithms, operands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from toy import Toy

from msa_tiles.codegen import Generated, KernelPlan, checked, plans
from msa_tiles.codegen.digest import recorded_digests
from msa_tiles.spec import SpecError, load

OTHER = "tiny"  # the toy target once more


@pytest.fixture
def wide(toy: Toy) -> Toy:
    """The toy's row over two targets and two precisions."""
    target = Path("specs/targets")
    text = (target / "toy.yaml").read_text()
    (target / f"{OTHER}.yaml").write_text(text.replace("target: toy", f"target: {OTHER}"))
    toy.edit(toy.operator, "targets: [toy]", f"targets: [toy, {OTHER}]")
    toy.edit(toy.operator, "precisions: [bf16]", "precisions: [bf16, q16kv8]")
    toy.edit(toy.operator, "  bf16: {out: 0.01}", "  bf16: {out: 0.01}\n  q16kv8: {out: 0.02}")
    return toy


def cells(toy: Toy) -> dict[str, KernelPlan]:
    return {plan.cell: plan for plan in plans(load(toy.specs))}


def test_a_row_is_every_pair_of_its_targets_and_precisions(wide: Toy) -> None:
    assert list(cells(wide)) == [
        f"scale.tilelang.{target}.{precision}" for target in (OTHER, "toy") for precision in ("bf16", "q16kv8")
    ]


def test_text_that_is_the_same_stands_in_one_file(wide: Toy) -> None:
    made: Generated = wide.produce()
    assert set(made.files) == {"tilelang/toy/scale_bf16.py", "tilelang/toy/scale_q16kv8.py"}
    for entry in made.index["cells"]:
        assert entry["file"] == f"tilelang/toy/scale_{entry['precision']}.py" == made.paths[entry["id"]]
        assert recorded_digests(made.files[entry["file"]])[entry["id"]] == entry["digest"]
    # The precisions store x differently, so that their contracts differ, though not their code.
    assert "#   x  [total_q, width]  int8 " in made.files["tilelang/toy/scale_q16kv8.py"]


def test_an_adjustment_holds_for_its_target_or_precision_alone(wide: Toy) -> None:
    wide.edit(
        wide.operator,
        "    tile: {rows: 8, unroll: 2}",
        "    tile: {rows: 8, unroll: 2}\n"
        f"    adjust: {{q16kv8: {{tile: {{unroll: 4}}, expect: [LDG]}}, {OTHER}: {{tile: {{rows: 16}}}}}}",
    )
    found = {cell.removeprefix("scale.tilelang."): (dict(plan.tile), plan.expected_opcodes[-1])
             for cell, plan in cells(wide).items()}  # fmt: skip
    assert found == {
        "toy.bf16": ({"rows": 8, "unroll": 2}, "MUFU"),
        "toy.q16kv8": ({"rows": 8, "unroll": 4}, "LDG"),
        f"{OTHER}.bf16": ({"rows": 16, "unroll": 2}, "MUFU"),
        f"{OTHER}.q16kv8": ({"rows": 16, "unroll": 4}, "LDG"),
    }
    assert len(wide.produce().files) == 4


def test_an_algorithm_has_a_cell_a_skeleton_and_a_file_of_its_own(toy: Toy) -> None:
    row = toy.operator.read_text().partition("kernels:\n")[2]
    toy.operator.write_text(
        toy.operator.read_text() + row.replace("    mma: simt", "    algorithm: queued\n    mma: simt")
    )
    with pytest.raises(SpecError, match=r"toy.bf16.queued: there is no skeleton at .*simt/scale_queued.py"):
        toy.produce()
    shutil.copy(toy.skeleton, toy.skeleton.with_name("scale_queues.py"))
    other = toy.skeleton.with_name("scale_down.py")  # of an operator whose name begins alike
    other.write_text(toy.skeleton.read_text().replace("def scale(", "def scale_down("))
    known = "; rows of scale for tilelang/simt have algorithm: queues or no algorithm; did you mean 'queues'?"
    with pytest.raises(SpecError, match=re.escape(known)):
        toy.produce()
    other.unlink()
    toy.skeleton.with_name("scale_queues.py").unlink()
    with pytest.raises(SpecError, match=r"; rows of scale for tilelang/simt have no algorithm$"):
        toy.produce()
    shutil.copy(toy.skeleton, toy.skeleton.with_name("scale_queued.py"))
    toy.edit(toy.skeleton.with_name("scale_queued.py"), "Every row times a number.", "The same by a queue.")
    made = toy.produce()
    assert made.paths == {
        "scale.tilelang.toy.bf16": "tilelang/toy/scale_bf16.py",
        "scale.tilelang.toy.bf16.queued": "tilelang/toy/scale_bf16_queued.py",
    }


def test_a_row_may_name_its_operands(wide: Toy) -> None:
    def named() -> dict[str, str]:
        return {plan.precision: plan.operands["key_value"] for plan in cells(wide).values()}

    assert named() == {"bf16": "plain", "q16kv8": "bytes"}, "those of the formats"
    line = wide.edit(
        wide.operator, "    mma: simt", "    adjust: {q16kv8: {operands: {key_value: e4m3_in_ring}}}\n    mma: simt"
    )
    with pytest.raises(SpecError, match=f"{wide.skeleton} imports no operand") as caught:
        wide.produce()
    assert str(caught.value).count("operands.key_value is read by nothing") == 1
    assert caught.value.where.line == line - 4, "that of the row, once for both targets"
    wide.edit(
        wide.skeleton,
        "import tilelang.language as T\n",
        "from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value\n",
    )
    assert named() == {"bf16": "plain", "q16kv8": "e4m3_in_ring"}
    assert {entry["operands"]["key_value"] for entry in wide.produce().index["cells"]} == {"plain", "e4m3_in_ring"}


def test_what_a_precision_multiplies_reaches_the_kernel(wide: Toy) -> None:
    """Through a line of the skeleton, or through an operand, which may hand out another element."""
    wide.edit(wide.operator, "    compute: float32\n", "")
    wide.edit(wide.skeleton, '# % if plan.compute == "float32":', "# % if tile.rows:")
    assert len(wide.produce().plans) == 4
    wide.edit(wide.skeleton, 'ELEMENT = "float32"  # <- precision.multiply', 'ELEMENT = "bfloat16"')
    with pytest.raises(SpecError, match=f"{wide.skeleton} does not ask how") as caught:
        wide.produce()
    assert str(caught.value).count("multiplies bfloat16 (specs/precisions.yaml:18)") == 1, "not of what is not decoded"
    wide.edit(
        wide.skeleton,
        "import tilelang.language as T\n",
        "import tilelang.language as T\n\n"
        "from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value\n",
    )
    wide.edit(wide.operator, "    mma: simt", "    adjust: {q16kv8: {operands: {key_value: e4m3}}}\n    mma: simt")
    assert len(wide.produce().plans) == 4
    for target in (OTHER, "toy"):
        wide.edit(wide.specs / f"targets/{target}.yaml", "bfloat16: []", "bfloat16: [], float8: []")
    wide.edit(wide.specs / "precisions.yaml", "bytes, multiply: bfloat16", "bytes, multiply: float8")
    with pytest.raises(SpecError, match=r"the operand e4m3 of key_value hands out bfloat16: name one that hands out"):
        wide.produce()


def test_an_operand_is_for_the_tensors_that_calls_pass(wide: Toy) -> None:
    wide.edit(
        wide.skeleton,
        "import tilelang.language as T\n",
        "from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value\n",
    )
    wide.edit(wide.specs / "precisions.yaml", "per: [token_head]}", "per: [token_head]}\n    operand: e4m3")
    wide.edit(wide.operator, "    mma: simt", "    operands: {key_value: append_plain}\n    mma: simt")
    with pytest.raises(SpecError) as caught:
        wide.produce()
    assert caught.value.sentence == (
        "scale.tilelang.tiny.q16kv8, scale.tilelang.toy.q16kv8: the operand append_plain of key_value takes values "
        "alone, and calls of q16kv8 pass values, scales (bytes): "
        "write adjust: {q16kv8: {operands: {key_value: append_e4m3}}}"
    )
    wide.edit(
        wide.operator, "    mma: simt", "    adjust: {q16kv8: {operands: {key_value: append_e4m3}}}\n    mma: simt"
    )
    assert len(wide.produce().plans) == 4


def test_a_cell_twice(wide: Toy) -> None:
    row = wide.operator.read_text().partition("kernels:\n")[2]
    wide.operator.write_text(wide.operator.read_text() + row.replace(f"[toy, {OTHER}]", f"[{OTHER}]"))
    with pytest.raises(SpecError, match=rf"the cell tilelang.{OTHER}.bf16 has a row already, on line \d+"):
        load(wide.specs)


# What else is wrong in the row or its file, and how many mistakes that is.
BESIDE = {
    "nothing": ("", "", 0),
    "a key of the file": ("summary:", "sumary: x\nsummary:", 1),
    "a target": ("targets: [toy]", "targets: [toy, roy]", 1),
    "all targets": ("targets: [toy]", "targets: [roy]", 1),
    "a precision": ("precisions: [bf16]", "precisions: [fp7]", 1),
    "the MMA": ("mma: simt", "mma: smit", 1),
    "a copy engine": ("copy: [bulk]", "copy: [balk]", 1),
    "a feature": ("features: [negative]", "features: [positive]", 1),
    "a size": ("rows: 8", "rows: 800000", 1),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_wrong_tile_size_and_operand_are_told_with_whatever_else_is_wrong(beside: str, toy: Toy) -> None:
    old, new, others = BESIDE[beside]
    toy.edit(toy.operator, "unroll: 2}", "unrol: 2}\n    operands: {key_value: nonesuch}")
    toy.edit(toy.skeleton, "range(tile.unroll)", "range(2)")
    line = "from msa_tiles.dsl.tilelang.operands import plain as {}  # <- operands.key_value\n"
    toy.edit(toy.skeleton, "import tilelang", line.format("key_value") + line.format("value") + "import tilelang")
    toy.operator.write_text(toy.operator.read_text().replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        checked([toy.specs], [toy.skeletons]) and toy.produce()
    sentences = [each.sentence for each in caught.value.mistakes]
    unread = [each for each in sentences if "tile.unrol is read by neither" in each]
    assert len(unread) == 1 and unread[0].endswith("; did you mean 'unroll'?"), caught.value
    assert len([each for each in sentences if "nonesuch, which is no module" in each]) == 1, caught.value
    missing = [each for each in sentences if "tile lacks 'unroll'" in each]
    assert len(missing) == (beside != "the MMA"), "which skeleton is meant follows from the MMA"
    assert len(sentences) == 2 + len(missing) + others, caught.value
    assert {each.where.file for each in caught.value.mistakes} == {str(toy.operator)}


@pytest.mark.parametrize(
    "tile", ["{rows: 8, unroll: three}", "{rows: 8, unroll: 3.5}", "{rows: 8, unroll: 0}", "8", ""]
)
def test_a_tile_of_mistaken_values_is_not_told_to_lack_them(tile: str, toy: Toy) -> None:
    text = toy.operator.read_text()
    toy.operator.write_text(re.sub(r" +tile: .*\n", f"    tile: {tile}\n" if tile else "", text))
    with pytest.raises(SpecError) as caught:
        checked([toy.specs], [toy.skeletons]) and toy.produce()
    sentences = [each.sentence for each in caught.value.mistakes]
    assert len([each for each in sentences if "has no value" in each or "tile lacks" in each]) == 0, caught.value
    assert any("unroll" in each or "tile" in each for each in sentences), caught.value


def test_mistakes_of_several_files_are_told_with_those_of_rendering(toy: Toy) -> None:
    other = toy.operator.with_name("select.yaml")
    text = toy.operator.read_text()
    other.write_text(text.replace("op: scale", "op: select").replace("[bulk]", "[balk]"))
    toy.edit(toy.operator, "tile: {rows: 8", "tile: {lines: 8, rows: 8")
    toy.edit(Path("specs/precisions.yaml"), "formats:", "formast: {}\nformats:")
    with pytest.raises(SpecError) as caught:
        checked([toy.specs], [toy.skeletons])
    found = [(Path(each.where.file).name, each.sentence.partition(";")[0]) for each in caught.value.mistakes]
    unread = f"tile.lines is read by neither {toy.skeleton} nor a formula of the row"
    assert found == [
        ("precisions.yaml", "unknown key 'formast' in the file"),
        ("select.yaml", "toy has no copy engine 'balk'"),
        ("scale.yaml", f"scale.tilelang.toy.bf16: {unread}"),
    ]
