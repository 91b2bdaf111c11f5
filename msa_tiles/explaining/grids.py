"""The grid that a kernel would be launched with, read from the text of its file: nothing is imported or compiled.

Generated kernels state their grid once, in terms of the sizes of their tensors, of their numbers and of constants of
the file: `with T.Kernel(…)` in TileLang, `.launch(grid=…)` in CuTe DSL, in a helper module where several kernels share
it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from msa_tiles.runtime.registry import Cell
from msa_tiles.sources import module_file
from msa_tiles.syntax import tree_of

_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.RShift: lambda a, b: a >> b,
    ast.LShift: lambda a, b: a << b,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "ceildiv": lambda a, b: -(-a // b),
    "ceil_div": lambda a, b: -(-a // b),
    "truncdiv": lambda a, b: a // b,
    "max": max,
    "min": min,
    "Int32": int,
    "Int64": int,
    "size": lambda tensor: tensor.numel(),
}


class _Unread(Exception):
    """The text says it in a way that is not read here."""


def grid_of(cell: Cell, variant: Mapping[str, int], arguments: Sequence[Any]) -> tuple[int, ...] | None:
    """Thread blocks along each axis for a launch with these arguments; None where the text is not understood."""
    try:
        read = _tilelang if cell.dsl == "tilelang" else _cutedsl
        return tuple(int(size) for size in read(_file(cell.file), cell.op, variant, arguments))
    except (_Unread, OSError, SyntaxError, ZeroDivisionError):
        return None


def names_of(cell: Cell) -> tuple[str, ...]:
    """The names of the kernel's arguments, in their order; none where the text is not understood."""
    try:
        file = _file(cell.file)
        if cell.dsl == "tilelang":
            return tuple(parameter.arg for parameter in _prim_func(file, cell.op)[1].args.args)
        return tuple(parameter.arg for parameter in _method(file, _class_of(cell.op), "__call__")[0].args.args[1:])
    except (_Unread, OSError, SyntaxError):
        return ()


def _tilelang(file: ast.Module, op: str, variant: Mapping[str, int], arguments: Sequence[Any]) -> list[int]:
    function, kernel = _prim_func(file, op)
    scope = _Scope(file, dict(variant), [kernel.body, function.body])
    for parameter, value in zip(kernel.args.args, arguments, strict=False):
        scope.values[parameter.arg] = value
        annotation = parameter.annotation
        shape = annotation.args[0] if isinstance(annotation, ast.Call) and annotation.args else None
        if isinstance(value, Tensor) and isinstance(shape, ast.Tuple):
            for size, dim in zip(value.shape, shape.elts, strict=False):
                if isinstance(dim, ast.Name):
                    scope.values.setdefault(dim.id, size)
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "T.Kernel":
            return [scope.evaluate(size) for size in node.args]
    raise _Unread(op)


def _cutedsl(file: ast.Module, op: str, variant: Mapping[str, int], arguments: Sequence[Any]) -> list[int]:
    call, _ = _method(file, _class_of(op), "__call__")
    values = dict(zip((parameter.arg for parameter in call.args.args[1:]), arguments, strict=False))
    scope = _Scope(file, values, [call.body], _Object(file, _class_of(op), dict(variant)))
    for node in ast.walk(call):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "launch"):
            continue
        for keyword in node.keywords:
            if keyword.arg == "grid":
                return scope.axes(keyword.value)
            if keyword.arg is None:  # **self.launch(…), which answers a dictionary
                own = scope.entered(keyword.value)
                result = own.returned()
                if isinstance(result, ast.Dict):
                    pairs = zip(result.keys, result.values, strict=True)
                    found = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "grid"]
                    return own.axes(found[0])
    raise _Unread(op)


