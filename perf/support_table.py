"""Writes README.md's tables of support and accuracy from `generated/`: `python perf/support_table.py [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msa_tiles.commands.support import is_generated
from msa_tiles.runtime import evidence
from msa_tiles.runtime.accuracy import accuracies
from msa_tiles.runtime.registry import Cell, Registry

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DSL_NAMES = {"tilelang": "TileLang", "cutedsl": "CuTe DSL"}
EARLIER = "\\*"  # beside the error of a kernel that has changed since


def table(registry: Registry) -> str:
    """Markdown: a row for each operator, a column for each group of precisions; by target what the evidence shows.

    The evidence is what is on record: `simulated`, and what lies in a cache, belong to a machine, not to a page.
    """
    verified, compiled = evidence.read_verified(registry.directory), evidence.read_compiled(registry.directory)

    def status(cell: Cell) -> str:
        if not is_generated(cell):
            return "out of date"
        if evidence.is_verified(cell, verified):
            return f"verified ({verified[cell.id]['date']})"
        on_record = evidence.is_recorded(cell, registry.targets[cell.target], compiled)
        return "compiled" if on_record else "generated"

    groups = list(dict.fromkeys(registry.group_of(cell.precision) for cell in registry.cells))
    lines = [
        f"| operator | {' | '.join(group.upper() for group in groups)} |",
        f"|---{'|---' * len(groups)}|",
    ]
    for op in dict.fromkeys(cell.op for cell in registry.cells):
        columns = []
        for group in groups:
            cells = [cell for cell in registry.of(op) if registry.group_of(cell.precision) == group]
            columns.append("<br>".join(_by_target(cells, group, status)))
        lines.append(f"| `{op}` | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _by_target(cells: Sequence[Cell], group: str, status: Callable[[Cell], str]) -> Iterator[str]:
    """`sm90: verified (date)`, with the DSLs where they differ or where one alone has the kernel."""
    places = dict.fromkeys(
        (cell.precision, cell.target) for cell in sorted(cells, key=lambda cell: cell.target != "sm90")
    )
    for precision, target in places:
        found = {cell.dsl: status(cell) for cell in cells if (cell.precision, cell.target) == (precision, target)}
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
