"""How the backward of sparse attention cuts its work, on the CPU; tests/simulator runs the kernels with it."""

from __future__ import annotations

import types

import pytest
import torch

from msa_tiles.call.attention import Gradients
from msa_tiles.call.where import Where
from msa_tiles.launch import backward
from msa_tiles.launch.windows import CHUNK

BLOCK = 64


def schedule(sizes):
    """Tasks and counts of one window: of every head the number of edges of its blocks, cut as build_schedule does."""
    number = max(sum(-(-size // CHUNK) for size in blocks) for blocks in sizes) + 2
    # What lies behind the counts is whatever was in memory: here it looks like one more task of the last block.
    tasks = torch.full((1, len(sizes), number, 4), (len(sizes[0]) - 1) * BLOCK, dtype=torch.int32)
    counts = torch.zeros((1, len(sizes)), dtype=torch.int32)
    for head, blocks in enumerate(sizes):
        at, first = 0, 0
        for block, size in enumerate(blocks):
            for begin in range(0, size, CHUNK):
                length = min(CHUNK, size - begin)
                tasks[0, head, at] = torch.tensor([block * BLOCK, first + begin, length, 2 * BLOCK + 1])
                at += 1
            first += size
        counts[0, head] = at
    return tasks, counts


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_tasks_are_taken_together(most):
    sizes = [[1, 128, 129, 600, 0, 3], [1025, 7, 256, 257, 0, 90], [0, 0, 0, 0, 0, 0]]
    total_k = len(sizes[0]) * BLOCK
    tasks, counts = schedule(sizes)
    made, made_counts = backward.group_tasks(tasks, counts, total_k, BLOCK, most)
    for head, blocks in enumerate(sizes):
        wanted, first, behind = [], 0, total_k
        for block, size in enumerate(blocks):
            for begin in range(0, size, CHUNK * most):
                row = block * BLOCK
                place = row if begin == 0 else behind
                behind += 0 if begin == 0 else BLOCK
                wanted.append([row, first + begin, min(CHUNK * most, size - begin), 2 * BLOCK + 1, place])
            first += size
        assert made[0, head, : int(made_counts[0, head])].tolist() == wanted
        further = (behind - total_k) // BLOCK
        assert further <= sum(blocks) // (CHUNK * most)
        if most == backward.TASKS:
            assert further <= backward.most_further(sum(blocks))


def test_a_workspace_that_holds_no_query_is_refused(monkeypatch):
    monkeypatch.setattr(backward, "_find", lambda facts, backend, op, variant: None)
    q, k = torch.zeros(3, 4, 64), torch.zeros(5, 2, 64)
    lse, ids = torch.zeros(3, 4), torch.zeros(2, 3, 1, dtype=torch.int32)
    # Four heads of 64 in BF16 and two marks; two heads' share of 64 rows of dK and dV in float32.
    wanted = 4 * 64 * 2 + 2 * 4 + 2 * 2 * 64 * 64 * 4 // (CHUNK * backward.TASKS)
    facts = types.SimpleNamespace(op="sparse_attention_backward", variant={})
    call = Gradients(q, q, k, k, q, lse, ids, None, Where(), None, 64, 1.0, wanted - 1, False, "auto")
    message = f"workspace: got {wanted - 1} bytes; wanted at least {wanted} for a window of one query"
    with pytest.raises(ValueError, match=message):
        backward.launch(facts, call, None, 5, q, k, k)
