"""The demo: a text, questions about it, selection and sparse attention over both, and what came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from msa_tiles import console, ops
from msa_tiles.bench.agreement import overlap
from msa_tiles.demo import embed, oracle, picture
from msa_tiles.demo import precision as precisions
from msa_tiles.demo.device import Device
from msa_tiles.demo.questions import PHRASE, Question, choose
from msa_tiles.demo.text import Text

NUM_QUESTIONS = 8
CHECKED_ROWS = 512

ERROR_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest error against the dense computation, relative to the largest output, that still counts as agreement."""


@dataclass(frozen=True)
class Outcome:
    """What one question got: how many KV heads chose the block with the answer, and the word the output points at."""

    phrase: str
    answer_word: str
    answer_block: int
    blocks: list[list[int]]
    heads_with_answer: int
    word: str

    @property
    def found(self) -> bool:
        return self.heads_with_answer > 0


@dataclass(frozen=True)
class Report:
    """Every number that the demo shows, as measured."""

    source: str
    tokens: int
    questions: int
    device: str
    dtype: str
    shape: dict[str, int]
    select_seconds: float
    attention_seconds: float
    outcomes: list[Outcome]
    checked_rows: int
    error: float
    rounding_error: float
    error_limit: float
    attention_saved: float
    saved_with_scoring: float
    precision: str
    cost: precisions.Cost | None

    @property
    def agrees(self) -> bool:
        # A NaN error compares false, which is what it should be.
        return self.error <= self.error_limit


@dataclass(frozen=True)
class Prompt:
    """The text followed by the questions: token ids, and the row of the last token of each question."""

    ids: list[int]
    rows: list[int]


def ask(text: Text, questions: list[Question]) -> Prompt:
    """Append each question to the text, in front of it a separator that occurs nowhere else."""
    ids = list(text.ids)
    separator = len(text.vocabulary)
    rows = []
    for question in questions:
        ids += [separator, *question.cue]
        rows.append(len(ids) - 1)
    return Prompt(ids, rows)


def select(layer: precisions.Held, shape: embed.Shape, device: Device, label: str) -> Tensor:
    """`block_indices` of the whole prompt, chunk after chunk."""
    total = layer.q.shape[0]
    chunk = device.chunk or total
    ids = []
    for start in console.progress(range(0, total, chunk), label):
        end = min(start + chunk, total)
        part = ops.select_blocks(
            precisions.rows(layer.idx_q, start, end),
            precisions.rows(layer.idx_k, 0, end),
            shape.topk,
            num_kv_heads=shape.num_kv_heads,
            block_size=shape.block_size,
        )
        ids.append(part)
        device.synchronise()
    return torch.cat(ids, dim=1)


def prefill(layer: precisions.Held, shape: embed.Shape, device: Device) -> tuple[Tensor, Tensor, float, float]:
    """`(block_indices, out, seconds selecting, seconds attending)` for the whole prompt.

    Runs as a chunked prefill: the queries `start .. end` against the keys `0 .. end`, chunk after chunk, which is the
    same computation as one call (a query's position is counted from the end of the keys) and shows how far it is.
    """
    total = layer.q.shape[0]
    chunk = device.chunk or total
    starts = range(0, total, chunk)
    began = time.perf_counter()
    block_indices = select(layer, shape, device, "selecting blocks")
    selected = time.perf_counter()
    outs = []
    with device.small_steps():
        for start in console.progress(starts, "sparse attention"):
            end = min(start + chunk, total)
            attended = ops.sparse_attention(
                layer.q[start:end],
                precisions.rows(layer.k, 0, end),
                precisions.rows(layer.v, 0, end),
                block_indices[:, start:end],
                block_size=shape.block_size,
            )
            outs.append(cast(Tensor, attended))
            device.synchronise()
    return block_indices, torch.cat(outs), selected - began, time.perf_counter() - selected


