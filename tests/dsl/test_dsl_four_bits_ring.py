"""NVFP4 and MXFP4 keys and values in a ring of tiles (msa_tiles.dsl.cutedsl.packed_ring), lane by lane on the CPU."""

from __future__ import annotations

import types
from typing import Any

import lanes
import pytest
import torch
from lanes import Int32, Pointer
from test_dsl_four_bits import DTYPES, LACKING, drawn, each_format, exact, formats, memory, same, swizzled

from msa_tiles.quant import GROUPS, QuantizedTensor

__all__ = ["formats"]  # a fixture
DECODERS = 3


class Tile(Pointer):
    """A place of 16 bits in memory of bytes."""

    def __add__(self, places: int) -> Tile:
        return Tile(self.memory, self.offset + 2 * int(places))

    def toint(self) -> Pointer:
        return Pointer(self.memory, self.offset)


def ring_side(module: types.ModuleType, name: str, which: str, block: int, dim: int) -> Any:
    side = object.__new__(module.InRing)
    side.name, side.block_size, side.head_dim, side.groups = which, block, dim, dim // GROUPS[name].size
    return side


def order_at(block: int, dim: int, groups: int) -> int:
    """Where a tile says how scales lie: behind the rows of the first of two panels, or else before scales."""
    return 128 * block - 16 if dim == 128 else 3 * block * dim // 2 - groups * block - 16


def landed(given: QuantizedTensor, side: Any) -> Any:
    """The bytes of a tile as TMA and copies leave them; elsewhere what was there before."""
    block, dim = side.block_size, side.head_dim
    found = torch.randint(0, 256, (2 * block * dim,), dtype=torch.uint8, generator=torch.Generator().manual_seed(dim))
    raw = 3 * block * dim // 2
    found[raw:] = swizzled(given.data[1])
    scales = given.scale[1].contiguous().view(torch.uint8).flatten()
    found[raw - len(scales) : raw] = scales
    if side.name == "v":
        order = torch.tensor([1 if given.layout == "interleaved" else side.groups], dtype=torch.int32)
        at = order_at(block, dim, side.groups)
        found[at : at + 4] = order.view(torch.uint8)
    return memory(found, 8)


CASES = [
    ("k", 128, 128, "linear"),
    ("v", 128, 128, "interleaved"),
    ("k", 64, 128, "linear"),
    ("v", 64, 128, "linear"),
    ("v", 128, 64, "interleaved"),
    ("k", 128, 64, "linear"),
    ("v", 64, 64, "linear"),
    ("k", 64, 64, "linear"),
]


