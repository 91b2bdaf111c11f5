"""gradient_rows and merge_gradients in CuTe DSL, run thread by thread on the CPU: see `lanes`."""

from __future__ import annotations

from typing import Any

import lanes
import pytest
import torch
from lanes import Int32
from rounding import close
from torch import Tensor

from msa_tiles import reference
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify.gradient_parts import random_parts, random_rows
from msa_tiles.verify.inputs import Source


def kernel_of(op: str, head_dim: int) -> tuple[Any, Any]:
    (cell,) = default_registry().select(op=op, dsl="cutedsl", target="sm90", precision="bf16")
    module = lanes.load(cell.file)
    name = "".join(part.capitalize() for part in op.split("_"))
    return getattr(module, name)(head_dim), module


def poison(*shape: int) -> lanes.Tensor:
    return lanes.tensor_of(torch.full(shape, torch.nan))


def values_of(tensor: lanes.Tensor) -> Tensor:
    return torch.tensor([float(x) for x in tensor.memory]).view(tensor.shape)


@pytest.mark.parametrize(("heads", "head_dim", "with_dlse"), [(3, 64, True), (17, 64, False), (2, 128, True)])
def test_rows(heads: int, head_dim: int, with_dlse: bool) -> None:
    kernel, module = kernel_of("gradient_rows", head_dim)
    given = random_rows(
        Source(torch.device("cpu"), heads, "normal"),
        {"total_q": 3, "num_q_heads": heads, "head_dim": head_dim},
        False,
    )
    rows = poison(3, heads, 2)
    tensors = (*(lanes.tensor_of(tensor) for tensor in given), rows)
    grid = (3, -(-heads // module.ROWS), 1)
    lanes.launch(kernel.kernel, (*tensors, Int32(with_dlse)), grid, module.ROWS * kernel.lanes)
    wanted = reference.gradient_rows(*given[:3], dlse=given.dlse if with_dlse else None)
    # Of log2(e) times the LSE, and of the sum of products of a row; one more where dlse is taken off.
    size = (given.lse.abs() * 2, (given.out.float() * given.dout.float()).abs().sum(-1) + given.dlse.abs())
    close(values_of(rows), wanted, terms=head_dim + 1, size=torch.stack(size, -1).double().nan_to_num(0.0))


@pytest.mark.parametrize(
    ("heads", "group", "topk", "total_k", "tasks", "head_dim"),
    [(2, 1, 5, 30, 9, 64), (3, 2, 37, 17, 8, 64), (1, 16, 16, 20, 4, 128)],
)
@pytest.mark.drawn(1)
def test_parts_are_added(heads: int, group: int, topk: int, total_k: int, tasks: int, head_dim: int) -> None:
    kernel, module = kernel_of("merge_gradients", head_dim)
    dims = {
        "total_q": 2, "total_k": total_k, "topk": topk, "num_kv_heads": heads, "num_q_heads": heads * group,
        "head_dim": head_dim, "block_size": 16, "num_tasks": tasks, "num_sums": total_k + 16 * tasks,
    }  # fmt: skip
    given = random_parts(Source(torch.device("cpu"), tasks, "normal"), dims)
    dq, sums = poison(2, heads * group, head_dim), lanes.tensor_of(given.sums)
    tensors = (*(lanes.tensor_of(tensor) for tensor in given[:4]), sums, dq)
    grid = (heads * tasks + 2 * -(-heads * group // module.ROWS), 1, 1)
    lanes.launch(kernel.kernel, (*tensors, Int32(0), Int32(16)), grid, kernel.cta.threads)
    wanted_dq, wanted_sums = reference.merge_gradients(*given)
    torch.testing.assert_close(values_of(dq).to(torch.bfloat16), wanted_dq)
    torch.testing.assert_close(values_of(sums), wanted_sums, equal_nan=True)


@pytest.mark.slow  # beside it, test_parts_are_added
def test_many_tasks_of_a_block_share_its_rows() -> None:
    """More further tasks than lanes, between others, and fewer keys than tasks."""
    kernel, _ = kernel_of("merge_gradients", 64)
    further, valid, block_size = 35, 20, 32
    sums = torch.randn((2, 1, block_size * (further + 4), 64), generator=torch.Generator().manual_seed(0))
    behind = [3 * block_size + i * block_size for i in range(further + 1)]
    entries = [(0, 0), (0, behind[0]), (block_size, block_size)]
    entries += [(block_size, at) for at in behind[1:]] + [(2 * block_size, 2 * block_size)]
    tasks = torch.tensor([[[(row, 0, 1, valid << 1, at) for row, at in entries]]], dtype=torch.int32)
    counts = torch.tensor([[len(entries)]], dtype=torch.int32)
    held = lanes.tensor_of(sums)
    nothing = lanes.tensor_of(torch.zeros((1, 1, 1), dtype=torch.int32))
    dq = poison(0, 1, 64)
    tensors = (lanes.tensor_of(torch.zeros((1, 1, 1, 64))), nothing, *map(lanes.tensor_of, (tasks, counts)), held, dq)
    lanes.launch(kernel.kernel, (*tensors, Int32(0), Int32(block_size)), (len(entries), 1, 1), kernel.cta.threads)
    parts = torch.zeros((1, 1, 1, 64)), torch.zeros((1, 1, 1), dtype=torch.int32)
    _, wanted = reference.merge_gradients(*parts, tasks, counts, sums)
    torch.testing.assert_close(values_of(held), wanted)
