"""Phrases worth asking for: each occurs in one place of the text, far in front of the questions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from msa_tiles.demo.text import Text

PHRASE = 8
"""Tokens of a phrase: the context that both the indexer and the attention look at."""

FAR = 0.75
"""Phrases come from the first three quarters of the text."""


@dataclass(frozen=True)
class Question:
    """`cue` is the phrase as token ids; `answer` is the position of the token that follows it in the text."""

    cue: tuple[int, ...]
    phrase: str
    answer: int
    answer_word: str


def choose(text: Text, count: int) -> list[Question]:
    """Up to `count` questions, one from each of `count` equal stretches of the first `FAR` of the text.

    A candidate phrase occurs once, is made mostly of words (no tables, no code), and each of its tokens stands
    elsewhere too, so that no single unique word gives its place away. Among the candidates of a stretch the one with
    the rarest words wins, the earliest on a tie. Stretches without a candidate ask nothing.
    """
    ids = text.ids
    total = len(ids)
    occurrences = Counter(ids)
    phrases = Counter(zip(*(ids[i:] for i in range(PHRASE)), strict=False))
    is_word = [word.isalpha() for word in text.words]
    rarity = [math.log(total / occurrences[token]) for token in ids]
    last = int(total * FAR) - PHRASE
    questions = []
    for stretch in range(count):
        best = None
        for start in range(last * stretch // count, last * (stretch + 1) // count):
            cue = tuple(ids[start : start + PHRASE])
            answer = start + PHRASE
            if phrases[cue] > 1 or len(set(cue)) < PHRASE - 1 or not is_word[answer]:
                continue
            if sum(is_word[start:answer]) < PHRASE - 1 or any(occurrences[token] < 2 for token in cue):
                continue
            score = sum(rarity[start:answer])
            if best is None or score > best[0]:
                best = (score, start, cue)
        if best is not None:
            _, start, cue = best
            answer = start + PHRASE
            phrase = " ".join(text.words[start:answer])
            questions.append(Question(cue, phrase, answer, text.words[answer]))
    return questions
