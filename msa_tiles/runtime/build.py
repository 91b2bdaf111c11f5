"""Compile many kernels ahead of time, in worker processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from msa_tiles.runtime import audit, toolchain
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import CompileError, compile_variant, find_compiled, variant_text
from msa_tiles.runtime.registry import Cell, Target


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


def build(
    jobs: Iterable[Job],
    targets: Mapping[str, Target],
    *,
    workers: int = 1,
    audited: bool = True,
    cache: Cache | None = None,
) -> Iterator[Outcome]:
    """Compile jobs, audit them, and yield each outcome as it comes.

    With more than one worker the jobs run in processes of their own, started afresh: the compiler is safe neither to
    fork nor to share between threads.
    """
    jobs, cache = list(jobs), cache or Cache()
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            result = _compile(job.cell, job.variant, targets[job.cell.target].arch, audited, cache)
            yield _outcome(job, targets[job.cell.target], audited, result)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        running = {
            pool.submit(_compile, job.cell, job.variant, targets[job.cell.target].arch, audited, cache): job
            for job in jobs
        }
        for future in concurrent.futures.as_completed(running):
            try:
                result = future.result()
            except BrokenProcessPool:
                result = "not compiled: a compiler process died"
            job = running[future]
            yield _outcome(job, targets[job.cell.target], audited, result)


def audit_compiled(job: Job, target: Target, cache: Cache | None = None) -> tuple[str, ...]:
    """What is wrong with a variant as it lies in the cache; that it is not there is a complaint too."""
    entry = find_compiled(job.cell, job.variant, target.arch, cache)
    return ("not compiled",) if entry is None else _audit(job, target, entry)


def _audit(job: Job, target: Target, entry: Entry) -> tuple[str, ...]:
    try:
        return tuple(audit.complaints(job.cell, job.variant, target, entry))
    except toolchain.ToolchainError as error:
        return (str(error),)


def _compile(
    cell: Cell, variant: Mapping[str, int], arch: str, audited: bool, cache: Cache
) -> tuple[Entry, float] | str:
    """The entry and seconds, or why nothing came out: not every exception survives the way between processes."""
    try:
        start = time.perf_counter()
        entry = compile_variant(cell, variant, arch, cache)
        seconds = time.perf_counter() - start
    except (CompileError, toolchain.ToolchainError, OSError) as error:
        return f"not compiled: {error}"
    if audited:
        # Measured here, so that the disassemblers run side by side too; who reads the verdict hears of their absence.
        with contextlib.suppress(toolchain.ToolchainError):
            audit.measured(entry)
    return entry, seconds


def _outcome(job: Job, target: Target, audited: bool, result: tuple[Entry, float] | str) -> Outcome:
    if isinstance(result, str):
        return Outcome(job, None, 0.0, (result,))
    entry, seconds = result
    return Outcome(job, entry, seconds, _audit(job, target, entry) if audited else ())
