"""Writes perf/STANDINGS.md from the rows in `perf/results`: `python perf/standings.py [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from msa_tiles.bench import gates, rows, table
from msa_tiles.bench.rows import Row

HERE = Path(__file__).resolve().parent
PAGE = HERE / "STANDINGS.md"
HEAD = """# Standings

Written by `python perf/standings.py` from `perf/results`: the last row of each case on each card. Times are
milliseconds, sustained over a second in both orders with the peers in the same run. *Ratio* is the best peer's time by
that of our faster DSL in one run: the last one with that peer in which ours took within a tenth of its last time, since
runs leave peers out. *Share* is the roofline's time by ours. Rows are not changed when kernels change: `msa-tiles bench
--from FILE --gates` marks those that have gone stale. [lessons](lessons/README.md) say what limits what,
[NOTES.md](NOTES.md) what was tried.
"""


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table, the heading first."""
    heading, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, ["---"] * len(heading), *body)) + "\n"


def dated(lines: Sequence[Sequence[str]], latest: dict[rows.Key, Row]) -> list[Sequence[str]]:
    """The lines of `bench.table` with the date of each case's newest row."""
    found: list[Sequence[str]] = [(*lines[0], "date")]
    called = table.labels((op, precision) for op, _, precision, _ in latest)
    for line in lines[1:]:
        named = ((op, case, called[op, precision], row) for (op, case, precision, _), row in latest.items())
        dates = [row["date"] for *names, row in named if names == list(line[:3])]
        found.append((*line, max(dates)))
    return found


def page(results: Path) -> str:
    """The whole page."""
    parts = [HEAD]
    for file in sorted(results.glob("*.jsonl")):
        found = list(rows.read(file))
        latest = rows.latest(found)
        # Every row counts as current: whether it is stale depends on the kernels, and this page on the rows alone.
        digests = frozenset(digest for row in found for digest in row["digest"].split("+"))
        parts += [f"## {found[-1]['card']}\n", "### Gates\n", markdown(gates.report(latest, digests))]
        parts += ["### Cases\n", markdown(dated(table.lines(found, digests), latest))]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes perf/STANDINGS.md from perf/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    args = parser.parse_args()
    wanted = page(HERE / "results")
    if args.check:
        present = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if present != wanted:
            sys.stderr.write("perf/STANDINGS.md is out of date; run `python perf/standings.py`\n")
        return int(present != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