@each_format
@pytest.mark.parametrize(("which", "block", "dim", "layout"), CASES)
@pytest.mark.drawn(2)
def test_a_tile_is_decoded_in_its_place(
    formats: dict[str, types.ModuleType], name: str, which: str, block: int, dim: int, layout: str
) -> None:
    """By three warps, of which none writes what another one has yet to read."""
    given, side = drawn(name, block, dim, layout), ring_side(formats[name], name, which, block, dim)
    tile = landed(given, side)

    def run() -> None:
        thread = lanes.thread()
        side.decode_tile(Tile(tile, 0), Int32(thread % 32), Int32(thread // 32), DECODERS, 2)

    lanes.launch(run, (), (1,), 32 * DECODERS)
    row, column = torch.meshgrid(torch.arange(block), torch.arange(dim), indexing="ij")
    place = (column // 64 * block + row) * 64 + ((column % 64 // 8) ^ (row % 8)) * 8 + column % 8
    codes = torch.tensor([int(x) & 255 for x in tile], dtype=torch.int32).to(torch.uint8)
    found = codes.view(DTYPES[name][which == "v"])[place]
    same(found, exact(given.dequantize()[1], LACKING[name][which == "v"]))


@pytest.mark.parametrize("fault", ["a row too many goes first", "nobody meets"])
def test_rows_that_are_written_too_early(
    formats: dict[str, types.ModuleType], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, side = drawn("nvfp4", 128, 128), ring_side(formats["nvfp4"], "nvfp4", "k", 128, 128)
    tile = landed(given, side)
    if fault == "nobody meets":
        monkeypatch.setattr(lanes.ARCH, "barrier", lambda **_what: None, raising=False)
    else:
        rows = side.first_rows() + 1
        monkeypatch.setattr(type(side), "first_rows", lambda _self: rows)

    def run() -> None:
        thread = lanes.thread()
        side.decode_tile(Tile(tile, 0), Int32(thread % 32), Int32(thread // 32), DECODERS, 2)

    with pytest.raises(RuntimeError, match="meanwhile"):
        lanes.launch(run, (), (1,), 32 * DECODERS)


@each_format
@pytest.mark.parametrize(("which", "pages_per_block", "layout"), [("k", 0, "linear"), ("v", 4, "interleaved")])
@pytest.mark.parametrize("dim", [64, 128])
def test_scales_come_before_the_bytes(
    formats: dict[str, types.ModuleType], name: str, which: str, pages_per_block: int, layout: str, dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of flat keys past the last one, and of pages out of order; 33 arrivals, as for a stage without scales."""
    block, side = 64, ring_side(formats[name], name, which, 64, dim)
    side.blocks = types.SimpleNamespace(pages_per_block=pages_per_block, box_rows=block // max(pages_per_block, 1))
    generator = torch.Generator().manual_seed(dim)
    pages, head = [3, 8, 40, 0], 1
    if pages_per_block:
        stored = torch.randint(0, 256, (9, 3, 4, side.groups, 4), dtype=torch.uint8, generator=generator)
        where = stored.transpose(-1, -2)
        wanted = torch.cat([stored[min(page, 8), head].flatten() for page in pages])
    else:
        stored = torch.randint(0, 256, (100, 3, side.groups), dtype=torch.uint8, generator=generator)
        where, wanted = stored, stored[[min(50 + token, 99) for token in range(block)], head].flatten()
    source = lanes.Tensor(memory(stored, 8, lanes.Memory), 0, tuple(where.shape), where.stride())
    tile = memory(torch.full((2 * block * dim,), 1, dtype=torch.uint8), 8)
    arrived: Any = []
    for call in ("mbarrier_arrive", "cp_async_mbarrier_arrive_noinc"):
        monkeypatch.setattr(lanes.ARCH, call, lambda at: at.memory.append(lanes.thread()), raising=False)

    def run() -> None:
        page = Int32(pages[lanes.thread() % 4])
        given = formats[name].Stored(None, None, source, None)
        side.load_scales(given, Int32(50), page, Int32(head), Tile(tile, 0), Pointer(arrived, 0))

    lanes.launch(run, (), (1,), 32)
    raw, size = 3 * block * dim // 2, len(wanted)
    found = torch.tensor([int(x) & 255 for x in tile], dtype=torch.uint8)
    assert torch.equal(found[raw - size : raw], wanted)
    if which == "v":
        at = order_at(block, dim, side.groups)
        assert found[at : at + 4].view(torch.int32).item() == (1 if layout == "interleaved" else side.groups)
    assert sorted(arrived) == sorted([0, *range(32)])
    arrived.clear()
    lanes.launch(lambda: side.skip_scales(Pointer(arrived, 0)), (), (1,), 32)
    assert sorted(arrived) == sorted([0, *range(32)])


def test_scales_of_heads(formats: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A global scale of 0 leaves a scale that LSE may be divided by; values are multiplied by theirs at the end."""
    of = {name: [ring_side(formats[name], name, which, 64, 64) for which in "kv"] for name in GROUPS}
    keys, values = of["nvfp4"]
    stored = types.SimpleNamespace(of_heads=[3.0, 0.0])
    assert keys.fold(0.5, stored, 0) == 0.5 * 3 * 2.0**8 and 0 < keys.fold(0.5, stored, 1) < 1e-20
    assert values.of_head(stored, 0) == 3 * 2.0**14
    keys, values = of["mxfp4"]
    assert keys.fold(0.5, None, 0) == 0.5 and values.of_head(None, 0) is None
