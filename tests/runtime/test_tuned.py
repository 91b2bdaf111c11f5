"""The table of measurements, and the kernels that dispatch takes by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from msa_tiles.commands import tune
from msa_tiles.runtime import tuned
from msa_tiles.runtime.registry import default_registry
from msa_tiles.runtime.tuned import Figure
from msa_tiles.spec.model import DSLS

CELL = default_registry().of("select_blocks")[0]
OTHER = dataclasses.replace(CELL, id=CELL.id.replace("tilelang", "cutedsl"), dsl="cutedsl", digest="b" * 16)


def figure(queries: int, mine: float, other: float, **changes: object) -> Figure:
    made = Figure(
        CELL.op, CELL.target, CELL.precision, f"w{queries}", queries, "a card", "2026-01-01",
        {CELL.id: mine, OTHER.id: other}, {CELL.id: CELL.digest, OTHER.id: OTHER.digest},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def order(found: Figure | None) -> list[str]:
    ms = tuned.times(found, (CELL, OTHER)) if found else {}
    return [cell.dsl for cell in sorted((CELL, OTHER), key=lambda cell: tuned.preference(cell, ms))]


def test_the_fastest_measured_kernel_comes_first() -> None:
    assert order(figure(1, 2.0, 1.0)) == ["cutedsl", "tilelang"]
    assert order(figure(1, 1.0, 2.0)) == ["tilelang", "cutedsl"]


def test_without_figures_the_order_is_the_documented_one() -> None:
    assert order(None) == list(DSLS)


def test_figures_of_an_earlier_digest_count_until_there_are_new_ones() -> None:
    stale = figure(1, 2.0, 1.0, digests={CELL.id: CELL.digest, OTHER.id: "c" * 16})
    assert order(stale) == ["cutedsl", "tilelang"]


def test_a_kernel_that_was_never_timed_comes_last() -> None:
    alone = figure(1, 2.0, 1.0, ms={OTHER.id: 5.0}, digests={OTHER.id: OTHER.digest})
    assert order(alone) == ["cutedsl", "tilelang"]


def test_a_precision_without_figures_goes_by_the_dsl_that_is_faster_in_another() -> None:
    quantised = [dataclasses.replace(cell, id=f"{cell.id}m8", digest="c" * 16) for cell in (CELL, OTHER)]
    figures = [figure(1, 1.0, 2.0), figure(32768, 3.0, 2.0), figure(1, 1.0, 5.0, op="another")]
    for queries, first in ((1, "tilelang"), (32768, "cutedsl")):
        found = tuned.nearest(tuned.counting(figures, quantised), tuned.bucket(queries))
        assert found is not None and found.queries == queries
        ms = tuned.times(found, quantised)
        assert min(quantised, key=lambda cell: tuned.preference(cell, ms)).dsl == first
    # Figures of its own go before, though only one of its kernels was timed.
    own = figure(1, 0.0, 0.0, precision="q8k8", ms={quantised[0].id: 9.0}, digests={})
    assert tuned.counting([*figures, own], quantised) == [own]
    assert tuned.times(own, quantised) == {quantised[0].id: 9.0}


def test_the_nearest_size_decides() -> None:
    figures = [figure(8, 1.0, 2.0), figure(32768, 2.0, 1.0), figure(1 << 20, 1.0, 2.0, ms={"another": 1.0})]
    counting = tuned.counting(figures, [CELL])
    asked = {queries: tuned.nearest(counting, tuned.bucket(queries)) for queries in (1, 100, 5000, 1 << 20)}
    assert {queries: found.queries for queries, found in asked.items() if found} == {
        1: 8, 100: 8, 5000: 32768, 1 << 20: 32768,
    }  # fmt: skip
    never = dataclasses.replace(CELL, id="another.tilelang.sm90.bf16", op="never timed")
    assert tuned.nearest(tuned.counting(figures, [never]), 1) is None


def test_a_new_measurement_replaces_the_old_one(tmp_path: Path) -> None:
    assert tuned.read(tmp_path) == ()
    tuned.write(tmp_path, [figure(8, 1.0, 2.0), figure(16, 1.0, 2.0)])
    tuned.write(tmp_path, [figure(8, 3.0, 2.0)])
    assert {found.queries: found.ms[CELL.id] for found in tuned.read(tmp_path)} == {8: 3.0, 16: 1.0}


@pytest.mark.parametrize("text", ["{", json.dumps({"figures": [{"op": "x"}]}), json.dumps({})])
def test_a_malformed_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / tuned.TUNED).write_text(text)
    with pytest.raises(ValueError, match=r"tuned\.json is not what `msa-tiles tune` writes"):
        tuned.read(tmp_path)


class FakeClock:
    """`a` takes 2 ms and every fourth time 50, two calls of `b` take 4; nothing is slept."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def load(self, calls):
        def play():
            [result] = {call() for call in calls}
            return result

        return play, "graph"

    def run(self, play, times):
        if times > 2:
            self.order.append(play())
        slow = self.order.count("a") == 2 and play() == "a"
        each = [50.0 if slow else {"a": 2.0, "b": 4.0}[play()]] * times
        return each, sum(each)


def test_rivals_are_timed_in_turns_and_an_outlier_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("msa_tiles.bench.timing.CudaClock", lambda: clock)
    assert tune.measure({"a": [lambda: "a"], "b": [lambda: "b"] * 2}, seconds=0.1) == {"a": 2.0, "b": 2.0}
    assert clock.order == ["a", "b", "b", "a", "a", "b"]
