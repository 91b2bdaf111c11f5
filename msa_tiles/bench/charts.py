"""Charts of results: speed-up and a layer's time against context length, every operator under the card's roofline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_tiles.bench import canvas, cases, labels, layer_chart, rows
from msa_tiles.bench.canvas import BLUE, FAINT, GREEN, GROUND, INK, ORANGE
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.points import beside, context_of, first_of
from msa_tiles.bench.precisions import BF16
from msa_tiles.bench.precisions import group as group_of
from msa_tiles.bench.rows import Row
from msa_tiles.spec.model import DSLS, Device
from msa_tiles.spec.work import Work

DSL_STYLES = {"tilelang": ("TileLang", BLUE, "o"), "cutedsl": ("CuTe DSL", ORANGE, "D")}
GROUPS = {"bf16": "BF16", "fp8": "FP8", "nvfp4": "NVFP4", "fp4": "FP4"}
ROOFLINES = {"": ("bf16", "fp8"), "_4bit": ("nvfp4", "fp4")}
"""Groups that share a roofline: the names of more would not fit beside its points."""
ELEMENTS = {"bfloat16": "BF16", "float8_e4m3fn": "FP8", "float32": "FP32"}

DENSE = {"prefill": ("fa4", "cudnn"), "msa_decode": ("fa4", "dense_bytes")}
VLLM = "vllm"
PEER_NAMES = {
    VLLM: "vLLM's sparse kernels",
    "fa4": "FlashAttention-4",
    "cudnn": "attention of cuDNN",
    "dense_bytes": "decode that reads at copy speed",
}
SHOWN = (
    "prefill_128k_u",
    "prefill_32k",
    "decode_128k_b32",
    "chunk8k_1m_u",
    "prefill_32k_u",
    "prefill_8k_u",
    "prefill_4k",
    "decode_1m_b8",
    "decode_128k_b1",
)
"""Which case stands for an operator in the roofline: the first of these that was timed."""

WHOLE, LAST = "whole prompt", "last 8K queries"


def available() -> bool:
    """Whether matplotlib can be imported."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(results: Iterable[Row], directory: Path) -> list[Path]:
    """Write the charts that the rows suffice for, each as PNG and SVG; a set of its own for each card."""
    import matplotlib

    with matplotlib.rc_context(), matplotlib.rc_context(matplotlib.rcParamsDefault | canvas.SETTINGS):
        return _draw(list(results), directory)


