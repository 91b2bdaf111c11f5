"""Small arithmetic over named integers: shapes, rules, shared-memory sizes and rooflines in the specs."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msa_tiles.spec.source import Node
from msa_tiles.syntax import expression_of

_BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable] = {"min": min, "max": max, "ceildiv": lambda a, b: -(-a // b)}
# More than any spec needs, and less than what an evaluation that calls itself could not take.
LONGEST, MOST_TERMS, DEEPEST = 1000, 400, 32


class ExpressionError(ValueError):
    """The text is no arithmetic that a spec may hold, or a name in it has no value."""


@dataclass(frozen=True)
class Expression:
    """A parsed expression: `Expression("4 * rows")({"rows": 8}) == 32`.

    Numbers, names, `+ - * / // %`, comparisons, `and`, `or`, `not`, `a if b else c`, `min`, `max` and `ceildiv` are
    allowed; everything else is refused when the expression is made.
    """

    source: str

    def __post_init__(self) -> None:
        nodes = _nodes(self.source)
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            _check(node, self.source)
            if isinstance(node, ast.Name) and node.id in _FUNCTIONS and id(node) not in called:
                raise ExpressionError(f"{self.source!r} uses the function {node.id} as a number")

    @property
    def names(self) -> frozenset[str]:
        return _names(self.source)

    def __call__(self, values: Mapping[str, int | float]) -> int | float:
        missing = sorted(self.names - values.keys())
        if missing:
            raise ExpressionError(f"{self.source!r} needs a value for {', '.join(missing)}")
        try:
            value = _evaluate(_parse(self.source), values)
            if math.isfinite(value):
                return value
        except ZeroDivisionError as error:
            raise ExpressionError(f"{self.source!r} divides by zero") from error
        except OverflowError:
            pass
        raise ExpressionError(f"{self.source!r} is too large for a number")

    def whole(self, values: Mapping[str, int | float]) -> int:
        """The value, which must be a whole number that is not negative. Raises ExpressionError."""
        value = self(values)
        if value != int(value) or value < 0:
            raise ExpressionError(f"{self.source!r} is {value:g}, wanted a whole number that is not negative")
        return int(value)

    def __str__(self) -> str:
        return self.source


@functools.lru_cache(maxsize=1024)
def _parse(source: str) -> ast.expr:
    try:
        return expression_of(source.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"{source!r} is not an expression") from error


@functools.lru_cache(maxsize=1024)
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """All parts of an expression. Raises ExpressionError for more, or deeper ones, than an evaluation takes."""
    if len(source) > LONGEST:
        raise ExpressionError(f"an expression of {len(source)} characters, wanted at most {LONGEST}")
    found: list[ast.AST] = []
    level: list[ast.AST] = [_parse(source)]
    for _ in range(DEEPEST):
        found += level
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            break
    if level or len(found) > MOST_TERMS:
        raise ExpressionError(f"{source[:40]!r}… has too many terms: {MOST_TERMS} at most, {DEEPEST} deep")
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _names(source: str) -> frozenset[str]:
    found = {node.id for node in ast.walk(_parse(source)) if isinstance(node, ast.Name)}
    return frozenset(found - _FUNCTIONS.keys())


def _check(node: ast.AST, source: str) -> None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if known and not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args):
            assert isinstance(node.func, ast.Name)
            if len(node.args) == 2 or (len(node.args) > 2 and node.func.id != "ceildiv"):
                return
            wanted = "two" if node.func.id == "ceildiv" else "two or more"
            raise ExpressionError(f"{source!r} calls {node.func.id} with {len(node.args)} arguments, wanted {wanted}")
    plain = (ast.Name, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.expr_context)
    symbols = (*_BINARY, *_COMPARE, ast.And, ast.Or, ast.Not, ast.USub)
    if not isinstance(node, plain + symbols):
        what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        raise ExpressionError(f"{source!r} holds {what!r}, which specs may not use")


def _evaluate(node: ast.expr, values: Mapping[str, int | float]) -> int | float:
    match node:
        case ast.Constant():
            return node.value  # type: ignore[return-value]  # _check let only numbers through
        case ast.Name():
            return values[node.id]
        case ast.BinOp():
            return _BINARY[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluate(node.operand, values)
        case ast.UnaryOp():
            return -_evaluate(node.operand, values)
        case ast.IfExp():
            return _evaluate(node.body if _evaluate(node.test, values) else node.orelse, values)
        case ast.BoolOp(op=ast.And()):
            return all(_evaluate(value, values) for value in node.values)
        case ast.BoolOp():
            return any(_evaluate(value, values) for value in node.values)
        case ast.Call():
            return _FUNCTIONS[ast.unparse(node.func)](*(_evaluate(argument, values) for argument in node.args))
        case ast.Compare():
            terms = [_evaluate(term, values) for term in (node.left, *node.comparators)]
            return all(_COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, terms[:-1], terms[1:], strict=True))
    raise AssertionError(node)


def read_expression(node: Node, known: Any) -> Expression:
    """`known` are the names that it may use; None where they could not be read."""
    value = node.scalar()
    try:
        expression = Expression(str(node.integer(minimum=0)) if isinstance(value, int) else node.string())
    except ExpressionError as error:
        raise node.error(f"{node.name}: {error}") from error
    if known is not None and (unknown := sorted(expression.names - set(known))):
        raise node.error(f"{node.name} uses {', '.join(unknown)}; known names: {', '.join(known)}")
    return expression
