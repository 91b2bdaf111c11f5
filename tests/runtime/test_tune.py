"""What `msa-tiles tune` times, without a GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msa_tiles import ops
from msa_tiles.commands import tune
from msa_tiles.paths import specs_dir
from msa_tiles.runtime import dispatch
from msa_tiles.runtime.registry import default_registry
from msa_tiles.spec import load
from msa_tiles.verify import operators
from msa_tiles.verify.cases import Case

CPU = torch.device("cpu")


class Recorder:
    """Stands for a check: notes on which DSL it ran."""

    made = 0

    def __init__(self, case: Any, source: Any, strided: bool, backend: str) -> None:
        type(self).made += 1
        self.backend = backend

    def run(self, into_buffers: bool) -> str:
        return self.backend


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setitem(operators.CHECKS, "topk_select", Recorder)
    monkeypatch.setattr(Recorder, "made", 0)
    return default_registry().select(op="topk_select", target="sm90")


def test_every_dsl_runs_on_the_same_inputs(rivals: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "measure", lambda calls, seconds: {name: calls[name][0]() for name in calls})
    figures = list(tune._figures(rivals, CPU, None, 0.1))
    assert figures and all(ran == {cell.id: cell.dsl for cell in rivals} for _, _, ran in figures)
    assert len(rivals) == 2 and Recorder.made == len(figures)


def test_what_does_not_fit_is_left_out_with_a_word(
    rivals: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = iter([torch.OutOfMemoryError("no room")])

    def measure(calls: dict[str, Any], seconds: float) -> dict[str, float]:
        for error in turns:
            raise error
        return {name: 1.0 for name in calls}

    monkeypatch.setattr(tune, "measure", measure)
    figures = list(tune._figures(rivals, CPU, None, 0.1))
    assert len(figures) == Recorder.made - 1 > 0
    assert "does not fit this GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bytes_read", "held", "sets"),
    [(30, 1, 4), (100, 1, 2), (1000, 1, 1), (0, 1, 32), (30, 0, 4), (30, 250, 2), (30, 900, 1), (30, -5, 4)],
)
def test_inputs_do_not_stay_in_the_l2_as_far_as_memory_goes(
    bytes_read: int, held: int, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - held * len(seeds), 2000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50))
    found = tune._input_sets(lambda seed: seeds.append(seed) or seed, bytes_read, torch.device("cuda"))
    assert found == seeds == list(range(sets))


def test_what_a_call_reads_is_what_its_roofline_says() -> None:
    specs = load(specs_dir())
    [cell, _] = default_registry().select(op="sparse_decode", target="sm90", precision="bf16")
    operator = specs.operators["sparse_decode"]
    [workload] = [workload for workload in operator.bench if workload.label == "decode_128k_b1"]
    case = Case(cell, operator, specs.precisions["bf16"], workload, operator.m3, 0.0)
    # Sixteen blocks of 128 keys and values for each of four KV heads, not the 128K keys that are there.
    assert 4 * 16 * 128 * 2 * 256 <= tune._bytes_read(case) < 4 * 17 * 128 * 2 * 256


@pytest.mark.parametrize("op", ["build_schedule", "split_selection"])
def test_the_operator_is_timed_without_what_its_check_makes_of_the_answer(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = object.__new__(operators.CHECKS[op])
    monkeypatch.setattr(type(check), "call", lambda self: f"{self.backend}'s answer")
    first, second = default_registry().select(op=op, target="sm90")
    assert tune._run(check, second) == "cutedsl's answer"
    assert tune._run(Recorder(None, None, False, ""), first) == "tilelang"


class Launches(TorchDispatchMode):
    """Notes what torch would launch kernels for: all that makes no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("op", "precision"),
    [(op, form) for op in ("append_kv", "norm_rope_append") for form in ("bf16", "q16kv8", "q16kv4")]
    + [("append_index", form) for form in ("bf16", "q8k8", "q16k4")],
)
def test_an_operator_that_writes_in_place_is_timed_without_copies(
    op: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(ops, op, lambda *arguments, **options: called.append(op))
    [cell, *_] = default_registry().select(op=op, dsl="cutedsl", target="sm90", precision=precision)
    specs = load(specs_dir())
    operator = specs.operators[op]
    workload = min(operator.bench, key=lambda each: sum(queries for queries, _ in each.sequences))
    case = Case(cell, operator, specs.precisions[precision], workload, operator.m3, 0.0)
    check = tune._check(case, CPU, 0)
    tune._run(check, cell)  # what is made once
    with Launches() as launches:
        tune._run(check, cell)
    assert (launches.names, called) == ([], [op, op])


def test_rivals_of_one_dsl_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is preferred while it runs, and no call is remembered from one to the next."""
    forgotten: list[str] = []
    monkeypatch.setattr("msa_tiles.verify.runner.forget_all", lambda: forgotten.append("all"))
    [cell, other] = default_registry().select(op="combine", target="sm90")
    twin = dataclasses.replace(cell, id=f"{cell.id}.again")
    assert tune._alone(cell, [cell, other]) and not tune._alone(cell, [cell, other, twin])

    class Check:
        backend = ""

        def run(self, into_buffers: bool) -> str | None:
            return dispatch._preferred.get()

    assert [tune._run(Check(), each, alone=False) for each in (cell, twin)] == [cell.id, twin.id]
    assert tune._run(Check(), cell) is None and dispatch._preferred.get() is None
    assert len(forgotten) == 4


@pytest.mark.parametrize("precision", ["q16k4", "q16k4m8"])
def test_forms_are_timed_beside_what_is_named(precision: str) -> None:
    """Calls choose between all of them: a figure of some would be taken for one of all."""
    registry = default_registry()
    named = registry.select("decode_score", target="sm90", precision=precision)
    beside = tune._forms_beside(named, (), registry)
    assert {cell.precision for cell in (*named, *beside)} == {"q16k4", "q16k4m8"}
    [rivals] = tune._rivals([*named, *beside], registry).values()
    assert {cell.id for cell in rivals} == {
        cell.id for cell in registry.of("decode_score") if registry.called(cell.precision) == "q16k4"
    }
    assert all(cell.dsl == "cutedsl" for cell in tune._forms_beside(named, ("cutedsl",), registry))
    assert tune._forms_beside(rivals, (), registry) == []
    assert tune._forms_beside(registry.select("decode_score", precision="bf16"), (), registry) == []
