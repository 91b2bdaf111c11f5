"""Index keys of 4 bits (msa_tiles.dsl.cutedsl.packed_index): decoding warps between producer and consumers, and bytes.

Roles run at the barriers of the kernels' tables, as in test_dsl_index_pipelines: a decoder hands on what it finds.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lanes
import pytest
import test_dsl_index_pipelines as pipelines
import torch
from lanes import Int32, Pointer
from test_dsl_four_bits import DTYPES, LACKING, drawn, each_format, exact, formats, memory, same, swizzled
from test_dsl_index_pipelines import HELPERS, Case, Chip, Memory, Stages
from warps import Anything, Deadlock, changed, load, tables

from msa_tiles.dsl.table import Table, lane, threads, warps
from msa_tiles.paths import generated_dir
from msa_tiles.quant import GROUPS

CASES = {
    "index_score": Case("index_score_q16k4", "IndexScore", "index_nvfp4", "score_pairs", pipelines.FLAT),
    "select_blocks": Case(
        "select_blocks_q16k4", "SelectBlocks", "index_nvfp4", "score_pairs", {**pipelines.SELECT, "topk": 16}
    ),
    "select_blocks, four heads": Case(
        "select_blocks_q16k4", "SelectBlocks", "index_nvfp4", "score_pairs",
        {**pipelines.SELECT, "heads_per_group": 4, "topk": 16},
    ),
    "select_blocks, long": Case(
        "select_blocks_q16k4", "SelectBlocks", "index_nvfp4", "score_singly", {**pipelines.SELECT, "topk": 64}
    ),
}  # fmt: skip
DECODERS = 3
__all__ = ["formats"]  # a fixture


class Stage(pipelines.Stage):
    @property
    def iterator(self) -> Stage:
        return self


class Ring(Stages):
    """A buffer whose stage is the first index or the last one."""

    def __getitem__(self, index: tuple[Any, ...]) -> Stage:
        return Stage(self.values, index[0] if index[-1] is None else index[-1])


class DecodingChip(Chip):
    """A CTA of an indexer whose keys are decoded."""

    def __init__(self, case: Case, seed: int, change: Callable[[Table], Table]) -> None:
        pipelines.warpgroups.Chip.__init__(self, 2, pipelines.WARPS, 32, seed)
        self.case, self.reduced, self.products = case, pipelines.defaultdict(list), {}
        chip = self

        class Right:
            """What the operand takes over from attention's: a decoded block holds what its bytes do."""

            has_global = False
            groups = 4
            arrive_with_scales = staticmethod(chip.cp_async_mbarrier_arrive_noinc)

            def __init__(self, name: str, table: Table, head_dim: int, block_size: int, _pages: int) -> None:
                self.name, self.table, self.head_dim, self.block_size = name, table, head_dim, block_size
                self.blocks = types.SimpleNamespace(boxes_of=lambda raw, _stages: raw)

            def decode_rows(self, raw: Stage, tile: Stage, scales: Stage, _order: int, _member: int, _all: int) -> None:
                assert raw.value == scales.value, "scales of other keys"
                chip.sync_warp()
                if chip.lane == 0:
                    tile.put(raw.value)
                chip.sync_warp()

        names = self.names()
        index_plain = types.SimpleNamespace(**load(HELPERS / "operands/index_plain.py", **names))
        packed_right = types.SimpleNamespace(Right=Right)
        further = {
            "index_plain": index_plain,
            "packed_right": packed_right,
            "CODES": 2,
            "Stored": None,
        }
        operand = load(HELPERS / "packed_index.py", **names, **further)
        operand["IndexKeys"].load_rows = lambda _self, _stored, row, _pages, target: self.copy_scales(
            None, row, None, target, 0
        )
        group = {"group": GROUPS["nvfp4"].size, "decoder": "decoder"}
        keys = types.SimpleNamespace(
            multiplied=lambda: "bfloat16", IndexKeys=operand["IndexKeys"],
            parts=lambda *shape, **roles: operand["parts"](*shape, "bfloat16", **roles, **group),
        )  # fmt: skip
        operand["IndexKeys"].element = 2
        names |= {"index_key": keys, "maxima": Anything()}
        names |= load(HELPERS / "indexer.py", **names)
        module = load(generated_dir() / f"cutedsl/sm90/{case.file}.py", **names)
        module["CONSUMERS"] = 1
        self.kernel = module[case.name](**case.dims)
        self.table = self.kernel.cta
        self.kernel.cta = self.kernel.keys.table = change(self.table)
        self.kernel.layouts = self.kernel.keys.layouts = dict
        self.kernel.query_boxes = self.query_boxes
        self.kernel.finish_pair = lambda *_what: None

    def go(self) -> None:
        first = self.table.first_warp("decoder")
        if first <= self.warp < first + DECODERS:
            memory, names = Rings(self), tables(self)
            buffers = names["make_buffers"](self.kernel.cta, memory, {})
            held = self.kernel.keys.held(buffers, names["make_barriers"](self.kernel.cta, memory, ()))
            self.kernel.keys.decode_blocks(held, pipelines.BLOCKS, self.warp - first, DECODERS)
        else:
            super().go()


