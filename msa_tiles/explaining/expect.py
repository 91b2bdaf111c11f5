"""How long a call is expected to take: its roofline, and by how much calls like it missed theirs.

`measured.json` holds, for each operator, precision and DSL, pairs of the roofline's milliseconds and measured ones, as
`perf/expectations.py` takes them from the rows of a card in `perf/results`.
"""

from __future__ import annotations

import functools
import json
import math
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
FAR = 4  # times as long, or as short, as anything measured
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
    """The floor times the ratio at the nearest floor measured, and how far such answers are off for the rows."""
    if not rows:
        return Expectation(floor, device)
    within = None
    if len(rows) > 1:
        misses = []
        for index, (own_floor, taken) in enumerate(rows):
            guess = own_floor * _ratio([*rows[:index], *rows[index + 1 :]], own_floor)
            misses.append(max(guess / taken, taken / guess))
        within = max(misses)
    least, most = min(row[0] for row in rows), max(row[0] for row in rows)
    # Far from every row the ratio is another: launches alone take microseconds.
    ms = floor * _ratio(rows, floor) if least / FAR <= floor <= most * FAR else None
    return Expectation(floor, device, ms, within, len(rows), card)


def _ratio(rows: Sequence[Pair], floor: float) -> float:
    """How many times its roofline the row took whose roofline is nearest, as a ratio."""
    near, ms = min(rows, key=lambda row: abs(math.log(row[0] / max(floor, 1e-9))))
    return ms / near


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
