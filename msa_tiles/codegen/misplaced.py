"""What lies in a tree and nothing reads: skeletons and operands in the wrong place, or of a name that nobody has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from msa_tiles import trees
from msa_tiles.codegen.emit import SKELETONS
from msa_tiles.names import meant
from msa_tiles.spec import Location, SpecError, Specs
from msa_tiles.spec.model import DSLS
from msa_tiles.spec.source import shown

SKELETON, OPERAND = "skeletons/<dsl>/<mma>/<operator>[_<algorithm>].py", "operands/<dsl>/<name>.py"
_SOURCES = (".py", ".yaml", ".yml")
_ALIKE = 0.8  # of the name of a folder and the one that may have been meant
_FOLDERS = trees.FOLDERS[:-1]
_DIRECTORIES = (*DSLS, "operators", "targets")
_OF_SPECS = ("operators", "targets", "precisions.yaml")
_SPEC = re.compile(r"^(op|target): *\w+", re.MULTILINE)  # what every spec begins with


def misplaced(tree: trees.Tree, specs: Specs | None, operators: Collection[str]) -> Iterator[SpecError]:
    """A mistake for each folder and file of a tree in a place from which nothing is read.

    Without `specs`, of which some could not be read, every family of multiplication is taken for one that there is.
    """
    for path in sorted(tree.directory.iterdir()):
        if why := _beside(path, specs, operators):
            yield SpecError(Location(shown(path), int(path.is_file())), f"nothing reads it: {why}")
    for folder in (tree.skeletons, tree.operands, tree.specs):
        yield from _of_no_kind(folder)
    known = sorted(_shipped() if specs is None else _of_rows(specs))
    for path, name in _sources(tree.skeletons):
        if not _may_be_skeleton(path.relative_to(tree.skeletons), specs, operators):
            sentence = f"nothing reads it: skeletons are read from {SKELETON}{meant(name, known)}"
            yield SpecError(Location(shown(path), 1), sentence)
    for path, name in _sources(tree.operands):
        dsl, *rest = path.relative_to(tree.operands).parts
        if path.suffix != ".py" or dsl not in DSLS or len(rest) != 1:
            close = meant(name, [f"{each}/{path.stem}.py" for each in DSLS])
            yield SpecError(Location(shown(path), 1), f"nothing reads it: operands are read from {OPERAND}{close}")


def _of_no_kind(folder: Path) -> Iterator[SpecError]:
    """A mistake for each file where a directory belongs, and for what has the name of a file and is none."""
    for path in sorted(folder.rglob("*")):
        named = path.suffix in _SOURCES and not path.name.startswith(".")
        if path.parent == folder and path.name in _DIRECTORIES and not path.is_dir():
            yield SpecError(Location(shown(path), 0), "is a file; wanted a directory")
        elif named and folder.name != _FOLDERS[0] and not path.is_file():  # of specs whoever reads them tells it
            kind = "a directory" if path.is_dir() else "no plain file"
            yield SpecError(Location(shown(path), 0), f"is {kind}; wanted a file")


def idle(tree: trees.Tree, specs: Specs) -> Iterator[str]:
    """Sentences about skeletons of a tree that are where they belong, and which no row takes."""
    taken = _of_rows(specs)
    for path, name in _sources(tree.skeletons):
        if name not in taken:
            yield f"{shown(path)}: no row takes this skeleton{meant(name, sorted(taken))}"


def _beside(path: Path, specs: Specs | None, operators: Collection[str]) -> str:
    """Why nothing is read from what lies beside a tree's folders; empty for what is somebody's own business."""
    if path.name in _OF_SPECS:
        return f"it belongs into {trees.FOLDERS[0]}" if path.is_file() or any(path.glob("*.y*ml")) else ""
    if path.name in DSLS:
        there = any(_may_be_skeleton(path.name / Path(name), specs, operators) for _, name in _sources(path))
        return f"skeletons are read from {SKELETON}" if there else ""
    if path.suffix.lower() in _SOURCES[1:] and path.is_file() and (spec := _SPEC.search(_text(path))):
        return f"it belongs into {trees.FOLDERS[0]}/{'operators' if spec[1] == 'op' else 'targets'}"
    # What begins with the name of a folder is a copy that was put aside.
    if path.name.startswith((".", *_FOLDERS)):
        return ""
    close = meant(path.name, _FOLDERS, _ALIKE) if path.is_dir() else ""
    return f"a tree has the folders {', '.join(_FOLDERS)}{close}" if close and any(_sources(path)) else ""


def _text(path: Path) -> str:
    """What a file holds; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files of a folder that somebody wrote to be read, with their names below it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if not hidden and path.suffix.lower() in _SOURCES and path.name != "__init__.py" and path.is_file():
            yield path, name.as_posix()


def _of_rows(specs: Specs) -> set[str]:
    """The skeletons that rows take."""
    rows = [(op, row) for op, operator in specs.operators.items() for row in operator.kernels]
    return {
        f"{row.dsl}/{row.mma}/{'_'.join(filter(None, (op, row.algorithm)))}.py" for op, row in (*rows, *specs.spoilt)
    }


def _shipped() -> set[str]:
    return {name for _, name in _sources(SKELETONS)}


def _may_be_skeleton(name: Path, specs: Specs | None, operators: Collection[str]) -> bool:
    """Whether a row may take a skeleton of this name, be there one or not."""
    if name.suffix != ".py" or len(name.parts) != 3:
        return False
    dsl, family, _ = name.parts
    families = None if specs is None else {each for target in specs.targets.values() for each in target.mma}
    if dsl not in DSLS or (families is not None and family not in families):
        return False
    return any(name.stem == op or name.stem.startswith(f"{op}_") for op in operators)
