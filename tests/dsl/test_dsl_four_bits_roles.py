"""The roles of sparse_decode on keys and values of 4 bits at their barriers, as in test_dsl_decode_pipelines.

A consumer warpgroup takes 64 tokens of every block: one of blocks of 64, two of blocks of 128.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from test_dsl_decode_pipelines import BLOCKS, DIMS, HELPERS, LANES, LIMIT, Blocks, Decode, Stages, names_of
from warpgroups import Chip
from warps import Anything, Deadlock, Pointer, changed, load

from msa_tiles.dsl.table import Table, lane, threads, warps
from msa_tiles.paths import generated_dir
from msa_tiles.tables import table_of

KERNEL = generated_dir() / "cutedsl/sm90/sparse_decode_q16kv4.py"


class Ring(Stages):
    """Stages whose number may be the first index, with others behind it, or the last one."""

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        return super().__getitem__((index[0] if index[-1] is None else index[-1], None))


class Packed(Decode):
    """A CTA whose consumers note the blocks that they decode."""

    def __init__(self, table: Table, pieces: int, seed: int) -> None:
        self.pieces, self.consumers = pieces, 4 * pieces
        Chip.__init__(self, 1, self.consumers + 1, LANES, seed)
        self.read, self.table = defaultdict(list), table
        names, chip = names_of(self, self.note), self

        class Storage:
            """What both sides of 4-bit formats share, over stand-ins for what lies in memory."""

            groups, row_bytes = 4, 32

            def __init__(self, name: str, table: Table, head_dim: int, block_size: int, _pages: int) -> None:
                self.name, self.table, self.head_dim, self.block_size = name, table, head_dim, block_size
                self.blocks, self.element = Blocks(chip, block_size), 2

            def order_in(self, _scales: Any) -> dict[int, int]:
                return {0: 4}

            def order(self, _stored: Any) -> int:
                return 4

            def load_scales(
                self, _stored: Any, _row: Any, _pages: Any, _head: Any, _scales: Any, full: Pointer
            ) -> None:
                """Their arrival is what counts."""
                chip.cp_async_mbarrier_arrive_noinc(full)

            def fold(self, value: Any, _stored: Any, _head: Any) -> Any:
                return value

        parts = types.SimpleNamespace(Storage=Storage)
        shared = load(HELPERS / "decoded_left.py", **names)
        more = {"decoded_left": types.SimpleNamespace(**shared), "Held": shared["Held"], "packed": parts}
        more = {**more, "Stored": None, "byte_at": None}
        packed_left = load(HELPERS / "packed_left.py", **names, **more)
        side = load(
            HELPERS / "packed_pieces.py",
            **names,
            **more,
            packed_left=types.SimpleNamespace(**packed_left),
            COLUMNS=packed_left["COLUMNS"],
        )
        helpers = load(HELPERS / "shared.py", **names)
        module = load(KERNEL, **names, key_value=None, make_barriers=None, make_buffers=None)
        self.kernel = object.__new__(module["SparseDecode"])
        self.kernel.__dict__.update(
            cta=table, columns=8, scored_blocks=0, pages_per_block=0, block_size=64 * pieces, head_dim=0, pieces=pieces,
            softmax=lambda *what: self.kernel.meet(what[-2]), merge=lambda *_what: self.kernel.meet_all(),
            emit=lambda *_what: None,
        )  # fmt: skip
        self.sides, self.stages = {}, {}
        for name in "kv":
            left = side["Left"](name, table, 64, 64 * pieces, 0, readers="consumer", transposed=name == "v")
            left.prepare = lambda *_what: None
            left.clear_piece = lambda *what: self.barrier(1 + what[-1], 4 * LANES)
            left.take_keys = left.take_values = lambda _registers, raw, *_what: (
                self.lane == 0 and self.note(raw, self.warp)
            )
            self.sides[name], self.stages[name] = left, Ring(table.depth(name))
        self.kernel.keys, self.kernel.values = self.sides["k"], self.sides["v"]
        self.module, self.make_barriers = module, helpers["make_barriers"]

    def go(self) -> None:
        memory = types.SimpleNamespace(allocate_array=lambda _element, _count: Pointer("barriers"))
        barriers = self.make_barriers(self.table, memory, ())
        held = [
            side.held({f"{name}_raw": self.stages[name], f"{name}_scales": self.stages[name]}, barriers)
            for name, side in self.sides.items()
        ]
        q_full = barriers + self.table.place("q_full")
        shared = self.module["Shared"](Anything(), *held, Anything(), Anything(), None, None, None, q_full)
        ids = BLOCKS[self.lane] if self.lane < len(BLOCKS) else -1
        share = self.module["Share"](0, 0, 0, len(BLOCKS), len(BLOCKS), None, ids, 0, LIMIT * self.pieces)
        if self.warp < self.consumers:
            self.kernel.consume(None, None, shared, share, 1.0, self.warp, None, None)
            return
        if self.elected():
            self.mbarrier_arrive_and_expect_tx(q_full, self.table.bytes_of("q"))
            self.later(object(), lambda: self.barriers[q_full.place].receive(1024))
        stored = types.SimpleNamespace(atom=64 * self.pieces * 32, rows=None, scales=None)
        self.kernel.produce(stored, stored, None, [0], shared, share)


def check(seed: int, pieces: int, change: Callable[[Table], Table] = lambda table: table) -> None:
    table_of_variant = table_of(KERNEL.read_text())
    assert table_of_variant is not None
    chip = Packed(change(table_of_variant(**{**DIMS, "block_size": 64 * pieces})), pieces, seed)
    chip.run(chip.go)
    seen = [block for block in BLOCKS if 0 <= block <= LIMIT // 64]
    assert chip.read == {(warp, name): seen for warp in range(chip.consumers) for name in "kv"}


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.drawn(1)
def test_every_consumer_reads_every_block_in_turn(seed: int, pieces: int) -> None:
    check(seed, pieces)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one warpgroup frees": ("k", {"free": (warps("chooser"), lane("producer"))}),
    "one arrival too many": ("k", {"free": (warps("consumer"), lane("producer"))}),
    "one arrival too few": ("v", {"free": (lane("consumer"),)}),
    "nobody waits for scales": ("k", {"full": (lane("producer"),)}),
    "copies of more lanes": ("v", {"full": (lane("producer"), threads("consumer"))}),
    "too few bytes": ("v", {"bytes": 64}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_table_that_does_not_fit_the_roles(fault: str) -> None:
    pipeline, changes = FAULTS[fault]
    with pytest.raises((Deadlock, AssertionError)):
        for seed in range(8):
            pieces = 2 if fault == "one warpgroup frees" else 1
            check(seed, pieces, lambda table: changed(table, pipeline, **changes))
