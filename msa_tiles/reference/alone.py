"""Each query of a batch by itself: then what else is in the batch cannot touch its bits.

Products and sums of torch add up in an order that depends on how many rows there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference.batch import flat_or_paged, read_batch
from msa_tiles.reference.threads import one_thread


@one_thread()
def each_alone(total_q: int, keys: Tensor, **where: Any) -> list[tuple[slice, dict[str, Any]]]:
    """For every query its row, and the arguments that place a call of this query alone among the same keys.

    ``keys`` are the call's, [Tk, …] or [pages, …, page, D] with a ``page_table``; ``where`` as in `read_batch`.
    """
    device = keys.device
    batch = read_batch(total_q, device, **flat_or_paged(keys, where.get("page_table")), **where)
    positions = batch.limit.to(torch.int32)
    starts = where.get("cu_seqlens_q")
    if starts is None:
        starts = torch.tensor([0, total_q], dtype=torch.int32, device=device)
    return [
        (
            slice(row, row + 1),
            {**where, "cu_seqlens_q": (starts - row).clamp(0, 1), "q_positions": positions[row : row + 1]},
        )
        for row in range(total_q)
    ]
