"""The roles and pipelines of the SM100 attention kernel, run lane by lane on small tiles: no such GPU is at hand.

The kernel's own source runs, with stand-ins for layouts, copies and products: warps of 8 lanes, tiles of 32 rows,
blocks of 8 keys of 8 elements. What the stand-ins leave out (layouts, descriptors, fences) is for other tests and the
audit.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from warps import Arch, Array, Deadlock, Machine, Pointer, changed, load, motions, tables

from msa_tiles.dsl.table import Table, lane, warps
from msa_tiles.paths import generated_dir
from msa_tiles.sources import PACKAGE

KERNEL = generated_dir() / "cutedsl/sm100/sparse_attention_bf16.py"
SOFTMAX = PACKAGE / "dsl/cutedsl/row_softmax.py"
LANES, ROWS, KEYS, DIM, PIECE = 8, 32, 8, 8, 4
GROUP, PER_TOKEN = 3, 4  # heads of a token, and the rows it takes
TOKENS = ROWS // PER_TOKEN
HEADS, WINDOW, TOPK, SCALE = 2, 32, 4, 0.3
POISON = 10**6


class Chip(Machine, Arch):
    """A machine whose reads and writes of tensor memory take place at the wait for them."""

    def __init__(self, seed: int) -> None:
        Machine.__init__(self, warps=16, lanes=LANES, seed=seed)
        self.machine = self
        self.tensor_memory = np.full((ROWS, 512, 2), np.nan)
        self.allocated: list[Any] = []

    def remember(self, action: Any) -> None:
        self.local.__dict__.setdefault("pending", []).append(action)

    def settle(self) -> None:
        while pending := self.local.__dict__.setdefault("pending", []):
            pending.pop(0)()

    fence_view_async_tmem_load = fence_view_async_tmem_store = settle

    def retrieve_tmem_ptr(self, *_arguments: Any) -> Pointer:
        return Pointer(self.tensor_memory)


class Memory:
    """Every lane gets the same things in the same order."""

    def __init__(self, chip: Chip) -> None:
        self.chip, self.count = chip, 0

    def _next(self, make: Any) -> Any:
        if self.count == len(self.chip.allocated):
            self.chip.allocated.append(make())
        self.count += 1
        return self.chip.allocated[self.count - 1]

    def allocate_tensor(self, _element: Any, shape: Any, _alignment: int, _swizzle: Any = None) -> Array:
        fill = np.nan if len(shape) == 4 else POISON
        return self._next(lambda: Array(np.full(shape, fill, dtype=float if len(shape) == 4 else int)))

    def allocate_array(self, _element: Any, _count: int) -> Pointer:
        return self._next(lambda: Pointer("barriers or an address"))


class Slices:
    """Boxes or operands, of which the kernel selects one by its last indices."""

    def __init__(self, array: Array, kept: int) -> None:
        self.array, self.kept = array, kept

    def __getitem__(self, index: Any) -> Any:
        return self.array, *index[-self.kept :]


class Rows:
    """Queries, and partial results on their way back."""

    rows_per_token, tokens, token_bytes = PER_TOKEN, TOKENS, GROUP * DIM * 2

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def boxes(self, tiles: Array, _count: int) -> Slices:
        return Slices(tiles, 2)

    def load(self, _atom: Any, source: Array, token: int, head: int, target: Any, full: Pointer) -> None:
        tiles, number, slot = target

        def arrive() -> None:
            place = tiles.values[0, number * PER_TOKEN :][:GROUP, :, slot]
            place[...] = source.values[token, head * GROUP :][:GROUP]
            self.chip.barriers[full.place].receive(self.token_bytes)

        if self.chip.elected():
            self.chip.later(object(), arrive)

    def stage(self, values: Array, tile: Pointer, row: int, first_column: int) -> None:
        tile.of.values[0, row, first_column : first_column + len(values.values), 0] = values.values

    def store(self, _atom: Any, source: Any, target: Array, partial: int, head: int) -> None:
        tiles, number, slot = source

        def leave() -> None:
            target.values[partial, head * GROUP :][:GROUP] = tiles.values[0, number * PER_TOKEN :][:GROUP, :, slot]

        if self.chip.lane == 0:
            self.chip.later(("stores", self.chip.warp), leave)


class Blocks:
    """Keys and values."""

    box_rows, pages_per_block = KEYS, 0

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def pages(self, _table: Any, _row: int) -> list[int]:
        return []

    def load(self, _atom: Any, source: Array, row: int, _pages: Any, head: int, target: Any, full: Pointer) -> None:
        tiles, slot = target

        def arrive() -> None:
            tiles.values[0, :, :, slot] = source.values[row : row + KEYS, head]
            self.chip.barriers[full.place].receive(KEYS * DIM * 2)

        if self.chip.elected():
            self.chip.mbarrier_arrive_and_expect_tx(full, KEYS * DIM * 2)
            self.chip.later(object(), arrive)

    def clear_rows(self, block: Array, first: int, thread: int, threads: int) -> None:
        for row in range(first + thread, KEYS, threads):
            block.values[0, row] = 0.0


class Multiplication:
    """A product's operands are what they are made of."""

    def make_fragment_A(self, operand: Any) -> Any:
        return operand

    make_fragment_B = make_fragment_A


