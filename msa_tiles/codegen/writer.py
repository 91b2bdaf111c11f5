"""Writes what the specs declare, touching only what changed, or tells how the disk differs from it."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msa_tiles.codegen.contract import MADE_BY, contract_of, header
from msa_tiles.codegen.digest import digest_of, recorded_digests
from msa_tiles.codegen.emit import SKELETONS, render
from msa_tiles.codegen.index import INDEX, added, dumps, index, is_known
from msa_tiles.codegen.marks import no_module, sizes_amiss
from msa_tiles.codegen.misfits import misfits
from msa_tiles.codegen.plan import Cell, CellError, CellMistakes, IllegalError, KernelPlan, Selection, completed, plans
from msa_tiles.codegen.toolchain import PINS
from msa_tiles.files import UNFINISHED, make_directory, write_atomically
from msa_tiles.sources import (
    OPERANDS,
    PACKAGE,
    forget_operands,
    operand_file,
    operands_of,
    search_operands,
    unchanging,
    without_header,
)
from msa_tiles.spec import Location, Mistakes, SpecError, Specs, load
from msa_tiles.spec.mistakes import joined
from msa_tiles.spec.source import shown
from msa_tiles.syntax import SourceError, located, text_of, tree_of
from msa_tiles.tables import TableError, table_of
from msa_tiles.trees import STATE

_ABANDONED = 3600  # seconds after which nobody writes a file any more


@dataclass(frozen=True)
class Generated:
    """Everything the specs ask for, in memory: files by path below the output directory, and the index.

    ``paths`` holds the file of each cell: cells of one operator and DSL whose text is the same share one.
    """

    plans: tuple[KernelPlan, ...]
    paths: Mapping[str, str]
    files: Mapping[str, str]
    index: Mapping[str, Any]
    unfit: Mapping[str, str] = field(default_factory=dict)  # why cells that follow from a target's parent are missing
    archs: Mapping[str, str] = field(default_factory=dict)  # what each cell is compiled for


@dataclass(frozen=True)
class Changes:
    """What a run did, by path below the output directory. ``kept`` are orphans that the generator did not write."""

    written: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: int
    kept: tuple[str, ...] = ()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collections: they look at every node of the syntax trees that are about, and free none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def produce(
    specs: Specs,
    skeletons: Path | Sequence[Path] = SKELETONS,
    package: Path = PACKAGE,
    tree: Path | None = None,
    requested: Collection[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> Generated:
    """Render every cell. Same specs, same bytes. Raises SpecError with all mistakes of all cells.

    Of several directories of skeletons the first one that has a cell's is taken. What lies in ``tree`` as
    `operands/<dsl>/<name>.py` is found besides the package's operands, and copied: the directory of generated files is
    whole by itself. Of targets that are generated on request, cells of those that are ``requested`` are rendered.

    With an index of what lies ``beneath`` only cells count that it has not, or has otherwise.
    """
    folders = (skeletons,) if isinstance(skeletons, Path) else tuple(skeletons)
    copies = {} if tree is None else _own_operands(tree)
    known = {cell["id"]: cell for cell in ([] if beneath is None else beneath["cells"])}
    alike: dict[tuple, list[KernelPlan]] = {}
    digests: dict[str, str] = {}
    unfit: dict[str, str] = {}
    all_plans = []
    rendered: set[str] = set()
    with CellMistakes() as mistakes, unchanging():
        for planned in plans(specs, requested, unfit, mistakes):
            operator, precision = specs.operators[planned.op], specs.precisions[planned.precision]
            target = specs.targets[planned.target]
            try:
                body = render(planned, operator, target, precision, folders, package)
                plan = completed(planned, table_of(body, package), target)
                digest = digest_of(body, plan.dsl, target.arch, package)
            except IllegalError as error:
                if planned.derived:
                    unfit[planned.cell] = error.sentence
                else:
                    mistakes.add(error)
                continue
            except SpecError as error:
                if isinstance(error, CellError) and isinstance(error.__cause__, TableError):
                    error = CellError(planned, misfits(planned) + error.why)
                mistakes.add(error)
                continue
            except SourceError as error:
                mistakes.add(_told(error))
                continue
            except TableError as error:
                mistakes.add(CellError(planned, misfits(planned) + str(error)))
                continue
            rendered.add(plan.cell)
            if is_known(plan, operator, digest, known):
                continue
            all_plans.append(plan)
            digests[plan.cell] = digest
            alike.setdefault((plan.op, plan.dsl, tuple(contract_of(plan, operator, precision)), body), []).append(plan)
        if mistakes.found or specs.spoilt:
            _tell_unrendered(specs, folders, package, requested, rendered, mistakes)
    files: dict[str, str] = {}
    paths: dict[str, str] = {}
    for (op, _, contract, body), sharing in alike.items():
        # The row names the file's target first.
        path = min(sharing, key=lambda plan: specs.operators[op].place(plan.cell)).file
        files[path] = header({plan.cell: digests[plan.cell] for plan in sharing}, specs.operators[op], contract) + body
        paths |= {plan.cell: path for plan in sharing}
    files |= copies
    made = index(specs, all_plans, digests, paths)
    archs = {plan.cell: specs.targets[plan.target].arch for plan in all_plans}
    return Generated(tuple(all_plans), paths, files, made if beneath is None else added(made, beneath), unfit, archs)


def _told(error: SourceError) -> SpecError:
    """A file of Python that is none, as a mistake beside those of specs."""
    return SpecError(Location(shown(error.file), error.line), error.sentence)


def _tell_unrendered(
    specs: Specs,
    folders: Sequence[Path],
    package: Path,
    requested: Collection[str],
    rendered: Collection[str],
    mistakes: Mistakes,
) -> None:
    """Tell what is wrong with tile sizes and operands of rows that have other mistakes, which could not be rendered."""
    asked = {name for name, target in specs.targets.items() if not target.on_request or name in requested}
    rows = [(op, row) for op, operator in specs.operators.items() for row in operator.kernels]
    rows = [(op, row) for op, row in rows if row.target in asked and not row.derived]
    families = {name for target in specs.targets.values() for name in target.mma}
    broken = {mistake.where.file for error in mistakes.found for mistake in error.mistakes}
    for op, row in (*rows, *specs.spoilt):
        cell = Cell(f"{op}.{row.cell}", row.where.of(specs.operators[op].where) if op in specs.operators else row.where)
        if cell.cell in rendered:
            continue
        for why in sizes_amiss(op, row, folders, families, broken):
            mistakes.add(CellError(cell, why))
        module = f"msa_tiles.dsl.{row.dsl}{OPERANDS}"
        for role, name in row.operands.items():
            if row.dsl and operand_file(name, module, package) is None:
                mistakes.add(CellError(cell, no_module(role, name, module)))


def checked(
    directories: Sequence[Path],
    skeletons: Sequence[Path] = (SKELETONS,),
    tree: Path | None = None,
    requested: Collection[str] = (),
) -> Specs:
    """The specs of directories. Raises SpecError with their mistakes and those that rendering finds in the rest."""
    with CellMistakes() as mistakes:
        specs = load(*directories, mistakes=mistakes)
        if mistakes.found:
            # What is no mistake of a spec is told when there are none.
            with contextlib.suppress(ValueError):
                mistakes.read(produce, specs, skeletons, tree=tree, requested=requested)
    return specs


def generate(specs_dir: Path, out: Path, selection: Selection | None = None) -> Changes:
    """Load the specs and bring `out` up to date with them. Raises SpecError before anything is written."""
    return write(produce(checked([specs_dir], tree=specs_dir), tree=specs_dir), out, selection)


def _own_operands(tree: Path) -> dict[str, str]:
    """Copies of a tree's operands, which imports find from now on.

    Raises SpecError for all that are no Python, and ValueError where the package has one of the name, too.
    """
    copies = {}
    forget_operands(tree.resolve())
    mistakes = Mistakes()
    for dsl in PINS:
        for file in sorted(operands_of(tree, dsl).glob("*.py")):
            try:
                text = text_of(file)
                with located(file, text):
                    tree_of(text)
            except SourceError as error:
                mistakes.add(_told(error))
                continue
            if found := operand_file(file.stem, f"msa_tiles.dsl.{dsl}{OPERANDS}"):
                already = f"has the name of an operand of {dsl} that there is already: {found}"
                raise ValueError(f"{shown(file)} {already}; give it another")
            path = operands_of(Path(), dsl) / file.name
            copies[path.as_posix()] = f"# {MADE_BY}, a copy; do not edit.\n\n{text}"
    if mistakes.found:
        raise joined(mistakes.found)
    search_operands(tree.resolve())
    return copies


def write(generated: Generated, out: Path, selection: Selection | None = None) -> Changes:
    """Bring `out` up to date. Only a run over all cells deletes orphans, and only those that were generated.

    A reader sees every file as it was or as it will be, the index last. A run that is killed leaves no file torn.

    Raises ValueError where a link leads out of `out`, OSError that names the file.
    """
    selection = selection or Selection()
    wanted = _wanted(generated, out, selection)
    _refuse_links(out, wanted)
    changed = [path for path, text in wanted.items() if (out / path).is_symlink() or _read(out / path) != text]
    for path in changed:
        make_directory((out / path).parent)
        write_atomically(out / path, wanted[path])
    orphans = _orphans(generated, out) if selection.everything else []
    deleted = [path for path in orphans if _is_ours(out / path)]
    for path in deleted:
        (out / path).unlink()
    kept = tuple(path for path in orphans if path not in deleted)
    return Changes(tuple(changed), tuple(deleted), len(wanted) - len(changed), kept)


def drift(generated: Generated, out: Path, selection: Selection | None = None) -> list[str]:
    """One sentence for each file of `out` that is not what the specs say; empty when all is well."""
    selection = selection or Selection()
    found = []
    for path, text in _wanted(generated, out, selection).items():
        present = _read(out / path)
        if (out / path).is_symlink():
            found.append(f"{path} is a symbolic link, not the file itself")
        elif present is None:
            found.append(f"{path} is missing")
        elif present != text and path == INDEX:
            found.append(f"{path} is not what the specs declare")
        elif present != text:
            found.append(f"{path} {_difference(path, present, text, generated)}")
    if selection.everything:
        for path in _orphans(generated, out):
            of_others = "was not generated: put it elsewhere"
            found.append(f"{path} {'is an orphan: no spec asks for it' if _is_ours(out / path) else of_others}")
    return found


def _wanted(generated: Generated, out: Path, selection: Selection) -> dict[str, str]:
    paths = dict.fromkeys(path for cell, path in generated.paths.items() if selection.holds(cell))
    chosen = {path: generated.files[path] for path in (*paths, *_copies(generated))}
    others = (path for path in generated.files if path not in chosen)
    merged = _merged_index(generated, out, selection)
    if (
        merged is not generated.index
        and dumps(merged["cells"]) == dumps(generated.index["cells"])
        and all(_read(out / path) == generated.files[path] for path in others)
    ):
        merged = generated.index  # as a run without a selection writes it
    return chosen | {INDEX: dumps(merged) + "\n"}


def _merged_index(generated: Generated, out: Path, selection: Selection) -> Mapping[str, Any]:
    """The new index; cells outside the selection keep their present entry, because their files stay as they are."""
    if selection.everything:
        return generated.index
    try:
        present = json.loads(_read(out / INDEX) or '{"cells": []}')
        kept = {cell["id"]: cell for cell in present["cells"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{out / INDEX} is no index of kernels; the same command without filters writes it anew"
        ) from error
    cells = [
        cell if selection.holds(cell["id"]) else kept[cell["id"]]
        for cell in generated.index["cells"]
        if selection.holds(cell["id"]) or cell["id"] in kept
    ]
    # Where some cells stay as they are, so does what they were generated from.
    state = {STATE: present.get(STATE, generated.index[STATE])} if STATE in generated.index else {}
    return {**generated.index, **state, "cells": cells}


def _folders() -> list[Path]:
    """The folders below an output directory that generated files lie in."""
    return [folder for dsl in PINS for folder in (Path(dsl), operands_of(Path(), dsl))]


def _refuse_links(out: Path, paths: Iterable[str]) -> None:
    """Refuse folders that are links: what is written or deleted behind one lies elsewhere."""
    folders = {parent for path in paths for parent in Path(path).parents}
    for folder in _folders():
        folders |= {folder, *folder.parents}
    for folder in sorted(folders - {Path()}):
        if (out / folder).is_symlink():
            raise ValueError(f"{out / folder} is a symbolic link; kernels are written below {out} alone: remove it")


def _orphans(generated: Generated, out: Path) -> list[str]:
    present = (path for folder in _folders() for path in sorted((out / folder).rglob("*")) if path.is_file())
    names = (path.relative_to(out).as_posix() for path in present if "__pycache__" not in path.parts)
    return [name for name in names if name not in generated.files]


def _is_ours(path: Path) -> bool:
    """Whether a file is one that was generated, or that a run which was killed had not finished."""
    if path.name.startswith(UNFINISHED):
        return time.time() - path.stat().st_mtime > _ABANDONED
    return (_read(path) or "").startswith(f"# {MADE_BY} ")


def _copies(generated: Generated) -> set[str]:
    return set(generated.files) - set(generated.paths.values())


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _difference(path: str, present: str, wanted: str, generated: Generated) -> str:
    if path in _copies(generated):
        return "is not the copy of the operand that stands beside the specs"
    if without_header(present) == without_header(wanted):
        return "has an old header: its contract, a helper that it imports or the toolchain changed"
    dsl = path.split("/")[0]
    try:
        consistent = all(
            digest_of(present, dsl, generated.archs.get(cell, "")) == digest
            for cell, digest in recorded_digests(present).items()
        )
    except SyntaxError:
        consistent = False
    if consistent:
        return "is not what its spec and skeleton say"
    return "does not match its own digest: it was edited by hand, or a helper that it imports changed"
