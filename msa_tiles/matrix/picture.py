"""The matrix as a picture: the evidence of every cell, and what precisions cost in selection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msa_tiles.matrix.selection import KINDS, Cost
from msa_tiles.matrix.walk import REFUSED, STATUSES, Entry

COLOURS = {
    "verified": "#1a7f37",
    "simulated": "#6fa8dc",
    "compiled": "#d4a72c",
    "generated": "#c8ccd0",
    "out of date": "#cf222e",
}
NAMES = {"tilelang": "TileLang", "cutedsl": "CuTe DSL"}


def draw(path: Path, entries: Sequence[Entry], costs: Sequence[Cost]) -> None:
    """Write a PNG: a square for each operator, target, DSL and precision; beside it bars of the selection's costs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    entries = [entry for entry in entries if entry.status != REFUSED]
    ops = list(dict.fromkeys(entry.cell.op for entry in entries))
    columns = sorted({(entry.cell.target, entry.cell.dsl, entry.cell.precision) for entry in entries})
    figure = Figure(figsize=(7 + 0.34 * len(columns) + 4, 2.6 + 0.3 * max(len(ops), 12)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    # Several algorithms of one cell: the strongest evidence of them.
    strongest: dict[tuple[int, int], str] = {}
    for entry in entries:
        place = columns.index((entry.cell.target, entry.cell.dsl, entry.cell.precision)), ops.index(entry.cell.op)
        strongest[place] = min(strongest.get(place, STATUSES[-1]), entry.status, key=STATUSES.index)
    for (x, y), status in strongest.items():
        left.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, color=COLOURS[status]))
    left.set_xlim(-0.5, len(columns) - 0.5)
    left.set_ylim(len(ops) - 0.5, -0.5)
    left.set_yticks(range(len(ops)), labels=ops, fontsize=9)
    words = [f"{target} {NAMES[dsl]} {precision}" for target, dsl, precision in columns]
    left.set_xticks(range(len(columns)), labels=words, rotation=90, fontsize=8)
    left.set_title("evidence", loc="left")
    patches = [Patch(color=COLOURS[status], label=status) for status in STATUSES if status in strongest.values()]
    left.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1.04), ncols=len(patches), frameon=False)
    _bars(right, costs) if costs else right.set_axis_off()
    figure.savefig(path, dpi=110)


def _bars(axes: Any, costs: Sequence[Cost]) -> None:
    precisions = list(dict.fromkeys(cost.precision for cost in costs))
    height = 0.8 / len(KINDS)
    for number, kind in enumerate(KINDS):
        some = {cost.precision: cost for cost in costs if cost.kind == kind}
        at = [precisions.index(name) + (number - 1) * height for name in some]
        axes.barh(at, [1 - cost.overlap for cost in some.values()], height, label=kind)
    axes.set_yticks(range(len(precisions)), labels=precisions, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("share of float32's blocks that are not chosen")
    axes.set_title("cost in selection", loc="left")
    axes.legend(frameon=False)
