"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_tiles import console, names, trees
from msa_tiles.names import counted
from msa_tiles.spec.model import DSLS

if TYPE_CHECKING:
    import torch

    from msa_tiles.runtime.build import Job
    from msa_tiles.runtime.facts import DeviceFacts
    from msa_tiles.runtime.registry import Cell, Registry, Target
    from msa_tiles.spec.model import Target as TargetSpec

MOST_JOBS = 8  # processes for each processor: more of them only take memory
MOST_SECONDS = 600  # that one contender runs
_FIRST = "_first_values"
FILTERS = ("op", "dsl", "target", "precision")


class Once(argparse.Action):
    """Takes the value of an option that has one. Another value is refused, where argparse would take the last one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        first = vars(namespace).setdefault(_FIRST, {}).setdefault(self.dest, values)
        if first is not values and first != values:
            raise argparse.ArgumentError(self, f"it is {first} and then {values}, and takes one value")
        setattr(namespace, self.dest, values)


class EachOnce(argparse.Action):
    """Gathers pairs of name and value, one value of each name."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        pairs = [*getattr(namespace, self.dest), *values]
        first = dict(reversed(pairs))
        for name, value in pairs:
            if first[name] != value:
                raise argparse.ArgumentError(self, f"{name} is {first[name]} and then {value}, and takes one value")
        setattr(namespace, self.dest, pairs)


def path(text: str) -> Path:
    """Parse a path for argparse: an empty one, as of a variable that is not set, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or leave the option out")
    return Path(text)


def add_names(parser: argparse.ArgumentParser, option: str, metavar: str, help: str, *, one: bool = False) -> None:
    """Option that takes names, separated by commas, and may be repeated: a list, which is empty where nobody names.

    Where `one` is wanted, that is for the command to check.
    """
    more = "" if one else "; repeatable"
    parser.add_argument(option, action="extend", default=[], type=listed, metavar=metavar, help=help + more)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Options that narrow a command down to some cells."""
    what = {
        "op": "operators, such as sparse_attention",
        "dsl": f"DSLs: {', '.join(DSLS)}",
        "target": "targets, such as sm90, or cards, such as H100",
        "precision": "precisions, such as q16kv8, or groups of them, such as fp8",
    }
    for name in FILTERS:
        add_names(parser, f"--{name}", f"{name.upper()},…", f"only kernels of these {what[name]}")


def add_variant(parser: argparse.ArgumentParser, help: str) -> None:
    """Option that names compile-time dims: pairs of name and value in `variant`."""
    parser.add_argument(
        "--variant", nargs="+", action=EachOnce, default=[], type=named_value, metavar="NAME=N", help=help
    )


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Option to print JSON in place of a table."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def add_tree(parser: argparse.ArgumentParser) -> None:
    """Option that names trees of one's own, for every command."""
    parser.add_argument(
        "--tree",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="a tree of your own, whose specs, skeletons, operands and kernels go before the shipped ones; what is "
        "written goes there; repeatable, the last one on top (see MSA_TILES_TREE)",
    )


def tree_options(args: argparse.Namespace) -> list[str]:
    """The option as it was given, for a process that does the same."""
    return [word for tree in args.tree for word in ("--tree", str(tree))]


def filters_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """What was given for them, as keywords of `Registry.select`."""
    return {name: getattr(args, name) for name in FILTERS}


def filter_text(filters: Mapping[str, Iterable[str]]) -> str:
    """The filters as they may be typed, for a message."""
    return " ".join(f"--{name} {','.join(given)}" for name, given in filters.items() if given)


def check_filters(
    filters: Mapping[str, Iterable[str]],
    known: Mapping[str, Collection[str]],
    targets: Mapping[str, Target] | Mapping[str, TargetSpec],
) -> None:
    """Raise ValueError for a name that nothing has, with the one that may have been meant."""
    for name, given in filters.items():
        if name == "target":
            check_targets("--target", given, targets)
        else:
            names.check(f"--{name}", given, known[name])


def check_targets(option: str, given: Iterable[str], targets: Mapping[str, Target] | Mapping[str, TargetSpec]) -> None:
    """Raise ValueError for a name that is no target, with the target that serves the GPU that was meant."""
    from msa_tiles.spec.cards import told_of, unknown_target

    for name in given:
        if name not in targets:
            cards = "" if told_of(name, targets) else "; a card such as H100 stands for its target"
            raise ValueError(f"{unknown_target(option, name, targets)}{cards}")


