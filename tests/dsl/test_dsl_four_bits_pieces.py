"""Pieces of blocks of NVFP4 and MXFP4 in registers (msa_tiles.dsl.cutedsl.packed_pieces), lane by lane on the CPU.

As in test_dsl_four_bits, whose stand-ins these tests use.
"""

from __future__ import annotations

import math
import types
from typing import Any

import lanes
import pytest
import test_dsl_four_bits as whole
import torch
from lanes import Float32, Int32, Memory, Pointer
from test_dsl_e4m3 import halves
from test_dsl_four_bits import DTYPES, LACKING, THREADS, drawn, each_format, exact, left_side, memory, same, swizzled
from torch import Tensor

from msa_tiles.paths import generated_dir
from msa_tiles.quant import QuantizedTensor, rounding

PIECE = 64
formats = whole.formats


@pytest.fixture
def modules(formats: dict[str, types.ModuleType]) -> dict[str, types.ModuleType]:
    """The operands of sparse_decode."""
    return {name: lanes.helper(f"operands.{name}_pieces") for name in formats}


def side_of(module: types.ModuleType, name: str, transposed: bool, block: int, dim: int) -> Any:
    side = whole.left(module, name, transposed, block, dim)
    side.pieces, side.readers = block // PIECE, THREADS * (block // PIECE)
    side.rows, side.depth = (dim, PIECE) if transposed else (PIECE, dim)
    return side


def test_every_pair_of_codes(formats: dict[str, types.ModuleType]) -> None:
    """In every place of a word, beside other codes."""
    words = lanes.helper("e2m1_words")
    values = rounding.e2m1_values(torch.arange(16, dtype=torch.uint8)).double()
    generator = torch.Generator().manual_seed(4)
    drawn_codes = torch.randint(0, 16, (200, 8), generator=generator)
    each = torch.stack([(torch.arange(8) * k + c) % 16 for c in range(16) for k in range(3)])
    for codes in torch.cat((drawn_codes, each)):
        word = Int32(sum(int(code) << 4 * i for i, code in enumerate(codes)))
        for pairs, dtype, lacking in (
            (words.pairs_f16(word), torch.float16, 14),
            (words.pairs_bf16(word), torch.bfloat16, 126),
        ):
            assert len(pairs) == 4
            for i, pair in enumerate(pairs):
                found = halves(pair, dtype)
                wanted = exact(values[codes[[i, i + 4]]], lacking)
                same(found, wanted)
                assert torch.equal(found.signbit(), codes[[i, i + 4]] > 7)


def test_every_pair_of_e8m0(formats: dict[str, types.ModuleType]) -> None:
    words, e2m1 = lanes.helper("e2m1_words"), lanes.helper("e2m1")
    for first in range(256):
        for second in {0, 1, 127, 254, 255, first, first * 7 % 256}:
            found = words.e8m0_pair(Int32(first), Int32(second))
            wanted = e2m1.e8m0_bits(Int32(first)) | e2m1.e8m0_bits(Int32(second)) << 16
            assert int(found) == int(wanted), (first, second)


