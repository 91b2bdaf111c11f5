"""`msa-tiles build`: compile kernels ahead of time. No GPU is needed.

With --tree it compiles the tree's own kernels, unless --beneath is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_tiles import console
from msa_tiles.commands._beneath import add_beneath, own_kernels, tell_beneath
from msa_tiles.commands._options import (
    add_filters,
    add_json,
    add_variant,
    check_filters,
    processes,
    refuse_ungenerated,
    select,
    ungenerated,
    without_missing,
    without_oversized,
)
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted

if TYPE_CHECKING:
    from msa_tiles.runtime.build import Job, Outcome
    from msa_tiles.runtime.cache import Cache, Entry
    from msa_tiles.runtime.registry import Cell, Registry

MANY = 100  # kernels: looking which of them are in the cache takes a second or more


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("build", help="compile kernels into the cache, without a GPU", description=__doc__)
    add_filters(parser)
    add_beneath(parser)
    parser.add_argument(
        "--for",
        dest="calls",
        action="append",
        default=[],
        metavar="CALL",
        help="only what a call needs, such as msa_decode or sparse_attention,precision=fp8,group=8 (repeatable), on "
        "--target or the GPU here; what it does not name is as in MiniMax M3, and bf16; with --dsl, what it needs with "
        "backend=DSL",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="inspect the machine code against plan and target, and record which kernels of a tree or a checkout "
        "passed",
    )
    add_variant(
        parser,
        "one variant of each kernel: these compile-time dims, else those of MiniMax M3; none is recorded",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes (default 1)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="cache to fill (default: the one that calls use)")
    add_json(parser, "a list of what became of each variant")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from msa_tiles.runtime.build import build, ci_jobs
    from msa_tiles.runtime.cache import Cache
    from msa_tiles.runtime.compiler import variant_text
    from msa_tiles.runtime.registry import default_registry

    processes("--jobs", args.jobs)
    if args.cache is not None:
        refuse_unwritable("--cache", args.cache, directory=True)
    registry = default_registry()
    if args.calls:
        return _build_for(args, registry)
    installed = without_missing(own_kernels(args, select(args, registry)))
    if not installed:
        return 2
    jobs, cache = ci_jobs(installed), Cache(args.cache)
    if args.variant:
        jobs = _at(installed, dict(args.variant))
    if not args.audit:  # which tells it of each
        jobs = without_oversized(jobs, registry)
    tell_beneath(jobs)
    _tell_work(jobs, registry, args.jobs, cache)
    outcomes = build(jobs, registry.targets, workers=args.jobs, audited=args.audit, cache=cache, apart=True)
    made: list[dict[str, Any]] = []
    for outcome in console.arrivals(outcomes, map(str, jobs), "compiling", lambda outcome: str(outcome.job)):
        made.append(_described(outcome, args.audit))
    made.sort(key=lambda row: (row["cell"], variant_text(row["variant"])))
    failed = [row["cell"] for row in made if not row["good"]]
    if args.json:
        console.say(json.dumps(made, indent=1))
    else:
        columns = ("cell", "variant", "seconds", "registers", "shared memory", "result")
        console.table([columns, *(_line(row) for row in made)])
        good = "compiled and audited" if args.audit else "compiled"
        console.say(f"{len(jobs) - len(failed)} of {len(jobs)} variants are {good}")
    unrecorded = args.audit and not args.variant and not _record(installed, failed, registry)
    return 1 if failed or unrecorded else 0


def _tell_work(jobs: Sequence[Job], registry: Registry, workers: int, cache: Cache) -> None:
    """Say before anything is compiled how many kernels that is, and how long it usually takes."""
    from msa_tiles.runtime.build import missing, usual_seconds

    looking = jobs if len(jobs) < MANY else console.progress(jobs, "looking into the cache", str)
    lacking = missing(looking, registry.targets, cache)
    sentence = f"{counted(len(jobs), 'kernel')}, {len(jobs) - len(lacking):,} in the cache"
    if lacking:
        least, most = usual_seconds(lacking, workers)
        unit, name = (60, "minutes") if most >= 120 else (1, "seconds")
        span = f"{max(1, round(least / unit)):,} to {round(most / unit):,} {name}"
        which = "" if len(lacking) < MANY else "; --op, --dsl, --target and --for compile fewer"
        side_by_side = counted(min(workers, len(lacking)), "process", "processes")
        sentence += f": compiling {len(lacking):,} usually takes {span} in {side_by_side}{which}"
    console.note(sentence)


def _described(outcome: Outcome, audited: bool) -> dict[str, Any]:
    """What became of a variant, as `build --json` prints it."""
    registers, shared = _resources(outcome.entry) if audited else (None, None)
    return {
        "cell": outcome.job.cell.id,
        "variant": dict(outcome.job.variant),
        "seconds": round(outcome.seconds, 1),
        "registers": registers,
        "shared_memory": shared,
        "good": outcome.good,
        "result": "; ".join(outcome.complaints) or ("audited" if audited else "compiled"),
    }


def _line(row: Mapping[str, Any]) -> tuple[object, ...]:
    """A row of the table."""
    from msa_tiles.runtime.compiler import variant_text

    measured = ("" if row[name] is None else row[name] for name in ("registers", "shared_memory"))
    return row["cell"], variant_text(row["variant"]), f"{row['seconds']:.1f}", *measured, row["result"]


def _at(cells: Sequence[Cell], given: Mapping[str, int]) -> list[Job]:
    """One variant of each cell. Raises ValueError where a cell has not the dim, or the dim not the value."""
    from msa_tiles.runtime.build import Job

    for cell in cells:
        for name, value in given.items():
            values = cell.variants.get(name)
            if values is None:
                dims = ", ".join(cell.variants) or "none"
                raise ValueError(f"--variant {name}: {cell.id} has the dims {dims}; name with --op those that have it")
            if value not in values:
                raise ValueError(f"--variant {name}={value}: {cell.id} has {', '.join(map(str, values))}")
    return [Job(cell, {**cell.ci[0], **given}) for cell in cells]


def _build_for(args: argparse.Namespace, registry: Registry) -> int:
    """Compile what calls need, of the kernels that would run."""
    import torch

    from msa_tiles.runtime.build import build
    from msa_tiles.runtime.cache import Cache
    from msa_tiles.runtime.facts import device_facts
    from msa_tiles.runtime.pairs import form_text
    from msa_tiles.runtime.parts import forms_of_call
    from msa_tiles.spec.model import DSLS

    if args.audit or args.beneath or args.op or args.precision or args.variant:
        raise ValueError(
            "--for names operators and precisions itself (sparse_attention,precision=fp8) and audits nothing: leave "
            "out --op, --precision, --variant, --beneath and --audit"
        )
    refuse_ungenerated("--target", args.target, registry)
    check_filters({"dsl": args.dsl, "target": args.target}, {"dsl": DSLS}, registry.targets)
    targets = args.target
    if not targets and torch.cuda.is_available():
        here = device_facts(torch.device("cuda"), registry.targets.values()).target
        targets = [] if here is None else [here]
    if not targets:
        raise ValueError(f"--for needs --target, one of {', '.join(registry.targets)}")
    asked = itertools.product(targets, args.calls, args.dsl or ["auto"])
    jobs = [*{str(job): job for target, call, dsl in asked for job in _jobs(call, registry, target, dsl)}.values()]
    for call in args.calls:
        for form, called in forms_of_call(call, registry).items():
            console.note(f"--for {call}: {form_text(form, called)}; the form is compiled all the same")
    cache = Cache(args.cache)
    _tell_work(jobs, registry, args.jobs, cache)
    outcomes = build(jobs, registry.targets, workers=args.jobs, audited=False, cache=cache, apart=True)
    made = []
    for outcome in console.arrivals(outcomes, map(str, jobs), "compiling", lambda outcome: str(outcome.job)):
        made.append(_described(outcome, False))
        if not outcome.good:
            console.complain(f"{outcome.job}: {outcome.complaints[0]}")
    bad = sum(not row["good"] for row in made)
    if args.json:
        console.say(json.dumps(made, indent=1))
        return 1 if bad else 0
    console.say(
        f"{len(jobs) - bad} of {len(jobs)} kernels are compiled for {', '.join(targets)}: {', '.join(args.calls)}"
    )
    return 1 if bad else 0


def _jobs(call: str, registry: Registry, target: str, backend: str) -> list[Job]:
    """The kernels that a call may launch. Raises ValueError, which says so where they can be generated."""
    from msa_tiles.runtime.parts import WHOLES, UnservedError, jobs_for

    try:
        return jobs_for(call, registry, target, backend=backend)
    except UnservedError as error:
        launched = WHOLES.get(error.op, (error.op,))
        precisions = [] if error.precision == "any" else [registry.serving(op, error.precision) for op in launched]
        if remedy := ungenerated(registry, launched, [target], precisions):
            raise ValueError(f"{error}\n{remedy}") from error
        raise


def _record(cells: Sequence[Cell], failed: Container[str], registry: Registry) -> bool:
    """Keep in `compiled.json` which cells passed, with the digests that they have now.

    False where it cannot be written; that of an installation is not to be.
    """
    import datetime

    from msa_tiles.codegen.toolchain import PINS
    from msa_tiles.commands.support import is_generated
    from msa_tiles.runtime import evidence, toolchain

    entries: dict[str, dict[str, Any] | None] = {}
    for cell in cells:
        versions = dict(toolchain.generator_versions(cell.dsl))
        # A digest speaks of the pinned toolchain and of the kernel that was generated.
        if not is_generated(cell) or any(versions[name] != pinned for name, pinned in PINS[cell.dsl].items()):
            console.complain(f"{cell.id} is not recorded: it was edited, or its toolchain is not the pinned one")
            continue
        entries[cell.id] = None
        if cell.id not in failed:
            entries[cell.id] = {
                "digest": cell.digest,
                "audit": evidence.audit_digest(cell, registry.targets[cell.target]),
                "points": len(cell.ci),
                "versions": {**versions, "compiler": toolchain.compiler_version(cell.dsl)},
                "date": datetime.date.today().isoformat(),
            }
    try:
        evidence.record_compiled(registry.directory, entries)
    except ValueError as error:
        console.note(f"nothing is recorded: {error}")
    except OSError as error:
        console.complain(f"{registry.directory / evidence.COMPILED} cannot be written ({error.strerror})")
        return False
    return True


def _resources(entry: Entry | None) -> tuple[int | None, int | None]:
    """Registers of a thread and bytes of shared memory of a block."""
    measured = None if entry is None else entry.read_audit()
    if entry is None or measured is None:
        return None, None
    functions = measured["functions"].values()
    shared = max(function["static_shared_memory"] for function in functions)
    shared += max(launch["dynamic_shared_memory"] for launch in entry.meta["kernels"].values())
    return max(function["registers"] for function in functions), shared
