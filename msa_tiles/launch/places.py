"""Where queries and keys stand, as kernels take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles.call.where import Where


class Place(NamedTuple):
    """Where queries and keys stand, as kernels take it; an absent tensor is replaced by one that is not read."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor
    use_seqused: int
    page_table: Tensor
    q_positions: Tensor
    use_positions: int


def place(where: Where, total_q: int, total_k: int | None, block_size: int, device: torch.device) -> Place:
    """The kernels' arguments, with the defaults made on the device.

    ``total_k`` is None for operators without keys: a request then has as many keys as queries, or ``seqused_k``. Paged
    requests get virtual rows, max_pages * block_size for each. Never synchronises. Needs total_q > 0.
    """
    starts_q = where.cu_seqlens_q
    if starts_q is None:
        starts_q = one_sequence(total_q, device)
    starts_k = where.cu_seqlens_k
    if where.page_table is not None:
        span = max(where.page_table.shape[1], 1) * block_size
        starts_k = torch.arange(0, (where.num_requests + 1) * span, span, dtype=torch.int32, device=device)
    elif starts_k is None:
        if total_k is not None:
            same = where.cu_seqlens_q is None and total_k == total_q
            starts_k = starts_q if same else one_sequence(total_k, device)
        elif where.seqused_k is not None:
            starts_k = torch.nn.functional.pad(where.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            starts_k = starts_q
    return starting_at(where, starts_q, starts_k)


def starting_at(where: Where, starts_q: Tensor, starts_k: Tensor) -> Place:
    """The kernels' arguments of requests that start there; what the call lacks is replaced by what is not read."""
    return Place(
        starts_q,
        starts_k,
        starts_k if where.seqused_k is None else where.seqused_k,
        int(where.seqused_k is not None),
        starts_q[None] if where.page_table is None else where.page_table,
        starts_q if where.q_positions is None else where.q_positions,
        int(where.q_positions is not None),
    )


def one_sequence(length: int, device: torch.device) -> Tensor:
    """[0, length] in one launch and without a copy from the host."""
    return torch.arange(0, length + 1, length, dtype=torch.int32, device=device)
