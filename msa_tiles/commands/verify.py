"""`msa-tiles verify`: run kernels on the GPU present and compare them with the reference over the whole grid."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from msa_tiles import console
from msa_tiles.commands._beneath import add_beneath, own_kernels
from msa_tiles.commands._options import (
    FILTERS,
    add_filters,
    add_json,
    cuda_device,
    filters_of,
    on_target,
    processes,
    select,
    tree_options,
    without_missing,
)
from msa_tiles.commands.support import is_generated
from msa_tiles.errors import ToolError
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted

if TYPE_CHECKING:
    from msa_tiles.runtime.registry import Cell
    from msa_tiles.verify.cases import Case


SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNEL_NAMES = {"tilelang": "main_kernel", "cutedsl": "_msa_tiles_kernel_"}  # what our kernels' names have in them
ERRORS = 23  # what compute-sanitizer exits with when it finds any


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "verify", help="run kernels on this GPU against the reference, resumably", description=__doc__
    )
    add_filters(parser)
    add_beneath(parser)
    parser.add_argument(
        "--stale", action="store_true", help="only kernels that have changed since they passed, or never did"
    )
    parser.add_argument("--device", default="cuda", help="the GPU to use (default cuda)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compile in N processes (default: all cores)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="run kernels in N processes on the GPU, the longest first (default 1)",
    )
    parser.add_argument("--seed", type=int, help="repeat the inputs of an earlier run (default: fresh ones)")
    parser.add_argument(
        "--smallest", action="store_true", help="only a few small cases of each kernel, and no evidence of them"
    )
    parser.add_argument(
        "--sanitizer",
        choices=SANITIZERS,
        metavar="TOOL",
        help=f"run the smallest cases under compute-sanitizer: {', '.join(SANITIZERS)}",
    )
    add_json(parser, "kernels and failed cases")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from msa_tiles import trees
    from msa_tiles.runtime import evidence
    from msa_tiles.runtime.build import build
    from msa_tiles.runtime.facts import device_facts
    from msa_tiles.runtime.registry import default_registry
    from msa_tiles.spec import load
    from msa_tiles.verify import runner
    from msa_tiles.verify.cases import cases, smallest
    from msa_tiles.verify.launched import to_compile

    registry = default_registry()
    cells = own_kernels(args, select(args, registry))
    processes("--jobs", args.jobs)
    processes("--processes", args.processes)
    if args.processes > 1 and (args.smallest or args.sanitizer):
        raise ValueError(f"--processes is {args.processes}; with --smallest and --sanitizer it is 1")
    if args.sanitizer:
        return _sanitized(args, {cell.dsl for cell in cells})
    device = cuda_device("--device", args.device, "kernels can only be verified on one")
    if not args.smallest:
        trees.require_own(registry.directory)
        refuse_unwritable("the record", registry.directory / evidence.VERIFIED, directory=False)
    facts = device_facts(device, registry.targets.values())
    verified = evidence.verified_of(registry)
    there = on_target(cells, facts, args)
    stale = [cell for cell in there if not (args.stale and evidence.is_verified(cell, verified))]
    if not stale:
        console.note(f"all {len(there)} cells are verified as they are now: nothing is stale")
        if args.json:
            console.say(json.dumps({"cells": [], "failures": []}, indent=1))
        return 0
    chosen = without_missing(stale)
    if not chosen:
        return 2
    if drifted := [cell.id for cell in chosen if not is_generated(cell)]:
        # Otherwise the evidence of one kernel would stand under the digest of another.
        raise ValueError(f"edited since `msa-tiles generate` ran: {', '.join(drifted)}; run it again")
    specs = load(*trees.specs_dirs())
    grid = [(cell, cases(cell, specs)) for cell in chosen]
    console.note(f"{counted(len(chosen), 'cell')} to verify on {facts}")
    if args.smallest:
        grid = [(cell, smallest(found)) for cell, found in grid]
    # Compiled side by side first: the GPU would wait for each kernel otherwise.
    jobs = to_compile(grid, registry)
    outcomes = build(jobs, registry.targets, workers=args.jobs, audited=False, apart=True)
    for outcome in console.arrivals(outcomes, map(str, jobs), "compiling", lambda outcome: str(outcome.job)):
        if not outcome.good:
            console.complain(f"{outcome.job}: {outcome.complaints[0]}")
    failures: list[dict[str, Any]] = []
    if args.processes > 1:
        for failure in _side_by_side(args, grid):
            failures.append(failure)
            console.complain(f"{failure['cell']} {failure['case']} (seed {failure['seed']}): {failure['failure']}")
        return _told(args, chosen, failures)
    numbers = random.Random(args.seed)
    if args.smallest:
        results = runner.sample(grid, device, seed=lambda: numbers.randrange(1 << 31))
        due = [case for _, found in grid for case in found]
    else:
        due = runner.due(grid, device)
        results = runner.run(grid, device, registry.directory, seed=lambda: numbers.randrange(1 << 31))
    for result in console.arrivals(results, map(str, due), "cases", lambda result: str(result.case)):
        if result.failure is not None:
            case = {"cell": result.case.cell.id, "case": result.case.key, "seed": result.seed}
            failures.append({**case, "failure": result.failure})
            console.complain(f"{result.case} (seed {result.seed}): {result.failure}")
    if not args.smallest:
        return _told(args, chosen, failures)
    if args.json:
        console.say(json.dumps({"cases": len(due), "failures": failures}, indent=1))
    else:
        console.say(f"{len(failures)} of {counted(len(due), 'case')} failed")
    return 1 if failures else 0


def _told(args: argparse.Namespace, chosen: list[Cell], failures: list[dict[str, Any]]) -> int:
    """What became of the cells, from the record."""
    from msa_tiles.runtime import evidence
    from msa_tiles.runtime.accuracy import accuracies
    from msa_tiles.runtime.registry import default_registry

    registry = default_registry()
    bad = 1 if failures else 0
    verified = evidence.read_verified(registry.directory)
    entries = {cell.id: verified[cell.id] if evidence.is_verified(cell, verified) else {} for cell in chosen}
    ended = {name: "verified" if entry else "failed" for name, entry in entries.items()}
    if args.json:
        found = [{"cell": name, "result": ended[name], **entry} for name, entry in entries.items()]
        console.say(json.dumps({"cells": found, "failures": failures}, indent=1))
        return bad
    rows = [("cell", "worst errors", "cases", "result")]
    for cell in chosen:
        entry = entries[cell.id]
        errors = ", ".join(
            f"{error.output} {error.worst:.3g}" for error in accuracies([cell], verified if entry else {})
        )
        rows.append((cell.id, errors, str(entry.get("cases", "")), ended[cell.id]))
    console.table(rows)
    return bad


def _flags(args: argparse.Namespace) -> list[str]:
    """What processes that verify some of the cells are told as well."""
    return [*["--stale"] * args.stale, *["--beneath"] * args.beneath]


def _side_by_side(args: argparse.Namespace, grid: list[tuple[Cell, list[Case]]]) -> Iterator[dict[str, Any]]:
    """A process for the cells of each operator, DSL and precision, which records them itself. Yields what failed."""
    sizes: dict[tuple[str, ...], int] = {}
    for cell, found in grid:
        group = (cell.op, cell.dsl, cell.target, cell.precision)
        sizes[group] = sizes.get(group, 0) + len(found)
    groups = sorted(sizes, key=lambda group: -sizes[group])

    def command(group: tuple[str, ...]) -> list[str]:
        own = [word for name, value in zip(FILTERS, group, strict=True) for word in (f"--{name}", value)]
        seed = [] if args.seed is None else ["--seed", str(args.seed)]
        options = ["--device", args.device, "--jobs", "1", *_flags(args), *seed, *tree_options(args)]
        return [sys.executable, "-m", "msa_tiles", "verify", "--json", *own, *options]

    def ended(group: tuple[str, ...]) -> tuple[str, list[dict[str, Any]]]:
        done = subprocess.run(command(group), check=False, capture_output=True, text=True)
        try:
            return ".".join(group), json.loads(done.stdout)["failures"]
        except (ValueError, KeyError, TypeError):
            last = next(iter(done.stderr.strip().splitlines()[-1:]), "nothing was said")
            whole = {"cell": ".".join(group), "case": "", "seed": args.seed}
            return ".".join(group), [{**whole, "failure": f"ended with {done.returncode}: {last}"}]

    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        futures = concurrent.futures.as_completed([pool.submit(ended, group) for group in groups])
        results = (future.result() for future in futures)
        for _, failures in console.arrivals(results, map(".".join, groups), "cells", lambda result: result[0]):
            yield from failures


def _sanitized(args: argparse.Namespace, dsls: Collection[str]) -> int:
    """The same command on the smallest cases, in a process for each DSL that compute-sanitizer watches."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise ToolError("--sanitizer needs compute-sanitizer on PATH; it comes with the CUDA toolkit")
    filters = {name: ",".join(found) or None for name, found in filters_of(args).items()}
    given = {**filters, "device": args.device, "jobs": args.jobs, "seed": args.seed}
    bad = 0
    for dsl, kernels in KERNEL_NAMES.items():
        if dsl in dsls:
            options = {name: str(value) for name, value in (given | {"dsl": dsl}).items() if value is not None}
            again = [
                sys.executable,
                "-m",
                "msa_tiles",
                "verify",
                "--smallest",
                *_flags(args),
                *tree_options(args),
            ]
            again += [part for name, value in options.items() for part in (f"--{name}", value)]
            watch = [tool, "--tool", args.sanitizer, "--error-exitcode", str(ERRORS), "--kernel-name", f"kns={kernels}"]
            bad += bool(subprocess.run([*watch, *again], check=False).returncode)
    return 1 if bad else 0
