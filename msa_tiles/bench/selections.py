"""The two selections that attention is timed on.

- `uniform` (U): a query's own block and `topk - 1` distinct blocks drawn uniformly from the earlier ones;
- `sticky` (S): the first block, the own one, the one before it, and `topk - 3` blocks of which each carries over from
  one query to the next with probability 0.8.

Both are `[Hkv, T, topk]` int32, ascending, with -1 behind the valid ids where fewer blocks are visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 26
_CARRY_OVER = 0.8
_LAST = torch.iinfo(torch.int32).max


def uniform(num_kv_heads: int, num_q: int, num_k: int, topk: int, block_size: int, device: torch.device) -> Tensor:
    """The selection U for the last `num_q` queries of `num_k` tokens."""
    num_blocks = -(-num_k // block_size)
    own = _own_blocks(num_q, num_k, block_size, device)
    out = torch.full((num_kv_heads, num_q, topk), -1, dtype=torch.int32, device=device)
    drawn = min(topk - 1, num_blocks)
    step = max(1, _CHUNK_ELEMENTS // (num_kv_heads * num_blocks))
    blocks = torch.arange(num_blocks, device=device)
    for start in range(0, num_q if drawn else 0, step):
        end = min(start + step, num_q)
        # The largest of independent uniform numbers form a uniform subset; blocks that are not earlier never win.
        lots = torch.rand(num_kv_heads, end - start, num_blocks, device=device)
        lots.masked_fill_(blocks >= own[start:end, None], -1.0)
        best, ids = lots.topk(drawn, dim=-1)
        out[:, start:end, :drawn] = torch.where(best >= 0, ids, -1).int()
    out[:, :, topk - 1] = own.int()
    return _ascending(out)


def sticky(num_kv_heads: int, num_q: int, num_k: int, topk: int, block_size: int, device: torch.device) -> Tensor:
    """The selection S for the last `num_q` queries of `num_k` tokens; `topk` is at least 4."""
    own = _own_blocks(num_q, num_k, block_size, device)
    classes = topk - 3
    time = torch.arange(num_q, device=device)
    out = torch.empty((num_kv_heads, num_q, topk), dtype=torch.int32, device=device)
    for slot in range(classes):
        # Slot s draws from the blocks s + 1, s + 1 + classes, … up to own - 2, so that no two slots can meet.
        candidates = torch.div(own - 3 - slot, classes, rounding_mode="floor") + 1
        candidates = candidates.clamp_min(0)
        renew = torch.rand(num_kv_heads, num_q, device=device) >= _CARRY_OVER
        renew |= candidates == 0
        renew[:, 1:] |= candidates[:-1] == 0
        renew[:, 0] = True
        drawn_at = torch.where(renew, time, 0).cummax(dim=1).values
        lot = torch.rand(num_kv_heads, num_q, device=device).gather(1, drawn_at)
        block = slot + 1 + classes * (lot * candidates[drawn_at]).long()
        out[:, :, slot] = torch.where(candidates > 0, block, -1).int()
    out[:, :, classes] = torch.where(own > 1, 0, -1).int()
    out[:, :, classes + 1] = (own - 1).int()
    out[:, :, classes + 2] = own.int()
    return _ascending(out)


def _own_blocks(num_q: int, num_k: int, block_size: int, device: torch.device) -> Tensor:
    return torch.div(torch.arange(num_k - num_q, num_k, device=device), block_size, rounding_mode="floor")


def _ascending(ids: Tensor) -> Tensor:
    """Sort each row in place of its own, absent ids last."""
    for head in ids:
        ordered = torch.where(head < 0, _LAST, head).sort(dim=-1).values
        head.copy_(torch.where(ordered == _LAST, -1, ordered))
    return ids


GENERATORS = {"uniform": uniform, "sticky": sticky}
