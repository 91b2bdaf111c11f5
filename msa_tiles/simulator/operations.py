"""Intrinsics that act: barriers, fences, tile copies, TMA, wgmma and tcgen05.

A builder gives the function to run, whether it suspends, and whether its threads must act together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from msa_tiles.simulator import boxes, intrinsics, tma, wgmma, words
from msa_tiles.simulator.barriers import Mbarrier, NamedBarrier, Wait, sync, wait_phase
from msa_tiles.simulator.boxes import Box
from msa_tiles.simulator.errors import UnsupportedError
from msa_tiles.simulator.expressions import Expressions
from msa_tiles.simulator.frame import WARP, Frame
from msa_tiles.simulator.shared import SharedMemory
from msa_tiles.simulator.tensor import TensorCore

Built = tuple[Callable[[Frame], Any], bool, bool]
CTA_BARRIER = 0


def _box(compiler: Expressions, node: Any) -> Callable[[Frame], Box]:
    """`region(load of the first element, mode, *extents)`."""
    if type(node).__name__ != "Call" or node.op.name != "tl.region":
        raise UnsupportedError(f"tile operand {node}")
    load = node.args[0]
    info = compiler.program.buffer(load.buffer)
    if info.scope not in ("global", "shared", "shared.dyn", "shared.tmem", "local.fragment"):
        raise UnsupportedError(f"tile operand {info.name} in scope {info.scope}")
    start = [compiler.uniform(i, f"an index of {info.name}") for i in load.indices]
    extent = [compiler.uniform(n, f"an extent of {info.name}") for n in node.args[2:]]
    key = info.key
    return lambda f: Box(f.cta.memory[key], tuple(i(f) for i in start), tuple(n(f) for n in extent))


def _barrier(compiler: Expressions, node: Any) -> Callable[[Frame], Mbarrier]:
    if type(node).__name__ != "BufferLoad" or compiler.program.buffer(node.buffer).scope != "shared.barrier":
        raise UnsupportedError(f"mbarrier {node}")
    info = compiler.program.buffer(node.buffer)
    (number,) = (compiler.uniform(i, f"the slot of {info.name}") for i in node.indices)
    return lambda f: f.cta.slot(info.key, number(f))


def _barrier_at(compiler: Expressions, node: Any) -> Callable[[Frame], Mbarrier]:
    """The same, where it comes as a pointer: `tvm_access_ptr(type, data, slot, …)`."""
    if type(node).__name__ != "Call" or node.op.name != "tirx.tvm_access_ptr":
        raise UnsupportedError(f"mbarrier {node}")
    for buffer, info in compiler.program.buffers.items():
        if info.scope == "shared.barrier" and buffer.data.same_as(node.args[1]):
            number, key = compiler.uniform(node.args[2], f"the slot of {info.name}"), info.key
            return lambda f: f.cta.slot(key, number(f))
    raise UnsupportedError(f"mbarrier {node}")


def _options(node: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Annotations of a call.

    Raises UnsupportedError for one that is not in `known`, or that has another value than the one given there.
    """
    found = {str(name): value for name, value in (node.annotations or {}).items()}
    for name, value in found.items():
        if name not in known or (known[name] is not None and int(value) != known[name]):
            raise UnsupportedError(f"{node.op.name} with {name}={value} is not simulated")
    return found


def _copy(compiler: Expressions, node: Any) -> Built:
    source, target = _box(compiler, node.args[0]), _box(compiler, node.args[1])
    return lambda f: boxes.copy(f, source(f), target(f)), False, True


def _fill(compiler: Expressions, node: Any) -> Built:
    target, value = _box(compiler, node.args[0]), compiler.uniform(node.args[1], "the value of a fill")
    return lambda f: boxes.fill(f, target(f), value(f)), False, True


def _reduce(compiler: Expressions, node: Any) -> Built:
    source, target = _box(compiler, node.args[0]), _box(compiler, node.args[1])
    kind, dim = str(node.args[2].value), compiler.constant(node.args[3], "axis of a reduction")
    clear = bool(compiler.constant(node.args[4], "clear of a reduction"))
    return lambda f: boxes.reduce(f, source(f), target(f), kind, dim, clear), False, True


