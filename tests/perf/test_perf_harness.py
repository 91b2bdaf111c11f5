"""Checking, timing in both orders, skipping with a reason, and the row that comes of it."""

from __future__ import annotations

import json

import pytest

from perf import harness, rows
from perf.cases import Case
from perf.harness import OURS, Bench, Contender, Skipped, WrongResult

CASE = Case("prefill_32k_u", "select_blocks", 8, 8, None, {})


class FakeClock:
    """Takes the milliseconds from the calls themselves and remembers who was timed when."""

    def __init__(self, speed_up: float = 1.0) -> None:
        self.order: list[str] = []
        self.speed_up = speed_up

    def load(self, calls):
        names = {call.name for call in calls}
        assert len(names) == 1
        self.order.append(names.pop())
        return lambda: sum(call() for call in calls), "graph"

    def run(self, play, times):
        each = [play() / self.speed_up for _ in range(times)]
        return each, sum(each)


def contender(name: str, ms: float, wrong: str | None = None, raises: bool = False) -> Contender:
    def bind(inputs):
        def call():
            if raises:
                raise RuntimeError("no such kernel\nand more lines")
            return ms

        call.name = name
        return call

    return Contender(name, bind, lambda inputs, result: wrong)


def bench(*peers, ours=None, size: int = 40) -> Bench:
    cell = "select_blocks.tilelang.sm90.bf16"
    return Bench(CASE, lambda seed: seed, size, ours or contender(OURS, 2.0), peers, [cell])


def run(made: Bench, clock=None):
    said: list[str] = []
    return harness.run(made, clock or FakeClock(), l2_bytes=50, seconds=0.01, say=said.append), said


def test_ours_is_timed_first_and_then_last():
    clock = FakeClock()
    result, _ = run(bench(contender("a", 3.0), contender("b", 5.0)), clock)
    assert clock.order == [OURS, "a", "b", "b", "a", OURS]
    assert [len(timings) for timings in result.timings.values()] == [2, 2, 2]
    assert (result.sustained(OURS), result.sustained("a"), result.median("b")) == (2.0, 3.0, 5.0)


def test_inputs_rotate_and_checks_see_the_first_set():
    seen = []
    checked = Contender(OURS, contender(OURS, 2.0).bind, lambda inputs, result: seen.append((inputs, result)))
    result, _ = run(bench(ours=checked, size=40))
    assert result.num_sets == 3
    assert seen == [(0, 2.0)]


def test_a_wrong_baseline_is_not_timed_and_says_why():
    clock = FakeClock()
    result, said = run(bench(contender("a", 3.0, wrong="scores are off"), contender("b", 5.0)), clock)
    assert "a" not in clock.order and "a" not in result.timings
    assert result.skipped == {"a": "scores are off"}
    assert any("a" in line and "scores are off" in line for line in said)


def test_an_absent_or_failing_baseline_is_skipped_with_the_reason():
    result, _ = run(bench(Skipped("vllm", "not installed"), contender("a", 1.0, raises=True), contender("b", 5.0)))
    assert result.skipped == {"vllm": "not installed", "a": "failed: RuntimeError: no such kernel"}
    assert set(result.timings) == {OURS, "b"}


def test_baselines_left_out_are_on_record():
    made = harness.only_peers(bench(contender("a", 3.0), contender("b", 5.0), Skipped("c", "not installed")), ["a"])
    result, _ = run(made)
    assert set(result.timings) == {OURS, "a"}
    assert result.skipped == {"b": "left out by --peers", "c": "left out by --peers"}


def test_a_baseline_that_fails_while_timed_loses_its_figures():
    class Failing(FakeClock):
        def load(self, calls):
            loaded = super().load(calls)
            if self.order[-2:] == ["a", "a"]:
                raise RuntimeError("out of memory")
            return loaded

    result, _ = run(bench(contender("a", 3.0)), Failing())
    assert set(result.timings) == {OURS}
    assert result.skipped == {"a": "failed while timed: RuntimeError: out of memory"}


def test_wrong_results_of_ours_are_never_timed():
    clock = FakeClock()
    with pytest.raises(WrongResult, match="select_blocks prefill_32k_u: some rows lack their own block"):
        run(bench(ours=contender(OURS, 2.0, wrong="some rows lack their own block")), clock)
    assert clock.order == []


@pytest.fixture
def generated(tmp_path, monkeypatch):
    digests = {"select_blocks": "a1", "x": "b2"}
    cells = [{"id": f"{op}.tilelang.sm90.bf16", "digest": digest} for op, digest in digests.items()]
    (tmp_path / "index.json").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(rows.paths, "generated_dir", lambda: tmp_path)


def test_the_row_has_the_fields_of_the_results(generated, tmp_path):
    made = bench(contender("vllm", 3.0), Skipped("fa4", "not installed"))
    result, _ = run(made)
    row = harness.row_of(made, result, "NVIDIA H100 80GB HBM3", "bf16", "tilelang", 0.5)
    assert {name: row[name] for name in rows.FIELDS if name != "date"} == {
        "op": "select_blocks",
        "case": "prefill_32k_u",
        "precision": "bf16",
        "dsl": "tilelang",
        "ms": 2.0,
        "floor_ms": 0.5,
        "baselines": {"vllm": 3.0},
        "digest": "a1",
        "card": "NVIDIA H100 80GB HBM3",
    }
    assert row["skipped"] == {"fa4": "not installed"}
    assert harness.summary(row) == "  = 2.0000 ms (floor 0.5000 ms); 1.50x vllm"
    path = tmp_path / "deep" / "card.jsonl"
    rows.append(path, row)
    rows.append(path, row | {"ms": 1.0})
    assert [r["ms"] for r in rows.read(path)] == [2.0, 1.0]
    assert rows.latest(path)["select_blocks", "prefill_32k_u", "bf16"]["ms"] == 1.0


def test_a_row_without_a_field_is_refused(tmp_path):
    with pytest.raises(ValueError, match="row lacks precision, dsl, ms, floor_ms"):
        rows.append(tmp_path / "x.jsonl", {"op": "a", "case": "b"})
    assert not (tmp_path / "x.jsonl").exists()


def test_digests_of_several_cells_are_joined_and_unknown_cells_refused(generated):
    assert rows.digest_of(["select_blocks.tilelang.sm90.bf16", "x.tilelang.sm90.bf16"]) == "a1+b2"
    with pytest.raises(ValueError, match="no generated cell 'y'"):
        rows.digest_of(["y"])


def test_results_are_kept_by_card():
    assert rows.path_for("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.jsonl"