def rows_to_check(total: int, asked: list[int], count: int = CHECKED_ROWS) -> Tensor:
    """The rows of the questions and evenly spread others, at most about `count`, ascending."""
    spread = torch.linspace(0, total - 1, min(total, max(1, count - len(asked)))).long()
    return torch.unique(torch.cat([spread, torch.tensor(asked, dtype=torch.long)]))


def saved(block_indices: Tensor, shape: embed.Shape) -> tuple[float, float]:
    """Share of causal attention's multiplications that the selection saved: attention alone, and with index scoring.

    Attention costs `2 * G * D` multiplications per (query, key) pair and KV head, scoring `Hi * D` per causal pair.
    """
    total = block_indices.shape[1]
    causal = total * (total + 1) // 2
    per_pair = 2 * shape.group * shape.head_dim
    dense = causal * shape.num_kv_heads * per_pair
    attended = oracle.attended_pairs(block_indices, total, shape.block_size) * per_pair
    scoring = causal * shape.num_index_heads * shape.head_dim
    return 1 - attended / dense, 1 - (attended + scoring) / dense


def run(text: Text, device: Device, precision: str = precisions.BF16) -> tuple[Report, Tensor, list[Question], Prompt]:
    """The whole job on `text`, with keys and values in a group of precisions.

    Raises ValueError when the text offers nothing to ask.
    """
    shape = device.shape
    questions = choose(text, NUM_QUESTIONS)
    if not questions:
        raise ValueError(f"--text: no phrase of {PHRASE} words occurs in one place of {text.source} only")
    prompt = ask(text, questions)
    console.say(f"embedding {len(prompt.ids):,} tokens ({len(questions)} questions at the end)")
    layer = embed.embed(prompt.ids, shape, device.dtype, device.torch_device)
    held = precisions.held(layer, precision)
    block_indices, out, select_seconds, attention_seconds = prefill(held, shape, device)

    rows = rows_to_check(len(prompt.ids), prompt.rows).to(out.device)
    dense = oracle.dense_over_selection(
        held.q,
        precisions.values(held.k),
        precisions.values(held.v),
        block_indices,
        rows,
        shape.block_size,
        _with_progress("dense attention, to compare"),
    )
    scale = dense.abs().max()
    error = ((out[rows].double() - dense).abs().max() / scale).item()
    rounding = ((dense.to(device.dtype).double() - dense).abs().max() / scale).item()
    saved_attention, saved_all = saved(block_indices, shape)

    cost = None
    if precision != precisions.BF16:
        exact = precisions.held(layer, precisions.BF16)
        whole = select(exact, shape, device, "selecting unquantised")
        unquantised = oracle.dense_over_selection(
            layer.q, layer.k, layer.v, block_indices, rows, shape.block_size, _with_progress("unquantised, to compare")
        )
        off = (out[rows].double() - unquantised).abs()
        worst, mean = off.max() / unquantised.abs().max(), off.mean() / unquantised.abs().mean()
        found, before = (
            sum(
                _chosen(ids, question, row, shape.block_size)
                for question, row in zip(questions, prompt.rows, strict=True)
            )
            for ids in (block_indices, whole)
        )
        cost = precisions.Cost(overlap(block_indices, whole), worst.item(), mean.item(), found, before)
    block_indices = block_indices.cpu()
    words = embed.read_out(layer, out[torch.tensor(prompt.rows, device=out.device)]).tolist()
    vocabulary = [*text.vocabulary, "(separator)"]
    report = Report(
        source=text.source,
        tokens=len(prompt.ids),
        questions=len(questions),
        device=device.name,
        dtype=str(device.dtype).removeprefix("torch."),
        shape=asdict(shape),
        select_seconds=select_seconds,
        attention_seconds=attention_seconds,
        outcomes=[
            _outcome(question, block_indices[:, row], shape.block_size, vocabulary[word])
            for question, row, word in zip(questions, prompt.rows, words, strict=True)
        ],
        checked_rows=len(rows),
        error=error,
        rounding_error=rounding,
        error_limit=ERROR_LIMIT[device.dtype],
        attention_saved=saved_attention,
        saved_with_scoring=saved_all,
        precision=precision,
        cost=cost,
    )
    return report, block_indices, questions, prompt


