"""Runs one case of one benchmark: check everybody, time everybody in both orders, write rows."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from msa_tiles.bench.launches import launched
from msa_tiles.bench.timing import Call, Clock, Timing, measure, sets_needed
from msa_tiles.runtime.dispatch import NoKernelError
from msa_tiles.runtime.registry import Cell
from msa_tiles.spec.model import DSLS
from msa_tiles.spec.work import Work

Bind = Callable[[Any], Call]
Check = Callable[[Any, Any], "str | None"]
Say = Callable[[str], None]

LEFT_OUT = "left out by --peers"


@dataclass(frozen=True)
class Contender:
    """Something to time. `bind(inputs)` prepares layouts, untimed, and returns the call; its result goes to `check`.

    `check(inputs, result)` compares with the reference and returns a sentence when the result is wrong.
    """

    name: str
    bind: Bind
    check: Check


@dataclass(frozen=True)
class Skipped:
    """A contender that is not timed, and why."""

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
    """A case ready to run. `make(seed)` builds one set of inputs, of which `bytes_per_set` are read by every call.

    `ours(dsl, inputs)` binds our call, with the kernels of one DSL; `check` judges its result.
    """

    case: NamedCase
    make: Callable[[int], Any]
    bytes_per_set: int
    ours: Callable[[str, Any], Call]
    check: Check
    peers: Sequence[Contender | Skipped]


@dataclass(frozen=True)
class Benchmark:
    """An operator to time: its cases by name, and how one becomes a Bench: `prepare(case, device, precision)`.

    `work(label, precision)` is what its kernels have to do at least, one after the other; `parts` are the operators
    that need kernels in the precision of the case. Precisions `on_request` are timed where they are named.
    """

    op: str
    labels: tuple[str, ...]
    find: Callable[[str], Any]
    prepare: Callable[[Any, torch.device, str], Bench]
    work: Callable[[str, str], Sequence[Work]]
    parts: tuple[str, ...]
    precisions: tuple[str, ...] = ("bf16",)
    on_request: tuple[str, ...] = ()


@dataclass
class Result:
    """Figures of all contenders, per order in which they ran; `cells` are what each of ours launched."""

    timings: dict[str, list[Timing]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    """Of ours: what does not agree with the reference or fails, so that its time would mean nothing."""
    cells: dict[str, Mapping[str, Cell]] = field(default_factory=dict)
    num_sets: int = 1

    @property
    def ours(self) -> list[str]:
        return [name for name in self.timings if name in DSLS]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.timings if name not in DSLS]

    def sustained(self, name: str) -> float:
        return statistics.mean(timing.sustained_ms for timing in self.timings[name])

    def median(self, name: str) -> float:
        return statistics.mean(timing.median_ms for timing in self.timings[name])


def run(bench: Bench, dsls: Sequence[str], clock: Clock, l2_bytes: int, seconds: float, say: Say) -> Result:
    """Check all contenders on the first input set, then time them, ours first and then ours last.

    A peer that fails or is wrong is skipped with the reason, as is a DSL without a kernel for the case; one whose
    kernels fail or are wrong is in `Result.wrong`. Without any of ours, nothing is timed.
    """
    result = Result(num_sets=sets_needed(bench.bytes_per_set, l2_bytes))
    sets = [bench.make(seed) for seed in range(result.num_sets)]
    mine = [Contender(dsl, functools.partial(bench.ours, dsl), bench.check) for dsl in dsls]
    bound: dict[str, list[Call]] = {}
    for contender in (*mine, *bench.peers):
        if not isinstance(contender, Skipped) and contender.name not in dsls and not bound:
            break
        calls = _checked(contender, sets, result)
        if calls is not None:
            bound[contender.name] = calls
        release()
    for name, reason in (result.skipped | result.wrong).items():
        if reason != LEFT_OUT:
            say(f"  {name:<11} skipped: {reason}")
    # Without any of ours there is nothing to compare peers with.
    forward = list(bound) if any(name in dsls for name in bound) else []
    for order in (forward, list(reversed(forward))):
        for name in [name for name in order if name in bound]:
            try:
                timing = measure(bound[name], clock, seconds)
            except Exception as error:
                kept = result.wrong if name in dsls else result.skipped
                kept[name] = f"failed while timed: {first_line(error)}"
                result.timings.pop(name, None)
                del bound[name]
                continue
            finally:
                release()
            result.timings.setdefault(name, []).append(timing)
            say(f"  {name:<11} {describe(timing)}")
    return result


def _checked(contender: Contender | Skipped, sets: Sequence[Any], result: Result) -> list[Call] | None:
    """The contender's calls, one for each input set, when the first of them is right; else `result` has the reason."""
    if isinstance(contender, Skipped):
        result.skipped[contender.name] = contender.reason
        return None
    mine = contender.name in DSLS
    try:
        with launched() as cells:
            calls = [contender.bind(inputs) for inputs in sets]
            wrong = contender.check(sets[0], calls[0]())
    except NoKernelError as error:
        result.skipped[contender.name] = _refusal(error, contender.name)
        return None
    except torch.OutOfMemoryError:
        result.skipped[contender.name] = "does not fit this card's memory"
        return None
    except Exception as error:  # a half-installed peer raises anything, and the reason goes into the row
        wrong = f"failed: {first_line(error)}"
    if wrong:
        (result.wrong if mine else result.skipped)[contender.name] = wrong
        return None
    if mine:
        result.cells[contender.name] = dict(cells)
    return calls


