"""`msa-tiles matrix`: operator x DSL x target x precision x layout, and what the precisions cost."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_tiles import console
from msa_tiles.commands._options import add_filters, add_json, select, tell_changed_targets, without_missing
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted

if TYPE_CHECKING:
    from msa_tiles.matrix.report import Ran
    from msa_tiles.runtime.registry import Cell, Registry


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "matrix",
        help="show what exists in every precision, how accurate it is, and what precisions cost",
        description="Walks operator x DSL x target x precision x layout: evidence, worst error, tolerance, and the "
        "error of torch in the same precision; then how many blocks each format of index keys still chooses, and how "
        "far off attention over each format of keys and values is. With a GPU a small case of every kernel for it is "
        "run in each layout of keys, and compared with the reference and with torch in the same precision; without one "
        "errors are those on record.",
    )
    add_filters(parser)
    parser.add_argument("--recorded", action="store_true", help="run nothing on a GPU")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write matrix.json and matrix.png there")
    add_json(parser, "cells, and what formats cost")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where a kernel that was run is wrong."""
    import torch

    from msa_tiles.bench.precisions import ATTENTION, INDEXER
    from msa_tiles.demo import picture as pictures
    from msa_tiles.matrix import picture, report, selection, values, walk
    from msa_tiles.runtime.registry import default_registry

    if args.out is not None:
        refuse_unwritable("--out", args.out, directory=True)
    registry = default_registry()
    cells = select(args, registry)
    ran: Ran = {}
    failures: list[str] = []
    card = ""
    if torch.cuda.is_available() and not args.recorded:
        ran, failures, card = _run(cells, registry, args)
    reading = console.progress(cells, "reading what is known of kernels", lambda cell: cell.id)
    entries = walk.walk(registry, here=True, cells=reading)
    rows = [report.describe(entry, ran, card) for entry in entries]
    own = dict.fromkeys(cell.precision for cell in cells) if args.precision else (*INDEXER, *ATTENTION)
    called = {name: registry.called(name) for name in own}
    chosen, stored = ([name for name in names if name in called.values()] for names in (INDEXER, ATTENTION))
    if chosen:
        console.note("measuring which blocks formats of index keys choose, on the reference")
    costs = selection.costs(tuple(chosen))
    if stored:
        console.note("measuring how far off attention over formats of keys and values is, on the reference")
    of_values = values.costs(tuple(stored))
    of_forms = [_form_note(form, name) for form, name in called.items() if name != form]
    document = {
        "cells": rows,
        "selection": [cost.as_json() for cost in costs],
        "values": [cost.as_json() for cost in of_values],
        "failures": failures,
    }
    if args.json:
        console.say(json.dumps(document, indent=1))
    else:
        console.table(report.lines(rows))
        console.say(report.LEGEND)
        for sentence in report.refusals(rows):
            console.say(sentence)
        tell_changed_targets(cells, registry)
        last = f"the last {selection.QUERIES} of {selection.LENGTH:,} tokens"
        if costs:
            console.say(
                f"\nselection from {last}, against float32 scores; "
                "attention kept: the share of dense attention inside the chosen blocks"
            )
            console.table(report.cost_lines(costs))
        if of_values:
            console.say(
                f"\nattention of {last} over keys and values as they are stored, against float32 ones: "
                "root mean squares"
            )
            console.table(report.value_lines(of_values))
    for sentence in of_forms:
        (console.note if args.json else console.say)(sentence)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        file = args.out / "matrix.json"
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.note(f"wrote {file}")
        if pictures.available():
            picture.draw(args.out / "matrix.png", entries, costs)
            console.note(f"wrote {args.out / 'matrix.png'}")
        else:
            console.note(pictures.UNAVAILABLE)
    for failure in failures:
        console.complain(failure)
    return 1 if failures else 0


def _form_note(form: str, called: str) -> str:
    """Says of a form of kernels whose costs are shown."""
    return (
        f"{form} stores what {called} stores and only multiplies differently: what it costs is shown in the rows of "
        f"{called}, and the error of its kernels in their own"
    )


def _run(
    cells: Sequence[Cell], registry: Registry, args: argparse.Namespace
) -> tuple[dict[tuple[str, str], dict[str, tuple[float, float, str]]], list[str], str]:
    """The errors of a small case of each kernel for the GPU present, by cell and layout; what failed; and the card."""
    import torch

    from msa_tiles import trees
    from msa_tiles.matrix import layouts
    from msa_tiles.runtime.facts import device_facts
    from msa_tiles.spec import load
    from msa_tiles.verify import runner
    from msa_tiles.verify.cases import cases

    device = torch.device("cuda")
    facts = device_facts(device, registry.targets.values())
    there = without_missing(cell for cell in cells if cell.target == facts.target)
    specs = load(*trees.specs_dirs())
    grid = [(cell, layouts.samples(cases(cell, specs))) for cell in there]
    console.note(f"{counted(len(grid), 'cell')} run on {facts}")
    ran: dict[tuple[str, str], dict[str, tuple[float, float, str]]] = {}
    failures: list[str] = []
    due: list[Any] = [case for _, found in grid for case in found]
    results = runner.sample(grid, device, seed=lambda: random.randrange(1 << 31))
    for result in console.arrivals(results, map(str, due), "cases", lambda result: str(result.case)):
        if result.failure is not None:
            failures.append(f"{result.case} (seed {result.seed}): {result.failure}")
            continue
        ran[result.case.cell.id, layouts.of_case(result.case)] = {
            output: (error.worst, error.accepted, error.metric) for output, error in result.errors.items()
        }
    return ran, failures, f"here, {facts.name}"
