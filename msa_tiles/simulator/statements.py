"""TIR statements to code that runs on a frame.

A compiled statement is plain (a function) or suspending (a generator function that yields waits). `together` says that
its threads must not be masked: a branch around it that divides them runs as coroutines of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msa_tiles.simulator import operations
from msa_tiles.simulator.barriers import Fork, Wait
from msa_tiles.simulator.boxes import row_agents
from msa_tiles.simulator.errors import DivergenceError, UnsupportedError
from msa_tiles.simulator.expressions import Expressions, Vector
from msa_tiles.simulator.frame import Frame
from msa_tiles.simulator.program import Closure, Program, kind_of

# The iterations of a vectorised loop are independent of each other: one after the other they do the same.
SERIAL, PARALLEL, VECTORIZED, UNROLLED = 0, 1, 2, 3
# Attributes and annotations that steer the compiler and change nothing.
HINTS = {"tl.min_blocks_per_sm", "pragma_unroll_factor"}


@dataclass(frozen=True)
class Code:
    """A compiled statement."""

    run: Callable[[Frame], Any]
    suspends: bool = False
    together: bool = False

    def start(self, frame: Frame) -> Iterator[Wait | None]:
        """Run it, whether it suspends or not."""
        if self.suspends:
            yield from self.run(frame)
        else:
            self.run(frame)


NOTHING = Code(lambda f: None)


class Statements:
    """Compiles statements of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.expression = Expressions(program)

    def __call__(self, node: Any) -> Code:
        method = getattr(self, "_" + type(node).__name__, None)
        if method is None:
            raise UnsupportedError(f"statement {type(node).__name__} is not simulated: {node}")
        return method(node)

    def _SeqStmt(self, node: Any) -> Code:
        parts = [self(part) for part in node.seq]
        together = any(part.together for part in parts)
        if not any(part.suspends for part in parts):
            functions = tuple(part.run for part in parts)

            def run(f: Frame) -> None:
                for function in functions:
                    function(f)

            return Code(run, together=together)

        def sequence(f: Frame) -> Iterator[Wait | None]:
            for part in parts:
                if part.suspends:
                    yield from part.run(f)
                else:
                    part.run(f)

        return Code(sequence, suspends=True, together=True)

    def _Bind(self, node: Any) -> Code:
        if self.expression.inner is not None:
            self.expression.inner.add(node.var)
        place, value = self.program.variable(node.var), self._located(node, self.expression(node.value))

        def bind(f: Frame) -> None:
            v = value(f)
            # A view of a private variable would follow its later values.
            f.variables[place] = v.copy() if isinstance(v, np.ndarray) and v.base is not None else v

        return Code(bind)

    def _AttrStmt(self, node: Any) -> Code:
        if str(node.attr_key) in HINTS:
            return self(node.body)
        raise UnsupportedError(f"attribute {node.attr_key} = {node.value} is not simulated")

    def _Evaluate(self, node: Any) -> Code:
        kind = kind_of(node.value)
        if kind == "IntImm":
            return NOTHING
        operation = operations.build(self.expression, node.value) if type(node.value).__name__ == "Call" else None
        if operation is not None:
            run, suspends, together = operation
            if together and self.expression.inner is not None:
                raise UnsupportedError(f"{kind} in a parallel loop")
            return Code(
                self._located_generator(node, run) if suspends else self._located(node, run), suspends, together
            )
        return Code(self._located(node, self.expression(node.value)))

    def _BufferStore(self, node: Any) -> Code:
        if node.predicate is not None:
            raise UnsupportedError(f"predicated store {node}")
        store = self.expression.memory_of(self.program.buffer(node.buffer), "store")
        value = self.expression(node.value)
        *outer, last = node.indices
        indices = [self.expression(i) for i in outer]
        if type(last).__name__ == "Ramp":
            base, lanes = self.expression(last.base), self.expression.ramp(last)

            def store_vector(f: Frame) -> None:
                elements = value(f)
                if not isinstance(elements, Vector) or len(elements) != lanes:
                    raise UnsupportedError("a vector store wants a vector value of its length")
                first, index = base(f), [i(f) for i in indices]
                for n, element in enumerate(elements):
                    store(f, [*index, first + n], element)

            return Code(self._located(node, store_vector))
        indices.append(self.expression(last))
        return Code(self._located(node, lambda f: store(f, [i(f) for i in indices], value(f))))

    def _IfThenElse(self, node: Any) -> Code:
        condition = self._located(node.condition, self.expression(node.condition))
        yes = self(node.then_case)
        no = NOTHING if node.else_case is None else self(node.else_case)
        if yes.together or no.together:
            return Code(_fork(condition, yes, no), suspends=True, together=True)
        return Code(_masked(condition, yes.run, no.run))

    def _For(self, node: Any) -> Code:
        kind = int(node.kind)
        if kind == PARALLEL and not node.annotations:
            return self._parallel(node)
        if kind not in (SERIAL, PARALLEL, VECTORIZED, UNROLLED):
            raise UnsupportedError(f"loop of kind {kind}: {node.loop_var}")
        names = ", ".join(sorted({str(name) for name in node.annotations} - HINTS))
        if names:
            raise UnsupportedError(f"loop {node.loop_var} with {names} is not simulated")
        place = self.program.variable(node.loop_var)
        if self.expression.inner is not None:
            self.expression.inner.add(node.loop_var)
        low, extent = self.expression(node.min), self._located(node.extent, self.expression(node.extent))
        body = self(node.body)
        if body.together:
            return Code(_serial_together(place, low, extent, body), suspends=True, together=True)
        return Code(_serial(place, low, extent, body.run))

    def _While(self, node: Any) -> Code:
        condition = self._located(node.condition, self.expression(node.condition))
        body = self(node.body)
        if not body.together:
            return Code(_while(condition, body.run))

        def repeat(f: Frame) -> Iterator[Wait | None]:
            while True:
                c = condition(f)
                if isinstance(c, np.ndarray):
                    if c.any() != c.all():
                        raise DivergenceError("threads leave a loop in which they act together at different times")
                    c = c.all()
                if not c:
                    return
                yield from body.start(f)

        return Code(repeat, suspends=True, together=True)

    def _parallel(self, node: Any) -> Code:
        """A nest of parallel loops, vectorised over all of its iterations."""
        if self.expression.inner is not None:
            raise UnsupportedError("a parallel loop inside the body of another")
        loops = []
        body = node
        while type(body).__name__ == "For" and int(body.kind) == PARALLEL and not body.annotations:
            loops.append(body)
            body = body.body
        lows = [self.expression.uniform(loop.min, str(loop.loop_var)) for loop in loops]
        extents = [self.expression.uniform(loop.extent, str(loop.loop_var)) for loop in loops]
        places = [self.program.variable(loop.loop_var) for loop in loops]
        self.expression.inner = {loop.loop_var for loop in loops}
        inner = self(body)
        self.expression.inner = None
        in_registers = _touches_fragment(self.program, body)

        def run(f: Frame) -> None:
            shape = tuple(extent(f) for extent in extents)
            order = f.cta.order
            agents: Any = order.team(f.whole_warps("a parallel loop"))
            order.begin(agents)
            rows = row_agents(f, shape[0]) if in_registers else None
            if rows is not None:
                agents = rows.reshape([-1] + [1] * (len(shape) - 1))
            if 0 in shape:
                return
            lanes = f.iterations(shape, agents)
            for axis, (place, low) in enumerate(zip(places, lows, strict=True)):
                count = np.arange(shape[axis], dtype=np.int32) + low(f)
                lanes.variables[place] = count.reshape([-1 if d == axis else 1 for d in range(len(shape))])
            try:
                inner.run(lanes)
            finally:
                f.at = lanes.at

        return Code(run, together=True)

    def _located(self, node: Any, function: Closure) -> Closure:
        """Note which statement runs, for messages."""

        def run(f: Frame) -> Any:
            f.at = node
            return function(f)

        return run

    def _located_generator(self, node: Any, function: Closure) -> Closure:
        def run(f: Frame) -> Iterator[Wait | None]:
            f.at = node
            yield from function(f)

        return run


