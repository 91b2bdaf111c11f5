"""The yardstick of attention errors: the same computation by plain torch in the inputs' own precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference.batch import read_batch

_ROWS = 64


def rounded_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    wanted: Tensor,
    *,
    block_size: int,
    unit: Tensor,
    softmax_scale: float | None = None,
    scaled: tuple[Tensor, Tensor] | None = None,
    **where: Any,
) -> tuple[Tensor, float]:
    """Some query rows, and the worst error that torch makes there against `wanted` when it rounds every step.

    `wanted` and the error are counted in `unit`, [Hq, 1] or [1, 1]. Where `wanted` is NaN there is no error.

    With `scaled`, the stored values [total_k, Hkv, D] and the float32 scale of each [total_k, Hkv] of which v is the
    rounded product, torch also works in the other order, and the worse error counts: weights times scales, rounded,
    meet the values as they are stored. Kernels do either. Both round as often, but where a query sees a single key:
    its weight is 1, so that v is the output and is rounded once, while the other order rounds the scale and then the
    output. Of the few elements of such rows, which have the largest errors, a kernel of that order would exceed twice
    the error of the first in one call of ten.
    """
    batch = read_batch(len(q), q.device, total_k=len(k), **where)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    rows = torch.linspace(0, max(len(q) - 1, 0), min(_ROWS, len(q)), device=q.device).to(torch.int64).unique()
    worst = 0.0
    for row in rows.tolist():
        request = int(batch.request[row])
        if request < 0:
            continue
        first_row = batch.requests[request].key_row
        positions = torch.arange(int(batch.limit[row]) + 1, device=q.device)
        blocks = torch.div(positions, block_size, rounding_mode="floor")
        for head in range(k.shape[1]):
            chosen = first_row + positions[torch.isin(blocks, block_indices[head, row].to(torch.int64))]
            if len(chosen) == 0:
                continue
            heads = slice(head * group, (head + 1) * group)
            weights = ((q[row, heads] @ k[chosen, head].T) * scale).softmax(-1)
            outputs = [weights @ v[chosen, head]]
            if scaled is not None:
                stored, scales = scaled
                outputs.append((weights * scales[chosen, head]).to(v.dtype) @ stored[chosen, head].to(v.dtype))
            for out in outputs:
                error = out / unit.expand(q.shape[1], 1)[heads] - wanted[row, heads]
                worst = max(worst, float(error.abs().nan_to_num(nan=0.0).max()))
    return rows, worst
