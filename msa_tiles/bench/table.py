"""Rows of results as a table that people read in a terminal, one line for each case."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from msa_tiles.bench import gates, points, rows
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.precisions import group, halves
from msa_tiles.bench.rows import Row
from msa_tiles.spec.model import DSLS

FIGURES = (*DSLS, "best peer", "ratio", "floor", "share")
HEADING = ("op", "case", "prec", *FIGURES, "gate")
STALE = "*"
ABOUT = 1.1  # times as long, or as short, as our fastest row: then a row beside a peer speaks for it
LEGEND = (
    "times in milliseconds; ratio: the best peer's time by that of our faster DSL in the same run,\n"
    "which is the last one with that peer in which ours took within a tenth of what it takes now;\n"
    "share: the roofline's time by ours; gate: the ratio to a named peer that is aimed at, and whether it is reached"
)
STALE_LEGEND = f"{STALE} timed with kernels that have changed since"


def lines(results: Iterable[Row], current: frozenset[str]) -> list[Sequence[str]]:
    """The table, the heading first; `current` are the digests of the kernels as they are now."""
    results = list(results)
    latest = rows.latest(results)
    of_case: dict[tuple[str, str, str], list[Row]] = {}
    for row in results:
        of_case.setdefault((row["op"], row["case"], row["precision"]), []).append(row)
    table: list[Sequence[str]] = [HEADING]
    named = labels((op, precision) for op, _, precision in of_case)
    for op, case, precision in sorted(of_case, key=_place):
        mine = {dsl: latest[op, case, precision, dsl] for dsl in DSLS if (op, case, precision, dsl) in latest}
        table.append(
            (
                op,
                case,
                named[op, precision],
                *_figures(mine, of_case[op, case, precision], current),
                _gate(op, case, precision, latest, current),
            )
        )
    return table


def labels(timed: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What the table calls the precision of each operator: its groups, where no other of the operator has the same."""
    alike: dict[tuple[str, str], set[str]] = {}
    pairs = list(timed)
    for op, precision in pairs:
        alike.setdefault((op, _groups(precision)), set()).add(precision)
    return {
        (op, precision): _groups(precision) if len(alike[op, _groups(precision)]) == 1 else precision
        for op, precision in pairs
    }


def legend(table: Sequence[Sequence[str]]) -> str:
    """What the columns mean, and the mark of stale figures where one is in the table."""
    marked = any(cell.endswith(STALE) for line in table for cell in line)
    return f"{LEGEND}\n{STALE_LEGEND}" if marked else LEGEND


def _groups(precision: str) -> str:
    """The group of a precision; those of both halves of a pair where they differ."""
    return "+".join(dict.fromkeys(group(half) for half in halves(precision)))


def _figures(mine: Mapping[str, Row], earlier: Iterable[Row], current: frozenset[str]) -> Iterable[str]:
    for dsl in DSLS:
        if dsl in mine:
            yield _ms(mine[dsl]["ms"]) + (STALE if rows.is_stale(mine[dsl], current) else "")
        else:
            yield "-"
    fastest = min(rows.fresh(mine.values(), current), key=lambda row: row["ms"])
    ratio, peer, row = min(_ratios(fastest, earlier, current), default=(None, "", fastest), key=operator.itemgetter(0))
    yield from ("-", "-") if ratio is None else (f"{_ms(row['baselines'][peer])} {peer}", f"{ratio:.2f}x")
    floor = fastest["floor_ms"]
    yield from ("-", "-") if floor is None else (_ms(floor), f"{100 * floor / fastest['ms']:.0f}%")


def _ratios(fastest: Row, earlier: Iterable[Row], current: frozenset[str]) -> Iterable[tuple[float, str, Row]]:
    """Each peer's, with the newest row beside it that is about as fast: a run may have left peers out."""
    alike = [row for row in earlier if fastest["ms"] / ABOUT <= row["ms"] <= ABOUT * fastest["ms"]]
    for peer in dict.fromkeys(peer for row in alike for peer in row["baselines"]):
        row = points.beside(alike, peer, fastest["op"], fastest["case"], fastest["precision"], current)
        if row is not None:
            yield row["baselines"][peer] / row["ms"], peer, row


def _gate(op: str, case: str, precision: str, latest: Mapping[rows.Key, Row], current: frozenset[str]) -> str:
    gate = gates.of(op, case, precision)
    if gate is None:
        return ""
    ratio, words = gates.best(gate, latest, current)
    aim = f"{gate.goal if gate.ratio is None else gate.ratio:g}x {words}"
    return aim if ratio is None else f"{aim} ({gates.ratio_text(ratio, gate, 1 if ratio >= 10 else 2)})"


def _ms(value: float) -> str:
    """At least three significant digits, down to a hundredth of a microsecond."""
    if value >= 10:
        return f"{value:.2f}"
    return f"{value:.4f}" if value >= 0.01 else f"{value:.5f}"


def _place(key: tuple[str, str, str]) -> tuple[int, int, str, str]:
    """Operators and cases in the order in which they run; unknown ones last."""
    op, case, precision = key
    ops = list(BENCHMARKS)
    labels = BENCHMARKS[op].labels if op in BENCHMARKS else ()
    return (
        ops.index(op) if op in ops else len(ops),
        labels.index(case) if case in labels else len(labels),
        case,
        precision,
    )
