"""Writes the support table of README.md from `generated/`: `python perf/support_table.py [--check]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from msa_tiles.commands.support import is_generated
from msa_tiles.runtime import evidence
from msa_tiles.runtime.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN = "<!-- support table: written by perf/support_table.py -->\n"
END = "<!-- end of support table -->\n"


def table(registry: Registry) -> str:
    """Markdown rows: what is generated, and where it was verified. `compiled` belongs to a machine, not to a page."""
    verified = evidence.read_verified(registry.directory)
    lines = ["| operator | DSL | target | precision | verified on |", "|---|---|---|---|---|"]
    for cell in registry.cells:
        where = "not yet"
        if is_generated(cell) and evidence.is_verified(cell, verified):
            entry = verified[cell.id]
            where = f"{entry['card']}, {entry['date']}"
        group = registry.group_of(cell.precision)
        precision = group.upper() if group == cell.precision else f"{group.upper()}: {cell.precision}"
        lines.append(f"| `{cell.op}` | {cell.dsl} | {cell.target} | {precision} | {where} |")
    return "\n".join(lines) + "\n"


def updated(text: str, rows: str) -> str:
    """`text` with `rows` between the markers. Raises ValueError when a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} lacks the line {(END if begin else BEGIN).strip()!r}")
    return f"{before}{BEGIN}{rows}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the support table of README.md from generated/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the table is out of date")
    args = parser.parse_args()
    present = README.read_text(encoding="utf-8")
    wanted = updated(present, table(Registry.read(ROOT / "generated")))
    if args.check:
        if present != wanted:
            sys.stderr.write("README.md: the support table is out of date; run `python perf/support_table.py`\n")
        return int(present != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
