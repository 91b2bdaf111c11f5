"""Run the grid, keep a journal, and write `verified.json` when every case of a cell has passed.

The journal holds one line per passed case below the kernel cache, under the cell's digest and the card: a run that was
stopped goes on where it stopped. It is removed once the cell is through.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from msa_tiles.files import make_directory, write_atomically
from msa_tiles.library.remember import forget_all
from msa_tiles.runtime import dispatch, toolchain
from msa_tiles.runtime.cache import default_root
from msa_tiles.runtime.evidence import VERIFIED, read_verified
from msa_tiles.runtime.registry import Cell
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case, Disagreement
from msa_tiles.verify.compare import Error, Errors
from msa_tiles.verify.inputs import Source, poison_free_memory
from msa_tiles.verify.operators import CHECKS

REPEATS = 3  # runs that must agree bit for bit


@dataclass(frozen=True)
class Result:
    """What came of one case. `failure` is None when it passed."""

    case: Case
    seed: int
    errors: Errors
    failure: str | None


@contextlib.contextmanager
def own(cell: Cell) -> Iterator[None]:
    """This cell serves every call of the block that it accepts, and calls before and behind it are not remembered."""
    forget_all()
    try:
        with dispatch.preferring(cell):
            yield
    finally:
        forget_all()


def run_case(case: Case, device: torch.device, seed: int, backend: str) -> Errors:
    """The worst error of each output over the case's two settings: packed tensors, then strided ones, buffers and
    shorter keys. The case's cell serves them, also where dispatch would choose another that takes the same tensors.

    Raises Disagreement, also where the calls found another kernel, and whatever the operator raises.
    """
    with own(case.cell), dispatch.finding() as found:
        errors = _run_settings(case, device, seed, backend)
    ran = {kernel.cell.id for kernel in found if kernel.cell.op == case.cell.op}
    # Where no query has a key an operator may launch nothing.
    works = any(queries and keys for queries, keys in case.workload.sequences)
    if backend != "reference" and ran != {case.cell.id} and (ran or works):
        raise Disagreement(f"{case.cell.id} did not run; the calls found {', '.join(sorted(ran)) or 'none'}")
    return errors


def _run_settings(case: Case, device: torch.device, seed: int, backend: str) -> Errors:
    errors: list[Errors] = []
    for strided in (False, True):
        check = CHECKS[case.cell.op](case, Source(device, seed + strided, case.workload.values), strided, backend)
        poison_free_memory(device)
        outputs = check.run(into_buffers=strided)
        errors.append(check.compare(outputs))
        for _ in range(REPEATS - 1):
            repeated = check.run(into_buffers=strided)
            if not getattr(check, "repeatable", True):
                errors.append(check.compare(repeated))
                continue
            for first, again in zip(outputs, repeated, strict=True):
                compare.same_bits("repeated", again, first)
    return compare.largest(errors)


def sample(cells: Iterable[tuple[Cell, list[Case]]], device: torch.device, seed: Callable[[], int]) -> Iterator[Result]:
    """Run these cases and yield each result; nothing is recorded."""
    for cell, cases in cells:
        for case in cases:
            yield _attempt(case, device, seed(), cell.dsl)


def run(
    cells: Iterable[tuple[Cell, list[Case]]],
    device: torch.device,
    generated: Path,
    *,
    seed: Callable[[], int],
    backend: str | None = None,
    root: Path | None = None,
) -> Iterator[Result]:
    """Run the cases that the journal lacks, yield each result, and keep `generated/verified.json` up to date.

    A cell that passes everything gets an entry at once; one that fails loses the entry that its digest may have had.
    """
    card = _card(device)
    for cell, cases in cells:
        journal = Journal((root or default_root()) / "verify", cell, card)
        passed = journal.read()
        failed = False
        for case in cases:
            if case.key in passed:
                continue
            result = _attempt(case, device, seed(), backend or cell.dsl)
            if result.failure is None:
                passed[case.key] = result.errors
                journal.append(case.key, result)
            else:
                failed = True
            yield result
        if failed:
            _write(generated, cell, None, journal.path.parent)
        else:
            entry = {
                "digest": cell.digest,
                "card": card,
                "date": datetime.date.today().isoformat(),
                "errors": {name: error._asdict() for name, error in sorted(compare.largest(passed.values()).items())},
                "cases": len(cases),
                "versions": dict(toolchain.generator_versions(cell.dsl)),
            }
            _write(generated, cell, entry, journal.path.parent)
            journal.remove()


def due(cells: Iterable[tuple[Cell, list[Case]]], device: torch.device, root: Path | None = None) -> list[Case]:
    """The cases that `run` would run: those that the journal lacks."""
    card = _card(device)
    left = []
    for cell, cases in cells:
        passed = Journal((root or default_root()) / "verify", cell, card).read()
        left += [case for case in cases if case.key not in passed]
    return left


class Journal:
    """Passed cases of one cell, digest and card: one JSON object a line."""

    def __init__(self, directory: Path, cell: Cell, card: str) -> None:
        slug = re.sub(r"\W+", "-", card)
        self.path = directory / f"{cell.id}-{cell.digest}-{slug}.jsonl"

    def read(self) -> dict[str, Errors]:
        """Case key -> worst errors. A line that a killed run left unfinished, or without outputs, is ignored."""
        found: dict[str, Errors] = {}
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                found[entry["case"]] = {name: Error(**error) for name, error in entry["errors"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        return found

    def append(self, key: str, result: Result) -> None:
        """Add a passed case."""
        make_directory(self.path.parent)
        with self.path.open("a") as file:
            errors = {name: error._asdict() for name, error in result.errors.items()}
            file.write(json.dumps({"case": key, "seed": result.seed, "errors": errors}) + "\n")

    def remove(self) -> None:
        """Forget the cases, so that the next run starts afresh."""
        self.path.unlink(missing_ok=True)


def _attempt(case: Case, device: torch.device, seed: int, backend: str) -> Result:
    try:
        errors = run_case(case, device, seed, backend)
    except Disagreement as error:
        return Result(case, seed, {}, str(error))
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Result(case, seed, {}, "out of memory")
    except (RuntimeError, ValueError, TypeError) as error:
        # A kernel that faults takes the CUDA context with it, and every later case would fail for that reason alone.
        _raise_if_lost(device, error)
        return Result(case, seed, {}, f"{type(error).__name__}: {error}")
    return Result(case, seed, errors, None)


def _raise_if_lost(device: torch.device, error: Exception) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise RuntimeError(f"the GPU was lost; run again to go on after mending this: {error}") from error


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _write(generated: Path, cell: Cell, entry: Mapping[str, Any] | None, locks: Path) -> None:
    make_directory(generated)
    with _alone(locks):
        document = read_verified(generated)
        if entry is not None:
            document[cell.id] = dict(entry)
        elif document.pop(cell.id, None) is None:
            return
        text = json.dumps(dict(sorted(document.items())), indent=1, sort_keys=True) + "\n"
        write_atomically(generated / VERIFIED, text)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Whoever else changes the record waits, where the file system has locks."""
    make_directory(directory)
    with (directory / ".record.lock").open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
