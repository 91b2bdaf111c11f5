"""Writes README.md's tables of support and accuracy from `generated/`: `python perf/support_table.py [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msa_tiles.matrix.walk import Entry, groups_of, walk
from msa_tiles.runtime import evidence
from msa_tiles.runtime.accuracy import accuracies
from msa_tiles.runtime.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DSL_NAMES = {"tilelang": "TileLang", "cutedsl": "CuTe DSL"}
EARLIER = "\\*"  # beside the error of a kernel that has changed since


def table(registry: Registry) -> str:
    """Markdown: a row for each operator, a column for each group of precisions; by target what the evidence shows.

    It is the walk of `msa-tiles matrix`. The evidence is what is on record: `simulated`, and what lies in a
    cache, belong to a machine, not to a page.
    """
    entries = walk(registry, here=False, scales=False)
    groups = groups_of(entries)
    lines = [
        f"| operator | {' | '.join(group.upper() for group in groups)} |",
        f"|---{'|---' * len(groups)}|",
    ]
    for op in dict.fromkeys(entry.cell.op for entry in entries):
        columns = []
        for group in groups:
            some = [entry for entry in entries if (entry.cell.op, entry.group) == (op, group)]
            columns.append("<br>".join(_by_target(some, group)))
        lines.append(f"| `{op}` | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _by_target(entries: Sequence[Entry], group: str) -> Iterator[str]:
    """`sm90: verified (date)`, with the DSLs where they differ or where one alone has the kernel."""
    places = dict.fromkeys(
        (entry.cell.precision, entry.cell.target)
        for entry in sorted(entries, key=lambda entry: entry.cell.target != "sm90")
    )
    for place in places:
        precision, target = place
        found = {
            entry.cell.dsl: f"{entry.status} ({entry.date})" if entry.date else entry.status
            for entry in entries
            if (entry.cell.precision, entry.cell.target) == place
        }
        name = target if precision == group else f"{precision}, {target}"
        if len(found) == len(DSL_NAMES) and len(set(found.values())) == 1:
            yield f"{name}: {next(iter(found.values()))}"
        else:
            yield f"{name}: {', '.join(f'{DSL_NAMES[dsl]} {what}' for dsl, what in found.items())}"


def accuracy(registry: Registry) -> str:
    """Markdown: a row for each output of an operator and precision on a target, a column for each DSL."""
    cells = {cell.id: cell for cell in registry.cells}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for error in accuracies(registry.cells, evidence.read_verified(registry.directory)):
        cell = cells[error.cell]
        accepted = "" if error.accepted is None else f"{error.accepted:g}"
        card = error.card.removeprefix("NVIDIA ").partition(" ")[0]
        row = (cell.op, cell.precision, cell.target, error.output, error.metric, accepted)
        found.setdefault(row, {})[cell.dsl] = f"{error.worst:.2g} on {card}{'' if error.current else EARLIER}"
    names = ("operator", "precision", "target", "output", "error", "accepted", *DSL_NAMES.values())
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for (op, *row), errors in sorted(found.items()):
        lines.append(f"| {' | '.join((f'`{op}`', *row, *(errors.get(dsl, '') for dsl in DSL_NAMES)))} |")
    return "\n".join(lines) + "\n"


def updated(text: str, name: str, rows: str) -> str:
    """`text` with `rows` between the markers of that table. Raises ValueError when a marker is missing."""
    first, last = f"<!-- {name} table: written by perf/support_table.py -->\n", f"<!-- end of {name} table -->\n"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{README} lacks the line {(last if begin else first).strip()!r}")
    return f"{before}{first}{rows}{last}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes the tables of support and accuracy in README.md from generated/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when one is out of date")
    args = parser.parse_args()
    present = README.read_text(encoding="utf-8")
    registry = Registry.read(ROOT / "generated")
    wanted = updated(updated(present, "support", table(registry)), "accuracy", accuracy(registry))
    if args.check:
        if present != wanted:
            sys.stderr.write("README.md: its tables are out of date; run `python perf/support_table.py`\n")
        return int(present != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
