"""The roles of decode_score at their barriers where keys of 4 bits are decoded in registers, lane by lane: see `warps`.

Producer and consumers run the source of the kernel and of its operand, as in test_dsl_index_pipelines. What a warp has
decoded of a stage is read as late as the product with it, so a stage that goes back before its product shows.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import test_dsl_index_pipelines as pipelines
from test_dsl_index_decoders import Rings
from test_dsl_index_pipelines import FAR, HELPERS, RUN, WARPS, Case, Chip, Product
from warps import Anything, Deadlock, changed, load, tables

from msa_tiles.dsl.table import Table, lane, threads, warps
from msa_tiles.paths import generated_dir
from msa_tiles.quant import GROUPS


class Columns(Case):
    """A form of decode_score whose queries are columns."""

    @property
    def post_scaled(self) -> bool:
        return self.file.endswith("_post_scaled")

    @property
    def helpers(self) -> tuple[str, str]:
        """Of columns, and of their maxima."""
        return ("e4m3_columns", "group_maxima") if self.post_scaled else ("query_columns", "column_maxima")


CASES = {
    name: Columns(f"decode_score_{name}", "DecodeScore", operand, "consume", pipelines.FLAT)
    for name, operand in (("q16k4", "nvfp4"), ("q8kmx4", "mxfp4"), ("q16k4m8_post_scaled", "nvfp4"))
}
PRODUCTS = 2  # of a block
IMPORTS = ("swap_ab", "warp", "aligned", "byte_of", "column_of", "byte_at", "decode_f16", "decode_bf16", "wide")


class ColumnsChip(Chip):
    """A CTA of decode_score whose consumers decode; with `early` they hand stages back before their products."""

    case: Columns

    def __init__(self, case: Columns, seed: int, change: Callable[[Table], Table], early: bool) -> None:
        pipelines.warpgroups.Chip.__init__(self, 2, WARPS, 32, seed)
        self.case, self.reduced, self.products = case, defaultdict(list), {}
        module = load(generated_dir() / f"cutedsl/sm90/{case.file}.py", **self.parts_of(case))
        kernel = self.kernel = module[case.name](**case.dims)
        self.table = kernel.cta
        kernel.cta = kernel.keys.table = change(self.table)
        kernel.emit = lambda *_what: kernel.meet()
        self.queries = PRODUCTS * (4 if case.post_scaled else 8)
        self.tile = Anything()
        self.tile.run = [0] * module["RUN"]  # type: ignore[attr-defined]
        if early:
            wait, release = kernel.keys.wait, kernel.keys.release
            kernel.keys.wait = lambda held, stage, phase: (wait(held, stage, phase), release(held, stage))
            kernel.keys.release = lambda *_what: None

    def parts_of(self, case: Columns) -> dict[str, Any]:
        """What the kernel imports: the operand, over what brings and decodes blocks, and the rest of a tile."""
        chip = self

        class Storage:
            """Blocks whose boxes are whole stages."""

            groups = 4
            arrive_with_scales = staticmethod(chip.cp_async_mbarrier_arrive_noinc)

            def __init__(self, name: str, table: Table, head_dim: int, block_size: int, _pages: int) -> None:
                self.name, self.table, self.head_dim, self.block_size = name, table, head_dim, block_size
                self.element = 2
                self.blocks = types.SimpleNamespace(boxes_of=lambda raw, _stages: raw)

        names = self.names() | dict.fromkeys((*IMPORTS, "Stored", "Float16", "BFloat16", "Float8E4M3FN"), Anything())
        names["cute"].recast_tensor = lambda tensor, _element: tensor
        names |= {"BYTES": 16, "Blocks": object, "COLUMNS": 4 if case.post_scaled else 8}
        names |= {"TURNS": 2, "WARPS": WARPS, "of_warps": None}
        packed = {"Storage": Storage, "buffers": load(HELPERS / "packed.py", **names)["buffers"]}
        names["packed"] = types.SimpleNamespace(**packed)
        for helper in ("decoded_left", "packed_left"):
            names[helper] = types.SimpleNamespace(**load(HELPERS / f"{helper}.py", **names))
        names["packed_index"] = types.SimpleNamespace(IndexKeys=Anything())
        operand = load(HELPERS / "packed_index_left.py", **names | {"COLUMNS": 32})["IndexKeys"]
        for name, value in {
            "pages": lambda *_what: [],
            "layouts": lambda _self: {},
            "load_rows": lambda _self, _stored, row, _pages, target: chip.copy_scales(None, row, None, target, 0),
            "row_factor": lambda *_what: Anything(),
            "product": lambda *_what: None,
            "operand": lambda *_what: [types.SimpleNamespace(of=None) for _ in range(2)],
            "accumulator": lambda *_what: chip.accumulator(),
            "unit_factors": lambda keys, held, stage, *_what: keys.scales_at(held, stage),
            "offset_of": lambda _self, stage, *_what: stage,
            "decode": lambda keys, operand, held, stage, unit, piece, factors: keys.place_of(
                operand, unit, piece
            ).__dict__.update(of=(held.raw[stage, None, None].iterator, factors)),
            "multiply": lambda keys, _product, into, operand, unit, piece, _right: chip.multiply_late(
                into, keys.place_of(operand, unit, piece), piece
            ),
            "prepare": lambda _self, _queries, _thread: chip.kernel.meet(),
            **(self.units() if case.post_scaled else {}),
        }.items():
            setattr(operand, name, value)
        keys = types.SimpleNamespace(
            multiplied=lambda: "float8_e4m3fn" if case.post_scaled else "float16", IndexKeys=operand,
            parts=lambda *shape, **roles: names["packed_left"].parts(*shape, **roles, group=GROUPS[case.operand].size),
        )  # fmt: skip
        names |= load(HELPERS / "split_indexer.py", **names)
        names |= {"anew": lambda value: value, "last_visible": None}
        names |= load(HELPERS / "column_indexer.py", **names)
        of_columns, of_maxima = case.helpers
        columns = load(HELPERS / f"{of_columns}.py", **names) | {"Columns": Anything()}
        maxima = load(HELPERS / f"{of_maxima}.py", **names)
        maxima |= dict.fromkeys(("fold", "put"), lambda *_what: None)
        maxima |= {"wait": chip.reduce, "reduce": chip.reduce_scaled}
        return names | {
            "index_key": keys,
            "column_indexer": types.SimpleNamespace(**names),
            of_columns: types.SimpleNamespace(**columns),
            of_maxima: types.SimpleNamespace(**maxima),
            "ELEMENTS": defaultdict(int),
            "Base": names["ColumnIndexer"],
        }

    def units(self) -> dict[str, Any]:
        """What an operand has whose groups are scaled behind the product: whole units, and their scales."""
        return {
            "divide": lambda keys: keys.__dict__.update(units=keys.block_size // 64),
            "operand": lambda keys, *_what: [types.SimpleNamespace(of=None) for _ in range(keys.units)],
            "accumulators": lambda keys, *_what: [self.accumulator() for _ in range(keys.units)],
            "fetch": lambda _keys, held, stage, _unit: held.raw[stage, None, None].iterator,
            "group_scales": lambda keys, held, stage, *_what: [keys.scales_at(held, stage)] * 2,
            "decode": lambda _keys, operand, codes: operand.__dict__.update(of=(codes, None)),
            "multiply": lambda _keys, _product, into, operand, _right: self.multiply_late(into, operand, 0),
        }

    def multiply_late(self, into: Product, registers: types.SimpleNamespace, piece: int) -> None:
        def finish() -> None:
            raw, scales = registers.of
            assert scales is None or raw.value == scales.value, "scales of other keys"
            assert piece == 0 or into.value == raw.value, "pieces of two blocks"
            into.value = raw.value

        if self.elected():
            self.later(("products", self.warp), finish)
        self.sync_warp()

    def reduce(self, product: Product, _limits: Any, _column: int, key: int, *_what: Any) -> tuple[float, float]:
        self.wait_group(0)
        self.note_once(product, key)
        return 0.0, 0.0

    def note_once(self, product: Product, key: int) -> None:
        """The block of a product that is there."""
        if product.value is not None:
            self.note(product, key // 64, None)
        self.sync_warp()
        if self.elected():
            product.value = None
        self.sync_warp()

    def reduce_scaled(
        self, _keys: Any, product: Product, scales: Any, _limits: Any, _column: int, key: int, *_what: Any
    ) -> float:
        """Of a product that the kernel has waited for."""
        assert product.value is None or {each.value for each in scales} == {product.value}, "scales of other keys"
        self.sync_warp()
        self.note_once(product, key)
        return 0.0

    def go(self) -> None:
        kernel, warp, names, memory = self.kernel, self.warp, tables(self), Rings(self)
        buffers = names["make_buffers"](kernel.cta, memory, {})
        held = kernel.keys.held(buffers, names["make_barriers"](kernel.cta, memory, ()))
        size = self.table.buffers["k_raw"].stage_bytes
        stored = types.SimpleNamespace(atom=(size, lambda row: row // 64), rows=None)
        kernel.measure = lambda _lengths, request: (64 * FAR, 1, RUN[request][1].stop)
        starts = [64 * FAR * request for request in range(len(RUN) + 1)]
        tokens = [64 * request for request in range(len(RUN) + 1)]
        lengths = types.SimpleNamespace(cu_seqlens_q=tokens, cu_seqlens_k=starts, tile_queries=self.queries)
        units = sum(len(blocks) for _, blocks in RUN)
        run = (units, 0, 0, RUN[0][1].start, 64 * FAR, 1, RUN[0][1].stop)
        producer, out = self.table.first_warp("producer"), types.SimpleNamespace(stride=(1, 1))
        if warp == producer:
            kernel.produce(stored, held, None, lengths, run)
        elif warp < producer:
            kernel.consume(stored, held, Anything(), None, None, self.tile, lengths, run, 0, 0, out)


def check(name: str, seed: int, change: Callable[[Table], Table] = lambda table: table, early: bool = False) -> None:
    """Every consumer warp reduces every block for all queries."""
    chip = ColumnsChip(CASES[name], seed, change, early)
    chip.run(chip.go)
    wanted = [(block, FAR * request + block) for request, blocks in RUN for block in blocks for _ in range(PRODUCTS)]
    assert chip.reduced == {warp: wanted for warp in range(WARPS)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.drawn(1)
def test_every_consumer_reduces_every_block(name: str, seed: int) -> None:
    check(name, seed)


FAULTS: dict[str, dict[str, Any]] = {
    "one arrival too many": {"free": (warps("consumer"), lane("producer"))},
    "one warp is enough": {"free": (lane("consumer"),)},
    "too few bytes": {"bytes": 64},
    "nobody waits for scales": {"full": (lane("producer"),)},
    "arrivals of more lanes": {"full": (lane("producer"), threads("producer"), lane("producer"))},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(name: str, fault: str) -> None:
    with pytest.raises((Deadlock, AssertionError)):
        for seed in range(4):
            check(name, seed, lambda table: changed(table, "k", **FAULTS[fault]))


@pytest.mark.parametrize("name", ["q16k4", "q16k4m8_post_scaled"])
def test_a_stage_that_goes_back_before_its_product(name: str) -> None:
    with pytest.raises(AssertionError):
        for seed in range(6):
            check(name, seed, early=True)
