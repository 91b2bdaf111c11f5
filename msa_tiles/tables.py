"""Reads what a kernel file says of its thread block, its function `cta`, without the DSL that the file imports.

Of a file count its constants and the functions marked with `declares`; of what these, or its `__all__`, name among its
imports, the table's vocabulary (msa_tiles.dsl.table), and helpers and operands, which are read likewise.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msa_tiles.dsl import table as _vocabulary
from msa_tiles.dsl.table import Table, TableError, describe
from msa_tiles.sources import OPERANDS, PACKAGE, module_file, once_where_unchanging, parsed, source_at
from msa_tiles.syntax import tree_of

__all__ = ["Table", "TableError", "constants_of", "describe", "docstring_of", "table_of"]

NAME = "cta"  # of the function that makes the table
MARK = "declares"


def table_of(text: str, package: Path = PACKAGE) -> Callable[..., Table] | None:
    """The function of a kernel's text that makes its table of the compile-time dims; None where it has none.

    It raises TableError where dims make none.
    """
    return _table_of(_read(text, package)) if f"\ndef {NAME}(" in text else None


@functools.lru_cache(maxsize=256)
def _table_of(read: _Read) -> Callable[..., Table]:
    """Texts that differ elsewhere, as before and behind the line that tells the table, share their tables."""
    declared = _names(read)[NAME]

    @functools.cache
    def table(**dims: int) -> Table:
        try:
            found: Table = declared(**dims)
        except (NameError, AttributeError, TypeError) as error:
            raise TableError(f"{NAME} is no plain Python over marked functions and constants: {error}") from error
        except (ArithmeticError, LookupError) as error:
            at = ", ".join(f"{name}={value}" for name, value in dims.items())
            raise TableError(f"{NAME} makes no table of {at}: {type(error).__name__}: {error}") from error
        return found

    return table


@once_where_unchanging
def constants_of(file: Path, package: Path = PACKAGE) -> Mapping[str, Any]:
    """The constants and marked functions of the file of a helper or an operand."""
    return _names(_read(source_at(file), package))


@once_where_unchanging
def docstring_of(file: Path, name: str, package: Path = PACKAGE) -> str | None:
    """The docstring of the class of this name in a file, or in the helper that the file imports it from, if any."""
    for node in tree_of(source_at(file)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source = module_file(node.module or "", package)
                if (alias.asname or alias.name) == name and source is not None:
                    return docstring_of(source, alias.name, package)
    return None


class _Declared(NamedTuple):
    """What counts of a file."""

    source: str
    imports: tuple[tuple[str, str, str], ...]  # module, name there, name here


class _Read(NamedTuple):
    """What counts of a file, with what it names of others: where two are equal, so are their tables."""

    source: str
    brought: tuple[tuple[str, str, _Read | None], ...]
    """Name here, name there (empty: all of a module), and the file; None is the vocabulary."""


@once_where_unchanging
def _read(text: str, package: Path) -> _Read:
    """What `from module import name` brings: a name of the vocabulary, a module's, or a module. Nothing of the DSL."""
    declared = _declared(text)
    brought: list[tuple[str, str, _Read | None]] = []
    for module, name, here in declared.imports:
        if module == _vocabulary.__name__:
            brought.append((here, name, None))
        elif (file := module_file(f"{module}.{name}", package)) is not None:
            brought.append((here, "", _read(source_at(file), package)))
        elif module.endswith(OPERANDS):
            raise TableError(f"there is no operand {name} in {module}")
        elif (file := module_file(module, package)) is not None:
            brought.append((here, name, _read(source_at(file), package)))
    return _Read(declared.source, tuple(brought))


@functools.lru_cache(maxsize=256)
def _names(read: _Read) -> Mapping[str, Any]:
    names: dict[str, Any] = {}
    for here, there, file in read.brought:
        if file is None:
            names[here] = getattr(_vocabulary, there)
            continue
        others = _names(file)
        if not there:
            names[here] = types.SimpleNamespace(**others)
        elif there in others:
            names[here] = others[there]
    exec(_compiled(read.source), names)
    return names


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<table>", "exec")


@functools.lru_cache(maxsize=512)
def _declared(text: str) -> _Declared:
    nodes = parsed(text).body
    kept = [node for node in nodes if _is_constant(node) or _is_marked(node)]
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


def _is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def _exports(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["__all__"]


def _is_marked(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and MARK in map(ast.unparse, node.decorator_list)
