"""Which kernel is chosen, and what is said when none is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles.runtime import dispatch, tuned
from msa_tiles.runtime.dispatch import NoKernelError, decide, find_kernel, fit_variant, serves
from msa_tiles.runtime.facts import CallFacts, DeviceFacts, device_facts, target_facts
from msa_tiles.runtime.registry import Cell, Registry, Target

H100 = DeviceFacts("NVIDIA H100 80GB HBM3", "sm90", 132, (9, 0))
GPU = torch.device("cuda", 0)


def call(**changes) -> CallFacts:  # type: ignore[no-untyped-def]
    usual = CallFacts("scale_rows", GPU, "bf16", {"width": 64, "capacity": 4})
    return dataclasses.replace(usual, **changes)


def test_a_call_that_fits_is_served(registry: Registry) -> None:
    decision = decide(call(), H100, registry)
    assert decision.chosen is not None
    assert decision.chosen.cell.id == "scale_rows.tilelang.sm90.bf16"
    assert decision.chosen.variant == {"width": 64, "capacity": 4}


@pytest.mark.parametrize(("asked", "given"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_a_capacity_is_rounded_up(cell: Cell, asked: int, given: int) -> None:
    assert fit_variant(cell, {"width": 128, "capacity": asked}) == ({"width": 128, "capacity": given}, None)


def test_dims_that_are_no_variant_of_a_cell_do_not_matter(cell: Cell) -> None:
    assert fit_variant(cell, {"width": 64, "capacity": 4, "rows": 3}) == ({"width": 64, "capacity": 4}, None)


@pytest.mark.parametrize(
    ("changes", "device", "backend", "refusal"),
    [
        ({"variant": {"width": 96, "capacity": 4}}, H100, "auto", "width is 96, wanted one of 64, 128"),
        ({"variant": {"width": 64, "capacity": 9}}, H100, "auto", "capacity is 9, wanted at most 8"),
        ({"variant": {"width": 64}}, H100, "auto", "the call does not say capacity"),
        ({"precision": "q8k8"}, H100, "auto", "it takes bf16, the call is q8k8"),
        ({"features": frozenset({"paged"})}, H100, "auto", "it does not serve paged (rows in pages of a pool)"),
        ({"features": frozenset({"odd"})}, H100, "auto", "it does not serve odd"),
        ({"refusals": ("x has 2^31 rows",)}, H100, "auto", "x has 2^31 rows"),
        ({}, H100, "cutedsl", "it is a tilelang kernel, backend='cutedsl' was asked for"),
        (
            {},
            DeviceFacts("NVIDIA A100", None, 108, (8, 0)),
            "auto",
            "it is for sm90, the call is on NVIDIA A100 (sm80)",
        ),
        ({}, DeviceFacts("cpu", None, 0, None), "auto", "it is for sm90, the call is on cpu (no GPU)"),
    ],
)
def test_a_refusal_says_why(  # type: ignore[no-untyped-def]
    registry: Registry, changes, device: DeviceFacts, backend: str, refusal: str
) -> None:
    decision = decide(call(**changes), device, registry, backend)
    assert decision.chosen is None
    assert [candidate.refusal for candidate in decision.candidates] == [refusal]
    assert f"\n  scale_rows.tilelang.sm90.bf16: {refusal}" in decision.complaint()


@pytest.fixture
def cutedsl(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The same kernel in the other DSL, which counts as installed."""
    monkeypatch.setattr(dispatch.toolchain, "missing", lambda _dsl: None)
    return dataclasses.replace(cell, id="scale_rows.cutedsl.sm90.bf16", dsl="cutedsl")


@pytest.mark.parametrize("order", [1, -1])
def test_tilelang_runs_unless_a_backend_is_named(registry: Registry, cell: Cell, cutedsl: Cell, order: int) -> None:
    both = dataclasses.replace(registry, cells=(cell, cutedsl)[::order])
    assert decide(call(), H100, both).chosen.cell is cell  # type: ignore[union-attr]
    assert decide(call(), H100, both, "tilelang").chosen.cell is cell  # type: ignore[union-attr]
    assert decide(call(), H100, both, "cutedsl").chosen.cell is cutedsl  # type: ignore[union-attr]