def refuse_ungenerated(option: str, given: Iterable[str], registry: Registry) -> None:
    """Raise for a target that no kernels are known of because of the trees in use: SpecError with the mistakes of their
    specs, ValueError for a target that they declare and of which nothing was generated.
    """
    from msa_tiles import trees
    from msa_tiles.spec import load

    strange = [name for name in given if name not in registry.targets]
    if not strange or not trees.stack():
        return
    targets = load(*trees.specs_dirs()).targets
    for name in strange:
        if name in targets:
            asked = f" --target {name}" if targets[name].on_request else ""
            raise ValueError(
                f"{option} {name}: {targets[name].where.file} declares it, and nothing is generated of that as yet; "
                f"run `msa-tiles generate --tree DIR{asked}`"
            )


def is_target(name: str) -> bool:
    """Whether a name is like those that targets have."""
    return re.fullmatch(r"sm_?\d+[af]?", name) is not None


def targets_of(given: Sequence[str]) -> list[str]:
    """Targets, where some may be told by the name of a card, such as H100."""
    from msa_tiles import readable
    from msa_tiles.spec.cards import card_of

    specs, _ = readable.readable()
    found: dict[str, None] = {}
    for name in given:
        card = None if name in specs.targets else card_of(name, specs)
        found[name if card is None else card[0].name] = None
    return list(found)


def known_names(registry: Registry) -> dict[str, list[str]]:
    """What each filter may name, and the features that calls may need."""
    groups = (entry["group"] for entry in registry.formats.values())
    features = {name for cell in registry.cells for name in (*cell.features, *cell.entry["refuses"])}
    return {
        "op": list(dict.fromkeys(cell.op for cell in registry.cells)),
        "dsl": list(DSLS),
        "precision": list(dict.fromkeys((*registry.precisions, *groups))),
        "feature": sorted(features | {"k_offset"}),
    }


def select(args: argparse.Namespace, registry: Registry) -> tuple[Cell, ...]:
    """The cells that match the filters.

    Raises ValueError for a name that does not exist, and where no cell is left.
    """
    from msa_tiles.runtime.parts import PARTS, parts_of

    filters = filters_of(args)
    known = known_names(registry)
    ops = known["op"]
    for op in filters["op"]:
        if op in PARTS and op not in ops:
            launched = ",".join(part for part in parts_of(op) if part in ops)
            raise ValueError(f"--op {op} has no kernels of its own, it launches those of others: --op {launched}")
    refuse_ungenerated("--target", filters["target"], registry)
    check_filters(filters, known, registry.targets)
    cells = registry.select(**filters)
    if not cells:
        remedy = (
            ungenerated(registry, **filters) or _served_by_others(filters, registry) or "`msa-tiles support` lists all"
        )
        raise ValueError(f"no cell matches {filter_text(filters) or 'an empty index'}; {remedy}")
    return cells


def _served_by_others(filters: Mapping[str, Sequence[str]], registry: Registry) -> str:
    """Says which kernels serve calls in precisions of which an operator has none; empty where none do."""
    from msa_tiles.runtime.pairs import precisions_of, serving_cells

    told = []
    for op in filters["op"]:
        for name in filters["precision"]:
            every = [each for each, of in registry.precisions.items() if name in (each, of.group)]
            there = registry.select(op, filters["dsl"], filters["target"])
            found = {cell.id for each in every for cell in serving_cells(op, each, registry)}
            if serving := precisions_of(cell for cell in there if cell.id in found):
                told.append(f"calls of {op} in {name} run kernels of {serving}, --precision {serving.replace(' ', '')}")
    return "; ".join(told)


def tell_mistakes() -> None:
    """Complain of trees in use whose specs have mistakes, by which no kernel that is there changes."""
    if trees.stack():
        from msa_tiles import readable

        for sentence in readable.mistakes():
            console.complain(sentence)


def tell_outdated() -> None:
    """Complain of trees in use whose sources are other than those that their kernels were generated from."""
    for tree in filter(trees.is_outdated, trees.stack()):
        console.complain(trees.told_outdated(tree.directory))


def tell_changed_targets(cells: Iterable[Cell], registry: Registry) -> None:
    """Say of which targets a tree in use says otherwise than what the kernels of these cells were made for."""
    if changed := [name for name in dict.fromkeys(cell.target for cell in cells) if name in registry.changed]:
        console.say(
            f"{', '.join(changed)} is as a tree describes it, and the evidence is not: a kernel that exceeds the "
            "limits there refuses calls, as `msa-tiles explain` says"
        )


