"""Checking, timing in both orders, skipping with a reason, and the rows that come of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from stand_ins import CASE, FakeClock, bench, contender, ours

from msa_tiles.bench import harness, launches, rows
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.runtime.dispatch import NoKernelError
from msa_tiles.runtime.launch import Kernel

TILELANG, CUTEDSL = "tilelang", "cutedsl"
MACHINE = {"card": "NVIDIA H100 80GB HBM3", "date": "2026-01-01", "run": "2026-01-01T00:00:00.000+00:00"}


def run(made, dsls=(TILELANG,), clock=None):
    said: list[str] = []
    return harness.run(made, dsls, clock or FakeClock(), l2_bytes=50, seconds=0.01, say=said.append), said


def test_ours_are_timed_first_and_then_last():
    clock = FakeClock()
    made = bench(contender("a", 3.0), contender("b", 5.0), mine={TILELANG: 2.0, CUTEDSL: 1.0})
    result, _ = run(made, (TILELANG, CUTEDSL), clock)
    forward = [TILELANG, CUTEDSL, "a", "b"]
    assert clock.order == [*forward, *reversed(forward)]
    assert [len(timings) for timings in result.timings.values()] == [2, 2, 2, 2]
    assert (result.sustained(CUTEDSL), result.sustained("a"), result.median("b")) == (1.0, 3.0, 5.0)
    assert (result.ours, result.peers) == ([TILELANG, CUTEDSL], ["a", "b"])


def test_inputs_rotate_and_checks_see_the_first_set():
    seen = []
    made = bench(size=40, check=lambda inputs, result: seen.append((inputs, result)))
    result, _ = run(made)
    assert result.num_sets == 3
    assert seen == [(0, 2.0)]


def test_a_wrong_peer_is_not_timed_and_says_why():
    clock = FakeClock()
    result, said = run(bench(contender("a", 3.0, wrong="scores are off"), contender("b", 5.0)), clock=clock)
    assert "a" not in clock.order and "a" not in result.timings
    assert result.skipped == {"a": "scores are off"}
    assert any("a" in line and "scores are off" in line for line in said)


def test_an_absent_or_failing_peer_is_skipped_with_the_reason():
    result, _ = run(bench(Skipped("vllm", "not installed"), contender("a", 1.0, error=RuntimeError("no\nmore"))))
    assert result.skipped == {"vllm": "not installed", "a": "failed: RuntimeError: no"}
    assert set(result.timings) == {TILELANG}


def test_a_peer_that_needs_more_memory_than_there_is_is_skipped():
    result, _ = run(bench(contender("a", 1.0, error=torch.OutOfMemoryError("CUDA out of memory"))))
    assert result.skipped == {"a": "does not fit this card's memory"}


def test_peers_left_out_are_on_record():
    made = harness.only_peers(bench(contender("a", 3.0), contender("b", 5.0), Skipped("c", "not installed")), ["a"])
    result, _ = run(made)
    assert set(result.timings) == {TILELANG, "a"}
    assert result.skipped == {"b": "left out by --peers", "c": "left out by --peers"}


def test_what_fails_while_it_is_timed_loses_its_figures():
    class Failing(FakeClock):
        def load(self, calls):
            loaded = super().load(calls)
            if self.order.count(calls[0].name) == 2 and calls[0].name in ("a", CUTEDSL):
                raise RuntimeError("out of luck")
            return loaded

    result, _ = run(bench(contender("a", 3.0), mine={TILELANG: 2.0, CUTEDSL: 1.0}), (TILELANG, CUTEDSL), Failing())
    assert set(result.timings) == {TILELANG}
    assert result.skipped == {"a": "failed while timed: RuntimeError: out of luck"}
    assert result.wrong == {CUTEDSL: "failed while timed: RuntimeError: out of luck"}


def test_a_wrong_result_of_ours_is_never_timed_and_the_other_dsl_is():
    clock = FakeClock()
    made = bench(
        contender("a", 3.0),
        mine={TILELANG: 2.0, CUTEDSL: 1.0},
        check=lambda inputs, result: "some rows lack their own block" if result == 2.0 else None,
    )
    result, _ = run(made, (TILELANG, CUTEDSL), clock)
    assert result.wrong == {TILELANG: "some rows lack their own block"}
    assert clock.order == [CUTEDSL, "a", "a", CUTEDSL]


def test_a_dsl_without_a_kernel_is_skipped_with_what_its_candidates_said():
    text = "x: no kernel serves this call:\n  x.tilelang.sm90.bf16: head_dim is 96\n  x.cutedsl.sm90.bf16: no CuTe here"
    made = bench(mine={TILELANG: 2.0, CUTEDSL: NoKernelError(text)})
    result, _ = run(made, (TILELANG, CUTEDSL))
    assert result.skipped == {CUTEDSL: "x.cutedsl.sm90.bf16: no CuTe here"}
    assert not result.wrong and result.ours == [TILELANG]


def test_without_any_of_ours_peers_are_neither_bound_nor_timed():
    bound = []
    clock = FakeClock()
    peer = Contender("a", bound.append, lambda inputs, result: None)
    result, _ = run(bench(peer, mine={TILELANG: NoKernelError("none is generated")}), clock=clock)
    assert not bound and not clock.order and not result.timings
    assert result.skipped == {TILELANG: "no tilelang kernel: NoKernelError: none is generated"}


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that launches nothing."""

    def make(op: str, digest: str):
        made = object.__new__(Kernel)
        made.cell = SimpleNamespace(id=f"{op}.tilelang.sm90.bf16", digest=digest)
        return made

    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: None)
    return make