def _draw(results: Sequence[Row], directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    cards = sorted({row["card"] for row in results})
    current = rows.digests()
    written: list[Path] = []
    for card in cards:
        mine = [row for row in results if row["card"] == card]
        latest = rows.latest(mine)
        suffix = "" if len(cards) == 1 else "_" + rows.file_name(card).removesuffix(".jsonl")
        for group in GROUPS:
            tail = suffix if group == BF16 else f"_{group}{suffix}"
            series = {op: speed_ups(mine, op, group, current) for op in DENSE}
            if any(len(points) > 1 for one in series.values() for points in one.values()):
                used = [point.row for one in series.values() for points in one.values() for point in points]
                note = canvas.note(card, used, current, GROUPS[group])
                written += canvas.save(_speed_up_figure(series, note), directory / f"speed_up{tail}")
            layer = {op: layer_chart.lines(mine, op, group, current) for op in layer_chart.PANELS}
            if any(layer.values()):
                used = [point.row for one in layer.values() for points in one.values() for point in points]
                note = canvas.note(card, used, current, GROUPS[group])
                written += canvas.save(layer_chart.figure(layer, note), directory / f"layer_time{tail}")
        device = cases.device_of(card)
        for tail, groups in ROOFLINES.items():
            points = roofline_points(latest, groups)
            if device is not None and points:
                used = [point.row for point in points]
                note = canvas.note(card, used, current)
                written += canvas.save(_roofline_figure(points, device, note), directory / f"roofline{tail}{suffix}")
    return written


@dataclasses.dataclass(frozen=True)
class SpeedUp:
    """How many times as long as ours a peer takes at a context length."""

    context: int
    ratio: float
    peer: str
    row: Row


Lines = Mapping[tuple[str, str], Sequence[SpeedUp]]
"""Points in order of context, by what the queries are (empty for decode) and the peer, `dense` or `vllm`."""


def speed_ups(results: Collection[Row], op: str, group: str, current: frozenset[str]) -> Lines:
    """The lines of an operator in the first precision of a group, of our faster DSL in each case.

    A case has for each peer the newest run in which it was timed, which need not be the same one for all of them.
    """
    found: dict[tuple[str, str], list[SpeedUp]] = {}
    precision = first_of(op, group)
    for label in BENCHMARKS[op].labels:
        with_peer = {peer: beside(results, peer, op, label, precision, current) for peer in (*DENSE[op], VLLM)}
        timed = {peer: row for peer, row in with_peer.items() if row is not None}
        dense = [peer for peer in DENSE[op] if peer in timed]
        quickest = min(dense, key=lambda peer: timed[peer]["baselines"][peer], default=None)
        for kind in _kinds(op, label):
            for name, peer in (("dense", quickest), ("vllm", VLLM)):
                if peer in timed:
                    row = timed[peer]
                    point = SpeedUp(context_of(op, label), row["baselines"][peer] / row["ms"], peer, row)
                    found.setdefault((kind, name), []).append(point)
    return {key: sorted(points, key=lambda point: point.context) for key, points in found.items()}


def _kinds(op: str, label: str) -> Sequence[str]:
    """The lines that a case is a point of."""
    if op == "msa_decode":
        return ("",) if label.endswith("_b8") else ()
    if label.startswith("prefill_8k"):
        return (WHOLE, LAST)
    if label.startswith("prefill"):
        return (WHOLE,)
    return (LAST,) if label.startswith("chunk8k") else ()


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


def roofline_points(latest: Mapping[rows.Key, Row], groups: Collection[str]) -> list[RooflinePoint]:
    """A point for each operator that is one kernel's work and does arithmetic, by DSL and group of precisions."""
    points = []
    for op, benchmark in BENCHMARKS.items():
        if op not in benchmark.parts:
            continue  # a call of another operator, in another way
        firsts = {group_of(name): name for name in reversed(benchmark.precisions)}
        for precision in (firsts[group] for group in groups if group in firsts):
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


def _speed_up_figure(series: Mapping[str, Lines], note: str) -> Any:
    """Prefill beside decode, on one scale."""
    figure, axes = canvas.figure("Speed-up by context length", [note], columns=2)
    ratios = [point.ratio for lines in series.values() for points in lines.values() for point in points]
    # The legend stands in the upper left, above the lines.
    bottom, top = min(-0.8, math.log2(min(ratios)) - 0.6), max(4.0, math.log2(max(ratios))) + 2.2
    for axis, op, title in zip(axes, DENSE, ("Prefill", "Decode: 8 requests, one query each"), strict=True):
        axis.set_title(title, loc="left", fontsize=11.5, color=INK)
        for (kind, name), points in series[op].items():
            _draw_line(axis, kind, name, points)
        axis.axhline(1, color=FAINT, linewidth=1)
        canvas.contexts(axis, [1 << n for n in (13, 15, 17, 19, 20)])
        axis.set_yscale("log", base=2)
        axis.set_xlim(2**12.6, 2**21.1)
        axis.set_ylim(2**bottom, 2**top)
        ticks = range(math.ceil(bottom), math.floor(top) + 1)
        axis.set_yticks([2.0**n for n in ticks], labels=[f"{2.0**n:g}x" for n in ticks])
        axis.minorticks_off()
        if series[op]:
            axis.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK, handlelength=2.8)
        else:
            axis.text(0.5, 0.5, "not timed", transform=axis.transAxes, ha="center", color=FAINT)
        _name_ends(figure, axis, series[op])
    axes[0].set_ylabel("time of the peer / time of ours")
    return figure


def _draw_line(axis: Any, kind: str, name: str, points: Sequence[SpeedUp]) -> None:
    whole = kind == WHOLE
    colour = BLUE if name == "dense" else GREEN
    axis.plot(
        [point.context for point in points],
        [point.ratio for point in points],
        color=colour,
        marker="s" if whole else "o",
        markersize=6,
        markerfacecolor=GROUND if whole else colour,
        linewidth=2,
        linestyle=(0, (3, 1.5)) if whole else "-",
        label=_line_name(name, kind, points),
        zorder=3,
    )


def _name_ends(figure: Any, axis: Any, lines: Lines) -> None:
    """Write the last ratio of each line beside its end."""
    taken = []
    for points in lines.values():
        taken += labels.boxes_along(axis, [(point.context, point.ratio) for point in points])
    for (_, name), points in lines.items():
        last = points[-1]
        words = f"{last.ratio:.0f}x" if last.ratio >= 9.95 else f"{last.ratio:.{1 if last.ratio >= 2 else 2}f}x"
        style = {"fontsize": 9.5, "fontweight": "bold", "color": BLUE if name == "dense" else GREEN, "zorder": 4}
        labels.place(figure, axis, words, (last.context, last.ratio), taken, **style)