def ungenerated(
    registry: Registry,
    op: Collection[str],
    target: Iterable[str],
    precision: Collection[str],
    dsl: Collection[str] = (),
) -> str:
    """Says how kernels come that match these filters and that targets have on request alone; empty where none do."""
    from msa_tiles.codegen import Selection, lacks

    named = [name for name in registry.precisions if {name, registry.group_of(name)} & set(precision)]
    selection, present = Selection(op, dsl, (), named), {cell.id for cell in registry.cells}
    return "; ".join(filter(None, (lacks.ungenerated(name, selection, present) for name in target)))


def on_target(cells: Iterable[Cell], facts: DeviceFacts, args: argparse.Namespace) -> list[Cell]:
    """Those that run on a device. Raises ValueError where none does."""
    cells = list(cells)
    found = [cell for cell in cells if cell.target == facts.target]
    if not found:
        targets = ", ".join(dict.fromkeys(cell.target for cell in cells))
        raise ValueError(f"no cell that matches {filter_text(filters_of(args))} is for {facts}; they are for {targets}")
    return found


def only(option: str, given: Sequence[str], why: str) -> str:
    """The one name that an option has. Raises ValueError for several."""
    if len(set(given)) != 1:
        raise ValueError(f"{option} {','.join(given)}: {why}")
    return given[0]


def cuda_device(option: str, text: str, what_for: str) -> torch.device:
    """The GPU that an option names. Raises ValueError where it names none, or one that is not here."""
    import torch

    from msa_tiles import readable
    from msa_tiles.spec.cards import told_of

    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("cpu")
    if device.type != "cuda":
        served = told_of(text, readable.specs().targets)
        why = f"{option} {text} names no GPU of this machine, and {what_for}; name cuda or cuda:N"
        raise ValueError(f"{why} ({served})" if served else why)
    if not torch.cuda.is_available():
        raise ValueError(f"there is no CUDA device here; {what_for}")
    if device.index is not None and device.index >= (there := torch.cuda.device_count()):
        raise ValueError(f"{option} {text} is not here: there {'is' if there == 1 else 'are'} {counted(there, 'GPU')}")
    return device


def processes(option: str, value: int) -> None:
    """Raise ValueError for a number of processes that no machine like this one can use."""
    at_least(option, value, 1)
    there = os.cpu_count() or 1
    if value > MOST_JOBS * there:
        raise ValueError(
            f"{option} is {value}, wanted at most {MOST_JOBS * there}: there are {counted(there, 'processor')} here"
        )


def seconds(option: str, value: float) -> None:
    """Raise ValueError for a time that is none, or that nobody waits for."""
    if not 0 < value <= MOST_SECONDS:
        raise ValueError(f"{option} is {value:g}, wanted more than 0 and at most {MOST_SECONDS}")


def at_least(option: str, value: float, least: float) -> None:
    """Raise ValueError for a number that is too small."""
    if not value >= least:
        raise ValueError(f"{option} is {value:g}, wanted at least {least:g}")


def without_missing(cells: Iterable[Cell]) -> list[Cell]:
    """The cells whose DSL is installed; says why those of another are left out."""
    from msa_tiles.runtime import toolchain

    cells = list(cells)
    reasons = {dsl: toolchain.missing(dsl) for dsl in sorted({cell.dsl for cell in cells})}
    for dsl, reason in reasons.items():
        if reason is not None:
            console.complain(f"the cells of {dsl} are left out: {reason}")
    return [cell for cell in cells if reasons[cell.dsl] is None]


def without_oversized(jobs: Sequence[Job], registry: Registry) -> list[Job]:
    """The kernels that fit their target as trees in use describe it; says of how many that is not so, and why.

    Raises ValueError where none is left.
    """
    from msa_tiles.runtime.blocks import excess

    # Of other targets the audit knows: their limits are those that kernels were made for.
    reasons = {
        str(job): excess(job.cell, job.variant, registry.targets[job.cell.target])
        for job in jobs
        if job.cell.target in registry.changed
    }
    left = [job for job in jobs if not reasons.get(str(job))]
    if len(left) < len(jobs):
        name, why = next((name, why) for name, why in reasons.items() if why)
        sentence = f"{len(jobs) - len(left)} of {counted(len(jobs), 'kernel')} cannot fit, such as {name}: {why}"
        if not left:
            raise ValueError(sentence)
        console.complain(f"{sentence}; they are left out")
    return left


def named_value(text: str) -> tuple[str, int]:
    """Parse `name=number` for argparse."""
    name, equals, value = text.partition("=")
    if not (name and equals and value.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, for example head_dim=128")
    return name, int(value)


def listed(text: str) -> list[str]:
    """Parse `one,two` for argparse."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: leave the option out for everything")
    return found
