"""The roles of sparse_decode in CuTe DSL at their barriers, lane by lane, as the kernel's table sets them up.

Producer and consumers run the kernel's own source and that of its operand, over stand-ins for copies, products and
arithmetic. What a stage holds is the number of its block; whoever reads a stage notes what is there when the read
completes. So a stage that is overwritten too early shows, and a table that does not fit the roles is an error.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from warpgroups import Chip
from warps import Anything, Array, Deadlock, Pointer, load

from msa_tiles.dsl import table as vocabulary
from msa_tiles.dsl.table import Pipeline, Table, TableError, lane, threads, warps
from msa_tiles.paths import generated_dir
from msa_tiles.sources import PACKAGE
from msa_tiles.tables import table_of

HELPERS = PACKAGE / "dsl/cutedsl"
KERNELS = {name: generated_dir() / f"cutedsl/sm90/sparse_decode_{name}.py" for name in ("bf16", "q16kv8")}
DIMS = {"head_dim": 64, "block_size": 64, "group": 8, "pages_per_block": 0, "scored_blocks": 0}
OPERANDS = {"bf16": ("plain", {}), "head scales": ("e4m3", {"token_scales": 0}), "token": ("e4m3", {"token_scales": 1})}
LANES = 32
BLOCKS = [5, 3, -1, 8, 2, 7, 9, 1, 40, 6, 4]  # one is absent, one behind what the query sees
LIMIT = 64 * 9 + 20


class Stage(NamedTuple):
    """One stage of a buffer."""

    values: np.ndarray
    number: int

    def __add__(self, _bytes: Any) -> Stage:  # type: ignore[override]
        """A place in it."""
        return self


class Stages:
    """A buffer whose stages each hold the number of a block."""

    def __init__(self, depth: int) -> None:
        self.values = np.full(depth, -1)

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        number = index[0] if index[-1] is None else index[-1]
        return types.SimpleNamespace(iterator=Stage(self.values, number), stage=Stage(self.values, number))


class Blocks:
    """What brings a block: its number, into the stage, some time later."""

    def __init__(self, chip: Chip, block_size: int = DIMS["block_size"]) -> None:
        self.chip, self.block_size = chip, block_size
        self.pages_per_block = self.box_rows = 0

    def boxes_of(self, stages: Stages, _count: int) -> Stages:
        return stages

    def copy(self, size: int, _rows: Any, row: int, _pages: Any, _head: int, box: Any, full: Pointer) -> None:
        def arrive() -> None:
            box.stage.values[box.stage.number] = row // self.block_size
            self.chip.barriers[full.place].receive(size)

        if self.chip.elected():
            self.chip.later(object(), arrive)

    def clear_rows(self, *_what: Any) -> None:
        """The rows do not matter here."""


def names_of(chip: Chip, note: Callable[[Stage, int], None]) -> dict[str, Any]:
    """Stand-ins for what kernel, operand and helpers import."""

    anything = Anything()

    def plain(function: Any) -> Any:
        return function

    def multiply(_product: Any, _into: Any, left: Any, _right: Any) -> None:
        warp = chip.warp
        if isinstance(left, types.SimpleNamespace) and chip.elected():  # else it was read when it was decoded
            chip.later(("products", warp), lambda: note(left.stage, warp))
        chip.sync_warp()

    def wait_group(left: int) -> None:
        queue = chip.queues.setdefault(("products", chip.warp), [])
        chip.wait(lambda: len(queue) <= left)

    def copy(_atom: Any, source: Any, _target: Any) -> None:
        if isinstance(source, Stage) and chip.lane == 0:
            note(source, chip.warp)

    cutlass = types.SimpleNamespace(
        range=lambda *bounds, unroll=0: range(*bounds), range_constexpr=range, const_expr=bool, min=min, max=max,
        Constexpr=None, BFloat16=1, Float16=2, Float32=float, Float8E4M3FN=3,
    )  # fmt: skip
    cute = types.SimpleNamespace(
        arch=chip, jit=plain, kernel=plain, make_rmem_tensor=anything, make_layout=anything, make_tensor=anything,
        make_copy_atom=anything, make_tiled_copy_C=anything, select=anything, copy=copy, size=lambda *_what, **_mode: 8,
        recast_tensor=lambda _tensor, _element: defaultdict(lambda: defaultdict(int)),
    )  # fmt: skip
    tools = types.SimpleNamespace(
        product=anything, accumulator=anything, operand_b=lambda *_what: defaultdict(int), multiply=multiply,
        operand_a=lambda _product, tiles: tiles, wait_group=wait_group, SmemLayoutAtomKind=anything,
        OperandSource=types.SimpleNamespace(SMEM=0, RMEM=1), StMatrix8x8x16bOp=anything, LdMatrix8x8x16bOp=anything,
    )  # fmt: skip
    motions = load(HELPERS / "pipeline.py", cute=cute, Int32=int)
    return {
        **{name: getattr(vocabulary, name) for name in dir(vocabulary) if not name.startswith("_")},
        "cutlass": cutlass,
        "cute": cute,
        "swap_ab": tools,
        "wgmma": tools,
        "warpgroup": tools,
        "warp": tools,
        "Any": Any,
        "NamedTuple": NamedTuple,
        "Int32": int,
        "Int64": int,
        "Float32": float,
        "ROWS": 64,
        "OperandMajorMode": types.SimpleNamespace(K=0, MN=1),
        "ELEMENTS": {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16},
        "Blocks": lambda *_what: Blocks(chip),
        "SmemAllocator": None,
        "cpasync": None,
        "pick_float": lambda condition, value, other: value if condition else other,
        "pick": lambda condition, value, other: value if condition else other,
        "ballot": chip.vote_ballot_sync,
        "following": motions["following"],
        "arrive": motions["arrive"],
        "arrive_alone": motions["arrive_alone"],
        "copy_scales": lambda *_what: None,
        "stand_in": None,
        "first_bit": lambda bits: (bits & -bits).bit_length() - 1,
    }


def decoded_side(names: dict[str, Any]) -> dict[str, Any]:
    """The left side of e4m3, decoded in registers; where bytes lie in a stage does not matter here."""
    names = {**names, "aligned": lambda place, *_what: place, "byte_of": lambda *_what: 0, "CHUNK": 16, "Stored": None}
    shared, storage = (load(HELPERS / f"{name}.py", **names) for name in ("decoded_left", "e4m3_storage"))
    parts = {"decoded_left": types.SimpleNamespace(**shared), "e4m3_storage": types.SimpleNamespace(**storage)}
    return load(HELPERS / "e4m3_left.py", **names, **parts, Held=shared["Held"])


class Decode(Chip):
    """A CTA of sparse_decode, and what its consumer warps read of keys and values."""

    def __init__(self, kernel: Path, operand: str, scales: dict[str, int], table: Table, seed: int) -> None:
        super().__init__(1, 5, LANES, seed)
        self.read: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.table = table
        names = names_of(self, self.note)
        side = decoded_side(names) if operand == "e4m3" else load(HELPERS / "operands" / f"{operand}.py", **names)
        helpers = load(HELPERS / "shared.py", **names)
        module = load(kernel, **names, key_value=types.SimpleNamespace(**side), make_barriers=None, make_buffers=None)
        self.kernel = object.__new__(module["SparseDecode"])
        self.kernel.__dict__.update(
            cta=table, columns=8, scored_blocks=0, pages_per_block=0, block_size=DIMS["block_size"], head_dim=0,
            softmax=lambda *_what: self.kernel.meet(), emit=lambda *_what: None,
        )  # fmt: skip
        self.sides, self.stages = {}, {}
        for name in "kv":
            left = side["Left"](name, table, 64, 64, 0, readers="consumer", transposed=name == "v", **scales)
            left.fold = lambda value, _stored, _head: value
            self.stages[name] = Stages(table.depth(name))
            self.sides[name] = left
            if operand == "e4m3":
                left.rows, left.depth = 64, 32  # one ldmatrix
                left.put = left.prepare = left.clear = lambda *_what: None
        self.kernel.keys, self.kernel.values = self.sides["k"], self.sides["v"]
        self.module, self.make_barriers = module, helpers["make_barriers"]

    def note(self, stage: Stage, warp: int) -> None:
        [name] = [name for name, stages in self.stages.items() if stages.values is stage.values]
        self.read[warp, name].append(int(stage.values[stage.number]))

    def barrier(self, barrier_id: int, number_of_threads: int) -> None:
        self.meet(("barrier", barrier_id), number_of_threads)

    def cp_async_mbarrier_arrive_noinc(self, barrier: Pointer) -> None:
        self.later(object(), self.barriers[barrier.place].arrive)

    def go(self) -> None:
        memory = types.SimpleNamespace(allocate_array=lambda _element, _count: Pointer("barriers"))
        barriers = self.make_barriers(self.table, memory, ())
        held = []
        for name, side in self.sides.items():
            scales = Array(np.zeros((64, self.table.depth(name))))
            buffers = {f"{name}_{kind}": self.stages[name] for kind in ("tiles", "raw")} | {f"{name}_scales": scales}
            held.append(side.held(buffers, barriers))
        q_full = barriers + self.table.place("q_full")
        shared = self.module["Shared"](Array(np.zeros((8, 8))), *held, types.SimpleNamespace(
            iterator=None, layout=None), None, None, None, q_full)  # fmt: skip
        ids = BLOCKS[self.lane] if self.lane < len(BLOCKS) else -1
        share = self.module["Share"](0, 0, 0, len(BLOCKS), len(BLOCKS), None, ids, 0, LIMIT)
        if self.warp < 4:
            self.kernel.consume(None, None, shared, share, 1.0, self.warp, None, None)
        else:
            if self.elected():
                self.mbarrier_arrive_and_expect_tx(q_full, self.table.bytes_of("q"))
                self.later(object(), lambda: self.barriers[q_full.place].receive(1024))
            stored = types.SimpleNamespace(atom=64 * 64 * (2 if "k_tiles" in self.table.buffers else 1), rows=None,
                                           scales=Anything())  # fmt: skip
            self.kernel.produce(stored, stored, None, [0], shared, share)


def decode(which: str, seed: int, change: Callable[[Table], Table] = lambda table: table) -> Decode:
    operand, scales = OPERANDS[which]
    kernel = KERNELS["bf16" if operand == "plain" else "q16kv8"]
    table_of_variant = table_of(kernel.read_text())
    assert table_of_variant is not None
    chip = Decode(kernel, operand, scales, change(table_of_variant(**DIMS, **scales)), seed)
    chip.run(chip.go)
    return chip


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.drawn(1)
def test_every_consumer_reads_every_block_in_turn(which: str, seed: int) -> None:
    chip = decode(which, seed)
    seen = [block for block in BLOCKS if 0 <= block <= LIMIT // 64]
    assert chip.read == {(warp, name): seen for warp in range(4) for name in "kv"}


def with_pipeline(name: str, **changes: Any) -> Callable[[Table], Table]:
    def change(table: Table) -> Table:
        pipelines: list[Pipeline] = [
            each._replace(**changes) if each.name == name else each for each in table.pipelines.values()
        ]
        return Table(tuple(table.roles.values()), tuple(pipelines), tuple(table.buffers.values()))

    return change


FAULTS = {
    "one arrival too many": with_pipeline("k", free=(warps("consumer"), lane("producer"))),
    "one arrival too few": with_pipeline("v", free=(lane("consumer"),)),
    "arrivals of all lanes": with_pipeline("v", free=(threads("consumer"),)),
    "nobody copies": with_pipeline("k", full=(lane("producer"), threads("producer"))),
    "too few bytes": with_pipeline("v", bytes=64),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("which", ["bf16", "head scales"])
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(which: str, name: str) -> None:
    with pytest.raises((Deadlock, AssertionError)):
        for seed in range(3):
            chip = decode(which, seed, FAULTS[name])
            seen = [block for block in BLOCKS if 0 <= block <= LIMIT // 64]
            assert chip.read == {(warp, side): seen for warp in range(4) for side in "kv"}


def test_a_buffer_left_out() -> None:
    def change(table: Table) -> Table:
        buffers = tuple(each for name, each in table.buffers.items() if name != "v_tiles")
        return Table(tuple(table.roles.values()), tuple(table.pipelines.values()), buffers)

    with pytest.raises(TableError, match="v fills v_tiles, which is no buffer"):
        decode("bf16", 0, change)
