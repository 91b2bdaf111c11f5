"""The roles and pipelines of the SM90 attention backward in CuTe DSL, run lane by lane on small tiles.

The kernel's own source runs, with stand-ins for layouts, copies and products: warps of 16 lanes, tiles of 32 query
rows, blocks of 32 or 64 keys of 32 or 64 elements. What the stand-ins leave out (layouts, descriptors, fences) is for
other tests and the audit.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from warpgroups import POISON, Blocks, Boxes, Chip, Fragment, Memory, Multiplications, Operand, Pair, Pairs, Writing
from warps import Array, Deadlock, Pointer, changed, load, motions, tables

from msa_tiles.dsl.table import Table, lane, warps
from msa_tiles.paths import generated_dir
from msa_tiles.sources import PACKAGE

KERNEL = generated_dir() / "cutedsl/sm90/sparse_attention_backward_bf16.py"
HELPERS = PACKAGE / "dsl/cutedsl/gradients.py"
LANES, WARPS, TILE = 16, 4, 32  # rows and keys of a tile, and columns of a panel
WARP_ROWS = TILE // WARPS
GROUP, PER_TOKEN = 3, 8  # heads of a token, and the rows it takes
TOKENS = TILE // PER_TOKEN
HEADS, WINDOW, TOPK, SCALE, SCALE_LOG2 = 2, 16, 4, 0.7, 0.3


class Rows:
    """Gathered queries and gradients, and partial results on their way back."""

    rows_per_token, tokens = PER_TOKEN, TOKENS

    def __init__(self, chip: Chip, head_dim: int) -> None:
        self.chip, self.head_dim = chip, head_dim
        self.token_bytes = GROUP * head_dim * 2

    def tiles_layout(self, count: int) -> Any:
        return types.SimpleNamespace(outer=(TILE, self.head_dim, count), inner=None)

    def boxes(self, array: Array, _count: int) -> Any:
        return Boxes(array)

    def load(self, _atom: Any, source: Array, token: int, head: int, target: Any, full: Pointer) -> None:
        array, number, slot = target

        def arrive() -> None:
            place = array.values[number * PER_TOKEN :][:GROUP, :, slot]
            place[...] = source.values[token, head * GROUP :][:GROUP]
            self.chip.barriers[full.place].receive(self.token_bytes)

        if self.chip.elected():
            self.chip.later(object(), arrive)


class Panels(Rows):
    def tiles_layout(self, count: int) -> Any:
        return types.SimpleNamespace(outer=(TILE, TILE, count), inner=None)

    def store_panel(self, _atom: Any, source: Any, target: Array, slot: int, head: int, panel: int) -> None:
        array, number, tile = source

        def leave() -> None:
            place = target.values[slot, head * GROUP :][:GROUP, panel * TILE :]
            place[:, :TILE] = array.values[number * PER_TOKEN :][:GROUP, :, tile]

        if self.chip.lane == 0:
            self.chip.later(("stores", self.chip.warp), leave)


def device_code(chip: Chip, block_size: int, source: str | None = None) -> dict[str, Any]:
    """The kernel's module, and the helpers it imports, over stand-ins."""
    consumers = block_size // TILE

    def plain(function: Any) -> Any:
        return function

    def local_tile(tensor: Any, shape: tuple[int, int], _place: Any) -> Operand:
        if isinstance(tensor, Operand):  # [columns, keys], by panel
            return Operand(lambda panel: tensor.read()[panel * shape[0] :][: shape[0]])
        return Operand(lambda tile: tensor.values[tile * shape[0] :][: shape[0]])

    def make_rmem_tensor(shape: Any, _element: Any) -> Array:
        if isinstance(shape, tuple) and shape[0] == "operand":
            return chip.fragment(shape[1])
        return Fragment(np.full(shape, np.nan)) if len(shape) == 3 else Array(np.full(shape, np.nan))

    def make_tensor(place: Pointer, _layout: Any) -> Any:
        return Array(place.of.values.reshape(-1)) if isinstance(_layout, int) else place.of

    def transposed(tensor: Array, *_shape: int, panels_apart: bool = False) -> Operand:
        if tensor.values.shape[1:] == (TILE, 3 * consumers):  # dS: the keys of all consumers
            return Operand(
                lambda tile: (
                    np.concatenate(
                        [tensor.values[:, :, tile * consumers + consumer] for consumer in range(consumers)]
                    ).T
                )
            )
        return Operand(lambda tile: tensor.values[:, :, tile].T)

    cutlass = types.SimpleNamespace(
        range=lambda *bounds, unroll=0: range(*bounds), range_constexpr=range, const_expr=bool, min=min, max=max,
        Constexpr=None,
        BFloat16=None,
        Float16=None,
    )  # fmt: skip
    cute = types.SimpleNamespace(
        arch=chip,
        jit=plain,
        kernel=plain,
        math=types.SimpleNamespace(exp2=lambda value, fastmath: 2.0**value),
        size=lambda tensor: tensor.values.size,
        make_layout=lambda shape, stride=None: shape,
        make_tensor=make_tensor,
        make_rmem_tensor=make_rmem_tensor,
        recast_tensor=lambda fragment, _type: Pairs(fragment),
        recast_ptr=lambda place, dtype: place,
        make_copy_atom=lambda *_arguments: None,
        make_tiled_copy_C=lambda _atom, _mma: types.SimpleNamespace(get_slice=lambda thread: Writing(chip, thread)),
        copy=lambda writing, fragment, target: writing.copy(fragment, target),
        autovec_copy=lambda left, right: np.copyto(right.values, left.values),
        local_tile=local_tile,
        domain_offset=lambda place, tensor: Array(tensor.values[place[0] :]),
    )
    float32 = type("Float32", (float,), {"inf": math.inf})
    names = {"cutlass": cutlass, "cute": cute, "Float32": float32, "Int32": int, "Int64": float, "Any": Any}
    helpers = load(
        HELPERS, **names, Rows=Rows, ATOM=8, pick_float=lambda condition, value, other: value if condition else other
    )
    helpers |= {"HALF": LANES // 4, "round_pair": Pair, "transposed": transposed}

    def pairs(sums: Array, key: int) -> Array:
        return Array(sums.values[key].reshape(-1, 4, 2)[:, chip.lane % 4].T)

    helpers["pairs"] = pairs
    multiplications = Multiplications(chip)
    names |= {
        "NamedTuple": NamedTuple,
        "OperandMajorMode": types.SimpleNamespace(K=0, MN=1),
        "LayoutEnum": types.SimpleNamespace(ROW_MAJOR=0),
        "cpasync": types.SimpleNamespace(prefetch_descriptor=lambda _atom: None),
        "gradients": types.SimpleNamespace(
            **{name: helpers[name] for name in ("probabilities", "score_gradients", "load_sums", "store_sums")},
            transposed=transposed,
            transposed_product=lambda element, columns: multiplications.product(element, columns, 1, 0),
        ),
        "hopper": types.SimpleNamespace(
            make_smem_layout_b=lambda _major, tiler, _element, count: types.SimpleNamespace(
                outer=(*tiler[1:], count), inner=None
            )
        ),
        "tma": types.SimpleNamespace(PANEL=TILE),
        "warp": types.SimpleNamespace(StMatrix8x8x16bOp=lambda *_arguments: None),
        "warpgroup": types.SimpleNamespace(
            wait_group=multiplications.wait_group, OperandSource=types.SimpleNamespace(SMEM=0, RMEM=1)
        ),
        "wgmma": multiplications,
        "SmemAllocator": lambda: Memory(chip),
        "ATOM": 8,
        **tables(chip),
        "ELEMENTS": {"bfloat16": None},
        "ROWS": TILE,
    }
    module = load(KERNEL, source=source, **names, **motions(**names))
    module.update(GROUP=WARPS * LANES, WARP=LANES, WARP_ROWS=WARP_ROWS, KEYS=TILE)
    return module


class Problem(NamedTuple):
    """A window's schedule with tasks of every kind, and its tensors."""

    q: Array
    dout: Array
    k: Array
    v: Array
    rows: Array
    edges: Array
    tasks: Array
    counts: Array
    sums: Array


# (block, edges, further). Two further tasks of the first block, short ones, and a block that ends inside; and fewer.
TASKS = ((0, 11, 0), (0, 4, 1), (0, 1, 1), (2, 1, 0), (3, 8, 0), (1, 5, 0))
FEW = ((0, 11, 0), (0, 5, 1), (3, 8, 0))


def problem(seed: int, block_size: int, head_dim: int, wanted_tasks: tuple[tuple[int, int, int], ...]) -> Problem:
    generator = np.random.default_rng(seed)
    blocks, length = 4, 4 * block_size - 5
    q, dout = (generator.standard_normal((2 * WINDOW, HEADS * GROUP, head_dim)) for _ in range(2))
    keys = [generator.standard_normal((blocks * block_size, HEADS, head_dim)) for _ in range(2)]
    for tensor in keys:
        # Past the request's end, where nobody may look.
        tensor[length:] = np.nan
    rows = generator.standard_normal((2 * WINDOW, HEADS * GROUP, 2))
    edges = np.full((2, HEADS, WINDOW * TOPK), -POISON)
    tasks = np.full((2, HEADS, 20, 5), -POISON)
    counts = np.zeros((2, HEADS), dtype=int)
    sums = generator.standard_normal((2, HEADS, (blocks + 3) * block_size, head_dim))
    for head in range(HEADS):
        slots = [0] * WINDOW
        at = 0
        behind = blocks * block_size
        for block, wanted, further in wanted_tasks:
            queries = [token for token in generator.permutation(WINDOW) if slots[token] < TOPK][:wanted]
            valid = min(block_size, length - block * block_size)
            rooms = [int(generator.integers(0, valid)) if block % 2 else valid - 1 for _ in queries]
            for token, room in zip(queries, rooms, strict=True):
                edges[1, head, at] = int(token) << 13 | slots[token] << 7 | room
                slots[token] += 1
                at += 1
            cut = int(any(room + 1 < block_size for room in rooms))
            row = block * block_size
            place = behind if further else row
            behind += further * block_size
            tasks[1, head, counts[1, head]] = (row, at - len(queries), len(queries), valid << 1 | cut, place)
            counts[1, head] += 1
    return Problem(*(Array(tensor) for tensor in (q, dout, *keys, rows, edges, tasks, counts, sums)))


class Results(NamedTuple):
    partial_dq: np.ndarray
    marks: np.ndarray
    sums: np.ndarray


def nothing_yet(given: Problem) -> Results:
    shape = (WINDOW * TOPK, *given.q.values.shape[1:])
    return Results(np.full(shape, np.nan), np.zeros((WINDOW, HEADS, TOPK), dtype=int), given.sums.values.copy())


def wanted(given: Problem, block_size: int) -> Results:
    """dQ of every edge of the second window, NaN where there is none, their marks, and the sums of every task."""
    dq, marks, sums = nothing_yet(given)
    for head in range(HEADS):
        heads = slice(head * GROUP, (head + 1) * GROUP)
        for row, first, num, extent, place in given.tasks.values[1, head, : given.counts.values[1, head]]:
            valid = extent >> 1
            if place != row:
                sums[:, head, place : place + valid] = 0
            for edge in given.edges.values[1, head, first : first + num]:
                token, slot, visible = edge >> 13, edge >> 7 & 63, (edge & 127) + 1
                k, v = (tensor.values[row : row + visible, head] for tensor in (given.k, given.v))
                q, dout, (lse, delta) = (
                    given.q.values[WINDOW + token, heads],
                    given.dout.values[WINDOW + token, heads],
                    given.rows.values[WINDOW + token, heads].T[..., None],
                )
                weights = np.exp2(q @ k.T * SCALE_LOG2 - lse)
                gains = weights * (dout @ v.T - delta)
                dq[token * TOPK + slot, heads] = gains @ k * SCALE
                marks[token, head, slot] = 2
                sums[0, head, place : place + visible] += gains.T @ q
                sums[1, head, place : place + visible] += weights.T @ dout
    return Results(dq, marks, sums)


def differentiate(
    given: Problem,
    seed: int,
    block_size: int,
    head_dim: int,
    source: str | None,
    sizes: dict[str, int],
    change: Callable[[Table], Table] = lambda table: table,
) -> Results:
    """Two thread blocks one after another: the second finds nothing left. `change` makes another table of it."""
    dq, marks, sums = (Array(tensor) for tensor in nothing_yet(given))
    claims = Array(np.zeros(2, dtype=int))
    consumers, panels = block_size // TILE, head_dim // TILE
    for _ in range(2):
        chip = Chip(consumers + 1, WARPS, LANES, seed)
        module = device_code(chip, block_size, source)
        module.update(sizes)
        kernel = object.__new__(module["SparseAttentionBackward"])
        vars(kernel).update(
            cta=change(module["cta"](head_dim, block_size, GROUP)),
            element=types.SimpleNamespace(width=64),
            head_dim=head_dim,
            block_size=block_size,
            group=GROUP,
            consumers=consumers,
            queries=TOKENS,
            rows=Rows(chip, head_dim),
            partials=Panels(chip, head_dim),
            blocks=Blocks(chip, block_size, head_dim),
            in_turns=consumers > panels,
            parts=max(panels // consumers, 1),
        )
        arguments = (
            None, given.q, None, given.dout, None, given.k, None, given.v, None, dq, given.rows, given.edges,
            given.tasks, given.counts, claims, marks, sums, SCALE, SCALE_LOG2, 1, WINDOW,
        )  # fmt: skip
        chip.run(lambda kernel=kernel, arguments=arguments: kernel.kernel(*arguments))
    assert claims.values.tolist() == [0, given.counts.values.sum() + 2]
    return Results(dq.values, marks.values, sums.values)


def check(
    seed: int,
    block_size: int,
    head_dim: int,
    source: str | None = None,
    tasks: tuple[tuple[int, int, int], ...] = TASKS,
    change: Callable[[Table], Table] = lambda table: table,
    **sizes: int,
) -> None:
    given = problem(seed, block_size, head_dim, tasks)
    found = differentiate(given, seed, block_size, head_dim, source, sizes, change)
    for got, right in zip(found, wanted(given, block_size), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "stages"),
    [
        *(pytest.param(64, 64, stages, marks=pytest.mark.slow) for stages in (3, 2)),
        pytest.param(64, 32, 2, marks=pytest.mark.slow),
        pytest.param(32, 64, 3, marks=pytest.mark.slow),
        (32, 32, 2),
    ],
)
@pytest.mark.drawn(1)
def test_every_edge_and_key_gets_its_gradient(block_size: int, head_dim: int, stages: int) -> None:
    check(block_size + head_dim, block_size, head_dim, STAGES=stages)


@pytest.mark.slow
def test_what_faults_are_shown_on_is_right_without_one() -> None:
    check(0, 64, 64, tasks=FEW)


WAIT = "cute.arch.mbarrier_wait(shared."
# What each fault replaces, and by what.
FAULTS = {
    "a tile is overwritten while it is read": (f"{WAIT}ring_free + slot, phase)\n                    full", "full"),
    "a tile is read before it came": (f"{WAIT}ring_full + slot, phase)", "pass"),
    "a tile is given back before dK is made": (
        "warpgroup.wait_group(0)\n        arrive(shared.ring_free",
        "arrive(shared.ring_free",
    ),
    "keys are overwritten while they are read": (f"{WAIT}k_free, parity ^ 1)", "pass"),
    "keys are read before they came": (f"{WAIT}k_full, parity)", "pass"),
    "dS of another consumer is read before it is written": (
        f"{WAIT}scores_full + buffer, (number >> 1) & 1)",
        "pass",
    ),
    "dS is overwritten while it is read": (
        "warpgroup.wait_group(1)\n        if cutlass.const_expr(self.parts == 1):\n            arrive",
        "arrive(shared.scores_full + buffer)\n        if cutlass.const_expr(self.parts == 1):\n            id",
    ),
    "products are read before they are made": (
        "wait_group(1)\n        gradients.score_gradients",
        "wait_group(2)\n        gradients.score_gradients",
    ),
    "staged rows are overwritten while they leave": ("cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),
    "rows past the end are multiplied": ("if valid_rows_of(extent) < self.block_size:", "if extent < 0:"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.planted
def test_a_fault_shows(fault: str) -> None:
    right, wrong = FAULTS[fault]
    text = KERNEL.read_text()
    assert right in text
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(6):
            check(seed, 64, 64, text.replace(right, wrong), FEW)


GATHERED = (lane("q_gatherer"), lane("do_gatherer"), lane("copier"))
# A pipeline whose table says something else than the roles do.
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "an arrival too many": ("scores", {"full": (warps("consumer"), lane("claimer"))}),
    "nobody copies": ("ring", {"full": (lane("q_gatherer"), lane("do_gatherer"))}),
    "one consumer warp is enough": ("k", {"free": (lane("consumer"),)}),
    "as many as there are producers": ("task_gathered", {"full": (lane("claimer"), *GATHERED)}),
}


@pytest.mark.parametrize("fault", TABLES)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(fault: str) -> None:
    name, changes = TABLES[fault]
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(6):
            check(seed, 64, 64, None, FEW, change=lambda table: changed(table, name, **changes))
