"""Where in a kernel an error comes from: the generated file or a helper, and the line of the skeleton behind it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from msa_tiles.origins import line_in
from msa_tiles.paths import PACKAGE
from msa_tiles.runtime.registry import Cell
from msa_tiles.sources import OPERANDS

# What Python says of a program that is wrong: its text alone may not tell what kind of mistake it is.
_OF_PYTHON = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    SyntaxError,
    TypeError,
)
_SHOWN = re.compile(r"--> (?P<file>/.+?):(?P<line>\d+)")  # where CuTe DSL shows the line itself
_HELPERS, _SKELETONS = PACKAGE / "dsl", PACKAGE / "codegen/skeletons"


def located(error: BaseException, text: str, cell: Cell) -> str:
    """The text of an error of a cell's kernel, and behind it the lines that it comes from, as far as they are known."""
    if shown := _SHOWN.search(text):
        origin = _origin(Path(shown["file"]), int(shown["line"]), cell)
        return f"{text.rstrip()}\n  {_told(shown['file'], shown['line'])}{origin}" if origin else text
    if isinstance(error, _OF_PYTHON) and not text.startswith(type(error).__name__):
        text = f"{type(error).__name__}: {text}"
    places = list(_places(error, cell))
    if not places:
        return text
    (file, line), *_ = places[::-1]
    told = _told(file, line) + _origin(file, line, cell)
    above = [place for place in places if place[0] == cell.file]
    if file != cell.file and above:
        told += f", called at {_told(*above[-1])}{_origin(*above[-1], cell)}"
    return f"{text} ({told})"


def _told(file: Path | str, line: int | str) -> str:
    return f"{file}:{line}"


def _places(error: BaseException | None, cell: Cell) -> Iterator[tuple[Path, int]]:
    """Lines of the kernel and of what it imports that an error has come through, the outermost first."""
    roots = (_HELPERS, *(folder / OPERANDS[1:] for folder in (cell.file.parents[2], *cell.search)))
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        lines = [(Path(frame.filename), frame.lineno or 1) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            lines.append((Path(error.filename), error.lineno or 1))
        found = [each for each in lines if each[0] == cell.file or any(map(each[0].is_relative_to, roots))]
        if found:
            yield from found
            return
        error = error.__cause__ or error.__context__


def _origin(file: Path, line: int, cell: Cell) -> str:
    """The line of the skeleton, or of the tree's operand, that a line was generated from; empty where none has it."""
    if file == cell.file:
        name = f"{cell.dsl}/{cell.mma}/{'_'.join((cell.op, *cell.id.split('.')[4:]))}.py"
        sources = [*([] if cell.tree is None else [cell.tree / "skeletons" / name]), _SKELETONS / name]
    elif file.parts[-4:-2] == ("generated", OPERANDS[1:]):
        sources = [file.parents[3].joinpath(*file.parts[-3:])]
    else:
        return ""
    try:
        source = next(each for each in sources if each.is_file())
        at = line_in(source.read_text(encoding="utf-8"), file.read_text(encoding="utf-8"), line)
    except (OSError, ValueError, StopIteration):
        return ""
    return f", which comes from {source}:{at}" if at else ""
