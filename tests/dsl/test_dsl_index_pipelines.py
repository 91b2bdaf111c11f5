"""The roles of the indexers in CuTe DSL at the barriers of their tables, lane by lane: see `warps`.

Producer and consumers run the source of the kernels, of `Indexer` and of the operand, over stand-ins for copies,
products and arithmetic. What a stage of keys holds is the number of its block, and so is what a product with it holds
when it completes. Whoever reduces a product notes that number, and the one of the scales that lie beside the keys.
"""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import warpgroups
from warps import Anything, Array, Deadlock, Pointer, changed, load, motions, tables

from msa_tiles.dsl.table import Table, TableError, lane, threads, warps
from msa_tiles.paths import generated_dir
from msa_tiles.sources import PACKAGE

HELPERS = PACKAGE / "dsl/cutedsl"
BLOCKS, HEADS, WARPS = 7, 2, 4
READY = 1  # what a tile of queries holds once it came
# Units of a decoding CTA: (request, its blocks from the first one that is the CTA's to the end).
RUN = ((0, range(1, 3)), (1, range(4)), (2, range(3)))
FAR = 100  # blocks between the first ones of requests


class Case(NamedTuple):
    """A kernel of the generated ones, its operand, and the method that its consumers run."""

    file: str
    name: str
    operand: str
    score: str
    dims: dict[str, int]
    tiles: int = 1  # of queries that a consumer warpgroup has

    @property
    def scaled(self) -> bool:
        return self.dims.get("key_scales", 0) == 1


FLAT = {"head_dim": 64, "block_size": 64, "pages_per_block": 0}
SELECT = {**FLAT, "heads_per_group": HEADS}
CASES = {
    "index_score": Case("index_score_bf16", "IndexScore", "index_plain", "score_pairs", FLAT),
    "index_score e4m3": Case("index_score_q8k8", "IndexScore", "index_e4m3", "score_pairs", {**FLAT, "key_scales": 1}),
    "select_blocks": Case("select_blocks_bf16", "SelectBlocks", "index_plain", "score_pairs", {**SELECT, "topk": 16}),
    "select_blocks, long": Case(
        "select_blocks_bf16", "SelectBlocks", "index_plain", "score_singly", {**SELECT, "topk": 64}
    ),
    "two tiles": Case(
        "select_blocks_q8k8_two_tiles", "SelectBlocks", "index_e4m3", "score_blocks",
        {**SELECT, "topk": 16, "key_scales": 1}, 2,
    ),
    "two tiles, long": Case(
        "select_blocks_q8k8_two_tiles", "SelectBlocks", "index_e4m3", "score_blocks_singly",
        {**SELECT, "topk": 64, "key_scales": 0}, 2,
    ),
    "decode_score": Case("decode_score_bf16", "DecodeScore", "index_plain", "consume", FLAT),
    "decode_score e4m3": Case("decode_score_q8k8", "DecodeScore", "index_e4m3", "consume", {**FLAT, "key_scales": 1}),
}  # fmt: skip


class Stage(NamedTuple):
    """One stage of a buffer."""

    values: dict[int, int]
    number: int

    @property
    def value(self) -> int:
        return self.values[self.number]

    def put(self, value: int) -> None:
        self.values[self.number] = value


class Stages:
    """A buffer, or its boxes, or what a product makes of it: the last index is that of the stage."""

    def __init__(self) -> None:
        self.values: dict[int, int] = defaultdict(lambda: -1)
        self.iterator = self

    def __getitem__(self, index: tuple[Any, ...]) -> Stage:
        return Stage(self.values, index[-1])


class Memory(warpgroups.Memory):
    def allocate_tensor(self, _element: Any, _shape: Any, _alignment: int, _swizzle: Any = None) -> Any:
        return self._next(Stages)


class Product:
    """Registers of a warp that a product goes to."""

    value: int | None = None


