"""A chart of the time of a layer's step, indexer and attention, against context length: vLLM's operators and ours.

Both are rows of `server_prefill` and `server_decode`, in which both get vLLM's tensors in one run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_tiles.bench import canvas, labels
from msa_tiles.bench.canvas import BLUE, FAINT, GROUND, INK, ORANGE
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.points import beside, context_of, first_of
from msa_tiles.bench.rows import Row

PREFILL, DECODE = "server_prefill", "server_decode"
PANELS = {
    PREFILL: ("Prefill of a prompt", "milliseconds", 1.0),
    DECODE: ("Decode, one query of each request", "microseconds", 1e3),
}
"""Of each operator the title, the unit, and how many of it a millisecond has."""
MARKERS = "osD^v"


@dataclass(frozen=True)
class Point:
    """Milliseconds of both at a context length, of one run."""

    context: int
    ours: float
    theirs: float
    row: Row

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


Lines = Mapping[int, Sequence[Point]]
"""Points in order of context, by the number of requests."""


def lines(results: Collection[Row], op: str, group: str, current: frozenset[str]) -> Lines:
    """The lines of an operator in a group's first precision, of cases with a time of vLLM's."""
    found: dict[int, list[Point]] = {}
    for label in BENCHMARKS[op].labels:
        if op == PREFILL and not label.startswith("prefill"):
            continue  # the last queries of a prompt
        row = beside(results, "vllm", op, label, first_of(op, group), current)
        if row is not None:
            point = Point(context_of(op, label), row["ms"], row["baselines"]["vllm"], row)
            found.setdefault(getattr(BENCHMARKS[op].find(label), "batch", 1), []).append(point)
    ordered = {key: sorted(found[key], key=lambda point: point.context) for key in sorted(found)}
    return {key: points for key, points in ordered.items() if len(points) > 1}


def figure(series: Mapping[str, Lines], note: str) -> Any:
    """Prefill beside decode, each on a scale of its own."""
    notes = [note, "one layer's indexer and attention on vLLM's caches; numbers: vLLM's time by that of msa_tiles"]
    made, axes = canvas.figure("Time of a layer in vLLM", notes, columns=2, one_scale=False)
    for axis, (op, (title, unit, scale)) in zip(axes, PANELS.items(), strict=True):
        axis.set_title(title, loc="left", fontsize=11.5, color=INK)
        axis.set_ylabel(unit)
        if series[op]:
            _panel(made, axis, series[op], scale)
        else:
            axis.text(0.5, 0.5, "not timed", transform=axis.transAxes, ha="center", color=FAINT)
    return made


def _panel(made: Any, axis: Any, found: Lines, scale: float) -> None:
    points = [point for line in found.values() for point in line]
    times = [scale * time for point in points for time in (point.ours, point.theirs)]
    lengths = sorted({point.context for point in points})
    canvas.contexts(axis, lengths)
    axis.set_yscale("log")
    axis.set_xlim(lengths[0] / 1.5, lengths[-1] * (2.6 if len(found) > 1 else 1.8))
    axis.set_ylim(min(times) / 2, max(times) * 3)
    axis.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axis.minorticks_off()
    taken = []
    for (requests, line), marker in zip(found.items(), MARKERS, strict=False):
        for name, colour, filled in (("vLLM's Triton operators", ORANGE, False), ("msa_tiles", BLUE, True)):
            ends = [(point.context, scale * (point.ours if filled else point.theirs)) for point in line]
            face = colour if filled else GROUND
            style = {"color": colour, "marker": marker, "markersize": 6, "markerfacecolor": face, "linewidth": 2}
            axis.plot(*zip(*ends, strict=True), label=name if requests == min(found) else None, zorder=3, **style)
            taken += labels.boxes_along(axis, ends)
    axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK, handlelength=2.8)
    for requests, line in found.items():
        if len(found) > 1:
            words = "1 request" if requests == 1 else f"{requests} requests"
            at = (line[-1].context, scale * line[-1].theirs)
            labels.place(made, axis, words, at, taken, fontsize=9.5, color=INK, zorder=4)
        for point in line:
            at = (point.context, scale * point.ours)
            style = {"fontsize": 9, "fontweight": "bold", "color": BLUE, "zorder": 4}
            labels.place(made, axis, f"{point.ratio:.{1 if point.ratio >= 2 else 2}f}x", at, taken, **style)
