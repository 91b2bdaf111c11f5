"""Rows of `perf/results/<card>.jsonl`."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msa_tiles import paths, trees
from msa_tiles.spec.model import DSLS

Row = Mapping[str, Any]
Key = tuple[str, str, str, str]

FIELDS = ("op", "case", "precision", "dsl", "ms", "floor_ms", "baselines", "digest", "card", "date")
"""Fields that every row has; others may follow."""


def file_name(card: str) -> str:
    """The name of a card's results, by the name CUDA gives the card."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".jsonl"


def append(path: Path, row: Row) -> None:
    """Add one row. Raises ValueError when it lacks one of `FIELDS`."""
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise ValueError(f"row lacks {', '.join(missing)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, oldest first. Raises ValueError for a line that is no row."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no file of results: it is not text ({error.reason})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        missing = [name for name in FIELDS if name not in row] if isinstance(row, dict) else list(FIELDS)
        if missing:
            raise ValueError(f"{path}:{number} is no row of results: it lacks {', '.join(missing)}")
        for name, value in row.items():
            if name in _WANTED and not _WANTED[name][1](value):
                raise ValueError(
                    f"{path}:{number} is no row of results: {name} is {value!r}, wanted {_WANTED[name][0]}"
                )
        yield row


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


_WANTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: ("a string", lambda value: isinstance(value, str)) for name in FIELDS},
    "dsl": (" or ".join(DSLS), lambda value: value in DSLS),
    "ms": ("milliseconds", _is_time),
    "floor_ms": ("milliseconds or null", lambda value: value is None or value == 0 or _is_time(value)),
    "baselines": (
        "milliseconds by peer",
        lambda value: isinstance(value, dict) and all(map(_is_time, value.values())),
    ),
}


def latest(rows: Iterable[Row]) -> dict[Key, Row]:
    """The last row of each (op, case, precision, DSL)."""
    return {(row["op"], row["case"], row["precision"], row["dsl"]): row for row in rows}


def digests() -> frozenset[str]:
    """The digests of the kernels as they are now, those of the trees in use included."""
    folders = [paths.generated_dir(), *(tree.generated for tree in trees.stack())]
    files = [file for folder in folders if (file := folder / "index.json").is_file()]
    indices = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return frozenset(cell["digest"] for index in indices for cell in index["cells"])


def is_stale(row: Row, current: frozenset[str]) -> bool:
    """Has a kernel that the row timed changed since? A row that names none is as good as old."""
    timed = [digest for digest in row["digest"].split("+") if digest]
    return not timed or not current.issuperset(timed)


def fresh(rows: Iterable[Row], current: frozenset[str]) -> list[Row]:
    """Those that timed the kernels as they are now; all of them where none did."""
    rows = list(rows)
    return [row for row in rows if not is_stale(row, current)] or rows


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
