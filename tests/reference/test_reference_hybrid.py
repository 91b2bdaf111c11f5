"""What `split_selection` promises of every selection, whatever shares are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from msa_tiles import reference

HEADS, TOPK, BLOCK, TILE = 2, 8, 64, 4


def selection(total_q: int, blocks: int, seed: int) -> Tensor:
    """Sticky ids int32 [HEADS, total_q, TOPK], distinct in a row, with -1 among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(HEADS, -(-total_q // 3), blocks, generator=generator).topk(TOPK).indices
    ids = rows.repeat_interleave(3, 1)[:, :total_q]
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1).int()


def strided(ids: Tensor) -> Tensor:
    """The same ids, the query first in memory."""
    return ids.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("total_q", [TILE * 8, TILE * 8 - 3, 1])
def test_strides_change_nothing(total_q: int) -> None:
    ids = selection(total_q, 32, total_q)
    where = {"cu_seqlens_k": torch.tensor([0, 32 * BLOCK], dtype=torch.int32)}
    packed, spread = (
        reference.split_selection(each, tile_tokens=TILE, block_size=BLOCK, fill=0, **where)
        for each in (ids, strided(ids))
    )
    for one, other in zip(packed, spread, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fill", [0, 6])
@pytest.mark.parametrize("total_q", [TILE * 8, TILE * 8 - 3])
def test_every_visible_id_is_shared_or_left_over_once(total_q: int, fill: int) -> None:
    num_k = 32 * BLOCK
    ids = selection(total_q, 32, 7 + fill)
    where = {"cu_seqlens_k": torch.tensor([0, num_k], dtype=torch.int32)}
    rest, rest_counts, shared, shared_counts, _ = reference.split_selection(
        ids, tile_tokens=TILE, block_size=BLOCK, fill=fill, **where
    )
    found_shared = 0
    for head in range(HEADS):
        for query in range(total_q):
            position = num_k - total_q + query
            wanted = sorted(id for id in ids[head, query].tolist() if id >= 0 and id * BLOCK <= position)
            count = int(rest_counts[head, query])
            left = rest[head, query, :count].tolist()
            assert rest[head, query, count:].eq(-1).all()
            tile, lane = divmod(query, TILE)
            listed = shared[head, tile, : int(shared_counts[head, tile])]
            taken = [int(row) // BLOCK for row, flags in listed if int(flags) >> lane & 1]
            found_shared += len(taken)
            assert sorted(left + taken) == wanted
    assert found_shared > 0
