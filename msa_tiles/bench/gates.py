"""What our kernels are meant to reach: ratios to named peers, everything included.

Only figures of one row, and so of one run, are ever divided by each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msa_tiles.bench import rows
from msa_tiles.bench.rows import Key, Row
from msa_tiles.spec.model import DSLS


@dataclass(frozen=True)
class Gate:
    """The fastest of `peers` must take at least `ratio` times as long as ours; `stretch` is what to hope for."""

    op: str
    case: str
    peers: tuple[str, ...]
    ratio: float
    stretch: float
    precision: str = "bf16"

    def reached(self, row: Row) -> float | None:
        """The ratio of a row; None when none of the peers was timed with it."""
        timed = [row["baselines"][peer] for peer in self.peers if peer in row["baselines"]]
        return min(timed) / row["ms"] if timed else None


_VLLM = ("vllm",)
_DENSE = ("fa4",)
_DENSE_DECODE = ("fa4", "dense_bytes")

GATES = (
    Gate("select_blocks", "prefill_32k_u", _VLLM, 2.0, 2.3),
    Gate("select_blocks", "prefill_128k_u", _VLLM, 1.9, 2.1),
    Gate("select_blocks", "prefill_32k_u", _VLLM, 2.4, 3.2, "q8k8"),
    Gate("select_blocks", "prefill_128k_u", _VLLM, 2.45, 2.9, "q8k8"),
    Gate("topk_select", "prefill_128k_u", ("torch",), 16, 25),
    Gate("sparse_attention", "prefill_32k_u", _VLLM, 2.5, 2.8),
    Gate("sparse_attention", "prefill_128k_u", _VLLM, 2.4, 2.75),
    Gate("sparse_attention", "prefill_32k_s", _VLLM, 3.0, 3.7),
    Gate("sparse_attention", "prefill_128k_s", _VLLM, 3.0, 3.5),
    Gate("sparse_attention", "prefill_32k_s", _VLLM, 7.5, 10, "q16kv8"),
    Gate("sparse_attention", "prefill_128k_s", _VLLM, 6.9, 9, "q16kv8"),
    Gate("prefill", "prefill_32k_u", _DENSE, 3.0, 3.4),
    Gate("prefill", "prefill_128k_u", _DENSE, 8.5, 9.8),
    Gate("prefill", "chunk8k_1m_u", _DENSE, 22, 25),
    Gate("prefill", "chunk8k_1m_u", _DENSE, 40, 46, "q8k8+q16kv8"),
    Gate("msa_decode", "decode_128k_b32", _VLLM, 1.03, 1.08),
    Gate("msa_decode", "decode_128k_b1", _VLLM, 1.3, 1.6),
    Gate("msa_decode", "decode_1m_b8", _DENSE_DECODE, 7.7, 8.0),
    Gate("msa_decode", "decode_128k_b32", _VLLM, 1.22, 1.28, "q8k8+q16kv8"),
    Gate("msa_decode", "decode_128k_b1", _VLLM, 1.5, 1.8, "q8k8+q16kv8"),
    Gate("msa_decode", "decode_1m_b8", _DENSE_DECODE, 15.3, 15.7, "q8k8+q16kv8"),
    Gate("msa_attention", "train_32k", ("flash_msa",), 8.0, 15.0),
    Gate("msa_attention", "train_128k", ("flash_msa",), 8.0, 15.0),
)


def of(op: str, case: str, precision: str) -> Gate | None:
    """The gate of a case, if there is one."""
    return next((gate for gate in GATES if (gate.op, gate.case, gate.precision) == (op, case, precision)), None)


MET = ("met", "stretch met")


def best(gate: Gate, latest: Mapping[Key, Row], current: frozenset[str]) -> tuple[float | None, str]:
    """The best ratio of our DSLs, and `met`, `stretch met`, `MISSED`, `stale`, or why there is no ratio.

    `current` are the digests of the kernels as they are now: what an older kernel reached is nothing that is met.
    """
    found = [latest[key] for dsl in DSLS if (key := (gate.op, gate.case, gate.precision, dsl)) in latest]
    if not found:
        return None, "not measured"
    ratios = [(ratio, row) for row in rows.fresh(found, current) if (ratio := gate.reached(row)) is not None]
    if not ratios:
        return None, f"{' or '.join(gate.peers)} not timed"
    ratio, row = max(ratios, key=lambda pair: pair[0])
    if rows.is_stale(row, current):
        return ratio, "stale"
    if ratio >= gate.stretch:
        return ratio, "stretch met"
    return ratio, "met" if ratio >= gate.ratio else "MISSED"


def report(latest: Mapping[Key, Row], current: frozenset[str], gates: Iterable[Gate] = GATES) -> list[Sequence[str]]:
    """Rows of a table, the heading first."""
    table: list[Sequence[str]] = [("op", "case", "precision", "peer", "ratio", "gate", "stretch", "verdict")]
    for gate in gates:
        ratio, words = best(gate, latest, current)
        shown = "-" if ratio is None else f"{ratio:.2f}"
        peer = " or ".join(gate.peers)
        table.append((gate.op, gate.case, gate.precision, peer, shown, f"{gate.ratio:g}", f"{gate.stretch:g}", words))
    return table


def all_met(latest: Mapping[Key, Row], current: frozenset[str], gates: Iterable[Gate] = GATES) -> bool:
    """Is every gate measured on the kernels as they are now, and met?"""
    return all(best(gate, latest, current)[1] in MET for gate in gates)
