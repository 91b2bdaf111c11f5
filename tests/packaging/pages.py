"""Reads a page of documentation: the files that it has one write, and the commands that it has one run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOME = "/home/you"  # where readers of the page are
ANY = "…"
_BLOCK = re.compile(r"(?:^`(?P<file>\S+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


class Step(NamedTuple):
    """A file to write, or a command and what it prints."""

    file: str
    command: str
    text: str


def steps(page: Path) -> Iterator[Step]:
    """The steps of a page in their order. Blocks of `sh`, `text` and `py` are for readers."""
    for block in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["file"]:
            yield Step(block["file"], "", block["text"])
        elif block["kind"] == "console":
            for part in re.split(r"^\$ ", block["text"], flags=re.M)[1:]:
                command, _, output = part.partition("\n")
                yield Step("", command, output)


def same(wanted: str, printed: str) -> bool:
    """Whether a command printed what the page shows, where a line of `…` stands for lines and `…` in one for text."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ANY else ".*".join(map(re.escape, line.split(ANY))) + r"\n"
        for line in wanted.splitlines()
    )
    return re.fullmatch(pattern, printed) is not None
