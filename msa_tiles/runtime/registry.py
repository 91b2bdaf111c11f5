"""The cells that exist, read from `generated/index.json`; kernel files are imported only when one is compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_tiles import paths, trees
from msa_tiles.files import from_json
from msa_tiles.sources import OPERANDS, code_of, search_operands
from msa_tiles.spec.loader import PRECISIONS
from msa_tiles.spec.reach import WIDENING
from msa_tiles.syntax import located, text_of

INDEX = "index.json"
INDEX_FORMAT = 2

Names = str | Collection[str] | None  # of a filter, which nothing and an empty collection leave open

_ROLES = ("query", "key_value", "index_key", "output")
_AMBIGUOUS = ("uint8",)  # storage of several formats: only a `QuantizedTensor` knows which
_log = logging.getLogger(__name__)


class RegistryError(ValueError):
    """`generated/index.json` is missing or is not what this version writes."""


@dataclass(frozen=True)
class Target:
    """A GPU family: what its kernels are compiled for, and what a block may use."""

    name: str
    arch: str
    capability: tuple[int, int]
    default_device: str
    sm_count: int  # of the default device
    shared_memory_per_block: int
    registers_per_thread: int
    registers_per_sm: int
    threads_per_block: int
    tensor_memory_columns: int  # that a block can have; 0 where there is no such memory


@dataclass(frozen=True)
class Precision:
    """A combination of formats for one call, by role: `query`, `key_value`, `index_key`, and the dtype of `output`."""

    name: str
    group: str  # the name people look for: bf16, fp8, nvfp4, fp4
    formats: Mapping[str, str]

    def agrees(self, other: Precision, roles: Iterable[str]) -> bool:
        """Whether tensors of these roles are stored the same way in both."""
        return all(self.formats.get(role) == other.formats.get(role) for role in roles)


@dataclass(frozen=True)
class Cell:
    """One generated kernel: an operator on a DSL, a target and a precision. Cells travel to worker processes."""

    id: str
    op: str
    dsl: str
    target: str
    precision: str
    reads: tuple[str, ...]  # the roles of a precision that its tensors follow
    mma: str
    arch: str  # of the target
    file: Path
    digest: str
    variants: Mapping[str, tuple[int, ...]]  # compile-time dim -> supported values, in the spec's order
    capacity: frozenset[str]  # dims whose requested value is rounded up to a supported one
    features: frozenset[str]
    entry: Mapping[str, Any]  # the whole index entry, for readers of workloads, tolerances and audits
    tree: Path | None = None  # the tree that it comes from; None for what was shipped
    replaces: bool = False  # whether a tree beneath, or the installation, has a kernel of this id as well
    search: tuple[Path, ...] = ()  # directories of generated kernels in which its operands may lie besides the package

    @property
    def ci(self) -> tuple[Mapping[str, int], ...]:
        """The variants that continuous integration compiles, the M3 shape first."""
        return tuple(self.entry["ci"])

    @property
    def function(self) -> Callable[..., Any]:
        """The function of the generated file that builds the kernel of one variant. Importing it imports the DSL."""
        module = _import_file(self.file, f"_msa_tiles_kernel_{self.id.replace('.', '_')}_{self.source_hash()}")
        try:
            return getattr(module, self.op)
        except AttributeError:
            raise RegistryError(f"{self.file} defines no function {self.op!r}") from None

    @property
    def pass_configs(self) -> Mapping[str, Any] | None:
        """Compiler pass settings that the kernel asks for in place of the usual ones."""
        return getattr(sys.modules[self.function.__module__], "PASS_CONFIGS", None)

    def text(self) -> str:
        """That of the kernel file. Raises RegistryError where it cannot be read, TreeError where its tree is gone,
        SourceError where it is no text.
        """
        try:
            return text_of(self.file)
        except OSError as error:
            if self.tree is not None and not self.tree.is_dir():
                raise trees.TreeError(trees.gone(self.tree)) from error
            again = "msa-tiles generate" + (f" --tree {self.tree}" if self.tree else "")
            raise RegistryError(f"{self.file} cannot be read ({error.strerror}); run `{again}`") from error

    def source_hash(self) -> str:
        """16 hex digits over the code of the kernel file and its device helpers, as they are on disk now.

        Raises SourceError where one is no Python.
        """
        total, text = hashlib.sha256(), self.text()
        with located(self.file, text):
            parts = code_of(text)
        for part in parts:
            total.update(part)
        return total.hexdigest()[:16]


@dataclass(frozen=True)
class Registry:
    """All cells of one `generated` directory, and the targets and precisions they are for.

    Where trees are in use, their cells lie on top of the shipped ones.
    """

    directory: Path  # where evidence is written: that of the top tree, where there is one
    cells: tuple[Cell, ...]
    targets: Mapping[str, Target]
    precisions: Mapping[str, Precision]
    formats: Mapping[str, Mapping[str, Any]]  # name -> group, storage, bits, …
    below: tuple[Path, ...] = ()  # the directories beneath, the highest one first
    changed: frozenset[str] = frozenset()  # targets of which a tree says otherwise than what kernels were made for
    outdated: tuple[Path, ...] = ()  # trees whose sources have changed since their kernels were generated

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where evidence lies, that of the top tree first."""
        return (self.directory, *self.below)

    @classmethod
    def read(cls, directory: Path, beneath: Registry | None = None, tree: Path | None = None) -> Registry:
        """Read `directory/index.json`, that of a `tree` on top of what lies beneath.

        Raises RegistryError when it is missing or malformed, or has an operand of another text than one beneath.
        """
        path = directory / INDEX
        again = "run `msa-tiles generate" + (f" --tree {tree}`" if tree else "`")
        try:
            document = from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RegistryError(f"{path} cannot be read ({error.strerror}); {again}") from error
        except (ValueError, RecursionError) as error:
            raise RegistryError(f"{path} is not JSON: {error}; {again}") from error
        if not isinstance(document, dict) or document.get("format") != INDEX_FORMAT:
            raise RegistryError(f"{path} has not format {INDEX_FORMAT}; {again}")
        below = () if beneath is None else beneath.directories
        hidden = {} if beneath is None else {cell.id: cell for cell in beneath.cells}
        try:
            targets = {name: _target(entry) for name, entry in document["targets"].items()}
            lower = {} if beneath is None else beneath.targets
            changed = frozenset(name for name, each in targets.items() if lower.get(name, each) != each)
            changed |= frozenset() if beneath is None else beneath.changed
            targets |= {name: each for name, each in lower.items() if name not in targets}
            formats = {**({} if beneath is None else beneath.formats), **document["formats"]}
            precisions = {name: _precision(name, entry, formats) for name, entry in document["precisions"].items()}
            precisions = {**({} if beneath is None else beneath.precisions), **precisions}
            archs = {name: target.arch for name, target in targets.items()}
            if lacking := sorted({entry["target"] for entry in document["cells"]} - archs.keys()):
                raise RegistryError(
                    f"{path} has kernels for {', '.join(lacking)}, which neither it nor what lies beneath declares: "
                    f"name the tree that does with another --tree before this one, or {again}"
                )
            cells = tuple(
                dataclasses.replace(
                    _cell(entry, directory, archs[entry["target"]]),
                    tree=tree,
                    replaces=entry["id"] in hidden,
                    search=(directory, *below),
                )
                for entry in document["cells"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise RegistryError(f"{path} lacks or misstates {error}; {again}") from error
        _refuse_operands(directory, below)
        search_operands(directory)
        # A cell takes the place of the one that it replaces.
        own = {cell.id: cell for cell in cells}
        kept = [own.pop(name, cell) for name, cell in hidden.items()]
        outdated = () if beneath is None else beneath.outdated
        if tree is not None and trees.is_outdated(trees.Tree(tree)):
            outdated = (tree, *outdated)
        return cls(directory, (*kept, *own.values()), targets, precisions, formats, below, changed, outdated)

    def of(self, op: str) -> tuple[Cell, ...]:
        """The cells of one operator."""
        return tuple(cell for cell in self.cells if cell.op == op)

    def select(
        self, op: Names = None, dsl: Names = None, target: Names = None, precision: Names = None
    ) -> tuple[Cell, ...]:
        """The cells that match every filter given, one name or several; `precision` may name groups."""
        wanted = {"op": _several(op), "dsl": _several(dsl), "target": _several(target)}
        found = (c for c in self.cells if all(not names or getattr(c, axis) in names for axis, names in wanted.items()))
        named = _several(precision)
        return tuple(c for c in found if not named or c.precision in named or self.group_of(c.precision) in named)

    def group_of(self, precision: str) -> str:
        """The group of a precision."""
        return self.precisions[precision].group

    def serving(self, op: str, precision: str) -> str:
        """The precision whose kernels serve calls of an operator in a precision: another one where queries are widened.

        What is no precision, such as a group, stands for itself.
        """
        formats = self.precisions[precision].formats if precision in self.precisions else {}
        if op not in WIDENING or "index_key" not in formats or self.formats[formats["index_key"]]["packed"] == 1:
            return precision
        serving = self.precision_of({"query": "bfloat16", "index_key": formats["index_key"]})
        # One of the same formats only multiplies differently: nothing is widened.
        return precision if serving in self.precisions and self.precisions[serving].formats == formats else serving

    def called(self, precision: str) -> str:
        """The precision that calls have whose tensors are stored as this one says: another one for a form of kernels,
        which only multiplies differently.

        What is no precision, such as a group, stands for itself.
        """
        if precision not in self.precisions:
            return precision
        formats = self.precisions[precision].formats
        return next(name for name, each in self.precisions.items() if each.formats == formats)

    def precision_of(self, storages: Mapping[str, str]) -> str:
        """The first precision whose tensors are stored like that, by role; else a text that says how they are.

        A storage of several formats is said by the name of the format.

        Precisions that only multiply differently are all candidates of such a call.
        """
        names = {entry["storage"]: name for name, entry in self.formats.items() if entry["storage"] not in _AMBIGUOUS}
        names |= {name: name for name in self.formats}
        formats = {r: s if r == "output" else names.get(s, f"unknown {s}") for r, s in storages.items()}
        for precision in self.precisions.values():
            if formats.items() <= precision.formats.items():
                return precision.name
        distinct = dict.fromkeys(storages.values())
        return next(iter(distinct)) if len(distinct) == 1 else ", ".join(f"{r} {s}" for r, s in storages.items())


def _several(names: Names) -> Collection[str]:
    return (names,) if isinstance(names, str) else names or ()


@trees.cached(maxsize=4)
def default_registry() -> Registry:
    """The registry of the kernels that came with this installation, beneath those of the trees in use."""
    found = Registry.read(paths.generated_dir())
    for tree in reversed(trees.present()):
        if (tree.generated / INDEX).is_file():
            found = Registry.read(tree.generated, found, tree.directory)
        else:  # nothing was generated as yet; what is measured goes there all the same
            if any(each.name != PRECISIONS for each in tree.specs.glob("*")) or tree.skeletons.is_dir():
                _log.warning(
                    "%s declares kernels or targets, and none are generated: run `msa-tiles generate --tree %s`",
                    tree.directory, tree.directory,
                )  # fmt: skip
            found = dataclasses.replace(found, directory=tree.generated, below=found.directories)
    return found


def _refuse_operands(directory: Path, below: Iterable[Path]) -> None:
    """Kernels import operands by their names alone, so that there can be one of a name."""
    for own in sorted((directory / OPERANDS[1:]).glob("*/*.py")):
        for other in (beneath / own.relative_to(directory) for beneath in below):
            if other.is_file() and other.read_bytes() != own.read_bytes():
                raise RegistryError(f"{own} has the name of {other}, a tree beneath: give one of them another name")


def _keys(entry: Mapping[str, Any]) -> str:
    """The format of keys and values or of index keys, which are the same where a precision names both."""
    return entry.get("key_value") or entry["index_key"]


def _precision(name: str, entry: Mapping[str, Any], formats: Mapping[str, Any]) -> Precision:
    return Precision(name, formats[_keys(entry)]["group"], {role: entry[role] for role in _ROLES if role in entry})


def _target(entry: Mapping[str, Any]) -> Target:
    major, minor = entry["capability"]
    limits = (
        "shared_memory_per_block",
        "registers_per_thread",
        "registers_per_sm",
        "threads_per_block",
        "tensor_memory_columns",
    )
    return Target(
        name=entry["name"],
        arch=entry["arch"],
        capability=(major, minor),
        default_device=entry["default_device"],
        sm_count=entry["devices"][entry["default_device"]]["sm_count"],
        **{limit: entry[limit] for limit in limits},
    )


def _cell(entry: Mapping[str, Any], directory: Path, arch: str) -> Cell:
    return Cell(
        id=entry["id"],
        op=entry["op"],
        dsl=entry["dsl"],
        target=entry["target"],
        precision=entry["precision"],
        reads=tuple(entry["reads"]),
        mma=entry["mma"],
        arch=arch,
        file=directory / entry["file"],
        digest=entry["digest"],
        variants={name: tuple(values) for name, values in entry["variants"].items()},
        capacity=frozenset(entry["capacity"]),
        features=frozenset(entry["features"]),
        entry=entry,
    )


def _import_file(path: Path, name: str) -> Any:
    """Import a file under a name of its own: TileLang reads kernel source through `inspect`, so it must be a module."""
    with _importing:  # a thread must not find what another has imported half
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise RegistryError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


_importing = threading.RLock()


def _fresh_lock() -> None:
    """In a child of a fork, whose parent may have been importing in another thread."""
    global _importing
    _importing = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)
