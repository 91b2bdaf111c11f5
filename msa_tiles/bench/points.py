"""What charts against context length read of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msa_tiles.bench import rows
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.precisions import group as group_of
from msa_tiles.bench.rows import Row
from msa_tiles.spec.model import DSLS


def first_of(op: str, group: str) -> str | None:
    """The first precision of a group that an operator is timed in."""
    return next((name for name in BENCHMARKS[op].precisions if group_of(name) == group), None)


def fastest(
    latest: Mapping[rows.Key, Row], op: str, label: str, precision: str | None, current: frozenset[str]
) -> Row | None:
    """The row of our faster DSL in a case and a precision; None where there is none."""
    mine = [latest[key] for dsl in DSLS if (key := (op, label, precision or "", dsl)) in latest]
    return min(rows.fresh(mine, current), key=lambda row: row["ms"], default=None)


def beside(
    results: Iterable[Row], peer: str, op: str, label: str, precision: str | None, current: frozenset[str]
) -> Row | None:
    """The row of our faster DSL in a case, each one's newest of a run in which the peer was timed too; None where there
    is none. Its figures are of that run, and so is their ratio.
    """
    return fastest(rows.latest(row for row in results if peer in row["baselines"]), op, label, precision, current)


def context_of(op: str, label: str) -> int:
    """Keys of a request."""
    case = BENCHMARKS[op].find(label)
    return case.keys if hasattr(case, "keys") else case.num_k
