"""Training oracles: the dense masked formulas, one query and head at a time, in float64, for torch's autograd.

Like `reference.dense` they share nothing with msa_tiles.reference and know no storage.
"""

from __future__ import annotations

import torch
from reference import dense
from reference.batches import Batch
from torch import Tensor


def attended(batch: Batch, row: int, ids: Tensor | None, head: int, block_size: int) -> Tensor:
    """The keys of a query's request that one KV head reads, int64; ids None: everything that it sees."""
    request, _ = batch.rows()[row]
    if request < 0:
        return torch.zeros(0, dtype=torch.int64)
    seen = torch.from_numpy(dense.sees(batch, row))
    if ids is not None:
        blocks = torch.from_numpy(dense.block_of(batch, request, block_size))
        seen &= torch.isin(blocks, ids[head, row])
    return seen.nonzero()[:, 0]


def attention(
    batch: Batch,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    ids: Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse [T, Hq], differentiable; 0 and -inf where nothing is attended."""
    num_q_heads = q.shape[1]
    outs, lses = [], []
    for row, (request, _) in enumerate(batch.rows()):
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // keys[0].shape[1]) if keys else 0
            chosen = attended(batch, row, ids, kv_head, block_size)
            if len(chosen) == 0:
                outs.append(torch.zeros_like(q[row, head]))
                lses.append(torch.tensor(-torch.inf, dtype=q.dtype))
                continue
            scores = keys[request][chosen, kv_head] @ q[row, head] * scale
            outs.append(scores.softmax(0) @ values[request][chosen, kv_head])
            lses.append(scores.logsumexp(0))
    if not outs:
        return q * 1.0, q.sum(-1)
    return torch.stack(outs).view(q.shape), torch.stack(lses).view(q.shape[:2])


def index_kl(
    batch: Batch,
    q: Tensor,
    keys: list[Tensor],
    idx_q: Tensor,
    idx_keys: list[Tensor],
    ids: Tensor | None,
    block_size: int,
    scale: float,
    index_scale: float,
    weights: Tensor,
) -> Tensor:
    """The loss as it is defined, differentiable in everything: a test detaches what is no student."""
    total_q, num_heads, _ = idx_q.shape
    group = q.shape[1] // num_heads
    loss = idx_q.sum() * 0.0
    for row, (request, _) in enumerate(batch.rows()):
        for head in range(num_heads):
            chosen = attended(batch, row, ids, head, block_size)
            if len(chosen) == 0:
                continue
            heads = q[row, head * group : (head + 1) * group]
            teacher = (heads @ keys[request][chosen, head].T * scale).softmax(-1).mean(0)
            log_student = (idx_keys[request][chosen] @ idx_q[row, head] * index_scale).log_softmax(0)
            loss = loss + weights[row] * (torch.special.entr(teacher).neg() - teacher * log_student).sum()
    return loss / max(total_q * num_heads, 1)
