"""Where queries sit that do not end with their request's keys: int32 [T], for ``q_positions``. Nothing synchronises."""

from __future__ import annotations

import torch
from torch import Tensor


def requests(cu_seqlens_q: Tensor, total_q: int) -> Tensor:
    """The request of every query, int64 [T]; that of queries behind the last request is the last one."""
    rows = torch.arange(total_q, dtype=torch.int32, device=cu_seqlens_q.device)
    found = torch.bucketize(rows, cu_seqlens_q[1:], right=True)
    return found.clamp_max_(max(cu_seqlens_q.shape[0] - 2, 0))


def at(offsets: int | Tensor, cu_seqlens_q: Tensor, total_q: int) -> Tensor:
    """Query i of request b sits at ``offsets[b] + i``; ``offsets`` is an integer for all, or int32 [B]."""
    rows = torch.arange(total_q, dtype=torch.int32, device=cu_seqlens_q.device)
    first = offsets - cu_seqlens_q[:-1]
    return rows + first[requests(cu_seqlens_q, total_q)] if first.shape[0] else rows


def last(lengths: Tensor, cu_seqlens_q: Tensor, total_q: int) -> Tensor:
    """Every query sits on the last of its request's ``lengths[b]`` keys, and so sees them all."""
    if lengths.shape[0] == 0:
        return torch.full((total_q,), -1, dtype=torch.int32, device=cu_seqlens_q.device)
    return (lengths - 1)[requests(cu_seqlens_q, total_q)].to(torch.int32)
