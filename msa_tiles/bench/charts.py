"""Charts of results: speed-up against context length, and every operator under the card's roofline.

Drawn with matplotlib on an opaque ground, so that a page in light or dark shows the same picture; the same rows give the
same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_tiles.bench import cases, rows
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.rows import Row
from msa_tiles.spec.model import DSLS, Device
from msa_tiles.spec.work import Work

GROUND, INK, FAINT, GRID = "#ffffff", "#1f2328", "#656d76", "#d8dee4"
BLUE, ORANGE, GREEN = "#0969da", "#bc4c00", "#1a7f37"
DSL_STYLES = {"tilelang": ("TileLang", BLUE, "o"), "cutedsl": ("CuTe DSL", ORANGE, "D")}
PRECISIONS = {"bf16": "BF16", "fp8": "FP8"}
ELEMENTS = {"bfloat16": "BF16 tensor cores", "float8_e4m3fn": "FP8 tensor cores", "float32": "FP32"}

DENSE = {"prefill": ("fa4", "cudnn"), "msa_decode": ("fa4", "dense_bytes")}
PEER_NAMES = {
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN attention",
    "dense_bytes": "reading all keys and values at copy speed",
}
SHOWN = (
    "prefill_128k_u",
    "prefill_32k",
    "decode_128k_b32",
    "prefill_32k_u",
    "chunk8k_1m_u",
    "prefill_8k_u",
    "prefill_4k",
)
"""Which case stands for an operator in the roofline: the first of these that was timed."""


def available() -> bool:
    """Whether matplotlib can be imported."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(results: Iterable[Row], directory: Path) -> list[Path]:
    """Write the charts that the rows suffice for, each as PNG and SVG; a set of its own for each card."""
    results = list(results)
    directory.mkdir(parents=True, exist_ok=True)
    cards = sorted({row["card"] for row in results})
    current = rows.digests()
    written: list[Path] = []
    for card in cards:
        latest = rows.latest(row for row in results if row["card"] == card)
        suffix = "" if len(cards) == 1 else "_" + rows.file_name(card).removesuffix(".jsonl")
        for precision in PRECISIONS:
            tail = suffix if precision == "bf16" else f"_{precision}{suffix}"
            series = {op: speed_ups(latest, op, precision) for op in DENSE}
            if any(len(points) > 1 for one in series.values() for points in one.values()):
                used = [row for row in latest.values() if row["op"] in DENSE and row["precision"] == precision]
                note = _note(card, used, current, PRECISIONS[precision])
                written += _save(_speed_up_figure(series, note), directory / f"speed_up{tail}")
        device = cases.device_of(card)
        points = roofline_points(latest)
        if device is not None and points:
            used = [point.row for point in points]
            note = _note(card, used, current)
            written += _save(_roofline_figure(points, device, note), directory / f"roofline{suffix}")
    return written


@dataclasses.dataclass(frozen=True)
class SpeedUp:
    """How many times as long as ours a peer takes at a context length."""

    context: int
    ratio: float
    peer: str


def speed_ups(latest: Mapping[rows.Key, Row], op: str, precision: str) -> dict[tuple[str, str], list[SpeedUp]]:
    """Points by (kind of case, peer `dense` or `vllm`), in order of context; of our faster DSL in each case."""
    found: dict[tuple[str, str], list[SpeedUp]] = {}
    for label in BENCHMARKS[op].labels:
        mine = [latest[key] for dsl in DSLS if (key := (op, label, precision, dsl)) in latest]
        if not mine:
            continue
        row = min(mine, key=lambda row: row["ms"])
        for kind in _kinds(op, label):
            dense = [peer for peer in DENSE[op] if peer in row["baselines"]]
            fastest = min(dense, key=row["baselines"].__getitem__, default=None)
            for name, peer in (("dense", fastest), ("vllm", "vllm")):
                if peer in row["baselines"]:
                    point = SpeedUp(context_of(op, label), row["baselines"][peer] / row["ms"], peer)
                    found.setdefault((kind, name), []).append(point)
    return {key: sorted(points, key=lambda point: point.context) for key, points in found.items()}


def context_of(op: str, label: str) -> int:
    """Keys of a request."""
    case = BENCHMARKS[op].find(label)
    return case.keys if hasattr(case, "keys") else case.num_k