class Products(NamedTuple):
    first: Any
    columns: int


class Tensors:
    """What the kernel calls `tcgen05`."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def product(self, _element: Any, columns: int, _major: Any, _source: Any) -> Products:
        return Products(Multiplication(), columns)

    def left_layout(self, _products: Any, _element: Any, depth: int, count: int) -> Any:
        return types.SimpleNamespace(outer=(1, ROWS, depth, count), inner=None)

    def right_layout(self, _products: Any, _element: Any, _major: Any, rows: int, depth: int, count: int) -> Any:
        return types.SimpleNamespace(outer=(1, rows, depth, count), inner=None)

    def accumulator(self, _products: Any, columns: int, memory: Pointer) -> Any:
        return memory.of[:, memory.place : memory.place + columns, 0]

    def left_operand(self, _products: Any, _element: Any, depth: int, memory: Pointer) -> Any:
        return memory.of[:, memory.place : memory.place + depth // 2]

    def multiply(self, _products: Any, into: Any, left: Any, right: Array) -> None:
        def finish() -> None:
            if isinstance(left, Array):
                into[...] = left.values[0] @ right.values[0].T
            else:
                into[...] = left.reshape(ROWS, KEYS) @ right.values[0]

        if self.chip.elected():
            self.chip.later(("products", self.chip.warp), finish)

    def read(self, memory: Pointer, thread: int, values: Array) -> None:
        self.chip.sync_warp()
        values.values[...] = np.nan

        def finish() -> None:
            values.values[...] = memory.of[thread, memory.place : memory.place + len(values.values), 0]

        self.chip.remember(finish)

    def write(self, values: Array, memory: Pointer, thread: int) -> None:
        self.chip.sync_warp()
        pairs = values.values.reshape(-1, 2).copy()
        memory.of[thread, memory.place : memory.place + len(pairs)] = np.nan

        def finish() -> None:
            memory.of[thread, memory.place : memory.place + len(pairs)] = pairs

        self.chip.remember(finish)


def device_code(chip: Chip, source: str | None = None) -> dict[str, Any]:
    """The kernel's module, and the softmax it imports, over stand-ins."""

    def plain(function: Any) -> Any:
        return function

    cutlass = types.SimpleNamespace(
        range=lambda *bounds, unroll=0: range(*bounds), range_constexpr=range, const_expr=bool, min=min, max=max
    )
    cute = types.SimpleNamespace(
        arch=chip,
        jit=plain,
        kernel=plain,
        math=types.SimpleNamespace(exp2=lambda value, fastmath: 2.0**value),
        size=lambda tensor: tensor.values.size,
        make_layout=lambda shape, stride=None: shape if isinstance(shape, tuple) else (shape,),
        make_tensor=lambda place, _layout: place.of,
        make_rmem_tensor=lambda shape, _element: Array(np.full(shape, np.nan)),
    )
    float32 = type("Float32", (float,), {"inf": math.inf})
    names = {"cutlass": cutlass, "cute": cute, "Float32": float32, "Int32": int, "Int64": int}
    names["pick_float"] = lambda condition, value, other: value if condition else other
    names |= load(SOFTMAX, **names)
    softmax = types.SimpleNamespace(
        log_sum=lambda largest, total, scale: (largest * scale + math.log2(total)) * math.log(2)
    )

    def commit(barrier: Pointer) -> None:
        chip.later(("products", chip.warp), chip.barriers[barrier.place].arrive)

    names |= {
        "Any": Any,
        "NamedTuple": NamedTuple,
        "OperandMajorMode": types.SimpleNamespace(K=0, MN=1),
        "OperandSource": types.SimpleNamespace(SMEM=0, TMEM=1),
        "cpasync": types.SimpleNamespace(prefetch_descriptor=lambda _atom: None),
        "commit": commit,
        "softmax": softmax,
        "tcgen05": Tensors(chip),
        "tma": types.SimpleNamespace(boxes=lambda tiles, *_shape: Slices(tiles, 1)),
        "SmemAllocator": lambda: Memory(chip),
        "ATOM": PER_TOKEN,
        **tables(chip),
        "fence_after_sync": lambda: None,
        "fence_before_sync": lambda: None,
        "ELEMENTS": {"bfloat16": None},
        "COLUMNS": PIECE,
        "ROWS": ROWS,
    }
    module = load(KERNEL, source=source, **names, **motions(**names))
    module.update(WARP=LANES)
    return module


