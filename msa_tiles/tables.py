"""Reads what a kernel file says of its thread block, its function `cta`, without the DSL that the file imports.

Of a file count its constants and the functions marked with `declares`; of what these, or its `__all__`, name among its
imports, the table's vocabulary (msa_tiles.dsl.table), and helpers and operands, which are read likewise.
"""

from __future__ import annotations

import ast
import functools
import re
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from msa_tiles.dsl import table as _vocabulary
from msa_tiles.dsl.table import Table, TableError, describe
from msa_tiles.sources import OPERANDS, PACKAGE, module_file, once_where_unchanging, parsed, source_at
from msa_tiles.syntax import SourceError, located, tree_of

__all__ = ["Table", "TableError", "constants_of", "describe", "docstring_of", "place_of", "table_of"]

NAME = "cta"  # of the function that makes the table
MARK = "declares"
_COMPILED = "<table>"  # and the file that it is of, where it is not of a kernel


def table_of(text: str, package: Path = PACKAGE) -> Callable[..., Table] | None:
    """The function of a kernel's text that makes its table of the compile-time dims; None where it has none.

    It raises TableError where dims make none.
    """
    return _table_of(_read(text, package)) if f"\ndef {NAME}(" in text else None


@functools.lru_cache(maxsize=256)
def _table_of(read: _Read) -> Callable[..., Table]:
    """Texts that differ elsewhere, as before and behind the line that tells the table, share their tables."""
    try:
        names = _names(read)
    except (TableError, SourceError):
        raise
    except Exception as error:
        raise TableError(_not_plain(error)) from error
    if NAME not in names:
        raise TableError(f"the function {NAME} is not marked: write `@{MARK}` above it, from {_vocabulary.__name__}")
    declared = names[NAME]

    @functools.cache
    def table(**dims: int) -> Table:
        try:
            found: Table = declared(**dims)
        except (NameError, AttributeError, TypeError) as error:
            raise TableError(f"{NAME} is no plain Python over marked functions and constants: {error}") from error
        except TableError:
            raise
        except Exception as error:
            at = ", ".join(f"{name}={value}" for name, value in dims.items())
            raise TableError(f"{NAME} makes no table of {at}: {type(error).__name__}: {error}") from error
        if not isinstance(found, Table):
            raise TableError(f"{NAME} returns {found!r}, wanted a Table")
        return found

    return table


def _not_plain(error: Exception) -> str:
    return f"what it declares is no plain Python over constants: {type(error).__name__}: {error}"


@once_where_unchanging
def constants_of(file: Path, package: Path = PACKAGE) -> Mapping[str, Any]:
    """The constants and marked functions of the file of a helper or an operand.

    Raises SourceError where it, or a file that it imports, cannot be read without the DSL.
    """
    text = source_at(file)
    try:
        return _names(_of_file(file, package))
    except SourceError:
        raise
    except Exception as error:
        at, line = place_of(error, text)
        sentence = str(error) if isinstance(error, TableError) else _not_plain(error)
        raise SourceError(at or file, line, sentence) from error


def place_of(error: BaseException, text: str) -> tuple[Path | None, int]:
    """The file and the line in which what files declare has failed: of an operand or a helper, or None for the text.

    The line is 1 where that is not known.
    """
    if isinstance(error, _AbsentError):
        return None, error.line_in(text)
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    found = [frame for frame in frames if frame.filename.startswith(_COMPILED)]
    if not found:
        return None, 1
    name = found[-1].filename.removeprefix(_COMPILED)
    file = Path(name) if name else None
    line, columns = found[-1].lineno, (getattr(found[-1], "colno", None), getattr(found[-1], "end_colno", None))
    kept = _counting(tree_of(text if file is None else source_at(file)).body)
    # Both trees are alike: what was compiled is the other one, written without what does not count.
    compiled = tree_of(ast.unparse(ast.Module(kept, [])))
    pairs = zip(ast.walk(compiled), ast.walk(ast.Module(kept, [])), strict=False)
    there = [(theirs, ours) for theirs, ours in pairs if getattr(theirs, "lineno", 0) == line]
    exact = [ours for theirs, ours in there if (theirs.col_offset, theirs.end_col_offset) == columns]  # type: ignore[attr-defined]
    nodes = exact or [ours for _, ours in there]
    return file, int(getattr(nodes[0], "lineno", 1)) if nodes else 1


@once_where_unchanging
def docstring_of(file: Path, name: str, package: Path = PACKAGE) -> str | None:
    """The docstring of the class of this name in a file, or in the helper that the file imports it from, if any."""
    text = source_at(file)
    with located(file, text):
        body = tree_of(text).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source = module_file(node.module or "", package)
                if (alias.asname or alias.name) == name and source is not None:
                    return docstring_of(source, alias.name, package)
    return None


class _AbsentError(TableError):
    """A file imports what there is not."""

    def __init__(self, what: str, name: str, module: str) -> None:
        super().__init__(f"there is no {what}{name} in {module}")
        self._name = re.compile(rf"\b{re.escape(name)}\b")

    def line_in(self, text: str) -> int:
        """The first line of the file that has the name."""
        return next((number for number, line in enumerate(text.splitlines(), 1) if self._name.search(line)), 1)


class _Declared(NamedTuple):
    """What counts of a file."""

    source: str
    imports: tuple[tuple[str, str, str], ...]  # module, name there, name here


