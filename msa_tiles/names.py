"""Names that people type, checked against those that exist, and words beside numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def unknown(what: str, name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The sentence about a name that is not known, with the one that may have been meant, being so much alike."""
    every = list(dict.fromkeys(known))
    close = _close(name, every, alike)
    meant = f"; did you mean {close}?" if close else ""
    return f"{what} {name} is unknown{meant}{' Known' if close else '; known'}: {', '.join(every) or 'none'}"


def meant(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The end of a sentence about a name that is not known: the one that may have been meant, if any is close."""
    close = _close(name, list(known), alike)
    return f"; did you mean {close!r}?" if close else ""


def _close(name: str, known: Sequence[str], alike: float) -> str | None:
    """The name that is the same but for capital letters, or else much alike; None where there is none."""
    same = [each for each in known if each.casefold() == name.casefold()]
    return next(iter(same or difflib.get_close_matches(name, known, n=1, cutoff=alike)), None)


def check(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first name that is not known. `what` is the option or argument that takes it."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(unknown(what, name, known))


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2 tokens`, `16,384 tokens`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