class Problem(NamedTuple):
    """A window's schedule with blocks of every kind, and its tensors."""

    q: Array
    k: Array
    v: Array
    edges: Array
    tasks: Array
    counts: Array


def problem(seed: int) -> Problem:
    generator = np.random.default_rng(seed)
    blocks, length = 6, 6 * KEYS - 3
    q = generator.standard_normal((2 * WINDOW, HEADS * GROUP, DIM))
    keys = [generator.standard_normal((blocks * KEYS, HEADS, DIM)) for _ in range(2)]
    for tensor in keys:
        # Past the request's end, where nobody may look.
        tensor[length:] = np.nan
    edges = np.full((2, HEADS, WINDOW * TOPK), -POISON)
    tasks = np.full((2, HEADS, 40, 4), -POISON)
    counts = np.zeros((2, HEADS), dtype=int)
    for head in range(HEADS):
        slots = [0] * WINDOW
        at = 0
        # A long block, short ones, and one that ends inside.
        for block, wanted in ((0, 19), (5, 11), (2, 1), (3, 8), (5, 2), (1, 9), (4, 1)):
            queries = [token for token in generator.permutation(WINDOW) if slots[token] < TOPK][:wanted]
            valid = min(KEYS, length - block * KEYS)
            rooms = [int(generator.integers(0, valid)) if block % 2 else valid - 1 for _ in queries]
            for token, room in zip(queries, rooms, strict=True):
                edges[1, head, at] = int(token) << 13 | slots[token] << 7 | room
                slots[token] += 1
                at += 1
            cut = int(any(room + 1 < KEYS for room in rooms))
            first = at - len(queries)
            tasks[1, head, counts[1, head]] = (block * KEYS, first, len(queries), valid << 1 | cut)
            counts[1, head] += 1
    return Problem(*(Array(tensor) for tensor in (q, *keys, edges, tasks, counts)))


