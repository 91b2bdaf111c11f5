"""split_selection in CuTe DSL, run thread by thread on the CPU: see `lanes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lanes
import pytest
import torch
from lanes import Int32
from torch import Tensor

from msa_tiles import reference
from msa_tiles.paths import generated_dir
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Disagreement
from msa_tiles.verify.hybrid import defined_parts

KERNEL = generated_dir() / "cutedsl/sm90/split_selection_bf16.py"
POISON = -77
NAMES = ("rest", "rest_counts", "shared", "shared_counts", "last_rows")
# The last two times 64 are 0 and 64 in 32 bits, with 128 likewise.
WILD = (2**31 - 1, -(2**31), -2, 1 << 26, (1 << 26) + 1)


@dataclass
class Call:
    """Requests of (queries, keys), what their queries select, and how it is laid out."""

    requests: Sequence[tuple[int, int]]
    topk: int
    tile_tokens: int
    block_size: int = 64
    heads: int = 1
    fill: int = 0
    seed: int = 0
    behind: int = 0  # queries past the last request
    near: float = 0.8  # how often a slot of a query holds what its neighbour has there, in another order
    messy: float = 0.0  # how often a slot holds nothing, a wild id, a twin, or a block that the query does not see
    positions: bool = False
    shortened: bool = False  # requests use a part of their keys
    strides: tuple[int, int, int] = (0, 1, 2)  # the dimensions in memory, from the slowest to the fastest
    where: dict[str, Tensor] = field(init=False)
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.chance = torch.Generator().manual_seed(self.seed)
        queries, keys = (torch.tensor(lengths) for lengths in zip(*self.requests, strict=True))
        starts = (torch.cat([torch.zeros(1), lengths.cumsum(0)]).int() for lengths in (queries, keys))
        self.where = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        total_q = int(queries.sum()) + self.behind
        if self.shortened:
            self.where["seqused_k"] = (keys - keys // 3).int()
        used = self.where.get("seqused_k", keys).tolist()
        of = torch.repeat_interleave(torch.arange(len(self.requests)), queries).tolist()
        if self.positions:
            most = torch.tensor([used[request] for request in of] + [9] * self.behind)
            self.where["q_positions"] = (torch.rand(total_q, generator=self.chance) * (most + 20)).int() - 3
        self.ids = torch.full((self.heads, total_q, self.topk), -1, dtype=torch.int32)
        for head in range(self.heads):
            for query in range(total_q):
                blocks = -(-used[of[query]] // self.block_size) if query < len(of) else 3
                neighbour = of[query - 1 : query] == of[query : query + 1]
                self.ids[head, query] = self._row(blocks, self.ids[head, query - 1] if neighbour else None)

    def _row(self, blocks: int, before: Tensor | None) -> Tensor:
        row = torch.full((self.topk,), -1, dtype=torch.int32)
        chosen = torch.randperm(blocks, generator=self.chance)[: self.topk].int()
        row[: len(chosen)] = chosen
        if before is not None:
            kept = before[(before >= 0) & (torch.rand(self.topk, generator=self.chance) < self.near)].unique()
            new = row[~torch.isin(row, kept)]
            row = torch.cat([kept, new])[: self.topk]
            row = row[torch.randperm(self.topk, generator=self.chance)]
        for slot in range(self.topk):
            if self._draw(1000) < self.messy * 1000:
                kind = self._draw(4)
                others = (-1, WILD[self._draw(len(WILD))], int(row[self._draw(self.topk)]), blocks + self._draw(2))
                row[slot] = others[kind]
        return row

    def _draw(self, most: int) -> int:
        return int(torch.randint(most, (), generator=self.chance))


def split(call: Call, file: Path) -> tuple[Tensor, ...]:
    module = lanes.load(file)
    heads, total_q, topk = call.ids.shape
    tiles = -(-total_q // call.tile_tokens)
    ids = lanes.laid_out(call.ids, call.strides)
    lengths = lanes.lengths_of(module, call.where)
    shapes = (call.ids.shape, (heads, total_q), (heads, tiles, max(4 * topk // 3, 1), 2), (heads, tiles), (total_q,))
    outputs = [lanes.tensor_of(torch.full(shape, POISON, dtype=torch.int32)) for shape in shapes]
    kernel = module.SplitSelection(call.block_size, call.tile_tokens)
    grid = (-(-tiles // module.WARPS), heads, 1)
    lanes.launch(kernel.kernel, (ids, lengths, *outputs, Int32(call.fill)), grid, kernel.cta.threads)
    return tuple(torch.tensor([int(x) for x in out.memory]).int().view(out.shape) for out in outputs)


def check(call: Call, file: Path = KERNEL) -> None:
    wanted = reference.split_selection(
        call.ids, tile_tokens=call.tile_tokens, block_size=call.block_size, fill=call.fill, **call.where
    )
    for name, got, value in zip(NAMES, defined_parts(split(call, file)), wanted, strict=True):
        compare.same(name, got, value)


RAGGED = ((3, 300), (0, 90), (1, 700), (6, 640), (0, 0), (5, 3), (9, 1100))
CALLS = {
    "one_token": Call([(1, 1)], 1, 4),
    "a_whole_block": Call([(1, 128)], 2, 4),
    "a_key_less": Call([(1, 127)], 2, 4),
    "untidy": Call([(6, 1900), (7, 1500)], 5, 8, fill=2, messy=0.3, seed=2),
    "two_steps": Call([(2, 4200)], 64, 4, messy=0.1, near=0.5),
    "one_slot": Call([(21, 130)], 1, 8, near=0.9, heads=2),
    "one_slot_filled": Call([(21, 400)], 1, 4, fill=1, near=0.5),
    "ragged": Call(RAGGED, 5, 8, heads=2, strides=(1, 2, 0)),
    "ragged_filled": Call(RAGGED, 5, 4, fill=3, messy=0.2, shortened=True),
    "ragged_positions": Call(RAGGED, 5, 4, fill=2, messy=0.1, positions=True, behind=3, seed=1),
    "behind": Call([(2, 200), (7, 500)], 5, 4, behind=9, strides=(2, 0, 1)),
    "all_share": Call([(16, 5000)], 16, 8, near=1.0, block_size=128),
    "sixteen": Call([(20, 2500)], 16, 4, near=0.9, block_size=128),
    "sixteen_filled": Call([(9, 2000), (8, 3000)], 16, 8, fill=12, messy=0.1, near=0.7, shortened=True),
    "filled_to_the_brim": Call([(8, 4000)], 16, 8, fill=1000, near=0.3),
    "fewer_than_fill": Call([(4, 200), (4, 100)], 5, 8, fill=99, seed=3),
    "long_rows": Call([(7, 6000)], 64, 4, near=0.95, messy=0.05),
    "long_rows_filled": Call([(3, 5000), (6, 9000)], 64, 8, fill=70, near=0.9, positions=True, strides=(1, 0, 2)),
    "nothing_selected": Call([(6, 0), (3, 0)], 16, 4, fill=2),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.drawn(1)
def test_the_split_is_that_of_the_reference(name: str) -> None:
    check(CALLS[name])


# What each fault replaces, and by what.
FAULTS = {
    "shared are blocks that half select": ("tile.tokens - tile.tokens // 4", "tile.tokens - tile.tokens // 2"),
    "shared are blocks that all select": ("tile.tokens - tile.tokens // 4", "tile.tokens"),
    "three quarters are rounded down": ("tile.tokens - tile.tokens // 4", "tile.tokens * 3 // 4"),
    "three quarters are of whole tiles": ("tile.tokens - tile.tokens // 4", "self.tile_tokens // 4 * 3"),
    "fill is left alone": ("cutlass.min(fill, capacity)", "Int32(0)"),
    "the list grows past fill": ("if taken & (rank < most):", "if taken:"),
    "the list counts more than it holds": ("listed = cutlass.min(listed + count_bits(takers), most)",
                                           "listed = listed + count_bits(takers)"),
    "equal blocks stand in the opposite order": ("bits_below(tile.lane))\n                    if taken",
                                                 "~bits_below(tile.lane + 1))\n                    if taken"),
    "fewest queries first": ("count = self.tile_tokens - less", "count = less + 1"),
    "the mask is shifted": ("| (1 << token)", "| (1 << (token + 1) % self.tile_tokens)"),
    "the last of equal ids owns": ("last - slot, hit[c])", "pick(hit[c] < 0, last - slot, hit[c]), hit[c])"),
    "the last query's entry owns": ("cutlass.min(owner[c], hit[c])", "hit[c]"),
    "twins stay": ("| twin[c]", ""),
    "other queries' entries are twins": (" & (entry <= last)", ""),
    "what is shared stays": ("(tile.owners[owner & ENTRY] & SHARED) == 0", "True"),
    "wild ids wrap": ("(block <= limit // self.block_size)", "(block * self.block_size <= limit)"),
    "ids below zero are taken": ("(block >= 0) & ", ""),
    "one block too many is seen": ("block <= limit // self.block_size", "block <= limit // self.block_size + 1"),
    "requests meet": ("row = start + block", "row = block"),
    "queries past the last request see keys": (
        "if (tile.lane < tile.tokens) & (token < lengths.cu_seqlens_q[requests]):", "if tile.lane < tile.tokens:"
    ),
    "a query that sees one key less than all cuts nothing": (
        "visible < self.block_size - 1", "visible < self.block_size - 2"
    ),
    "a query that sees all cuts": ("visible < self.block_size - 1", "visible < self.block_size"),
    "queries that do not select a block cut it": ("(((mask >> t) & 1) != 0) & ", ""),
    "a missing query cuts nothing": ("cut = mask != (Int32(1) << tile.tokens) - 1", "cut = Boolean(False)"),
    "missing queries count": ("(Int32(1) << tile.tokens) - 1", "(1 << self.tile_tokens) - 1"),
    "valid rows are those of a whole block": ("cutlass.min(tile.starts[token] + tile.lengths[token] - row, "
                                              "self.block_size)", "self.block_size"),
    "valid rows are the first query's": ("tile.lengths[token]", "tile.lengths[0]"),
    "the rest holds rows": (" - tile.starts[token]) // self.block_size", " - tile.starts[token])"),
    "the rest of all requests begins at row 0": ("(tile.rows[entry] - tile.starts[token])", "tile.rows[entry]"),
    "the second half of a long row overwrites the first": ("number = number + count_bits(keepers)",
                                                           "number = count_bits(keepers)"),
    "nothing fills up the rest": ("while slot < tile.topk:", "while slot < 0:"),
    "a warp fills up once": ("slot = slot + WARP", "slot = tile.topk"),
    "last rows are positions": ("start + limit, -1", "limit, -1"),
    "queries that see nothing have a last row": ("pick(limit >= 0, start + limit, -1)", "start + limit"),
    "a long row is read once": ("= row\n                    slot = slot + WARP",
                                "= row\n                    slot = tile.topk"),
    "queries side by side are one": ("ballot(kept) & tile.fellows", "ballot(kept)"),
    "the last lanes of a query are another's": ("bits_below(slots) <<", "bits_below(slots - 1) <<"),
    "every query begins at slot 0 of the warp": ("lane - beside * slots", "lane"),
    "missing queries are written": (" & (token < tile.tokens)\n            number", "\n            number"),
    "missing queries are read": ("if token < tile.tokens:\n                        block =",
                                 "if token >= 0:\n                        block ="),
    "a warp looks for the owners of one batch": ("batch * (BATCH * WARP)", "batch * WARP"),
    "the tiles of a CTA are one": ("tile_group * WARPS + warp", "tile_group * WARPS"),
    "entries are read before all know where they stand": (
        "last_rows)\n            cute.arch.sync_warp()", "last_rows)"
    ),
    "owners are sought before all rows are there": (
        "block_indices, head)\n            cute.arch.sync_warp()", "block_indices, head)"
    ),
    "owners of others are read before all are flagged": (
        "cute.arch.sync_warp()\n            self.write_rest", "self.write_rest"
    ),
    "too many warps work": ("if tile_index < shared.shape[1]:", "if tile_index < shared.shape[1] + 1:"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_shows(fault: str, tmp_path: Path) -> None:
    file = lanes.plant(FAULTS[fault], KERNEL, tmp_path)
    with pytest.raises((Disagreement, IndexError, RuntimeError)):
        for call in CALLS.values():
            check(call, file)
