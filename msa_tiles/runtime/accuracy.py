"""What `verified.json` says of the errors of a cell: by output, metric and what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msa_tiles.runtime.evidence import VERIFIED, is_verified
from msa_tiles.runtime.registry import Cell

# The metric of an entry that keeps one number for all outputs, as `verify` wrote them before it named outputs.
UNNAMED = ("all outputs", "absolute")


class Accuracy(NamedTuple):
    """The worst error of one output of a cell, against the reference in float32 on the same (dequantised) inputs.

    `metric` is ``absolute``, ``absolute / scale`` (over the largest scale of the token or head, where keys and values
    have scales), ``equal`` (every element is) or ``times torch's`` (over the error that torch makes on the same inputs
    in bfloat16); `accepted` is None where it is not on record. `current` says whether the kernel has the code that was
    measured.
    """

    cell: str
    output: str
    worst: float
    metric: str
    accepted: float | None
    card: str
    date: str
    current: bool


def accuracies(cells: Iterable[Cell], verified: Mapping[str, Mapping[str, Any]]) -> list[Accuracy]:
    """The errors of these cells that are on record, cell by cell.

    Raises ValueError for an entry that `msa-tiles verify` has not written.
    """
    found = []
    for cell in cells:
        if (entry := verified.get(cell.id)) is None:
            continue
        try:
            rows = _errors(entry)
            known = (str(entry["card"]), str(entry["date"]), is_verified(cell, verified))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{VERIFIED}: the entry of {cell.id} is not what `msa-tiles verify` writes; run that again"
            ) from error
        found += [Accuracy(cell.id, *row, *known) for row in rows]
    return found


def _errors(entry: Mapping[str, Any]) -> Sequence[tuple[str, float, str, float | None]]:
    if "errors" not in entry:
        return [(UNNAMED[0], float(entry["worst_error"]), UNNAMED[1], None)]
    return [
        (output, float(error["worst"]), str(error["metric"]), float(error["accepted"]))
        for output, error in entry["errors"].items()
    ]