def _touches_fragment(program: Program, node: Any) -> bool:
    from tilelang import tvm

    found = False

    def visit(part: Any) -> None:
        nonlocal found
        if type(part).__name__ in ("BufferLoad", "BufferStore"):
            found = found or program.buffer(part.buffer).scope == "local.fragment"

    tvm.tirx.stmt_functor.post_order_visit(node, visit)
    return found


def _masked(condition: Closure, yes: Closure, no: Closure) -> Closure:
    """A branch whose sides run one after the other, each in its own lanes."""

    def run(f: Frame) -> None:
        c = condition(f)
        if not isinstance(c, np.ndarray):
            (yes if c else no)(f)
            return
        mask = f.mask
        if mask is None and c.all():
            yes(f)
            return
        try:
            f.mask = c if mask is None else c & mask
            if f.mask.any():
                yes(f)
            f.mask = ~c if mask is None else ~c & mask
            if f.mask.any():
                no(f)
        finally:
            f.mask = mask

    return run


def _fork(condition: Closure, yes: Code, no: Code) -> Callable[[Frame], Iterator[Wait | None]]:
    """A branch around threads that act together: where it divides them, the parts run side by side."""

    def run(f: Frame) -> Iterator[Wait | None]:
        c = condition(f)
        if isinstance(c, np.ndarray) and c.any() != c.all():
            parts: Sequence[tuple[Code, np.ndarray]] = ((yes, c), (no, ~c))
            frames = [(f.split(chosen), code) for code, chosen in parts if code is not NOTHING]
            yield Fork([(frame, code.start(frame)) for frame, code in frames])
            return
        taken = bool(c.all()) if isinstance(c, np.ndarray) else c
        yield from (yes if taken else no).start(f)

    return run


