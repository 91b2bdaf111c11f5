"""Python text as a syntax tree, in any thread, and what is wrong with the file that it comes from."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ATTEMPTS = 100  # one in some forty is disturbed where eight threads do nothing but parse


class SourceError(ValueError):
    """A Python file that cannot be read as what it is for. The text is `file:line: sentence`."""

    def __init__(self, file: Path, line: int, sentence: str) -> None:
        super().__init__(f"{file}:{line}: {sentence}")
        self.file = file
        self.line = line
        self.sentence = sentence


def text_of(file: Path) -> str:
    """The text of a Python file. Raises SourceError for what is no UTF-8, or begins with a mark of its byte order."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SourceError(file, line, "is not UTF-8 text: save it in that encoding") from error
    if text.startswith("\ufeff"):
        raise SourceError(file, 1, "begins with a byte order mark (U+FEFF): save it as UTF-8 without one")
    return text


def line_of(error: SyntaxError, text: str) -> int:
    """The line of a text that a SyntaxError of it is about."""
    return error.lineno or text.count("\n", 0, max(text.find("\0"), 0)) + 1


@contextlib.contextmanager
def located(file: Path, text: str) -> Iterator[None]:
    """Raise a SyntaxError of the text of a file as SourceError, which names both."""
    try:
        yield
    except SyntaxError as error:
        raise SourceError(file, line_of(error, text), f"is no valid Python: {error.msg}") from error


def tree_of(source: str) -> ast.Module:
    """The tree of a module. Raises what `ast.parse` raises."""
    return _parsed(source, "exec")


def expression_of(source: str) -> ast.expr:
    """The tree of an expression. Raises what `ast.parse` raises."""
    return _parsed(source, "eval").body


def _parsed(source: str, mode: str) -> Any:
    """`ast.parse`, once more where another thread's parsing disturbed it.

    In Python 3.11.0 to 3.11.7 all threads count the depth of their trees in one place (CPython issue 106905). A garbage
    collection that runs Python code lets another thread in, and `ast.parse` raises SystemError where it finds a depth
    that is not its own. A lock would not do: other packages parse as well.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)
