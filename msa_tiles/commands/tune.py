"""`msa-tiles tune`: time the kernels of every DSL on this GPU and keep which one is fastest."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msa_tiles import console, names, trees
from msa_tiles.commands._options import (
    add_filters,
    add_json,
    add_names,
    cuda_device,
    filter_text,
    filters_of,
    on_target,
    seconds,
    select,
)
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted

if TYPE_CHECKING:
    from msa_tiles.runtime.registry import Cell, Registry

# Runs in turns, so that no DSL has the cooler card.
ROUNDS = 3
# Sets of inputs for a workload: what so many do not push out of the L2 is read from there in use as well.
MOST_SETS = 32


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tune", help="measure which DSL's kernel is faster on this GPU", description=__doc__)
    add_filters(parser)
    parser.add_argument("--device", default="cuda", help="the GPU to use (default cuda)")
    add_names(parser, "--workload", "LABEL,…", "only these benchmarks of the specs, such as prefill_32k")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long each kernel runs a round (default 0.2)")
    add_json(parser, "what was measured, as tuned.json has it,")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    import datetime

    from msa_tiles.runtime import tuned
    from msa_tiles.runtime.facts import device_facts
    from msa_tiles.runtime.registry import default_registry
    from msa_tiles.spec import load

    registry = default_registry()
    cells = select(args, registry)
    operators = load(*trees.specs_dirs()).operators
    labels = {cell.op: [workload.label for workload in operators[cell.op].bench] for cell in cells}
    names.check("--workload", args.workload, [label for known in labels.values() for label in known])
    seconds("--seconds", args.seconds)
    device = cuda_device("--device", args.device, "kernels can only be timed on one")
    trees.require_own(registry.directory)
    refuse_unwritable("the record", registry.directory / tuned.TUNED, directory=False)
    facts = device_facts(device, registry.targets.values())
    there = on_target(cells, facts, args)
    there = [cell for cell in there if not args.workload or set(args.workload) & set(labels[cell.op])]
    forms = _forms_beside(there, args.dsl, registry)
    if forms:
        console.note(f"timed beside what is named, whose tensors they take: {', '.join(cell.id for cell in forms)}")
    order = {cell.id: place for place, cell in enumerate(registry.cells)}
    rivals = _rivals(sorted((*there, *forms), key=lambda cell: order[cell.id]), registry)
    if not rivals:
        raise ValueError(f"of what matches {filter_text(filters_of(args))} no operator has two kernels to compare")
    console.note(f"{counted(len(rivals), 'operator')} with rival kernels on {facts}")
    figures: list[tuned.Figure] = []
    for rival in console.progress(rivals.values(), "operators", lambda cells: f"{cells[0].op} {cells[0].precision}"):
        for workload, queries, ms in _figures(rival, device, args.workload, args.seconds):
            figure = tuned.Figure(
                op=rival[0].op,
                target=rival[0].target,
                precision=rival[0].precision,
                workload=workload,
                queries=queries,
                card=facts.name,
                date=datetime.date.today().isoformat(),
                ms=ms,
                digests={cell.id: cell.digest for cell in rival if cell.id in ms},
            )
            tuned.write(registry.directory, [figure])
            figures.append(figure)
    if args.json:
        console.say(json.dumps([dataclasses.asdict(figure) for figure in figures], indent=1))
    else:
        rows = [(cell, figure.workload, f"{ms:.4f}") for figure in figures for cell, ms in figure.ms.items()]
        console.table([("cell", "workload", "ms"), *rows])
    return 0


def _stored(cell: Cell, registry: Registry) -> tuple[str, ...]:
    """The operator of a cell, and how its tensors are stored: rivals are alike in that, whatever they multiply in."""
    formats = registry.precisions[cell.precision].formats
    return (cell.op, cell.target, *(formats[role] for role in cell.reads))


def _forms_beside(cells: Sequence[Cell], dsls: Sequence[str], registry: Registry) -> list[Cell]:
    """The cells of these DSLs, of all where none is named, that take the tensors of some of these cells and are not
    among them: forms that `--precision` does not name. A figure without them would be taken for all that there is.
    """
    kinds = {_stored(cell, registry) for cell in cells}
    named = {cell.id for cell in cells}
    others = (cell for cell in registry.cells if cell.id not in named and (not dsls or cell.dsl in dsls))
    return [cell for cell in others if _stored(cell, registry) in kinds]


def _rivals(cells: Sequence[Cell], registry: Registry) -> dict[tuple[str, ...], list[Cell]]:
    """Cells between which calls choose."""
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(_stored(cell, registry), []).append(cell)
    return {key: rivals for key, rivals in found.items() if len(rivals) > 1}


def _figures(
    cells: Sequence[Any], device: Any, labels: Sequence[str] | None, duration: float
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(workload, queries, milliseconds by cell) for each bench workload of the operator."""
    import torch

    from msa_tiles.spec import load
    from msa_tiles.verify.cases import Case

    specs = load(*trees.specs_dirs())
    operator = specs.operators[cells[0].op]
    for workload in operator.bench:
        if labels and workload.label not in labels:
            continue
        case = Case(cells[0], operator, specs.precisions[cells[0].precision], workload, operator.m3, 0.0)
        checks: list[Any] = []
        calls: dict[str, list[Callable[[], Any]]] = {}
        try:
            # All run on the same inputs: those of the longest workloads fit a GPU once.
            checks = _input_sets(functools.partial(_check, case, device), _bytes_read(case), device)
            runs = [functools.partial(_run, cell=cell, alone=_alone(cell, cells)) for cell in cells]
            calls = {
                cell.id: [functools.partial(run, check) for check in checks]
                for cell, run in zip(cells, runs, strict=True)
            }
            figure = measure(calls, duration)
        except torch.OutOfMemoryError:
            console.complain(f"msa-tiles tune: {cells[0].op} {workload.label} does not fit this GPU and is left out")
            continue
        finally:
            checks, calls = [], {}
            gc.collect()
            torch.cuda.empty_cache()
        yield workload.label, case.dims["total_q"], figure


