"""NVFP4 index keys multiplied as e4m3, their groups scaled behind: the consumers of decode_score q16k4m8, lane by lane.

As in test_dsl_index_columns, for the left side of wgmma that has bytes, for columns of single groups, and for tensor
cores that either are exact or add products with 13 bits below the largest one.
"""

from __future__ import annotations

import types
from typing import Any

import lanes
import pytest
import test_dsl_index_columns as columns
import torch
from lanes import Int32
from test_dsl_e4m3_pairs import ptx as of_pairs
from test_dsl_four_bits import formats, halves, memory
from test_dsl_index_columns import FP8, ROWS, Case, Consumers, queries_of, stand_ins, wanted_of
from torch import Tensor

from msa_tiles.quant import QuantizedTensor, rounding

__all__ = ["formats", "stand_ins"]  # fixtures
DEPTH, WIDTH, PARTS, BITS = 32, 8, 2, 13
CASES = {
    "one query": Case("q16k4m8", ((1, 130), (1, 64)), 4, 128),
    "blocks of 128 keys": Case("q16k4m8", ((1, 300), (2, 70)), 4, 128, 128),
    "four fours of queries": Case("q16k4m8", ((3, 200), (0, 90), (2, 1)), 5, 64),
    "more products than slots": Case("q16k4m8", ((2, 1100),), 8),
    "positions": Case("q16k4m8", ((2, 190),), 3, positions=(70, -1)),
    "not causal": Case("q16k4m8", ((4, 120),), 3, 64, 128, causal=False),
}


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    if "cvt.rn.satfinite.e4m3x2.f32" in text or "cvt.f32.f16 {$w0}" in text:
        return of_pairs(text, write_only_types, read_only_args)
    return columns.ptx(text, write_only_types, read_only_args)


@pytest.fixture
def bytes_of(stand_ins: None, formats: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.ARCH, "inline_ptx", ptx)
    for name, value in {"wide": columns.wide, "copy_wide": columns.copy_wide}.items():
        monkeypatch.setitem(lanes.helper("e4m3_columns").__dict__, name, value)


def added(first: Tensor, products: Tensor, bits: int | None) -> Tensor:
    """[..] + [.., K] summed over K: exactly, or cut off so many bits below the largest one."""
    every = torch.cat((first.unsqueeze(-1), products), -1)
    if bits is not None:
        unit = torch.exp2(every.abs().amax(-1, keepdim=True).clamp_min(2.0**-60).log2().floor() - bits)
        every = (every / unit).trunc() * unit
    return every.sum(-1)


