"""Exp-free top-k over block scores, with blocks that are always in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference.batch import read_batch
from msa_tiles.reference.threads import one_thread

ORDERS = ("ascending", "score", "local_last")

# Rows ranked at a time: two stable sorts of a few times this many scores are the peak memory.
CHUNK_ELEMENTS = 1 << 24

# Classes in the order in which they take slots.
_INIT, _LOCAL, _RANKED, _INVALID = range(4)


@one_thread()
def topk_select(
    score: Tensor,
    topk: int,
    *,
    num_kv_heads: int | None = None,
    num_valid_blocks: int | Tensor | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    order: str = "ascending",
    layout: str = "head_major",
    **where: Any,
) -> Tensor:
    """The ``topk`` best blocks of each row: int32 [Hkv, T, topk], -1 behind the valid prefix.

    ``score`` [Hi, T, NB], or [T, Hi, NB] when ``layout`` is ``token_major``. A row's valid blocks are those at or
    before its query's limit (``where`` as in `read_batch`; without key lengths a request has as many keys as queries),
    or the first ``num_valid_blocks`` (an integer, or int32 [T]), which replaces the rule. Rows past
    ``cu_seqlens_q[B]`` are -1.
    """
    if layout == "token_major":
        score = score.transpose(0, 1)
    num_heads, total_q, width = score.shape
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    batch = read_batch(total_q, score.device, **where)
    if num_valid_blocks is None:
        valid = batch.num_valid_blocks(block_size)
    else:
        valid = torch.as_tensor(num_valid_blocks, dtype=torch.int64, device=score.device).expand(total_q)
        valid = torch.where(batch.request >= 0, valid, 0)
    valid = valid.clamp(0, width)
    ids = torch.full((num_kv_heads, total_q, topk), -1, dtype=torch.int32, device=score.device)
    rows = max(CHUNK_ELEMENTS // max(num_heads * width, 1), 1)
    for begin in range(0, total_q, rows):
        part = slice(begin, begin + rows)
        ids[:, part] = rank_blocks(score[:, part], valid[part], topk, num_kv_heads, init_blocks, local_blocks, order)
    return ids


def rank_blocks(
    score: Tensor, valid: Tensor, topk: int, num_kv_heads: int, init_blocks: int, local_blocks: int, order: str
) -> Tensor:
    """Top-k of score [Hi, n, NB] where row i has ``valid[i]`` (int64 [n]) valid blocks: int32 [Hkv, n, topk].

    Ties go to the lower id; NaN ranks below -inf and above padding. Forced blocks go first, init before local, each by
    ascending id, so what does not fit into ``topk`` is dropped from the end of that list.
    """
    if order not in ORDERS:
        raise ValueError(f"order: {order!r}; wanted one of {', '.join(ORDERS)}")
    rows, width = score.shape[1:]
    score = _reduce_heads(score, num_kv_heads)
    block = torch.arange(width, device=score.device)
    end = valid[:, None]
    kind = torch.full((rows, width), _RANKED, device=score.device)
    kind[block >= end - local_blocks] = _LOCAL
    kind[(block < init_blocks).expand(rows, width)] = _INIT
    kind[block >= end] = _INVALID
    # Ascending order of the negated scores is descending order with NaN last. Forced blocks share one key and padding
    # counts as NaN, so that the stable sort leaves both in order of their ids.
    key = torch.where(kind == _RANKED, -score, torch.where(kind == _INVALID, torch.nan, 0.0).to(score.dtype))
    by_score = key.sort(dim=-1, stable=True).indices
    kind = kind.expand(num_kv_heads, rows, width).gather(2, by_score)
    kind, by_kind = kind.sort(dim=-1, stable=True)
    ids = by_score.gather(2, by_kind)[..., :topk]
    kind = kind[..., :topk]
    if order == "local_last":
        last = torch.where(kind == _LOCAL, 1, torch.where(kind == _INVALID, 2, 0)).sort(dim=-1, stable=True)
        ids, kind = ids.gather(2, last.indices), kind.gather(2, last.indices)
    elif order == "ascending":
        ids, rank = torch.where(kind == _INVALID, width, ids).sort(dim=-1)
        kind = kind.gather(2, rank)
    out = torch.full((num_kv_heads, rows, topk), -1, dtype=torch.int32, device=score.device)
    out[..., : ids.shape[-1]] = torch.where(kind == _INVALID, -1, ids)
    return out


def _reduce_heads(score: Tensor, num_kv_heads: int) -> Tensor:
    """Maximum over the index heads of each KV head; NaN counts only where every head has it."""
    num_heads, rows, width = score.shape
    if num_kv_heads == num_heads:
        return score
    groups = score.reshape(num_kv_heads, num_heads // num_kv_heads, rows, width)
    best = groups[:, 0]
    for head in range(1, groups.shape[1]):
        best = torch.fmax(best, groups[:, head])
    return best
