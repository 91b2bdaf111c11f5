"""`msa-tiles demo --train`: an indexer learns, by KL alone, to select the blocks that attention would look at."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from msa_tiles import console
from msa_tiles.demo import picture
from msa_tiles.demo.embed import M3, Shape
from msa_tiles.demo.lesson import Lesson, draw, stretch_length
from msa_tiles.demo.reader import Reader, Sizes
from msa_tiles.demo.text import Text
from msa_tiles.reference.threads import one_thread

HELD_OUT = 0.25
"""The last part of the text, which no training lesson comes from."""

LEARNT = 0.85
"""Share of the best possible recall at which the indexer has learnt its task."""

EXAMINED = 128
"""Tokens of a lesson, evenly spread, whose dense attention is looked at."""

_TRAINING_SEED, _EXAM_SEED = 1, 2


@dataclass(frozen=True)
class Course:
    """A model, the lessons it gets, and how long it is taught in each of the two ways."""

    sizes: Sizes
    lesson_tokens: int
    questions: int
    warmup_steps: int
    sparse_steps: int
    learning_rate: float
    exams: int
    """Lessons in an examination."""
    between: int
    """Steps between two examinations; the first are closer, as most is learnt early."""

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.sparse_steps

    @property
    def text_tokens(self) -> int:
        """Tokens of a text whose held-out part is just long enough."""
        return math.ceil(stretch_length(self.lesson_tokens, self.questions) / HELD_OUT)

    def examined(self, step: int) -> bool:
        """Whether an examination follows this step."""
        return step in (2, 4, 7, 11) or step % self.between == 0 or step == self.steps

    def shortened(self, steps: int) -> Course:
        """The same course in `steps` steps, divided alike."""
        warmup = max(round(steps * self.warmup_steps / self.steps), 1)
        return replace(self, warmup_steps=warmup, sparse_steps=max(steps - warmup, 1), between=max(steps // 8, 1))


ON_CPU = Course(
    Sizes(Shape(num_q_heads=8, num_kv_heads=2, num_index_heads=2, head_dim=64, block_size=32, topk=4), 32),
    lesson_tokens=1024,
    questions=8,
    warmup_steps=60,
    sparse_steps=60,
    learning_rate=3e-3,
    exams=3,
    between=15,
)
ON_GPU = Course(
    Sizes(M3, 64),
    lesson_tokens=16384,
    questions=32,
    warmup_steps=150,
    sparse_steps=150,
    learning_rate=2e-3,
    exams=3,
    between=25,
)


@dataclass(frozen=True)
class Grade:
    """What an examination on held-out lessons found, as means over KV heads.

    Of `EXAMINED` tokens: `mass`, the part of dense attention that lies in the selected blocks, and `best_mass`, in the
    best selection of as many. Of the questions: `answers_selected`, how often the block of the answer is in, and
    `answers_read`, how often the output of sparse attention points at the right token. Of all tokens: `divergence`, the
    KL over the selected blocks.
    """

    step: int
    mass: float
    best_mass: float
    answers_selected: float
    answers_read: float
    divergence: float


@dataclass(frozen=True)
class Report:
    """Every number that the training shows, as measured."""

    source: str
    device: str
    dtype: str
    shape: dict[str, int]
    lesson_tokens: int
    blocks: int
    warmup_steps: int
    sparse_steps: int
    losses: list[float]
    grades: list[Grade]
    seconds: float

    @property
    def before(self) -> Grade:
        return self.grades[0]

    @property
    def after(self) -> Grade:
        return self.grades[-1]

    @property
    def learnt(self) -> bool:
        # A NaN compares false, which is what it should be.
        return self.after.mass >= LEARNT * self.after.best_mass and self.after.mass > self.before.mass


@dataclass(frozen=True)
class Place:
    """Where the model runs; a GPU computes in bfloat16, with parameters in float32."""

    name: str
    device: torch.device
    course: Course

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast on a GPU; on a CPU one thread, as the reference makes many small products."""
        cpu = self.device.type == "cpu"
        with (
            one_thread() if cpu else contextlib.nullcontext(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=not cpu),
        ):
            yield


