"""Loads a directory of specs and checks what no single file can know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msa_tiles.spec.contract import read_operator
from msa_tiles.spec.expression import ExpressionError
from msa_tiles.spec.hardware import read_target
from msa_tiles.spec.model import Format, KernelRow, Operator, Precision, Specs, Target, frozen
from msa_tiles.spec.precisions import read_precisions
from msa_tiles.spec.source import Location, SpecError, read, shown
from msa_tiles.spec.work import describe, dims_of, quantities_of


def load(specs_dir: Path) -> Specs:
    """Read `targets/*.yaml`, `precisions.yaml` and `operators/*.yaml`.

    Raises SpecError, whose text begins with `file:line: `, at the first mistake.
    """
    target_files = _yaml_files(specs_dir / "targets")
    operator_files = _yaml_files(specs_dir / "operators")
    formats, precisions = read_precisions(read(specs_dir / "precisions.yaml"))
    return link(
        targets={path.stem: read_target(read(path), path.stem) for path in target_files},
        formats=formats,
        precisions=precisions,
        operators={path.stem: read_operator(read(path), path.stem) for path in operator_files},
    )


def link(
    targets: Mapping[str, Target],
    formats: Mapping[str, Format],
    precisions: Mapping[str, Precision],
    operators: Mapping[str, Operator],
) -> Specs:
    """Join what the files declare, and check that they agree. Raises SpecError."""
    _check_precisions(precisions, targets)
    for operator in operators.values():
        _check_workloads(operator, precisions)
        _check_tolerance(operator, precisions)
        _check_rows(operator, targets, precisions)
    return Specs(frozen(targets), frozen(formats), frozen(precisions), frozen(operators))


def _yaml_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise SpecError(Location(shown(directory), 1), "there is no such directory of specs")
    return sorted(directory.glob("*.yaml"))


def _check_precisions(precisions: Mapping[str, Precision], targets: Mapping[str, Target]) -> None:
    """Every element that a precision multiplies exists on some target."""
    known = {element for target in targets.values() for kind in target.mma.values() for element in kind.elements}
    for precision in precisions.values():
        if precision.multiply not in known:
            raise SpecError(
                precision.multiply_where, f"{precision.name} multiplies {precision.multiply!r}, which no target does"
            )


def _check_workloads(operator: Operator, precisions: Mapping[str, Precision]) -> None:
    """Every workload satisfies the rules at every point it runs at, and the roofline has a value there."""
    some_precision = next(iter(precisions.values()))
    for workload in (*operator.verify, *operator.bench):
        for point in operator.variants.ci if workload.points == "ci" else operator.variants.ci[:1]:
            try:
                dims = dims_of(operator, workload, point)
                broken = [rule for rule in operator.rules if not rule(dims)]
                known = quantities_of(operator, workload, some_precision, point)
                for expression in (operator.roofline.flops, operator.roofline.bytes):
                    expression(known)
            except (ExpressionError, KeyError) as error:
                raise SpecError(workload.where, f"workload {workload.label}: {error.args[0]}") from error
            if broken:
                raise SpecError(
                    workload.where,
                    f"workload {workload.label} at {describe(point)} breaks the rule `{broken[0]}`",
                )


def _check_tolerance(operator: Operator, precisions: Mapping[str, Precision]) -> None:
    for name in operator.tolerance:
        if name not in precisions:
            raise SpecError(operator.where, f"tolerance names the precision {name!r}; known: {', '.join(precisions)}")
    for precision, bounds in operator.tolerance.items():
        for output, bound in bounds.items():
            if output in operator.outputs and operator.outputs[output].dtype == "int32" and bound:
                raise SpecError(
                    operator.outputs[output].where,
                    f"output {output!r} holds integers, so its tolerance for {precision} must be 0, not {bound}",
                )


def _check_rows(operator: Operator, targets: Mapping[str, Target], precisions: Mapping[str, Precision]) -> None:
    seen: dict[str, KernelRow] = {}
    for row in operator.kernels:
        if row.cell in seen:
            raise SpecError(row.where, f"the cell {row.cell} has a row already, on line {seen[row.cell].where.line}")
        seen[row.cell] = row
        target = _known(row, "target", targets)
        precision = _known(row, "precision", precisions)
        kind = _known(row, "mma", target.mma)
        for engine in row.copy:
            if engine not in target.copy:
                raise _at(row, "copy", f"{target.name} has no copy engine {engine!r}; it has {', '.join(target.copy)}")
        compute = row.computes_in(precision)
        if compute not in kind.elements:
            raise _at(
                row,
                "compute" if row.compute else "precision",
                f"{target.name} {kind.name} cannot compute {compute!r}; it multiplies {', '.join(kind.elements)}",
            )
        for role in operator.roles:
            if role != "output" and role not in precision.roles:
                raise _at(row, "precision", f"{precision.name} has no {role}, which {operator.name} reads")
        for role in row.operands:
            if role not in operator.roles:
                raise _at(row, "operands", f"{operator.name} reads no {role}")
        if precision.name not in operator.tolerance:
            raise _at(row, "precision", f"{operator.name} states no tolerance for {precision.name}")


def _known(row: KernelRow, key: str, known: Mapping):
    name = getattr(row, key)
    if name not in known:
        raise _at(row, key, f"unknown {key} {name!r}; known: {', '.join(known)}")
    return known[name]


def _at(row: KernelRow, key: str, sentence: str) -> SpecError:
    return SpecError(row.key_lines[key], sentence)
