"""Words of 32 bits: wide accesses of shared memory, copies past registers (cp.async), and pairs of 16-bit numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from msa_tiles.simulator.dtypes import vector_type
from msa_tiles.simulator.errors import OutOfBoundsError, UnsupportedError
from msa_tiles.simulator.frame import Frame
from msa_tiles.simulator.memory import GlobalMemory, active_lanes
from msa_tiles.simulator.program import BufferInfo, Closure
from msa_tiles.simulator.shared import UNFENCED, SharedMemory

COPY_BYTES = (4, 8, 16)


def _shared(compiler: Any, node: Any, width: int) -> Any:
    """A function (frame) -> (memory, places [active, elements], agents, threads) of `tvm_access_ptr(type, data, …)`."""
    if node.op.name != "tirx.tvm_access_ptr":
        raise UnsupportedError(f"pointer {node}")
    found = [info for buffer, info in compiler.program.buffers.items() if buffer.data.same_as(node.args[1])]
    if len(found) != 1 or not found[0].scope.startswith("shared"):
        raise UnsupportedError(f"{8 * width}-bit access through {node}: wanted shared memory")
    offset, key = compiler(node.args[2]), found[0].key
    return lambda f: _places(f, f.cta.memory[key], offset(f), width)


def _places(f: Frame, memory: Any, offset: Any, width: int) -> tuple[SharedMemory, np.ndarray, np.ndarray, np.ndarray]:
    assert isinstance(memory, SharedMemory)
    first, agents, threads = active_lanes(f, [offset, f.agents, f.threads])
    first = first.astype(np.int64)
    if (first * memory.dtype.itemsize % width).any():
        raise OutOfBoundsError(f"{memory.name}: a {8 * width}-bit access at a misaligned address")
    places = first[:, None] + np.arange(width // memory.dtype.itemsize)
    if places.size and not (places.min() >= 0 and places.max() < len(memory.array)):
        raise OutOfBoundsError(f"{memory.name}: a {8 * width}-bit access outside of it")
    return memory, places, agents, threads


def load_shared(compiler: Any, node: Any) -> Closure:
    """T.lds32, T.lds64 and T.lds128."""
    from msa_tiles.simulator.expressions import Vector

    if compiler.inner is not None:
        raise UnsupportedError(f"a wide load in a parallel loop: {node}")
    word, count = vector_type(node.dtype)
    where = _shared(compiler, node.args[0], word.itemsize * count)

    def load(f: Frame) -> Any:
        memory, places, agents, threads = where(f)
        wide = places.shape[1]
        memory.check_read(places.reshape(-1), agents.repeat(wide), threads.repeat(wide))
        words = np.zeros((*f.shape, count), word)
        words[slice(None) if f.mask is None else f.mask] = memory.array[places].view(word)
        return Vector(words[:, n].copy() for n in range(count)) if count > 1 else words[:, 0]

    return load


def store_shared(compiler: Any, node: Any) -> Closure:
    """T.sts64 and T.sts128."""
    if compiler.inner is not None:
        raise UnsupportedError(f"a wide store in a parallel loop: {node}")
    word, count = vector_type(node.args[1].dtype)
    where, value = _shared(compiler, node.args[0], word.itemsize * count), compiler(node.args[1])

    def store(f: Frame) -> None:
        memory, places, agents, threads = where(f)
        words = np.stack([column.astype(word) for column in active_lanes(f, list(value(f)))], 1)
        wide = places.shape[1]
        values = np.ascontiguousarray(words).view(memory.dtype)
        memory.write(places.reshape(-1), agents.repeat(wide), values.reshape(-1), threads.repeat(wide))

    return store


def copy(compiler: Any, node: Any) -> Closure:
    """T.ptx_cp_async, global to shared. What it writes is nobody's until a barrier has had these threads arrive."""
    from msa_tiles.simulator.intrinsics import pointer

    if compiler.inner is not None or len(node.args) != 3:
        raise UnsupportedError(f"a predicated copy, or one in a parallel loop: {node}")
    (to, target), (of, source) = (pointer(compiler, part) for part in node.args[:2])
    count = compiler.constant(node.args[2], "count of a copy")
    _check_copy(to, of, count)

    def start(f: Frame) -> None:
        memory, given = f.cta.memory[to.key], f.cta.memory[of.key]
        assert isinstance(memory, SharedMemory) and isinstance(given, GlobalMemory)
        given.reach(f)
        size = count * given.dtype.itemsize
        index = [i(f) for i in source]
        given.load(f, index)  # bounds
        offset = active_lanes(f, [_offset(given, index)])[0]
        if ((given.address + offset * given.dtype.itemsize) % size).any():
            raise OutOfBoundsError(f"{given.name}: a copy of {size} bytes from a misaligned address")
        values = given.array[given.places(offset[:, None] + np.arange(count))].view(memory.dtype)
        place: Any = 0
        for i, extent in zip((i(f) for i in target), memory.shape, strict=True):
            place = place * extent + i
        _, places, agents, _threads = _places(f, memory, place, size)
        memory.check_write(places.reshape(-1), agents.repeat(count), "a copy past registers")
        memory.write_async(places.reshape(-1), agents.repeat(count), UNFENCED - 1)  # type: ignore[arg-type]
        f.role.copies.append((memory, places.reshape(-1), values.reshape(-1)))

    return start


