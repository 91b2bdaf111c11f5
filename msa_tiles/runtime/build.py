"""Compile many kernels ahead of time, in worker processes."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msa_tiles.errors import ToolError
from msa_tiles.runtime import audit, toolchain
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import USUAL_SECONDS, find_compiled, variant_text
from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.runtime.workers import Done, Task, Workers, perform


@dataclass(frozen=True)
class Job:
    """One variant of one cell to compile."""

    cell: Cell
    variant: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.cell.id} {variant_text(self.variant)}"


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    entry: Entry | None  # None when it did not compile
    seconds: float  # time spent on it; next to nothing when the cache had it
    complaints: tuple[str, ...]  # why it did not compile, or what the audit found

    @property
    def good(self) -> bool:
        return not self.complaints


def ci_jobs(cells: Iterable[Cell]) -> list[Job]:
    """The variants of these cells that continuous integration compiles."""
    return [Job(cell, variant) for cell in cells for variant in cell.ci]


def missing(jobs: Iterable[Job], targets: Mapping[str, Target], cache: Cache | None = None) -> list[Job]:
    """The jobs whose kernels the cache lacks."""
    return [job for job in jobs if not _is_cached(job, targets[job.cell.target], cache)]


def _is_cached(job: Job, target: Target, cache: Cache | None) -> bool:
    try:
        return find_compiled(job.cell, job.variant, target.arch, cache) is not None
    except (ToolError, OSError):  # of which `build` tells
        return False


def usual_seconds(jobs: Iterable[Job], workers: int) -> tuple[float, float]:
    """How long it usually takes, at least and at most, to compile so many kernels side by side."""
    usual = [USUAL_SECONDS[job.cell.dsl] for job in jobs]
    side_by_side = max(1, min(workers, len(usual)))
    return sum(low for low, _ in usual) / side_by_side, sum(high for _, high in usual) / side_by_side


def build(
    jobs: Iterable[Job],
    targets: Mapping[str, Target],
    *,
    workers: int = 1,
    audited: bool = True,
    cache: Cache | None = None,
    apart: bool = False,
) -> Iterator[Outcome]:
    """Compile jobs, audit them, and yield each outcome as it comes.

    With more than one worker, or `apart`, the jobs run in processes of their own; one that dies takes its job with it
    and no other, and this process hears of Ctrl-C while they compile.
    """
    jobs, cache = list(jobs), cache or Cache()
    tasks = [(Task(job.cell, job.variant, targets[job.cell.target].arch, cache.root, audited), job) for job in jobs]
    if workers <= 1 and not apart and sys.flags.optimize < 2:  # without docstrings TileLang cannot even be imported
        for task, job in tasks:
            yield _outcome(job, targets[job.cell.target], audited, lambda task=task: perform(task))  # type: ignore[misc]
        return
    pool = Workers(max(workers, 1))
    try:
        running = {pool.submit(task): job for task, job in tasks}
        for future in concurrent.futures.as_completed(running):
            job = running[future]
            yield _outcome(job, targets[job.cell.target], audited, future.result)
    finally:
        pool.close()


def audit_compiled(job: Job, target: Target, cache: Cache | None = None) -> tuple[str, ...]:
    """What is wrong with a variant as it lies in the cache; that it is not there is a complaint too."""
    entry = find_compiled(job.cell, job.variant, target.arch, cache)
    return ("not compiled",) if entry is None else _audit(job, target, entry)


def _audit(job: Job, target: Target, entry: Entry) -> tuple[str, ...]:
    try:
        return tuple(audit.complaints(job.cell, job.variant, target, entry))
    except toolchain.ToolchainError as error:
        return (str(error),)


def _outcome(job: Job, target: Target, audited: bool, done: Callable[[], Done]) -> Outcome:
    try:
        entry, seconds, _ = done()
    except (ToolError, OSError) as error:
        return Outcome(job, None, 0.0, (f"not compiled: {str(error).removeprefix(f'{job}: ').lstrip()}",))
    return Outcome(job, entry, seconds, _audit(job, target, entry) if audited else ())
