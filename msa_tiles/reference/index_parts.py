"""What the kernels of index_kl pass to each other: LSE of single blocks, and sums of partial gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference.batch import accumulator, read_batch
from msa_tiles.reference.threads import one_thread


@one_thread()
def index_lse(
    idx_q: Tensor,
    idx_k: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 128,
    index_scale: float | None = None,
    **where: Any,
) -> Tensor:
    """LSE of ``<idx_q, idx_k> * index_scale`` over the visible tokens of each selected block: [T, topk, Hkv].

    ``idx_q`` [T, Hkv, Di], ``idx_k`` [Tk, Di], ``block_indices`` [Hkv, T, topk]. Natural logarithm, in `accumulator`'s
    type; -inf for ids that are no block of the query's own. ``where`` is as in `read_batch`, without ``k_offset``.
    """
    batch = read_batch(idx_q.shape[0], idx_q.device, total_k=idx_k.shape[0], **where)
    dtype = accumulator(idx_q.dtype)
    scale = idx_q.shape[2] ** -0.5 if index_scale is None else index_scale
    num_heads, total_q, topk = block_indices.shape
    result = torch.full((total_q, topk, num_heads), -torch.inf, dtype=dtype, device=idx_q.device)
    for request in batch.requests:
        rows = slice(request.query_begin, request.query_end)
        keys = idx_k[request.key_row : request.key_row + request.num_keys].to(dtype)
        positions = torch.arange(request.num_keys, device=idx_q.device)
        hidden = positions > batch.limit[rows, None]
        blocks = torch.div(positions, block_size, rounding_mode="floor")
        for head in range(num_heads):
            scores = (idx_q[rows, head].to(dtype) @ keys.T).mul_(scale).masked_fill_(hidden, -torch.inf)
            for slot in range(topk if request.num_keys else 0):
                other = blocks != block_indices[head, rows, slot, None]
                result[rows, slot, head] = scores.masked_fill(other, -torch.inf).logsumexp(1)
    return result


@one_thread()
def index_gradients(
    partial_dq: Tensor,
    present: Tensor,
    partial_dk: Tensor,
    tasks: Tensor,
    counts: Tensor,
    dk: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sums of the partial gradients of one query window: dq [n, Hkv, Di], and dk [Tk, Di] with the rest added.

    ``partial_dq`` [n, topk, Hkv, Di] counts where ``present`` [n, topk, Hkv] is not 0. ``tasks`` int32 [1, heads, most,
    4] (first key row, first edge, number of edges, valid rows << 1 | cut), ``counts`` of them [1, heads]:
    ``partial_dk`` [Hkv, most, block_size, Di] of a task belongs to the valid rows from its first one on. Heads past the
    last one that has tasks share that one's.
    """
    dq = partial_dq.masked_fill((present == 0)[..., None], 0.0).sum(1)
    dk = dk.clone()
    for head in range(partial_dk.shape[0]):
        listed = min(head, tasks.shape[1] - 1)
        for task in range(int(counts[0, listed])):
            row, _, _, extent = tasks[0, listed, task].tolist()
            dk[row : row + (extent >> 1)] += partial_dk[head, task, : extent >> 1]
    return dq, dk
