"""Reads what a kernel file says of its thread block, its function `cta`, without the DSL that the file imports.

Of a file count its constants and the functions marked with `declares`; of what these, or its `__all__`, name among its
imports, the table's vocabulary (msa_tiles.dsl.table), and helpers and operands, which are read likewise.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msa_tiles import trees
from msa_tiles.dsl import table as _vocabulary
from msa_tiles.dsl.table import Table, TableError, describe
from msa_tiles.sources import OPERANDS, PACKAGE, module_file

__all__ = ["Table", "TableError", "constants_of", "describe", "docstring_of", "table_of"]

NAME = "cta"  # of the function that makes the table
MARK = "declares"


@trees.cached(maxsize=64)
def table_of(text: str, package: Path = PACKAGE) -> Callable[..., Table] | None:
    """The function of a kernel's text that makes its table of the compile-time dims; None where it has none.

    It raises TableError where dims make none.
    """
    if f"\ndef {NAME}(" not in text:
        return None
    declared = _read(text, package)[NAME]

    @functools.cache
    def table(**dims: int) -> Table:
        try:
            found: Table = declared(**dims)
        except (NameError, AttributeError, TypeError) as error:
            raise TableError(f"{NAME} is no plain Python over marked functions and constants: {error}") from error
        return found

    return table


def constants_of(file: Path, package: Path = PACKAGE) -> dict[str, Any]:
    """The constants and marked functions of the file of a helper or an operand."""
    return _read(file.read_text(encoding="utf-8"), package)


def docstring_of(file: Path, name: str, package: Path = PACKAGE) -> str | None:
    """The docstring of the class of this name in a file, or in the helper that the file imports it from, if any."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
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

    code: types.CodeType
    imports: tuple[tuple[str, str, str], ...]  # module, name there, name here


def _read(text: str, package: Path) -> dict[str, Any]:
    declared = _declared(text)
    names: dict[str, Any] = {}
    for module, name, here in declared.imports:
        found = _imported(module, name, package)
        if found is not None:
            names[here] = found
    exec(declared.code, names)
    return names


@functools.lru_cache(maxsize=256)
def _declared(text: str) -> _Declared:
    nodes = ast.parse(text).body
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
    return _Declared(compile(ast.Module(kept, []), "<table>", "exec"), tuple(imports))


def _imported(module: str, name: str, package: Path) -> Any:
    """What `from module import name` brings: a name of the vocabulary, a module's, or a module. None for the DSL's."""
    if module == _vocabulary.__name__:
        return getattr(_vocabulary, name)
    if (file := module_file(f"{module}.{name}", package)) is not None:
        return types.SimpleNamespace(**constants_of(file, package))
    if module.endswith(OPERANDS):
        raise TableError(f"there is no operand {name} in {module}")
    file = module_file(module, package)
    return None if file is None else constants_of(file, package).get(name)


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
