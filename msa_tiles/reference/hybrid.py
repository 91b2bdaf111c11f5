"""Which blocks neighbouring queries share, and what is left of their selections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference.batch import read_batch
from msa_tiles.reference.threads import one_thread

# Pairs of entries that are compared at a time.
PAIRS = 1 << 26


@one_thread()
def split_selection(
    block_indices: Tensor, *, tile_tokens: int, block_size: int = 128, fill: int = 0, **where: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Divide ``block_indices`` int32 [Hkv, T, k] into what tiles of ``tile_tokens`` queries share and the rest.

    A tile shares the blocks that at least three quarters of its queries select, and beyond them, until there are
    ``fill`` or the list is full, those that most queries select, equal ones in the order of queries and slots. Ids of
    blocks that the query does not see are dropped, and so is an id that its row has already. Blocks are named by the
    row where they begin; paged requests have max_pages * block_size virtual rows each. Returns, all int32,

    - ``rest`` [Hkv, T, k]: the ids that no shared block took, in the order of the selection, then -1,
    - ``rest_counts`` [Hkv, T]: how many they are,
    - ``shared`` [Hkv, tiles, 4 k // 3, 2]: first row, and valid rows << 9 | whether a query of the tile sees less than
      the whole block << 8 | mask of the queries that select it; most selected first, -1 behind,
    - ``shared_counts`` [Hkv, tiles],
    - ``last_rows`` [T]: the row of the last key that a query sees; -1 for a query that sees none.
    """
    num_kv_heads, total_q, topk = block_indices.shape
    device = block_indices.device
    batch = read_batch(total_q, device, **where)
    table = where.get("page_table")
    first_rows = [
        request.key_row if table is None else request.index * table.shape[1] * block_size for request in batch.requests
    ]
    # Queries past the last request have request -1: the last element, and see nothing.
    start = torch.tensor([*first_rows, 0], device=device)[batch.request]
    length = torch.tensor([*(request.num_keys for request in batch.requests), 0], device=device)[batch.request]
    last_rows = torch.where(batch.limit >= 0, start + batch.limit, -1)
    tiles = -(-total_q // tile_tokens)
    behind = tiles * tile_tokens - total_q
    ids = block_indices.to(torch.int64)
    visible = (ids >= 0) & (ids * block_size <= batch.limit[:, None]) & (batch.limit[:, None] >= 0)
    rows = torch.where(visible, start[:, None] + ids * block_size, -1)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, behind), value=-1).reshape(num_kv_heads * tiles, tile_tokens * topk)
    queries = torch.full((tiles,), tile_tokens, device=device)
    queries[-1:] -= behind
    ends = torch.nn.functional.pad(last_rows, (0, behind), value=1 << 40).view(tiles, tile_tokens)
    valid_ends = torch.nn.functional.pad(start + length, (0, behind)).view(tiles, tile_tokens)
    capacity = max(4 * topk // 3, 1)
    step = max(PAIRS // max(rows.shape[1] ** 2, 1), 1)
    tile = torch.arange(tiles, device=device).repeat(num_kv_heads)
    kept, listed, counts = [], [], []
    for begin in range(0, max(len(rows), 1), step):
        part = slice(begin, begin + step)
        at = tile[part]
        part_kept, part_listed, part_counts = _split(
            rows[part], queries[at], ends[at], valid_ends[at], capacity, fill, block_size
        )
        kept.append(part_kept)
        listed.append(part_listed)
        counts.append(part_counts)
    keep = torch.cat(kept).view(num_kv_heads, tiles * tile_tokens, topk)[:, :total_q]
    order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)
    rest = ids.gather(-1, order).where(keep.gather(-1, order), -1)
    return (
        rest.int(),
        keep.sum(-1).int(),
        torch.cat(listed).view(num_kv_heads, tiles, capacity, 2).int(),
        torch.cat(counts).view(num_kv_heads, tiles).int(),
        last_rows.int(),
    )


def _split(
    rows: Tensor, queries: Tensor, ends: Tensor, valid_ends: Tensor, capacity: int, fill: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which entries [N, n * k] stay, the listed blocks [N, capacity, 2] and their number [N], of N tiles."""
    num, entries = rows.shape
    tile_tokens = ends.shape[1]
    topk = entries // tile_tokens
    device = rows.device
    entry = torch.arange(entries, device=device)
    present = rows >= 0
    same = (rows[:, :, None] == rows[:, None, :]) & present[:, :, None]
    owner = torch.where(present, same.to(torch.int8).argmax(-1), entry)
    sibling = entry[:, None] // topk == entry // topk
    twin = (same & sibling & (entry < entry[:, None])).any(-1)
    selects = same.view(num, entries, tile_tokens, topk).any(-1)
    count = selects.sum(-1)
    first = present & (owner == entry)
    never = (tile_tokens + 1) * entries
    order = torch.where(first, (tile_tokens - count) * entries + entry, never + entry)
    rank = order.argsort(-1).argsort(-1)
    enough = queries - queries // 4
    listed = first & ((count >= enough[:, None]) | (rank < min(fill, capacity)))
    kept = present & ~twin & ~listed.gather(-1, owner)
    mask = (selects * (1 << torch.arange(tile_tokens, device=device))).sum(-1)
    everybody = (1 << queries[:, None]) - 1
    cut = (mask != everybody) | (selects & (ends[:, None] - rows[..., None] < block_size - 1)).any(-1)
    valid = (valid_ends.gather(1, (entry // topk).expand(num, -1)) - rows).clamp_max(block_size)
    word = (valid << 9) | (cut.long() << 8) | mask
    shared = torch.full((num, capacity + 1, 2), -1, dtype=torch.int64, device=device)
    # What is not listed goes to a place of its own, which is cut off.
    place = torch.where(listed, rank, capacity)
    shared.scatter_(1, place[..., None].expand(-1, -1, 2), torch.stack([rows, word], -1))
    return kept, shared[:, :capacity], listed.sum(-1)
