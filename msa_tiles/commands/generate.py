"""`msa-tiles generate`: write the kernels that the specs ask for, or check that they are up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from msa_tiles import console
from msa_tiles.commands._options import add_filters, check_filters, filter_text, filters_of
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted
from msa_tiles.paths import generated_dir, specs_dir


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="write the kernels that the specs ask for", description=__doc__)
    add_filters(parser)
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
    filters = filters_of(args)
    groups = {name: precision.group for name, precision in specs.precisions.items()}
    known_groups = [format.group for format in specs.formats.values()]
    axes = {"op": specs.operators, "dsl": DSLS, "target": specs.targets, "precision": [*groups, *known_groups]}
    check_filters(filters, axes)
    precisions = named(args.precision, groups, known_groups)
    if args.precision and not precisions:
        raise ValueError(f"--precision {','.join(args.precision)}: no precision is of this group as yet")
    selection = codegen.Selection(args.op, args.dsl, args.target, precisions)
    if not args.check:
        refuse_unwritable("--out", args.out, directory=True)
    console.note(f"rendering the kernels of {args.specs}")
    generated = codegen.produce(specs, tree=args.specs)
    count = sum(selection.holds(plan.cell) for plan in generated.plans)
    if not count and any(filters.values()):
        raise ValueError(f"no row of a spec matches {filter_text(filters)}; `msa-tiles generate` alone writes all")
    if args.check:
        problems = codegen.drift(generated, args.out, selection)
        for problem in problems:
            console.complain(f"{args.out}/{problem}")
        if problems:
            console.complain(f"{len(problems)} of the generated files need `msa-tiles generate`")
            return 1
        console.say(
            f"{counted(count, 'kernel')} {'is what its spec says' if count == 1 else 'are what their specs say'}"
        )
        return 0
    changes = codegen.write(generated, args.out, selection)
    for path in changes.written:
        console.say(f"wrote {args.out}/{path}")
    for path in changes.deleted:
        console.say(f"deleted {args.out}/{path}, which no spec asks for")
    for path in changes.kept:
        console.complain(f"kept {args.out}/{path}, which no spec asks for, because it was not generated")
    console.say(
        f"{counted(count, 'kernel')}, {counted(len(changes.written), 'file')} written, {changes.unchanged} unchanged"
    )
    return 0
