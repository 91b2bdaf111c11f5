"""What `msa-tiles tune` times, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msa_tiles.commands import tune
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify import operators

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


@pytest.mark.parametrize(("bytes_each", "sets"), [(30, 4), (100, 2), (1000, 1)])
def test_inputs_do_not_stay_in_the_l2(bytes_each: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 + bytes_each * len(seeds))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50))
    assert tune._input_sets(lambda seed: seeds.append(seed) or seed, torch.device("cuda")) == list(range(sets))
    assert seeds == list(range(sets))
