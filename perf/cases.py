"""The benchmark cases: the `bench` workloads of the operator specs, as numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from msa_tiles import paths
from msa_tiles.spec import load
from msa_tiles.spec.model import Device, Operator, Specs, Workload
from msa_tiles.spec.work import dims_of, floor_ms

_INDEXER = ("index_score", "topk_select", "select_blocks")


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


@functools.lru_cache(maxsize=1)
def specs() -> Specs:
    return load(paths.specs_dir())


def labels(op: str) -> list[str]:
    """The cases of an operator, in the order of its spec."""
    return [_case_of(op, workload) for workload in specs().operators[op].bench]


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


def floor(op: str, label: str, precision: str, card: str) -> float | None:
    """The roofline's milliseconds on `card` (the name CUDA gives it); None for a card that no spec describes."""
    operator, workload = _lookup(op, label)
    device = device_of(card)
    if device is None:
        return None
    stored = specs().precisions[precision]
    compute = next((row.compute for row in operator.kernels if row.precision == precision), stored.compute[0])
    return floor_ms(operator, workload, stored, operator.m3, device, compute)


def device_of(card: str) -> Device | None:
    """The device of the target specs whose name the card's name contains; the longest such name wins."""
    devices = [device for target in specs().targets.values() for device in target.devices.values()]
    fitting = [device for device in devices if _plain(device.name) in _plain(card)]
    return max(fitting, key=lambda device: len(device.name), default=None)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _lookup(op: str, label: str) -> tuple[Operator, Workload]:
    operator = specs().operators[op]
    for workload in operator.bench:
        if _case_of(op, workload) == label:
            return operator, workload
    raise ValueError(f"--cases: {op} has no case {label!r}; it has {', '.join(labels(op))}")


def cell(op: str, dsl: str, device: torch.device, precision: str = "bf16") -> str:
    """The id of the cell that serves `op` on this device. Raises ValueError when no target spec covers the device."""
    capability = torch.cuda.get_device_capability(device)
    for target in specs().targets.values():
        if target.capability == capability:
            return f"{op}.{dsl}.{target.name}.{precision}"
    raise ValueError(f"no target spec covers {torch.cuda.get_device_name(device)}, capability {capability}")