def _check_copy(to: BufferInfo, of: BufferInfo, count: int) -> None:
    if not to.scope.startswith("shared") or of.scope != "global":
        raise UnsupportedError(f"a copy past registers from {of.name} to {to.name}: wanted global and shared memory")
    if to.dtype.itemsize != of.dtype.itemsize or count * to.dtype.itemsize not in COPY_BYTES:
        raise UnsupportedError(f"a copy of {count} elements from {of.name} to {to.name}: wanted 4, 8 or 16 bytes")


def _offset(memory: GlobalMemory, index: list[Any]) -> Any:
    strides = [stride // memory.dtype.itemsize for stride in memory.array.strides]
    return sum(np.asarray(i, np.int64) * step for i, step in zip(index, strides, strict=True))


def arrive_with_copies(frame: Frame, barrier: Any) -> None:
    """cp.async.mbarrier.arrive.noinc: these threads arrive once their copies have landed, and tell nothing else."""
    for memory, places, values in frame.role.copies:
        clock = barrier.expect(values.nbytes)
        memory.write_async(places, barrier.agent, clock)

        def land(memory: Any = memory, places: Any = places, values: Any = values, clock: int = clock) -> None:
            memory.array[places] = values
            barrier.land(values.nbytes, clock)

        barrier.loads.append(land)
    frame.role.copies.clear()
    barrier.count_in(len(frame.active()))


def reinterpret(compiler: Any, node: Any) -> Closure | None:
    """A word as a pair of 16-bit numbers, or back; None for other types."""
    from msa_tiles.simulator.expressions import Vector

    (old, many), (new, wanted) = vector_type(node.args[0].dtype), vector_type(node.dtype)
    if (many, wanted) == (1, 1):
        return None
    if old.itemsize * many != new.itemsize * wanted or {many, wanted} != {1, 2}:
        raise UnsupportedError(f"reinterpretation of {node.args[0].dtype} as {node.dtype}: {node}")
    value = compiler(node.args[0])

    def view(f: Frame) -> Any:
        if wanted == 1:
            pair = np.stack([np.broadcast_to(np.asarray(half, old), f.shape) for half in value(f)], -1)
            return np.ascontiguousarray(pair).view(new)[..., 0]
        words = np.broadcast_to(np.asarray(value(f)).astype(old), f.shape)
        pairs = np.ascontiguousarray(words)[..., None].view(new)
        return Vector(pairs[..., n] for n in range(2))

    return view


def times(compiler: Any, node: Any) -> Closure:
    """T.mul2: products of pairs, each rounded once."""
    from msa_tiles.simulator.expressions import Vector

    dtype, count = vector_type(node.dtype)
    if count != 2 or dtype.itemsize != 2:
        raise UnsupportedError(f"products of {node.dtype}: {node}")
    first, second = (compiler(part) for part in node.args)
    return lambda f: Vector(a * b for a, b in zip(first(f), second(f), strict=True))
