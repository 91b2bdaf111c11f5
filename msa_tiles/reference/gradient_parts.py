"""What the kernels of the attention backward hand each other: facts of rows, and gradients in parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from msa_tiles.reference.threads import one_thread


@one_thread()
def gradient_rows(dout: Tensor, out: Tensor, lse: Tensor, *, dlse: Tensor | None = None) -> Tensor:
    """LSE in base two and ``<out, dout> - dlse`` of every row, float32 [T, Hq, 2].

    ``dout`` and ``out`` [T, Hq, D], ``lse`` and ``dlse`` [T, Hq]. A row with LSE -inf gets +inf and 0, whatever its
    gradients hold.
    """
    delta = (out.to(torch.float32) * dout.to(torch.float32)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    empty = lse == -torch.inf
    return torch.stack((torch.where(empty, torch.inf, lse * math.log2(math.e)), delta.masked_fill(empty, 0.0)), -1)


@one_thread()
def merge_gradients(
    partial_dq: Tensor, marks: Tensor, tasks: Tensor, counts: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """dq [T, Hq, D] and the sums [2, Hkv, N, D] of dK and dV, with everything added that one window left in parts.

    ``partial_dq`` [T, k, Hq, D] counts where ``marks`` [T, Hkv, k] is 1. ``tasks`` [1, Hkv, N, 5] are (first key row,
    first edge, number of edges, valid rows << 1 | cut, row of the sums); of each head the first ``counts`` [1, Hkv] are
    defined. What a task wrote to other rows of the sums than those of its keys is added to these.
    """
    group = partial_dq.shape[2] // marks.shape[1]
    counted = (marks == 1).repeat_interleave(group, 1).transpose(1, 2)[..., None]
    dq = partial_dq.to(torch.float32).masked_fill(~counted, 0.0).sum(1).to(partial_dq.dtype)
    sums = sums.clone()
    for head in range(tasks.shape[1]):
        for row, _, _, extent, at in tasks[0, head, : int(counts[0, head])].tolist():
            if at != row:
                sums[:, head, row : row + (extent >> 1)] += sums[:, head, at : at + (extent >> 1)]
    return dq, sums
