"""The line that somebody wrote, of one that was generated from it: of a skeleton, or of an operand that was copied."""

from __future__ import annotations

import difflib
import re

_STATEMENT = re.compile(r"\s*# %.*")
_MARKS = re.compile(r"\s*# (?:<-|% if ).*")
_VALUE = re.compile(r"([A-Za-z_]\w*(?:\s*:[^=]+)?\s*=)\s*\S.*# <- [\w.]+")
_OPERAND = re.compile(r"(\s*from [\w.]+\.operands import) \w+( as \w+)")


def line_in(source: str, text: str, line: int) -> int | None:
    """Which line of a source a line of the text that was made of it comes from; None where none has its words."""
    made, written = text.splitlines(), source.splitlines()
    if not 0 < line <= len(made):
        return None
    values = {match[1] for match in map(_VALUE.fullmatch, written) if match}
    ours = [_bare(each, values) for each in made]
    theirs = [_bare(each, values) for each in written]
    # Lines of templates have no counterpart, and take the place of none.
    kept = [number for number, each in enumerate(written) if not _STATEMENT.fullmatch(each)]
    matcher = difflib.SequenceMatcher(None, ours, [theirs[number] for number in kept], autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.a <= line - 1 < block.a + block.size:
            return kept[block.b + line - 1 - block.a] + 1
    return None


def _bare(line: str, values: set[str]) -> str:
    """A line without what rendering replaces."""
    line = _OPERAND.sub(r"\1\2", _MARKS.sub("", line))
    name = line.partition("=")[0] + "="
    return name if name in values else line.rstrip()
