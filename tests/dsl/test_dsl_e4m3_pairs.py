"""Queries as pairs of e4m3 (operands/e4m3_pairs.py of CuTe DSL), on the CPU: lane by lane, and where they lie."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
import lanes
import pytest
import torch
from cutlass import Int32 as Number
from lanes import Float32, Int32, Pointer, SharedMemory
from test_dsl_cutedsl import int32, places
from test_dsl_e4m3 import View, halves, memory, word
from torch import Tensor

from msa_tiles.dsl.cutedsl.operands import e4m3_pairs as real

FP8 = torch.float8_e4m3fn


class Bytes(Pointer):
    """A pointer to elements of several bytes; what it is cast to counts bytes again."""

    def __init__(self, of: SharedMemory, offset: int, size: int) -> None:
        super().__init__(View(of, size, 8), offset)  # type: ignore[arg-type]
        self.of, self.size = of, size

    def __add__(self, count: int) -> Bytes:
        return Bytes(self.of, self.offset + int(count), self.size)

    def toint(self) -> Pointer:
        return Pointer(self.of, self.offset * self.size)


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    if "cvt.rn.satfinite.e4m3x2.f32" in text:
        assert len(read_only_args) == 4 and len(write_only_types) == 1
        values = torch.tensor([float(value) for value in read_only_args])
        return word(values.clamp(-448, 448).to(FP8).view(torch.uint8))  # a NaN stays one
    [given] = read_only_args
    if "cvt.f32.f16 {$w0}" in text:
        return tuple(Float32(value) for value in halves(given, torch.float16).tolist())
    assert "cvt.rn.f16x2.e4m3x2" in text
    decoded = halves(given, torch.uint8).view(FP8).to(torch.float16)
    return word(decoded[:2]), word(decoded[2:])


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module, over stand-ins for what lanes.py has none for."""

    def make_ptr(element: Any, place: Pointer, _memspace: Any, assumed_align: int) -> Pointer:
        size = {lanes.Int32: 4, "one byte": 1}[element]
        assert place.offset % assumed_align == 0
        return Bytes(place.memory, place.offset // size, size)  # type: ignore[arg-type]

    for name, value in {
        "inline_ptx": ptx,
        "mbarrier_wait": lambda _barrier, _phase: None,
        "fence_view_async_shared": lambda: None,
    }.items():
        monkeypatch.setattr(lanes.ARCH, name, value, raising=False)
    for name in ("Float16", "BFloat16"):
        monkeypatch.setattr(lanes._CUTLASS, name, name, raising=False)
    monkeypatch.setattr(lanes._CUTLASS, "Uint8", Int32, raising=False)
    monkeypatch.setattr(lanes._CUTLASS, "Float8E4M3FN", "one byte", raising=False)
    monkeypatch.setattr(lanes._CUTLASS.cute, "make_ptr", make_ptr)
    yield lanes.load(lanes.PACKAGE / "dsl/cutedsl/operands/e4m3_pairs.py")


def bytes_of(head_dim: int) -> Tensor:
    """Where a tile's e4m3 lie, [part, row, column]: eight rows of both parts, swizzled as TMA does rows of bytes."""
    part, row, column = torch.meshgrid(*map(torch.arange, (2, 64, head_dim)), indexing="ij")
    place = row // 8 * (16 * head_dim) + part * (8 * head_dim) + row % 8 * head_dim + column
    return place ^ (place >> 7 & (7 if head_dim == 128 else 3)) << 4


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_become_pairs(pairs: types.ModuleType, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))
    size = torch.randint(-100, 100, (64, 1), generator=generator)
    queries = (torch.randn(64, head_dim, generator=generator) * 2.0**size).to(torch.bfloat16)
    queries[7] = 0
    queries[11, 3], queries[12, 5] = torch.inf, torch.nan
    queries[13] = torch.finfo(torch.bfloat16).max
    queries[14] = 2.0**-133
    row, column = torch.meshgrid(torch.arange(64), torch.arange(head_dim), indexing="ij")
    place = (row // 8 * (head_dim // 64) + column // 64) * 512 + row % 8 * 64 + column % 64
    laid = torch.empty(64 * head_dim, dtype=torch.int16)
    laid[place ^ (place >> 6 & 7) << 3] = queries.view(torch.int16)
    shared, powers = memory(laid.view(torch.uint8), 8), memory(torch.full((64,), 99), 8)
    side = object.__new__(pairs.InRing)
    side.head_dim, side.token_scales = head_dim, False
    held = lanes.Tensor(powers, 0, (64,), (1,))
    scales = torch.empty(64, dtype=torch.float64)

    def run() -> None:
        warp, lane = Int32(lanes.thread() // 32), Int32(lanes.thread() % 32)
        side.decode_queries(Bytes(shared, 0, 2), held, None, Int32(0), lane, warp, 3)

    def scale() -> None:
        own = lanes.empty((2,))
        own.fill(Float32(3.0))
        first = lanes.thread() // 8 * 16 + lanes.thread() % 8
        side.scale_rows(own, lanes.Tensor(kept, 0, (64,), (1,)), Int32(first))
        for half in range(2):
            scales[first + 8 * half] = float(own[half]) / 3

    lanes.launch(run, (), (1,), 96)
    kept = memory(torch.tensor([int(x) for x in powers]), 8)
    lanes.launch(scale, (), (1,), 32)
    found = torch.tensor([int(x) for x in shared], dtype=torch.uint8)[bytes_of(head_dim)].view(FP8).double()
    whole = queries.isfinite().all(-1)
    assert sorted(torch.nonzero(~whole).flatten().tolist()) == [11, 12]
    assert found[:, 11, 3].isnan().any() and found[:, 12, 5].isnan().any()
    assert not found[:, whole].isnan().any() and (found[:, 7] == 0).all()
    # Below that, scales are no smaller than what LSE may be divided by.
    usual = whole & (queries.abs().amax(-1) > 2.0**-90)
    largest = found[0].abs().amax(-1)
    assert ((largest >= 2**7) & (largest <= 2**8))[usual].all()
    got, wanted = found.sum(0) * scales[:, None], queries.double()
    assert usual.sum() > 30
    large = (wanted.abs() >= 2.0**-9 * wanted.abs().amax(-1, keepdim=True)) & usual[:, None]
    assert large.float().mean() > 0.5 and torch.equal(got[large], wanted[large])
    # Half of what the smallest e4m3 counts in.
    assert ((got - wanted).abs() <= 2.0**-10 * scales[:, None])[usual].all()


@cute.jit
def pair_places(side: cutlass.Constexpr, swizzles: cutlass.Constexpr, tile: cute.Tensor, block: cute.Tensor):
    """Where the real operand says that queries lie, [row, column, part], and keys; how both are swizzled."""
    for layout in (side.pairs_layout(), side.bytes_layout(side.block_size)):
        swizzles.append(str(layout.inner))
    places(side.pairs_layout().outer, tile)
    keys = side.bytes_layout(side.block_size).outer
    for row in cutlass.range(block.shape[0]):
        for column in cutlass.range(block.shape[1]):
            block[row, column] = Number(keys((row, column)))


@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 128), (64, 64)])
def test_the_product_reads_queries_and_keys_where_they_lie(head_dim: int, block_size: int) -> None:
    side = object.__new__(real.InRing)
    side.head_dim, side.block_size = head_dim, block_size
    tile, block = int32(64, head_dim, 2), int32(block_size, head_dim)
    swizzles: list[str] = []
    pair_places(side, swizzles, cute.runtime.from_dlpack(tile), cute.runtime.from_dlpack(block))
    assert swizzles == [f"S<{3 if head_dim == 128 else 2},4,3>"] * 2
    swizzled = tile.long() ^ (tile.long() >> 7 & (7 if head_dim == 128 else 3)) << 4
    assert torch.equal(swizzled.permute(2, 0, 1), bytes_of(head_dim))
    # As TMA lays down the rows of a block.
    assert torch.equal(block.long(), torch.arange(block_size * head_dim).view(block_size, head_dim))
