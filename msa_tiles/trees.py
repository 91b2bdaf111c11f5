"""Trees of one's own: directories whose specs, skeletons, operands and kernels extend or replace the shipped ones.

Of a tree DIR there is what it needs of

- `DIR/specs`: `targets/*.yaml`, `operators/*.yaml`, `precisions.yaml`;
- `DIR/skeletons/<dsl>/<mma>/<operator>.py`;
- `DIR/operands/<dsl>/<name>.py`;
- `DIR/generated`: its kernels, their index and their evidence, which commands write.

Trees stack. `--tree` and `use` put one on top of those that are in use already; `MSA_TILES_TREE`, a list of directories
like PATH that is read once, when kernels are first looked for, lies beneath them and has its first one on top. What a
tree says goes before what the trees beneath it and the installation say of the same thing; all else remains.

A tree is code, as a wheel is. It is used if it belongs to this user or to root, and nobody else may write there.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from msa_tiles import paths, trust
from msa_tiles.errors import ToolError
from msa_tiles.files import from_json
from msa_tiles.sources import OPERANDS, forget_operands, search_operands

VARIABLE = "MSA_TILES_TREE"
INSTALLATION = paths.PACKAGE
STATE = "specs"  # the key of an index that has the state of the sources
FOLDERS = ("specs", "skeletons", "operands", "generated")
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class TreeError(ToolError):
    """A tree cannot be used; the message says which one, why, and what to do."""


@dataclass(frozen=True)
class Tree:
    """A directory of one's own, by its absolute path."""

    directory: Path

    @property
    def specs(self) -> Path:
        return self.directory / "specs"

    @property
    def skeletons(self) -> Path:
        return self.directory / "skeletons"

    @property
    def operands(self) -> Path:
        return self.directory / OPERANDS[1:]

    @property
    def generated(self) -> Path:
        return self.directory / "generated"


def state_of_sources(tree: Tree) -> str:
    """A digest of the names and texts of a tree's specs, skeletons and operands, which its index keeps."""
    sources = [(file, file.relative_to(tree.specs)) for file in sorted(tree.specs.rglob("*.yaml"))]
    for folder in (tree.skeletons, tree.operands):
        sources += [(file, file.relative_to(tree.directory)) for file in sorted(folder.rglob("*.py"))]
    state = hashlib.sha256()
    for file, name in sources:
        if file.is_file():
            for part in (name.as_posix().encode(), file.read_bytes()):
                state.update(hashlib.sha256(part).digest())
    return state.hexdigest()[:16]


def is_outdated(tree: Tree) -> bool:
    """Whether a tree's sources are other than those that its kernels were generated from, as far as its index says."""
    try:
        recorded = from_json((tree.generated / "index.json").read_text(encoding="utf-8"))[STATE]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or one that whoever needs it refuses
        return False
    return recorded != state_of_sources(tree)


def told_outdated(directory: Path) -> str:
    """The sentence about a tree whose sources have changed."""
    return (
        f"the specs, skeletons or operands of {directory} have changed since its kernels were generated, which are as "
        f"they were: run `msa-tiles generate --tree {directory}`"
    )


class Use:
    """One use of a tree. As a context manager it ends with the block; else it lasts as long as the process."""

    def __init__(self, tree: Tree, before: _State) -> None:
        self.tree = tree
        self._before = before
        self._after: _State | None = None

    def __enter__(self) -> Tree:
        return self.tree

    def __exit__(self, *_: object) -> None:
        with _lock:
            if self._after is _state:
                _settle(self._before)
            else:  # others have come since: they stay
                _settle(_State(tuple(tree for tree in stack() if tree != self.tree), next(_epochs)))


def use(path: str | os.PathLike[str]) -> Use:
    """Put a tree on top of those in use, for the whole process, from now on or for a `with` block.

    Raises TreeError where there is no such directory, where it holds nothing of a tree, or others may write to it.
    """
    tree = read(path)
    with _lock:
        used = Use(tree, _current())
        used._after = _State((tree, *(other for other in stack() if other != tree)), next(_epochs))
        _settle(used._after)
    return used


