"""The indexer's training signal: how far its softmax is from the attention of the heads that it selects for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference import pieces
from msa_tiles.reference.batch import Batch, accumulator, read_batch
from msa_tiles.reference.pieces import Piece, Schedule
from msa_tiles.reference.schedule import build_schedule
from msa_tiles.reference.threads import one_thread


@one_thread()
def index_kl(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    idx_q: Tensor,
    idx_k: Tensor,
    block_indices: Tensor | None,
    *,
    block_size: int = 128,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    token_weights: Tensor | None = None,
    schedule: Schedule | None = None,
    gradients: bool = True,
    **where: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean KL divergence of the index branch from the main branch, and its gradients for idx_q and idx_k.

    ``q`` [T, Hq, D], ``k`` [Tk, Hkv, D] and ``lse`` [T, Hq] (natural log) are the main branch and make the teacher;
    ``idx_q`` [T, Hkv, Di] and ``idx_k`` [Tk, Di] the student. J(t, h) are the visible tokens of the blocks
    ``block_indices`` [Hkv, T, k], or with None everything that the query may see; ``lse`` is over the same tokens. With
    ``P = mean over the group's heads of exp(<q, k> * softmax_scale - lse)`` and
    ``Q = softmax over J of <idx_q, idx_k> * index_scale``,

    - the loss is ``sum over t, h of w[t] * KL(P || Q) / (T * Hkv)`` (w: ``token_weights`` [T], else 1), a scalar in
      `accumulator`'s type,
    - its gradient for the index scores is ``w[t] * (Q - P) / (T * Hkv)``, which gives those for idx_q and idx_k, in
      their shapes and dtypes (None without ``gradients``).

    A query that sees nothing adds 0. T counts every row, also those past the last request. Keys are flat, ``where`` is
    as in `read_batch`. Keys that a query does not see never reach it.
    """
    batch = read_batch(q.shape[0], q.device, total_k=k.shape[0], **where)
    if block_indices is not None and schedule is None:
        schedule = build_schedule(block_indices, block_size=block_size, total_k=k.shape[0], **where)

    def parts(head: int) -> Iterator[Piece]:
        if block_indices is None:
            found = pieces.prefix(batch)
        else:
            assert schedule is not None
            found = pieces.selected(batch, schedule, head, block_indices.shape[2], block_size)
        return pieces.exact(found, batch, (q, idx_q), (k, idx_k))

    student = _Student(idx_q, idx_k, index_scale, batch)
    dtype = student.dtype
    total_q, num_heads, _ = idx_q.shape
    group = q.shape[1] // num_heads
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    share = torch.full((total_q,), 1.0 / max(total_q * num_heads, 1), dtype=dtype, device=q.device)
    if token_weights is not None:
        share *= token_weights.to(dtype)
    loss = torch.zeros((), dtype=dtype, device=q.device)
    d_idx_q = torch.zeros(idx_q.shape, dtype=dtype, device=q.device)
    d_idx_k = torch.zeros(idx_k.shape, dtype=dtype, device=q.device)
    for head in range(num_heads):
        heads = slice(head * group, (head + 1) * group)
        index_lse = student.lse(head, parts)
        for piece in parts(head):
            rows, hidden = piece.rows, ~piece.visible(batch)
            scores = (q[rows, heads].to(dtype) @ k[piece.flat, head].to(dtype).T).mul_(scale)
            teacher = scores.sub_(lse[rows, heads, None].to(dtype)).exp_().mean(1).masked_fill_(hidden, 0.0)
            # The logarithm of Q, not Q: that may be 0 where the teacher is not.
            log_q = student.scores(head, piece).sub_(index_lse[rows, None])
            # 0 * log(0 / Q) is 0, whatever Q is.
            terms = torch.where(teacher > 0, teacher * (teacher.log() - log_q), 0.0)
            loss += share[rows] @ terms.sum(1)
            if gradients:
                dscores = log_q.exp_().masked_fill_(hidden, 0.0).sub_(teacher)
                dscores *= (share[rows] * student.scale)[:, None]
                d_idx_q[rows, head] += dscores @ idx_k[piece.flat].to(dtype)
                d_idx_k[piece.flat] += dscores.T @ idx_q[rows, head].to(dtype)
    if not gradients:
        return loss, None, None
    return loss, d_idx_q.to(idx_q.dtype), d_idx_k.to(idx_k.dtype)


class _Student:
    """The index branch: scores of a piece, and their LSE over all pieces of a head."""

    def __init__(self, idx_q: Tensor, idx_k: Tensor, index_scale: float | None, batch: Batch) -> None:
        self.idx_q, self.idx_k, self.batch = idx_q, idx_k, batch
        self.dtype = accumulator(idx_q.dtype)
        self.scale = idx_q.shape[2] ** -0.5 if index_scale is None else index_scale

    def scores(self, head: int, piece: Piece) -> Tensor:
        """Scaled scores [n, keys], hidden keys too."""
        queries = self.idx_q[piece.rows, head].to(self.dtype)
        return (queries @ self.idx_k[piece.flat].to(self.dtype).T).mul_(self.scale)

    def lse(self, head: int, parts: Callable[[int], Iterator[Piece]]) -> Tensor:
        """[T], -inf for a query without a visible key."""
        result = torch.full((self.idx_q.shape[0],), -torch.inf, dtype=self.dtype, device=self.idx_q.device)
        for piece in parts(head):
            scores = self.scores(head, piece).masked_fill_(~piece.visible(self.batch), -torch.inf)
            result[piece.rows] = torch.logaddexp(result[piece.rows], scores.logsumexp(1))
        return result
