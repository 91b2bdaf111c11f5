"""Rows of `perf/results/<card>.jsonl`."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msa_tiles import paths

RESULTS = Path(__file__).resolve().parent / "results"

FIELDS = ("op", "case", "precision", "dsl", "ms", "floor_ms", "baselines", "digest", "card", "date")
"""Fields that every row has; others may follow."""


def path_for(card: str) -> Path:
    """The results file of a card, by the name CUDA gives it."""
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".jsonl")


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one row. Raises ValueError when it lacks one of `FIELDS`."""
    missing = [name for name in FIELDS if name not in row]
    if missing:
        raise ValueError(f"row lacks {', '.join(missing)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, oldest first."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield json.loads(line)


def latest(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The last row of each (op, case, precision)."""
    return {(row["op"], row["case"], row["precision"]): row for row in read(path)}


def digest_of(cells: Sequence[str]) -> str:
    """The digests of these cells in `generated/index.json`, joined by "+". Raises ValueError for an unknown cell."""
    index = json.loads((paths.generated_dir() / "index.json").read_text(encoding="utf-8"))
    digests = {cell["id"]: cell["digest"] for cell in index["cells"]}
    for cell in cells:
        if cell not in digests:
            raise ValueError(f"no generated cell {cell!r}; there are {', '.join(sorted(digests))}")
    return "+".join(digests[cell] for cell in cells)


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
