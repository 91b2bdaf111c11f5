"""The only place that writes to the terminal: results to stdout, progress to stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TextIO, TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 5.0  # a log file gets a line now and then, a terminal one line that is redrawn


def say(text: str = "") -> None:
    """Write one line of a command's result."""
    write(sys.stdout, text + "\n")


def complain(text: str) -> None:
    """Write one line about what went wrong."""
    write(sys.stderr, text + "\n")


def note(text: str) -> None:
    """Write one line of progress, over the line that `progress` redraws."""
    write(sys.stderr, ("\r\x1b[K" if sys.stderr.isatty() else "") + text + "\n")


def write(stream: TextIO, text: str) -> None:
    """What a terminal's encoding lacks is written as Python would escape it."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def replace_closed() -> None:
    """Let streams that this process was started without lead nowhere, so that no file it opens takes their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the least number that is free
            setattr(sys, name, open(null, "w" if number else "r"))  # noqa: SIM115  for as long as the process runs


def close() -> None:
    """Write no more: whoever read has gone, and Python would complain of it once more at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def progress(items: Iterable[Item], label: str, name: Callable[[Item], str] | None = None) -> Iterator[Item]:
    """Yield `items`, each of which is done when the next one is asked for, and tell stderr how far it has come.

    The first line comes before the first item; `name` says what is being done.
    """
    total = len(items) if isinstance(items, Sized) else None
    with _Meter(label, total) as meter:
        for item in items:
            meter.show("" if name is None else name(item))
            yield item
            meter.done += 1


def arrivals(items: Iterable[Item], waiting: Iterable[str], label: str, name: Callable[[Item], str]) -> Iterator[Item]:
    """Yield `items`, each of which is done as it comes, and tell stderr how many there are and which is waited for.

    `waiting` are the names of all that will come, in the order in which they are begun; an item's name is `name(item)`.
    """
    left = dict.fromkeys(waiting)
    with _Meter(label, len(left)) as meter:
        meter.show(next(iter(left), ""))
        for item in items:
            meter.done += 1
            left.pop(name(item), None)
            meter.show(next(iter(left), ""))
            yield item


class _Meter:
    """A line about what was done and what is being done: at once, then now and then, and at the end."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.done, self.doing = label, total, 0, ""
        self.terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self.shown: float | None = None
        self.said: tuple[int, str] | None = None

    def __enter__(self) -> _Meter:
        return self

    def show(self, doing: str) -> None:
        """Say it, unless that was said just now."""
        self.doing = doing
        now = time.monotonic()
        if self.shown is None or now - self.shown >= (0.1 if self.terminal else _SECONDS_BETWEEN_LINES):
            self.shown = now
            self.write("")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, GeneratorExit | KeyboardInterrupt):
            self.doing = self.doing if kind else ""
            if self.terminal or self.said != (self.done, self.doing):
                self.write("\n")
        elif self.terminal:  # whoever counted stopped early, and says why
            write(sys.stderr, "\n")

    def write(self, end: str) -> None:
        self.said = self.done, self.doing
        count = f"{self.done}/{self.total}" if self.total is not None else str(self.done)
        line = f"{self.label}: {count}, {time.monotonic() - self.started:.1f} s"
        line += f"; {self.doing}" if self.doing else ""
        if self.terminal:  # a line that wraps cannot be drawn over
            line = line[: shutil.get_terminal_size().columns - 1]
        write(sys.stderr, f"\r{line}\x1b[K{end}" if self.terminal else line + "\n")


def table(rows: Sequence[Sequence[object]]) -> None:
    """Write rows as left-aligned columns; the first row is the heading."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
