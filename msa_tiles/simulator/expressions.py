"""TIR expressions to closures over a frame."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from msa_tiles.simulator import intrinsics
from msa_tiles.simulator.dtypes import converted, is_float, numpy_type, wrapped
from msa_tiles.simulator.errors import SimulationError, UnsupportedError
from msa_tiles.simulator.frame import Frame, uniform
from msa_tiles.simulator.program import BufferInfo, Closure, Program, kind_of, reads_memory


class Vector(tuple[Any, ...]):
    """A short vector value: one value an element."""


def _divide(a: Any, b: Any) -> Any:
    """C division of integers."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        # In 64 bits: the absolute value of the least int32 is none.
        wide_a, wide_b = np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64)
        quotient = np.abs(wide_a) // np.abs(wide_b) * np.sign(wide_a) * np.sign(wide_b)
        return quotient.astype(np.result_type(a, b))
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def _smallest(a: Any, b: Any) -> Any:
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def _largest(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


_INTEGER: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Div": _divide,
    "Mod": lambda a, b: a - _divide(a, b) * b,
    "Min": _smallest,
    "Max": _largest,
    "tirx.bitwise_and": operator.and_,
    "tirx.bitwise_or": operator.or_,
    "tirx.bitwise_xor": operator.xor,
    "tirx.shift_left": operator.lshift,
    "tirx.shift_right": operator.rshift,
}
_FLOAT: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    # fminf and fmaxf drop NaN.
    "Min": np.fmin,
    "Max": np.fmax,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}


# What float32 arithmetic of the GPU gives for every NaN; that of the CPU may be negative, which a kernel can see.
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def _one_nan(value: Any) -> Any:
    is_nan = value != value
    if isinstance(is_nan, np.ndarray):
        return np.where(is_nan, _NAN, value) if np.count_nonzero(is_nan) else value
    return _NAN if is_nan else value


def _value(literal: Any) -> int | bool:
    return bool(literal.value) if str(literal.dtype) == "bool" else int(literal.value)


