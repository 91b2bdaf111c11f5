"""NVFP4 and MXFP4 keys and values in registers (msa_tiles.dsl.cutedsl.packed and its formats), lane by lane on the CPU.

What wgmma makes of registers, what ldmatrix hands out and how TMA swizzles are written down here on their own, as the
PTX manual has them; values are what msa_tiles.quant makes of the bytes, but for the power of two that `fold` takes.
"""

from __future__ import annotations

import types
from typing import Any

import lanes
import pytest
import torch
from lanes import Int32, Pointer, SharedMemory
from test_dsl_e4m3 import halves, ldmatrix, prmt, word
from torch import Tensor

from msa_tiles.dsl.table import Role, Table
from msa_tiles.quant import GROUPS, QuantizedTensor, rounding

THREADS = 128
# What a key and a value lack: see `fold`.
LACKING = {"nvfp4": (8, 14), "mxfp4": (0, 0)}
DTYPES = {"nvfp4": (torch.bfloat16, torch.float16), "mxfp4": (torch.bfloat16, torch.bfloat16)}
each_format = pytest.mark.parametrize("name", GROUPS)


class Uint8(Int32):
    pass


class Uint16(Int32):
    pass


class Int16(Int32):
    pass


BITS = {Int32: 32, Uint8: 8, Uint16: 16, Int16: 16, int: 64, "BFloat16": 16, "Float16": 16}


class View:
    """Memory of small units as elements of several."""

    def __init__(self, of: Any, units: int) -> None:
        self.of, self.units, self.bits = of, units, of.bits

    def __getitem__(self, place: int) -> int:
        read = (int(self.of[place * self.units + i]) for i in range(self.units))
        return sum(unit << self.bits * i for i, unit in enumerate(read))

    def __setitem__(self, place: int, value: int) -> None:
        for i in range(self.units):
            self.of[place * self.units + i] = int(value) >> self.bits * i & (1 << self.bits) - 1