class Chip(warpgroups.Chip):
    """A CTA with one consumer warpgroup, and what its warps reduce: (block, what the product held)."""

    def __init__(self, case: Case, seed: int, change: Callable[[Table], Table]) -> None:
        # Every lane of a producer arrives where keys have scales of their own; else a few lanes are enough.
        super().__init__(2, WARPS, 32 if case.scaled else 4, seed)
        self.case = case
        self.reduced: dict[int, list[tuple[int, int | None]]] = defaultdict(list)
        self.products: dict[tuple[int, int], Product] = {}
        names = self.names()
        plain = load(HELPERS / "operands/index_plain.py", **names)
        names |= {"index_plain": types.SimpleNamespace(**plain), "Held": plain["Held"], "Stored": plain["Stored"]}
        operand = load(HELPERS / "operands" / f"{case.operand}.py", **names)
        names |= {"index_key": types.SimpleNamespace(**operand), "maxima": Anything()}
        for helper in ("indexer", "split_indexer", "two_tiles", "candidate_queue"):
            names |= load(HELPERS / f"{helper}.py", **names)
            names[helper] = types.SimpleNamespace(**names)
        names["Base"] = names["SplitIndexer"]  # of decode_score
        module = load(generated_dir() / f"cutedsl/sm90/{case.file}.py", **names)
        module["CONSUMERS"] = 1
        self.kernel = module[case.name](**case.dims)
        self.table = self.kernel.cta
        changed_table = change(self.table)
        self.kernel.cta = self.kernel.keys.table = changed_table
        self.kernel.layouts = dict
        self.kernel.keys.layouts = dict
        self.kernel.query_boxes = self.query_boxes
        self.kernel.finish_pair = self.kernel.finish_block = lambda *_what: None
        self.kernel.reduce = lambda product, _maxima, _tile, _sight, scales, _factors, _warp, _head, block, _row: (
            self.note(product, block, scales)
        )

    def names(self) -> dict[str, Any]:
        """Stand-ins for what kernel, operand and helpers import."""

        def plain(function: Any) -> Any:
            return function

        anything = Anything()
        cutlass = types.SimpleNamespace(
            range=lambda *bounds, unroll=0: range(*bounds), range_constexpr=range, const_expr=bool, min=min, max=max,
            Constexpr=None, BFloat16=2, Float8E4M3FN=1, Float32=float, Boolean=bool,
        )  # fmt: skip
        cute = types.SimpleNamespace(
            arch=self, jit=plain, kernel=plain, make_rmem_tensor=lambda *_what: Array(np.zeros(2)),
            size=lambda _tensor: len(RUN) + 2,
        )  # fmt: skip
        tools = types.SimpleNamespace(
            product=anything, accumulator=lambda *_what: self.accumulator(), multiply=self.multiply, ROWS=64,
            operand_a=lambda _product, tiles: tiles, operand_b=lambda _product, tiles: tiles,
        )  # fmt: skip
        names = {
            "cutlass": cutlass,
            "cute": cute,
            "Any": Any,
            "NamedTuple": NamedTuple,
            **dict.fromkeys(("Int32", "Int64"), int),
            "Float32": type("Float32", (float,), {"inf": float("inf")}),
            "wgmma": tools,
            "warpgroup": types.SimpleNamespace(wait_group=self.wait_group, OperandSource=anything),
            "scores": types.SimpleNamespace(
                block_max=lambda product, _maxima, _limits, _key, block, _full, _lane, factors: self.note(
                    product, block, factors
                ),
                scaled=anything,
                pick_float=anything,
            ),
            "tma": types.SimpleNamespace(panel_columns=lambda *_what: 64, boxes=self.boxes, load_box=self.load_box),
            "copy_scales": self.copy_scales,
            "ROWS": 64,
            "EMPTY": 0,
            "WARP": 32,
            **dict.fromkeys(("softmax", "top", "OperandMajorMode", "hopper", "LayoutEnum", "SmemAllocator"), anything),
            "pick": lambda condition, value, other: value if condition else other,
        }
        return {**names, **motions(**names), **tables(self)}

    def boxes(self, tiles: Stages, *_what: Any) -> Stages:
        return tiles

    def query_boxes(self, queries: Stages) -> Any:
        return _QueryBoxes(queries, self.kernel.heads)

    def load_box(self, atom: Any, _rows: Any, row: int, _panel: int, target: Stage, full: Pointer) -> None:
        size, held = atom

        def arrive() -> None:
            target.put(held(row))
            self.barriers[full.place].receive(size)

        if self.elected():
            self.later(object(), arrive)

    def copy_scales(self, _scales: Any, row: int, _pages: Any, target: Stage, _rows: int) -> None:
        self.local.scales = lambda: target.put(row // 64)

    def cp_async_mbarrier_arrive_noinc(self, barrier: Pointer) -> None:
        copy = self.local.scales

        def arrive() -> None:
            copy()
            self.barriers[barrier.place].arrive()

        self.later(object(), arrive)

    def accumulator(self) -> Product:
        number = self.local.__dict__.setdefault("count", 0)
        self.local.count += 1
        return self.products.setdefault((self.warp, number), Product())

    def multiply(self, _product: Any, into: Product, left: Stage, right: Stage) -> None:
        def finish() -> None:
            into.value = right.value if left.value == READY else None

        if self.elected():
            into.value = None
            self.later(("products", self.warp), finish)
        self.sync_warp()

    def wait_group(self, left: int) -> None:
        queue = self.queues.setdefault(("products", self.warp), [])
        self.wait(lambda: len(queue) <= left)

    def note(self, product: Product, block: int, scales: Stage | None) -> None:
        """What past the last block is reduced is dropped."""
        if self.case.name == "DecodeScore" or block < BLOCKS:
            assert scales is None or scales.value == product.value, "scales of other keys"
            if self.lane == 0:
                self.reduced[self.warp].append((block, product.value))

    def go(self) -> None:
        stage = self.table.buffers["k_raw" if "k_raw" in self.table.buffers else "k_tiles"].stage_bytes
        stored = types.SimpleNamespace(atom=(stage, lambda row: row // 64), rows=None, scales=None)
        kernel, warp = self.kernel, self.warp
        producer, first_idle = self.table.first_warp("producer"), self.table.first_warp("producer") + 1
        if self.case.name == "DecodeScore":
            self.decode(stored, warp, producer)
            return
        buffers, held, q_full = kernel.prepare(Memory(self), ())
        queries = self.table.buffers["queries"]
        box = queries.bytes // (kernel.tiles * kernel.heads)
        if producer <= warp < first_idle:
            source = types.SimpleNamespace(atom=(box, lambda _row: READY), rows=Anything())
            kernel.produce(source, buffers["queries"], q_full, stored, held, None, [0], 0, 0, 0, BLOCKS)
        elif warp < producer:
            operands = kernel.operands(buffers["queries"], held)
            if self.case.tiles == 2:
                sight, scales = (Anything(), Anything()), None
                getattr(kernel, self.case.score)(operands, q_full, held, scales, warp, sight, BLOCKS, None)
            else:
                getattr(kernel, self.case.score)(operands, 0, q_full, held, None, 0, BLOCKS, self.lane, None)

    def decode(self, stored: Any, warp: int, producer: int) -> None:
        kernel, memory, names = self.kernel, Memory(self), tables(self)
        buffers = names["make_buffers"](kernel.cta, memory, {})
        held = kernel.keys.held(buffers, names["make_barriers"](kernel.cta, memory, ()))
        kernel.clear_queries = lambda *_what: None
        kernel.load_queries = lambda _source, queries, *_what: queries.values.__setitem__(0, READY)
        kernel.keys.row_factor = lambda *_what: None
        kernel.measure = lambda _lengths, request: (64 * FAR, 1, RUN[request][1].stop)
        starts = [64 * FAR * request for request in range(len(RUN) + 1)]
        lengths = types.SimpleNamespace(
            cu_seqlens_q=[64 * request for request in range(len(RUN) + 1)], cu_seqlens_k=starts, tile_queries=64
        )
        units = sum(len(blocks) for _, blocks in RUN)
        run = (units, 0, 0, RUN[0][1].start, 64 * FAR, 1, RUN[0][1].stop)
        if warp == producer:
            kernel.produce(stored, held, None, lengths, run)
        elif warp < producer:
            kernel.consume(stored, held, Anything(), None, None, buffers["queries"], lengths, run, 0, 0, Anything())


class _QueryBoxes:
    """Where queries go: [.., tile, head, panel]."""

    def __init__(self, queries: Stages, heads: int) -> None:
        self.queries, self.heads = queries, heads

    def __getitem__(self, index: tuple[Any, ...]) -> Stage:
        return self.queries[(None, index[2] * self.heads + index[3])]


def check(name: str, seed: int, change: Callable[[Table], Table] = lambda table: table) -> None:
    """Every consumer warp reduces every block of keys, as often as there are tiles and heads."""
    check_reduced(Chip(CASES[name], seed, change))


def check_reduced(chip: Chip) -> None:
    """The same of a CTA that is there."""
    case = chip.case
    chip.run(chip.go)
    if case.name == "DecodeScore":
        wanted = [(block, FAR * request + block) for request, blocks in RUN for block in blocks]
        assert chip.reduced == {warp: wanted for warp in range(WARPS)}
        return
    times = case.tiles * case.dims.get("heads_per_group", 1)
    wanted_counts = Counter({(block, block): times for block in range(BLOCKS)})
    assert {warp: Counter(found) for warp, found in chip.reduced.items()} == {
        warp: wanted_counts for warp in range(WARPS)
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.drawn(2)
def test_every_consumer_reduces_every_block(name: str, seed: int) -> None:
    check(name, seed)


FAULTS: dict[str, dict[str, Any]] = {
    "one arrival too many": {"free": (warps("consumer"), lane("producer"))},
    "one warp is enough": {"free": (lane("consumer"),)},
    "too few bytes": {"bytes": 64},
    # With scales of their own these are one copy of them too many, without them as many as there are lanes.
    "arrivals of more lanes": {"full": (lane("producer"), threads("producer"), lane("producer"))},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.drawn(6)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(name: str, fault: str) -> None:
    with pytest.raises((Deadlock, AssertionError)):
        for seed in range(3):
            check(name, seed, lambda table: changed(table, "k", **FAULTS[fault]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.scaled])
def test_scales_that_nobody_waits_for(name: str) -> None:
    with pytest.raises((Deadlock, AssertionError)):
        for seed in range(3):
            check(name, seed, lambda table: changed(table, "k", full=(lane("producer"),)))


@pytest.mark.parametrize("name", CASES)
def test_a_buffer_left_out(name: str) -> None:
    def without(table: Table) -> Table:
        buffers = tuple(each for each in table.buffers.values() if each.name != "k_tiles")
        return Table(tuple(table.roles.values()), tuple(table.pipelines.values()), buffers)

    with pytest.raises(TableError, match="k fills k_tiles, which is no buffer"):
        check(name, 0, without)
