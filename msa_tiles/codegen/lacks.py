"""What a target has no kernels of, why, and what would have to be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from msa_tiles import readable, trees
from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.codegen.own import produce_for
from msa_tiles.codegen.plan import Selection
from msa_tiles.spec import KernelRow, Operator, Specs, Target
from msa_tiles.spec.judge import unfit
from msa_tiles.spec.model import DSLS


@dataclass(frozen=True)
class Lack:
    """An operator that a target lacks, in some precisions where it has others: `operator` names these, too."""

    op: str
    precisions: tuple[str, ...]
    operator: str
    reason: str
    remedy: str


def lacks(specs: Specs, name: str, present: Collection[str] | None = None, ops: Collection[str] = ()) -> list[Lack]:
    """What a target lacks of the operators, or of `ops`, in the precisions in which some target has them.

    With the ids of the cells that are `present` it lacks also what could be generated and is not.
    """
    target, made = specs.targets[name], produce_for(specs, name)
    cells = {plan.cell: plan for plan in made.plans}
    found: list[Lack] = []
    for op, operator in specs.operators.items():
        if ops and op not in ops:
            continue
        precisions = list(dict.fromkeys(row.precision for row in operator.kernels))
        missing: dict[tuple[str, str], list[str]] = {}
        for precision in precisions:
            can = [cell for cell, plan in cells.items() if (plan.op, plan.precision) == (op, precision)]
            if not can:
                cannot = (why.partition(": ") for cell, why in made.unfit.items() if cell.startswith(f"{op}."))
                sentences = [why for cell, _, why in cannot if precision in cell.split(".")]
                missing.setdefault(_reason(operator, precision, target, specs, sentences), []).append(precision)
            elif present is not None and not any(cell in present for cell in can):
                remedy = f"nothing: {_command(name)}"
                missing.setdefault(("it can be generated and is not", remedy), []).append(precision)
        for (reason, remedy), named in missing.items():
            what = op if named == precisions else f"{op} ({', '.join(named)})"
            found.append(Lack(op, tuple(named), what, reason, remedy))
    return found


def ungenerated(target: str, selection: Selection, present: Collection[str]) -> str:
    """Says how to generate what is selected and not `present`, where a target has kernels on request; else empty."""
    specs = readable.specs()
    if target not in specs.targets or not specs.targets[target].on_request:
        return ""
    plans = produce_for(specs, target).plans
    missing = dict.fromkeys(plan.op for plan in plans if selection.holds(plan.cell) and plan.cell not in present)
    not_there = "is not" if len(missing) == 1 else "are not"
    return f"{', '.join(missing)} can be generated for {target} and {not_there}: {_command(target)}" if missing else ""


def _command(target: str) -> str:
    return f"msa-tiles generate --tree DIR --target {target}"


def _reason(operator: Operator, precision: str, target: Target, specs: Specs, sentences: list[str]) -> tuple[str, str]:
    """Why a target has no kernel of an operator in a precision, and what would have to be written."""
    file, rows = f"specs/operators/{operator.name}.yaml", list(_rows(operator, precision, target))
    if sentences:
        return sentences[0], f"a row with another tile in {file}"
    families = dict.fromkeys(row.mma for row in rows)
    if not any(family in target.mma for family in families):
        own = [family for family in target.mma if family != "simt"]
        place = _place(own[0] if own else "<family>", operator.name)
        needs = "" if own else f", a family beside simt in specs/targets/{target.name}.yaml"
        have = ", ".join(target.mma)
        return (
            f"it multiplies with {' or '.join(families)}; {target.name} has {have}",
            f"{place}{needs}, a row in {file}",
        )
    for row in rows:
        if row.mma in target.mma:
            other = dataclasses.replace(row, target=target.name)
            if refusal := unfit(other, operator, specs.targets, specs.precisions):
                return refusal[1], f"a row for {target.name} in {file}, and a skeleton that does without"
    named = ", ".join(dict.fromkeys(row.target for row in rows))
    return f"its rows are for {named} alone", f"a row with targets: [{target.name}] in {file}"


def _place(family: str, op: str) -> str:
    """The skeleton to write, or what to do about the one of other precisions that there is."""
    folders = (*(tree.skeletons for tree in trees.stack()), SKELETONS)
    there = [dsl for dsl in DSLS if any((folder / dsl / family / f"{op}.py").is_file() for folder in folders)]
    place = f"skeletons/{there[0] if len(there) == 1 else '<dsl>'}/{family}/{op}.py"
    return f"{place} extended, or an algorithm of its own beside it" if there else place


def _rows(operator: Operator, precision: str, target: Target) -> Iterator[KernelRow]:
    return (row for row in operator.kernels if row.precision == precision and row.target != target.name)
