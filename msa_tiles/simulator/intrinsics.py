"""Intrinsics that yield a value: mathematics, bits, shuffles, atomics and wide loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from msa_tiles.simulator import words
from msa_tiles.simulator.dtypes import converted, numpy_type, scalar, vector_type
from msa_tiles.simulator.errors import DivergenceError, OutOfBoundsError, UnsupportedError
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.memory import GlobalMemory, active_lanes

if TYPE_CHECKING:
    from msa_tiles.simulator.expressions import Expressions
    from msa_tiles.simulator.program import Closure

FULL_WARP = 0xFFFFFFFF
VECTOR_BYTES = 16


def full_warps(frame: Frame, what: str) -> None:
    """Every warp takes part with all of its lanes or not at all.

    Raises DivergenceError.
    """
    active = frame.active()
    if len(active) % WARP or (active.reshape(-1, WARP) // WARP != active[::WARP, None] // WARP).any():
        raise DivergenceError(f"{what} by a part of a warp: its mask names all lanes")


def _math(function: Callable[[Any], Any]) -> Callable[[Expressions, Any], Closure]:
    def build(compiler: Expressions, node: Any) -> Closure:
        value, dtype = compiler(node.args[0]), numpy_type(node.dtype)
        return lambda f: converted(function(value(f)), dtype)

    return build


def _infinity(compiler: Expressions, node: Any) -> Closure:
    value = numpy_type(node.dtype).type(np.inf)
    return lambda f: value


def _choose(compiler: Expressions, node: Any) -> Closure:
    return compiler.choose(node, *node.args)


def _reinterpret(compiler: Expressions, node: Any) -> Closure:
    pair = words.reinterpret(compiler, node)
    if pair is not None:
        return pair
    value, old, new = compiler(node.args[0]), numpy_type(node.args[0].dtype), numpy_type(node.dtype)
    if old.itemsize != new.itemsize:
        raise UnsupportedError(f"reinterpretation of {old} as {new}: {node}")

    def view(f: Frame) -> Any:
        v = value(f)
        if isinstance(v, np.ndarray):
            return np.ascontiguousarray(v.astype(old, copy=False)).view(new)
        return scalar(np.asarray(v, old).view(new)[()])

    return view


def _find_first_set(value: Any) -> Any:
    """One more than the place of the lowest bit that is set, 0 where none is."""
    lowest = np.asarray(value).astype(np.int64) & -np.asarray(value).astype(np.int64)
    return np.where(lowest == 0, 0, np.log2(np.maximum(lowest & 0xFFFFFFFF, 1)).astype(np.int64) + 1)[()]


def _population_count(compiler: Expressions, node: Any) -> Closure:
    value, ones = compiler(node.args[0]), (1 << 8 * numpy_type(node.args[0].dtype).itemsize) - 1
    dtype = numpy_type(node.dtype)

    def count(f: Frame) -> Any:
        v = value(f)
        if not isinstance(v, np.ndarray):
            return (v & ones).bit_count()
        each = np.ascontiguousarray(v).view(np.uint8).reshape(*v.shape, v.dtype.itemsize)
        return np.unpackbits(each, axis=-1).sum(-1, dtype=dtype)

    return count


def _launch_thread_idx(compiler: Expressions, node: Any) -> Closure:
    if compiler.constant(node.args[0], "thread axis") == 0:
        return lambda f: f.tid
    return lambda f: 0


def _shuffle(source: Callable[[np.ndarray, Any], np.ndarray]) -> Callable[[Expressions, Any], Closure]:
    """A shuffle over 32 lanes: `source(lane, operand)` is the lane that each lane reads."""

    def build(compiler: Expressions, node: Any) -> Closure:
        mask, value, operand, width = node.args
        if compiler.constant(mask, "shuffle mask") != FULL_WARP or compiler.constant(width, "shuffle width") != WARP:
            raise UnsupportedError(f"shuffle of a part of a warp: {node}")
        if compiler.inner is not None:
            raise UnsupportedError(f"shuffle in a parallel loop: {node}")
        get, by = compiler(value), compiler(operand)

        def shuffle(f: Frame) -> Any:
            full_warps(f, "a shuffle")
            v = get(f)
            if not isinstance(v, np.ndarray):
                return v
            lane = f.tid % WARP
            wanted = source(lane, by(f))
            wanted = np.where((wanted < 0) | (wanted >= WARP), lane, wanted)
            return v[np.arange(len(v)) - lane + wanted]

        return shuffle

    return build


def _warp_wide(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Expressions, Any], Closure]:
    """A vote or a reduction: `function` takes [warps, 32] values and gives one for each warp."""

    def build(compiler: Expressions, node: Any) -> Closure:
        if len(node.args) == 2 and compiler.constant(node.args[0], "mask of a vote") != FULL_WARP:
            raise UnsupportedError(f"vote of a part of a warp: {node}")
        if compiler.inner is not None:
            raise UnsupportedError(f"{node.op.name} in a parallel loop")
        get, name, dtype = compiler(node.args[-1]), str(node.op.name), numpy_type(node.dtype)

        def meet(f: Frame) -> Any:
            full_warps(f, name)
            values = np.broadcast_to(np.asarray(get(f)), f.tid.shape).reshape(-1, WARP)
            return np.repeat(function(values).astype(dtype), WARP)

        return meet

    return build


def pointer(compiler: Expressions, node: Any) -> tuple[Any, list[Closure]]:
    """The buffer and the index of `access_ptr(load, extent, mode)`."""
    if node.op.name != "tl.access_ptr" or type(node.args[0]).__name__ != "BufferLoad":
        raise UnsupportedError(f"pointer {node}")
    load = node.args[0]
    return compiler.program.buffer(load.buffer), [compiler(i) for i in load.indices]


def _atomic_add(compiler: Expressions, node: Any) -> Closure:
    info, indices = pointer(compiler, node.args[0])
    if info.scope != "global" or compiler.inner is not None:
        raise UnsupportedError(f"atomic on {info.name} ({info.scope}): only global memory, outside parallel loops")
    value = compiler(node.args[1])
    key = info.key

    def add(f: Frame) -> Any:
        memory = f.cta.memory[key]
        assert isinstance(memory, GlobalMemory)
        index = [i(f) for i in indices]
        memory.load(f, index)  # bounds
        *where, added, lanes = active_lanes(f, [*index, value(f), np.arange(len(f.tid))])
        before = np.zeros(len(f.tid), memory.dtype)
        for n in f.cta.random.sample(range(len(lanes)), len(lanes)):
            place = tuple(int(w[n]) for w in where)
            before[lanes[n]] = memory.array[place]
            memory.array[place] += added[n]
        return before

    return add


def raw_pointer(
    compiler: Expressions, node: Any, dtype: Any, width: int = VECTOR_BYTES
) -> Callable[[Frame], tuple[GlobalMemory, Any]]:
    """The tensor and the element offset of `tvm_access_ptr(type, data, offset, extent, mode)`, aligned."""
    if node.op.name != "tirx.tvm_access_ptr":
        raise UnsupportedError(f"pointer {node}")
    found = [info for buffer, info in compiler.program.buffers.items() if buffer.data.same_as(node.args[1])]
    if len(found) != 1 or found[0].scope != "global" or found[0].dtype != numpy_type(node.args[0].dtype):
        raise UnsupportedError(f"{8 * width}-bit access through {node}: wanted a tensor argument")
    offset, key, name = compiler(node.args[2]), found[0].key, found[0].name

    def resolve(f: Frame) -> tuple[GlobalMemory, Any]:
        memory = f.cta.memory[key]
        assert isinstance(memory, GlobalMemory)
        memory.reach(f)
        at = offset(f)
        address = memory.address + np.asarray(at, np.int64) * memory.dtype.itemsize
        wrong = address % width != 0
        if f.mask is not None:
            wrong = wrong & f.mask
        if np.any(wrong):
            raise OutOfBoundsError(f"{name}: a {8 * width}-bit access at a misaligned address")
        return memory, at

    return resolve


def _load_wide(width: int) -> Callable[[Expressions, Any], Closure]:
    """T.ldg32, T.ldg64 and T.ldg128: `width` bytes."""

    def build(compiler: Expressions, node: Any) -> Closure:
        from msa_tiles.simulator.expressions import Vector

        if len(node.args) != 1 or compiler.inner is not None:
            raise UnsupportedError(f"predicated {8 * width}-bit load, or one in a parallel loop: {node}")
        word, lanes = vector_type(node.dtype)
        resolve = raw_pointer(compiler, node.args[0], word, width)

        def load(f: Frame) -> Any:
            memory, at = resolve(f)
            elements = width // memory.dtype.itemsize
            at = np.broadcast_to(np.asarray(at, np.int64), f.shape)
            active = at if f.mask is None else at[f.mask]
            values = np.zeros((len(at), elements), memory.dtype)
            values[slice(None) if f.mask is None else f.mask] = memory.array[
                memory.places(active[:, None] + np.arange(elements))
            ]
            words = values.view(word)
            return Vector(words[:, n].copy() for n in range(lanes)) if lanes > 1 else words[:, 0].copy()

        assert lanes * word.itemsize == width
        return load

    return build


def store_wide(compiler: Expressions, node: Any, width: int) -> Closure:
    """T.stg32, T.stg64 and T.stg128: `width` bytes."""
    if len(node.args) != 2 or compiler.inner is not None:
        raise UnsupportedError(f"predicated {8 * width}-bit store, or one in a parallel loop: {node}")
    word, lanes = vector_type(node.args[1].dtype)
    resolve, value = raw_pointer(compiler, node.args[0], word, width), compiler(node.args[1])

    def store(f: Frame) -> None:
        memory, at = resolve(f)
        elements = width // memory.dtype.itemsize
        columns = active_lanes(f, [at, *(value(f) if lanes > 1 else [value(f)])])
        words = np.stack([column.astype(word, copy=False) for column in columns[1:]], 1)
        memory.array[memory.places(columns[0].astype(np.int64)[:, None] + np.arange(elements))] = words.view(
            memory.dtype
        )

    assert lanes * word.itemsize == width
    return store


BUILDERS: dict[str, Callable[[Any, Any], Any]] = {
    "tirx.if_then_else": _choose,
    "tirx.exp2": _math(np.exp2),
    "tirx.exp": _math(np.exp),
    "tirx.log2": _math(np.log2),
    "tirx.log": _math(np.log),
    "tirx.sqrt": _math(np.sqrt),
    "tirx.fabs": _math(np.abs),
    "tirx.bitwise_not": _math(np.invert),
    "tirx.popcount": _population_count,
    "tl.__ffs": _math(_find_first_set),
    "tl.infinity": _infinity,
    "tirx.reinterpret": _reinterpret,
    "tl.launch_thread_idx": _launch_thread_idx,
    "tl.shfl_sync": _shuffle(lambda lane, source: np.asarray(source) % WARP),
    "tl.shfl_xor_sync": _shuffle(lambda lane, by: lane ^ by),
    "tl.shfl_down_sync": _shuffle(lambda lane, by: lane + by),
    "tl.shfl_up_sync": _shuffle(lambda lane, by: lane - by),
    "tl.any_sync": _warp_wide(lambda values: (values != 0).max(1)),
    "tl.ballot": _warp_wide(
        lambda values: ((values != 0).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
    ),
    "tl.warp_reduce_min": _warp_wide(lambda values: values.min(1)),
    "tl.atomic_add_ret_elem_op": _atomic_add,
    "tl.atomic_add_elem_op": _atomic_add,
    "tl.ldg32": _load_wide(4),
    "tl.ldg64": _load_wide(8),
    "tl.ldg128": _load_wide(VECTOR_BYTES),
    "tl.lds64": words.load_shared,
    "tl.lds128": words.load_shared,
    "tl.mul2": words.times,
}