CPU = Place("CPU (reference)", torch.device("cpu"), ON_CPU)


def choose_place() -> Place:
    """The GPU if both ways of training run on it, else the CPU; says which, and why not the GPU."""
    if not torch.cuda.is_available():
        console.say("no CUDA device: training the small model on the CPU")
        return CPU
    place = Place(torch.cuda.get_device_name(), torch.device("cuda"), ON_GPU)
    console.say(f"loading the kernels for {place.name} (compiled the first time, a minute or so)")
    course = place.course
    try:
        model = Reader(torch.ones(64), course.sizes).to(place.device)
        tokens = torch.randint(64, (4 * course.sizes.shape.block_size,), device=place.device)
        for warmup in (True, False):
            model.layer.warmup = warmup
            with place.computing():
                divergence = model(tokens).kl
            divergence.backward()
        torch.cuda.synchronize()
    except (ValueError, RuntimeError, OSError) as error:
        # An unsupported GPU or a missing kernel should not hide what the demo shows; it is said, never silent.
        console.say(f"this GPU cannot train the model, so a small one is trained on the CPU. The reason:\n{error}\n")
        return CPU
    return place


def run(text: Text, place: Place) -> Report:
    """Train on lessons from the front of the text, examine on lessons from its end.

    Raises ValueError for a text that is too short for lessons.
    """
    course = place.course
    separator = len(text.vocabulary)
    counts = torch.bincount(torch.tensor(text.ids), minlength=separator + 1)
    split = int(len(text.ids) * (1 - HELD_OUT))
    front, end = text.ids[:split], text.ids[split:]

    def lessons(ids: list[int], seed: int, count: int) -> Iterator[Lesson]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield draw(ids, separator, course.lesson_tokens, course.questions, generator)

    exam = list(lessons(end, _EXAM_SEED, course.exams))
    model = Reader(counts, course.sizes).to(place.device)
    optimiser = torch.optim.Adam(model.index_parameters(), lr=course.learning_rate)
    grades = [examine(model, exam, place, 0)]
    losses = []
    began = time.perf_counter()
    teaching = list(lessons(front, _TRAINING_SEED, course.steps))
    for step, lesson in enumerate(console.progress(teaching, "training the indexer"), start=1):
        model.layer.warmup = step <= course.warmup_steps
        with place.computing():
            divergence = model(lesson.tokens.to(place.device)).kl
        assert divergence is not None
        optimiser.zero_grad()
        divergence.backward()
        optimiser.step()
        losses.append(divergence.detach())
        if course.examined(step):
            grades.append(examine(model, exam, place, step))
    shape = course.sizes.shape
    return Report(
        source=text.source,
        device=place.name,
        dtype=str(place.dtype).removeprefix("torch."),
        shape=asdict(shape),
        lesson_tokens=course.lesson_tokens,
        blocks=-(-course.lesson_tokens // shape.block_size),
        warmup_steps=course.warmup_steps,
        sparse_steps=course.sparse_steps,
        losses=torch.stack(losses).tolist(),
        grades=grades,
        seconds=time.perf_counter() - began,
    )


@torch.no_grad()
def examine(model: Reader, exam: list[Lesson], place: Place, step: int) -> Grade:
    """Ask the questions of held-out lessons, with attention over the selected blocks alone."""
    warmup, model.layer.warmup = model.layer.warmup, False
    shape = place.course.sizes.shape
    found: list[tuple[float, ...]] = []
    for lesson in exam:
        tokens, rows, answers = (part.to(place.device) for part in (lesson.tokens, lesson.rows, lesson.answers))
        with place.computing():
            hidden, divergence, selected = model(tokens, return_kl=True, return_block_indices=True)
        assert divergence is not None and selected is not None
        spread = torch.linspace(0, len(tokens) - 1, EXAMINED, device=place.device).long()
        mass = dense_mass(model, tokens, spread, shape.block_size)
        recalled = _inside(mass, selected[:, spread].long())
        best = mass.topk(min(shape.topk, mass.shape[-1]), -1).values.sum(-1)
        right = model.read_out(hidden[rows]) == tokens[answers]
        hits = (selected[:, rows] == (answers // shape.block_size)[:, None]).any(-1)
        parts = (recalled, best, hits, right, divergence)
        found.append(tuple(float(part.to(torch.float64).mean()) for part in parts))
    model.layer.warmup = warmup
    recall, best_recall, selected_share, read_share, kl = (
        sum(parts) / len(found) for parts in zip(*found, strict=True)
    )
    return Grade(step, recall, best_recall, selected_share, read_share, kl)


def _inside(mass: Tensor, chosen: Tensor) -> Tensor:
    """What lies in the chosen blocks [Hkv, N, k], -1 for none, of `mass [Hkv, N, blocks]`."""
    absent = mass.shape[-1]
    padded = torch.nn.functional.pad(mass, (0, 1))
    return padded.gather(-1, torch.where(chosen >= 0, chosen, absent)).sum(-1)


def dense_mass(model: Reader, tokens: Tensor, rows: Tensor, block_size: int) -> Tensor:
    """The part of each block in dense attention, [Hkv, N, blocks] for the queries `rows`: whole score matrices."""
    layer = model.layer
    q, k = layer.queries_and_keys(model.hidden(tokens))
    total = len(tokens)
    q = q[rows].unflatten(1, (layer.num_kv_heads, -1)).float()
    scores = torch.einsum("nhgd,jhd->hgnj", q, k.float()) * layer.head_dim**-0.5
    hidden = torch.arange(total, device=tokens.device) > rows[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
    padded = torch.nn.functional.pad(weights, (0, -total % block_size))
    return padded.unflatten(-1, (-1, block_size)).sum(-1)


def show(report: Report) -> None:
    """Print what the training brought."""
    before, after = report.before, report.after
    k, blocks = report.shape["topk"], report.blocks
    console.say(f"\nUnseen text; {k} of {blocks} blocks are selected for each query:")

    def both(first: float, second: float) -> str:
        return f"{first:.1%} before, {second:.1%} after"

    console.table(
        [
            ["dense attention inside the selected blocks", both(before.mass, after.mass)],
            ["the same for the best choice of as many", f"{after.best_mass:.1%}"],
            ["block with the answer selected", both(before.answers_selected, after.answers_selected)],
            ["right next word read from sparse attention", both(before.answers_read, after.answers_read)],
            ["KL divergence over the selected blocks", f"{before.divergence:.3f} before, {after.divergence:.3f} after"],
            ["training loss", f"{report.losses[0]:.3f} at first, {report.losses[-1]:.3f} at last"],
            ["steps", f"{report.warmup_steps} of warm-up over everything, {report.sparse_steps} over the selection"],
            ["time", f"{report.seconds:.1f} s with examinations"],
            [
                "ran on",
                f"{report.device}, {report.dtype}, lessons of {report.lesson_tokens:,} tokens of {report.source}",
            ],
        ]
    )


def write(report: Report, out: Path) -> list[Path]:
    """Write `training.json` and, if matplotlib is there, `training.png` into `out`; the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "training.json"]
    content = asdict(report) | {"learnt": report.learnt}
    written[0].write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if picture.available():
        written.append(out / "training.png")
        picture.draw_training(
            written[-1],
            report.losses,
            report.warmup_steps,
            [asdict(grade) for grade in report.grades],
            f"An indexer learns from KL alone: {report.shape['topk']} of {report.blocks} blocks, {report.device}",
        )
    return written
