"""The matrix as rows of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msa_tiles.matrix import values
from msa_tiles.matrix.selection import Cost
from msa_tiles.matrix.torch_errors import torch_error
from msa_tiles.matrix.walk import Entry
from msa_tiles.verify.compare import TIMES

HEADING = (
    "operator", "DSL", "target", "precision", "layout", "status", "worst error", "metric", "accepted", "beside torch",
    "torch", "from",
)  # fmt: skip
LEGEND = (
    "layout: how the keys lie that are read or written, - where there are none; in `pages` of any size;\n"
    "worst error: of the output that is nearest to what is accepted of it, with its name, as `msa-tiles verify`\n"
    "measures it (`from`: where; * of an earlier one); `support --accuracy` has all outputs; metric: absolute, or\n"
    "absolute / scale, over the largest scale of the token or head; accepted: the tolerance of the spec, in that\n"
    "metric; beside torch: the error in times of that which the same computation in bfloat16 makes on the same\n"
    "inputs, of which 2 are accepted; torch: what that is off by on one drawn case on the CPU; simulated: by this\n"
    "machine's simulator; refused: by the operator, for the reason of that number below; interleaved: scales of\n"
    "values, above linear ones of keys"
)
VALUE_COSTS = ("precision", "inputs", "attention off by")
COSTS = ("precision", "inputs", "blocks as float32", "attention kept", "by float32's choice")

# cell id and how keys lie -> output -> worst, accepted, metric, of a run on this machine.
Ran = Mapping[tuple[str, str], Mapping[str, tuple[float, float, str]]]


def describe(entry: Entry, ran: Ran, card: str) -> dict[str, Any]:
    """An entry as JSON. Errors come from a run on this machine where there is one, else from the record."""
    cell = entry.cell
    here = ran.get((cell.id, entry.layout.keys))
    if entry.layout.refusal:
        errors = []
    elif here is not None:
        errors = [
            {"output": output, "worst": worst, "accepted": accepted, "metric": metric, "from": card, "current": True}
            for output, (worst, accepted, metric) in here.items()
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
        "layout": str(entry.layout),
        "status": entry.status,
        "refusal": entry.layout.refusal or None,
        "errors": errors,
        "torch_error": torch_error(cell.op, cell.precision),
    }


def lines(rows: Iterable[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Rows of a table, the heading first: of each entry the output that is nearest to what is accepted.

    A refused one has the number of its reason among `refusals`, and no figures: nothing runs.
    """
    rows = list(rows)
    numbers = {reason: number for number, reason in enumerate(_reasons(rows), start=1)}
    table: list[Sequence[str]] = [HEADING]
    for row in rows:
        error = max((error for error in row["errors"] if error["metric"] != TIMES), key=_used, default=None)
        times = max((error["worst"] for error in row["errors"] if error["metric"] == TIMES), default=None)
        of_torch = (
            "" if times is None else f"{times:.2g}",
            "" if row["torch_error"] is None else f"{row['torch_error']:.2g}",
        )
        shown: tuple[str, ...] = ("", "", "", *of_torch, "")
        if error is not None:
            mark = "" if error["current"] else "*"
            accepted = "" if error["accepted"] is None else f"{error['accepted']:g}"
            worst = f"{error['worst']:.2g}{mark} {error['output']}"
            shown = (worst, error["metric"], accepted, *of_torch, error["from"])
        status = row["status"]
        if row["refusal"] is not None:
            status, shown = f"{status} ({numbers[row['refusal']]})", ("",) * len(shown)
        table.append((*(row[name] for name in ("op", "dsl", "target", "precision", "layout")), status, *shown))
    return table


def _used(error: Mapping[str, Any]) -> tuple[float, float]:
    """How much of its tolerance an error uses; where 0 is all that is accepted, the error itself counts."""
    accepted = error["accepted"]
    return (error["worst"] / accepted if accepted else error["worst"], error["worst"])


def refusals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """One sentence for each reason of a refusal, numbered, with the layouts of which operators it is about."""
    return [
        f"refused ({number}): {reason}: {', '.join(places)}"
        for number, (reason, places) in enumerate(_reasons(rows).items(), start=1)
    ]


def _reasons(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The reasons of refusals, each with the layouts of operators that are refused for it."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["refusal"] is not None:
            found.setdefault(row["refusal"], {})[f"{row['op']} ({row['layout']})"] = None
    return {reason: list(places) for reason, places in found.items()}


def cost_lines(costs: Iterable[Cost]) -> list[Sequence[str]]:
    """Rows of a table of what precisions cost in selection, the heading first."""
    shares = ("overlap", "mass", "mass_of_float32")
    rows = [(cost.precision, cost.kind, *(f"{100 * getattr(cost, name):.2f}%" for name in shares)) for cost in costs]
    return [COSTS, *rows]


def value_lines(costs: Iterable[values.Cost]) -> list[Sequence[str]]:
    """Rows of a table of what formats of keys and values cost, the heading first."""
    return [VALUE_COSTS, *((cost.precision, cost.kind, f"{100 * cost.error:.2f}%") for cost in costs)]