class Words(View):
    def __getitem__(self, place: int) -> Int32:
        return Int32(super().__getitem__(place))


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    for kind, dtype in (("f16x2", torch.float16), ("bf16x2", torch.bfloat16)):
        if f"mul.rn.{kind} " in text:
            first, second = (halves(given, dtype) for given in read_only_args)
            return word(first * second)
    if "cvt.rn.f16x2.e4m3x2" in text:
        decoded = halves(read_only_args[0], torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
        return word(decoded[:2]), word(decoded[2:])
    assert "cvt.f32.f16" in text and "mul.f32" in text and "cvt.rn.bf16x2.f32 {$w0}, second, first" in text
    return word((halves(read_only_args[0], torch.float16).float() * read_only_args[1]).to(torch.bfloat16))


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """The modules, over stand-ins for what lanes.py has none for."""
    cutlass = lanes._CUTLASS
    cute = cutlass.cute

    def make_ptr(element: Any, place: Pointer, _memspace: Any, assumed_align: int) -> Pointer:
        units = BITS[element] // place.memory.bits  # type: ignore[attr-defined]
        assert place.offset * place.memory.bits % (8 * assumed_align) == 0  # type: ignore[attr-defined]
        if units == 1:
            return place
        kind = Words if BITS[element] <= 32 else View
        return Pointer(kind(place.memory, units), place.offset // units)  # type: ignore[arg-type]

    def copy(atom: Any, source: Any, target: Any) -> None:
        if atom is None:
            target[0] = source[0]
        else:
            ldmatrix(atom[0], source, target)

    for name, value in {
        "prmt": prmt,
        "inline_ptx": ptx,
        "mbarrier_wait": lambda _barrier, _phase: None,
        "mbarrier_arrive": lambda barrier: barrier.memory.append(lanes.thread()),
        "fence_view_async_shared": lambda: None,
        "barrier": lambda barrier_id, number_of_threads: lanes._HERE.thread.barrier(True),
    }.items():
        monkeypatch.setattr(lanes.ARCH, name, value, raising=False)
    named = {"Float16": "Float16", "BFloat16": "BFloat16", "Uint8": Uint8, "Uint16": Uint16, "Int16": Int16}
    for name, value in named.items():
        monkeypatch.setattr(cutlass, name, value, raising=False)
    monkeypatch.setattr(cute, "make_ptr", make_ptr)
    monkeypatch.setattr(cute, "copy", copy)
    monkeypatch.setattr(cute, "recast_tensor", lambda tensor, _element: tensor, raising=False)
    monkeypatch.setattr(cute, "make_copy_atom", lambda op, *_rest, **_more: op if isinstance(op, tuple) else None)
    of_warps = types.SimpleNamespace(LdMatrix8x8x16bOp=lambda transposed, _count: (transposed,))
    monkeypatch.setitem(lanes.helper("decoded_left").__dict__, "warp", of_warps)
    monkeypatch.setitem(lanes.helper("packed").__dict__, "cpasync", types.SimpleNamespace(CopyG2SOp=lambda: None))
    return {name: lanes.helper(f"operands.{name}") for name in GROUPS}


def memory(values: Tensor, bits: int, kind: type = SharedMemory) -> Any:
    found = kind([int(x) for x in values.flatten().tolist()])
    found.bits = bits
    return found


def left(module: types.ModuleType, name: str, transposed: bool, block: int = 64, dim: int = 128) -> Any:
    side = object.__new__(module.Left)
    side.name = "v" if transposed else "k"
    side.block_size, side.head_dim, side.transposed, side.threads = block, dim, transposed, THREADS
    side.rows, side.depth = (dim, block) if transposed else (block, dim)
    side.groups = dim // GROUPS[name].size
    return side


def exact(values: Tensor, lacking: int) -> Tensor:
    return torch.ldexp(values.double(), torch.tensor(-lacking))


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=0, equal_nan=True)


@each_format
@pytest.mark.parametrize("value", [False, True], ids=["keys", "values"])
@pytest.mark.drawn(1)
def test_every_code_under_every_scale(formats: dict[str, types.ModuleType], name: str, value: bool) -> None:
    """Exactly, NaN included; what is beyond bfloat16 is infinite, as beyond float32."""
    module = formats[name]
    side, dtype = left(module, name, value), DTYPES[name][value]
    codes = torch.arange(16, dtype=torch.uint8)
    # A word of codes c to c + 7 has c and c + 4 for its first halves.
    spread = [Int32(sum(int((c + i) % 16) << 4 * i for i in range(8))) for c in range(16)]
    wanted = rounding.e2m1_values(codes)
    scales = torch.arange(256, dtype=torch.uint8).view(GROUPS[name].dtype).float()
    for scale in range(0, 256, 1 if name == "nvfp4" else 3):
        other = scale ^ 1
        if value:
            factor = side.value_factor(Int32(scale), Int32(other))
        elif name == "nvfp4":
            factor = module.key_factors(Int32(scale * 0x01010101))[scale % 4]
            other = scale
        else:
            factor, other = module.value_factor(Int32(scale), Int32(scale)), scale
        for number in range(0, 4, 1 + scale % 3):
            decode = side.value if value else side.key
            got = torch.stack([halves(decode(spread[c], number, factor), dtype) for c in range(16)])
            shifted = [(torch.arange(16) + number + more) % 16 for more in (0, 4)]
            with_scale = torch.stack([wanted[shifted[0]] * scales[scale], wanted[shifted[1]] * scales[other]], 1)
            same(got, exact(with_scale, LACKING[name][value]))


def drawn(name: str, block: int, dim: int, layout: str = "linear") -> QuantizedTensor:
    """Any codes, and scales that may be NaN."""
    generator = torch.Generator().manual_seed(block + dim)
    data = torch.randint(0, 256, (2, block, dim // 2), dtype=torch.uint8, generator=generator)
    low, high = (0, 128) if name == "nvfp4" else (100, 140)
    scale = torch.randint(low, high, (2, block, dim // GROUPS[name].size), dtype=torch.uint8, generator=generator)
    scale[1, 3, 1] = 0x7F if name == "nvfp4" else 0xFF
    return QuantizedTensor(data, scale.view(GROUPS[name].dtype), name).with_layout(layout)


def swizzled(data: Tensor) -> Tensor:
    """As TMA lays rows of 64 or 32 bytes down: bits 4 and on of an address take those of bit 7 and on."""
    rows, size = data.shape
    place = torch.arange(rows * size)
    bits = 3 if size == 64 else 1
    laid = torch.empty(rows * size, dtype=torch.uint8)
    laid[place ^ (place >> 7 & bits) << 4] = data.flatten()
    return laid


def left_side(registers: dict[int, Any], rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """What wgmma takes from the registers of all threads: [rows, depth]."""
    found = torch.full((rows, depth), 777.0, dtype=torch.float64)
    for thread, words in registers.items():
        row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
        for m in range(rows // 64):
            for step in range(depth // 16):
                for i in range(4):
                    at = 64 * m + row + 8 * (i % 2), 16 * step + column + 8 * (i // 2)
                    found[at[0], at[1] : at[1] + 2] = halves(words[i, m, step], dtype).double()
    return found


def with_order(given: QuantizedTensor, number: int, side: Any) -> Tensor:
    """The scales of a block, and behind those of values how far apart two tokens' are."""
    scales = given.scale[number].contiguous().view(torch.uint8).flatten()
    if side.name == "k":
        return scales
    order = torch.tensor([1 if given.layout == "interleaved" else side.groups, 0, 0, 0], dtype=torch.int32)
    return torch.cat((scales, order.view(torch.uint8)))


def taken(side: Any, module: types.ModuleType, given: QuantizedTensor, valid: int | None) -> dict[int, Any]:
    """The registers of all threads, once the second of two stages was taken; every warp hands it back once."""
    block, dim = side.block_size, side.head_dim
    raw = memory(torch.stack([swizzled(each) for each in given.data]), 8)
    spare = 16 // side.groups if side.transposed else 0
    scales = memory(torch.stack([with_order(given, number, side) for number in range(2)]), 8)
    rows = block + spare
    freed: Any = []
    held = module.Held(
        lanes.Tensor(raw, 0, (2, block, dim // 2), (block * dim // 2, dim // 2, 1)),
        lanes.Tensor(scales, 0, (side.groups, rows, 2), (1, side.groups, side.groups * rows)),
        Pointer(freed, 0),
        Pointer(freed, 0),
    )
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
    return registers


@each_format
@pytest.mark.parametrize(("block", "dim"), [(64, 128), (128, 64)])
@pytest.mark.drawn(1)
def test_a_block_of_keys(formats: dict[str, types.ModuleType], name: str, block: int, dim: int) -> None:
    given, side = drawn(name, block, dim), left(formats[name], name, False, block, dim)
    found = left_side(taken(side, formats[name], given, None), block, dim, DTYPES[name][0])
    wanted = exact(given.dequantize()[1], LACKING[name][0])
    same(found, wanted[:, prepared(side)])
    assert found[3].isnan().any() and [side.row_of(1, 13, half) for half in range(2)] == [19, 27]


@each_format
@pytest.mark.parametrize(
    ("block", "dim", "valid", "layout"),
    [(64, 64, 64, "linear"), (64, 128, 37, "interleaved"), (128, 64, 1, "linear"), (64, 128, 38, "linear")],
)
@pytest.mark.drawn(2)
def test_a_block_of_values(
    formats: dict[str, types.ModuleType], name: str, block: int, dim: int, valid: int, layout: str
) -> None:
    """Tokens from `valid` on are 0, whatever their scales are."""
    given, side = drawn(name, block, dim, layout), left(formats[name], name, True, block, dim)
    found = left_side(taken(side, formats[name], given, valid), dim, block, DTYPES[name][1])
    wanted = exact(given.dequantize()[1], LACKING[name][1])
    place = [
        64 * m + side.row_of(warp, lane, half)
        for m in range(dim // 64)
        for warp in range(4)
        for half in range(2)
        for lane in range(0, 32, 4)
    ]
    assert sorted(place) == list(range(dim))
    same(found[:, :valid], wanted.T[place][:, :valid])
    hidden = found[:, valid:].abs()
    assert (hidden <= (0 if name == "nvfp4" else 6 * 2.0**-127)).all()
    assert valid < 4 or found[:, 3].isnan().any()


def prepared(side: Any, threads: int = THREADS) -> Tensor:
    """Which column of the queries `prepare` puts in each place."""
    for count in (8, 16):
        queries = torch.arange(count * side.head_dim, dtype=torch.int32).view(count, side.head_dim)
        row, column = torch.meshgrid(torch.arange(count), torch.arange(side.head_dim), indexing="ij")
        # Panels of 64 columns beside each other, of 8 rows each, swizzled by 128 bytes.
        place = (row // 8 * (side.head_dim // 64) + column // 64) * 512 + row % 8 * 64 + column % 64
        place = place ^ (place >> 6 & 7) << 3
        laid = torch.empty(count * side.head_dim, dtype=torch.int32)
        laid[place] = queries
        shared = memory(laid, 16)
        right = lanes.Tensor(shared, 0, (count, side.head_dim), (side.head_dim, 1))
        lanes.launch(lambda right=right: side.prepare(right, Int32(lanes.thread())), (), (1,), threads)
        moved = torch.tensor([int(x) for x in shared])[place]
        order = moved[0]
        assert sorted(order.tolist()) == list(range(side.head_dim))
        assert torch.equal(moved, queries[:, order].long())
    return order


@each_format
@pytest.mark.parametrize(
    ("which", "dim", "layout"), [("k", 64, "linear"), ("v", 64, "linear"), ("v", 128, "interleaved")]
)
@pytest.mark.parametrize("warps", [1, 5])
@pytest.mark.drawn(2)
def test_a_block_on_the_right_side(
    formats: dict[str, types.ModuleType], name: str, which: str, dim: int, layout: str, warps: int
) -> None:
    """One warp, or several, make a tile of it: rows of panels of 64 columns, swizzled by 128 bytes; then each of them
    says that the bytes are free."""
    module, block = formats[name] if warps == 1 else lanes.helper(f"operands.{name}_by_warps"), 64
    given = drawn(name, block, dim, layout)
    side = object.__new__(module.Right)
    side.table = Table((Role("others", 0, ""), Role("keeper", warps, "")), ())
    side.name, side.block_size, side.head_dim, side.groups = which, block, dim, dim // GROUPS[name].size
    tile = memory(torch.full((block * dim,), 1), 16)
    freed: Any = []
    held = module.HeldRight(
        lanes.Tensor(tile, 0, (block, dim), (dim, 1)),
        None,
        None,
        lanes.Tensor(memory(swizzled(given.data[1]), 8), 0, (block, dim // 2), (dim // 2, 1)),
        None,
        Pointer(freed, 0),
        lanes.Tensor(memory(with_order(given, 1, side), 8), 0, (side.groups, block), (1, side.groups)),
    )
    lanes.launch(lambda: side.bring(held, Int32(0), Int32(0), Int32(0)), (), (1,), 32 * warps)
    assert sorted(freed) == [32 * warp for warp in range(warps)]
    row, column = torch.meshgrid(torch.arange(block), torch.arange(dim), indexing="ij")
    place = (column // 64 * block + row) * 64 + ((column % 64 // 8) ^ (row % 8)) * 8 + column % 8
    found = (
        torch.tensor([int(x) for x in tile], dtype=torch.int32).to(torch.int16)[place].view(DTYPES[name][which == "v"])
    )
    same(found, exact(given.dequantize()[1], LACKING[name][which == "v"]))


@each_format
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("pages_per_block", "layout"), [(0, "linear"), (1, "linear"), (4, "interleaved")])
def test_scales_are_copied(
    formats: dict[str, types.ModuleType],
    name: str,
    dim: int,
    pages_per_block: int,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order that memory has, of one head among several, of pages out of order and of one that is not there."""
    side = left(formats[name], name, True, 64, dim)
    rows = 64 // max(pages_per_block, 1)
    side.blocks = types.SimpleNamespace(pages_per_block=pages_per_block, box_rows=rows)
    generator = torch.Generator().manual_seed(dim)
    shape = (9, 3, rows, side.groups) if pages_per_block else (100, 3, side.groups)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    pages, head, row = ([3, 8, 40, 0] if pages_per_block == 4 else [5] * pages_per_block), 1, 50
    if pages_per_block == 0:
        where, wanted = codes, codes[[min(row + t, 99) for t in range(64)], head]
    elif layout == "linear":
        where, wanted = codes.unflatten(2, (-1, 4)), codes[pages[0], head]
    else:
        stored = codes.unflatten(2, (-1, 4)).transpose(-1, -2).contiguous()
        where = stored.transpose(-1, -2)
        wanted = torch.cat([stored[min(page, 8), head].flatten() for page in pages])
    laid = where.untyped_storage()
    source = lanes.Tensor(
        memory(torch.tensor(list(laid), dtype=torch.uint8), 8, lanes.Memory), 0, tuple(where.shape), where.stride()
    )
    target = memory(torch.full((64 * side.groups,), 1, dtype=torch.uint8), 8)
    given = formats[name].Stored(None, None, source, None)
    arrived: Any = []
    for who, call in {"thread": "mbarrier_arrive", "copy": "cp_async_mbarrier_arrive_noinc"}.items():
        monkeypatch.setattr(
            lanes.ARCH, call, lambda at, who=who: at.memory.append((who, lanes.thread())), raising=False
        )

    def run() -> None:
        numbers = [Int32(page) for page in pages]
        side.load_scales(given, Int32(row), numbers, Int32(head), Pointer(target, 0), Pointer(arrived, 0))
        assert side.order(given) == (1 if layout == "interleaved" else side.groups)

    lanes.launch(run, (), (1,), 32)
    assert [int(x) for x in target] == wanted.flatten().tolist()
    # Copies past registers arrive once they are done; such copies are of at least 4 bytes.
    assert sorted(arrived) == [("thread" if side.groups < 4 else "copy", lane) for lane in range(32)]


def test_a_head_has_a_scale(formats: dict[str, types.ModuleType]) -> None:
    """NVFP4's, with the powers of two that keys and values lack; MXFP4 has none."""
    stored = types.SimpleNamespace(of_heads=[None, 3.0])
    for name, wanted in (("nvfp4", (3 * 2.0**8, 3 * 2.0**14)), ("mxfp4", (1.0, 1.0))):
        found = tuple(left(formats[name], name, v).fold(1.0, stored, 1) for v in (False, True))
        assert found == wanted == tuple(
            (3.0 if name == "nvfp4" else 1.0) * 2.0**lacking for lacking in LACKING[name]
        )  # fmt: skip
    assert left(formats["nvfp4"], "nvfp4", False).factors(None, 0, 0, 0) is None
    assert left(formats["nvfp4"], "nvfp4", True).of_head(stored, 1) == 3 * 2.0**14
    assert left(formats["mxfp4"], "mxfp4", True).of_head(stored, 1) is None
