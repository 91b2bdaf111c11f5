"""The matrix as rows of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msa_tiles.matrix.selection import Cost
from msa_tiles.matrix.torch_errors import torch_error
from msa_tiles.matrix.walk import Entry

HEADING = ("operator", "DSL", "target", "precision", "layout", "status", "worst error", "accepted", "torch", "from")
LEGEND = (
    "worst error: largest of the outputs, with the one it is of, as `msa-tiles verify` measures it (`from`: where;\n"
    "* of an earlier one); accepted: the tolerance of the spec; torch: what the same computation in bfloat16 on the\n"
    "dequantised inputs is off by, on one drawn case on the CPU; simulated: by this machine's simulator"
)
COSTS = ("precision", "inputs", "blocks as float32", "attention kept", "by float32's choice")

# cell id -> output -> worst, accepted, metric, of a run on this machine.
Ran = Mapping[str, Mapping[str, tuple[float, float, str]]]


def describe(entry: Entry, ran: Ran, card: str) -> dict[str, Any]:
    """An entry as JSON. Errors come from a run on this machine where there is one, else from the record."""
    cell = entry.cell
    if cell.id in ran:
        errors = [
            {"output": output, "worst": worst, "accepted": accepted, "metric": metric, "from": card, "current": True}
            for output, (worst, accepted, metric) in ran[cell.id].items()
        ]
    else:
        errors = [
            {
                "output": error.output,
                "worst": error.worst,
                "accepted": error.accepted,
                "metric": error.metric,
                "from": f"{error.card}, {error.date}",
                "current": error.current,
            }
            for error in entry.errors
        ]
    return {
        "id": cell.id,
        "op": cell.op,
        "dsl": cell.dsl,
        "target": cell.target,
        "precision": cell.precision,
        "group": entry.group,
        "layout": entry.layout,
        "status": entry.status,
        "errors": errors,
        "torch_error": torch_error(cell.op, cell.precision),
    }


def lines(rows: Iterable[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Rows of a table, the heading first: of each entry the output that is nearest to what is accepted."""
    table: list[Sequence[str]] = [HEADING]
    for row in rows:
        error = max(row["errors"], key=_used, default=None)
        torch_words = "" if row["torch_error"] is None else f"{row['torch_error']:.2g}"
        shown = ("", "", torch_words, "")
        if error is not None:
            mark = "" if error["current"] else "*"
            accepted = "" if error["accepted"] is None else f"{error['accepted']:g}"
            shown = (f"{error['worst']:.2g}{mark} {error['output']}", accepted, torch_words, error["from"])
        table.append((*(row[name] for name in ("op", "dsl", "target", "precision", "layout", "status")), *shown))
    return table


def _used(error: Mapping[str, Any]) -> tuple[float, float]:
    """How much of its tolerance an error uses; where 0 is all that is accepted, the error itself counts."""
    accepted = error["accepted"]
    return (error["worst"] / accepted if accepted else error["worst"], error["worst"])


def cost_lines(costs: Iterable[Cost]) -> list[Sequence[str]]:
    """Rows of a table of what precisions cost in selection, the heading first."""
    shares = ("overlap", "mass", "mass_of_float32")
    rows = [(cost.precision, cost.kind, *(f"{100 * getattr(cost, name):.2f}%" for name in shares)) for cost in costs]
    return [COSTS, *rows]
