"""The roles of index_kl in CuTe DSL at the barriers of its table, lane by lane: see `warps`.

Its claiming, gathering and preparing warps and its consumers run their own source, over stand-ins for copies, products
and arithmetic. A stage holds the number of what was brought last: of a task, of a tile, of a chunk. Products note those
numbers when they complete, and consumers what they store of whom.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import warpgroups
from warps import Anything, Array, Deadlock, Pointer, changed, load, motions, tables

from msa_tiles.dsl.table import Table, lane, warps
from msa_tiles.paths import generated_dir
from msa_tiles.sources import PACKAGE

HELPERS = PACKAGE / "dsl/cutedsl/kl"
LANES, WARPS, EDGES, TILES = 16, 4, 16, 2
TASKS = (25, 9, 48, 16)  # edges; no tile is without one
DIMS = {"head_dim": 64, "index_dim": 64, "block_size": 64, "group": 8, "prefix": 0}
# Chunks, by number: their task, and whether they are its last.
CHUNKS = [task for task, edges in enumerate(TASKS) for _ in range(-(-edges // EDGES))]


class Stage(NamedTuple):
    values: dict[tuple[int, int], int]
    number: int

    def held(self) -> set[int]:
        """What its parts hold."""
        return {value for number, value in self.values.items() if number[0] == self.number}


class Stages:
    """A buffer: the last index is that of the stage. Parts of a stage are numbered (stage, part)."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], int] = {}
        self.iterator = self

    def __getitem__(self, index: tuple[Any, ...]) -> Stage:
        return Stage(self.values, index[-1])

    def __setitem__(self, _index: Any, _value: Any) -> None:
        """What is known of edges does not matter here."""


class Memory(warpgroups.Memory):
    def allocate_tensor(self, element: Any, shape: Any, _alignment: int, _swizzle: Any = None) -> Any:
        return self._next(lambda: Array(np.zeros(shape, dtype=int)) if element is int else Stages())


