"""`msa-tiles support`: what exists, and the evidence for it. Printed from files and from nothing else."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msa_tiles import console, readable, trees
from msa_tiles.commands._lacks import lacks_of, show_lacks
from msa_tiles.commands._options import (
    add_filters,
    check_filters,
    filters_of,
    known_names,
    select,
    tell_changed_targets,
)
from msa_tiles.sources import operands_in

if TYPE_CHECKING:
    from msa_tiles.codegen.lacks import Lack
    from msa_tiles.runtime import tuned
    from msa_tiles.runtime.registry import Cell, Registry

MISSING = "missing"  # the status of what a target has no kernels of
KEYS = ("key_value", "index_key")  # the roles that kernels load through operands


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("support", help="list the kernels and what is known of each", description=__doc__)
    add_filters(parser)
    parser.add_argument(
        "--accuracy", action="store_true", help="the worst error of each output, as verified, instead of the evidence"
    )
    parser.add_argument(
        "--operands",
        action="store_true",
        help="which operand module loads the keys of each kernel, and whether its row names it",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list of objects, with cards, dates and errors; with --target, "
        "what it has no kernels of comes last, with status missing",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from msa_tiles.runtime import evidence, tuned
    from msa_tiles.runtime.registry import default_registry

    if args.accuracy and args.operands:
        raise ValueError("--accuracy and --operands are two tables: ask for one of them")
    registry = default_registry()
    # A target without any kernel is no mistake here: what it lacks is shown.
    bare = [target for target in args.target if target in registry.targets and not registry.select(target=target)]
    of_kernels = args.accuracy or args.operands
    if not of_kernels and args.target == bare != []:
        check_filters(filters_of(args), known_names(registry), registry.targets)
        cells: Sequence[Cell] = ()
    else:
        cells = select(args, registry)
    if args.operands:
        return _print_operands(cells, registry, args.json)
    if args.accuracy:
        return _print_accuracy(cells, registry, args.json)
    verified, compiled = evidence.verified_of(registry), evidence.compiled_of(registry)
    figures = tuple(figure for directory in registry.directories for figure in tuned.read(directory))
    rows = [describe(cell, registry, verified, compiled, figures) for cell in cells]
    present = {cell.id for cell in registry.cells}
    if args.json:
        lacking = lacks_of(readable.specs(), args.target, present, args.op)
        rows += [describe_lack(target, lack) for target, found in lacking.items() for lack in found]
        console.say(json.dumps(rows, indent=1))
        return 0
    columns = ("op", "dsl", "target", "precision", "group", "status", "flags", "verified on", "digest")
    whence = trees.stack() != ()
    if rows:
        console.table([(*columns, *["from"] * whence), *(_line(row, whence) for row in rows)])
    tell_changed_targets(cells, registry)
    show_lacks(readable.specs(), args.target, present, args.op)
    return 0


def _print_accuracy(cells: Sequence[Cell], registry: Registry, as_json: bool) -> int:
    from msa_tiles.runtime import evidence
    from msa_tiles.runtime.accuracy import Accuracy, accuracies

    found = accuracies(cells, evidence.verified_of(registry))
    if as_json:
        console.say(json.dumps([dataclasses.asdict(error) for error in found], indent=1))
        return 0
    if not found:
        console.say("no cell that was asked for has run on a GPU; `msa-tiles verify` runs them")
        return 0
    rows = [tuple(field.name for field in dataclasses.fields(Accuracy))]
    rows += [
        (
            *(error.cell, error.output, f"{error.worst:.2g}", error.metric),
            *("" if error.accepted is None else f"{error.accepted:g}", error.card, error.date),
            "yes" if error.current else "no",
        )
        for error in found
    ]
    console.table(rows)
    return 0


class Loaded(NamedTuple):
    """How a kernel gets at its keys, or its keys and values."""

    cell: str
    role: str
    format: str
    operand: str  # a module of msa_tiles.dsl.<dsl>.operands; empty where the kernel loads them by itself
    named_by: str


def loaded_by(cell: Cell, registry: Registry) -> list[Loaded]:
    """Each role of keys that a kernel reads, with what the kernel's file imports for it."""
    imported = operands_in(cell.text())
    found = []
    for role in KEYS:
        if role not in cell.reads:
            continue
        stored = registry.precisions[cell.precision].formats[role]
        operand = imported.get(role, "")
        named_by = "the kernel" if not operand else "the row"
        if operand == registry.formats[stored]["operand"]:
            named_by = "the format"
        found.append(Loaded(cell.id, role, stored, operand, named_by))
    return found


