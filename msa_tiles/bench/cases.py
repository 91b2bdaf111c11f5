"""The benchmark cases: the `bench` workloads of the operator specs and sweeps of their context length, as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msa_tiles import readable, trees
from msa_tiles.spec.model import Device, Operator, Specs, Workload
from msa_tiles.spec.work import Work, dims_of, work_of

_INDEXER = ("index_score", "topk_select", "select_blocks")

_LONGEST = "chunk8k_1m"
_SHORT = {"prefill_4k": (4096, 4096), "prefill_8k": (8192, 8192)}
_SWEEP = {
    "prefill_16k": (1 << 14, 1 << 14),
    "prefill_64k": (1 << 16, 1 << 16),
    "chunk8k_32k": (8192, 1 << 15),
    "chunk8k_128k": (8192, 1 << 17),
    "chunk8k_512k": (8192, 1 << 19),
    "chunk512_100k": (512, 102400),
}
"""Context lengths beside those that the specs tune for: whole prompts, and the last queries of growing ones."""
_SWEPT = ("select_blocks", "sparse_attention")
"""The operators that a whole prefill is made of."""


@dataclass(frozen=True)
class Case:
    """One call shape of one operator: a single request whose last `num_q` of `num_k` tokens are the queries."""

    label: str
    op: str
    num_q: int
    num_k: int
    selection: str | None
    dims: Mapping[str, int]

    def __getitem__(self, dim: str) -> int:
        return self.dims[dim]

    @property
    def first_position(self) -> int:
        """The position of the first query."""
        return self.num_k - self.num_q


@trees.cached(maxsize=1)
def specs() -> Specs:
    return readable.specs()


def labels(op: str) -> list[str]:
    """The cases of an operator: the short prompt, those of its spec, the sweep."""
    return list(_workloads(op))


@trees.cached(maxsize=32)
def _workloads(op: str) -> Mapping[str, Workload]:
    """The workload of each case."""
    named = {_case_of(op, workload): workload for workload in specs().operators[op].bench}
    short: dict[str, Workload] = {}
    sweep: dict[str, Workload] = {}
    for label, workload in named.items():
        if label.startswith(_LONGEST):
            selection = label.removeprefix(_LONGEST)
            short |= _resized(workload, _SHORT, selection)
            if op in _SWEPT and selection == "_u":
                sweep |= _resized(workload, _SWEEP, selection)
    return short | named | sweep


def _resized(workload: Workload, lengths: Mapping[str, tuple[int, int]], selection: str) -> dict[str, Workload]:
    return {
        label + selection: dataclasses.replace(workload, label=label + selection, sequences=(pair,))
        for label, pair in lengths.items()
    }


def _case_of(op: str, workload: Workload) -> str:
    """The case's name: the workload's label, with the selection that its inputs lead to.

    The indexer's operators are timed on independent random inputs, which select uniformly, so that their cases bear the
    name of attention's on the selection U.
    """
    if op in _INDEXER and not workload.label.endswith("_u"):
        return f"{workload.label}_u"
    return workload.label


def find(op: str, label: str) -> Case:
    """The case `label` of `op`, at the M3 point. Raises ValueError when the spec has no such workload."""
    operator, workload = _lookup(op, label)
    if len(workload.sequences) != 1:
        raise ValueError(f"{op}: {label} packs {len(workload.sequences)} requests; the benchmarks time one request")
    ((num_q, num_k),) = workload.sequences
    return Case(label, op, num_q, num_k, workload.selection, dims_of(operator, workload, operator.m3))


def work(op: str, label: str, precision: str) -> Work:
    """The work of a case, from the roofline of the operator's spec."""
    operator, workload = _lookup(op, label)
    stored = specs().precisions[precision]
    rows = (row.computes_in(stored) for row in operator.kernels if row.precision == precision)
    return work_of(operator, workload, stored, operator.m3, next(rows, stored.multiply))


def floor_ms(parts: Iterable[Work], card: str) -> float | None:
    """The least milliseconds of kernels one after the other on `card`; None for a card that no spec describes."""
    device = device_of(card)
    return None if device is None else sum(part.floor_ms(device) for part in parts)


def device_of(card: str) -> Device | None:
    """The device of the target specs whose name the card's name contains; the longest such name wins."""
    devices = [device for target in specs().targets.values() for device in target.devices.values()]
    fitting = [device for device in devices if _plain(device.name) in _plain(card)]
    return max(fitting, key=lambda device: len(device.name), default=None)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _lookup(op: str, label: str) -> tuple[Operator, Workload]:
    workload = _workloads(op).get(label)
    if workload is None:
        raise ValueError(f"--cases: {op} has no case {label!r}; it has {', '.join(labels(op))}")
    return specs().operators[op], workload
