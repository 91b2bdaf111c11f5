"""How decode_score in CuTe DSL lays queries down as columns under keys of 4 bits, lane by lane."""

from __future__ import annotations

import types
from typing import Any

import lanes
import pytest
import torch
from lanes import Int32
from test_dsl_four_bits import formats, memory, same
from test_dsl_index_columns import ELEMENTS, stand_ins
from torch import Tensor

__all__ = ["formats", "stand_ins"]  # fixtures
THREADS, ROWS = 128, 64
DTYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float8E4M3FN": torch.float8_e4m3fn}


def drawn(stored: str, heads: int, dim: int) -> Tensor:
    """All codes of e4m3, NaN among them; or rows of any magnitude, with NaN, infinity and nothing but 0."""
    generator = torch.Generator().manual_seed(dim + heads)
    if stored == "Float8E4M3FN":
        return torch.randint(0, 256, (70, heads, dim), dtype=torch.uint8, generator=generator).view(DTYPES[stored])
    found = torch.randn(70, heads, dim, generator=generator)
    found *= torch.randint(-120, 120, (70, heads, 1), generator=generator).double().exp2()
    found[5, 0] = 0.0
    found[6, 0, 3], found[6, -1, 7], found[7, 0, 0] = torch.nan, torch.inf, -torch.inf
    return found.to(torch.bfloat16)


def laid_down(stored: str, element: str, values: Tensor, rows: int) -> tuple[Tensor, list[Any]]:
    """The tile's rows from token 5 on, and their powers of two."""
    _, heads, dim = values.shape
    columns = object.__new__(lanes.helper("query_columns").Columns)
    columns.rows, columns.head_dim, columns.threads = ROWS, dim, THREADS
    columns.stored, columns.element = ELEMENTS[stored], ELEMENTS[element]
    columns.chunks = dim * columns.stored.width // 128
    codes = values.view(torch.uint8 if columns.stored.width == 8 else torch.int16)
    source = memory(codes, columns.stored.width, lanes.Memory)
    source.chunk = 128 // columns.stored.width
    idx_q = lanes.Tensor(source, 0, tuple(codes.shape), (heads * dim, dim, 1))
    tile = memory(torch.full((ROWS * dim,), 0x101), 16)
    queries = lanes.Tensor(tile, 0, (ROWS, dim), (dim, 1))
    powers = lanes.Tensor(lanes.SharedMemory([None] * ROWS), 0, (ROWS,), (1,))
    lanes.launch(
        lambda: columns.bring(idx_q, queries, powers, Int32(5), Int32(rows), Int32(lanes.thread())), (), (1,), THREADS
    )
    row, column = torch.meshgrid(torch.arange(ROWS), torch.arange(dim), indexing="ij")
    place = (row // 8 * (dim // 64) + column // 64) * 512 + row % 8 * 64 + column % 64
    place = place ^ (place >> 6 & 7) << 3
    found = torch.tensor([int(x) & 0xFFFF for x in tile], dtype=torch.int32).to(torch.int16)[place]
    return found.view(DTYPES[element]), list(powers.memory)


@pytest.mark.parametrize("element", ["BFloat16", "Float16"])
@pytest.mark.parametrize("stored", ["BFloat16", "Float8E4M3FN"])
@pytest.mark.parametrize(("dim", "heads", "rows"), [(128, 4, 64), (128, 3, 21), (64, 4, 4), (64, 1, 64)])
@pytest.mark.drawn(3)
def test_rows_of_queries(
    stand_ins: None, formats: dict[str, types.ModuleType], stored: str, element: str, dim: int, heads: int, rows: int
) -> None:
    """Exact, but for what lies 2**38 below the largest number of a row of float16; other rows stay as they are."""
    values = drawn(stored, heads, dim)
    found, powers = laid_down(stored, element, values, rows)
    wanted = values[5:].flatten(0, 1)[:rows].double()
    assert powers[rows:] == [None] * (ROWS - rows)
    own = torch.tensor([float(power) for power in powers[:rows]], dtype=torch.float64)[:, None]
    assert (own.log2() % 1 == 0).all()
    assert (found[rows:].view(torch.int16) == 0x101).all()
    assert not (found[:rows].isinf() & wanted.isfinite()).any()
    got = found[:rows].double() * own
    if stored == element or stored == "Float8E4M3FN":
        assert (own == 1).all()
        same(got, wanted)
        return
    for kind in (torch.isnan, torch.isinf):
        assert torch.equal(kind(got), kind(wanted)) and torch.equal(got[kind(got)] > 0, wanted[kind(got)] > 0)
    finite = wanted.isfinite().all(1)  # what else a row holds does not matter: no product of it is a number
    lost = (got - wanted)[finite].abs().amax(1)
    assert (lost <= wanted[finite].abs().amax(1) * 2.0**-38).all()
