"""Index keys of 4 bits on the left side of products, queries as columns: the consumers of decode_score, lane by lane.

What wgmma makes of the registers of a warpgroup and of a tile in shared memory is written down here, as the PTX manual
has it; it reads them as late as the wait for it, so that a piece decoded over one in flight shows. Blocks lie in a ring
that has room for all of them. Scores are compared with those of what the bytes stand for.
"""

from __future__ import annotations

import collections
import types
from typing import Any, NamedTuple

import lanes
import pytest
import test_dsl_four_bits as four_bits
import torch
from lanes import Int32, Pointer
from test_dsl_four_bits import formats, left_side, memory, swizzled
from torch import Tensor

from msa_tiles.paths import generated_dir
from msa_tiles.quant import GROUPS, QuantizedTensor

__all__ = ["formats"]  # a fixture
THREADS, ROWS, COLUMNS = 128, 64, 8
FP8 = torch.float8_e4m3fn


class Element(NamedTuple):
    """An element of tensors."""

    name: str
    width: int


ELEMENTS = {
    name: Element(name, 8 if name == "Float8E4M3FN" else 16) for name in ("BFloat16", "Float16", "Float8E4M3FN")
}


class Case(NamedTuple):
    """Queries and keys of each request, and the shape of the kernel."""

    precision: str
    sequences: tuple[tuple[int, int], ...]
    heads: int
    dim: int = 64
    block: int = 64
    causal: bool = True
    positions: tuple[int, ...] = ()

    @property
    def format(self) -> str:
        return "mxfp4" if "mx" in self.precision else "nvfp4"

    @property
    def element(self) -> str:
        return "Float16" if self.format == "nvfp4" else "BFloat16"


CASES = {
    "one query": Case("q16k4", ((1, 130), (1, 64)), 4, 128),
    "two eights of queries": Case("q16k4", ((3, 200), (0, 90), (2, 1)), 4, 64),
    "more products than slots": Case("q16k4", ((2, 700),), 8),
    "positions": Case("q16k4", ((2, 190),), 3, positions=(70, -1)),
    "not causal": Case("q8kmx4", ((4, 120),), 3, 64, 128, causal=False),
    "e4m3 queries": Case("q8k4", ((1, 129), (2, 70)), 4, 128, 128),
    "powers of two": Case("q16kmx4", ((2, 150),), 4, 128),
}


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    if text.startswith("mov.b32"):
        return read_only_args[0]
    if "mov.b32 factor, { " in text:
        pair, factors = (four_bits.halves(given, torch.float16) for given in read_only_args)
        return four_bits.word(pair * factors[int("upper, upper" in text)])
    if "shl.b32 low" in text:
        pair, power = read_only_args
        return four_bits.word((four_bits.halves(pair, torch.bfloat16).float() * float(power)).to(torch.float16))
    if "cvt.rn.bf16x2.f32" in text and len(read_only_args) == 1:
        return four_bits.word(four_bits.halves(read_only_args[0], torch.float16).to(torch.bfloat16))
    return four_bits.ptx(text, write_only_types, read_only_args)


def wide(row: Any, place: int) -> Any:
    return lanes.Tensor(row.memory, row.offset + int(place) * row.memory.chunk, (row.memory.chunk,), (1,))


