"""Ratios against gates, from rows."""

from __future__ import annotations

import pytest

from msa_tiles.bench import gates, rows
from msa_tiles.bench.gates import Gate
from msa_tiles.bench.operators import BENCHMARKS

SELECT = Gate("select_blocks", "prefill_128k_u", ("vllm",), 1.9, 2.1)
DECODE = Gate("msa_decode", "decode_1m_b8", ("fa4", "dense_bytes"), 7.7, 8.0)


NOW = frozenset({"new"})


def row(gate: Gate, ms: float, dsl: str = "tilelang", digest: str = "new", **baselines: float) -> dict:
    return {
        "op": gate.op,
        "case": gate.case,
        "precision": "bf16",
        "dsl": dsl,
        "ms": ms,
        "baselines": baselines,
        "digest": digest,
    }


@pytest.mark.parametrize(
    ("found", "ratio", "verdict"),
    [
        ([], None, "not measured"),
        ([row(SELECT, 10.0, torch=50.0)], None, "vllm not timed"),
        ([row(SELECT, 10.0, vllm=18.9)], 1.89, "MISSED"),
        ([row(SELECT, 10.0, vllm=19.0)], 1.9, "met"),
        ([row(SELECT, 10.0, vllm=21.0)], 2.1, "goal met"),
        ([row(SELECT, 9.0, vllm=19.0), row(SELECT, 10.0, vllm=18.0)], 1.8, "MISSED"),  # the latest, not the best
        ([row(SELECT, 10.0, vllm=18.0), row(SELECT, 9.0, "cutedsl", vllm=18.0)], 2.0, "met"),  # the better DSL
    ],
)
def test_a_gate_has_a_ratio_and_a_verdict(found, ratio, verdict):
    assert gates.best(SELECT, rows.latest(found), NOW) == (None if ratio is None else pytest.approx(ratio), verdict)


@pytest.mark.parametrize(("ms", "verdict"), [(11.0, "goal open"), (10.0, "goal met")])
def test_a_goal_alone_is_never_missed(ms, verdict):
    goal = Gate("select_blocks", "prefill_128k_u", ("vllm",), None, 2.0)
    latest = rows.latest([row(goal, ms, vllm=20.0)])
    assert gates.best(goal, latest, NOW) == (pytest.approx(20 / ms), verdict)
    assert gates.all_met(latest, NOW, [goal])
    assert gates.report(latest, NOW, [goal])[1][5:] == ("-", "2", verdict)


def test_what_an_older_kernel_reached_is_not_met():
    old = row(SELECT, 9.0, digest="old", vllm=20.0)
    assert gates.best(SELECT, rows.latest([old]), NOW) == (pytest.approx(20 / 9), "stale")
    assert not gates.all_met(rows.latest([old]), NOW, [SELECT])
    newer = row(SELECT, 10.0, "cutedsl", vllm=20.0)
    assert gates.best(SELECT, rows.latest([old, newer]), NOW) == (2.0, "met"), "the kernel as it is now counts"


def test_the_fastest_of_several_peers_counts():
    assert gates.best(DECODE, rows.latest([row(DECODE, 1.0, fa4=20.0, dense_bytes=7.75)]), NOW) == (7.75, "met")
    assert gates.best(DECODE, rows.latest([row(DECODE, 1.0, fa4=7.0, dense_bytes=7.75)]), NOW) == (7.0, "MISSED")


@pytest.mark.parametrize(
    ("ratio", "digits", "text"),
    [(1.0984, 2, "1.098"), (1.09999, 2, "1.09999"), (1.1, 2, "1.10"), (1.0849, 2, "1.08"), (1.348, 1, "1.3"),
     (1.3499, 2, "1.3499"), (1.36, 2, "1.36")],
)  # fmt: skip
def test_what_is_missed_is_not_rounded_to_what_is_aimed_at(ratio, digits, text):
    assert gates.ratio_text(ratio, gates.Gate("select_blocks", "a case", ("a peer",), 1.1, 1.35), digits) == text


def test_figures_of_different_runs_are_never_divided_by_each_other():
    """The faster DSL was timed without the peer, so that the slower one's ratio is all there is."""
    latest = rows.latest([row(SELECT, 10.0, vllm=20.0), row(SELECT, 5.0, "cutedsl")])
    assert gates.best(SELECT, latest, NOW) == (2.0, "met")


def test_all_gates_must_be_measured_and_met():
    good = row(SELECT, 10.0, vllm=20.0)
    assert gates.all_met(rows.latest([good]), NOW, [SELECT])
    assert not gates.all_met(rows.latest([good]), NOW, [SELECT, DECODE])
    assert not gates.all_met(rows.latest([good | {"ms": 20.0}]), NOW, [SELECT])


def test_the_report_has_a_line_for_each_gate():
    lines = gates.report(rows.latest([row(SELECT, 10.0, vllm=20.0)]), NOW, [SELECT, DECODE])
    assert lines[1] == ("select_blocks", "prefill_128k_u", "bf16", "vllm", "2.00", "1.9", "2.1", "met")
    assert lines[2][3:] == ("fa4 or dense_bytes", "-", "7.7", "8", "not measured")


@pytest.mark.parametrize("gate", gates.GATES, ids=lambda gate: f"{gate.op}-{gate.case}-{gate.precision}")
def test_every_gate_names_a_case_that_exists(gate):
    assert gate.case in BENCHMARKS[gate.op].labels
    assert gate.ratio is None or gate.ratio <= gate.goal
    assert gate.precision in BENCHMARKS[gate.op].precisions
    same = [other for other in gates.GATES if (other.op, other.case, other.precision, other.peers)
            == (gate.op, gate.case, gate.precision, gate.peers)]  # fmt: skip
    assert same == [gate]
    assert gates.of(gate.op, gate.case, gate.precision) is not None
