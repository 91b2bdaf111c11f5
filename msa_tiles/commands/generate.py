"""`msa-tiles generate`: write the kernels that the specs ask for, or check that they are up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from msa_tiles import console
from msa_tiles.paths import generated_dir, specs_dir


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="write the kernels that the specs ask for", description=__doc__)
    for axis in ("op", "dsl", "target", "precision"):
        parser.add_argument(
            f"--{axis}", action="append", default=[], metavar="NAME", help=f"only this {axis}; repeatable"
        )
    parser.add_argument("--specs", type=Path, default=specs_dir(), metavar="DIR", help="specs to read (%(default)s)")
    parser.add_argument("--out", type=Path, default=generated_dir(), metavar="DIR", help="where to write (%(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a file is not what it should be"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from msa_tiles import codegen, spec
    from msa_tiles.spec.model import DSLS
    from msa_tiles.spec.precisions import named

    specs = spec.load(args.specs)
    known = {"op": specs.operators, "dsl": DSLS, "target": specs.targets}
    for axis, names in known.items():
        for name in getattr(args, axis):
            if name not in names:
                console.complain(f"--{axis} {name} is unknown; known: {', '.join(names)}")
                return 2
    groups = {name: precision.group for name, precision in specs.precisions.items()}
    try:
        precisions = named(args.precision, groups, [format.group for format in specs.formats.values()])
    except ValueError as error:
        console.complain(f"--precision: {error}")
        return 2
    if args.precision and not precisions:
        console.complain(f"--precision {' '.join(args.precision)}: no precision is of this group as yet")
        return 2
    selection = codegen.Selection(args.op, args.dsl, args.target, precisions)
    generated = codegen.produce(specs, tree=args.specs)
    count = sum(selection.holds(plan.cell) for plan in generated.plans)
    if args.check:
        problems = codegen.drift(generated, args.out, selection)
        for problem in problems:
            console.complain(f"{args.out}/{problem}")
        if problems:
            console.complain(f"{len(problems)} of the generated files need `msa-tiles generate`")
            return 1
        console.say(f"{count} kernels are what their specs say")
        return 0
    changes = codegen.write(generated, args.out, selection)
    for path in changes.written:
        console.say(f"wrote {args.out}/{path}")
    for path in changes.deleted:
        console.say(f"deleted {args.out}/{path}, which no spec asks for")
    for path in changes.kept:
        console.complain(f"kept {args.out}/{path}, which no spec asks for, because it was not generated")
    console.say(f"{count} kernels, {len(changes.written)} files written, {changes.unchanged} unchanged")
    return 0
