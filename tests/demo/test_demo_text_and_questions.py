"""Tokens and questions: what the demo asks, and where."""

from __future__ import annotations

import random

import pytest

from msa_tiles.demo import text
from msa_tiles.demo.questions import FAR, PHRASE, choose


def test_tokens_are_words_numbers_signs_and_single_ideographs():
    tokenised = text.tokenise("Don't count 12 x_y, 稀疏注意!", "a test")
    assert tokenised.words == ["Don", "'", "t", "count", "12", "x", "_", "y", ",", "稀", "疏", "注", "意", "!"]


def test_letter_case_does_not_make_a_new_token():
    tokenised = text.tokenise("The cat saw the other Cat", "a test")
    assert tokenised.ids == [0, 1, 2, 0, 3, 1]
    assert tokenised.vocabulary == ["the", "cat", "saw", "other"]


def test_limit_cuts_the_text():
    assert text.tokenise("a b c d e", "a test", limit=3).words == ["a", "b", "c"]


def test_default_text_reaches_any_length_and_names_its_sources():
    short, long = text.load(None, text.MINIMUM_TOKENS), text.load(None, 200_000)
    assert len(short.ids) == text.MINIMUM_TOKENS
    assert len(long.ids) == 200_000
    assert "standard library" in long.source


def test_a_short_text_a_missing_one_and_too_few_tokens_are_refused(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("only five words in here")
    with pytest.raises(ValueError, match=r"--text: .*short\.txt holds 5 tokens; the demo wants at least 2048"):
        text.load(file, 4096)
    with pytest.raises(ValueError, match=r"--text: cannot read .*: No such file"):
        text.load(tmp_path / "absent.txt", 4096)
    with pytest.raises(ValueError, match="--tokens: 100, wanted at least 2048"):
        text.load(None, 100)


def _random_text(tokens: int = 6000, vocabulary: int = 500) -> text.Text:
    rng = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=6)) for _ in range(vocabulary)]
    return text.tokenise(" ".join(rng.choices(words, k=tokens)), "random words")


def test_questions_occur_once_and_far_back():
    source = _random_text()
    questions = choose(source, 8)
    assert len(questions) == 8
    for question in questions:
        places = [i for i in range(len(source.ids)) if tuple(source.ids[i : i + PHRASE]) == question.cue]
        assert places == [question.answer - PHRASE]
        assert question.answer <= FAR * len(source.ids)
        assert source.words[question.answer] == question.answer_word
    answers = [question.answer for question in questions]
    assert answers == sorted(answers)


def test_no_single_unique_word_gives_a_phrase_away():
    source = _random_text()
    for question in choose(source, 8):
        assert all(source.ids.count(token) > 1 for token in question.cue)


def test_a_text_that_only_repeats_itself_offers_no_question():
    assert choose(text.tokenise("the same words come again and " * 600, "a test"), 8) == []
