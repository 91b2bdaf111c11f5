"""Loads a directory of specs and checks what no single file can know."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msa_tiles.spec.contract import read_operator
from msa_tiles.spec.expression import ExpressionError
from msa_tiles.spec.hardware import read_target
from msa_tiles.spec.inherit import Heir, resolved
from msa_tiles.spec.judge import Judge, Mistaken
from msa_tiles.spec.mistakes import Location, Mistakes, SpecError, joined
from msa_tiles.spec.model import Format, KernelRow, Operator, Precision, Specs, Target, Workload, frozen
from msa_tiles.spec.precisions import Partly, read_precisions
from msa_tiles.spec.reach import group_told
from msa_tiles.spec.source import Node, read, shown
from msa_tiles.spec.work import describe, dims_of, quantities_of

T = TypeVar("T")
TARGETS, OPERATORS, PRECISIONS = "targets", "operators", "precisions.yaml"


def load(specs_dir: Path, *above: Path, mistakes: Mistakes | None = None) -> Specs:
    """Read `targets/*.yaml`, `precisions.yaml` and `operators/*.yaml`.

    Directories `above` hold what they need of these. Their files go before those of the same names beneath, and what
    their `precisions.yaml` names before the formats and precisions of the same names.

    Raises SpecError, whose text has a line `file:line: sentence` for every mistake. What depends on a mistaken part is
    looked at when that is right. With `mistakes`, which hear of them instead, what has none is returned.
    """
    if mistakes is not None:
        return _load(specs_dir, above, mistakes)
    return _remembered(specs_dir, above, tuple(_contents((specs_dir, *above))), Path.cwd())


@functools.lru_cache(maxsize=8)
def _remembered(specs_dir: Path, above: tuple[Path, ...], contents: tuple[tuple[Path, bytes], ...], cwd: Path) -> Specs:
    """Of these contents; the working directory is in what is said of a place in a file."""
    with Mistakes() as told:
        return _load(specs_dir, above, told)


def _contents(directories: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    """The names of all that there is in directories of specs, and what specs hold, as far as it can be read."""
    folders = (folder / part for folder in directories for part in ("", TARGETS, OPERATORS))
    for path in (path for folder in folders for path in folder.glob("*")):
        try:
            yield path, path.read_bytes() if path.suffix == ".yaml" else b""
        except OSError:
            yield path, b""


def _load(specs_dir: Path, above: Sequence[Path], mistakes: Mistakes) -> Specs:
    target_files = [_yaml_files(specs_dir / TARGETS), *(_own_files(folder, TARGETS) for folder in above)]
    operator_files = [_yaml_files(specs_dir / OPERATORS), *(_own_files(folder, OPERATORS) for folder in above)]
    precision_files = [specs_dir / PRECISIONS, *(file for folder in above if (file := folder / PRECISIONS).is_file())]
    partly = Partly()
    rows: dict[str, list[KernelRow]] = {}
    for error in (error for folder in above for error in _others(folder)):
        mistakes.add(error)
    mistakes.read(lambda: read_precisions(*map(read, precision_files), partly=partly))
    targets = _read_all(mistakes, target_files, read_target, any_name=True)
    operators = _read_all(mistakes, operator_files, lambda root, name: _operator(root, name, rows))
    mistaken = Mistaken(
        frozenset(file.stem for files in target_files for file in files if file.stem not in targets),
        None if partly.names is None else frozenset(partly.names) - frozenset(partly.precisions),
        {name: rows[name] for name in rows if name not in operators},
        {file.stem: Location(shown(file), 1) for files in operator_files for file in files},
    )
    return link(targets, partly.formats, partly.precisions, operators, mistaken, mistakes)


def _read_all(
    mistakes: Mistakes, layers: Sequence[Sequence[Path]], reader: Callable[[Node, str], T], any_name: bool = False
) -> dict[str, T]:
    """What the reader makes of the files of all directories, by their names; `any_name` is of `resolved`."""
    nodes = [mistakes.each(read, files) for files in layers]
    whole = [len(files) for files in layers] == [len(files) for files in nodes]
    # Where a file cannot be read at all, who inherits from it cannot either.
    roots = mistakes.read(resolved, nodes, any_name) if whole else None
    return mistakes.entries(lambda name, root: _read(root, name, reader), roots or {})


def _operator(root: Node, name: str, rows: dict[str, list[KernelRow]]) -> Operator:
    """What a file says. Where it has mistakes it raises SpecError, and `rows` get its rows, under its name."""
    try:
        return _right_operator(root, name)
    except SpecError:
        return read_operator(root, name, rows.setdefault(name, []))


_right_operator = functools.lru_cache(maxsize=64)(read_operator)  # most files are what they were at the last load


def _read(root: Node, name: str, reader: Callable[[Node, str], T]) -> T:
    """What the reader makes of a file. A mistake that is only one with what an heir says is the heir's."""
    try:
        return reader(root, name)
    except SpecError as error:
        if not isinstance(root, Heir):
            raise
        beneath: dict[str, SpecError] = {}
        try:
            reader(root.parent, Path(root.parent.where.file).stem)
        except SpecError as known:
            beneath = {each.sentence: each for each in known.mistakes}
        raise joined(beneath.get(each.sentence, each.of(root.where)) for each in error.mistakes) from None


