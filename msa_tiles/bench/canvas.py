"""What every chart is drawn on: the figure, its title and notes, axes of context length, and the files it becomes.

Drawn with matplotlib on an opaque ground, so that a light page and a dark one show the same picture. The same rows give
the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msa_tiles.bench import rows
from msa_tiles.bench.rows import Row

GROUND, INK, FAINT, GRID = "#ffffff", "#1f2328", "#656d76", "#d8dee4"
BLUE, ORANGE, GREEN = "#0969da", "#bc4c00", "#1a7f37"
DPI = 150
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "msa_tiles", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
"""Of matplotlib, beside its defaults: bytes that depend on the rows alone, and letters that need no font."""


def figure(title: str, notes: Sequence[str], columns: int, one_scale: bool = True) -> tuple[Any, Sequence[Any]]:
    """A figure: its title, lines of notes below it, empty axes side by side; on `one_scale` or each on its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(11, 5.4), dpi=DPI, facecolor=GROUND)
    FigureCanvasAgg(made)
    grid = made.subplots(1, columns, squeeze=False, sharey=one_scale)
    made.subplots_adjust(left=0.075, right=0.98, top=0.81, bottom=0.11, wspace=0.06 if one_scale else 0.18)
    made.text(0.02, 0.945, title, fontsize=15, fontweight="bold", color=INK)
    for line, note in enumerate(notes):
        made.text(0.02, 0.905 - 0.035 * line, note, fontsize=9.5, color=FAINT)
    for axis in grid[0]:
        axis.set_facecolor(GROUND)
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(which="both", colors=FAINT, length=0)
        axis.xaxis.label.set_color(INK)
        axis.yaxis.label.set_color(INK)
        for side, spine in axis.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(FAINT)
    return made, list(grid[0])


def contexts(axis: Any, lengths: Sequence[int]) -> None:
    """A logarithmic axis of context lengths, with these marked."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, labels=[f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K" for n in lengths])
    axis.set_xlabel("context length, tokens")


def note(card: str, used: Sequence[Row], current: frozenset[str], precision: str = "") -> str:
    """Card, days, and what else a reader must know of the figures."""
    dates = sorted({row["date"] for row in used})
    parts = [card, dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}", precision]
    parts.append("MiniMax M3 shape: 64 query, 4 KV, 4 index heads, 16 blocks of 128 keys")
    if any(rows.is_stale(row, current) for row in used):
        parts.append("some kernels have changed since")
    return " · ".join(part for part in parts if part)


def save(figure: Any, stem: Path) -> list[Path]:
    """Write the figure as PNG and SVG."""
    written = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        path = stem.with_name(f"{stem.name}.{kind}")
        figure.savefig(path, dpi=DPI, metadata=metadata, facecolor=GROUND)
        written.append(path)
    return written
