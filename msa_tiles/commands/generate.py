"""`msa-tiles generate`: write the kernels that the specs ask for, or check that they are up to date."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msa_tiles import console, trees
from msa_tiles.commands._lacks import show_lacks
from msa_tiles.commands._options import (
    add_filters,
    check_filters,
    filter_text,
    filters_of,
    tree_options,
)
from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted, meant
from msa_tiles.paths import generated_dir, specs_dir

if TYPE_CHECKING:
    from msa_tiles.codegen import Generated, Selection
    from msa_tiles.spec import Specs
    from msa_tiles.spec.model import Target

_NOTHING = "no kernel beyond what lies beneath"


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="write the kernels that the specs ask for", description=__doc__)
    add_filters(parser)
    parser.add_argument("--specs", type=Path, metavar="DIR", help="specs to read, with --out (default: those in use)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: the top tree's generated/, or the checkout's)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a file is not what it should be"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from msa_tiles import codegen
    from msa_tiles.codegen import own
    from msa_tiles.codegen.misplaced import idle
    from msa_tiles.spec.model import DSLS
    from msa_tiles.spec.precisions import named

    tree, out = _places(args)
    if tree is None:
        specs = codegen.checked([args.specs or specs_dir()], tree=args.specs or specs_dir(), requested=args.target)
    else:
        specs = own.checked_specs(args.target)
    filters = filters_of(args)
    groups = {name: precision.group for name, precision in specs.precisions.items()}
    known_groups = [format.group for format in specs.formats.values()]
    axes = {"op": specs.operators, "dsl": DSLS, "precision": [*groups, *known_groups]}
    check_filters(filters, axes, specs.targets)
    precisions = named(args.precision, groups, known_groups)
    if args.precision and not precisions:
        raise ValueError(f"--precision {','.join(args.precision)}: no precision is of this group as yet")
    asked = [name for name in args.target if specs.targets[name].on_request]
    if asked and tree is None:
        raise ValueError(f"kernels of {', '.join(asked)} are generated into a tree of your own alone: --tree DIR")
    selection = codegen.Selection(args.op, args.dsl, args.target, precisions)
    if not args.check:
        refuse_unwritable("--out" if args.out else "--tree" if tree else "the checkout", out, directory=True)
    if tree is None:
        console.note(f"rendering the kernels of {args.specs or specs_dir()}")
        made = [_Part(out, codegen.produce(specs, tree=args.specs or specs_dir()), "")]
    else:
        made = _parts_of_trees(specs, asked, beneath=args.check)
    count = sum(selection.holds(plan.cell) for part in made for plan in part.generated.plans)
    bare = [] if tree is None else _bare(specs, made[-1].generated, asked) if made else []
    bare = [name for name in bare if not args.target or name in args.target]
    changed = {} if tree is None or not made else own.changed_targets(specs, made[-1].generated, trees.stack())
    if not count and not bare and not changed and any(filters.values()):
        where = "no row of a spec" if tree is None else f"nothing that {_named(trees.stack(), args.check)} declares"
        raise ValueError(
            f"{where} matches {filter_text(filters)}; `{_unfiltered(args)}` {'checks' if args.check else 'writes'} all"
        )
    if not made:
        whole = _named(trees.stack(), args.check)
        stack = trees.stack()[: None if args.check else 1]
        if parts := [told for each in stack if (told := _has_alone(each, specs))]:
            raise ValueError(f"{whole} declares {_NOTHING}: {'; '.join(parts)}")
        raise ValueError(
            f"{whole} declares {_NOTHING}: put specs, skeletons or operands there, or "
            f"name a target that is generated on request, --target {_requestable(specs)}"
        )
    if args.check:
        return _check(made, count, selection)
    [(_, generated, _)] = made
    changes = codegen.write(generated, out, selection)
    for path in changes.written:
        console.say(f"wrote {out}/{path}")
    for path in changes.deleted:
        console.say(f"deleted {out}/{path}, which no spec asks for")
    for path in changes.kept:
        console.complain(f"kept {out}/{path}, which no spec asks for, because it was not generated")
    console.say(
        f"{counted(count, 'kernel')}, {counted(len(changes.written), 'file')} written, {changes.unchanged} unchanged"
    )
    for sentence in [] if tree is None else (*_told_of_formats(tree, specs), *idle(tree, specs)):
        console.complain(sentence)
    for cell, lost in ({} if tree is None else own.no_longer_served(generated, trees.stack())).items():
        if selection.holds(cell):
            console.complain(f"{cell}: served by the one beneath and no longer: {lost}")
    for sentence in () if tree is None else (*_told_of_twins(tree, specs), *_told_of_engines(tree, specs)):
        console.complain(sentence)
    for name in bare:
        console.say(f"{name} has no kernel: it can run none of those that there are")
    if tree is not None and changed:
        own_kernels = "" if generated.plans else ", and has no kernels of its own"
        refuse = "; kernels beneath refuse calls that do not fit" if any(changed.values()) else ""
        console.say(f"{tree.directory} {_changes(changed)}{own_kernels}{refuse}")
    elif tree is not None and not generated.plans and not bare:
        told = _has_alone(tree, specs)
        console.say(f"{tree.directory} declares {_NOTHING}" + (f": {told}" if told else ""))
    own_targets = [] if tree is None else [name for name in generated.index["targets"] if name not in changed]
    shown = dict.fromkeys(() if args.specs else (*args.target, *own_targets))
    for cell, why in generated.unfit.items():
        # Of what trees beneath say they were told when they were generated.
        of_this = len(trees.stack()) < 2 or tree is None or own.says_of(tree, cell, generated)
        if cell.split(".")[2] not in shown and selection.holds(cell) and of_this:
            console.complain(f"left out {why}")
    show_lacks(specs, shown, None, args.op)
    return 1 if bare and not count else 0


class _Part(NamedTuple):
    """What is generated into one directory, and the trees to name for it."""

    out: Path
    generated: Generated
    named: str


def _parts_of_trees(specs: Specs, asked: Sequence[str], beneath: bool) -> list[_Part]:
    """What the tree on top declares and, if wanted, each of those beneath it: the lowest one first.

    Those that declare neither a kernel nor a target that can run none, change no target and have no index are left out;
    ``asked`` are targets on request for the top one.
    """
    from msa_tiles.codegen import own

    stack, parts = trees.stack(), []
    for depth in reversed(range(len(stack) if beneath else 1)):
        tree, part = stack[depth], stack[depth:]
        console.note(f"rendering the kernels of {tree.directory}")
        of_part, requested = (own.specs_in_use(part), ()) if depth else (specs, asked)
        generated = own.produce_own(of_part, requested, part)
        said = generated.plans or own.changed_targets(of_part, generated, part)
        if said or own.is_generated(tree) or _bare(of_part, generated, requested):
            named = "".join(f" --tree {each.directory}" for each in reversed(part))
            parts.append(_Part(tree.generated, generated, named))
    return parts


def _has_alone(tree: trees.Tree, specs: Specs) -> str:
    """What a tree has of which no kernel comes, and what would have to be written; empty where it has nothing."""
    from msa_tiles.codegen.emit import SKELETONS

    told = {
        "precisions": [each.name for each in specs.precisions.values() if _lies_in(each.where.file, tree)],
        "formats": [each.name for each in specs.formats.values() if _lies_in(each.where.file, tree)],
        "operands": [file.stem for file in (tree.directory / "operands").rglob("*.py")],
        "skeletons": [file.relative_to(tree.skeletons).as_posix() for file in tree.skeletons.rglob("*.py")],
    }
    rows = [file.relative_to(tree.specs).as_posix() for file in sorted(tree.specs.glob("operators/*.yaml"))]
    has = " and ".join(f"{what} ({', '.join(sorted(names))})" for what, names in told.items() if names)
    if rows:
        return f"what {', '.join(rows)} of it says gives the kernels that lie beneath"
    if not has:
        return ""
    if list(filter(None, told.values())) == [told["skeletons"]] and all(
        (SKELETONS / name).is_file() and (SKELETONS / name).read_bytes() == (tree.skeletons / name).read_bytes()
        for name in told["skeletons"]
    ):
        return f"it has {has} alone, as shipped: what you change in them makes kernels of your own"
    tolerance = ", a `tolerance`" if told["precisions"] else ""
    return (
        f"it has {has} alone, of which no row makes a kernel that is not there; a row of its own stands in "
        f"specs/operators/OPERATOR.yaml, with `inherits: OPERATOR`{tolerance} and `kernels:` (see docs/your-gpu.md)"
    )


def _told_of_formats(tree: trees.Tree, specs: Specs) -> Iterator[str]:
    """Sentences about formats of a tree whose storage does not tell a call's tensors from those of other formats."""
    own = [each for each in specs.formats.values() if _lies_in(each.where.file, tree)]
    for stored in own:
        from msa_tiles.call.formats import told_by_calls  # imports torch, which few trees need here

        if not told_by_calls(stored.name, stored.storage):
            yield f"{stored.where}: no call passes tensors of the format {stored.name}, of {stored.storage}"
            continue
        *hidden, last = (each for each in specs.formats.values() if each.storage == stored.storage)
        if stored.packed > 1 or not hidden or last is not stored:  # bytes of 4 bits come with the name of their format
            continue
        formats = ", ".join(each.name for each in hidden)
        precisions = [p.name for p in specs.precisions.values() if any(each in hidden for each in p.roles.values())]
        yield (
            f"{stored.where}: {stored.name} is stored as {formats} is, in {stored.storage}, and a call does not say "
            f"which of them: with this tree it is {stored.name}, and kernels of {', '.join(precisions)} serve no call"
        )


