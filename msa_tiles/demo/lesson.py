"""Lessons for the indexer: a stretch of a real text, then questions about it that only its far past can answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles.demo.questions import FAR, PHRASE

CONTEXT = 3
"""Tokens in front of a token that tell attention where it is."""


@dataclass(frozen=True)
class Lesson:
    """`tokens [T]` ids; `rows [N]` the last token of each question; `answers [N]` where the token stands that follows.

    A question is a separator and a phrase of the stretch; its last `CONTEXT` tokens occur once in the stretch.
    """

    tokens: Tensor
    rows: Tensor
    answers: Tensor


def stretch_length(total: int, num_questions: int) -> int:
    """Tokens of text in a lesson of `total` tokens."""
    return total - num_questions * (PHRASE + 1)


def draw(ids: Sequence[int], separator: int, total: int, num_questions: int, generator: torch.Generator) -> Lesson:
    """A random lesson of `total` tokens from the text `ids`.

    Raises ValueError for a text that holds no stretch of that length, or none with `num_questions` different places
    to ask for.
    """
    length = stretch_length(total, num_questions)
    if length < 2 * PHRASE or len(ids) < length:
        needed = max(length, 2 * PHRASE)
        raise ValueError(f"--tokens: {len(ids)} of them for lessons like this one, wanted at least {needed}")
    begin = int(torch.randint(len(ids) - length + 1, (1,), generator=generator))
    stretch = list(ids[begin : begin + length])
    places = _places(stretch)
    if len(places) < num_questions:
        raise ValueError(
            f"--text: {length} tokens of it hold {len(places)} phrases that end in a context of their own, "
            f"wanted at least {num_questions}"
        )
    chosen = torch.randperm(len(places), generator=generator)[:num_questions].sort().values.tolist()
    answers = [places[place] for place in chosen]
    tokens = list(stretch)
    rows = []
    for answer in answers:
        tokens += [separator, *stretch[answer - PHRASE : answer]]
        rows.append(len(tokens) - 1)
    return Lesson(torch.tensor(tokens), torch.tensor(rows), torch.tensor(answers))


def _places(stretch: list[int]) -> list[int]:
    """Where tokens stand in the first `FAR` of a stretch whose `CONTEXT` tokens in front occur nowhere else in it."""
    contexts = [tuple(stretch[end - CONTEXT : end]) for end in range(CONTEXT, len(stretch) + 1)]
    occurrences = Counter(contexts)
    last = int(len(stretch) * FAR)
    return [end for end in range(PHRASE, last) if occurrences[contexts[end - CONTEXT]] == 1]