def _print_operands(cells: Sequence[Cell], registry: Registry, as_json: bool) -> int:
    found = [loaded for cell in cells for loaded in loaded_by(cell, registry)]
    if as_json:
        console.say(json.dumps([loaded._asdict() for loaded in found], indent=1))
    elif found:
        heading = ("cell", "role", "format", "operand", "named by")
        console.table([heading, *(tuple(field or "-" for field in loaded) for loaded in found)])
    else:
        console.say("no kernel that was asked for reads keys")
    return 0


def describe(
    cell: Cell,
    registry: Registry,
    verified: Mapping[str, Mapping[str, Any]],
    compiled: Mapping[str, Mapping[str, Any]],
    figures: Iterable[tuned.Figure],
) -> dict[str, Any]:
    """One cell as `support --json` prints it.

    `verified` and `compiled` are what is on record for it (or None), `timed` is what `msa-tiles tune` measured. Each
    says whether it is `current`: of the kernel as it is now.
    """
    from msa_tiles.runtime import evidence

    # Of a file that is not what the index says, nothing else is known: what ran under its digest was another kernel.
    generated = is_generated(cell)
    target = registry.targets[cell.target]
    ran, passed = evidence.is_verified(cell, verified), evidence.is_recorded(cell, target, compiled)
    outdated = cell.tree in registry.outdated
    flags = {
        "generated": generated and not outdated,
        # By the record that is committed, or by this machine's cache.
        "compiled": generated and (passed or evidence.is_compiled(cell, target)),
        "simulated": generated and evidence.is_simulated(cell),
        "verified": generated and ran,
    }
    return {
        "id": cell.id,
        "op": cell.op,
        "dsl": cell.dsl,
        "target": cell.target,
        "precision": cell.precision,
        "group": registry.group_of(cell.precision),
        "algorithm": cell.entry["algorithm"],
        "status": _status(cell, generated, outdated, flags),
        "flags": [flag for flag in evidence.FLAGS if flags[flag]],
        "file": cell.entry["file"],
        "digest": cell.digest,
        "tree": str(cell.tree) if cell.tree else None,
        "verified": _record(cell, verified, generated and ran),
        "compiled": _record(cell, compiled, generated and passed),
        "timed": [
            {
                "workload": figure.workload,
                "queries": figure.queries,
                "ms": figure.ms[cell.id],
                "card": figure.card,
                "date": figure.date,
                "current": generated and figure.fresh(cell),
            }
            for figure in figures
            if cell.id in figure.ms
        ],
    }


def describe_lack(target: str, lack: Lack) -> dict[str, Any]:
    """What a target has no kernels of, as `support --json` prints it behind the cells: `id` is None."""
    precisions = list(lack.precisions)
    said = {"because": lack.reason, "remedy": lack.remedy}
    return {"id": None, "op": lack.op, "target": target, "precisions": precisions, "status": MISSING, **said}


def _status(cell: Cell, generated: bool, outdated: bool, flags: Mapping[str, bool]) -> str:
    """The strongest flag, or why it counts for nothing."""
    from msa_tiles.runtime import evidence

    if not generated and cell.file.exists():
        return "edited"
    return "outdated" if generated and outdated else evidence.status(flags)


def _record(cell: Cell, records: Mapping[str, Mapping[str, Any]], current: bool) -> dict[str, Any] | None:
    return {**records[cell.id], "current": current} if cell.id in records else None


def _line(row: Mapping[str, Any], whence: bool) -> tuple[str, ...]:
    """A row of the table: of a run of another kernel it says nothing."""
    ran = row["verified"] if "verified" in row["flags"] else {}
    where = ", ".join(ran[name] for name in ("card", "date") if name in ran)
    names = ("op", "dsl", "target", "precision", "group", "status")
    line = (*(row[name] for name in names), " ".join(row["flags"]), where, row["digest"])
    return (*line, row["tree"] or "shipped") if whence else line


def is_generated(cell: Cell) -> bool:
    """Whether the kernel file, its helpers and the toolchain pins still have the digest that the index states."""
    from msa_tiles.codegen.digest import digest_of, recorded_digests

    try:
        text = cell.file.read_text(encoding="utf-8")
        return digest_of(text, cell.dsl, cell.arch) == recorded_digests(text).get(cell.id) == cell.digest
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
