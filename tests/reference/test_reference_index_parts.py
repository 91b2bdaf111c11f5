"""What the kernels of index_kl pass to each other, against loops over single queries, keys and tasks."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import close

from msa_tiles import reference

WHERE = {
    "cu_seqlens_q": torch.tensor([0, 5, 5, 9], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 11, 14, 21], dtype=torch.int32),
}
BLOCK = 4


@pytest.mark.parametrize("shortened", [False, True])
def test_index_lse(shortened: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    idx_q = torch.randn(10, 2, 3, generator=generator, dtype=torch.float64)
    idx_k = torch.randn(21, 3, generator=generator, dtype=torch.float64)
    ids = torch.randint(-1, 4, (2, 10, 3), generator=generator, dtype=torch.int32)
    lengths = [8, 1, 6] if shortened else [11, 3, 7]
    where = {**WHERE, **({"seqused_k": torch.tensor(lengths, dtype=torch.int32)} if shortened else {})}
    found = reference.index_lse(idx_q, idx_k, ids, block_size=BLOCK, index_scale=0.7, **where)
    wanted = torch.full((10, 3, 2), -math.inf, dtype=torch.float64)
    for request, (begin, end, row) in enumerate(((0, 5, 0), (5, 5, 11), (5, 9, 14))):
        for query in range(begin, end):
            last = min(lengths[request] - (end - begin) + query - begin, lengths[request] - 1)
            for head in range(2):
                for slot in range(3):
                    block = int(ids[head, query, slot])
                    keys = [j for j in range(last + 1) if j // BLOCK == block]
                    terms = [math.exp(0.7 * float(idx_q[query, head] @ idx_k[row + j])) for j in keys]
                    wanted[query, slot, head] = math.log(sum(terms)) if terms else -math.inf
    assert wanted.isfinite().any() and wanted.isinf().any()
    close(found, wanted, terms=50)


def test_merged_lse_is_that_of_the_divergence() -> None:
    """With a teacher that is the student, the loss is 0: its LSE over the slots is the student's."""
    generator = torch.Generator().manual_seed(4)
    idx_q = torch.randn(10, 1, 3, generator=generator, dtype=torch.float64)
    idx_k = torch.randn(21, 3, generator=generator, dtype=torch.float64)
    ids = torch.tensor([0, 1, 2], dtype=torch.int32).expand(1, 10, 3)
    lse = reference.index_lse(idx_q, idx_k, ids, block_size=BLOCK, index_scale=0.7, **WHERE).logsumexp(1)
    options = {"block_size": BLOCK, "softmax_scale": 0.7, "index_scale": 0.7, **WHERE}
    loss, _, _ = reference.index_kl(idx_q, idx_k[:, None], lse, idx_q, idx_k, ids, **options)
    assert abs(float(loss)) < 1e-12


@pytest.mark.parametrize("schedule_heads", [1, 2])
def test_index_gradients(schedule_heads: int) -> None:
    generator = torch.Generator().manual_seed(5)
    partial_dq = torch.randn(4, 3, 2, 5, generator=generator)
    present = (torch.rand(4, 3, 2, generator=generator) < 0.6).int()
    partial_dk = torch.randn(2, 6, BLOCK, 5, generator=generator)
    dk = torch.randn(13, 5, generator=generator)
    tasks = torch.full((1, schedule_heads, 6, 4), -1, dtype=torch.int32)
    lists = [[(0, 4), (0, 4), (8, 3)], [(4, 4), (11, 2)]][:schedule_heads]
    for head, rows in enumerate(lists):
        for task, (row, valid) in enumerate(rows):
            tasks[0, head, task] = torch.tensor([row, 0, 1, valid << 1 | task & 1])
    counts = torch.tensor([[len(rows) for rows in lists]], dtype=torch.int32)
    partial_dq[present == 0], wanted_dk = torch.nan, dk.clone()
    wanted_dq = torch.zeros(4, 2, 5)
    for query in range(4):
        for slot in range(3):
            for head in range(2):
                if present[query, slot, head]:
                    wanted_dq[query, head] += partial_dq[query, slot, head]
    for head in range(2):
        for task, (row, valid) in enumerate(lists[min(head, schedule_heads - 1)]):
            for i in range(valid):
                wanted_dk[row + i] += partial_dk[head, task, i]
    found = reference.index_gradients(partial_dq, present, partial_dk, tasks, counts, dk)
    close(found, (wanted_dq, wanted_dk), terms=4)
