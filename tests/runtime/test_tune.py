"""What `msa-tiles tune` times, without a GPU."""

from __future__ import annotations

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
    monkeypatch.setattr(tune, "measure", lambda calls, seconds: {name: call() for name, call in calls.items()})
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
