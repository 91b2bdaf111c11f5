"""The grid: which calls a cell must answer correctly before it counts as verified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from msa_tiles.runtime.compiler import variant_text
from msa_tiles.runtime.registry import Cell
from msa_tiles.spec import Operator, Precision, Specs, Workload, dims_of


class Disagreement(AssertionError):
    """A kernel's answer is not the reference's; the message says where and by how much."""


@dataclass(frozen=True)
class Case:
    """One workload of one cell at one compile-time point."""

    cell: Cell
    operator: Operator
    precision: Precision
    workload: Workload
    point: Mapping[str, int]
    score_tolerance: float  # largest error that the precision's scores may have, for operators that rank them

    @property
    def key(self) -> str:
        """What names the case in the journal and in messages."""
        return f"{self.workload.label} {variant_text(self.point)}"

    def __str__(self) -> str:
        return f"{self.cell.id} {self.key}"

    @property
    def dims(self) -> dict[str, int]:
        """Every dim of the call, the operator's own names."""
        return dims_of(self.operator, self.workload, self.point)

    def dtype(self, role: str) -> torch.dtype:
        """What tensors of a role (`query`, `key_value`, `index_key`) are stored in; 4 bits: what they are made of."""
        format = self.precision.roles[role]
        return torch.bfloat16 if format.packed > 1 else getattr(torch, format.storage)

    @property
    def packed(self) -> str:
        """The format of keys of 4 bits; empty for others."""
        return self.precision.keys.name if self.precision.keys.packed > 1 else ""

    @property
    def tolerance(self) -> Mapping[str, float]:
        """Output name -> largest absolute error ever accepted."""
        return self.operator.tolerance[self.precision.name]


def cases(cell: Cell, specs: Specs) -> list[Case]:
    """The cases of a cell, the small workloads first."""
    operator, precision = specs.operators[cell.op], specs.precisions[cell.precision]
    variants = operator.variants.of(precision)
    points = [point for point in variants.ci if all(point[name] in cell.variants[name] for name in variants.names)]
    # The M3 shape, in all its kinds of scales.
    shape = [name for name in variants.names if name not in variants.scaled]
    m3 = [point for point in points if all(point[name] == points[0][name] for name in shape)]
    found = [
        Case(cell, operator, precision, workload, point, _score_tolerance(cell, specs))
        for workload in operator.verify
        for point in (points if workload.points == "ci" else m3)
    ]
    return sorted(found, key=lambda case: max((keys for _, keys in case.workload.sequences), default=0))


def smallest(found: Iterable[Case], points: int = 4) -> list[Case]:
    """The first case with queries and keys at each of a few points: what slow tools can run."""
    firsts: dict[tuple, Case] = {}
    for case in found:
        if any(queries and keys for queries, keys in case.workload.sequences):
            firsts.setdefault(tuple(case.point.items()), case)
    return list(firsts.values())[:points]


def _score_tolerance(cell: Cell, specs: Specs) -> float:
    """The operator's own, or that of index_score."""
    own = specs.operators[cell.op].tolerance[cell.precision]
    scorer = specs.operators.get("index_score")
    if "score" in own or scorer is None or cell.precision not in scorer.tolerance:
        return own.get("score", 0.0)
    return scorer.tolerance[cell.precision]["out"]
