"""A run of `msa-tiles bench`: which cases there are to do, and doing them one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from msa_tiles import names
from msa_tiles.bench import cases, harness, rows
from msa_tiles.bench.harness import Benchmark, Say
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.bench.precisions import chosen as named_precisions
from msa_tiles.bench.precisions import part
from msa_tiles.bench.sensors import Sensors, driver_version
from msa_tiles.bench.timing import Clock, CudaClock
from msa_tiles.runtime.facts import DeviceFacts
from msa_tiles.runtime.registry import Registry

PEERS = (
    *("vllm", "fa4", "cudnn", "torch", "dense_bytes", "flash_msa", "flashinfer"),
    *("bf16", "fp8", "fp8_index", "by_name", "without"),
)
"""Every peer that some operator has."""


class DeviceLost(RuntimeError):
    """A kernel left the device in a state in which nothing runs any more in this process."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One case of one operator in one precision."""

    benchmark: Benchmark
    label: str
    precision: str

    def __str__(self) -> str:
        return f"{self.benchmark.op} {self.label} {self.precision}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How jobs are run; `peers` is None for all of them."""

    dsls: tuple[str, ...]
    peers: tuple[str, ...] | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Done:
    """What came of a job: its rows, and why something of ours is not in them."""

    job: Job
    rows: Sequence[dict[str, Any]] = ()
    skipped: str = ""
    failures: Sequence[str] = ()


def plan(ops: Sequence[str], labels: Sequence[str], precisions: Sequence[str]) -> list[Job]:
    """The jobs of these operators, cases and precisions; of all of them where nothing is named.

    Raises ValueError for an operator that is not benchmarked, for a case or precision that none of them has, and where
    nothing is left.
    """
    names.check("benchmark OP", ops, BENCHMARKS)
    chosen = [benchmark for op, benchmark in BENCHMARKS.items() if not ops or op in ops]
    names.check("--cases", labels, [label for benchmark in chosen for label in benchmark.labels])
    try:
        wanted = named_precisions(
            precisions,
            [name for benchmark in chosen for name in benchmark.precisions],
            [name for benchmark in chosen for name in benchmark.on_request],
        )
    except ValueError as error:
        raise ValueError(f"--precision: {error}") from error
    jobs = [
        Job(benchmark, label, precision)
        for benchmark in chosen
        for precision in (*benchmark.precisions, *benchmark.on_request)
        if precision in wanted
        for label in benchmark.labels
        if not labels or label in labels
    ]
    if not jobs:
        raise ValueError("no case is of all that --cases, --precision and OP name; leave one of them out")
    return jobs


def missing_kernels(job: Job, dsls: Sequence[str], target: str | None, registry: Registry) -> str:
    """Why none of these DSLs can run the job on this target: an operator without a kernel; empty when one can."""
    for dsl in dsls:
        if all(registry.select(op, dsl, target, part(op, job.precision)) for op in job.benchmark.parts):
            return ""
    lacking = [
        op
        for op in job.benchmark.parts
        if not any(registry.select(op, dsl, target, part(op, job.precision)) for dsl in dsls)
    ]
    return f"no {' or '.join(dsls)} kernel of {', '.join(lacking or job.benchmark.parts)} for {target}, {job.precision}"


def run(
    jobs: Iterable[Job],
    settings: Settings,
    device: torch.device,
    facts: DeviceFacts,
    registry: Registry,
    say: Say,
    *,
    clock: Clock | None = None,
    l2_bytes: int | None = None,
) -> Iterator[Done]:
    """Do the jobs one after the other; the memory of one is free before the next begins.

    A job that fails leaves the others their turn, unless the device no longer answers: then DeviceLost is raised.
    """
    if l2_bytes is None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    clock = CudaClock(Sensors(device)) if clock is None else clock
    machine = machine_facts(facts.name)
    for job in jobs:
        say(str(job))
        reason = missing_kernels(job, settings.dsls, facts.target, registry)
        failed = ""
        if not reason:
            try:
                done = _one(job, settings, device, facts.name, machine, clock, l2_bytes, say)
            except torch.OutOfMemoryError:
                reason = "its inputs do not fit this card's memory"
            except RuntimeError as error:
                failed = harness.first_line(error)
        if reason:
            say(f"  skipped: {reason}")
            done = Done(job, skipped=reason)
        elif failed:
            say(f"  failed: {failed}")
            done = Done(job, failures=(f"{job}: {failed}",))
        # The rows are kept first: giving back the memory of a large case takes a while.
        yield done
        # A device that is lost answers no call, that for its memory neither.
        if done.failures:
            _still_answers(device)
        harness.release()


def _one(
    job: Job,
    settings: Settings,
    device: torch.device,
    card: str,
    machine: dict[str, Any],
    clock: Clock,
    l2_bytes: int,
    say: Say,
) -> Done:
    torch.manual_seed(0)
    bench = job.benchmark.prepare(job.benchmark.find(job.label), device, job.precision)
    if settings.peers is not None:
        bench = harness.only_peers(bench, settings.peers)
    result = harness.run(bench, settings.dsls, clock, l2_bytes, settings.seconds, say)
    floor = cases.floor_ms(job.benchmark.work(job.label, job.precision), card)
    stamp = rows.now()
    machine = machine | {"date": stamp.date().isoformat(), "run": stamp.isoformat(timespec="milliseconds")}
    made = harness.rows_of(bench, result, job.precision, floor, settings.seconds, machine)
    failures = [f"{job}, {dsl}: {reason}" for dsl, reason in result.wrong.items()]
    refusals = [result.skipped[dsl] for dsl in settings.dsls if dsl in result.skipped]
    skipped = "" if made or failures else "; ".join(refusals)
    for row in made:
        say(f"  = {row['dsl']:<9} {summary(row)}")
    return Done(job, made, skipped, failures)


def _still_answers(device: torch.device) -> None:
    """A kernel that read where it must not takes the whole process down with it: nothing after it can be trusted."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"the device stopped answering, the rest was left out: {harness.first_line(error)}") from error


def summary(row: rows.Row) -> str:
    """One line: ours, the floor, and the ratio to each peer."""
    floor = "no floor known" if row["floor_ms"] is None else f"floor {row['floor_ms']:.4f} ms"
    ratios = ", ".join(f"{ms / row['ms']:.2f}x {name}" for name, ms in row["baselines"].items())
    return f"{row['ms']:.4f} ms ({floor}); {ratios or 'no peer timed'}"


def machine_facts(card: str) -> dict[str, Any]:
    """What rows say of the machine."""
    return {
        "card": card,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
