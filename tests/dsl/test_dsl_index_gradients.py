"""index_gradients in CuTe DSL, run thread by thread on the CPU: see `lanes`."""

from __future__ import annotations

from pathlib import Path

import lanes
import pytest
import torch
from lanes import Int32
from torch import Tensor

from msa_tiles import reference
from msa_tiles.paths import generated_dir
from msa_tiles.verify.index_parts import Parts, random_parts
from msa_tiles.verify.inputs import Lengths, Source

KERNEL = generated_dir() / "cutedsl/sm90/index_gradients_bf16.py"
BLOCK = 32
# A place behind the first request's block begins at the row where the last one's block does.
LENGTHS = (32, 0, 20)
HEADS, TOPK, QUERIES = 2, 9, 1


def lengths_of(requests: tuple[int, ...]) -> Lengths:
    starts = torch.tensor((0, *requests)).cumsum(0).to(torch.int32)
    return Lengths(starts, starts, None, max(requests), max(requests))


def parts(seed: int, index_dim: int, schedule_heads: int, num_tasks: int) -> Parts:
    dims = {
        "total_q": QUERIES, "total_k": sum(LENGTHS), "topk": TOPK, "num_kv_heads": HEADS, "num_tasks": num_tasks,
        "index_dim": index_dim, "block_size": BLOCK,
    }  # fmt: skip
    return random_parts(Source(torch.device("cpu"), seed, "normal"), dims, lengths_of(LENGTHS), schedule_heads)


def add(given: Parts, first: bool, before: Tensor, file: Path) -> tuple[Tensor, Tensor]:
    module = lanes.load(file)
    kernel = module.IndexGradients(given.dk.shape[1], BLOCK)
    dq, dk = lanes.tensor_of(before), lanes.tensor_of(given.dk)
    starts = lengths_of(LENGTHS).cu_seqlens_k
    # As many places as blocks can have, which are more than there are.
    places = sum(LENGTHS) // BLOCK + len(LENGTHS)
    tensors = (*(lanes.tensor_of(tensor) for tensor in given[:5]), lanes.tensor_of(starts), dq, dk)
    grid = (QUERIES * HEADS + places * (BLOCK // module.ROWS), 1, 1)
    lanes.launch(kernel.kernel, (*tensors, Int32(0), Int32(first)), grid, kernel.cta.threads)
    got_dq, got_dk = (torch.tensor([float(x) for x in tensor.memory]).view(tensor.shape) for tensor in (dq, dk))
    return got_dq, got_dk


def check(seed: int, index_dim: int, schedule_heads: int, num_tasks: int, first: bool, file: Path = KERNEL) -> None:
    given = parts(seed, index_dim, schedule_heads, num_tasks)
    # Nobody may read what stands there before the first sums.
    before = torch.full((QUERIES, HEADS, index_dim), torch.nan if first else 2.0)
    got_dq, got_dk = add(given, first, before, file)
    wanted_dq, wanted_dk = reference.index_gradients(*given)
    torch.testing.assert_close(got_dq, wanted_dq if first else wanted_dq + before)
    torch.testing.assert_close(got_dk, wanted_dk)


@pytest.mark.parametrize(
    ("index_dim", "schedule_heads", "num_tasks", "first"), [(64, 2, 20, True), (64, 1, 20, False), (128, 2, 4, True)]
)
@pytest.mark.drawn(1)
def test_parts_are_added(index_dim: int, schedule_heads: int, num_tasks: int, first: bool) -> None:
    check(num_tasks + index_dim, index_dim, schedule_heads, num_tasks, first)


# What each fault replaces, and by what.
FAULTS = {
    "slots that do not count are added": ("if present[slot] != 0:", "if True:"),
    "the last slots are left out": ("if slot < topk:", "if slot < topk - 1:"),
    "sums are read before they are written": ("cute.arch.sync_threads()", "pass"),
    "what stands there is added to the first sums": ("if first == 0:", "if True:"),
    "a place behind a request's blocks counts": ("if key_row < cu_seqlens_k[request + 1]:", "if True:"),
    "all heads have the first one's tasks": ("cutlass.min(head, Int32(counts.shape[0]) - 1)", "Int32(0)"),
    "rows past the request's end are written": ("if row + step * self.at_once < valid:", "if valid > 0:"),
    "only one task of a block is added": ("while found > 0:", "if found > 0:"),
    "the search stops one task early": (
        "low = low + cutlass.max((passed - 1) * step + 1, 0)",
        "low = low + cutlass.max(passed - 1, 0)",
    ),
    "what stood in dk is lost": (
        "total[c, step] = total[c, step] + read[c, step]\n                copy",
        "pass\n                copy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_shows(fault: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[fault]
    text = KERNEL.read_text(encoding="utf-8")
    assert right in text
    file = tmp_path / KERNEL.name
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        for seed in range(4):
            check(seed, 64, 2, 20, True, file)