def wanted(given: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The partial results of every edge of the second window; NaN where there is no edge."""
    out = np.full((WINDOW * TOPK, HEADS * GROUP, DIM), np.nan)
    lse = np.full((WINDOW, TOPK, HEADS * GROUP), np.nan)
    for head in range(HEADS):
        for row, first, num, _ in given.tasks.values[1, head, : given.counts.values[1, head]]:
            for edge in given.edges.values[1, head, first : first + num]:
                token, slot, visible = edge >> 13, edge >> 7 & 63, (edge & 127) + 1
                k, v = (tensor.values[row : row + visible, head] for tensor in (given.k, given.v))
                heads = slice(head * GROUP, (head + 1) * GROUP)
                weights = np.exp2(given.q.values[WINDOW + token, heads] @ k.T * SCALE)
                out[token * TOPK + slot, heads] = weights @ v / weights.sum(1, keepdims=True)
                lse[token, slot, heads] = np.log(weights.sum(1))
    return out, lse


def attend(
    given: Problem, seed: int, source: str | None, change: Callable[[Table], Table], sizes: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Two thread blocks one after another: the second finds nothing left."""
    out = Array(np.full((WINDOW * TOPK, HEADS * GROUP, DIM), np.nan))
    lse = Array(np.full((WINDOW, TOPK, HEADS * GROUP), np.nan))
    claims = Array(np.zeros(2, dtype=int))
    for _ in range(2):
        chip = Chip(seed)
        module = device_code(chip, source)
        module.update(sizes)
        kernel = object.__new__(module["SparseAttention"])
        vars(kernel).update(
            cta=change(module["cta"](DIM, KEYS, GROUP, 0)),
            element=None,
            head_dim=DIM,
            block_size=KEYS,
            group=GROUP,
            queries=TOKENS,
            rows=Rows(chip),
            blocks=Blocks(chip),
        )
        arguments = (
            None, given.q, None, given.k, None, given.v, None, out, None, given.edges, given.tasks, given.counts,
            claims, lse, SCALE, 1, WINDOW,
        )  # fmt: skip
        chip.run(lambda kernel=kernel, arguments=arguments: kernel.kernel(*arguments))
    assert claims.values.tolist() == [0, given.counts.values.sum() + 2]
    return out.values, lse.values


def check(
    seed: int,
    source: str | None = None,
    change: Callable[[Table], Table] = lambda table: table,
    **sizes: int,
) -> None:
    given = problem(seed)
    for found, right in zip(attend(given, seed, source, change, sizes), wanted(given), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sizes", [{}, {"BLOCKS": 2, "AHEAD": 1}, {"STAGES": 2, "BLOCKS": 4, "RECORDS": 4, "AHEAD": 9}])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.drawn(1)
def test_every_edge_gets_its_partial_result(seed: int, sizes: dict[str, int]) -> None:
    check(seed, **sizes)


WAIT = "cute.arch.mbarrier_wait(shared."
# What each fault replaces, and by what.
FAULTS = {
    "queries are overwritten while they are read": (f"{WAIT}q_free + slot, phase)", "pass"),
    "queries are read before they came": (f"{WAIT}q_full + slot, phase)", "pass"),
    "scores are overwritten while they are read": (f"{WAIT}s_free + place, free_phase)", "pass"),
    "scores are given back too early": (
        "fence_before_sync()\n                arrive(shared.s_free",
        "cute.arch.mbarrier_arrive(shared.s_free",
    ),
    "probabilities are overwritten while they are read": (f"{WAIT}p_free + place, phase ^ 1)", "pass"),
    "probabilities are read before they are written": ("cute.arch.fence_view_async_tmem_store()", "pass"),
    "an output is overwritten while it is read": (f"{WAIT}o_free, free_phase)", "pass"),
    "staged rows are overwritten while they leave": (
        "cute.arch.cp_async_bulk_wait_group(0, read=True)\n                cute.arch.sync_warp()",
        "cute.arch.sync_warp()",
    ),
    "rows past the end are multiplied": ("if valid < self.block_size:", "if valid < 0:"),
    "keys and values are given back with the first tile": (
        "if (flags & LAST) != 0:\n                        commit(shared.block_free",
        "if (flags & FIRST) != 0:\n                        commit(shared.block_free",
    ),
    "one softmax never sees the end": (
        f"for _ in cutlass.range_constexpr(SOFTMAXES):\n            {WAIT}record_free",
        f"for _ in cutlass.range_constexpr(1):\n            {WAIT}record_free",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_shows(fault: str) -> None:
    right, wrong = FAULTS[fault]
    text = KERNEL.read_text()
    assert right in text
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(4):
            check(seed, text.replace(right, wrong))


# A pipeline whose table says something else than the roles do.
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "a record is overwritten while it is read": (
        "record",
        {"free": (lane("scorer"), lane("weigher"), warps("epilogue"))},
    ),
    "all softmax warps read every tile": ("s", {"free": (warps("softmax_even"), warps("softmax_odd"))}),
    "both products read the queries": ("q", {"free": (lane("scorer"), lane("weigher"))}),
}


@pytest.mark.parametrize("fault", TABLES)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(fault: str) -> None:
    name, changes = TABLES[fault]
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(4):
            check(seed, change=lambda table: changed(table, name, **changes))


@pytest.mark.slow
def test_keys_that_are_not_there_are_told_from_others() -> None:
    """With an odd number of blocks a place holds keys and values in turn, and phases two apart look alike."""
    text = KERNEL.read_text()
    right = f"{WAIT}block_full + values, values_phase)"
    assert right in text
    # Seeds whose values come late.
    seeds = (102, 114, 116)
    for seed in seeds:
        check(seed)
    with pytest.raises((AssertionError, Deadlock)):
        for seed in seeds:
            check(seed, text.replace(right, "pass"))
