"""What is known of a cell. Every flag is computed from files; none is typed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msa_tiles import trees
from msa_tiles.files import make_directory, write_atomically
from msa_tiles.runtime import audit
from msa_tiles.runtime.build import Job, audit_compiled, ci_jobs
from msa_tiles.runtime.cache import Cache, default_root
from msa_tiles.runtime.registry import Cell, Registry, Target
from msa_tiles.sources import syntax_of

VERIFIED, COMPILED = "verified.json", "compiled.json"
DRAWN = 0.1  # of the points whose evidence is recorded, what continuous integration compiles again all the same
FLAGS = ("generated", "compiled", "simulated", "verified")  # from the weakest to the strongest


def is_compiled(cell: Cell, target: Target, cache: Cache | None = None) -> bool:
    """Whether this machine's cache holds every variant that continuous integration compiles, and each audit holds."""
    jobs = ci_jobs([cell])
    return bool(jobs) and all(not audit_compiled(job, target, cache) for job in jobs)


def read_compiled(generated: Path) -> dict[str, dict[str, Any]]:
    """`compiled.json`: cell id -> digest, audit, points, versions and date of the last run in which all points passed.

    Raises ValueError when the file is not what `msa-tiles build --audit` writes.
    """
    return _read(generated / COMPILED, "msa-tiles build --audit")


def compiled_of(registry: Registry) -> dict[str, dict[str, Any]]:
    """What `compiled.json` says of each cell, in its own tree or one above."""
    return _of(registry, read_compiled)


def verified_of(registry: Registry) -> dict[str, dict[str, Any]]:
    """What `verified.json` says of each cell, in its own tree or one above."""
    return _of(registry, read_verified)


def _of(registry: Registry, read: Callable[[Path], Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    layers = [(directory, read(directory)) for directory in registry.directories]
    found = {cell.id: _entry(cell, layers) for cell in registry.cells}
    return {name: entry for name, entry in found.items() if entry}


def _entry(cell: Cell, layers: Iterable[tuple[Path, Mapping[str, dict[str, Any]]]]) -> dict[str, Any]:
    entries = []
    for directory, layer in layers:
        if cell.id in layer:
            entries.append(layer[cell.id])
        if cell.file.is_relative_to(directory):
            break  # beneath lies another cell of that name: of the same code, maybe, at other points or tolerances
    return next((each for each in entries if each.get("digest") == cell.digest), entries[0] if entries else {})


def is_recorded(cell: Cell, target: Target, compiled: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether it is on record that every point of the cell as it is now was compiled, and passed the audit of now."""
    entry = compiled.get(cell.id, {})
    return (entry.get("digest"), entry.get("audit")) == (cell.digest, audit_digest(cell, target))


def audit_digest(cell: Cell, target: Target) -> str:
    """16 hex digits over what an audit of the cell asks for: the points, the plan, the target's limits, the audit."""
    plan = ("ci", "tile", "threads", "shared_memory", "registers", "tensor_memory", "expect", "forbid")
    asked = [
        {name: cell.entry[name] for name in plan},
        dataclasses.asdict(target),
        syntax_of(Path(str(audit.__file__)).read_text(encoding="utf-8")),
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def record_compiled(generated: Path, entries: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Write cells' entries to `compiled.json`; None takes one away."""
    trees.require_own(generated)
    make_directory(generated)
    document = read_compiled(generated) | {cell: dict(entry) for cell, entry in entries.items() if entry is not None}
    kept = {cell: entry for cell, entry in sorted(document.items()) if entries.get(cell, entry) is not None}
    write_atomically(generated / COMPILED, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def due(
    cells: Iterable[Cell], targets: Mapping[str, Target], compiled: Mapping[str, Mapping[str, Any]], seed: int
) -> list[Job]:
    """The points to compile for evidence: all of cells that are not on record, and a drawn part of the others'."""
    draw = random.Random(seed)
    jobs = []
    for cell in cells:
        recorded = is_recorded(cell, targets[cell.target], compiled)
        jobs += [job for job in ci_jobs([cell]) if draw.random() < DRAWN or not recorded]
    return jobs


def is_simulated(cell: Cell, root: Path | None = None) -> bool:
    """Whether every simulator case of the cell passed on this machine, with the digest that the cell has now.

    Only TileLang kernels can be simulated.
    """
    return cell.dsl == "tilelang" and _simulated_mark(cell, root).is_file()


def mark_simulated(cell: Cell, root: Path | None = None) -> None:
    """Record that every simulator case of the cell has just passed."""
    mark = _simulated_mark(cell, root)
    make_directory(mark.parent)
    mark.touch()


def _simulated_mark(cell: Cell, root: Path | None) -> Path:
    return (root or default_root()) / "simulated" / f"{cell.id}-{cell.digest}"


def read_verified(generated: Path) -> dict[str, dict[str, Any]]:
    """`verified.json`: cell id -> digest, card, date, worst errors (`accuracy.py`) and cases of the last complete run.

    Raises ValueError when the file is not what `msa-tiles verify` writes.
    """
    return _read(generated / VERIFIED, "msa-tiles verify")


def _read(path: Path, writer: str) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not all(isinstance(entry, dict) for entry in document.values()):
        raise ValueError(f"{path} is not what `{writer}` writes; delete it and run that again")
    return document


def has_run(cell: Cell, registry: Registry) -> bool:
    """`is_verified`, for dispatch: what the files say is remembered."""
    return verified_entry(cell, registry).get("digest") == cell.digest


def verified_entry(cell: Cell, registry: Registry) -> dict[str, Any]:
    """What `verified.json` says of a cell, of an earlier digest as well; empty where it says nothing. Remembered."""
    return _entry(cell, _verified_layers(*registry.directories))


@trees.cached(maxsize=8)
def _verified_layers(*directories: Path) -> tuple[tuple[Path, dict[str, dict[str, Any]]], ...]:
    return tuple((directory, read_verified(directory)) for directory in directories)


def is_verified(cell: Cell, verified: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the cell ran on its GPU, over the whole grid, with the digest it has now."""
    return verified.get(cell.id, {}).get("digest") == cell.digest


def status(flags: Mapping[str, bool]) -> str:
    """The strongest flag that holds, or `missing`."""
    return next((flag for flag in reversed(FLAGS) if flags.get(flag)), "missing")
