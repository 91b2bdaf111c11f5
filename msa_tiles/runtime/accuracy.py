"""What `verified.json` says of the errors of a cell: by output, metric and what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_tiles.runtime.evidence import VERIFIED, is_verified, verified_entry
from msa_tiles.runtime.registry import Cell, Registry

# The metric of an entry that keeps one number for all outputs, as `verify` wrote them before it named outputs.
UNNAMED = ("all outputs", "absolute")
EQUAL = "equal"


@dataclass(frozen=True)
class Accuracy:
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


def accuracies_of(cell: Cell, registry: Registry) -> list[Accuracy]:
    """The errors of a cell that are on record. Raises ValueError as `accuracies` does."""
    entry = verified_entry(cell, registry)
    return accuracies([cell], {cell.id: entry} if entry else {})


def in_words(found: Sequence[Accuracy], tolerance: Mapping[str, float]) -> str:
    """The errors of one cell in a line; where none are on record, what its spec accepts, by output."""
    if not found:
        accepted = ", ".join(f"{output} {most:g}" for output, most in tolerance.items())
        return f"no errors on record; accepted: {accepted}"
    equal = [each.output for each in found if each.metric == EQUAL]
    told = [
        f"{each.output} {each.worst:.2g}"
        + ("" if each.metric == UNNAMED[1] else f" ({each.metric})")
        + ("" if each.accepted is None else f", accepted {each.accepted:g}")
        for each in found
        if each.metric != EQUAL
    ]
    told += [f"{', '.join(equal)} equal"] if equal else []
    when = f"{found[0].card}, {found[0].date}" + ("" if found[0].current else ", of other code")
    return f"worst errors on record ({when}): {'; '.join(told)}"


def _errors(entry: Mapping[str, Any]) -> Sequence[tuple[str, float, str, float | None]]:
    if "errors" not in entry:
        return [(UNNAMED[0], float(entry["worst_error"]), UNNAMED[1], None)]
    return [
        (output, float(error["worst"]), str(error["metric"]), float(error["accepted"]))
        for output, error in entry["errors"].items()
    ]