def _wgmma(compiler: Expressions, node: Any) -> Built:
    _options(node, {"wg_wait": -1})
    a, b, c = (_box(compiler, node.args[n]) for n in range(3))
    transpose_a, transpose_b = (bool(compiler.constant(node.args[n], "transposition")) for n in (3, 4))
    clear = compiler.uniform(node.args[9], "clear_accum")
    if any(compiler.constant(node.args[n], "wgmma argument") for n in (10, 11, 12)):
        raise UnsupportedError(f"wgmma into a part of an accumulator: {node}")
    return lambda f: wgmma.issue(f, a(f), b(f), c(f), transpose_a, transpose_b, bool(clear(f))), False, True


def _wait_wgmma(compiler: Expressions, node: Any) -> Built:
    most = compiler.constant(node.args[0], "count of wait_wgmma")
    return lambda f: wgmma.wait(f, most), False, True


def _tcgen05(compiler: Expressions, node: Any) -> Built:
    _options(node, {"is_tcgen05": 1})
    a, b, c = (_box(compiler, node.args[n]) for n in range(3))
    transposed = tuple(bool(compiler.constant(node.args[n], "transposition")) for n in (3, 4))
    clear = compiler.uniform(node.args[9], "clear_accum")
    if any(compiler.constant(node.args[n], "tcgen05 argument") for n in (11, 12)):
        raise UnsupportedError(f"tcgen05 into a part of an accumulator: {node}")
    barrier = None if type(node.args[10]).__name__ == "IntImm" else _barrier(compiler, node.args[10])

    def run(f: Frame) -> None:
        core = _core(f)
        core.multiply(f, a(f), b(f), c(f), (transposed[0], transposed[1]), bool(clear(f)))
        if barrier is not None:
            core.commit(f, barrier(f))

    return run, False, True


def _tcgen05_arrive(compiler: Expressions, node: Any) -> Built:
    barrier = _barrier_at(compiler, node.args[0])
    return lambda f: _core(f).commit(f, barrier(f)), False, True


def _core(f: Frame) -> TensorCore:
    if f.cta.core is None:
        raise UnsupportedError("tcgen05 without tensor memory")
    return f.cta.core


def _tcgen05_fence(compiler: Expressions, node: Any) -> Built:
    """Tensor memory is ordered by barriers here; lowering adds most of these fences itself."""
    return lambda f: None, False, False


def _tma_copy(compiler: Expressions, node: Any) -> Built:
    options = _options(node, {"barrier": None, "eviction_policy": None})
    source, target = _box(compiler, node.args[0]), _box(compiler, node.args[1])
    if "barrier" in options:
        barrier, steps = _barrier(compiler, options["barrier"]), _described(compiler, node.args[0])
        return lambda f: tma.load(f, source(f), target(f), barrier(f), steps(f)), False, True
    steps = _described(compiler, node.args[1])
    return lambda f: tma.store(f, source(f), target(f), steps(f)), False, True


def _described(compiler: Expressions, node: Any) -> Callable[[Frame], tuple[int, ...]]:
    """The strides that a tile operand in global memory is described by to TMA, in elements."""
    steps = [compiler.uniform(step, "a stride") for step in node.args[0].buffer.strides]
    return lambda f: tuple(step(f) for step in steps)


def _tma_store_wait(compiler: Expressions, node: Any) -> Built:
    most = compiler.constant(node.args[0], "count of tma_store_wait")
    read_only = bool(compiler.constant(node.args[1], "read of tma_store_wait")) if len(node.args) > 1 else True
    return lambda f: tma.wait(f, most, read_only), False, False


def _arrive(compiler: Expressions, node: Any) -> Built:
    if len(node.args) != 1:
        raise UnsupportedError(f"arrival {node}")
    barrier = _barrier(compiler, node.args[0])

    def run(f: Frame) -> Iterator[Wait | None]:
        barrier(f).arrive(f)
        if f.cta.pauses():
            yield None

    return run, True, True


def _wait_parity(compiler: Expressions, node: Any) -> Built:
    barrier, parity = _barrier(compiler, node.args[0]), compiler.uniform(node.args[1], "the parity of a wait")
    return lambda f: wait_phase(barrier(f), parity(f), f), True, True


def _storage_sync(compiler: Expressions, node: Any) -> Built:
    scope, *numbers = node.args
    if str(scope.value) not in ("shared", "shared.dyn") or len(numbers) not in (0, 2):
        raise UnsupportedError(f"barrier {node}")
    values = [compiler.uniform(n, "an argument of sync_threads") for n in numbers]

    def run(f: Frame) -> Iterator[Wait | None]:
        number, count = (v(f) for v in values) if values else (CTA_BARRIER, f.cta.threads)
        barrier = f.cta.named.setdefault(number, NamedBarrier(f"sync_threads({number})", f.cta.order))
        return sync(barrier, count, f)

    return run, True, True


