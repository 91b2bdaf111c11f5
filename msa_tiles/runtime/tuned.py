"""What was measured: milliseconds of each DSL's kernel, per target, operator, precision and call size.

`generated/tuned.json` is written by `msa-tiles tune` on a GPU and committed. Dispatch prefers the kernel that was
fastest at the measured size nearest to the call's, among those that `msa-tiles verify` saw agree with the reference,
if any did. A figure of an earlier digest counts too, until `msa-tiles tune` runs again: kernels of two DSLs differ by
more than one does from its last version. Where no kernel of a precision was timed, the DSL goes first that was the
faster one in another precision of the operator; without any figures the order is that of `DSLS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msa_tiles import trees
from msa_tiles.files import make_directory, write_atomically
from msa_tiles.runtime.registry import Cell
from msa_tiles.spec.model import DSLS

TUNED = "tuned.json"


@dataclass(frozen=True)
class Figure:
    """One workload of one operator, timed for every cell that serves it."""

    op: str
    target: str
    precision: str
    workload: str
    queries: int
    card: str
    date: str
    ms: Mapping[str, float]  # cell id -> milliseconds
    digests: Mapping[str, str]  # cell id -> digest that was timed

    def fresh(self, cell: Cell) -> bool:
        """Was this very kernel timed?"""
        return self.digests.get(cell.id) == cell.digest


def bucket(queries: int) -> int:
    """Calls whose sizes share their highest bit are alike."""
    return max(queries, 1).bit_length()


def nearest(figures: Iterable[Figure], size: int) -> Figure | None:
    """The figure whose size is closest to bucket ``size``; of two equally close ones the larger."""
    return min(figures, key=lambda f: (abs(bucket(f.queries) - size), -f.queries), default=None)


def counting(figures: Iterable[Figure], cells: Iterable[Cell]) -> list[Figure]:
    """The figures by which to choose among these cells of an operator: theirs, or else those of other precisions."""
    figures, cells = list(figures), list(cells)
    own = [figure for figure in figures if any(cell.id in figure.ms for cell in cells)]
    kinds = {(cell.op, cell.target) for cell in cells}
    return own or [figure for figure in figures if (figure.op, figure.target) in kinds]


def times(figure: Figure, cells: Iterable[Cell]) -> dict[str, float]:
    """Milliseconds of each cell that has any; of another precision's figure, those of the cell's DSL."""
    cells = list(cells)
    if any(cell.id in figure.ms for cell in cells):
        return dict(figure.ms)
    of_dsl: dict[str, float] = {}
    for each, ms in figure.ms.items():
        dsl = each.split(".")[1]
        of_dsl[dsl] = min(ms, of_dsl.get(dsl, ms))
    return {cell.id: of_dsl[cell.dsl] for cell in cells if cell.dsl in of_dsl}


def preference(cell: Cell, ms: Mapping[str, float]) -> tuple[float, int]:
    """Sorts cells of equal evidence by their milliseconds: those with any first, the others in the default order."""
    return ms.get(cell.id, float("inf")), DSLS.index(cell.dsl)


def read(directory: Path) -> tuple[Figure, ...]:
    """The committed figures; none when there is no file. Raises ValueError for one that is malformed."""
    path = directory / TUNED
    if not path.exists():
        return ()
    try:
        return tuple(Figure(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["figures"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not what `msa-tiles tune` writes ({error}); delete it and run that again"
        ) from error


def write(directory: Path, figures: Iterable[Figure]) -> None:
    """Replace the figures of the same operator, target, precision and workload; keep the others."""
    make_directory(directory)
    kept = {_key(figure): figure for figure in read(directory)}
    kept |= {_key(figure): figure for figure in figures}
    entries: list[dict[str, Any]] = [asdict(kept[key]) for key in sorted(kept)]
    text = json.dumps({"figures": entries}, indent=1, sort_keys=True) + "\n"
    write_atomically(directory / TUNED, text)


def _key(figure: Figure) -> tuple[str, str, str, str]:
    return figure.target, figure.op, figure.precision, figure.workload


@trees.cached(maxsize=8)
def figures_of(*directories: Path) -> tuple[Figure, ...]:
    """`read`, remembered: dispatch asks for every new kind of call. What stands in several counts in the first."""
    found: dict[tuple[str, str, str, str], Figure] = {}
    for directory in reversed(directories):
        found |= {_key(figure): figure for figure in read(directory)}
    return tuple(found.values())