def _told_of_twins(tree: trees.Tree, specs: Specs) -> Iterator[str]:
    """Sentences about targets of a tree that have the capability of others, and so the GPUs."""
    alike: dict[tuple[int, int], list[Target]] = {}
    for target in sorted(specs.targets.values(), key=lambda target: not _lies_in(target.where.file, tree)):
        alike.setdefault(target.capability, []).append(target)
    for capability, (first, *others) in alike.items():
        if others and _lies_in(first.where.file, tree):
            yield (
                f"{first.where}: {first.name} has the capability {'.'.join(map(str, capability))} of "
                f"{' and '.join(target.name for target in others)}: with this tree GPUs of that capability are "
                f"{first.name}"
            )


def _told_of_engines(tree: trees.Tree, specs: Specs) -> Iterator[str]:
    """Sentences about copy engines of a tree's targets that nothing else names, rows least of all."""
    own = [target for target in specs.targets.values() if _lies_in(target.where.file, tree)]
    others = [target.copy for target in specs.targets.values() if target not in own]
    rows = [row.copy for operator in specs.operators.values() for row in operator.kernels]
    known = sorted({*itertools.chain(*others, *rows)})
    for target in own:
        for engine in target.copy:
            if engine not in known:
                yield f"{target.where}: no row names the copy engine {engine!r} of {target.name}{meant(engine, known)}"


