"""How long a call is expected to take: its roofline, and what calls with rooflines like it took.

`measured.json` holds, for each operator, precision and DSL, pairs of the roofline's milliseconds and measured ones, as
`perf/expectations.py` takes them from the rows of a card in `perf/results`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_tiles import readable, trees
from msa_tiles.explaining.report import Expectation
from msa_tiles.runtime import tuned
from msa_tiles.runtime.dispatch import Candidate
from msa_tiles.runtime.facts import DeviceFacts
from msa_tiles.runtime.registry import Registry
from msa_tiles.spec.expression import Expression, ExpressionError
from msa_tiles.spec.model import Device, Operator, Specs, Workload
from msa_tiles.spec.source import Location
from msa_tiles.spec.work import work_of

MEASURED = Path(__file__).with_name("measured.json")
FAR = 4  # times as long, or as short, as anything measured: launches alone take microseconds
Pair = tuple[float, float]  # milliseconds of the roofline, and measured ones
# What the sequences of a call say, whatever the sizes of its tensors are.
_OF_SEQUENCES = ("total_q", "total_k", "num_sequences", "max_blocks")


def floor_ms(
    op: str,
    precision: str,
    compute: str,
    numbers: Mapping[str, int],
    sizes: Mapping[str, Sequence[int]],
    sequences: Sequence[tuple[int, int]],
    facts: DeviceFacts,
    causal: bool = True,
) -> float | None:
    """The least milliseconds that the roofline of an operator allows; None where a dim is not known.

    `numbers` are the call's compile-time dims and what else may be one, `sizes` the shapes of its tensors by name,
    `sequences` (queries, keys) of each request.
    """
    specs = _specs()
    if op not in specs.operators or precision not in specs.precisions or facts.target not in specs.targets:
        return None  # of a tree whose specs have mistakes
    operator = specs.operators[op]
    point = {name: value for name, value in numbers.items() if name in operator.dims and name not in _OF_SEQUENCES}
    # Two values of 4 bits lie in a byte: shapes do not tell the head dim.
    dims = {name: size for name, size in _dims(operator, sizes).items() if name not in point}
    workload = Workload("call", tuple(sequences), dims, {"causal": causal}, "normal", None, "m3", Location("", 0))
    try:
        work = work_of(operator, workload, specs.precisions[precision], point, compute)
    except (KeyError, ExpressionError):
        return None
    return work.floor_ms(_device(specs, facts))


def expectation(op: str, precision: str, dsl: str, floor: float, facts: DeviceFacts) -> Expectation:
    """What is to be expected of a call whose roofline takes so long."""
    device = _device(_specs(), facts).name
    measured = _measured()
    if facts.target != measured["target"]:
        return Expectation(floor, device)
    rows = measured["rows"].get(f"{op} {precision} {dsl}", [])
    return from_rows(rows, floor, device, measured["card"])


def timed(
    candidate: Candidate,
    floor: float,
    sequences: Sequence[tuple[int, int]],
    facts: DeviceFacts,
    registry: Registry,
    causal: bool = True,
) -> Expectation | None:
    """The same where `msa-tiles tune` timed this very kernel at this very work; None where it did not.

    Of workloads that differ in values alone it is the longest.
    """
    cell, specs = candidate.cell, _specs()
    if facts.target != cell.target or candidate.variant != dict(cell.ci[0]):
        return None
    operator, device, here = specs.operators[cell.op], _device(specs, facts), list(sequences)
    workloads = {workload.label: workload for workload in operator.bench}
    found: list[Expectation] = []
    for figure in tuned.figures_of(*registry.directories):
        workload = workloads.get(figure.workload)
        if figure.op != cell.op or figure.target != cell.target or not figure.fresh(cell) or workload is None:
            continue
        if list(workload.sequences) != here or workload.parameters.get("causal", True) != causal:
            continue
        work = work_of(operator, workload, specs.precisions[cell.precision], operator.m3, cell.entry["compute"])
        if math.isclose(work.floor_ms(device), floor, rel_tol=1e-6):
            own = work.floor_ms(_device(specs, facts, figure.card))
            ms = figure.ms[cell.id] * floor / own
            found.append(Expectation(floor, device.name, ms, None, 1, figure.card, workload.label))
    return max(found, key=lambda each: each.ms or 0, default=None)


def from_rows(rows: Sequence[Pair], floor: float, device: str, card: str) -> Expectation:
    """What the rows have at such a floor, and how far such answers are off for the rows."""
    if not rows:
        return Expectation(floor, device)
    misses = []
    for index, (own_floor, taken) in enumerate(rows):
        guess = _between([*rows[:index], *rows[index + 1 :]], own_floor)
        if guess is not None:
            misses.append(max(guess / taken, taken / guess))
    return Expectation(floor, device, _between(rows, floor), max(misses, default=None), len(rows), card)


def _between(rows: Sequence[Pair], floor: float) -> float | None:
    """Milliseconds at a floor: on the line between the two nearest, as launches and bytes add up; None far from all.

    Outside them it is the ratio of the outermost. Of rows with one floor it is their geometric mean.
    """
    alike: dict[float, list[float]] = {}
    for own_floor, taken in sorted(rows):
        alike.setdefault(own_floor, []).append(taken)
    points = [(own_floor, statistics.geometric_mean(taken)) for own_floor, taken in alike.items()]
    if not points or not points[0][0] / FAR <= floor <= points[-1][0] * FAR:
        return None
    for (below, less), (above, more) in itertools.pairwise(points):
        if below <= floor <= above:
            return less + (more - less) * (floor - below) / (above - below)
    end, taken = points[0] if floor < points[0][0] else points[-1]
    return floor * taken / end


def _dims(operator: Operator, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The runtime dims that the shapes of tensors tell."""
    dims: dict[str, int] = {}
    for name, tensor in (*operator.inputs.items(), *operator.outputs.items()):
        shape = sizes.get(name, ())
        if len(shape) == len(tensor.shape):
            for dim, size in zip(tensor.shape, shape, strict=True):
                if dim.source in operator.dims and dim.source not in _OF_SEQUENCES:
                    dims[dim.source] = size
    return dims | _factors(operator, dims)


def _factors(operator: Operator, dims: Mapping[str, int]) -> dict[str, int]:
    """The dims that no shape has, and that a product of theirs and known ones tells, as of heads and heads a group."""
    found: dict[str, int] = {}
    for name, value in operator.dims.items():
        if name in dims and isinstance(value, Expression) and len(missing := value.names - dims.keys()) == 1:
            [factor] = missing
            guess = dims[name] // max(value.whole({**dims, factor: 1}), 1)
            if value.whole({**dims, factor: guess}) == dims[name]:  # else it is no product
                found[factor] = guess
    return found


def _device(specs: Specs, facts: DeviceFacts, card: str = "") -> Device:
    """The device of the target whose name that of a card contains, by default that of the facts; or the usual one."""
    target = specs.targets[facts.target or ""]
    fitting = [device for device in target.devices.values() if device.name in (card or facts.name)]
    return max(fitting, key=lambda device: len(device.name), default=target.devices[target.default_device])


@functools.lru_cache(maxsize=1)
def _measured() -> dict[str, Any]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))


@trees.cached(maxsize=1)
def _specs() -> Specs:
    return readable.specs()