def link(
    targets: Mapping[str, Target],
    formats: Mapping[str, Format],
    precisions: Mapping[str, Precision],
    operators: Mapping[str, Operator],
    mistaken: Mistaken | None = None,
    mistakes: Mistakes | None = None,
) -> Specs:
    """Join what the files declare, and check that they agree. Raises SpecError, or `mistakes` hear of it."""
    if mistakes is None:
        with Mistakes() as told:
            return link(targets, formats, precisions, operators, mistaken, told)
    mistaken = mistaken or Mistaken()
    if not mistaken.targets:
        mistakes.passes(_check_precisions, precisions, targets)
    linked: dict[str, Operator] = {}
    spoilt: list[tuple[str, KernelRow]] = []
    for name, operator in operators.items():
        if precisions:
            try:
                _check_workloads(operator, precisions)
            except SpecError as error:
                mistakes.add(error.of(operator.where))
        mistakes.passes(_check_tolerance, operator, precisions, mistaken)
        judge = Judge(targets, precisions, mistaken, operator.where, operator)
        expanded = _expanded(operator, targets, judge, mistakes)
        refused = [row for row in expanded.kernels if judge.refuses(row)]
        spoilt += [(name, row) for row in (*refused, *judge.nowhere)]
        mistakes.each(_raised, judge.told())
        unfit_cells = {row.cell for row in refused}
        kernels = tuple(row for row in expanded.kernels if row.cell not in unfit_cells)
        linked[name] = dataclasses.replace(expanded, kernels=kernels) if refused else expanded
    for name, rows in mistaken.rows.items():
        judge = Judge(targets, precisions, mistaken, mistaken.heirs[name])
        for row in rows:
            judge.refuses(row)
        mistakes.each(_raised, judge.told())
        spoilt += [(name, row) for row in rows]
    return Specs(frozen(targets), frozen(formats), frozen(precisions), frozen(linked), tuple(spoilt))


def _own_files(specs_dir: Path, part: str) -> list[Path]:
    return _yaml_files(specs_dir / part) if (specs_dir / part).is_dir() else []


def _others(specs_dir: Path) -> Iterator[SpecError]:
    """A mistake for each folder and source that nothing reads: of what somebody wrote nothing is passed over."""
    elsewhere = f"no specs are read from here, but from {TARGETS}/*.yaml, {OPERATORS}/*.yaml and {PRECISIONS}"
    for path in sorted(path for part in ("", TARGETS, OPERATORS) for path in (specs_dir / part).glob("*")):
        inside, suffix, line = path.parent != specs_dir, path.suffix.lower(), int(not path.is_dir())
        known = path.suffix == ".yaml" if inside else path.name in (TARGETS, OPERATORS, PRECISIONS)
        if known or path.name.startswith((".", "__")) or (line and suffix not in (".py", ".yaml", ".yml")):
            continue
        renamed = inside and line and suffix != ".py"
        yield SpecError(
            Location(shown(path), line), f"specs end in .yaml: rename it to {path.stem}.yaml" if renamed else elsewhere
        )


