"""Reads what a kernel file says of its thread block, its function `cta`, without the DSL that the file imports.

Of a file count its constants and the functions marked with `declares`; of what it imports, the table's vocabulary
(msa_tiles.dsl.cutedsl.table) and operands, which are read likewise.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msa_tiles.dsl.cutedsl import table as _vocabulary
from msa_tiles.dsl.cutedsl.table import Table, TableError, describe
from msa_tiles.sources import OPERANDS, PACKAGE, operand_file

__all__ = ["Table", "TableError", "constants_of", "describe", "table_of"]

NAME = "cta"  # of the function that makes the table
MARK = "declares"


@functools.lru_cache(maxsize=128)
def table_of(text: str, package: Path = PACKAGE) -> Callable[..., Table] | None:
    """The function of a kernel's text that makes its table of the compile-time dims; None where it has none.

    It raises TableError where dims make none.
    """
    if f"\ndef {NAME}(" not in text:
        return None
    declared = _read(text, package)[NAME]

    def table(**dims: int) -> Table:
        try:
            found: Table = declared(**dims)
        except (NameError, AttributeError, TypeError) as error:
            raise TableError(f"{NAME} is no plain Python over marked functions and constants: {error}") from error
        return found

    return table


def constants_of(operand: Path, package: Path = PACKAGE) -> dict[str, Any]:
    """The constants and marked functions of an operand's file."""
    return _read(operand.read_text(encoding="utf-8"), package)


def _read(text: str, package: Path) -> dict[str, Any]:
    kept: list[ast.stmt] = []
    names: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            names |= _imported(node, package)
        elif _is_constant(node) or (isinstance(node, ast.FunctionDef) and MARK in _decorators(node)):
            kept.append(node)
    exec(compile(ast.Module(kept, []), "<table>", "exec"), names)
    return names


def _imported(node: ast.ImportFrom, package: Path) -> dict[str, Any]:
    module = node.module or ""
    if module == _vocabulary.__name__:
        return {alias.asname or alias.name: getattr(_vocabulary, alias.name) for alias in node.names}
    if not module.endswith(OPERANDS):
        return {}
    found = {}
    for alias in node.names:
        file = operand_file(alias.name, module, package)
        if file is None:
            raise TableError(f"there is no operand {alias.name} in {module}")
        found[alias.asname or alias.name] = types.SimpleNamespace(**constants_of(file, package))
    return found


def _is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]
