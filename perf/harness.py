"""Runs one case of one benchmark: check everybody, time everybody in both orders, write a row."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from perf import cases, rows
from perf.timing import Call, Clock, CudaClock, Timing, measure, sets_needed

OURS = "ours"


@dataclass(frozen=True)
class Contender:
    """Something to time. `bind(inputs)` prepares layouts, untimed, and returns the call; its result goes to `check`.

    `check(inputs, result)` compares with the reference and returns a sentence when the result is wrong.
    """

    name: str
    bind: Callable[[Any], Call]
    check: Callable[[Any, Any], str | None]


@dataclass(frozen=True)
class Skipped:
    """A baseline that is not timed, and why."""

    name: str
    reason: str


class NamedCase(Protocol):
    """What a case tells the harness: the operator and the name of a row."""

    @property
    def op(self) -> str: ...

    @property
    def label(self) -> str: ...


@dataclass(frozen=True)
class Bench:
    """A case ready to run. `make(seed)` builds one set of inputs of about `bytes_per_set`; `cells` ran it."""

    case: NamedCase
    make: Callable[[int], Any]
    bytes_per_set: int
    ours: Contender
    peers: Sequence[Contender | Skipped]
    cells: Sequence[str]
    floor_ops: Sequence[str] = ()
    """Operators whose floors add up to this one's; its own when empty."""
    floor_ms: float | None = None
    """The floor itself, for cases that no spec describes."""