def copy_wide(source: Any, target: Any) -> None:
    """16 bytes -> four words."""
    units, bits = source.shape[0], 128 // source.shape[0]
    for i in range(4):
        read = [int(source[units // 4 * i + j]) & (1 << bits) - 1 for j in range(units // 4)]
        target[i] = Int32(sum(unit << bits * j for j, unit in enumerate(read)))


@pytest.fixture
def stand_ins(formats: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes.ARCH, "inline_ptx", ptx)
    columns = lanes.helper("query_columns").__dict__
    for name, value in {**ELEMENTS, "wide": wide, "copy_wide": copy_wide}.items():
        monkeypatch.setitem(columns, name, value)


def queries_of(case: Case) -> tuple[Any, Tensor]:
    """Stored queries of all tokens, for device code and as they are; some rows are beyond float16."""
    generator = torch.Generator().manual_seed(case.dim + case.heads)
    tokens = sum(count for count, _ in case.sequences)
    drawn = torch.randn(tokens, case.heads, case.dim, generator=generator)
    if case.precision.startswith("q8"):
        values = drawn.to(FP8)
        codes, bits = values.view(torch.uint8), 8
    else:
        drawn[0, 0] *= 2.0**40
        drawn[-1, -1] *= 2.0**-60
        drawn[0, 0, 0], drawn[0, 0, 1] = 0.0, 2.0**10
        values = drawn.to(torch.bfloat16)
        codes, bits = values.view(torch.int16), 16
    stored = memory(codes, bits, lanes.Memory)
    stored.chunk = 128 // bits
    shape = tuple(codes.shape)
    return lanes.Tensor(stored, 0, shape, (shape[1] * shape[2], shape[2], 1)), values.double()


def keys_of(case: Case) -> list[QuantizedTensor]:
    """The blocks of all requests that have queries, in their order."""
    generator = torch.Generator().manual_seed(case.block)
    found = []
    for count, length in case.sequences:
        for _ in range(-(-length // case.block) if count else 0):
            data = torch.randint(0, 256, (case.block, case.dim // 2), dtype=torch.uint8, generator=generator)
            low, high = (20, 80) if case.format == "nvfp4" else (120, 130)
            shape = case.block, case.dim // GROUPS[case.format].size
            scale = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
            found.append(QuantizedTensor(data, scale.view(GROUPS[case.format].dtype), case.format))
    return found


def shared(*shape: int) -> Any:
    """Shared memory that nobody wrote yet."""
    layout = lanes._compact(shape)
    return lanes.Tensor(lanes.SharedMemory([None] * torch.Size(shape).numel()), 0, *layout)


class Consumers:
    """The consumers of a CTA that has all blocks, and what stands in for the tensor cores."""

    modules = ("column_maxima", "query_columns", "operands.index_{}_left")
    maxima = (COLUMNS, 4, 16, 2)  # columns, warps, products, turns
    algorithm = ""

    def __init__(self, case: Case, formats: dict[str, types.ModuleType]) -> None:
        self.case = case
        self.module = lanes.load(generated_dir() / f"cutedsl/sm90/decode_score_{case.precision}{self.algorithm}.py")
        self.blocks = keys_of(case)
        self.module.STAGES = len(self.blocks)
        maxima, columns_of, operand = (name.format(case.format) for name in self.modules)
        self.module.column_maxima = lanes.helper(maxima)
        self.module.warpgroup = types.SimpleNamespace(wait_group=self.wait_group)
        self.module.column_maxima.warpgroup = self.module.warpgroup
        self.in_flight: dict[int, list[Any]] = collections.defaultdict(list)
        self.sums: dict[int, Tensor] = {}
        self.module.wgmma = types.SimpleNamespace(operand_b=lambda _product, queries: Right(self, queries))
        self.released: list[int] = []
        kernel = self.kernel = object.__new__(self.module.DecodeScore)
        kernel.block_size, kernel.head_dim, kernel.pages_per_block = case.block, case.dim, 0
        kernel.keys = self.keys(lanes.helper(operand))
        columns = kernel.columns = object.__new__(lanes.helper(columns_of).Columns)
        columns.rows, columns.head_dim, columns.threads = ROWS, case.dim, THREADS
        columns.stored = ELEMENTS["Float8E4M3FN" if case.precision.startswith("q8") else "BFloat16"]
        columns.element = ELEMENTS[case.element]
        columns.chunks = columns.pieces = case.dim * columns.stored.width // 128
        columns.by_rows = lambda queries: lanes.Tensor(queries.memory, 0, (ROWS, case.dim), (case.dim, 1))

    def keys(self, operand: types.ModuleType) -> Any:
        case, made = self.case, object.__new__(operand.IndexKeys)
        made.name, made.transposed, made.threads = "k", False, THREADS
        made.head_dim, made.block_size, made.groups = case.dim, case.block, case.dim // GROUPS[case.format].size
        made.rows, made.depth = case.block, case.dim
        made.divide()
        made.product = lambda _columns: None
        made.operand = lambda _product, _held: [lanes.empty((4, 1, 2 * made.chunks)) for _ in range(2)]
        made.accumulator = lambda _product, _columns: lanes.tensor_of(torch.full((4,), torch.nan))
        made.multiply = self.multiply
        made.release = lambda _held, stage: self.released.append(int(stage)) if lanes.thread() == 0 else None
        return made

    def multiply(self, _product: Any, into: Any, operand: Any, unit: int, piece: int, right: Any) -> None:
        """S^T (+)= K Q^T for the columns of a piece, from the wait for it on; what S held is gone at once."""
        into.memory[:] = [None] * len(into.memory)
        left = self.kernel.keys.place_of(operand, unit, piece)
        self.in_flight[lanes.thread()].append((into, left, piece, right))

    def wait_group(self, left: int) -> None:
        """Until no more than so many products are in flight."""
        while len(self.in_flight[lanes.thread()]) > left:
            self.finish(*self.in_flight[lanes.thread()].pop(0))

    def finish(self, into: Any, registers: Any, piece: int, right: Any) -> None:
        """What this thread gets of a product."""
        thread, depth = lanes._HERE.thread, 32 * self.kernel.keys.chunks
        met = thread.meet("wgmma", registers, whole=True)
        if not hasattr(self, "last") or self.last[0] is not met:
            dtype = torch.float16 if self.case.element == "Float16" else torch.bfloat16
            rows = left_side(dict(enumerate(met)), ROWS, depth, dtype)
            self.last = met, rows @ right.columns(dtype)[:, depth * piece :][:, :depth].T
        row, column = 16 * (thread.index // 32) + thread.lane // 4, 2 * (thread.lane % 4)
        found = self.last[1][[row, row, row + 8, row + 8], [column, column + 1] * 2]
        found = found + self.sums[thread.index] if piece else found
        self.sums[thread.index] = found
        if not any(other[0] is into for other in self.in_flight[thread.index]):
            for place in range(4):
                into[place] = lanes.Float32(found[place])

    def queries(self) -> Any:
        """Shared memory that somebody wrote."""
        rows = memory(torch.full((ROWS * self.case.dim,), 1), 16)
        return lanes.Tensor(rows, 0, (ROWS, self.case.dim), (self.case.dim, 1))

    def run(self, idx_q: Any) -> Tensor:
        case, module = self.case, self.module
        counts = len(self.blocks)
        raw = memory(torch.stack([swizzled(block.data) for block in self.blocks]), 8)
        groups = case.dim // GROUPS[case.format].size
        scales = memory(torch.stack([block.scale.view(torch.uint8) for block in self.blocks]), 8)
        row_bytes = case.dim // 2
        held = types.SimpleNamespace(
            raw=lanes.Tensor(raw, 0, (counts, case.block, row_bytes), (case.block * row_bytes, row_bytes, 1)),
            scales=lanes.Tensor(scales, 0, (groups, case.block, counts), (1, groups, groups * case.block)),
            full=Pointer([], 0), free=Pointer([], 0),  # type: ignore[arg-type]
        )  # fmt: skip
        tile = module.Tile(
            self.queries(),
            *(shared(count) for count in (ROWS, ROWS, ROWS, ROWS, lanes.helper("column_indexer").RUN)),
            shared(*self.maxima),
        )
        starts = [torch.tensor([0, *(pair[i] for pair in case.sequences)]).cumsum(0).int() for i in range(2)]
        most = max(-(-length // case.block) for _, length in case.sequences)
        out = lanes.tensor_of(torch.full((case.heads, int(starts[0][-1]), most), 777.0))
        lengths = module.Lengths(
            *map(lanes.tensor_of, starts), lanes.tensor_of(starts[1]), Int32(0), Int32(ROWS // case.heads), Int32(most)
        )
        positions = lanes.tensor_of(torch.tensor(case.positions or (0,), dtype=torch.int32))
        stored = types.SimpleNamespace(of_heads=[lanes.Float32(0.5)])
        q_scale = lanes.tensor_of(torch.arange(1.0, 1.0 + int(starts[0][-1]) * case.heads).view(-1, case.heads))
        factors = types.SimpleNamespace(q_scale=q_scale, use_q_scale=1)

        def consume() -> None:
            self.kernel.consume(
                stored, held, idx_q, factors, positions, tile, lengths, self.kernel.find_run(lengths),
                Int32(bool(case.positions)), Int32(case.causal), out,
            )  # fmt: skip

        lanes.launch(consume, (), (1,), THREADS)
        found = torch.tensor([float(x) for x in out.memory], dtype=torch.float64)
        return found.view(case.heads, -1, most)


class Right:
    """The queries in shared memory, eight of them a product."""

    def __init__(self, consumers: Consumers, queries: Any, group: int = 0) -> None:
        self.consumers, self.queries, self.group = consumers, queries, group

    def __getitem__(self, index: tuple[Any, ...]) -> Right:
        return type(self)(self.consumers, self.queries, int(index[-1]))

    def columns(self, dtype: torch.dtype) -> Tensor:
        """[COLUMNS, dim], from panels of 64 columns, of eight rows each, swizzled by 128 bytes."""
        dim = self.consumers.case.dim
        row, column = torch.meshgrid(torch.arange(COLUMNS), torch.arange(dim), indexing="ij")
        place = column // 64 * 512 + row * 64 + column % 64
        place = (place ^ (place >> 6 & 7) << 3) + self.group * COLUMNS * dim
        codes = torch.tensor([int(x) for x in self.queries.memory], dtype=torch.int32).to(torch.int16)
        return codes[place].view(dtype).double()


def wanted_of(case: Case, queries: Tensor, blocks: list[QuantizedTensor]) -> Tensor:
    most = max(-(-length // case.block) for _, length in case.sequences)
    wanted = torch.full((case.heads, queries.shape[0], most), 777.0, dtype=torch.float64)
    token = block = 0
    scale = torch.arange(1.0, 1.0 + queries.shape[0] * case.heads).view(-1, case.heads).double()
    scale *= 0.5 if case.format == "nvfp4" else 1.0
    for count, length in case.sequences:
        for i in range(count):
            limit = case.positions[token + i] if case.positions else length - count + i
            for number in range(-(-length // case.block)):
                keys = blocks[block + number].dequantize().double()
                products = queries[token + i] @ keys.T * scale[token + i][:, None]
                last = min(limit if case.causal else length - 1, length - 1) - number * case.block
                products[:, max(last + 1, 0) :] = -torch.inf
                wanted[:, token + i, number] = products.amax(1)
        token, block = token + count, block + (-(-length // case.block) if count else 0)
    return wanted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.drawn(1)
def test_block_maxima(stand_ins: None, formats: dict[str, types.ModuleType], name: str) -> None:
    """Of every query of several requests, as exact as float32 is; each stage goes back once."""
    case = CASES[name]
    idx_q, queries = queries_of(case)
    consumers = Consumers(case, formats)
    found, wanted = consumers.run(idx_q), wanted_of(case, queries, consumers.blocks)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    assert consumers.released == list(range(len(consumers.blocks)))


def test_every_power_of_two(formats: dict[str, types.ModuleType]) -> None:
    """Whatever stands in the other bytes of a word."""
    operand = lanes.helper("operands.index_mxfp4_left")
    for code in range(256):
        for byte in range(4):
            word = Int32(0x00FF017F ^ (0xFF ^ code ^ 0x00FF017F >> 8 * byte & 0xFF ^ 0xFF) << 8 * byte)
            assert operand.power(word, operand.alike(word), byte) == formats["mxfp4"].value_factor(code, code), code


def test_a_piece_decoded_over_one_in_flight(stand_ins: None, formats: dict[str, types.ModuleType]) -> None:
    """Without the wait behind the products of a unit."""
    case = CASES["one query"]
    idx_q, queries = queries_of(case)
    consumers = Consumers(case, formats)
    consumers.module.warpgroup = types.SimpleNamespace(wait_group=lambda _left: None)
    assert not torch.allclose(consumers.run(idx_q), wanted_of(case, queries, consumers.blocks))