def _kinds(op: str, label: str) -> Sequence[str]:
    """The lines that a case is a point of."""
    if op == "msa_decode":
        return ("batch 8",) if label.endswith("_b8") else ()
    if label.startswith("prefill_8k"):
        return ("whole prompt", "last 8K queries")
    return ("whole prompt",) if label.startswith("prefill") else ("last 8K queries",)


@dataclasses.dataclass(frozen=True)
class RooflinePoint:
    """One operator on one DSL: operations per byte it has to move, and operations per second in TFLOPS."""

    op: str
    work: Work
    row: Row

    @property
    def intensity(self) -> float:
        return self.work.flops / self.work.bytes

    @property
    def tflops(self) -> float:
        return self.work.flops / self.row["ms"] * 1e-9

    def share(self, device: Device) -> float:
        """Of the speed that the roofline allows."""
        return self.work.floor_ms(device) / self.row["ms"]


def roofline_points(latest: Mapping[rows.Key, Row]) -> list[RooflinePoint]:
    """A point for each operator that is one kernel's work and does arithmetic, by DSL and precision."""
    points = []
    for op, benchmark in BENCHMARKS.items():
        for precision in benchmark.precisions:
            label = next((label for label in SHOWN if any((op, label, precision, dsl) in latest for dsl in DSLS)), None)
            if label is None:
                continue
            work = benchmark.work(label, precision)
            if len(work) != 1 or not work[0].flops:
                continue
            points += [
                RooflinePoint(op, work[0], latest[key])
                for dsl in DSLS
                if (key := (op, label, precision, dsl)) in latest
            ]
    return points


