"""What our kernels are meant to reach: ratios to named peers, everything included.

Only figures of one row, and so of one run, are ever divided by each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msa_tiles.bench import rows
from msa_tiles.bench.precisions import ATTENTION, BF16, BOTH, INDEXER, SERVED
from msa_tiles.bench.rows import Key, Row
from msa_tiles.spec.model import DSLS


@dataclass(frozen=True)
class Gate:
    """The fastest of `peers` must take at least `ratio` times as long as ours; `goal` is what to hope for.

    `ratio` is None where there is a goal alone.
    """

    op: str
    case: str
    peers: tuple[str, ...]
    ratio: float | None
    goal: float
    precision: str = BF16

    def reached(self, row: Row) -> float | None:
        """The ratio of a row; None when none of the peers was timed with it."""
        timed = [row["baselines"][peer] for peer in self.peers if peer in row["baselines"]]
        return min(timed) / row["ms"] if timed else None


_VLLM = ("vllm",)
_FLASHINFER = ("flashinfer",)
_OWN_BF16, _OWN_FP8, _OWN_FP8_INDEX = ("bf16",), ("fp8",), ("fp8_index",)
_DENSE = ("fa4",)
_DENSE_DECODE = ("fa4", "dense_bytes")
_Q8K8, _Q16KV8, _FP8 = INDEXER[1], ATTENTION[1], BOTH[1]
_Q16KV4, _NVFP4_INDEX = ATTENTION[2], BOTH[2]

GATES = (
    Gate("select_blocks", "prefill_32k_u", _VLLM, 2.0, 2.3),
    Gate("select_blocks", "prefill_128k_u", _VLLM, 1.9, 2.3),
    Gate("select_blocks", "prefill_32k_u", _FLASHINFER, 1.1, 1.35, _Q8K8),
    Gate("select_blocks", "prefill_128k_u", _FLASHINFER, 1.15, 1.4, _Q8K8),
    Gate("select_blocks", "chunk8k_1m_u", _FLASHINFER, 1.25, 1.5, _Q8K8),
    Gate("topk_select", "prefill_32k_u", _FLASHINFER, None, 1.0),
    Gate("topk_select", "prefill_128k_u", _FLASHINFER, 1.2, 1.6),
    Gate("sparse_attention", "prefill_32k_u", _VLLM, 2.5, 2.8),
    Gate("sparse_attention", "prefill_128k_u", _VLLM, 2.4, 2.8),
    Gate("sparse_attention", "prefill_32k_s", _VLLM, 3.0, 3.7),
    Gate("sparse_attention", "prefill_128k_s", _VLLM, 3.0, 3.5),
    Gate("sparse_attention", "chunk512_100k_u", _VLLM, 1.5, 2.5),
    *(
        gate
        for case, ratio in (
            ("prefill_32k_u", 1.9),
            ("prefill_32k_s", 1.4),
            ("prefill_128k_u", 2.1),
            ("prefill_128k_s", 2.1),
            ("chunk8k_1m_u", 2.1),
            ("chunk8k_1m_s", 2.1),
        )
        for gate in (
            Gate("sparse_attention", case, _FLASHINFER, ratio, ratio, _Q16KV8),
            Gate("sparse_attention", case, _OWN_BF16, 0.95, 1.15, _Q16KV8),
            Gate("sparse_attention", case, _OWN_FP8, 0.91, 1.0, _Q16KV4),
        )
    ),
    Gate("prefill", "prefill_4k_u", _DENSE, None, 1.0),
    Gate("prefill", "prefill_32k_u", _DENSE, 3.4, 4.0),
    Gate("prefill", "prefill_128k_u", _DENSE, 9.8, 11.0),
    Gate("prefill", "chunk8k_1m_u", _DENSE, 25, 32),
    Gate("prefill", "chunk8k_1m_u", _DENSE, 40, 50, _FP8),
    Gate("msa_decode", "decode_128k_b32", _VLLM, 1.03, 1.10),
    Gate("msa_decode", "decode_128k_b1", _VLLM, 1.25, 1.6),
    Gate("msa_decode", "decode_8k_b64", _VLLM, 1.05, 1.15),
    Gate("msa_decode", "decode_128k_b32", _VLLM, 1.22, 1.28, _FP8),
    Gate("msa_decode", "decode_128k_b1", _VLLM, 1.5, 1.8, _FP8),
    Gate("msa_decode", "decode_1m_b8", _DENSE_DECODE, 7.7, 8.3),
    Gate("msa_decode", "decode_1m_b8", _DENSE_DECODE, 15.3, 15.7, _FP8),
    Gate("msa_decode", "decode_1m_b8", _DENSE_DECODE, 24, 26.5, _NVFP4_INDEX),
    Gate("msa_decode", "decode_128k_b32", _OWN_FP8_INDEX, 1.4, 1.6, _NVFP4_INDEX),
    *(Gate("sparse_decode", case, _OWN_FP8, 1.0, 1.0, _Q16KV4) for case in ("decode_128k_b32", "decode_1m_b8")),
    Gate("drafts", "drafts_32k_b8", _VLLM, 1.2, 1.5),
    Gate("drafts", "drafts_32k_b64", _VLLM, 1.1, 1.5),
    *(
        Gate("server_prefill", case, _VLLM, 2.3, 2.8, precision)
        for case in ("prefill_16k_u", "prefill_32k_u", "prefill_128k_u", "chunk8k_1m_u")
        for precision in SERVED
    ),
    *(
        Gate("server_decode", case, _VLLM, 1.0, 1.1, precision)
        for case in ("decode_8k_b8", "decode_8k_b64", "decode_128k_b1", "decode_128k_b32", "decode_1m_b8")
        for precision in SERVED
    ),
    Gate("msa_attention", "train_32k", ("flash_msa",), 8.0, 15.0),
    Gate("msa_attention", "train_128k", ("flash_msa",), 8.0, 15.0),
)

LATER = {
    "first call with a pack, host time of an eager call, memory of a prompt of 1M tokens": "none is a time of a case",
}
"""What else is aimed at, and why no row shows it."""


def of(op: str, case: str, precision: str) -> Gate | None:
    """The first gate of a case, if there is one."""
    return next((gate for gate in GATES if (gate.op, gate.case, gate.precision) == (op, case, precision)), None)


MET = ("met", "goal met", "goal open")


def best(gate: Gate, latest: Mapping[Key, Row], current: frozenset[str]) -> tuple[float | None, str]:
    """The best ratio of our DSLs, and `met`, `goal met`, `goal open`, `MISSED`, `stale`, or why there is no ratio.

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
    if ratio >= gate.goal:
        return ratio, "goal met"
    if gate.ratio is None:
        return ratio, "goal open"
    return ratio, "met" if ratio >= gate.ratio else "MISSED"