def _check(case: Any, device: Any, seed: int) -> Any:
    """A call of a workload on random inputs."""
    from msa_tiles.verify.inputs import Source
    from msa_tiles.verify.operators import CHECKS

    return CHECKS[case.cell.op](case, Source(device, seed, case.workload.values), False, case.cell.dsl)


def _bytes_read(case: Any) -> float:
    """What a call of a workload moves at least, by the roofline of its spec."""
    from msa_tiles.spec.work import work_of

    return work_of(case.operator, case.workload, case.precision, case.point, case.cell.entry["compute"]).bytes


def _input_sets(make: Callable[[int], Any], bytes_read: float, device: Any) -> list[Any]:
    """What `make` makes of as many seeds as it takes for the inputs not to stay in the GPU's L2 from call to call.

    A call reads `bytes_read` of what it is given. At most MOST_SETS, in at most half of the memory that is free.
    """
    import torch

    from msa_tiles.bench.timing import sets_needed

    if device.type != "cuda":
        return [make(0)]
    free, _ = torch.cuda.mem_get_info(device)
    first = make(0)
    left, _ = torch.cuda.mem_get_info(device)
    wanted = sets_needed(int(bytes_read), torch.cuda.get_device_properties(device).L2_cache_size)
    count = min(wanted, MOST_SETS, max(1, free // (2 * max(1, free - left))))
    return [first, *(make(seed) for seed in range(1, count))]


def _alone(cell: Any, rivals: Sequence[Any]) -> bool:
    """Whether naming its DSL names the cell."""
    return sum(rival.dsl == cell.dsl for rival in rivals) == 1


def _run(check: Any, cell: Any, alone: bool = True) -> Any:
    """Call the operator on this cell. Other calls must not find it remembered where its DSL has another."""
    from msa_tiles.verify.runner import own

    check.backend = cell.dsl
    call = check.call if hasattr(check, "call") else functools.partial(check.run, False)
    if alone:
        return call()
    with own(cell):
        return call()


def measure(calls: Mapping[str, Sequence[Callable[[], Any]]], seconds: float) -> dict[str, float]:
    """Milliseconds of each, in a graph where it can be captured; the median over rounds in which all take part.

    Each is calls of the same work, which run in turn, on inputs of their own that together do not stay in the L2.
    """
    from msa_tiles.bench.timing import CudaClock

    clock = CudaClock()
    plays = {name: clock.load(each)[0] for name, each in calls.items()}
    times = {name: max(1, int(seconds * 1e3 / max(clock.run(play, 2)[1] / 2, 1e-3))) for name, play in plays.items()}
    found: dict[str, list[float]] = {name: [] for name in plays}
    for turn in range(ROUNDS):
        for name in list(plays) if turn % 2 == 0 else list(reversed(plays)):
            found[name].append(clock.run(plays[name], times[name])[1] / times[name] / len(calls[name]))
    return {name: round(statistics.median(values), 5) for name, values in found.items()}
