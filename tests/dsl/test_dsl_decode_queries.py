"""Queries of e4m3 under keys of 4 bits: how decode_score in CuTe DSL lays them down for wgmma, lane by lane."""

from __future__ import annotations

import types
from typing import Any

import lanes
import pytest
import torch
from lanes import Int32
from test_dsl_e4m3 import ptx
from test_dsl_four_bits import Words, formats, memory, same

from msa_tiles.paths import generated_dir

__all__ = ["formats"]  # a fixture
THREADS, ROWS, CHUNK = 128, 64, 16


class Element(str):
    """An element of tensors, by its name."""

    width = 16


def wide(row: Any, place: int) -> Any:
    return lanes.Tensor(row.memory, row.offset + CHUNK * int(place), (CHUNK,), (1,))


def copy_wide(source: Any, target: Any) -> None:
    for i in range(source.shape[0]):
        target[i] = source[i]


def words_of(tensor: Any, _element: Any) -> Any:
    """16 bytes, or eight numbers of two, as four words."""
    if isinstance(tensor.memory, Words):
        return lanes.Tensor(Words(tensor.memory.of, 4), tensor.offset // 2, (4,), (1,))  # type: ignore[arg-type]
    codes = [int(tensor[i]) & 255 for i in range(CHUNK)]
    return [Int32(sum(code << 8 * i for i, code in enumerate(codes[4 * w : 4 * w + 4]))) for w in range(4)]


@pytest.mark.parametrize("precision", ["q8k4", "q8kmx4"])
@pytest.mark.parametrize(("dim", "heads", "rows"), [(128, 4, 64), (128, 3, 21), (64, 4, 4), (64, 1, 64)])
def test_queries_of_e4m3_become_bfloat16(
    formats: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch, precision: str, dim: int, heads: int,
    rows: int,
) -> None:  # fmt: skip
    """All codes, NaN among them, of tokens from the fifth one on; other rows of the tile stay as they are."""
    monkeypatch.setattr(lanes.ARCH, "inline_ptx", ptx)
    monkeypatch.setattr(lanes._CUTLASS.cute, "recast_tensor", words_of)
    monkeypatch.setattr(lanes._CUTLASS, "Float8E4M3FN", types.SimpleNamespace(width=8), raising=False)
    module = lanes.load(generated_dir() / f"cutedsl/sm90/decode_score_{precision}.py")
    module.__dict__.update(wide=wide, copy_wide=copy_wide)
    made = object.__new__(module.DecodeScore)
    made.element, made.head_dim, made.panel = Element("BFloat16"), dim, 64
    generator = torch.Generator().manual_seed(dim + rows)
    codes = torch.randint(0, 256, (70, heads, dim), dtype=torch.uint8, generator=generator)
    source = lanes.Tensor(memory(codes, 8, lanes.Memory), 0, (70, heads, dim), (heads * dim, dim, 1))
    tile = memory(torch.full((2 * ROWS * dim,), 1), 8)
    queries = lanes.Tensor(tile, 0, (ROWS, dim), (dim, 1))
    lanes.launch(
        lambda: made.load_queries(source, queries, Int32(5), Int32(rows), Int32(lanes.thread())), (), (1,), THREADS
    )
    row, column = torch.meshgrid(torch.arange(ROWS), torch.arange(dim), indexing="ij")
    place = (column // 64 * ROWS + row) * 64 + ((column % 64 // 8) ^ (row % 8)) * 8 + column % 8
    found = torch.tensor([int(x) & 255 for x in tile], dtype=torch.uint8).view(torch.bfloat16)[place]
    wanted = codes[5:].flatten(0, 1)[:rows].view(torch.float8_e4m3fn).to(torch.bfloat16)
    same(found[:rows], wanted)
    assert (found[rows:].view(torch.int16) == 0x101).all()