class Chip(warpgroups.Chip):
    """A CTA with one consumer warpgroup, and what its warps make of tiles and chunks."""

    def __init__(self, seed: int, change: Callable[[Table], Table]) -> None:
        super().__init__(2, WARPS, LANES, seed)
        self.tiles: dict[int, list[set[int]]] = defaultdict(list)
        self.graded: dict[int, list[set[int]]] = defaultdict(list)
        self.stored: dict[int, list[set[int]]] = defaultdict(list)
        self.scores: dict[int, set[int]] = {}
        self.gradients: dict[int, set[int]] = {}
        self.claims = Array(np.zeros(1, dtype=int))
        names = self.names()
        for helper in ("layout", "producers", "tile", "results", "grading", "consumers"):
            found = load(HELPERS / f"{helper}.py", **names)
            found["multiply"] = self.multiply
            names |= found
        module = load(generated_dir() / "cutedsl/sm90/index_kl_bf16.py", **names)
        self.kernel = kernel = object.__new__(module["IndexKl"])
        kernel.cta = change(module["cta"](**DIMS))
        vars(kernel).update(
            element=2, group=8, index_dim=64, block_size=64, stages=6, chunks=3, chunk_edges=EDGES, consumers=1,
            rows_per_query=8, queries=8, tiles=TILES, own_tiles=1, index_blocks=Anything(), prefix=0,
            blocks=types.SimpleNamespace(boxes=lambda tile: tile, load=self.load_block),
            rows=types.SimpleNamespace(
                token_bytes=64, boxes=lambda ring, _stages: ring, load=self.load_row, tiles_layout=lambda _count: None
            ),
            allocate=lambda memory: self.shared(module, memory),
            fill_chunk=self.fill_chunk, sum_keys=lambda: (Anything(), Anything()), tile=self.tile,
            teacher_columns=lambda *_what: None, score_gradients=self.grade, store_loss=lambda *_what: None,
            store_keys=lambda *_what: None, store_queries=self.store, stage=self.stage,
        )  # fmt: skip

    def names(self) -> dict[str, Any]:
        def plain(function: Any) -> Any:
            return function

        cutlass = types.SimpleNamespace(
            range=lambda *bounds, unroll=0: range(*bounds), range_constexpr=range, const_expr=bool, min=min, max=max,
            Constexpr=None,
        )  # fmt: skip
        cute = types.SimpleNamespace(
            arch=self, jit=plain, kernel=plain, make_rmem_tensor=lambda *_what: Anything(), copy=self.copy,
            size=lambda _what: 1,
        )  # fmt: skip
        anything = Anything()
        names = {
            "cutlass": cutlass, "cute": cute, "Any": Any, "NamedTuple": NamedTuple, "Int32": int, "Int64": int,
            "Float32": float, "Boolean": bool, "ROWS": 64, "ATOM": 8, "VECTOR": 8, "BYTES": 16,
            "warpgroup": types.SimpleNamespace(wait_group=self.wait_group, Field=anything),
            "tma": types.SimpleNamespace(PANEL=64, boxes=lambda tiles, *_what: tiles, load_box=self.load_box),
            **dict.fromkeys(
                ("cpasync", "swap_ab", "wgmma", "warp", "hopper", "softmax", "make_fake_stream", "stand_in", "wide",
                 "copy_wide", "pick_float", "Rows", "Blocks", "SmemAllocator", "LayoutEnum", "OperandMajorMode"),
                anything,
            ),
            "pick": lambda condition, value, other: value if condition else other,
        }  # fmt: skip
        return {**names, **motions(**names), **tables(self), "ELEMENTS": {"bfloat16": 2}}

    def shared(self, module: dict[str, Any], memory: Memory) -> Any:
        names = tables(self)
        found = names["make_buffers"](self.kernel.cta, memory, {})
        barriers = names["make_barriers"](self.kernel.cta, memory, ())
        return module["Shared"](**found, **names["barriers_of"](self.kernel.cta, barriers))

    def count(self, name: str) -> int:
        """How often this lane has asked before."""
        number = self.local.__dict__.setdefault(name, 0)
        setattr(self.local, name, number + 1)
        return int(number)

    def bring(self, values: dict[tuple[int, int], int], stage: int, value: int, size: int, full: Pointer) -> None:
        def arrive() -> None:
            values[stage, 0] = value
            self.barriers[full.place].receive(size)

        if self.elected():
            self.later(object(), arrive)

    def load_block(
        self, _atom: Any, _rows: Any, row: int, _pages: Any, _head: int, tile: Stages, full: Pointer
    ) -> None:
        if self.elected():
            self.mbarrier_arrive_and_expect_tx(full, 8192)
        self.bring(tile.values, 0, row // 64, 8192, full)

    def load_box(self, _atom: Any, _rows: Any, row: int, _panel: int, target: Stage, full: Pointer) -> None:
        self.bring(target.values, target.number, row // 64, self.kernel.cta.buffers["keys"].stage_bytes, full)

    def load_row(self, _atom: Any, _rows: Any, _token: int, _head: int, target: Stage, full: Pointer) -> None:
        if target.number != self.local.__dict__.setdefault("slot", -1):
            self.local.slot, self.local.tile = target.number, self.count("tiles")
        self.bring(target.values, target.number, self.local.tile, 64, full)

    def fill_chunk(self, shared: Any, buffer: int, part: int, *_what: Any) -> None:
        shared.index_queries.values[buffer, part] = self.count("chunks")

    def copy(self, _atom: Any, source: Any, _target: Any) -> None:
        assert isinstance(source, Stage), "only K is copied"

    def tile(self, shared: Any, _scale: float, _index_scale: float, _warp: int) -> Any:
        anything = Anything()
        return types.SimpleNamespace(
            score="S", S=(anything, anything), K=anything, queries=shared.ring, teacher=anything,
            score_product="scores", keys=shared.keys, index_queries=shared.index_queries, scores=anything, dS=anything,
            index_columns=shared.index_queries, dk=anything, query_product="dq", key_columns=shared.keys,
            weights=shared.dS, dq=anything, consumer=0, loading=(None, anything, shared.k_tile), lane=self.lane,
            shared=shared,
        )  # fmt: skip

    def multiply(self, kind: Any, _into: Any, left: Any, right: Stage) -> None:
        warp = self.warp

        def finish() -> None:
            if kind == "S":
                self.tiles[warp].append(right.held())
            elif kind == "scores":
                self.scores[warp] = right.held() if self.fits(left, right) else {-1}
            elif kind == "dq":
                self.gradients[warp] = right.held() if self.fits(left, right) else {-1}

        if self.elected():
            self.later(("products", warp), finish)
        self.sync_warp()

    def fits(self, keys: Stage, chunk: Stage) -> bool:
        """Whether index keys are of the task that a chunk belongs to."""
        return keys.held() == {CHUNKS[number] for number in chunk.held()}

    def wait_group(self, left: int) -> None:
        queue = self.queues.setdefault(("products", self.warp), [])
        self.wait(lambda: len(queue) <= left)

    def grade(self, _shared: Any, _tile: Any, _buffer: int) -> None:
        if self.lane == 0:
            self.graded[self.warp].append(self.scores[self.warp])
        self.sync_warp()

    def stage(self, tile: Any, buffer: int) -> None:
        if self.lane == 0:
            [number] = self.graded[self.warp][-1]
            tile.shared.dS.values[buffer, self.warp] = number
        self.sync_warp()

    def store(self, shared: Any, _results: Any, _tile: Any, buffer: int) -> None:
        if self.lane == 0:
            assert self.gradients[self.warp] == Stage(shared.index_queries.values, buffer).held(), "of another chunk"
            self.stored[self.warp].append(self.gradients[self.warp])
        self.sync_warp()

    def go(self) -> None:
        kernel = self.kernel
        shared = kernel.allocate(Memory(self))
        role = self.warp - WARPS
        edges = Array(np.zeros((1, 1, sum(TASKS)), dtype=int))
        if role == 0:
            starts = np.cumsum((0, *TASKS))
            entries = [[(64 * i, starts[i], edges_of, 64 << 1) for i, edges_of in enumerate(TASKS)]]
            tasks, counts = Array(np.array([entries])), Array(np.array([[len(TASKS)]]))
            kernel.claim(None, None, None, None, shared, tasks, counts, self.claims, 0, 1)
        elif role == 1:
            kernel.gather(None, None, shared, edges, Anything(), 0, 0, 1)
        elif role > 1:
            kernel.prepare([Anything()] * 4, shared, edges, 0, 0, role - 2)
        else:
            kernel.consume(True, shared, Anything(), 1.0, 1.0, self.warp)


def check(seed: int, change: Callable[[Table], Table] = lambda table: table) -> None:
    """Every consumer warp takes every tile and every chunk once, in order, with its task's index keys."""
    chip = Chip(seed, change)
    chip.run(chip.go)
    in_order = [{number} for number in range(len(CHUNKS))]
    for warp in range(WARPS):
        assert chip.graded[warp] == chip.stored[warp] == in_order
        assert chip.tiles[warp][: TILES * len(CHUNKS)] == [{number} for number in range(TILES * len(CHUNKS))]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.drawn(1)
def test_every_chunk_is_graded_and_stored(seed: int) -> None:
    check(seed)


TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "an arrival too many": ("chunk", {"free": (warps("consumer"), lane("claimer"))}),
    "one preparer is enough": ("chunk", {"full": (lane("preparer"),)}),
    "one consumer warp frees keys": ("keys", {"free": (lane("consumer"),)}),
    "dS of one warp is enough": ("exchanged", {"full": (lane("consumer"),)}),
    "all consumers gather": ("task_gathered", {"full": (warps("consumer"), lane("gatherer"))}),
}


@pytest.mark.parametrize("fault", TABLES)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(fault: str) -> None:
    name, changes = TABLES[fault]
    with pytest.raises((AssertionError, Deadlock)):
        for seed in range(4):
            check(seed, lambda table: changed(table, name, **changes))