def _bounds(f: Frame, low: Closure, extent: Closure) -> tuple[int, Any]:
    first, count = low(f), extent(f)
    if isinstance(first, np.ndarray):
        raise UnsupportedError("a loop that starts at a different number in different threads")
    return first, count


def _serial(place: int, low: Closure, extent: Closure, body: Closure) -> Closure:
    def run(f: Frame) -> None:
        first, count = _bounds(f, low, extent)
        if not isinstance(count, np.ndarray):
            for i in range(first, first + count):
                f.variables[place] = i
                body(f)
            return
        mask = f.mask
        most = int(count.max() if mask is None else count[mask].max())
        try:
            for i in range(most):
                here = i < count
                f.mask = here if mask is None else here & mask
                f.variables[place] = first + i
                body(f)
        finally:
            f.mask = mask

    return run


def _serial_together(place: int, low: Closure, extent: Closure, body: Code) -> Callable[[Frame], Iterator[Wait | None]]:
    def repeat(f: Frame, first: int, count: int) -> Iterator[Wait | None]:
        for i in range(first, first + count):
            f.variables[place] = i
            yield from body.start(f)

    def run(f: Frame) -> Iterator[Wait | None]:
        first, count = _bounds(f, low, extent)
        if isinstance(count, np.ndarray):
            kinds = np.unique(count)
            if len(kinds) > 1:
                frames = [(f.split(count == n), int(n)) for n in kinds]
                yield Fork([(frame, repeat(frame, first, n)) for frame, n in frames])
                return
            count = int(kinds[0])
        yield from repeat(f, first, count)

    return run


def _while(condition: Closure, body: Closure) -> Closure:
    def run(f: Frame) -> None:
        mask = f.mask
        try:
            while True:
                c = condition(f)
                if isinstance(c, np.ndarray):
                    c = c if f.mask is None else c & f.mask
                    if not c.any():
                        return
                    if f.mask is not None or not c.all():
                        f.mask = c
                elif not c:
                    return
                body(f)
        finally:
            f.mask = mask

    return run
