"""`msa-tiles bench` on a GPU: rows of both DSLs that name what they launched, and a peer beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msa_tiles.bench import rows
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.cli import main

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("op", "case", "launched"),
    [
        ("combine", "prefill_4k", {"combine"}),
        ("sparse_attention", "prefill_8k_u", {"build_schedule", "sparse_attention", "combine"}),
        ("msa_decode", "decode_8k_b8", {"decode_score", "sparse_decode"}),
    ],
)
def test_a_case_becomes_rows(op: str, case: str, launched: set[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    short = ["--precision", "bf16", "--peers", "torch,dense_bytes", "--seconds", "0.02"]
    assert main(["bench", op, "--cases", case, *short, "--out", str(out)]) == 0
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert made
    assert len({row["run"] for row in made}) == 1
    for row in made:
        assert 0 < row["floor_ms"] < row["ms"]
        assert not rows.is_stale(row, rows.digests())
        assert launched & {cell.split(".")[0] for cell in row["digests"]}
        # Helpers of another operator may be of another DSL.
        assert any(cell.split(".")[1] == row["dsl"] for cell in row["digests"])
        assert row["timed"][row["dsl"]].startswith("graph, ")
        assert set(row["baselines"]) == {"combine": {"torch"}, "msa_decode": {"dense_bytes"}}.get(op, set())


@pytest.mark.parametrize("op", ["decode_score", "decode_topk", "sparse_decode", "server_prefill", "server_decode"])
def test_steps_of_a_layer(op: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    case = BENCHMARKS[op].labels[0]
    assert main(["bench", op, "--cases", case, "--seconds", "0.02", "--out", str(out)]) == 0
    [row, *_] = rows.read(out)
    assert set(row["digests"]) and row["ms"] > 0