def _speed_up_figure(series: Mapping[str, Mapping[tuple[str, str], Sequence[SpeedUp]]], note: str) -> Any:
    figure, axes = _figure(note, "How many times faster than its peers", columns=2)
    top = max(point.ratio for one in series.values() for points in one.values() for point in points)
    for axis, op, title in zip(axes, DENSE, ("Prefill", "Decode, one query each of 8 requests"), strict=True):
        axis.set_title(title, loc="left", fontsize=11, color=INK)
        for (kind, name), points in series[op].items():
            whole = kind == "whole prompt"
            colour = BLUE if name == "dense" else GREEN
            axis.plot(
                [point.context for point in points],
                [point.ratio for point in points],
                color=colour,
                marker="s" if whole else "o",
                markersize=6,
                markerfacecolor=GROUND if whole else colour,
                linewidth=2,
                linestyle=(0, (4, 2)) if whole else "-",
                label=_line_name(name, kind, points),
                zorder=3,
            )
            last = points[-1]
            axis.annotate(
                f"{last.ratio:.1f}x" if last.ratio < 10 else f"{last.ratio:.0f}x",
                (last.context, last.ratio),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=colour,
            )
        axis.axhline(1, color=FAINT, linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlim(2**12.7, 2**20.7)
        axis.set_ylim(2**-0.8, 2 ** max(4.0, _log2(top) + 1.6))
        axis.set_xticks([2**n for n in (13, 15, 17, 19, 20)], labels=["8K", "32K", "128K", "512K", "1M"])
        ticks = [2**n for n in range(0, int(max(4.0, _log2(top) + 1.6)) + 1)]
        axis.set_yticks(ticks, labels=[f"{tick}x" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("context length, tokens")
        if series[op]:
            axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK, handlelength=2.6)
        else:
            axis.text(0.5, 0.5, "not timed", transform=axis.transAxes, ha="center", color=FAINT)
    axes[0].set_ylabel("time of the peer / time of ours")
    return figure


def _line_name(name: str, kind: str, points: Sequence[SpeedUp]) -> str:
    if name == "vllm":
        peer = "vLLM's sparse kernels (Triton)"
    else:
        peer = "dense: " + " or ".join(dict.fromkeys(PEER_NAMES[point.peer] for point in points))
    return peer if kind.startswith("batch") else f"{peer}, {kind}"


def _roofline_figure(points: Sequence[RooflinePoint], device: Device, note: str) -> Any:
    figure, (axis,) = _figure(note, "Operators under the roofline", columns=1)
    left = min(0.1, *(point.intensity / 2 for point in points))
    right = max(1e5, *(point.intensity * 8 for point in points))
    bandwidth = device.memory_gb_per_s * 1e-3  # TFLOPS at one operation per byte
    elements = {"bfloat16", "float32"} | {point.work.compute for point in points}
    peaks = {name: device.peak_tflops[name] for name in ELEMENTS if name in elements and name in device.peak_tflops}
    ridge = max(peaks.values()) / bandwidth
    axis.plot([left, ridge], [left * bandwidth, ridge * bandwidth], color=INK, linewidth=1.5, zorder=2)
    # The words lie along the slope, below it: measured on the axes, whose both scales are logarithmic.
    axis.annotate(
        f"memory, {bandwidth:.2f} TB/s",
        (left * 3, left * 3 * bandwidth),
        xytext=(0, 6),
        textcoords="offset points",
        rotation=_SLOPE,
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=9,
        color=INK,
    )
    for name, peak in peaks.items():
        begin = peak / bandwidth
        axis.plot([begin, right], [peak, peak], color=INK if name != "float32" else FAINT, linewidth=1.5, zorder=2)
        axis.annotate(
            f"{ELEMENTS[name]}, {peak:.0f} TFLOPS",
            (right, peak),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=INK,
        )
    for dsl, (words, colour, marker) in DSL_STYLES.items():
        mine = [point for point in points if point.row["dsl"] == dsl]
        for point in mine:
            filled = point.row["precision"] == "bf16"
            axis.plot(
                point.intensity,
                point.tflops,
                marker=marker,
                markersize=7,
                color=colour,
                markerfacecolor=colour if filled else GROUND,
                linestyle="none",
                zorder=3,
            )
        if mine:
            axis.plot([], [], marker=marker, markersize=7, color=colour, linestyle="none", label=words)
    _label_points(axis, points, device)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(left, right)
    axis.set_ylim(min(point.tflops for point in points) / 3, max(peaks.values()) * 3)
    axis.set_xlabel("arithmetic intensity, operations per byte that must move")
    axis.set_ylabel("achieved TFLOPS")
    axis.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    return figure


_SLOPE = 45.0


def _label_points(axis: Any, points: Sequence[RooflinePoint], device: Device) -> None:
    """Name each operator once, beside its faster kernel, with its share of what the roofline allows."""
    by_name: dict[tuple[str, str], RooflinePoint] = {}
    for point in points:
        key = (point.op, point.row["precision"])
        if key not in by_name or point.tflops > by_name[key].tflops:
            by_name[key] = point
    for (op, precision), point in by_name.items():
        name = op if precision == "bf16" else f"{op} {PRECISIONS[precision]}"
        axis.annotate(
            f"{name}  {100 * point.share(device):.0f}%",
            (point.intensity, point.tflops),
            xytext=(9, -3),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color=INK,
        )


def _figure(note: str, title: str, columns: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), facecolor=GROUND)
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, columns, squeeze=False)
    figure.subplots_adjust(left=0.075, right=0.975, top=0.8, bottom=0.12, wspace=0.14)
    figure.text(0.02, 0.945, title, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.02, 0.9, note, fontsize=9.5, color=FAINT)
    for axis in grid[0]:
        axis.set_facecolor(GROUND)
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=FAINT, length=0)
        axis.xaxis.label.set_color(INK)
        axis.yaxis.label.set_color(INK)
        for side, spine in axis.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(FAINT)
    return figure, list(grid[0])


def _note(card: str, used: Sequence[Row], current: frozenset[str], precision: str = "") -> str:
    """Card, days, and what else a reader must know of the figures."""
    dates = sorted({row["date"] for row in used})
    parts = [card, dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}", precision]
    parts.append("MiniMax M3 shape: 64 query, 4 KV, 4 index heads, 16 blocks of 128 keys")
    if any(rows.is_stale(row, current) for row in used):
        parts.append("some kernels have changed since")
    return " · ".join(part for part in parts if part)


def _save(figure: Any, stem: Path) -> list[Path]:
    import matplotlib

    settings = {"svg.hashsalt": "msa_tiles", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    written = []
    with matplotlib.rc_context(settings):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            path = stem.with_name(f"{stem.name}.{kind}")
            figure.savefig(path, dpi=150, metadata=metadata, facecolor=GROUND)
            written.append(path)
    return written


def _log2(value: float) -> float:
    import math

    return math.log2(value)