def _sync_warp(compiler: Expressions, node: Any) -> Built:
    if node.args:
        raise UnsupportedError(f"sync_warp with a mask: {node}")

    def run(f: Frame) -> None:
        intrinsics.full_warps(f, "sync_warp")
        f.cta.order.meet(np.unique(f.active() // WARP))

    return run, False, False


def _fence(compiler: Expressions, node: Any) -> Built:
    def run(f: Frame) -> None:
        """Publish what the fencing warps wrote; a warp of which only some threads fence publishes nothing."""
        lanes = np.bincount(f.active() // WARP, minlength=f.cta.order.warps)
        warps = set(np.flatnonzero(lanes == WARP).tolist())
        for memory in f.cta.memory.values():
            if isinstance(memory, SharedMemory):
                for agent in list(memory.unfenced):
                    if warps.issuperset(f.cta.order.members(agent)):
                        memory.publish(agent)

    return run, False, False


def _pdl_sync(compiler: Expressions, node: Any) -> Built:
    """The grid before is always over; what counts is who knows it."""
    return lambda f: f.cta.synced.update(f.whole_warps("pdl_sync").tolist()), False, True


def _pdl_trigger(compiler: Expressions, node: Any) -> Built:
    """The next grid may start, which a simulation of one grid does not show."""
    return lambda f: None, False, False


def _set_max_nreg(compiler: Expressions, node: Any) -> Built:
    wanted = tuple(compiler.constant(n, "argument of set_max_nreg") for n in node.args)

    def run(f: Frame) -> None:
        for warp in f.whole_warps("set_max_nreg"):
            f.cta.registers[warp].append(wanted)

    return run, False, True


def _arrive_with_copies(compiler: Expressions, node: Any) -> Built:
    barrier = _barrier(compiler, node.args[0])
    return lambda f: words.arrive_with_copies(f, barrier(f)), False, True


def _store_wide(width: int) -> Callable[[Expressions, Any], Built]:
    return lambda compiler, node: (intrinsics.store_wide(compiler, node, width), False, False)


def build(compiler: Expressions, node: Any) -> Built | None:
    """The operation of a call; None for one that is not here."""
    name = str(node.op.name)
    if name not in _BUILDERS:
        return None
    if name not in _WITH_OPTIONS:
        _options(node, {})
    return _BUILDERS[name](compiler, node)


_WITH_OPTIONS = {"tl.tileop.wgmma_gemm", "tl.tileop.tcgen05_gemm", "tl.tileop.tma_copy"}
_BUILDERS: dict[str, Callable[[Expressions, Any], Built]] = {
    "tl.tileop.copy": _copy,
    "tl.tileop.fill": _fill,
    "tl.tileop.reduce": _reduce,
    "tl.tileop.wgmma_gemm": _wgmma,
    "tl.wait_wgmma": _wait_wgmma,
    "tl.tileop.tcgen05_gemm": _tcgen05,
    "tl.tcgen05_mma_arrive": _tcgen05_arrive,
    "tl.tcgen05_before_thread_sync": _tcgen05_fence,
    "tl.tcgen05_after_thread_sync": _tcgen05_fence,
    "tl.tileop.tma_copy": _tma_copy,
    "tl.tma_store_wait": _tma_store_wait,
    "tirx.ptx_arrive_barrier": _arrive,
    "tl.mbarrier_wait_parity": _wait_parity,
    "tirx.tvm_storage_sync": _storage_sync,
    "tl.sync_warp": _sync_warp,
    "tl.fence_proxy_async": _fence,
    "tl.set_max_nreg": _set_max_nreg,
    "tl.stg32": _store_wide(4),
    "tl.ptx_cp_async": lambda compiler, node: (words.copy(compiler, node), False, False),
    "tl.ptx_cp_async_barrier_noinc": _arrive_with_copies,
    "tl.sts128": lambda compiler, node: (words.store_shared(compiler, node), False, False),
    "tl.stg64": _store_wide(8),
    "tl.stg128": _store_wide(16),
    "tl.pdl_sync": _pdl_sync,
    "tl.pdl_trigger": _pdl_trigger,
}
