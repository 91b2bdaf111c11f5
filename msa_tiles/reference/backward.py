"""Gradients of attention, block by block: nothing of the size T * Tk is ever held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference import pieces
from msa_tiles.reference.batch import Batch, accumulator, read_batch
from msa_tiles.reference.pieces import Piece, Schedule
from msa_tiles.reference.schedule import build_schedule
from msa_tiles.reference.threads import one_thread


@one_thread()
def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    dlse: Tensor | None = None,
    block_size: int = 128,
    softmax_scale: float | None = None,
    schedule: Schedule | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `reference.sparse_attention` for q, k and v, each of its tensor's shape and dtype.

    ``dout`` [T, Hq, D] and ``dlse`` [T, Hq] (None: zero) are the gradients of ``out`` and ``lse``; the other arguments
    are those of the forward call, whose results are ``out`` and ``lse``. Keys are flat. With
    ``P = exp(S - lse)``, ``delta = <out, dout> - dlse`` and ``dS = P * (<dout, v> - delta) * softmax_scale``:
    ``dq = dS k``, ``dk = dS' q`` and ``dv = P' dout``. Rows with nothing visible get and give nothing, whatever their
    gradients hold; what a query does not see never reaches its gradients, nor it the gradients of what it does not see.
    """
    if schedule is None:
        schedule = build_schedule(block_indices, block_size=block_size, total_k=k.shape[0], **where)
    batch = read_batch(q.shape[0], q.device, total_k=k.shape[0], **where)
    topk = block_indices.shape[2]
    state = _Gradients(dout, q, k, v, out, lse, dlse, softmax_scale)
    for head in range(k.shape[1]):
        state.add(head, pieces.selected(batch, schedule, head, topk, block_size), batch)
    return state.result()


@one_thread()
def dense_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `reference.dense_attention` for q, k and v; see `sparse_attention_backward`."""
    batch = read_batch(q.shape[0], q.device, total_k=k.shape[0], **where)
    state = _Gradients(dout, q, k, v, out, lse, dlse, softmax_scale)
    for head in range(k.shape[1]):
        state.add(head, pieces.prefix(batch), batch)
    return state.result()


class _Gradients:
    """The gradients of q, k and v in `accumulator`'s type, as far as blocks were added."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        softmax_scale: float | None,
    ) -> None:
        self.dout, self.q, self.k, self.v = dout, q, k, v
        self.dtype = dtype = accumulator(q.dtype)
        self.scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        self.lse = lse.to(dtype)
        self.delta = (out.to(dtype) * dout.to(dtype)).sum(-1)
        if dlse is not None:
            self.delta -= dlse.to(dtype)
        self.dq, self.dk, self.dv = (torch.zeros(part.shape, dtype=dtype, device=q.device) for part in (q, k, v))

    def add(self, head: int, parts: Iterator[Piece], batch: Batch) -> None:
        """Add everything that the query heads of one KV head read."""
        group = self.q.shape[1] // self.k.shape[1]
        heads = slice(head * group, (head + 1) * group)
        for piece in pieces.exact(parts, batch, (self.q, self.dout), (self.k, self.v)):
            rows, keys = piece.rows, self.k[piece.flat, head].to(self.dtype)
            queries = self.q[rows, heads].to(self.dtype)
            # A row that sees nothing may have any gradient, NaN too: 0 * NaN would not do.
            empty = self.lse[rows, heads] == -torch.inf
            dout = self.dout[rows, heads].to(self.dtype).masked_fill(empty[..., None], 0.0)
            weights = (queries @ keys.T).mul_(self.scale).sub_(self.lse[rows, heads, None]).exp_()
            hidden = ~piece.visible(batch)[:, None]
            weights.masked_fill_(hidden, 0.0)
            dscores = (dout @ self.v[piece.flat, head].to(self.dtype).T).sub_(self.delta[rows, heads, None])
            dscores.mul_(weights).mul_(self.scale).masked_fill_(hidden, 0.0)
            self.dv[piece.flat, head] += weights.flatten(0, 1).T @ dout.flatten(0, 1)
            self.dq[rows, heads] += dscores @ keys
            self.dk[piece.flat, head] += dscores.flatten(0, 1).T @ queries.flatten(0, 1)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtypes of the tensors that they belong to."""
        return self.dq.to(self.q.dtype), self.dk.to(self.k.dtype), self.dv.to(self.v.dtype)