class Rings(Memory):
    def allocate_tensor(self, _element: Any, _shape: Any, _alignment: int, _swizzle: Any = None) -> Any:
        return self._next(Ring)


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "Memory", Rings)


def check(name: str, seed: int, change: Callable[[Table], Table] = lambda table: table) -> None:
    chip = DecodingChip(CASES[name], seed, change)
    pipelines.check_reduced(chip)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.drawn(1)
def test_every_consumer_reduces_every_block(name: str, seed: int) -> None:
    check(name, seed)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one decoder is enough": ("k", {"full": (lane("decoder"),)}),
    "one decoder frees the bytes": ("k_raw", {"free": (lane("decoder"),)}),
    "one consumer is enough": ("k", {"free": (lane("consumer"),)}),
    "nobody waits for scales": ("k_raw", {"full": (lane("producer"),)}),
    "too few bytes": ("k_raw", {"bytes": 64}),
    "an arrival too many": ("k", {"full": (warps("decoder"), threads("producer"))}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(name: str, fault: str) -> None:
    pipeline, changes = FAULTS[fault]
    with pytest.raises((Deadlock, AssertionError)):
        for seed in range(4):
            check(name, seed, lambda table: changed(table, pipeline, **changes))


def side(name: str, dim: int, block: int = 64) -> Any:
    made = object.__new__(lanes.helper(f"operands.index_{name}").IndexKeys)
    made.name, made.head_dim, made.block_size, made.groups = "k", dim, block, dim // GROUPS[name].size
    return made


@each_format
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.drawn(2)
def test_warps_share_the_rows_of_a_block(formats: dict[str, types.ModuleType], name: str, dim: int) -> None:
    given, keys = drawn(name, 64, dim), side(name, dim)
    tile = memory(torch.full((64 * dim,), 1), 16)
    raw, scales = (memory(x, 8) for x in (swizzled(given.data[1]), given.scale[1].contiguous().view(torch.uint8)))

    def run() -> None:
        member = Int32(lanes.thread() // 32)
        keys.decode_rows(
            Pointer(raw, 0), Pointer(tile, 0), Pointer(scales, 0), Int32(keys.groups), member, DECODERS
        )  # fmt: skip

    lanes.launch(run, (), (1,), 32 * DECODERS)
    row, column = torch.meshgrid(torch.arange(64), torch.arange(dim), indexing="ij")
    place = (column // 64 * 64 + row) * 64 + ((column % 64 // 8) ^ (row % 8)) * 8 + column % 8
    found = torch.tensor([int(x) for x in tile], dtype=torch.int32).to(torch.int16)[place].view(DTYPES[name][0])
    same(found, exact(given.dequantize()[1], LACKING[name][0]))


@each_format
@pytest.mark.parametrize("pages_per_block", [0, 4])
def test_scales_of_keys(formats: dict[str, types.ModuleType], name: str, pages_per_block: int) -> None:
    """Of pages out of order and of one that is not there, and of flat keys past the last one."""
    keys = side(name, 128)
    keys.pages_per_block, rows = pages_per_block, 64 // max(pages_per_block, 1)
    keys.blocks = types.SimpleNamespace(box_rows=rows)
    shape = (9, rows, keys.groups) if pages_per_block else (100, keys.groups)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pages = [3, 8, 40, 0] if pages_per_block else []
    wanted = codes[[min(page, 8) for page in pages]] if pages else codes[[min(50 + t, 99) for t in range(64)]]
    source = lanes.Tensor(memory(codes, 8, lanes.Memory), 0, tuple(codes.shape), codes.stride())
    target = memory(torch.full((64 * keys.groups,), 1), 8)
    given = types.SimpleNamespace(scales=source)
    lanes.launch(
        lambda: keys.load_rows(given, Int32(50), [Int32(page) for page in pages], Pointer(target, 0)), (), (1,), 32
    )
    assert [int(x) for x in target] == wanted.flatten().tolist()


def test_what_products_are_multiplied_with(formats: dict[str, types.ModuleType]) -> None:
    stored = types.SimpleNamespace(of_heads=[3.0])
    q_scale = lanes.Tensor(lanes.Memory([5.0, 7.0]), 0, (1, 2), (2, 1))
    for name, own in (("nvfp4", 3.0 * 2.0**8), ("mxfp4", 1.0)):
        for used, wanted in ((0, own), (1, 7.0 * own)):
            scales = types.SimpleNamespace(q_scale=q_scale, use_q_scale=used)
            assert side(name, 64).row_factor(stored, scales, 0, 1) == wanted