class _Read(NamedTuple):
    """What counts of a file, with what it names of others: where two are equal, so are their tables."""

    source: str
    brought: tuple[tuple[str, str, _Read | None], ...]
    """Name here, name there (empty: all of a module), and the file; None is the vocabulary."""
    file: str = ""  # empty for a kernel, of which several may share this


@once_where_unchanging
def _of_file(file: Path, package: Path) -> _Read:
    """The same of a file. Raises SourceError where it is no Python, or imports an operand that there is not."""
    text = source_at(file)
    try:
        with located(file, text):
            return _read(text, package)._replace(file=str(file))
    except _AbsentError as error:
        raise SourceError(file, error.line_in(text), str(error)) from error
    except RecursionError as error:
        raise SourceError(file, 1, "imports itself, or what imports it") from error


@once_where_unchanging
def _read(text: str, package: Path) -> _Read:
    """What `from module import name` brings: a name of the vocabulary, a module's, or a module. Nothing of the DSL."""
    declared = _declared(text)
    brought: list[tuple[str, str, _Read | None]] = []
    for module, name, here in declared.imports:
        if module == _vocabulary.__name__:
            if not hasattr(_vocabulary, name):
                raise _AbsentError("", name, module)
            brought.append((here, name, None))
        elif (file := module_file(f"{module}.{name}", package)) is not None:
            brought.append((here, "", _of_file(file, package)))
        elif module.endswith(OPERANDS):
            raise _AbsentError("operand ", name, module)
        elif (file := module_file(module, package)) is not None:
            brought.append((here, name, _of_file(file, package)))
    return _Read(declared.source, tuple(brought))


@functools.lru_cache(maxsize=256)
def _names(read: _Read) -> Mapping[str, Any]:
    names: dict[str, Any] = {_exact.__name__: _exact}
    for here, there, file in read.brought:
        if file is None:
            names[here] = getattr(_vocabulary, there)
            continue
        others = _names(file)
        if not there:
            names[here] = _Module(Path(file.file).stem, others)
        elif there in others:
            names[here] = others[there]
    exec(_compiled(read.source, read.file), names)
    return names


def _exact(number: int, divisor: int, text: str) -> int:
    """A quotient of a kernel's table. Threads or columns that a floor leaves out would never be worked on."""
    whole, rest = divmod(number, divisor)
    if rest:
        raise TableError(f"{text} leaves a rest: {number} is no multiple of {divisor}")
    return whole


class _Exactly(ast.NodeTransformer):
    """`a // b` becomes `_exact(a, b)`, but where it rounds up, `-(-a // b)`, or has a least value, `max(a // b, 1)`."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if not (isinstance(node.func, ast.Name) and node.func.id == "max"):
            self.generic_visit(node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        text = ast.unparse(node)
        self.generic_visit(node)
        rounds_up = isinstance(node.left, ast.UnaryOp) and isinstance(node.left.op, ast.USub)
        if not isinstance(node.op, ast.FloorDiv) or rounds_up:
            return node
        called = ast.Call(ast.Name(_exact.__name__, ast.Load()), [node.left, node.right, ast.Constant(text)], [])
        return ast.copy_location(called, node)


class _Module(types.SimpleNamespace):
    """What counts of a file, by name."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        super().__init__(**names)
        self.__name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__dict__['_Module__name']} declares no {name}")


@functools.lru_cache(maxsize=256)
def _compiled(source: str, file: str) -> types.CodeType:
    tree = tree_of(source)
    if not file:  # a kernel's
        tree = ast.fix_missing_locations(_Exactly().visit(tree))
    return compile(tree, f"{_COMPILED}{file}", "exec")


@functools.lru_cache(maxsize=512)
def _declared(text: str) -> _Declared:
    nodes = parsed(text).body
    kept = _counting(nodes)
    used = {name.id for node in kept for name in ast.walk(node) if isinstance(name, ast.Name)}
    used.update(*(ast.literal_eval(node.value) for node in kept if isinstance(node, ast.Assign) and _exports(node)))
    imports = [
        (node.module or "", alias.name, alias.asname or alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name) in used
    ]
    return _Declared(ast.unparse(ast.Module(kept, [])), tuple(imports))


def _counting(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Constants, what is worked out of them and of numbers of the vocabulary, and marked functions."""
    kept: list[ast.stmt] = []
    known: set[str] = set()
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module == _vocabulary.__name__:
            known.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and (_is_constant(node) or _is_arithmetic(node.value, known)):
            known.update(ast.unparse(target) for target in node.targets)
            kept.append(node)
        elif _is_marked(node):
            kept.append(node)
    return kept


def _is_arithmetic(value: ast.expr, known: Set[str]) -> bool:
    """Whether an expression is made of numbers and known names alone."""
    kinds = (ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.operator, ast.unaryop, ast.expr_context)
    parts = list(ast.walk(value))
    return all(isinstance(each, kinds) for each in parts) and all(
        each.id in known if isinstance(each, ast.Name) else isinstance(each.value, int | float)
        for each in parts
        if isinstance(each, ast.Name | ast.Constant)
    )


def _is_constant(node: ast.Assign) -> bool:
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def _exports(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["__all__"]


def _is_marked(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and MARK in map(ast.unparse, node.decorator_list)
