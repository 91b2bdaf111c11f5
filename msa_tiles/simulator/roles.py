"""Which threads become a coroutine of their own.

Warps on a GPU run apart. A kernel without tile operations runs warp by warp; one with them runs in the largest sets of
warps that no branch on the thread number divides, since a tile operation belongs to all threads of its branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from msa_tiles.simulator.frame import WARP
from msa_tiles.simulator.program import kind_of

_TILE_OPERATIONS = ("tl.tileop.", "tl.wait_wgmma", "tl.set_max_nreg")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
}


def partition(body: Any, threads: int) -> list[np.ndarray]:
    """The thread numbers of each role, in order."""
    from tilelang import tvm

    tid = np.arange(threads, dtype=np.int32)
    known: dict[Any, Any] = {}
    masks: list[np.ndarray] = []
    tiles = False

    def visit(node: Any) -> None:
        nonlocal tiles
        kind = kind_of(node)
        tiles = tiles or kind.startswith(_TILE_OPERATIONS) or (kind == "For" and int(node.kind) == 1)
        if kind == "Bind":
            value = _of_thread(node.value, known, tid)
            if value is not None:
                known[node.var] = value
        elif kind == "IfThenElse":
            pending.append(node.condition)

    pending: list[Any] = []
    # Bindings come before the branches that use them, but a post-order visit meets conditions in between.
    tvm.tirx.stmt_functor.post_order_visit(body, visit)
    if not tiles:
        return list(tid.reshape(-1, WARP))
    for condition in pending:
        mask = _of_thread(condition, known, tid)
        if mask is not None and np.ndim(mask):
            warps = np.asarray(mask, bool).reshape(-1, WARP)
            if (warps == warps[:, :1]).all():
                masks.append(warps[:, 0])
    kinds = np.stack([*masks, np.zeros(threads // WARP, bool)], 1)
    _, label = np.unique(kinds, axis=0, return_inverse=True)
    return [tid.reshape(-1, WARP)[label == n].reshape(-1) for n in range(int(label.max()) + 1)]


def _of_thread(node: Any, known: dict[Any, Any], tid: np.ndarray) -> Any:
    """The value of an expression of the thread number and literals alone; None for any other."""
    kind = kind_of(node)
    if kind == "IntImm":
        return int(node.value)
    if kind == "Var":
        return known.get(node)
    if kind == "tl.launch_thread_idx":
        return tid if int(node.args[0]) == 0 else 0
    if kind not in _ARITHMETIC:
        return None
    a, b = _of_thread(node.a, known, tid), _of_thread(node.b, known, tid)
    return None if a is None or b is None else _ARITHMETIC[kind](a, b)