def taken(side: Any, module: types.ModuleType, given: QuantizedTensor, valid: int | None, piece: int) -> dict[int, Any]:
    """The registers of a piece's threads, of the second of two stages."""
    block, dim = side.block_size, side.head_dim
    raw = memory(torch.stack([swizzled(each) for each in given.data]), 8)
    rows = block + (16 // side.groups if side.transposed else 0)
    scales = memory(torch.stack([whole.with_order(given, number, side) for number in range(2)]), 8)
    held = module.Held(
        lanes.Tensor(raw, 0, (2, block, dim // 2), (block * dim // 2, dim // 2, 1)),
        lanes.Tensor(scales, 0, (side.groups, rows, 2), (1, side.groups, side.groups * rows)),
        Pointer(Memory(), 0),
        Pointer(Memory(), 0),
    )
    registers = {}

    def run() -> None:
        own = lanes.empty((4, side.rows // 64, side.depth // 16))
        limit = None if valid is None else Int32(valid - PIECE * piece)
        thread = Int32(lanes.thread())
        registers[lanes.thread()] = side.take(own, held, Int32(1), Int32(0), limit, thread, thread // 32, Int32(piece))

    lanes.launch(run, (), (1,), THREADS)
    return registers


@each_format
@pytest.mark.parametrize(("block", "dim"), [(64, 128), (128, 128), (128, 64)])
@pytest.mark.drawn(1)
def test_pieces_of_keys(modules: dict[str, types.ModuleType], name: str, block: int, dim: int) -> None:
    given, side = drawn(name, block, dim), side_of(modules[name], name, False, block, dim)
    wanted = exact(given.dequantize()[1], LACKING[name][0])[:, prepared(side)]
    assert wanted[3].isnan().any()
    for piece in range(block // PIECE):
        found = left_side(taken(side, modules[name], given, None, piece), PIECE, dim, DTYPES[name][0])
        same(found, wanted[PIECE * piece :][:PIECE])


@each_format
@pytest.mark.parametrize(
    ("block", "dim", "valid", "layout"),
    [
        (64, 64, 64, "linear"), (64, 128, 37, "interleaved"), (128, 64, 1, "linear"), (128, 128, 101, "interleaved"),
        (128, 128, 128, "linear"), (128, 128, 38, "linear"),
    ],
)  # fmt: skip
@pytest.mark.drawn(2)
def test_pieces_of_values(
    modules: dict[str, types.ModuleType], name: str, block: int, dim: int, valid: int, layout: str
) -> None:
    """Tokens from `valid` on are 0, whatever their scales are, a piece without any other among them."""
    given, side = drawn(name, block, dim, layout), side_of(modules[name], name, True, block, dim)
    place = [
        side.column_of(warp, lane, half, m)
        for m in range(dim // 64)
        for warp in range(4)
        for half in range(2)
        for lane in range(0, 32, 4)
    ]
    assert sorted(place) == list(range(dim))
    wanted = exact(given.dequantize()[1], LACKING[name][1]).T[place]
    for piece in range(block // PIECE):
        found = left_side(taken(side, modules[name], given, valid, piece), dim, PIECE, DTYPES[name][1])
        own, seen = wanted[:, PIECE * piece :][:, :PIECE], min(max(valid - PIECE * piece, 0), PIECE)
        same(found[:, :seen], own[:, :seen])
        assert (found[:, seen:].abs() <= (0 if name == "nvfp4" else 6 * 2.0**-127)).all()
        assert piece or valid < 4 or found[:, 3].isnan().any()


def prepared(side: Any) -> Tensor:
    """Which column of the queries `prepare` puts in each place, all readers working on it."""
    side.threads = side.readers
    try:
        return whole.prepared(side, side.readers)
    finally:
        side.threads = THREADS


@pytest.mark.parametrize(("pieces", "dim", "group"), [(2, 128, 16), (2, 64, 8)])
def test_pieces_are_merged(monkeypatch: pytest.MonkeyPatch, pieces: int, dim: int, group: int) -> None:
    """Piece after piece has its own maxima; one that saw nothing has none, and NaN goes on."""
    cute = lanes._CUTLASS.cute
    monkeypatch.setattr(cute, "math", types.SimpleNamespace(exp2=lambda x, fastmath: Float32(2.0 ** float(x))))
    monkeypatch.setattr(cute, "size", lambda tensor: math.prod(tensor.shape))
    module = lanes.load(generated_dir() / "cutedsl/sm90/sparse_decode_q16kv4.py")
    kernel = object.__new__(module.SparseDecode)
    kernel.__dict__.update(columns=group, head_dim=dim, pieces=pieces)
    kernel.meet_all = lambda: lanes._HERE.thread.barrier(True)
    generator = torch.Generator().manual_seed(dim + group)
    held = dim * group // THREADS
    tops = 4 * torch.randn(pieces, THREADS, group // 4, generator=generator)
    sums = torch.rand(pieces, THREADS, group // 4, generator=generator)
    outputs = torch.randn(pieces, THREADS, held, generator=generator)
    column = torch.tensor([place % 2 + 2 * (place // 4 % (group // 8)) for place in range(held)])
    # One column that no piece saw, one that the last one did not, one with NaN.
    for hidden, number in ((range(pieces), 0), (range(1, pieces), 1)):
        for piece in hidden:
            sums[piece, :, number], tops[piece, :, number] = 0.0, -1.0e30
            outputs[piece][:, column == number] = 0.0
    last = group // 4 - 1
    sums[1, 5, last] = outputs[1, 5, column == last] = torch.nan
    scale_log2 = 0.37
    allocator, merged = lanes.Allocator(), {}

    def run() -> None:
        others = allocator.allocate_tensor(None, (THREADS, group // 2 + held, pieces - 1))
        piece, thread = lanes.thread() // THREADS, lanes.thread() % THREADS
        own = [lanes.empty(shape) for shape in ((2, group // 8), (2, group // 8), held)]
        for target, source in zip(own, (tops, sums, outputs), strict=True):
            for i, value in enumerate(source[piece, thread]):
                target[i] = Float32(value)
        kernel.merge(types.SimpleNamespace(others=others), own[2], *own[:2], Float32(scale_log2), piece, Int32(thread))
        if piece == 0:
            merged[thread] = [[float(each[i]) for i in range(math.prod(each.shape))] for each in own]

    lanes.launch(run, (), (1,), THREADS * pieces)
    top = tops.max(0).values
    worth = torch.exp2((tops - top).double() * scale_log2)
    wanted = top, (sums * worth).sum(0), (outputs * worth[..., column]).sum(0)
    for i, each in enumerate(wanted):
        found = torch.tensor([merged[thread][i] for thread in range(THREADS)], dtype=torch.float64)
        torch.testing.assert_close(found, each.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.isfinite(torch.tensor(merged[5][2])).sum() == held - (column == last).sum()