def _chosen(block_indices: Tensor, question: Question, row: int, block_size: int) -> bool:
    return bool((block_indices[:, row] == question.answer // block_size).any())


def _outcome(question: Question, chosen: Tensor, block_size: int, word: str) -> Outcome:
    blocks = [[block for block in head if block >= 0] for head in chosen.tolist()]
    answer_block = question.answer // block_size
    hits = sum(answer_block in head for head in blocks)
    return Outcome(question.phrase, question.answer_word, answer_block, blocks, hits, word)


def _with_progress(label: str) -> Callable[[list[Tensor]], Iterable[Tensor]]:
    return lambda parts: console.progress(parts, label)


def show(report: Report) -> None:
    """Print what the run found."""
    heads = report.shape["num_kv_heads"]
    console.say(f"\nQuestions ({heads} KV heads choose {report.shape['topk']} blocks each):")
    for outcome in report.outcomes:
        verdict = f"found by {outcome.heads_with_answer} of {heads} heads" if outcome.found else "MISSED"
        read = "right" if outcome.word == outcome.answer_word.casefold() else "wrong"
        console.say(f'\n  "{outcome.phrase} …"')
        console.say(f"    answer in block {outcome.answer_block}: {verdict}")
        console.say(f'    next word "{outcome.answer_word}"; the output points at "{outcome.word}" ({read})')
        for head, blocks in enumerate(outcome.blocks):
            marked = " ".join(f"[{block}]" if block == outcome.answer_block else str(block) for block in blocks)
            console.say(f"    head {head}: {marked}")
    hits = sum(outcome.found for outcome in report.outcomes)
    words = sum(outcome.word == outcome.answer_word.casefold() for outcome in report.outcomes)
    console.say("")
    console.table(
        [
            ["block with the answer chosen", f"{hits} of {report.questions} questions"],
            ["right next word read from the output", f"{words} of {report.questions} questions"],
            [
                "error against dense attention over the same blocks",
                f"{report.error:.2e} of the largest output, {report.checked_rows} rows; "
                f"limit {report.error_limit:.0e}, rounding to {report.dtype} alone {report.rounding_error:.2e}",
            ],
            *_cost_lines(report),
            ["attention work saved", f"{report.attention_saved:.1%} of causal attention"],
            ["the same, index scoring counted as work", f"{report.saved_with_scoring:.1%}"],
            ["time", f"selection {report.select_seconds:.2f} s, attention {report.attention_seconds:.2f} s"],
            ["ran on", f"{report.device}, {report.dtype}, {report.tokens:,} tokens of {report.source}"],
        ]
    )


def _cost_lines(report: Report) -> list[list[str]]:
    """What the precision costs, where there is one."""
    cost = report.cost
    if cost is None:
        return []
    return [
        [f"of {report.precision}: blocks chosen as unquantised", f"{cost.overlap:.2%} of all"],
        ["the same: answers' blocks chosen", f"{cost.found}, unquantised {cost.found_unquantised}"],
        [
            "the same: error against dense attention, unquantised",
            f"{cost.error:.2e} of the largest output, on the mean {cost.mean_error:.2e} of the mean",
        ],
    ]


def write(report: Report, block_indices: Tensor, questions: list[Question], prompt: Prompt, out: Path) -> list[Path]:
    """Write `report.json` and, if matplotlib is there, `selection_map.png` into `out`; the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "report.json"]
    content = asdict(report) | {"agrees": report.agrees}
    written[0].write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if picture.available():
        written.append(out / "selection_map.png")
        hits = sum(outcome.found for outcome in report.outcomes)
        stored = "" if report.precision == precisions.BF16 else f"{report.precision}, "
        words = f"{hits} of {report.questions} answers' blocks selected"
        title = f"{stored}{report.tokens:,} tokens of {report.source}: {words}"
        picture.draw(written[-1], block_indices, report.shape["block_size"], questions, prompt.rows, title)
    return written
