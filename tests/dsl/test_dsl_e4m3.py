"""e4m3 keys, values and queries in 16 bits (msa_tiles.dsl.cutedsl.operands.e4m3), on the CPU, lane by lane.

What wgmma makes of the registers is written down here, as the PTX manual has it: register i of a lane holds, of 64 rows
by 16 columns, the row lane // 4 of its warp, or the one 8 further on for odd i, and the columns 2 (lane % 4) and the
next one, or those 8 further on from register 2 on. What TMA and ldmatrix do is written down likewise.
"""

from __future__ import annotations

import types
from typing import Any

import lanes
import pytest
import torch
from lanes import Int32, Pointer, SharedMemory
from torch import Tensor

FP8 = torch.float8_e4m3fn
THREADS = 128


class View:
    """Memory of small units as elements of several."""

    def __init__(self, of: SharedMemory, units: int, bits: int) -> None:
        self.of, self.units, self.bits = of, units, bits

    def __getitem__(self, place: int) -> Int32:
        units = [int(self.of[place * self.units + i]) for i in range(self.units)]
        return Int32(sum(unit << self.bits * i for i, unit in enumerate(units)))

    def __setitem__(self, place: int, value: int) -> None:
        for i in range(self.units):
            self.of[place * self.units + i] = int(value) >> self.bits * i & (1 << self.bits) - 1


def prmt(low: int, high: int, selector: int) -> Int32:
    data = [int(word) >> 8 * i & 255 for word in (low, high) for i in range(4)]
    # Of a number above 7 the highest bit of the byte counts, eight times.
    data += [(byte >> 7) * 255 for byte in data]
    return Int32(sum(data[int(selector) >> 4 * i & 15] << 8 * i for i in range(4)))