class Expressions:
    """Compiles expressions of one program.

    Inside a parallel loop, `inner` holds the variables that differ between its iterations; whatever else is read there
    must be the same in all threads.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inner: set[Any] | None = None

    def __call__(self, node: Any) -> Closure:
        kind = kind_of(node)
        if kind in _COMPARE:
            return self._pair(node.a, node.b, _COMPARE[kind])
        if kind in _INTEGER or kind in _FLOAT:
            return self._arithmetic(node, kind)
        method = getattr(self, "_" + kind, None)
        if method is not None:
            return method(node)
        if kind in intrinsics.BUILDERS and not node.annotations:
            return intrinsics.BUILDERS[kind](self, node)
        raise UnsupportedError(f"{kind} in an expression is not simulated: {node}")

    def constant(self, node: Any, what: str) -> int:
        """The value of a literal."""
        if type(node).__name__ != "IntImm":
            raise UnsupportedError(f"{what} {node}: wanted a literal")
        return int(node.value)

    def uniform(self, node: Any, what: str) -> Callable[[Frame], int]:
        """An expression that must be the same in all threads."""
        closure = self(node)
        return lambda f: uniform(closure(f), what)

    def _pair(self, left: Any, right: Any, function: Callable[[Any, Any], Any]) -> Closure:
        a, b = self(left), self(right)
        if type(right).__name__ == "IntImm":
            constant = _value(right)
            return lambda f: function(a(f), constant)
        return lambda f: function(a(f), b(f))

    def _arithmetic(self, node: Any, kind: str) -> Closure:
        left, right = (node.a, node.b) if hasattr(node, "a") else (node.args[0], node.args[1])
        dtype = numpy_type(node.dtype)
        table = _FLOAT if is_float(dtype) else _INTEGER
        if kind not in table:
            raise UnsupportedError(f"{kind} of {dtype}: {node}")
        function = table[kind]
        if is_float(dtype):
            value = self._pair(left, right, function)
            if dtype != np.float32 or kind in ("Min", "Max"):
                return value
            return lambda f: _one_nan(value(f))
        if dtype == np.bool_:
            return self._pair(left, right, function)
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        value_of = self._pair(left, right, function)

        def integer(f: Frame) -> Any:
            try:
                value = value_of(f)
            except ZeroDivisionError:
                raise SimulationError(f"division by zero in {node}") from None
            if type(value) is int and not low <= value <= high:
                return wrapped(value, dtype)
            return value

        return integer

    def _IntImm(self, node: Any) -> Closure:
        value = _value(node)
        return lambda f: value

    def _FloatImm(self, node: Any) -> Closure:
        value = numpy_type(node.dtype).type(float(node.value))
        return lambda f: value

    def _Var(self, node: Any) -> Closure:
        place = self.program.variable(node)
        if self.inner is None or node in self.inner:
            return lambda f: f.variables[place]
        name = str(node.name)
        return lambda f: uniform(f.variables[place], name)

    def _Cast(self, node: Any) -> Closure:
        value, dtype = self(node.value), numpy_type(node.dtype)
        return lambda f: converted(value(f), dtype)

    def _Not(self, node: Any) -> Closure:
        value = self(node.a)

        def negate(f: Frame) -> Any:
            v = value(f)
            return ~v if isinstance(v, np.ndarray) else not v

        return negate

    def _And(self, node: Any) -> Closure:
        return self._short_circuit(node, stop=False)

    def _Or(self, node: Any) -> Closure:
        return self._short_circuit(node, stop=True)

    def _short_circuit(self, node: Any, stop: bool) -> Closure:
        """The right side is evaluated in the lanes that the left side leaves open, as in C."""
        a, b, guarded = self(node.a), self(node.b), reads_memory(node.b)

        def evaluate(f: Frame) -> Any:
            left = a(f)
            if not isinstance(left, np.ndarray):
                return stop if bool(left) is stop else b(f)
            if not guarded:
                return left | b(f) if stop else left & b(f)
            mask = f.mask
            open_ = ~left if stop else left
            f.mask = open_ if mask is None else open_ & mask
            try:
                right = b(f) if f.mask.any() else stop
            finally:
                f.mask = mask
            return left | right if stop else left & right

        return evaluate

    def _Select(self, node: Any) -> Closure:
        return self.choose(node, node.condition, node.true_value, node.false_value)

    def choose(self, node: Any, condition: Any, true_value: Any, false_value: Any) -> Closure:
        """`condition ? a : b`; each side is evaluated in its own lanes only."""
        test, yes, no = self(condition), self(true_value), self(false_value)
        guarded = reads_memory(true_value), reads_memory(false_value)
        dtype = numpy_type(node.dtype)

        def side(f: Frame, value: Closure, lanes: np.ndarray, is_guarded: bool) -> Any:
            if not is_guarded:
                return value(f)
            mask = f.mask
            f.mask = lanes if mask is None else lanes & mask
            try:
                return value(f) if f.mask.any() else dtype.type(0)
            finally:
                f.mask = mask

        def evaluate(f: Frame) -> Any:
            c = test(f)
            if not isinstance(c, np.ndarray):
                return yes(f) if c else no(f)
            a = side(f, yes, c, guarded[0])
            b = side(f, no, ~c, guarded[1])
            return converted(np.where(c, a, b), dtype)

        return evaluate

    def _BufferLoad(self, node: Any) -> Closure:
        if node.predicate is not None:
            raise UnsupportedError(f"predicated load {node}")
        info = self.program.buffer(node.buffer)
        load = self.memory_of(info, "load")
        *outer, last = node.indices
        indices = [self(i) for i in outer]
        if type(last).__name__ == "Ramp":
            base, lanes = self(last.base), self.ramp(last)
            return lambda f: Vector(load(f, [*(i(f) for i in indices), base(f) + n]) for n in range(lanes))
        indices.append(self(last))
        if len(indices) == 1:
            only = indices[0]
            return lambda f: load(f, (only(f),))
        return lambda f: load(f, [i(f) for i in indices])

    def memory_of(self, info: BufferInfo, method: str) -> Callable[..., Any]:
        """A function (frame, index[, value]) that accesses a buffer."""
        key = info.key
        if info.scope == "shared.barrier":
            raise UnsupportedError(f"{info.name}: an mbarrier used as a value")
        if info.scope.startswith("local") and info.scope != "local.fragment":
            if self.inner is not None and method == "store":
                raise UnsupportedError(f"{info.name}: a thread's own variable stored in a parallel loop")
            if self.inner is not None:
                name = info.name
                return lambda f, index: uniform(f.role.locals[key].load(f, index), name)
            if method == "load":
                return lambda f, index: f.role.locals[key].load(f, index)
            return lambda f, index, value: f.role.locals[key].store(f, index, value)
        if info.scope == "local.fragment" and self.inner is None:
            raise UnsupportedError(f"{info.name}: a fragment element outside a parallel loop")
        if method == "load":
            return lambda f, index: f.cta.memory[key].load(f, index)
        return lambda f, index, value: f.cta.memory[key].store(f, index, value)

    def ramp(self, node: Any) -> int:
        """Number of elements of a vector index with step 1."""
        if self.constant(node.stride, "stride of a vector index") != 1:
            raise UnsupportedError(f"vector index {node}")
        return self.constant(node.lanes, "length of a vector index")
