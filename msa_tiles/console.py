"""The only place that writes to the terminal: results to stdout, progress to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TextIO, TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 5.0  # a log file gets a line now and then, a terminal one line that is redrawn


def say(text: str = "") -> None:
    """Write one line of a command's result."""
    _write(sys.stdout, text + "\n")


def complain(text: str) -> None:
    """Write one line about what went wrong."""
    _write(sys.stderr, text + "\n")


def note(text: str) -> None:
    """Write one line of progress, over the line that `progress` redraws."""
    _write(sys.stderr, ("\r\x1b[K" if sys.stderr.isatty() else "") + text + "\n")


def close() -> None:
    """Write no more: whoever read has gone, and Python would complain of it once more at the end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _write(stream: TextIO, text: str) -> None:
    """What a terminal's encoding lacks is written as Python would escape it."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def progress(items: Iterable[Item] | int, label: str) -> Iterator[Item]:
    """Yield `items` (or `range(items)`) while telling stderr how far it has come."""
    iterable: Iterable = range(items) if isinstance(items, int) else items
    total = len(iterable) if isinstance(iterable, Sized) else None
    terminal = sys.stderr.isatty()
    started = last = time.monotonic()
    done = 0

    def report(end: str) -> None:
        count = f"{done}/{total}" if total is not None else str(done)
        line = f"{label}: {count}, {time.monotonic() - started:.1f} s"
        _write(sys.stderr, f"\r{line}\x1b[K{end}" if terminal else line + "\n")

    try:
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - last >= (0.1 if terminal else _SECONDS_BETWEEN_LINES):
                last = now
                report("")
    except (GeneratorExit, KeyboardInterrupt):  # whoever counted stopped early, and says why
        if terminal:
            _write(sys.stderr, "\n")
        raise
    except BaseException:
        report("\n")
        raise
    report("\n")


def table(rows: Sequence[Sequence[object]]) -> None:
    """Write rows as left-aligned columns; the first row is the heading."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