def test_launches_are_noted_only_inside(kernel):
    first, second = kernel("a", "1"), kernel("b", "2")
    first()
    with launches.launched() as seen:
        second()
        first()
        second()
    kernel("c", "3")()
    assert list(seen) == ["b.tilelang.sm90.bf16", "a.tilelang.sm90.bf16"]


def test_a_row_for_each_of_ours(kernel, tmp_path):
    """Every row has the digests of what its own call launched, and the peers of the run."""
    main, helper = kernel("select_blocks", "a1"), kernel("combine", "b2")

    def call_of(dsl, inputs):
        call = ours({TILELANG: 2.0, CUTEDSL: 4.0})(dsl, inputs)

        def launching():
            main()
            if dsl == TILELANG:
                helper()
            return call()

        launching.name = dsl
        return launching

    made = bench(contender("vllm", 3.0), Skipped("fa4", "not installed"), call=call_of)
    result, _ = run(made, (TILELANG, CUTEDSL))
    first, second = harness.rows_of(made, result, "bf16", 0.5, 1.0, MACHINE)
    assert {name: first[name] for name in rows.FIELDS} == {
        "op": CASE.op,
        "case": CASE.label,
        "precision": "bf16",
        "dsl": TILELANG,
        "ms": 2.0,
        "floor_ms": 0.5,
        "baselines": {"vllm": 3.0},
        "digest": "a1+b2",
        "card": MACHINE["card"],
        "date": MACHINE["date"],
    }
    assert first["digests"] == {"select_blocks.tilelang.sm90.bf16": "a1", "combine.tilelang.sm90.bf16": "b2"}
    assert (second["dsl"], second["ms"], second["digest"]) == (CUTEDSL, 4.0, "a1")
    assert second["run"] == first["run"] and second["baselines"] == first["baselines"]
    assert first["skipped"] == {"fa4": "not installed"} and first["seconds"] == 1.0
    assert first["order"] == [TILELANG, CUTEDSL, "vllm"]
    assert first["conditions"][TILELANG] == [{"clock_mhz": 1980, "watts": 512}] * 2
    path = tmp_path / "deep" / "card.jsonl"
    rows.append(path, first)
    rows.append(path, first | {"ms": 1.0})
    assert [row["ms"] for row in rows.read(path)] == [2.0, 1.0]
    assert json.loads(path.read_text().splitlines()[0]) == first
    assert rows.latest(rows.read(path))[CASE.op, CASE.label, "bf16", TILELANG]["ms"] == 1.0


def test_a_row_without_a_field_is_refused(tmp_path):
    with pytest.raises(ValueError, match="row lacks precision, dsl, ms, floor_ms"):
        rows.append(tmp_path / "x.jsonl", {"op": "a", "case": "b"})
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(("line", "complaint"), [("{", "is not JSON"), ('{"op": 1}', "lacks case"), ("3", "lacks op")])
def test_a_line_that_is_no_row_is_refused_with_its_place(tmp_path, line, complaint):
    (tmp_path / "x.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=rf"x\.jsonl:2 .*{complaint}"):
        list(rows.read(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("digest", "stale"), [("a1", False), ("a1+b2", False), ("a1+c3", True), ("c3", True), ("", True)]
)
def test_a_row_is_stale_when_a_kernel_has_changed_since(digest, stale):
    assert rows.is_stale({"digest": digest}, frozenset({"a1", "b2"})) is stale


def test_results_are_kept_by_card():
    assert rows.file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.jsonl"
