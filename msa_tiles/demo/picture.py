"""The selection map, and how a training went, as PNGs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msa_tiles.demo.questions import Question

UNAVAILABLE = "no picture: matplotlib is not installed (pip install 'msa-tiles[demo]')"


def available() -> bool:
    """Whether matplotlib can be imported."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def selection_map(block_indices: Tensor, block_size: int, bins: int = 256) -> Tensor:
    """float32 `[rows, blocks]`: share of the queries and KV heads of a bin of rows that select each block."""
    num_kv_heads, num_queries, _ = block_indices.shape
    num_blocks = -(-num_queries // block_size)
    bins = min(bins, num_queries)
    bin_of = (torch.arange(num_queries) * bins // num_queries)[None, :, None].expand_as(block_indices)
    valid = block_indices >= 0
    flat = bin_of[valid] * num_blocks + block_indices[valid].long()
    counts = torch.bincount(flat, minlength=bins * num_blocks).view(bins, num_blocks).to(torch.float32)
    queries = torch.bincount(torch.arange(num_queries) * bins // num_queries, minlength=bins)
    return counts / (queries[:, None] * num_kv_heads)


def draw(
    path: Path,
    block_indices: Tensor,
    block_size: int,
    questions: Sequence[Question],
    rows: Sequence[int],
    title: str,
) -> None:
    """Write the map of `block_indices [Hkv, T, k]` (on the CPU) to `path`.

    Left: the whole prefill. Right: one line per question (asked at `rows`), with the block of its answer marked.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    num_kv_heads, num_queries, _ = block_indices.shape
    num_blocks = -(-num_queries // block_size)
    figure = Figure(figsize=(15, 7), layout="constrained")
    FigureCanvasAgg(figure)
    whole, asked = figure.subplots(1, 2, width_ratios=(1, 1.15))

    # The extent ends at the last token, inside the last block, so that rows and columns share the diagonal.
    image = whole.imshow(
        selection_map(block_indices, block_size).sqrt().numpy(),
        aspect="auto",
        cmap="magma",
        vmin=0,
        vmax=1,
        extent=(0, num_blocks, num_queries, 0),
        interpolation="nearest",
    )
    whole.set_xlabel(f"KV block ({block_size} tokens each)")
    whole.set_ylabel("query token")
    whole.set_title("every query of the prefill")
    bar = figure.colorbar(image, ax=whole, label="share of queries and KV heads that select the block")
    bar.set_ticks([0, 0.1**0.5, 0.25**0.5, 0.5**0.5, 1], labels=["0", "0.1", "0.25", "0.5", "1"])

    heads = torch.zeros(len(questions), num_blocks)
    for i, row in enumerate(rows):
        ids = block_indices[:, row]
        heads[i] = torch.bincount(ids[ids >= 0].long(), minlength=num_blocks).to(torch.float32)
    image = asked.imshow(
        heads.numpy(),
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=num_kv_heads,
        extent=(0, num_blocks, len(questions) - 0.5, -0.5),
        interpolation="nearest",
    )
    ring: dict[str, Any] = {
        "marker": "o",
        "markerfacecolor": "none",
        "markeredgecolor": "tab:green",
        "markeredgewidth": 2,
    }
    cross: dict[str, Any] = {"marker": "X", "color": "tab:red"}
    for i, question in enumerate(questions):
        block = question.answer // block_size
        style = ring if heads[i, block] > 0 else cross
        asked.plot(block + 0.5, i, markersize=13, linestyle="none", **style)
    asked.set_yticks(range(len(questions)), labels=[_shorten(question.phrase) for question in questions], fontsize=8)
    asked.set_xlim(0, num_blocks)
    asked.set_xlabel(f"KV block ({block_size} tokens each)")
    asked.set_ylabel("question")
    asked.set_title("blocks that each question selects")
    figure.colorbar(image, ax=asked, label="KV heads that select the block", ticks=range(num_kv_heads + 1))
    marks = [
        Line2D([], [], linestyle="none", markersize=10, label="block of the answer, selected", **ring),
        Line2D([], [], linestyle="none", markersize=10, label="block of the answer, missed", **cross),
    ]
    asked.legend(handles=marks, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
    figure.suptitle(title)
    with warnings.catch_warnings():
        # A script that matplotlib's font lacks shows as boxes in the labels; the report has the phrases in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=110)


def draw_training(
    path: Path, losses: Sequence[float], warmup_steps: int, grades: Sequence[dict[str, Any]], title: str
) -> None:
    """Write the loss of each step and the grades of the examinations (`demo.train.Grade` as mappings) to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = range(1, len(losses) + 1)
    left.plot(
        steps[:warmup_steps], losses[:warmup_steps], color="tab:orange", label="warm-up: KL over the whole prefix"
    )
    left.plot(steps[warmup_steps:], losses[warmup_steps:], color="tab:blue", label="then: KL over the selected blocks")
    left.set_yscale("log")
    left.set_ylabel("KL divergence (nats)")
    left.set_title("training loss")
    left.legend(frameon=False)
    at = [grade["step"] for grade in grades]
    for name, label, style in (
        ("best_mass", "the best selection of as many blocks", {"color": "gray", "linestyle": "--"}),
        ("mass", "dense attention inside the selected blocks", {"color": "tab:blue", "marker": "o"}),
        ("answers_selected", "block with the answer selected", {"color": "tab:green", "marker": "s"}),
        ("answers_read", "right next word read from sparse attention", {"color": "tab:red", "marker": "^"}),
    ):
        right.plot(at, [grade[name] for grade in grades], label=label, markersize=5, **style)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_ylim(0, 1.05)
    right.set_title("examinations on unseen text")
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.axvspan(0, warmup_steps, color="tab:orange", alpha=0.08)
        axes.set_xlim(0, len(losses))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _shorten(phrase: str, length: int = 38) -> str:
    # A dollar sign would start mathematics in matplotlib.
    text = phrase if len(phrase) <= length else phrase[: length - 1] + "…"
    return text.replace("$", r"\$")