def _yaml_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise SpecError(Location(shown(directory), 0), "there is no such directory of specs")
    return sorted(directory.glob("*.yaml"))


def _check_precisions(precisions: Mapping[str, Precision], targets: Mapping[str, Target]) -> None:
    """Every element that a precision multiplies exists on some target."""
    known = {element for target in targets.values() for kind in target.mma.values() for element in kind.elements}
    with Mistakes() as mistakes:
        for precision in precisions.values():
            if precision.multiply not in known:
                sentence = f"{precision.name} multiplies {precision.multiply!r}, which no target does"
                mistakes.add(SpecError(precision.multiply_where, sentence))


def _check_workloads(operator: Operator, precisions: Mapping[str, Precision]) -> None:
    """Every workload satisfies the rules at every point it runs at, and the roofline has a value there."""
    with Mistakes() as mistakes:
        for workload in (*operator.verify, *operator.bench):
            mistakes.read(_check_workload, operator, workload, next(iter(precisions.values())))


def _check_workload(operator: Operator, workload: Workload, some_precision: Precision) -> None:
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


def _raised(error: SpecError) -> None:
    raise error


def _check_tolerance(operator: Operator, precisions: Mapping[str, Precision], mistaken: Mistaken) -> None:
    with Mistakes() as mistakes:
        for name in operator.tolerance:
            if name not in precisions and mistaken.precisions is not None and name not in mistaken.precisions:
                why = group_told(name, operator, precisions.values()) or f"; known: {', '.join(precisions)}"
                sentence = f"tolerance names the precision {name!r}{why}"
                mistakes.add(SpecError(operator.where, sentence))
        for precision, bounds in operator.tolerance.items():
            for output, bound in bounds.items():
                if output in operator.outputs and operator.outputs[output].dtype == "int32" and bound:
                    sentence = (
                        f"output {output!r} holds integers, so its tolerance for {precision} must be 0, not {bound}"
                    )
                    mistakes.add(SpecError(operator.outputs[output].where, sentence))


def _expanded(operator: Operator, targets: Mapping[str, Target], judge: Judge, mistakes: Mistakes) -> Operator:
    """The operator with a row for every cell: rows without targets are of all that can run them, oldest first.

    A row for a target is also one for those that inherit from it and can run it. What a row says of a cell by name goes
    before that, and what a file says before what it inherits. `mistakes` hear of a cell that has two rows.
    """
    found: dict[str, KernelRow] = {}
    ordered = sorted(targets.values(), key=lambda target: (target.capability, target.name))
    for file in dict.fromkeys(row.where.file for row in operator.kernels):
        rows = [row for row in operator.kernels if row.where.file == file]
        own: dict[str, KernelRow] = {}
        for row in rows:
            if row.target and row.cell in own:
                sentence = f"the cell {row.cell} has a row already, on line {own[row.cell].where.line}"
                mistakes.add(SpecError(row.where, sentence))
            own |= {row.cell: row} if row.target else {}
        of_file: dict[str, KernelRow] = {}
        for row in rows:
            heirs = [target for target in ordered if not row.target or row.target in _ancestors(target, targets)]
            others = [dataclasses.replace(row, target=target.name, derived=True) for target in heirs]
            refusals = [judge.refusals(each) for each in others]
            if not row.target and all(refusals):
                judge.nowhere.append(row)
                judge.found += [(row, key, sentence) for key, sentence in judge.telling(row, refusals)]
            fitting = (each for each, why in zip(others, refusals, strict=True) if not why)
            of_file |= {row.cell: row} if row.target else {}
            for each in fitting:
                if each.cell not in own:
                    of_file.setdefault(each.cell, each)
        found |= of_file
    return dataclasses.replace(operator, kernels=tuple(found.values()))


def _ancestors(target: Target, targets: Mapping[str, Target]) -> Iterator[str]:
    """The targets that one inherits from. In a tree a target may inherit from the one of its own name beneath."""
    seen = {target.name}
    while target.inherits not in ("", *seen) and target.inherits in targets:
        yield target.inherits
        seen.add(target.inherits)
        target = targets[target.inherits]
