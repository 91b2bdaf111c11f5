"""Ratios against gates, from rows."""

from __future__ import annotations

import json

import pytest

from perf import bench_msa_decode, bench_prefill, cases, gates


def _file(tmp_path, *rows):
    path = tmp_path / "card.jsonl"
    full = {"precision": "bf16", "dsl": "tilelang", "floor_ms": 1, "digest": "d", "card": "c", "date": "2026-01-01"}
    path.write_text("".join(json.dumps(full | row) + "\n" for row in rows))
    return path


SELECT = {"op": "select_blocks", "case": "prefill_128k_u", "ms": 10.0, "baselines": {"vllm": 16.0}}
ATTEND = {"op": "sparse_attention", "case": "prefill_32k_u", "ms": 7.0, "baselines": {"vllm": 19.0, "fa4": 26.0}}


def test_met_gates_pass(tmp_path, capsys):
    assert gates.main([str(_file(tmp_path, SELECT, ATTEND))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["select_blocks", "prefill_128k_u", "bf16", "vllm", "1.60", "1.5", "-", "met"]
    assert shown[2].split()[4:] == ["2.71", "2", "-", "met"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([SELECT, ATTEND | {"ms": 10.0}], "MISSED"),
        ([SELECT], "not measured"),
        ([SELECT, ATTEND | {"baselines": {"fa4": 26.0}}], "vllm not timed"),
        ([SELECT, ATTEND, ATTEND | {"ms": 11.0}], "MISSED"),  # the latest row counts, not the best
    ],
)
def test_missed_or_unmeasured_gates_fail(tmp_path, capsys, rows, words):
    assert gates.main([str(_file(tmp_path, *rows))]) == 1
    assert words in capsys.readouterr().out


def test_stretch_is_told(tmp_path, capsys):
    gates.main([str(_file(tmp_path, SELECT | {"ms": 7.0})), "--goals"])
    assert (
        "2.29" in (line := next(x for x in capsys.readouterr().out.splitlines() if "128k_u" in x)) and "stretch" in line
    )


@pytest.mark.parametrize("gate", gates.FIRST + gates.GOALS, ids=lambda gate: f"{gate.op}-{gate.case}-{gate.precision}")
def test_every_gate_names_a_case_that_exists(gate):
    own = {"prefill": bench_prefill.labels, "msa_decode": lambda: bench_msa_decode.BATCHES}
    assert gate.case in (own[gate.op]() if gate.op in own else cases.labels(gate.op))