def ratio_text(ratio: float, gate: Gate, digits: int = 2) -> str:
    """A ratio with so many digits behind the point, and with more where these would show what is missed as reached."""
    text = f"{ratio:.{digits}f}"
    rounded_up = any(aim is not None and ratio < aim <= float(text) for aim in (gate.ratio, gate.goal))
    return ratio_text(ratio, gate, digits + 1) if rounded_up else text


def report(latest: Mapping[Key, Row], current: frozenset[str], gates: Iterable[Gate] = GATES) -> list[Sequence[str]]:
    """Rows of a table, the heading first."""
    table: list[Sequence[str]] = [("op", "case", "precision", "peer", "ratio", "gate", "goal", "verdict")]
    for gate in gates:
        ratio, words = best(gate, latest, current)
        shown = "-" if ratio is None else ratio_text(ratio, gate)
        peer = " or ".join(gate.peers)
        must = "-" if gate.ratio is None else f"{gate.ratio:g}"
        table.append((gate.op, gate.case, gate.precision, peer, shown, must, f"{gate.goal:g}", words))
    return table


def all_met(latest: Mapping[Key, Row], current: frozenset[str], gates: Iterable[Gate] = GATES) -> bool:
    """Is every gate measured on the kernels as they are now, and met?"""
    return all(best(gate, latest, current)[1] in MET for gate in gates)
