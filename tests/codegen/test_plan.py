from __future__ import annotations

from dataclasses import replace

import pytest
from toy import Toy

from msa_tiles.codegen import KernelPlan, Selection, illegal, plans
from msa_tiles.spec import Expression, SpecError, Target, load


@pytest.fixture
def plan(toy: Toy) -> KernelPlan:
    (only,) = plans(load(toy.specs))
    return only


@pytest.fixture
def target(toy: Toy) -> Target:
    return load(toy.specs).targets["toy"]


def test_what_a_row_decides(plan: KernelPlan) -> None:
    assert plan.cell == "scale.tilelang.toy.bf16"
    assert plan.file == "tilelang/toy/scale_bf16.py"
    assert plan.skeleton == "tilelang/simt/scale.py"
    assert plan.threads({"width": 64}) == 32
    assert plan.shared_memory({"width": 128}) == 2048
    assert plan.registers({"width": 64}) == 3200
    assert plan.expected_opcodes == ("FFMA", "UBLKCP", "MUFU")
    assert plan.forbidden_opcodes == ("HMMA", "STL")
    assert list(plan.points()) == [{"width": 64}, {"width": 128}]


def test_dims_that_only_precisions_with_scales_have(toy: Toy) -> None:
    toy.edit(toy.operator, "  total_q: runtime", "  row_scales: [0, 1]\n  total_q: runtime")
    toy.edit(toy.operator, "exact: [width]", "exact: [width, row_scales]\n  scaled: [row_scales]")
    toy.edit(
        toy.operator,
        "ci: [{width: 64}, {width: 128}]",
        "ci: [{width: 64, row_scales: 0}, {width: 128, row_scales: 1}, {width: 64, row_scales: 1}, "
        "{width: 128, row_scales: 0}]",
    )
    specs = load(toy.specs)
    (only,) = plans(specs)
    assert list(only.ci) == list(only.points()) == [{"width": 64}, {"width": 128}]
    assert "row_scales" not in toy.text()
    variants = specs.operators["scale"].variants
    assert variants.of(specs.precisions["q16kv8"]) is variants


def test_a_legal_variant(plan: KernelPlan, target: Target) -> None:
    assert illegal(plan, target, {"width": 64}) is None


@pytest.mark.parametrize(
    ("changes", "variant", "sentence"),
    [
        ({}, {"height": 64}, "a variant of scale.tilelang.toy.bf16 has the dims width, not height"),
        ({}, {"width": 96}, "width 96 is none of 64, 128"),
        ({"threads_formula": Expression("width - 24")}, {"width": 64}, "40 threads at width=64 are no multiple of 32"),
        ({"threads_formula": Expression("0")}, {"width": 64}, "0 threads at width=64 are no multiple of 32"),
        ({"threads_formula": Expression("32 * width")}, {"width": 64}, "2048 threads at width=64 exceed the 1024"),
        (
            {"shared_memory_formula": Expression("4097")},
            {"width": 64},
            "4097 bytes of shared memory .* exceed the 4096",
        ),
        ({"registers_formula": Expression("65537")}, {"width": 64}, "65537 registers .* exceed the 65536"),
        ({"tensor_memory_formula": Expression("width")}, {"width": 64}, "64 columns of tensor memory .* exceed the 0"),
    ],
)
def test_an_illegal_variant(
    changes: dict, variant: dict[str, int], sentence: str, plan: KernelPlan, target: Target
) -> None:
    refusal = illegal(replace(plan, **changes), target, variant)
    assert refusal is not None
    with pytest.raises(ValueError, match=sentence):
        raise ValueError(refusal)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("width * 8", None),
        ("3 * width", None),
        ("16", "16 columns of tensor memory at width=64 are no multiple of 32, as it is handed out"),
        ("width + 16", "80 columns of tensor memory at width=64 are no multiple of 32, as it is handed out"),
        ("width * 16", "1024 columns of tensor memory at width=64 exceed the 512 that a block can have on toy"),
    ],
)
def test_tensor_memory(columns: str, sentence: str | None, plan: KernelPlan, target: Target) -> None:
    taking = replace(plan, tensor_memory_formula=Expression(columns))
    assert illegal(taking, replace(target, tensor_memory_columns=512), {"width": 64}) == sentence


def test_a_row_with_one_illegal_variant_is_refused_at_its_line(toy: Toy) -> None:
    toy.edit(toy.operator, "shared_memory: 2 * rows", "shared_memory: 5 * rows")
    line = toy.operator.read_text().splitlines().index("  - dsl: tilelang") + 1
    with pytest.raises(SpecError, match="5120 bytes of shared memory at width=128 exceed the 4096") as caught:
        toy.produce()
    assert (caught.value.where.file, caught.value.where.line) == (str(toy.operator), line)


def test_a_formula_that_divides_by_zero(toy: Toy) -> None:
    toy.edit(toy.operator, "shared_memory: 2 * rows", "shared_memory: 2 / (rows - 8)")
    with pytest.raises(SpecError, match="divides by zero"):
        toy.produce()


@pytest.mark.parametrize(
    ("selection", "held"),
    [
        (Selection(), True),
        (Selection(ops=["scale"], precisions=["bf16", "q16kv8"]), True),
        (Selection(targets=["sm90"]), False),
        (Selection(ops=["combine"]), False),
        (Selection(dsls=["cutedsl"]), False),
    ],
)
def test_selection(selection: Selection, held: bool) -> None:
    assert selection.holds("scale.tilelang.toy.bf16") is held