@dataclass(frozen=True)
class _Object:
    """`self`: an instance of a class of the file, made with these values."""

    module: ast.Module
    kind: str
    values: dict[str, Any]

    def field(self, name: str) -> Any:
        """What the constructors of the class, and of those that it derives from, give `self.name`."""
        values = self.values
        for kind, module in _classes(self.module, self.kind):
            constructors = (part for part in kind.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
            if (made := next(constructors, None)) is None:
                continue
            names = [parameter.arg for parameter in made.args.args[1:]]
            if values is not self.values:
                values = dict(zip(names, values["handed"], strict=False))
            scope = _Scope(module, values, [made.body], self)
            for statement in made.body:
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == f"self.{name}":
                    return scope.evaluate(statement.value)
            handed = (
                node.args
                for node in ast.walk(made)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
            )
            values = {"handed": [_Later(node, scope) for node in next(handed, [])]}
        raise _Unread(f"self.{name}")


@dataclass(frozen=True)
class _Later:
    """An argument that is read where its value is asked for: others may be none that can be."""

    node: ast.expr
    scope: _Scope


@dataclass
class _Scope:
    """What names mean at a place of a kernel's text."""

    module: ast.Module
    values: dict[str, Any]
    bodies: list[list[ast.stmt]] = field(default_factory=list)
    instance: _Object | None = None

    def axes(self, node: ast.expr) -> list[int]:
        if not isinstance(node, ast.Tuple):
            raise _Unread(ast.unparse(node))
        return [self.evaluate(size) for size in node.elts]

    def evaluate(self, node: ast.expr) -> Any:
        """The value of an expression. Raises _Unread for what no grid has been made of so far."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](self.evaluate(node.left), self.evaluate(node.right))
        if isinstance(node, ast.Subscript) and isinstance(value := self.evaluate(node.value), tuple):
            return value[self.evaluate(node.slice)]
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self" and self.instance is not None:
                return self.instance.field(node.attr)
            if node.attr == "shape" and isinstance(value := self.evaluate(node.value), Tensor):
                return tuple(value.shape)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _FUNCTIONS and not ast.unparse(node.func).startswith("self."):
                return _FUNCTIONS[name](*map(self.evaluate, node.args))
            inside = self.entered(node)
            return inside.evaluate(inside.returned())
        raise _Unread(ast.unparse(node))

    def entered(self, node: ast.expr) -> _Scope:
        """The scope of a function of the file, or of a method of the kernel, that is called."""
        if not isinstance(node, ast.Call):
            raise _Unread(ast.unparse(node))
        name = ast.unparse(node.func)
        if name.startswith("self.") and self.instance is not None:
            function, module = _method(self.instance.module, self.instance.kind, name.removeprefix("self."))
            names = [parameter.arg for parameter in function.args.args[1:]]
        else:
            found = _found(self.module, name)
            if not isinstance(found[0], ast.FunctionDef):
                raise _Unread(name)
            function, module = found[0], found[1]
            names = [parameter.arg for parameter in function.args.args]
        values = dict(zip(names, (_Later(argument, self) for argument in node.args), strict=False))
        return _Scope(module, values, [function.body], self.instance)

    def returned(self) -> ast.expr:
        """What the function of this scope answers."""
        answers = [statement.value for statement in self.bodies[0] if isinstance(statement, ast.Return)]
        if len(answers) != 1 or answers[0] is None:
            raise _Unread("a function of several answers")
        return answers[0]

    def _named(self, name: str) -> Any:
        if name in self.values:
            value = self.values[name]
            return value.scope.evaluate(value.node) if isinstance(value, _Later) else value
        for body in self.bodies:
            if (found := _assigned(body, name)) is not None:
                value, index = found
                return self.evaluate(value) if index is None else self.evaluate(value)[index]
        found_node, module = _found(self.module, name)
        if not isinstance(found_node, ast.expr):
            raise _Unread(name)
        return _Scope(module, {}).evaluate(found_node)


@functools.lru_cache(maxsize=128)
def _parsed(text: str) -> ast.Module:
    return tree_of(text)


def _file(path: Path) -> ast.Module:
    return _parsed(path.read_text(encoding="utf-8"))


def _found(module: ast.Module, name: str) -> tuple[ast.AST, ast.Module]:
    """What a name is at the top of a file, a value, a function or a class, and the file that it is defined in."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node, module
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                path = module_file(node.module) if name == (alias.asname or alias.name) else None
                if path is not None:
                    return _found(_file(path), alias.name)
    if (found := _assigned(module.body, name)) is not None and found[1] is None:
        return found[0], module
    raise _Unread(name)


def _assigned(body: Sequence[ast.stmt], name: str) -> tuple[ast.expr, int | None] | None:
    """What a name is given at the top of a body, and which part of it; the last time counts."""
    found: tuple[ast.expr, int | None] | None = None
    for statement in body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                found = statement.value, None
            elif isinstance(target, ast.Tuple):
                for index, part in enumerate(target.elts):
                    if isinstance(part, ast.Name) and part.id == name:
                        found = statement.value, index
    return found


def _prim_func(file: ast.Module, op: str) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """The function that builds a TileLang kernel, and the kernel in it."""
    function, _ = _found(file, op)
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and any("prim_func" in ast.unparse(part) for part in node.decorator_list):
            assert isinstance(function, ast.FunctionDef)
            return function, node
    raise _Unread(op)


def _class_of(op: str) -> str:
    """The class in which a CuTe kernel is written."""
    return "".join(part.capitalize() for part in op.split("_"))


def _classes(module: ast.Module, name: str) -> list[tuple[ast.ClassDef, ast.Module]]:
    """The class of that name, then those that it derives from, as far as they are ours, each with its file."""
    kind, place = _found(module, name)
    if not isinstance(kind, ast.ClassDef):
        raise _Unread(name)
    found = [(kind, place)]
    for base in kind.bases:
        with contextlib.suppress(_Unread):
            found += _classes(place, ast.unparse(base))
    return found


def _method(module: ast.Module, kind: str, name: str) -> tuple[ast.FunctionDef, ast.Module]:
    """A method of a class, and the file that it is written in."""
    for each, place in _classes(module, kind):
        for node in each.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node, place
    raise _Unread(name)