def _lies_in(file: str, tree: trees.Tree) -> bool:
    return Path(file).resolve().is_relative_to(tree.specs)


def _changes(changed: Mapping[str, bool]) -> str:
    """What a tree says otherwise of targets that lie beneath it, as part of a sentence."""
    limits, others = ([name for name in changed if changed[name] is kind] for kind in (True, False))
    parts = [("the limits", limits), ("the description", others)]
    return "changes " + " and ".join(f"{what} of {', '.join(names)}" for what, names in parts if names)


def _bare(specs: Specs, generated: Generated, asked: Sequence[str]) -> list[str]:
    """The targets that a tree declares and that can run no kernel, neither its own nor one beneath."""
    from msa_tiles.codegen import own

    targets, there = specs.targets, {plan.target for plan in generated.plans}
    due = [name for name in generated.index["targets"] if name in asked or not targets[name].on_request]
    return [name for name in due if name not in there and not own.produce_for(specs, name).plans]


def _check(parts: Sequence[_Part], count: int, selection: Selection) -> int:
    """Complain of each file that is not what it should be; the exit status."""
    from msa_tiles.codegen import drift

    drifted = False
    for out, generated, named in parts:
        problems = drift(generated, out, selection)
        for problem in problems:
            console.complain(f"{out}/{problem}")
        if problems:
            verb = "needs" if len(problems) == 1 else "need"
            console.complain(f"{len(problems)} of the generated files {verb} `msa-tiles generate{named}`")
            drifted = True
    if not drifted:
        are = "is what its spec says" if count == 1 else "are what their specs say"
        console.say(f"{counted(count, 'kernel')} {are}")
    return 1 if drifted else 0


def _unfiltered(args: argparse.Namespace) -> str:
    """The command without filters, for a message."""
    options = [word for name in ("specs", "out") if (path := getattr(args, name)) for word in (f"--{name}", str(path))]
    return shlex.join(["msa-tiles", "generate", *["--check"] * args.check, *tree_options(args), *options])


def _named(stack: Sequence[trees.Tree], every: bool) -> str:
    """The tree on top, or every one, for a message."""
    return " or ".join(str(tree.directory) for tree in (stack if every else stack[:1]))


def _places(args: argparse.Namespace) -> tuple[trees.Tree | None, Path]:
    """The tree to generate, None for the specs of one directory, and where to write.

    Raises ValueError where that would be the installation, or kernels of other specs than its own.
    """
    if args.specs is not None or args.out is not None:
        if args.tree:
            raise ValueError("--tree names specs and where to write: leave out --specs and --out")
        if args.out is None and args.specs.resolve() != specs_dir().resolve():
            raise ValueError(f"--specs {args.specs}: say where to write, --out DIR; {generated_dir()} has others")
        return None, args.out or _shipped(args)
    tree = trees.top()
    return (None, _shipped(args)) if tree is None else (tree, tree.generated)


def _shipped(args: argparse.Namespace) -> Path:
    """The kernels of this checkout. Those of an installation are compared alone."""
    out = generated_dir()
    if not args.check:
        trees.require_own(out)
    return out


def _requestable(specs: Specs) -> str:
    return ", ".join(name for name, target in specs.targets.items() if target.on_request) or "(there is none)"