class Bytes(Consumers):
    """With products of 64 keys, 8 columns and 32 bytes of each."""

    modules = ("group_maxima", "e4m3_columns", "operands.index_{}_bytes")
    maxima = (32, 4, 20)  # lanes, warps, products
    algorithm = "_post_scaled"
    bits: int | None = None

    def queries(self) -> Any:
        rows = memory(torch.full((ROWS * 2 * PARTS * self.case.dim,), 1), 8)
        return lanes.Tensor(rows, 0, (len(rows),), (1,))

    def keys(self, operand: types.ModuleType) -> Any:
        made = super().keys(operand)
        made.operand = lambda _product, _held: [lanes.empty((4, 1, made.chunks)) for _ in range(made.units)]
        made.accumulators = lambda _product: [
            lanes.tensor_of(torch.full((4, 1, made.chunks), torch.nan)) for _ in range(made.units)
        ]
        return made

    def multiply(self, _product: Any, into: Any, operand: Any, right: Any) -> None:  # type: ignore[override]
        """Into the accumulators of all chunks of a unit; what they held is gone at once."""
        into.memory[:] = [None] * len(into.memory)
        self.in_flight[lanes.thread()].append((into, operand, 0, right))

    def finish(self, into: Any, registers: Any, _piece: int, right: Any) -> None:
        thread, keys = lanes._HERE.thread, self.kernel.keys
        met = thread.meet("wgmma", registers, whole=True)
        if not hasattr(self, "last") or self.last[0] is not met:
            found = []
            for step in range(keys.chunks):
                rows, total = left_side(dict(enumerate(met)), step), torch.zeros(ROWS, WIDTH, dtype=torch.float64)
                for part in range(PARTS):
                    queries = right.columns(part, step)
                    total = added(total, rows[:, None] * queries, self.bits)
                found.append(total)
            self.last = met, found
        row, column = 16 * (thread.index // 32) + thread.lane // 4, 2 * (thread.lane % 4)
        for step, total in enumerate(self.last[1]):
            for place, value in enumerate(total[[row, row, row + 8, row + 8], [column, column + 1] * 2]):
                into[place, 0, step] = lanes.Float32(value)


class Right(columns.Right):
    """The queries in shared memory, four of them a product."""

    def columns(self, part: int, chunk: int) -> Tensor:
        """[WIDTH, DEPTH] of a chunk, rows of 32 bytes that are swizzled by as many."""
        chunks = self.consumers.case.dim // DEPTH
        place = torch.arange(WIDTH * DEPTH)
        place = (place ^ (place >> 7 & 1) << 4) + ((self.group * PARTS + part) * chunks + chunk) * WIDTH * DEPTH
        codes = torch.tensor([int(self.queries.memory[int(each)]) & 255 for each in place], dtype=torch.uint8)
        return codes.view(FP8).double().view(WIDTH, DEPTH)


def left_side(registers: dict[int, Any], step: int) -> Tensor:
    """What wgmma takes of bytes from the registers of all threads: [ROWS, DEPTH]."""
    found = torch.full((ROWS, DEPTH), torch.nan, dtype=torch.float64)
    for thread, words in registers.items():
        row, column = thread // 32 * 16 + thread % 32 // 4, 4 * (thread % 4)
        for i in range(4):
            at = row + 8 * (i % 2), 16 * (i // 2) + column
            found[at[0], at[1] : at[1] + 4] = halves(words[i, 0, step], torch.uint8).view(FP8).double()
    return found


def consumers_of(case: Case, formats: dict[str, types.ModuleType]) -> Bytes:
    made = Bytes(case, formats)
    made.module.wgmma = types.SimpleNamespace(operand_b=lambda _product, queries: Right(made, queries))
    return made


def lost(case: Case, queries: Tensor, blocks: list[QuantizedTensor]) -> Tensor:
    """What queries may lose: half of 2**-9 of each number, times the power of two of the row, with the largest keys."""
    power = torch.exp2(queries.abs().amax(-1).log2().floor() - 7)
    largest = max(float(block.dequantize().double().abs().sum(1).max()) for block in blocks)
    scale = torch.arange(1.0, 1.0 + queries.shape[0] * case.heads).view(-1, case.heads).double() * 0.5
    return (2.0**-10 * power * largest * scale).T[..., None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.drawn(1)
def test_block_maxima(bytes_of: None, formats: dict[str, types.ModuleType], name: str) -> None:
    """Of every query of several requests, as exact as e4m3 and float32 are; each stage goes back once."""
    case = CASES[name]
    idx_q, queries = queries_of(case)
    consumers = consumers_of(case, formats)
    found, wanted = consumers.run(idx_q), wanted_of(case, queries, consumers.blocks)
    error = (found - wanted).nan_to_num(0.0, posinf=torch.inf).abs()  # -inf is the maximum of no key
    assert torch.equal(found.isneginf(), wanted.isneginf()) and not found.isnan().any()
    assert (error <= lost(case, queries, consumers.blocks) + 2e-6 * wanted.abs().nan_to_num(0.0, neginf=0.0)).all()
    assert consumers.released == list(range(len(consumers.blocks)))


def test_bits_below_the_largest_product(
    bytes_of: None, formats: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores that keep 13 stay within a third of what the spec accepts; so they would not the other way round."""
    case = Case("q16k4m8", ((1, 512),), 4, 128, 128)
    drawn = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    stored = memory(drawn.view(torch.int16), 16, lanes.Memory)
    stored.chunk = 8
    idx_q = lanes.Tensor(stored, 0, (1, 4, 128), (512, 128, 1))
    keys = torch.randn(4, 128, 128, generator=torch.Generator().manual_seed(6))

    def worst(backwards: bool) -> float:
        monkeypatch.setattr(Bytes, "bits", BITS)
        consumers = consumers_of(case, formats)
        for block, values in zip(consumers.blocks, keys, strict=True):
            scale = (values.view(128, 8, 16).abs().amax(-1) / 6).to(FP8)
            codes = (values.view(128, 8, 16) / scale.float()[..., None]).view(128, 128)
            nearest = (codes[..., None] - rounding.e2m1_values(torch.arange(16, dtype=torch.uint8))).abs().argmin(-1)
            block.data[:] = (nearest[:, ::2] | nearest[:, 1::2] << 4).to(torch.uint8)
            block.scale.view(torch.uint8)[:] = scale.view(torch.uint8)
        if backwards:
            whole = Right.columns
            monkeypatch.setattr(Right, "columns", lambda self, part, chunk: whole(self, 1 - part, chunk))
        wanted = wanted_of(case, drawn.double(), consumers.blocks)
        scale = torch.arange(1.0, 5.0).double()[:, None, None] * 0.5
        return float(((consumers.run(idx_q) - wanted) / scale).abs().max())

    in_order, backwards = worst(False), worst(True)
    assert 1e-5 < in_order < 0.01 / 3
    assert in_order < backwards


def test_every_code(bytes_of: None, formats: dict[str, types.ModuleType]) -> None:
    """Exactly, whatever stands beside it in a word."""
    operand = lanes.helper("operands.index_nvfp4_bytes")
    every = torch.arange(16, dtype=torch.uint8)
    values = rounding.e2m1_values(every).double()
    for other in range(16):
        word = Int32(sum((code if i % 3 else other) << 4 * i for i, code in enumerate((3, 9, 15, 6, 0, 12, 10, 5))))
        codes = [int(word) >> 4 * i & 15 for i in range(8)]
        for first, decode in enumerate((operand.even_codes, operand.odd_codes)):
            found = halves(decode(word), torch.uint8).view(FP8).double() * 2.0**operand.POWER
            assert found.tolist() == values[codes[first::2]].tolist()
    for code in range(16):
        word = Int32(code * 0x11111111 if code < 8 else code * 0x11111111 - (1 << 32))
        for decode in (operand.even_codes, operand.odd_codes):
            found = halves(decode(word), torch.uint8).view(FP8).double() * 2.0**operand.POWER
            assert found.tolist() == [values[code]] * 4


def test_a_row_with_infinity_is_infinite(bytes_of: None, formats: dict[str, types.ModuleType]) -> None:
    """Though e4m3 has none. What is no number, as all of a row with NaN, is below all numbers, and stays in its row."""
    case = Case("q16k4m8", ((1, 64),), 4, 128)
    drawn = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    drawn[0, 1, 40], drawn[0, 2, 40], drawn[0, 3, 3] = torch.inf, -torch.inf, torch.nan
    stored = memory(drawn.view(torch.int16), 16, lanes.Memory)
    stored.chunk = 8
    consumers = consumers_of(case, formats)
    found = consumers.run(lanes.Tensor(stored, 0, (1, 4, 128), (512, 128, 1)))[:, 0, 0]
    assert found[0].isfinite() and found[1] == found[2] == torch.inf == -found[3]


@pytest.mark.parametrize(
    "planted", ["one group of a chunk alone", "limits of other queries", "the wait for a unit left out"]
)
def test_a_fault_shows(
    bytes_of: None, formats: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    case = CASES["positions" if planted == "limits of other queries" else "one query"]
    idx_q, queries = queries_of(case)
    consumers = consumers_of(case, formats)
    if planted == "the wait for a unit left out":
        consumers.module.warpgroup = types.SimpleNamespace(wait_group=lambda _left: None)
        with pytest.raises(Exception, match="never written"):
            consumers.run(idx_q)
        return
    maxima = consumers.module.column_maxima
    if planted == "one group of a chunk alone":

        def alone(keys: Any, S: Any, scales: Any, _lane: Any) -> list[Any]:
            return [keys.scaled(S, keys.factors_of_rows(scales), 0, half) for half in range(2)]

        monkeypatch.setattr(maxima, "totals", alone)
    else:
        monkeypatch.setattr(maxima, "column_of", lambda lane: (lane + 1) % 4)
    assert not torch.allclose(consumers.run(idx_q), wanted_of(case, queries, consumers.blocks), rtol=1e-2)
