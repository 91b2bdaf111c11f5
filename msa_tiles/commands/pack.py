"""`msa-tiles pack`: compiled kernels for machines without a compiler, as a directory or a wheel. No GPU is needed.

A pack holds the kernels of a target's serving and training points. They run with torch, TVM-FFI and the CUDA driver
alone, once `MSA_TILES_PACKS` names the directory or the wheel is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msa_tiles import console, names
from msa_tiles.commands._options import (
    add_names,
    check_targets,
    only,
    processes,
    refuse_ungenerated,
    ungenerated,
    without_oversized,
)
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted

if TYPE_CHECKING:
    from msa_tiles.runtime.build import Job


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("pack", help="make a pack of compiled kernels, without a GPU", description=__doc__)
    add_names(parser, "--target", "TARGET", "the one target, such as sm90, or card, such as H100", one=True)
    parser.add_argument(
        "--points",
        default="all",
        metavar="SET",
        help="serving, training, all (both, the default), unverified (what `msa-tiles verify --stale` launches), or "
        "a JSON file: a list of objects with op, precision, dsl and variant",
    )
    dsls = "tilelang, cutedsl, both, or best: what was measured to be faster (default best)"
    add_names(parser, "--dsl", "DSL", dsls, one=True)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="a new directory; in a checkout also a wheel (*.whl)",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes (default 1)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="cache to fill (default: the one that calls use)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from msa_tiles import trees
    from msa_tiles.pack import make, points, wheel
    from msa_tiles.runtime.cache import Cache
    from msa_tiles.runtime.registry import default_registry
    from msa_tiles.spec import load
    from msa_tiles.spec.model import DSLS
    from msa_tiles.verify.launched import unverified

    registry = default_registry()
    if not args.target:
        raise ValueError(f"--target is missing; it is one of {', '.join(registry.targets)}")
    refuse_ungenerated("--target", args.target, registry)
    check_targets("--target", args.target, registry.targets)
    names.check("--dsl", args.dsl, (*DSLS, points.BOTH, points.BEST))
    target = registry.targets[only("--target", args.target, "a pack is for one target; make one for each")]
    if not registry.select(target=target.name) and (remedy := ungenerated(registry, (), [target.name], ())):
        raise ValueError(f"--target {target.name}: {remedy}")
    dsl = points.BOTH if set(DSLS) <= set(args.dsl) else only("--dsl", args.dsl or [points.BEST], "name one of these")
    processes("--jobs", args.jobs)
    refuse_unwritable("--out", args.out, directory=args.out.suffix != ".whl")
    if args.out.suffix == ".whl":
        wheel.check(args.out)
    if args.cache is not None:
        refuse_unwritable("--cache", args.cache, directory=True)
    cache = Cache(args.cache)
    make.refuse_machine()
    if args.points == points.UNVERIFIED:
        jobs = unverified(registry, load(*trees.specs_dirs()), target.name, [dsl] if dsl in DSLS else DSLS)
    else:
        jobs = points.jobs_of(args.points, registry, target.name, dsl)
    jobs = without_oversized(jobs, registry)
    _refuse_missing(jobs)
    if args.out.suffix == ".whl":
        packing = wheel.build(jobs, target, args.out, workers=args.jobs, cache=cache)
    else:
        packing = make.make(jobs, target, args.out, workers=args.jobs, cache=cache)
    for _ in console.arrivals(packing, map(str, jobs), "packing", str):
        pass
    made = (wheel if args.out.suffix == ".whl" else make).described(args.out)
    console.say(
        f"{made.place}: {counted(made.kernels, 'kernel')} for {target.name}, {made.bytes / 1e6:.1f} MB; "
        f"for Linux on {make.MACHINE}, glibc {made.glibc} or newer, {made.tvm_ffi}"
    )
    return 0


def _refuse_missing(jobs: Iterable[Job]) -> None:
    """Raise ToolchainError before anything is compiled where a DSL that some kernel is written in is not installed."""
    from msa_tiles.runtime import toolchain
    from msa_tiles.spec.model import DSLS

    reasons = {dsl: toolchain.missing(dsl) for dsl in DSLS}
    there = [dsl for dsl in DSLS if reasons[dsl] is None]
    for dsl in dict.fromkeys(job.cell.dsl for job in jobs):
        if reason := reasons[dsl]:
            others = "".join(f"; --dsl {other} packs the kernels that calls take without it" for other in there)
            raise toolchain.ToolchainError(f"{reason}{others}")
