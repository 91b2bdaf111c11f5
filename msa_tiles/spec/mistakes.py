"""Mistakes in specs: where they are, and how a reader goes on after one, so that all are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Location:
    """A line of a file, 0 for a directory, and where `inherited` is said what matters with it, if that is elsewhere."""

    file: str
    line: int
    inherited: str = ""

    def __str__(self) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.file}{line}" + (f", with what it inherits from {self.inherited}" if self.inherited else "")

    def of(self, heir: Location) -> Location:
        """A place in a file that `heir` inherits from, as one of the heir, which its author can mend."""
        return self if self.file == heir.file else Location(heir.file, heir.line, str(self))


class SpecError(ValueError):
    """A mistake in a spec or a skeleton. The text is `file:line: sentence`.

    `others` are more mistakes, which have lines of their own in the text; `mistakes` are all of them, the `first` one
    as it was raised.
    """

    def __init__(
        self, where: Location, sentence: str, others: Sequence[SpecError] = (), first: SpecError | None = None
    ) -> None:
        super().__init__("\n".join((f"{where}: {sentence}", *map(str, others))))
        self.where = where
        self.sentence = sentence
        self.others = tuple(others)
        self._first = first

    def of(self, heir: Location) -> SpecError:
        """The same mistakes, told of the file that inherits."""
        return joined(SpecError(each.where.of(heir), each.sentence) for each in self.mistakes)

    @property
    def mistakes(self) -> tuple[SpecError, ...]:
        if not self.others:
            return (self,)
        return (self._first or SpecError(self.where, self.sentence), *self.others)


def joined(errors: Iterable[SpecError]) -> SpecError:
    """One error for some, at least one: each mistake once, in the order of files as they were read, then of lines."""
    found = {str(mistake): mistake for error in errors for mistake in error.mistakes}
    files = list(dict.fromkeys(mistake.where.file for mistake in found.values()))
    first, *others = sorted(found.values(), key=lambda each: (files.index(each.where.file), each.where.line))
    return SpecError(first.where, first.sentence, others, first) if others else first


class Mistakes:
    """Goes on after a mistake, so that all of them are told at once.

    As a context manager it raises what was found at the end. What depends on something mistaken is not read.
    """

    def __init__(self) -> None:
        self.found: list[SpecError] = []
        self.closed = False

    def __enter__(self) -> Mistakes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.closed = True
        if isinstance(error, SpecError):
            self.found.append(error)
        if self.found and (error is None or isinstance(error, SpecError)):
            raise joined(self.found) from None

    def add(self, error: SpecError) -> None:
        """Keep a mistake; once what was found has been raised, raise it at once."""
        if self.closed:
            raise error
        self.found.append(error)

    def read(self, reader: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """What the reader gives, or None after a SpecError, which is kept."""
        try:
            return reader(*arguments, **options)
        except SpecError as error:
            self.add(error)
            return None

    def passes(self, check: Callable[..., None], *arguments: Any) -> bool:
        """Whether the check finds no mistake."""
        before = len(self.found)
        self.read(check, *arguments)
        return len(self.found) == before

    def each(self, reader: Callable[[T], U], values: Iterable[T]) -> list[U]:
        """What the reader gives for each of these, without those that have a mistake."""
        read = [self.read(lambda: (reader(value),)) for value in values]  # noqa: B023  # called at once
        return [result[0] for result in read if result is not None]

    def entries(self, reader: Callable[[str, T], U], values: Mapping[str, T]) -> dict[str, U]:
        """The same for the values of a mapping, by name."""
        return dict(self.each(lambda pair: (pair[0], reader(*pair)), values.items()))
