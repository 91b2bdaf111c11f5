"""`msa-tiles demo --train` on the CPU, in a smaller form: what it learns, and that it says when it did not."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from msa_tiles.cli import main
from msa_tiles.demo import lesson, picture, reader, text, train
from msa_tiles.demo.embed import Shape
from msa_tiles.demo.questions import PHRASE

COURSE = train.Course(
    reader.Sizes(Shape(num_q_heads=4, num_kv_heads=2, num_index_heads=2, head_dim=64, block_size=16, topk=4), 32),
    lesson_tokens=512,
    questions=6,
    warmup_steps=60,
    sparse_steps=60,
    learning_rate=6e-3,
    exams=2,
    between=30,
)


@pytest.fixture(autouse=True)
def small_course_on_the_cpu(monkeypatch):
    place = dataclasses.replace(train.CPU, course=COURSE)
    monkeypatch.setattr(train, "choose_place", lambda: place)
    return place


@pytest.mark.slow
def test_the_indexer_learns_where_attention_looks(tmp_path, capsys):
    assert main(["demo", "--train", "--tokens", "8192", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["learnt"] and len(report["losses"]) == 120 and report["blocks"] == 32
    before, after = report["grades"][0], report["grades"][-1]
    assert [grade["step"] for grade in report["grades"]] == [0, 2, 4, 7, 11, 30, 60, 90, 120]
    # An indexer that knows nothing selects four of up to 32 blocks; afterwards every answer is in.
    assert before["answers_selected"] < 0.4 and after["answers_selected"] > 0.9 and after["answers_read"] > 0.9
    assert before["mass"] < 0.5 < 0.85 * after["best_mass"] < after["mass"] <= after["best_mass"] <= 1.0
    assert sum(report["losses"][:5]) > 2 * sum(report["losses"][25:30])
    assert after["divergence"] < 0.5 * before["divergence"]
    assert f"{before['answers_selected']:.1%} before, {after['answers_selected']:.1%} after" in shown
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_that_teaches_nothing_fails(tmp_path, capsys, monkeypatch, small_course_on_the_cpu):
    course = dataclasses.replace(COURSE, learning_rate=0.0)
    monkeypatch.setattr(train, "choose_place", lambda: dataclasses.replace(small_course_on_the_cpu, course=course))
    assert main(["demo", "--train", "--steps", "3", "--tokens", "8192", "--out", str(tmp_path)]) == 1
    assert "the indexer has NOT learnt its task: recall" in capsys.readouterr().err
    report = json.loads((tmp_path / "training.json").read_text())
    assert not report["learnt"] and report["grades"][0]["mass"] == report["grades"][-1]["mass"]
    assert (report["warmup_steps"], report["sparse_steps"]) == (2, 1)


def test_a_loss_of_nan_is_no_success():
    grade = train.Grade(0, 0.1, 0.9, 0.0, 0.0, 1.0)
    report = train.Report("", "", "", {}, 1, 1, 1, 1, [], [grade, dataclasses.replace(grade, mass=float("nan"))], 0.0)
    assert not report.learnt
    assert dataclasses.replace(report, grades=[grade, dataclasses.replace(grade, mass=0.8)]).learnt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "--steps", "1"], "--steps: 1, wanted at least 2"),
        (["--steps", "9"], "--steps: only --train takes steps"),
        (["--train", "--tokens", "100"], "--tokens: 100, wanted at least"),
        (["--train", "--tokens", "2048"], "--tokens: 512 of them for lessons like this one, wanted at least"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path, capsys, monkeypatch, small_course_on_the_cpu):
    course = dataclasses.replace(COURSE, lesson_tokens=1024)
    monkeypatch.setattr(train, "choose_place", lambda: dataclasses.replace(small_course_on_the_cpu, course=course))
    assert main(["demo", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_lessons_ask_for_what_stands_in_one_place():
    source = text.load(None, 4096)
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        drawn = lesson.draw(source.ids, len(source.vocabulary), 700, 7, generator)
        tokens = drawn.tokens.tolist()
        length = lesson.stretch_length(700, 7)
        assert len(tokens) == 700 and len(set(drawn.answers.tolist())) == 7
        for row, answer in zip(drawn.rows.tolist(), drawn.answers.tolist(), strict=True):
            assert tokens[row - PHRASE + 1 : row + 1] == tokens[answer - PHRASE : answer]
            assert tokens[row - PHRASE] == len(source.vocabulary) and answer < 0.75 * length
            context = tokens[answer - lesson.CONTEXT : answer]
            places = [end for end in range(3, length + 1) if tokens[end - 3 : end] == context]
            assert places == [answer]


def test_a_text_without_places_of_its_own_is_refused():
    with pytest.raises(ValueError, match="hold 0 phrases that end in a context of their own, wanted at least 2"):
        lesson.draw([0, 1] * 500, 2, 400, 2, torch.Generator().manual_seed(0))


def test_attention_of_the_model_answers_and_its_indexer_knows_nothing():
    """The main branch is given; nothing of it is trained, and what is trained starts at random."""
    source = text.load(None, 4096)
    counts = torch.bincount(torch.tensor(source.ids), minlength=len(source.vocabulary) + 1)
    model = reader.Reader(counts, COURSE.sizes)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 4 and all(name.startswith("layer.index_") for name in names)
    drawn = lesson.draw(source.ids, len(source.vocabulary), 512, 8, torch.Generator().manual_seed(1))
    model.layer.warmup = True
    with torch.no_grad():
        hidden = model(drawn.tokens).hidden
        mass = train.dense_mass(model, drawn.tokens, drawn.rows, 16)
    assert torch.equal(model.read_out(hidden[drawn.rows]), drawn.tokens[drawn.answers])
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 8))
    assert (mass.argmax(-1) == drawn.answers // 16).all()


def test_the_picture_needs_no_answer_to_be_right(tmp_path):
    grades = [dataclasses.asdict(train.Grade(step, 0.0, 0.5, 0.0, 0.0, 9.0)) for step in (0, 2)]
    picture.draw_training(tmp_path / "one.png", [3.0, 2.0], 1, grades, "title")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_shortened_courses():
    assert (COURSE.shortened(10).warmup_steps, COURSE.shortened(10).sparse_steps) == (5, 5)
    assert (COURSE.shortened(2).warmup_steps, COURSE.shortened(2).sparse_steps) == (1, 1)
    # The default text has a held-out part that is long enough for a lesson.
    for course in (train.ON_CPU, train.ON_GPU):
        held_out = course.text_tokens - int(course.text_tokens * 0.75)
        assert held_out >= lesson.stretch_length(course.lesson_tokens, course.questions)
