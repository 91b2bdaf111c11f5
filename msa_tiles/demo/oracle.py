"""Dense attention restricted to the selected blocks, computed by masking the whole score matrix.

It shares no code with the operators or the reference: every key is scored for every row, what the row did not select is
masked out, and softmax and the sum run in float64. One layout only: a single sequence, positions equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 28


def selected_tokens(block_indices: Tensor, rows: Tensor, num_keys: int, block_size: int) -> Tensor:
    """bool `[Hkv, N, Tk]`: the keys that each of `rows [N]` may see in its blocks `block_indices [Hkv, T, k]`."""
    chosen = block_indices[:, rows].long()
    num_blocks = -(-num_keys // block_size)
    # One extra column takes what is absent (-1), so that it can be dropped afterwards.
    chosen = torch.where(chosen >= 0, chosen, num_blocks)
    blocks = torch.zeros(*chosen.shape[:2], num_blocks + 1, dtype=torch.bool, device=chosen.device)
    blocks.scatter_(2, chosen, True)
    tokens = blocks[..., :num_blocks].repeat_interleave(block_size, dim=-1)[..., :num_keys]
    return tokens & (torch.arange(num_keys, device=rows.device)[None, :] <= rows[:, None])


def dense_over_selection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    rows: Tensor,
    block_size: int,
    progress: Callable[[list[Tensor]], Iterable[Tensor]] = iter,
) -> Tensor:
    """float64 `[N, Hq, D]`: rows `rows [N]` of attention over `k v [Tk, Hkv, D]` restricted to their blocks."""
    num_keys, num_kv_heads, dim = k.shape
    group = q.shape[1] // num_kv_heads
    keys, values = k.double(), v.double()
    step = max(1, _CHUNK_BYTES // (num_keys * q.shape[1] * 8))
    parts = []
    for chunk in progress(list(rows.split(step))):
        seen = selected_tokens(block_indices, chunk, num_keys, block_size)
        heads = []
        for h in range(num_kv_heads):
            scores = torch.einsum("ngd,kd->ngk", q[chunk, h * group : (h + 1) * group].double(), keys[:, h])
            scores = scores * dim**-0.5
            weights = scores.masked_fill(~seen[h][:, None, :], float("-inf")).softmax(-1)
            heads.append(torch.einsum("ngk,kd->ngd", weights, values[:, h]))
        parts.append(torch.cat(heads, dim=1))
    return torch.cat(parts)


def attended_pairs(block_indices: Tensor, num_keys: int, block_size: int) -> int:
    """(query, key) pairs that the selection attends to, over all KV heads; ids in a row are distinct."""
    rows = torch.arange(block_indices.shape[1], device=block_indices.device)
    start = block_indices.long() * block_size
    end = torch.minimum(start + block_size, torch.minimum(rows[None, :, None] + 1, rows.new_tensor(num_keys)))
    return int(torch.where(block_indices >= 0, (end - start).clamp_min(0), 0).sum())