def halves(word: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([int(Int32(word))], dtype=torch.int32).view(dtype)


def word(values: Tensor) -> Int32:
    return Int32(values.view(torch.int32).item())


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    if "cvt.rn.f16x2.f32" in text:
        return word(torch.tensor(read_only_args[::-1]).to(torch.float16))
    [given] = read_only_args
    if "cvt.rn.f16x2.e4m3x2" in text:
        decoded = halves(given, torch.uint8).view(FP8).to(torch.float16)
        return word(decoded[:2]), word(decoded[2:])
    assert "cvt.f32.f16" in text and "cvt.rn.bf16x2.f32 {$w0}, second, first" in text
    return word(halves(given, torch.float16).to(torch.bfloat16))


def ldmatrix(transposed: bool, source: Any, target: Any) -> None:
    """Four 8x8 matrices of 16 bits: lane 8 i + r brings row r of matrix i."""
    thread = lanes._HERE.thread
    rows = thread.meet("ldmatrix", [source[i] for i in range(8)])
    for i in range(4):
        matrix, line, pair = rows[8 * i : 8 * i + 8], thread.lane // 4, 2 * (thread.lane % 4)
        places = [(pair, line), (pair + 1, line)] if transposed else [(line, pair), (line, pair + 1)]
        first, second = (matrix[row][column] for row, column in places)
        target[i] = Int32(int(first) | int(second) << 16)


@pytest.fixture
def e4m3(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module, over stand-ins for what lanes.py has none for."""
    cute = lanes._CUTLASS.cute
    views = {lanes.Int32: 32, "16 bits": 16}

    def make_ptr(element: Any, place: Pointer, _memspace: Any, assumed_align: int) -> Pointer:
        bits = place.memory.bits  # type: ignore[attr-defined]
        units = views.get(element, 16) // bits
        assert place.offset * bits % (8 * assumed_align) == 0
        return Pointer(View(place.memory, units, bits), place.offset // units)  # type: ignore[arg-type]

    def copy(atom: Any, source: Any, target: Any) -> None:
        ldmatrix(atom, source, target)

    for name, value in {
        "prmt": prmt,
        "inline_ptx": ptx,
        "mbarrier_wait": lambda _barrier, _phase: None,
        "mbarrier_arrive": lambda barrier: barrier.memory.append(lanes.thread()),
        "fence_view_async_shared": lambda: None,
        "barrier": lambda barrier_id, number_of_threads: lanes._HERE.thread.barrier(True),
    }.items():
        monkeypatch.setattr(lanes.ARCH, name, value, raising=False)
    for name in ("Float16", "BFloat16"):
        monkeypatch.setattr(lanes._CUTLASS, name, name, raising=False)
    monkeypatch.setattr(lanes._CUTLASS, "Uint8", Int32, raising=False)
    monkeypatch.setattr(cute, "make_ptr", make_ptr)
    monkeypatch.setattr(cute, "copy", copy)
    monkeypatch.setattr(cute, "recast_tensor", lambda tensor, _element: tensor, raising=False)
    monkeypatch.setattr(cute, "make_copy_atom", lambda op, _element: op)
    module = lanes.load(lanes.PACKAGE / "dsl/cutedsl/operands/e4m3.py")
    of_warps = types.SimpleNamespace(LdMatrix8x8x16bOp=lambda transposed, _count: transposed)
    monkeypatch.setitem(lanes.helper("decoded_left").__dict__, "warp", of_warps)
    return module


def memory(values: Tensor, bits: int) -> SharedMemory:
    found = SharedMemory([int(x) for x in values.flatten().tolist()])
    found.bits = bits  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("name", "dtype"), [("decode_f16", torch.float16), ("decode_bf16", torch.bfloat16)])
def test_all_codes(e4m3: types.ModuleType, name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    decode = getattr(lanes.helper("decoding"), name)
    found = torch.cat([halves(w, dtype) for word in codes.view(torch.int32).tolist() for w in decode(Int32(word))])
    wanted = codes.view(FP8).float()
    assert wanted.isnan().sum() == 2
    assert torch.equal(found.float().nan_to_num(999), wanted.nan_to_num(999))
    assert torch.equal(found.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])


def swizzled(codes: Tensor) -> Tensor:
    """As TMA lays rows of 128 or 64 bytes down: bits 4 and on of an address take those of bit 7 and on."""
    rows, dim = codes.shape
    place = torch.arange(rows * dim)
    bits = 7 if dim == 128 else 3
    laid = torch.empty(rows * dim, dtype=torch.uint8)
    laid[place ^ (place >> 7 & bits) << 4] = codes.flatten()
    return laid


def left_side(registers: dict[int, Any], rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """What wgmma takes from the registers of all threads: [rows, depth]."""
    found = torch.full((rows, depth), 777.0)
    for thread, words in registers.items():
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        for m in range(rows // 64):
            for step in range(depth // 16):
                for i in range(4):
                    at = 64 * m + row + 8 * (i % 2), 16 * step + column + 8 * (i // 2)
                    found[at[0], at[1] : at[1] + 2] = halves(words[i, m, step], dtype).float()
    return found


@pytest.mark.parametrize(
    ("transposed", "rows", "head_dim", "valid"),
    [(False, 64, 128, None), (False, 128, 64, None), (True, 64, 64, 64), (True, 64, 128, 37), (True, 128, 64, 1)],
)
@pytest.mark.drawn(2)
def test_a_block(e4m3: types.ModuleType, transposed: bool, rows: int, head_dim: int, valid: int | None) -> None:
    generator = torch.Generator().manual_seed(rows + head_dim)
    codes = torch.randint(0, 256, (2, rows, head_dim), dtype=torch.uint8, generator=generator)
    raw = memory(torch.stack([swizzled(block) for block in codes]), 8)
    side = object.__new__(e4m3.Left)
    side.block_size, side.head_dim, side.transposed, side.threads = rows, head_dim, transposed, THREADS
    side.token_scales = 0
    side.rows, side.depth = (head_dim, rows) if transposed else (rows, head_dim)
    dtype = torch.float16 if transposed else torch.bfloat16
    side.element = lanes._CUTLASS.Float16 if transposed else lanes._CUTLASS.BFloat16
    freed: Any = []
    tiles = lanes.Tensor(raw, 0, (2, rows, head_dim), (rows * head_dim, head_dim, 1))
    held = e4m3.Held(tiles, None, Pointer(freed, 0), Pointer(freed, 0))
    registers = {}

    def run() -> None:
        own = lanes.empty((4, side.rows // 64, side.depth // 16))
        limit = None if valid is None else Int32(valid)
        registers[lanes.thread()] = side.take(own, held, Int32(1), Int32(0), limit, Int32(lanes.thread()))

    lanes.launch(run, (), (1,), THREADS)
    # Loads may still be on their way: a stage goes back behind the product of what was taken.
    assert freed == []
    lanes.launch(lambda: side.release(held, Int32(1)), (), (1,), THREADS)
    assert sorted(freed) == [0, 32, 64, 96]
    found = left_side(registers, side.rows, side.depth, dtype)
    wanted = codes[1].view(FP8).float()
    if valid is not None:
        wanted[valid:] = 0
    if transposed:
        # Rows as row_of tells, which the accumulators of the product have, too.
        place = [
            64 * m + side.row_of(warp, lane, half)
            for m in range(head_dim // 64)
            for warp in range(4)
            for half in range(2)
            for lane in range(0, 32, 4)
        ]
        assert sorted(place) == list(range(head_dim))
        wanted = wanted.T[place]
    else:
        # Columns as the queries have them.
        wanted = prepared(e4m3, side, wanted)
        assert [side.row_of(1, 13, half) for half in range(2)] == [19, 27]
    assert torch.equal(found.nan_to_num(999), wanted.nan_to_num(999))


def places(rows: int, head_dim: int) -> Tensor:
    """Where queries lie: panels of 64 columns beside each other, of 8 rows each, swizzled by 128 bytes."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(head_dim), indexing="ij")
    place = (row // 8 * (head_dim // 64) + column // 64) * 512 + row % 8 * 64 + column % 64
    return place ^ (place >> 6 & 7) << 3


def prepared(e4m3: types.ModuleType, side: Any, keys: Tensor) -> Tensor:
    """The keys with their columns in the order that `prepare` gives to those of queries."""
    for count in (8, 16):
        queries = torch.arange(count * side.head_dim, dtype=torch.int32).view(count, side.head_dim)
        laid = torch.empty(count * side.head_dim, dtype=torch.int32)
        place = places(count, side.head_dim)
        laid[place] = queries
        shared = memory(laid, 16)
        right = lanes.Tensor(shared, 0, (count, side.head_dim), (side.head_dim, 1))
        lanes.launch(lambda right=right: side.prepare(right, Int32(lanes.thread())), (), (1,), THREADS)
        moved = torch.tensor([int(x) for x in shared])[place]
        order = moved[0]
        assert sorted(order.tolist()) == list(range(side.head_dim))
        assert torch.equal(moved, queries[:, order].long())
    return keys[:, order]


def test_values_need_no_preparation(e4m3: types.ModuleType) -> None:
    side = object.__new__(e4m3.Left)
    side.transposed = True
    side.prepare(None, Int32(0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_become_float16(e4m3: types.ModuleType, head_dim: int) -> None:
    """Nothing is lost of what is less than 2**31 times smaller than a row's largest, however large that is."""
    generator = torch.Generator().manual_seed(head_dim)
    size = torch.randint(-118, 119, (64, 1), generator=generator) - torch.randint(
        0, 29, (64, head_dim), generator=generator
    )
    queries = (torch.randn(64, head_dim, generator=generator) * 2.0**size).to(torch.bfloat16)
    queries[7] = 0
    queries[11, 3], queries[12, 5] = torch.inf, torch.nan
    queries[13] = torch.finfo(torch.bfloat16).max
    queries[14] = 2.0**-133
    place = places(64, head_dim)
    laid = torch.empty(64 * head_dim, dtype=torch.int32)
    laid[place] = queries.view(torch.int16).int() & 0xFFFF
    shared, powers = memory(laid, 16), memory(torch.full((64,), 99), 8)
    side = object.__new__(e4m3.InRing)
    side.head_dim, side.token_scales = head_dim, False
    factors: dict[int, list[float]] = {}

    def run() -> None:
        thread, held = lanes.thread(), lanes.Tensor(powers, 0, (64,), (1,))
        warp, lane = Int32(thread // 32), Int32(thread % 32)
        side.decode_queries(Pointer(shared, 0), held, None, Int32(0), lane, warp, 3)

    def scale() -> None:
        scales = lanes.empty((2,))
        scales.fill(lanes.Float32(3.0))
        row = lanes.thread() // 8 * 16 + lanes.thread() % 8
        side.scale_rows(scales, lanes.Tensor(kept, 0, (64,), (1,)), Int32(row))
        factors.update({row + 8 * half: float(scales[half]) / 3 for half in range(2)})

    lanes.launch(run, (), (1,), 96)
    kept = memory(torch.tensor([int(x) for x in powers]), 8)
    lanes.launch(scale, (), (1,), 32)
    found = (
        torch.tensor([int(x) for x in shared], dtype=torch.int32).to(torch.int16).view(torch.float16)[place].double()
    )
    whole = queries.isfinite().all(-1)
    assert sorted(torch.nonzero(~whole).flatten().tolist()) == [11, 12]
    assert found[11, 3] == torch.inf and found[12, 5].isnan()
    largest = found.abs().amax(-1)
    assert (largest[whole] < 2**15).all() and ((largest >= 2**14) | (queries.abs().amax(-1) < 2.0**-112))[whole].all()
    undone = torch.tensor([factors[row] for row in range(64)], dtype=torch.float64)[:, None]
    # Scales are no smaller than what LSE may be divided by.
    usual = whole & (undone[:, 0] > 1e-29)
    assert usual.sum() > 40
    wanted, got = queries.double()[usual], (found * undone)[usual]
    most = wanted.abs().amax(-1, keepdim=True)
    large = wanted.abs() >= 2.0**-31 * most
    assert large.float().mean() > 0.5 and torch.equal(got[large], wanted[large])
    assert ((got - wanted).abs() <= 2.0**-39 * most).all()
