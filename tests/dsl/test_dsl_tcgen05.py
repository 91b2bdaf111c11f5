"""Layouts of tcgen05's operands: what TMA writes, multiplications read and threads store lies in one place.

Host code on CPU tensors, as in test_dsl_cutedsl.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass", reason="needs the extra `cutedsl`")

from cutlass import BFloat16, Float32, Int32, cute  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode  # noqa: E402
from cutlass.cute.nvgpu.tcgen05 import (  # noqa: E402
    Ld32x32bOp,
    OperandSource,
    Repetition,
    St32x32bOp,
    make_tmem_copy,
)
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from msa_tiles.dsl.cutedsl import tcgen05, tma, wide_gather  # noqa: E402

COUNT = 2  # tiles of a ring
DIMS = [128, 64]


def run(function: Any, *arguments: Tensor) -> None:
    function(*(from_dlpack(value) for value in arguments))


def places(*shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def swizzled(offsets: Tensor) -> Tensor:
    """Offsets of two-byte elements under a swizzle of 128 bytes: bits 7 to 9 of the address flip bits 4 to 6."""
    return offsets ^ (offsets >> 6 & 7) << 3


def score(block_size: int) -> Any:
    return tcgen05.product(BFloat16, block_size, OperandMajorMode.K, OperandSource.SMEM)


@pytest.mark.parametrize("group", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.drawn(2)
def test_gathered_rows_lie_where_the_left_operand_is_read_and_threads_store(head_dim: int, group: int) -> None:
    rows = wide_gather.WideRows(BFloat16, head_dim, group)
    heads, panel, panels, _ = rows.box

    @cute.jit
    def operand(out: cute.Tensor):
        layout = tcgen05.left_layout(score(128), BFloat16, head_dim, COUNT).outer
        for tile in cutlass.range(COUNT):
            for row in cutlass.range(tcgen05.ROWS):
                for column in cutlass.range(head_dim):
                    out[tile, row, column] = cute.crd2idx(((row, column % 16), 0, column // 16, tile), layout)

    @cute.jit
    def boxes(out: cute.Tensor, memory: cute.Tensor):
        layout = rows.boxes(memory, COUNT).layout
        for tile in cutlass.range(COUNT):
            for token in cutlass.range(rows.tokens):
                for head in cutlass.range(group):
                    for column in cutlass.range(head_dim):
                        within = column // panel
                        coordinate = (
                            head % heads, column % panel, within % panels, head // heads, within // panels, token, tile,
                        )  # fmt: skip
                        out[tile, token, head, column] = cute.crd2idx(coordinate, layout)

    @cute.jit
    def stores(out: cute.Tensor):
        for row in cutlass.range(tcgen05.ROWS):
            for vector in cutlass.range(head_dim // 8):
                out[row, vector] = rows.place(Int32(row), Int32(vector))

    read, written, staged = (
        places(COUNT, 128, head_dim),
        places(COUNT, rows.tokens, group, head_dim),
        places(128, head_dim // 8),
    )
    run(operand, read)
    run(boxes, written, torch.zeros(1, dtype=torch.bfloat16))
    run(stores, staged)
    assert rows.tokens * rows.rows_per_token == 128
    assert torch.equal(written, read.view(COUNT, rows.tokens, -1, head_dim)[:, :, :group])
    assert torch.equal(read.flatten().sort().values, torch.arange(read.numel(), dtype=torch.int32))
    assert torch.equal(staged * 8, swizzled(read[0, :, ::8]))


@pytest.mark.parametrize("pages", [1, 4])
@pytest.mark.parametrize("block_size", DIMS)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.drawn(4)
def test_keys_and_values_lie_where_the_right_operands_are_read(head_dim: int, block_size: int, pages: int) -> None:
    box_rows = block_size // pages

    @cute.jit
    def operands(keys: cute.Tensor, values: cute.Tensor):
        k_layout = tcgen05.right_layout(
            score(block_size), BFloat16, OperandMajorMode.K, block_size, head_dim, COUNT
        ).outer  # fmt: skip
        weigh = tcgen05.product(BFloat16, head_dim, OperandMajorMode.MN, OperandSource.TMEM)
        v_layout = tcgen05.right_layout(weigh, BFloat16, OperandMajorMode.MN, head_dim, block_size, COUNT).outer
        for tile in cutlass.range(COUNT):
            for row in cutlass.range(block_size):
                for column in cutlass.range(head_dim):
                    keys[tile, row, column] = cute.crd2idx(((row, column % 16), 0, column // 16, tile), k_layout)
                    values[tile, row, column] = cute.crd2idx(((column, row % 16), 0, row // 16, tile), v_layout)

    @cute.jit
    def boxes(out: cute.Tensor, memory: cute.Tensor):
        layout = tma.boxes(memory, box_rows, block_size, head_dim, COUNT).layout
        for tile in cutlass.range(COUNT):
            for row in cutlass.range(block_size):
                for column in cutlass.range(head_dim):
                    coordinate = (row % box_rows, column % tma.PANEL, row // box_rows, column // tma.PANEL, tile)
                    out[tile, row, column] = cute.crd2idx(coordinate, layout)

    shape = (COUNT, block_size, head_dim)
    keys, values, written = places(*shape), places(*shape), places(*shape)
    run(operands, keys, values)
    run(boxes, written, torch.zeros(1, dtype=torch.bfloat16))
    assert torch.equal(keys, written) and torch.equal(values, written)


def test_a_thread_holds_a_row_of_tensor_memory_column_by_column() -> None:
    shape = (tcgen05.ROWS, tcgen05.COLUMNS)

    @cute.jit
    def coordinates(read: cute.Tensor, written: cute.Tensor):
        memory = cute.make_ptr(Float32, Int32(0), cute.AddressSpace.tmem, assumed_align=16)
        tile = cute.make_tensor(memory, cute.make_layout(shape, stride=(tcgen05.LANE, 1)))
        repetition = Repetition(tcgen05.COLUMNS)
        load = make_tmem_copy(cute.make_copy_atom(Ld32x32bOp(repetition), Float32), tile)
        store = make_tmem_copy(cute.make_copy_atom(St32x32bOp(repetition), Float32), tile)
        for thread in cutlass.range(tcgen05.ROWS):
            loaded = load.get_slice(thread).partition_D(cute.make_identity_tensor(shape))
            stored = store.get_slice(thread).partition_S(cute.make_identity_tensor(shape))
            for i in cutlass.range_constexpr(tcgen05.COLUMNS):
                for mode in cutlass.range_constexpr(2):
                    read[thread, i, mode] = loaded[i][mode]
                    written[thread, i, mode] = stored[i][mode]

    read, written = places(*shape, 2), places(*shape, 2)
    run(coordinates, read, written)
    right = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).to(torch.int32)
    assert torch.equal(read, right) and torch.equal(written, right)