def read(path: str | os.PathLike[str], named_by: str = "") -> Tree:
    """The tree at a path, which is looked at but not used. Raises TreeError, TypeError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {path!r}, wanted the directory of a tree, as text or as a path")
    if not os.fspath(path):
        raise TreeError("the path of a tree is empty: name its directory")
    directory = Path(path).expanduser().resolve()
    by = f"{named_by}: " if named_by else ""
    if directory.exists() and not directory.is_dir():
        kind = "a file" if directory.is_file() else "no directory"
        raise TreeError(f"{by}{directory} is {kind}, and a tree is a directory: name the one that its folders lie in")
    if not directory.is_dir():
        raise TreeError(f"{by}there is no directory {directory} to use as a tree; make it first, an empty one will do")
    if any(directory.iterdir()) and not any((directory / folder).is_dir() for folder in FOLDERS):
        raise TreeError(f"{by}{directory} is no tree: it has none of the folders {', '.join(FOLDERS)}")
    for folder in FOLDERS:
        if (directory / folder).exists() and not (directory / folder).is_dir():
            raise TreeError(f"{by}{directory / folder} is a file, and in a tree a directory")
    if directory / "generated" == paths.generated_dir().resolve():
        raise TreeError(
            f"{by}{directory} is what is used without a tree: leave it out, or name a directory of your own"
        )
    try:
        for each in _parts(directory):
            trust.require(each, _status(each))
    except trust.TrustError as error:
        remedy = f"; `chmod -R go-w {directory}` keeps others out" if isinstance(error, trust.WritableError) else ""
        remedy = remedy or ("; put there what it leads to" if each.is_symlink() else "")
        raise TreeError(f"{by}{error}, and a tree is code{remedy}") from error
    except OSError as error:
        raise TreeError(f"{by}{error.filename} cannot be read ({error.strerror})") from error
    return Tree(directory)


def stack() -> tuple[Tree, ...]:
    """The trees in use, the top one first. Raises TreeError for one of MSA_TILES_TREE that cannot be used."""
    return _current().trees


def present() -> tuple[Tree, ...]:
    """The same. Raises TreeError where the directory of one is gone, in whose place nothing else is looked for."""
    for tree in stack():
        if not tree.directory.is_dir():
            raise TreeError(gone(tree.directory))
    return stack()


def gone(directory: Path) -> str:
    """The sentence about a tree in use whose directory was deleted or moved."""
    return (
        f"the tree {directory} is in use and is no longer there: put it back, or leave it out (the end of its `with` "
        f"block, --tree, {VARIABLE})"
    )


def top() -> Tree | None:
    """The tree that commands write to; None where that is the installation."""
    return next(iter(stack()), None)


def epoch() -> int:
    """A number for the trees in use: another one whenever they change, and the old one when they are what they were."""
    return 0 if _state is None else _state.epoch


def cached(maxsize: int) -> Callable[[Callable[_Arguments, _Answer]], Callable[_Arguments, _Answer]]:
    """As functools.lru_cache, for answers that hold for the trees in use alone."""

    def decorate(function: Callable[_Arguments, _Answer]) -> Callable[_Arguments, _Answer]:
        @functools.lru_cache(maxsize=maxsize)
        def remembered(_: int, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            return function(*args, **kwargs)

        @functools.wraps(function)
        def asked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
            return remembered(epoch(), *args, **kwargs)  # type: ignore[arg-type]  # hashable, as for lru_cache

        return asked

    return decorate


def specs_dirs(trees: Sequence[Tree] | None = None) -> list[Path]:
    """The directories of specs, the shipped ones first, each of which extends or replaces what those before it say.

    Raises TreeError where the directory of a tree in use is gone.
    """
    above = (tree.specs for tree in reversed(present() if trees is None else trees))
    return [paths.specs_dir(), *(folder for folder in above if folder.is_dir())]


def require_own(directory: Path) -> None:
    """Raise ValueError where something would be written to the installation itself; a checkout is one's own."""
    if directory.is_relative_to(INSTALLATION):
        raise ValueError(
            f"{directory} came with the installation, which is not written to: name a tree of your own, --tree DIR or "
            f"{VARIABLE}"
        )


@dataclass(frozen=True)
class _State:
    trees: tuple[Tree, ...]
    epoch: int


_lock = threading.RLock()
_epochs = itertools.count(1)
_state: _State | None = None  # None until MSA_TILES_TREE was read


def _current() -> _State:
    global _state
    if _state is None:
        with _lock:
            places = [place for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
            # One that is named twice counts where it is named first.
            _state = _state or _State(tuple(dict.fromkeys(read(place, VARIABLE) for place in places)), 0)
    return _state


def _settle(state: _State) -> None:
    """Make these the trees in use. The caller holds the lock."""
    global _state
    for tree in stack():
        forget_operands(tree.directory)
    _state = state
    for tree in state.trees:
        search_operands(tree.generated)


def _fresh_lock() -> None:
    """In a child of a fork, whose parent may have been changing trees in another thread."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)


def _status(path: Path) -> os.stat_result:
    """The status of a part of a tree. What Python made for bytecode, whatever the umask, is closed to others first."""
    status = path.lstat()
    if path.name == "__pycache__" and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        status = path.lstat()
    return status


def _parts(directory: Path) -> Iterator[Path]:
    """The directory, and all that a tree may have in it."""
    yield directory
    for folder in FOLDERS:
        if os.path.lexists(directory / folder):
            yield directory / folder
            yield from sorted((directory / folder).rglob("*"))