def _refusal(error: NoKernelError, dsl: str) -> str:
    """What the DSL's own candidates said, or that there is none."""
    said = [line.strip() for line in str(error).splitlines() if f".{dsl}." in line]
    return "; ".join(said) if said else f"no {dsl} kernel: {first_line(error)}"


def describe(timing: Timing) -> str:
    """One line about how fast a call ran."""
    text = f"{timing.sustained_ms:9.4f} ms sustained, {timing.median_ms:9.4f} median of {timing.runs} ({timing.how}"
    if timing.condition is not None:
        text += f", {timing.condition.clock_mhz} MHz, {timing.condition.watts:.0f} W"
    return text + ")"


def rows_of(
    bench: Bench, result: Result, precision: str, floor_ms: float | None, seconds: float, machine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each of ours: sustained milliseconds, mean of both orders; `median_*` beside them.

    Rows of one run share `run` (of `machine`) and the figures of the peers.
    """
    made = []
    for dsl in result.ours:
        timed = result.timings[dsl]
        conditions = {
            name: [
                {"clock_mhz": t.condition.clock_mhz, "watts": round(t.condition.watts)}
                for t in result.timings[name]
                if t.condition is not None
            ]
            for name in (dsl, *result.peers)
        }
        cells = result.cells.get(dsl, {})
        made.append(
            {
                "op": bench.case.op,
                "case": bench.case.label,
                "precision": precision,
                "dsl": dsl,
                "ms": round(result.sustained(dsl), 5),
                "floor_ms": None if floor_ms is None else round(floor_ms, 5),
                "baselines": {name: round(result.sustained(name), 5) for name in result.peers},
                "digest": "+".join(cell.digest for cell in cells.values()),
                "digests": {cell.id: cell.digest for cell in cells.values()},
                "median_ms": round(result.median(dsl), 5),
                "median_baselines": {name: round(result.median(name), 5) for name in result.peers},
                "ms_by_order": [round(timing.sustained_ms, 5) for timing in timed],
                "order": [*result.ours, *result.peers],
                "timed": {
                    name: f"{timings[0].how}, {sum(t.runs for t in timings)} runs"
                    for name, timings in result.timings.items()
                },
                "seconds": seconds,
                "input_sets": result.num_sets,
                "conditions": {name: found for name, found in conditions.items() if found},
                "skipped": dict(result.skipped),
                **machine,
            }
        )
    return made


def only_peers(bench: Bench, names: Sequence[str]) -> Bench:
    """The bench with the other peers left out, and on record as such."""
    left = [peer if peer.name in names else Skipped(peer.name, LEFT_OUT) for peer in bench.peers]
    return dataclasses.replace(bench, peers=left)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else repr(error)
