"""What marks of a skeleton say of tile sizes without rendering it: rows that have other mistakes are not rendered."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msa_tiles.names import meant
from msa_tiles.spec import KernelRow, Location
from msa_tiles.spec.source import shown
from msa_tiles.syntax import text_of

_MARK = re.compile(r"# (?:%|<-)(?P<words>.*)")
_SIZE = re.compile(r"\btile(?:\.|\[[\"']|\.get\([\"'])(?P<name>[A-Za-z]\w*)")
_VALUE = re.compile(r"<- (?P<path>tile\.(?P<name>\w+))\s*$")
_OPENS, _CLOSES = re.compile(r"\s*# % (if|for)\b"), re.compile(r"\s*# % end(if|for)\b")


def sizes_of(skeleton: str) -> list[str]:
    """The tile sizes that marks of a skeleton name, in whatever branch."""
    marks = (mark["words"] for mark in map(_MARK.search, skeleton.splitlines()) if mark)
    return list(dict.fromkeys(found["name"] for words in marks for found in _SIZE.finditer(words)))


def no_value(path: str, name: str) -> str:
    """The sentence about a mark that takes what there is not."""
    if path == f"tile.{name}":
        return f"tile lacks {name!r}, which the skeleton takes"
    return f"{path!r} has no value: {name!r} is unknown"


def no_module(role: str, name: str, module: str) -> str:
    """The sentence about an operand that lies neither where the shipped ones do nor in a tree."""
    dsl = module.split(".")[-2]
    folders = [Path(folder) for folder in importlib.import_module(module).__path__]
    near = meant(name, sorted({file.stem for folder in folders for file in folder.glob("*.py")} - {"__init__"}))
    return f"operands.{role} is {name}, which is no module of {module}, nor a tree's operands/{dsl}/{name}.py{near}"


def unread(name: str, file: str, wanted: Collection[str], tile: Collection[str]) -> str:
    """The sentence about a tile size that nothing reads; `wanted` are those that the skeleton names."""
    sentence = f"tile.{name} is read by neither {file} nor a formula of the row"
    return sentence + meant(name, [each for each in wanted if each not in tile])


def sizes_amiss(
    op: str, row: KernelRow, folders: Sequence[Path], families: Collection[str], broken: Collection[str] = ()
) -> Iterator[str]:
    """Sentences about the tile sizes of a row: those that nothing can read, and those that every kernel must have.

    None where a skeleton is `broken`: what it would read nobody knows.

    A row whose MMA is none of the `families` that there are may be meant for any skeleton of its operator and DSL.
    """
    name = "_".join(filter(None, (op, row.algorithm)))
    family = row.mma if row.mma in families else "*"
    places = (sorted((folder / row.dsl).glob(f"{family}/{name}.py")) for folder in folders if row.dsl)
    paths = next((found for found in places if found), [])
    if not paths or any(shown(path) in broken for path in paths):
        return
    texts = {shown(path): text_of(path) for path in paths}
    if row.mma in families and "tile" in row.key_lines:
        for file, text in texts.items():
            yield from _missing(row, file, text)
    wanted = list(dict.fromkeys(size for text in texts.values() for size in sizes_of(text)))
    # A formula that could not be read may name any size.
    if any(getattr(row, key) is None for key in ("threads", "shared_memory") if key in row.key_lines):
        return
    formulas = frozenset[str]().union(*(each.names for each in (row.threads, row.shared_memory) if each is not None))
    for size in row.tile:
        if size not in wanted and size not in formulas:
            yield unread(size, ", ".join(texts), wanted, row.tile)


def _missing(row: KernelRow, file: str, text: str) -> Iterator[str]:
    """The sizes that value lines outside of branches take and the row has not."""
    depth = 0
    for number, line in enumerate(text.splitlines(), start=1):
        value = _VALUE.search(line)
        if value and not depth and "# %" not in line and value["path"] not in row.key_lines:
            yield f"{no_value(value['path'], value['name'])} ({Location(file, number)})"
        depth += bool(_OPENS.match(line)) - bool(_CLOSES.match(line))