@pytest.mark.parametrize("verified", ["tilelang", "cutedsl"])
def test_a_verified_kernel_goes_before_a_faster_one_that_is_not(
    registry: Registry, cell: Cell, cutedsl: Cell, verified: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = dataclasses.replace(registry, cells=(cell, cutedsl))
    (sound,) = (each for each in both.cells if each.dsl == verified)
    figure = tuned.Figure(
        "scale_rows", "sm90", "bf16", "w", 1, "a card", "2026-01-01",
        {each.id: 2.0 if each is sound else 1.0 for each in both.cells}, {},
    )  # fmt: skip
    monkeypatch.setattr("msa_tiles.runtime.tuned.figures_of", lambda *directories: (figure,))
    assert decide(call(), H100, both).chosen.cell is not sound  # type: ignore[union-attr]
    record = {each.id: {"digest": each.digest if each is sound else "of an earlier one"} for each in both.cells}
    monkeypatch.setattr(dispatch.evidence, "_verified_layers", lambda *directories: ((registry.directory, record),))
    assert decide(call(), H100, both).chosen.cell is sound  # type: ignore[union-attr]
    with dispatch.preferring(cutedsl):
        assert decide(call(), H100, both).chosen.cell is cutedsl  # type: ignore[union-attr]


def test_why_a_kernel_that_serves_a_call_does_not_run(
    registry: Registry, cell: Cell, cutedsl: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = dataclasses.replace(cutedsl, id=f"{cutedsl.id}.again")
    several = dataclasses.replace(registry, cells=(cell, cutedsl, twin))
    ran = {each.id: {"digest": each.digest} for each in several.cells}
    monkeypatch.setattr(dispatch.evidence, "_verified_layers", lambda *directories: ((registry.directory, ran),))
    figures: list[tuned.Figure] = []
    monkeypatch.setattr("msa_tiles.runtime.tuned.figures_of", lambda *directories: tuple(figures))

    def reasons(backend: str = "auto", **ms: float) -> list[str | None]:
        names = {"tilelang": cell.id, "cutedsl": cutedsl.id, "twin": twin.id, "other": "scale_rows.cutedsl.sm90.fp8"}
        names["another"] = "scale_rows.tilelang.sm90.fp8"
        times = {names[name]: value for name, value in ms.items()}
        figures[:] = [tuned.Figure("scale_rows", "sm90", "p", "w", 1, "a card", "2026-01-01", times, {})] * bool(ms)
        decision = decide(call(), H100, several, backend)
        assert decision.chosen is not None and decision.why_not(decision.chosen) is None
        return [decision.why_not(each) for each in decision.candidates]

    first = "no figures tell them apart, and kernels of tilelang go first"
    assert reasons() == [None, first, first]
    assert reasons("cutedsl") == [None, None, f"no figures tell them apart, and {cutedsl.id} comes first"]
    assert reasons(tilelang=2.0, twin=1.0) == [
        f"{twin.id} is faster on record (1 ms against 2 ms, w on a card)",
        f"it has no figure, and {twin.id} has one",
        None,
    ]
    assert reasons(other=1.0, another=2.0) == [
        "cutedsl is faster on record in p (1 ms against 2 ms, w on a card)",
        None,
        f"no figures tell them apart, and {cutedsl.id} comes first",
    ]
    del ran[cell.id]
    assert reasons(tilelang=1.0, twin=2.0)[0] == f"{twin.id} is verified, and this one is not"
    with dispatch.preferring(cell):
        assert reasons()[1:] == [f"{cell.id} is asked for"] * 2
    assert decide(call(variant={"width": 96, "capacity": 4}), H100, several).ranks == {}


def test_another_dsl_runs_where_tilelang_refuses(registry: Registry, cell: Cell, cutedsl: Cell) -> None:
    paged = dataclasses.replace(cutedsl, features=frozenset({"paged"}))
    both = dataclasses.replace(registry, cells=(cell, paged))
    assert decide(call(features=frozenset({"paged"})), H100, both).chosen.cell is paged  # type: ignore[union-attr]


@pytest.mark.parametrize("has_both", [True, False])
def test_a_helper_is_of_another_dsl_where_the_one_named_has_none(
    registry: Registry, cell: Cell, cutedsl: Cell, has_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = (cell, cutedsl) if has_both else (cell,)
    monkeypatch.setattr(dispatch, "default_registry", lambda: dataclasses.replace(registry, cells=cells))
    monkeypatch.setattr(dispatch, "device_facts", lambda *_: H100)
    monkeypatch.setattr(dispatch, "obtain", lambda *_: None)
    monkeypatch.setattr(dispatch, "Kernel", lambda chosen, *_: chosen)
    monkeypatch.setattr(dispatch, "_kernels", {})
    assert find_kernel("scale_rows", call(), "cutedsl", helper=True) is cells[-1]
    if has_both:
        assert find_kernel("scale_rows", call(), "cutedsl") is cutedsl
    else:
        with pytest.raises(NoKernelError, match="it is a tilelang kernel, backend='cutedsl' was asked for"):
            find_kernel("scale_rows", call(), "cutedsl")
    with pytest.raises(NoKernelError, match="width is 96"):
        find_kernel("scale_rows", call(variant={"width": 96, "capacity": 4}), "cutedsl", helper=True)


def test_whether_a_call_is_served_is_known_without_compiling(
    registry: Registry, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "default_registry", lambda: asked.append("") or registry)
    monkeypatch.setattr(dispatch, "device_facts", lambda *_: H100)
    monkeypatch.setattr(dispatch, "obtain", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(dispatch, "_served", {})
    assert serves("scale_rows", call())
    assert serves("scale_rows", call())
    assert len(asked) == 1
    assert not serves("scale_rows", call(), "cutedsl")
    assert serves("scale_rows", call(), "cutedsl", helper=True)
    assert not serves("scale_rows", call(precision="q8k8"))


def test_no_kernel_error_lists_every_candidate(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "default_registry", lambda: registry)
    facts = call(device=torch.device("cpu"))
    with pytest.raises(NoKernelError, match=r"scale_rows\.tilelang\.sm90\.bf16: it is for sm90, the call is on cpu"):
        find_kernel("scale_rows", facts)
    with pytest.raises(NoKernelError, match="none is generated for this operator"):
        find_kernel("nothing", call(op="nothing", device=torch.device("cpu")))


def test_find_kernel_refuses_what_is_no_kernel_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'triton', wanted one of 'auto', 'tilelang', 'cutedsl'"):
        find_kernel("scale_rows", call(), backend="triton")
    with pytest.raises(ValueError, match="facts are of 'scale_rows', wanted 'combine'"):
        find_kernel("combine", call())


def test_facts_of_devices(target: Target) -> None:
    assert device_facts(torch.device("cpu"), [target]) == DeviceFacts("cpu", None, 0, None)
    assert target_facts(target) == H100