def _line_name(name: str, kind: str, points: Sequence[SpeedUp]) -> str:
    names = dict.fromkeys(PEER_NAMES[point.peer] for point in points)
    peer = ("over " if name == "vllm" else "over dense ") + " or ".join(names)
    return f"{peer}, {kind}" if kind else peer


def _roofline_figure(points: Sequence[RooflinePoint], device: Device, note: str) -> Any:
    cases_shown = ", ".join(dict.fromkeys(point.row["case"] for point in points))
    figure, (axis,) = canvas.figure(
        "Operators under the roofline", [note, f"{cases_shown}; in percent: of what the roofline allows"], columns=1
    )
    figure.subplots_adjust(right=0.86)
    left = min(0.1, *(point.intensity / 2 for point in points))
    right = max(1e4, *(point.intensity * 6 for point in points))
    bandwidth = device.memory_gb_per_s * 1e-3  # TFLOPS at one operation per byte
    used = {"bfloat16"} | {point.work.compute for point in points}
    peaks = {name: device.peak_tflops[name] for name in ELEMENTS if name in used and name in device.peak_tflops}
    highest = max(peaks.values())
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(left, right)
    axis.set_ylim(min(point.tflops for point in points) / 4, highest * 2.5)
    axis.plot([left, highest / bandwidth], [left * bandwidth, highest], color=INK, linewidth=1.5, zorder=2)
    taken = labels.boxes_along(axis, [(left, left * bandwidth), (highest / bandwidth, highest)])
    for name, peak in peaks.items():
        colour = FAINT if name == "float32" else INK
        axis.plot([peak / bandwidth, right], [peak, peak], color=colour, linewidth=1.5, zorder=2)
        axis.annotate(
            f"{ELEMENTS[name]}, {peak:.0f} TFLOPS",
            (right, peak),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
        )
        taken += labels.boxes_along(axis, [(peak / bandwidth, peak), (right, peak)])
    for dsl, (words, colour, marker) in DSL_STYLES.items():
        style = {"marker": marker, "markersize": 7.5, "color": colour, "linestyle": "none"}
        mine = [point for point in points if point.row["dsl"] == dsl]
        for point in mine:
            face = colour if point.row["precision"] == BF16 else GROUND
            axis.plot(point.intensity, point.tflops, markerfacecolor=face, zorder=3, **style)
        if mine:
            axis.plot([], [], label=words, **style)
    begin, end = axis.transData.transform([(1, bandwidth), (2, 2 * bandwidth)])
    slope = math.degrees(math.atan2(end[1] - begin[1], end[0] - begin[0]))
    memory = axis.annotate(
        f"memory, {bandwidth:.2f} TB/s",
        (left * 1.5, left * 1.5 * bandwidth),
        xytext=(0, 5),
        textcoords="offset points",
        rotation=slope,
        rotation_mode="anchor",
        fontsize=9,
        color=INK,
    )
    _name_points(figure, axis, points, device, [*taken, memory.get_window_extent(figure.canvas.get_renderer())])
    axis.minorticks_off()
    for set_ticks, (low, high) in ((axis.set_xticks, axis.get_xlim()), (axis.set_yticks, axis.get_ylim())):
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        set_ticks([10.0**n for n in powers], labels=[f"{10.0**n:,g}" if n < 6 else f"$10^{n}$" for n in powers])
    axis.set_xlabel("arithmetic intensity: operations per byte that has to move")
    axis.set_ylabel("achieved TFLOPS")
    axis.legend(loc="lower right", frameon=False, fontsize=9.5, labelcolor=INK)
    return figure


def _name_points(figure: Any, axis: Any, points: Sequence[RooflinePoint], device: Device, taken: list[Any]) -> None:
    """Name each operator once, beside its faster kernel, where no other name, point or line is."""
    for point in points:
        taken += labels.boxes_along(axis, [(point.intensity, point.tflops)])
    fastest: dict[tuple[str, str], RooflinePoint] = {}
    for point in points:
        key = (point.op, point.row["precision"])
        if key not in fastest or point.tflops > fastest[key].tflops:
            fastest[key] = point
    for (op, precision), point in sorted(fastest.items(), key=lambda item: item[1].intensity):
        name = op if precision == BF16 else f"{op} {GROUPS[group_of(precision)]}"
        words = f"{name}  {100 * point.share(device):.0f}%"
        labels.place(figure, axis, words, (point.intensity, point.tflops), taken, fontsize=9, color=INK, zorder=4)
