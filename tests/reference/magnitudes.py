"""What the sums of attention and its gradients add up, in magnitude: the sizes that `rounding.bound` is given.

float64, one query and head at a time, like `reference.differentiable`.
"""

from __future__ import annotations

import torch
from reference.batches import Batch
from reference.differentiable import attended
from torch import Tensor


def logit(q: Tensor, keys: list[Tensor], scale: float) -> float:
    """The largest sum of magnitudes of the products of a query and a key."""
    most = max((float(part.detach().abs().amax()) for part in keys if part.numel()), default=0.0)
    return scale * most * float(q.detach().abs().sum(-1).max()) if q.numel() else 0.0


def gradients(
    batch: Batch,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    ids: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Sizes of dq, dk and dv. ``dS = P * (<dout, v> - <dout, out> + dlse) * scale``, whose terms cancel."""
    q, out = q.detach(), out.detach()
    keys, values = ([part.detach() for part in parts] for parts in (keys, values))
    dq, dk, dv = torch.zeros_like(q), [torch.zeros_like(k) for k in keys], [torch.zeros_like(v) for v in values]
    for row, (request, _) in enumerate(batch.rows()):
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // keys[0].shape[1]) if keys else 0
            chosen = attended(batch, row, ids, kv_head, block_size)
            if len(chosen) == 0:
                continue
            k, v = keys[request][chosen, kv_head], values[request][chosen, kv_head]
            weights = (k @ q[row, head] * scale).softmax(0)
            terms = v.abs() @ dout[row, head].abs() + out[row, head].abs() @ dout[row, head].abs()
            if dlse is not None:
                terms = terms + dlse[row, head].abs()
            dscores = weights * terms * scale
            dq[row, head] += dscores @ k.abs()
            dk[request][chosen, kv_head] += dscores[:, None] * q[row, head].abs()
            dv[request][chosen, kv_head] += weights[:, None] * dout[row, head].abs()
    return dq, dk, dv


def divergence(
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
) -> tuple[float, Tensor, list[Tensor]]:
    """Sizes of the loss, of d_idx_q and of d_idx_k. ``dS = w * (Q - P) * index_scale``, whose terms cancel."""
    idx_q, idx_keys = idx_q.detach(), [part.detach() for part in idx_keys]
    total_q, num_heads, _ = idx_q.shape
    group = q.shape[1] // num_heads
    loss, dq, dk = 0.0, torch.zeros_like(idx_q), [torch.zeros_like(part) for part in idx_keys]
    for row, (request, _) in enumerate(batch.rows()):
        for head in range(num_heads):
            chosen = attended(batch, row, ids, head, block_size)
            if len(chosen) == 0:
                continue
            heads, index_keys = q[row, head * group : (head + 1) * group], idx_keys[request][chosen]
            teacher = (heads @ keys[request][chosen, head].T * scale).softmax(-1).mean(0)
            log_student = (index_keys @ idx_q[row, head] * index_scale).log_softmax(0)
            share = weights[row].abs() / (total_q * num_heads)
            loss += float(share * (teacher * (teacher.log().abs() + log_student.abs() + 1)).sum())
            dscores = share * (teacher + log_student.exp()) * index_scale
            dq[row, head] += dscores @ index_keys.abs()
            dk[request][chosen] += dscores[:, None] * idx_q[row, head].abs()
    return loss, dq, dk