@dataclass
class Result:
    """Figures of all contenders, per order in which they ran."""

    timings: dict[str, list[Timing]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    num_sets: int = 1

    def sustained(self, name: str) -> float:
        return statistics.mean(timing.sustained_ms for timing in self.timings[name])

    def median(self, name: str) -> float:
        return statistics.mean(timing.median_ms for timing in self.timings[name])


class WrongResult(RuntimeError):
    """The operator under test disagrees with the reference, so that its time means nothing."""


def run(bench: Bench, clock: Clock, l2_bytes: int, seconds: float, say: Callable[[str], None]) -> Result:
    """Check all contenders on the first input set, then time them, ours first and then ours last.

    Raises WrongResult when ours is wrong; a baseline that fails or is wrong is skipped with the reason.
    """
    sets = [bench.make(seed) for seed in range(sets_needed(bench.bytes_per_set, l2_bytes))]
    result = Result(num_sets=len(sets))
    bound: dict[str, list[Call]] = {}
    for contender in (bench.ours, *bench.peers):
        if isinstance(contender, Skipped):
            result.skipped[contender.name] = contender.reason
            continue
        try:
            calls = [contender.bind(inputs) for inputs in sets]
            wrong = contender.check(sets[0], calls[0]())
        except Exception as error:
            if contender is bench.ours:
                raise
            wrong = f"failed: {_first_line(error)}"
        if wrong and contender is bench.ours:
            raise WrongResult(f"{bench.case.op} {bench.case.label}: {wrong}")
        if wrong:
            result.skipped[contender.name] = wrong
        else:
            bound[contender.name] = calls
    for name, reason in result.skipped.items():
        say(f"  {name:<8} skipped: {reason}")
    for order in (list(bound), list(reversed(bound))):
        for name in [name for name in order if name in bound]:
            try:
                timing = measure(bound[name], clock, seconds)
            except Exception as error:
                if name == OURS:
                    raise
                result.skipped[name] = f"failed while timed: {_first_line(error)}"
                result.timings.pop(name, None)
                del bound[name]
                continue
            result.timings.setdefault(name, []).append(timing)
            say(
                f"  {name:<8} {timing.sustained_ms:9.4f} ms sustained, {timing.median_ms:9.4f} median of {timing.runs}"
                f" ({timing.how})"
            )
            _release()
    return result


def row_of(bench: Bench, result: Result, card: str, precision: str, dsl: str, floor_ms: float | None) -> dict[str, Any]:
    """The row for `perf/results`: sustained milliseconds, mean of both orders; `median_*` beside them."""
    peers = [name for name in result.timings if name != OURS]
    ours = result.timings[OURS]
    return {
        "op": bench.case.op,
        "case": bench.case.label,
        "precision": precision,
        "dsl": dsl,
        "ms": round(result.sustained(OURS), 5),
        "floor_ms": None if floor_ms is None else round(floor_ms, 5),
        "baselines": {name: round(result.sustained(name), 5) for name in peers},
        "digest": rows.digest_of(bench.cells),
        "card": card,
        "date": rows.today(),
        "median_ms": round(result.median(OURS), 5),
        "median_baselines": {name: round(result.median(name), 5) for name in peers},
        "ms_by_order": [round(timing.sustained_ms, 5) for timing in ours],
        "timed": {name: f"{t[0].how}, {sum(x.runs for x in t)} runs" for name, t in result.timings.items()},
        "input_sets": result.num_sets,
        "skipped": result.skipped,
        "torch": torch.__version__,
    }


def main(
    op: str,
    prepare: Callable[..., Bench],
    labels: Sequence[str],
    find: Any = None,
    precisions: Sequence[str] = ("bf16",),
) -> int:
    """Command line of a benchmark module: `prepare(case, device, dsl)` builds a Bench; `find(label)` finds a case.

    Where there are several precisions, `prepare` takes one more argument.
    """
    parser = argparse.ArgumentParser(prog=f"python -m perf.bench_{op}", description=f"Times {op} and its baselines.")
    parser.add_argument("--cases", nargs="+", default=list(labels), metavar="CASE", help=f"of {', '.join(labels)}")
    parser.add_argument("--precision", choices=precisions, default=precisions[0])
    parser.add_argument("--dsl", default="tilelang")
    parser.add_argument("--seconds", type=float, default=1.0, help="sustained run of each contender in each order")
    parser.add_argument("--out", type=Path, default=None, help="jsonl file; default perf/results/<card>.jsonl")
    parser.add_argument("--peers", nargs="*", default=None, metavar="NAME", help="time only these baselines")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("these benchmarks time kernels on a CUDA device; none is present\n")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    path = rows.path_for(properties.name) if args.out is None else args.out
    failed = False
    for label in args.cases:
        torch.manual_seed(0)
        try:
            case = find(label) if find else cases.find(op, label)
            bench = prepare(case, device, args.dsl, *([args.precision] if len(precisions) > 1 else []))
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        if args.peers is not None:
            if unknown := sorted(set(args.peers) - {peer.name for peer in bench.peers}):
                known = ", ".join(peer.name for peer in bench.peers)
                sys.stderr.write(f"--peers {unknown[0]} is unknown; {op} has {known}\n")
                return 2
            bench = only_peers(bench, args.peers)
        _say(f"{op} {label} on {properties.name}")
        try:
            result = run(bench, CudaClock(), properties.L2_cache_size, args.seconds, _say)
        except RuntimeError as error:  # the other cases are still worth their time
            _say(f"  {OURS} failed: {_first_line(error)}")
            failed = True
            continue
        floor = floor_of(bench, args.precision, properties.name)
        row = row_of(bench, result, properties.name, args.precision, args.dsl, floor)
        rows.append(path, row)
        _say(summary(row))
        del bench, result
        _release()
    return 1 if failed else 0


def floor_of(bench: Bench, precision: str, card: str) -> float | None:
    """The bench's own floor, or the sum of its operators' floors on this card."""
    if bench.floor_ms is not None:
        return bench.floor_ms
    ops = bench.floor_ops or (bench.case.op,)
    floors = [cases.floor(op, bench.case.label, precision, card) for op in ops]
    return None if None in floors else sum(value for value in floors if value is not None)


def only_peers(bench: Bench, names: Sequence[str]) -> Bench:
    """The bench with the other baselines left out, and on record as such."""
    left = [peer if peer.name in names else Skipped(peer.name, "left out by --peers") for peer in bench.peers]
    return dataclasses.replace(bench, peers=left)


def summary(row: dict[str, Any]) -> str:
    """One line: ours, the floor, and the ratio to each baseline."""
    floor = "no floor known" if row["floor_ms"] is None else f"floor {row['floor_ms']:.4f} ms"
    ratios = ", ".join(f"{ms / row['ms']:.2f}x {name}" for name, ms in row["baselines"].items())
    return f"  = {row['ms']:.4f} ms ({floor}); {ratios or 'no baseline timed'}"


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else repr(error)
