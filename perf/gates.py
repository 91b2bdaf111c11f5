"""Ratios against their gates: `python -m perf.gates perf/results/<card>.jsonl`.

Only figures of one row, and so of one run, are ever divided by each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf import rows


@dataclass(frozen=True)
class Gate:
    """Baseline `peer` must take at least `ratio` times as long as ours; `stretch` is what to hope for."""

    op: str
    case: str
    peer: str
    ratio: float
    stretch: float | None = None
    precision: str = "bf16"


FIRST = (
    Gate("select_blocks", "prefill_128k_u", "vllm", 1.5),
    Gate("sparse_attention", "prefill_32k_u", "vllm", 2.0),
)
"""What the first working kernels must reach."""

GOALS = (
    Gate("select_blocks", "prefill_32k_u", "vllm", 2.0, 2.3),
    Gate("select_blocks", "prefill_128k_u", "vllm", 1.9, 2.1),
    Gate("select_blocks", "prefill_32k_u", "vllm", 2.4, 3.2, "fp8"),
    Gate("select_blocks", "prefill_128k_u", "vllm", 2.45, 2.9, "fp8"),
    Gate("topk_select", "prefill_128k_u", "torch", 16, 25),
    Gate("sparse_attention", "prefill_32k_u", "vllm", 2.5, 2.8),
    Gate("sparse_attention", "prefill_128k_u", "vllm", 2.4, 2.75),
    Gate("sparse_attention", "prefill_32k_s", "vllm", 3.0, 3.7),
    Gate("sparse_attention", "prefill_128k_s", "vllm", 3.0, 3.5),
    Gate("prefill", "prefill_32k_u", "fa4", 3.0, 3.4),
    Gate("prefill", "prefill_128k_u", "fa4", 8.5, 9.8),
    Gate("prefill", "chunk8k_1m_u", "fa4", 22, 25),
    Gate("msa_decode", "decode_128k_b32", "vllm", 1.03, 1.08),
    Gate("msa_decode", "decode_128k_b1", "vllm", 1.3, 1.6),
    Gate("msa_decode", "decode_1m_b8", "dense_bytes", 7.7, 8.0),
)
"""Where the kernels are meant to arrive."""


def verdict(gate: Gate, latest: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> tuple[str, str]:
    """`(ratio, verdict)` as text: met, MISSED, or why there is no ratio."""
    row = latest.get((gate.op, gate.case, gate.precision))
    if row is None:
        return "-", "not measured"
    if gate.peer not in row["baselines"]:
        return "-", f"{gate.peer} not timed"
    ratio = row["baselines"][gate.peer] / row["ms"]
    if gate.stretch is not None and ratio >= gate.stretch:
        return f"{ratio:.2f}", "stretch met"
    return f"{ratio:.2f}", "met" if ratio >= gate.ratio else "MISSED"


def report(gates: Sequence[Gate], latest: Mapping[tuple[str, str, str], Mapping[str, Any]]) -> list[list[str]]:
    """Table rows, the heading first."""
    table = [["op", "case", "precision", "peer", "ratio", "gate", "stretch", "verdict"]]
    for gate in gates:
        ratio, words = verdict(gate, latest)
        stretch = "-" if gate.stretch is None else f"{gate.stretch:g}"
        table.append([gate.op, gate.case, gate.precision, gate.peer, ratio, f"{gate.ratio:g}", stretch, words])
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a gate of the chosen set is missed or not measured."""
    parser = argparse.ArgumentParser(prog="python -m perf.gates", description="Prints ratios against their gates.")
    parser.add_argument("file", type=Path, help="a jsonl file of perf/results")
    parser.add_argument("--goals", action="store_true", help="the final goals instead of the first gates")
    args = parser.parse_args(argv)
    gates = GOALS if args.goals else FIRST
    table = report(gates, rows.latest(args.file))
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0 if all(line[-1] in ("met", "stretch met") for line in table[1:]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
