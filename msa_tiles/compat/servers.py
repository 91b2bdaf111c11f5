"""What servers' calls have in common: where queries of a prefill sit, and what a decode step works in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops

BOUND = 64 * 128
"""A decode step's bound on lengths is rounded up to so many tokens: lengths grow by one a step, and an operator knows a
call again whose bound is that of the one before."""

_SIZES: dict[tuple[Any, ...], int] = {}
_MOST_SIZES = 1024


def rounded(length: int, most: int) -> int:
    """The bound for requests of up to ``length`` keys, whose tables hold ``most``."""
    return min(-(-length // BOUND) * BOUND, most)


def positions(cu_seqlens_q: Tensor, prefix_lens: Tensor, total_q: int) -> Tensor:
    """Where the queries of a prefill sit in their requests: int32 [T], whatever rows behind the last request get.

    Our operators would take it from the number of keys; servers say how many keys are in front of the first query.
    """
    rows = torch.arange(total_q, dtype=torch.int32, device=cu_seqlens_q.device)
    first = prefix_lens[: cu_seqlens_q.shape[0] - 1] - cu_seqlens_q[:-1]
    if first.shape[0] == 0:
        return rows
    request = torch.bucketize(rows, cu_seqlens_q[1:], right=True, out_int32=True).clamp_max_(first.shape[0] - 1)
    return first.index_select(0, request).add_(rows)


def workspace(
    q: Tensor, idx_q: Tensor, topk: int, num_kv_heads: int, bound: int, block_size: int, batch_invariant: bool = False
) -> Tensor:
    """A workspace for a decode step. How large it is was kept, because a step asks for it in every layer."""
    key = (q.shape, idx_q.shape, q.dtype, topk, num_kv_heads, bound, block_size, batch_invariant, q.device)
    size = _SIZES.get(key)
    if size is None:
        if len(_SIZES) >= _MOST_SIZES:
            _SIZES.clear()
        size = ops.decode_workspace_bytes(
            q,
            topk,
            num_kv_heads,
            idx_q=idx_q,
            max_seqlen_k=bound,
            block_size=block_size,
            batch_invariant=batch_invariant,
        )
        _SIZES[key] = size
    return torch.empty(size, dtype=torch.uint8, device=q.device)
