"""The walk: every cell in each layout of its keys, with what is known of it. Nothing here is typed, all is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msa_tiles import readable
from msa_tiles.commands.support import is_generated
from msa_tiles.matrix.layouts import Layout, of_cell
from msa_tiles.runtime import evidence
from msa_tiles.runtime.accuracy import Accuracy, accuracies
from msa_tiles.runtime.registry import Cell, Registry
from msa_tiles.spec import Specs

STATUSES = ("verified", "simulated", "compiled", "generated", "out of date")
"""From the strongest evidence to none."""
REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """A cell in one layout of its keys and of their scales, with its evidence.

    `status` is "refused" where the cell refuses such calls. `date` and `card` are of the run that verified it as it is
    now, empty elsewhere; `errors` are the worst ones of each output on record, of an earlier kernel too.
    """

    cell: Cell
    group: str
    layout: Layout
    status: str
    date: str
    card: str
    errors: tuple[Accuracy, ...]


def walk(registry: Registry, *, here: bool, cells: Iterable[Cell] | None = None, scales: bool = True) -> list[Entry]:
    """The entries of these cells, all where none are named, in the registry's order.

    `here` counts what this machine knows besides what is on record: which kernels its simulator has run. Without
    `scales`, layouts of scales are not told apart, nor is it asked which of them are refused, which takes seconds.
    """
    verified, compiled = evidence.verified_of(registry), evidence.compiled_of(registry)
    entries = []
    for cell in registry.cells if cells is None else cells:
        ran = evidence.is_verified(cell, verified)
        if cell.tree in registry.outdated or not is_generated(cell):
            status = "out of date"
        elif ran:
            status = "verified"
        elif here and evidence.is_simulated(cell):
            status = "simulated"
        else:
            recorded = evidence.is_recorded(cell, registry.targets[cell.target], compiled)
            status = "compiled" if recorded else "generated"
        record = verified.get(cell.id, {}) if status == "verified" else {}
        errors = tuple(accuracies([cell], verified))
        entries += [
            Entry(
                cell,
                registry.group_of(cell.precision),
                layout,
                REFUSED if layout.refusal else status,
                str(record.get("date", "")),
                str(record.get("card", "")),
                errors,
            )
            for layout in of_cell(cell, registry, scales)
        ]
    return entries


def groups_of(entries: Iterable[Entry], specs: Specs | None = None) -> list[str]:
    """The groups of precisions that the entries have, in the order of the specs."""
    found = {entry.group for entry in entries}
    known = readable.specs() if specs is None else specs
    ordered = dict.fromkeys(each.group for each in known.precisions.values())
    # Those behind are of trees whose specs have mistakes.
    return [*(group for group in ordered if group in found), *sorted(found - ordered.keys())]
