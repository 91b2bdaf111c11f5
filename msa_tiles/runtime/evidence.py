"""What is known of a cell. Every flag is computed from files; none is typed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msa_tiles.runtime.build import audit_compiled, ci_jobs
from msa_tiles.runtime.cache import Cache, default_root
from msa_tiles.runtime.registry import Cell, Target

VERIFIED = "verified.json"
FLAGS = ("generated", "compiled", "simulated", "verified")  # from the weakest to the strongest


def is_compiled(cell: Cell, target: Target, cache: Cache | None = None) -> bool:
    """Whether this machine's cache holds every variant that continuous integration compiles, and each audit holds."""
    jobs = ci_jobs([cell])
    return bool(jobs) and all(not audit_compiled(job, target, cache) for job in jobs)


def is_simulated(cell: Cell, root: Path | None = None) -> bool:
    """Whether every simulator case of the cell passed on this machine, with the digest that the cell has now.

    Only TileLang kernels can be simulated.
    """
    return cell.dsl == "tilelang" and _simulated_mark(cell, root).is_file()


def mark_simulated(cell: Cell, root: Path | None = None) -> None:
    """Record that every simulator case of the cell has just passed."""
    mark = _simulated_mark(cell, root)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _simulated_mark(cell: Cell, root: Path | None) -> Path:
    return (root or default_root()) / "simulated" / f"{cell.id}-{cell.digest}"


def read_verified(generated: Path) -> dict[str, dict[str, Any]]:
    """`verified.json`: cell id -> digest, card, date, worst error and cases of the last complete run.

    Raises ValueError when the file is not what `msa-tiles verify` writes.
    """
    path = generated / VERIFIED
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or not all(isinstance(entry, dict) for entry in document.values()):
        raise ValueError(f"{path} is not what `msa-tiles verify` writes; delete it and verify again")
    return document


def is_verified(cell: Cell, verified: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the cell ran on its GPU, over the whole grid, with the digest it has now."""
    return verified.get(cell.id, {}).get("digest") == cell.digest


def status(flags: Mapping[str, bool]) -> str:
    """The strongest flag that holds, or `missing`."""
    return next((flag for flag in reversed(FLAGS) if flags.get(flag)), "missing")
