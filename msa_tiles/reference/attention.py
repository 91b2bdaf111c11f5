"""Attention over each query's selected blocks, KV-outer with an online softmax, and the merge of splits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_tiles.reference import pieces
from msa_tiles.reference.batch import accumulator, flat_or_paged, key_rows, read_batch
from msa_tiles.reference.schedule import build_schedule
from msa_tiles.reference.threads import one_thread

# Elements of one split that `combine` weighs at a time.
COMBINE_ELEMENTS = 1 << 22


@one_thread()
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    block_size: int = 128,
    softmax_scale: float | None = None,
    schedule: tuple[Tensor, Tensor, Tensor] | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax over the visible tokens of the selected blocks, times V: out [T, Hq, D] like q, lse float32 [T, Hq].

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D], or [pages, Hkv, page, D] with ``page_table``; ``block_indices`` int32
    [Hkv, T, k], distinct ids in any order; ``where`` as in `read_batch`. ``schedule`` is the result of
    `reference.build_schedule` for the same ids and lengths. A row with nothing visible gives out 0 and lse -inf.
    Goes block by block over the queries that read it, so the memory stays near that of the inputs in `accumulator`'s
    type. Values at positions that a query may not see never reach its row, NaN included.
    """
    page_table = where.get("page_table")
    batch = read_batch(q.shape[0], q.device, **flat_or_paged(k, page_table), **where)
    total_q, num_q_heads, head_dim = q.shape
    num_kv_heads, _, topk = block_indices.shape
    group = num_q_heads // num_kv_heads
    dtype = accumulator(q.dtype)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros((total_q, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.full((total_q, num_q_heads), -torch.inf, dtype=torch.float32, device=q.device)
    if schedule is None:
        schedule = build_schedule(block_indices, block_size=block_size, **flat_or_paged(k, page_table), **where)
    for head in range(num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        state = _OnlineSoftmax(total_q, group, head_dim, dtype, q.device)
        for piece in pieces.selected(batch, schedule, head, topk, block_size):
            keys, present = key_rows(k[:, head], piece.request, piece.begin, piece.end, page_table)
            values, _ = key_rows(v[:, head], piece.request, piece.begin, piece.end, page_table)
            visible = piece.visible(batch)
            if present is not None:
                keys, values, visible = keys[present], values[present], visible[:, present]
            scores = q[piece.rows, heads].to(dtype).mul_(scale) @ keys.to(dtype).T
            state.add(piece.rows, scores, values.to(dtype), visible)
        out[:, heads], lse[:, heads] = state.result(q.dtype)
    return out, lse


@one_thread()
def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, **where: Any
) -> tuple[Tensor, Tensor]:
    """Softmax over everything that a query may see, times V: out [T, Hq, D] like q, lse float32 [T, Hq].

    ``q`` [T, Hq, D]; ``k``, ``v`` [Tk, Hkv, D]; ``where`` as in `read_batch`, without pages. Otherwise as
    `sparse_attention`, chunk by chunk.
    """
    batch = read_batch(q.shape[0], q.device, total_k=k.shape[0], **where)
    total_q, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    dtype = accumulator(q.dtype)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros((total_q, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.full((total_q, num_q_heads), -torch.inf, dtype=torch.float32, device=q.device)
    for head in range(num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        state = _OnlineSoftmax(total_q, group, head_dim, dtype, q.device)
        for piece in pieces.prefix(batch):
            scores = q[piece.rows, heads].to(dtype).mul_(scale) @ k[piece.flat, head].to(dtype).T
            state.add(piece.rows, scores, v[piece.flat, head].to(dtype), piece.visible(batch))
        out[:, heads], lse[:, heads] = state.result(q.dtype)
    return out, lse


class _OnlineSoftmax:
    """Running maximum, sum and weighted values of every row: [T, G], [T, G], [T, G, D]."""

    def __init__(self, total_q: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.maximum = torch.full((total_q, group), -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros((total_q, group), dtype=dtype, device=device)
        self.weighted = torch.zeros((total_q, group, head_dim), dtype=dtype, device=device)

    def add(self, rows: Tensor, scores: Tensor, values: Tensor, visible: Tensor) -> None:
        """Add one block: scores [n, G, keys] of the distinct rows [n], values [keys, D], visible bool [n, keys].

        Overwrites ``scores``.
        """
        if values.shape[0] == 0:
            return
        if not bool(visible.all()):
            if not bool(values.isfinite().all()):
                self._add_exactly(rows, scores, values, visible)
                return
            scores.masked_fill_(~visible[:, None], -torch.inf)
        old = self.maximum[rows]
        new = torch.maximum(old, scores.amax(-1))
        # A row that has seen nothing but -inf keeps weights of zero instead of (-inf) - (-inf).
        shift = torch.where(new == -torch.inf, 0.0, new)
        # In place from here on: these passes over memory cost more than the products.
        weights = scores.sub_(shift[..., None]).exp_()
        rescale = torch.exp(old - shift)
        self.maximum[rows] = new
        self.total[rows] = self.total[rows] * rescale + weights.sum(-1)
        weighted = self.weighted[rows].mul_(rescale[..., None])
        weighted.flatten(0, 1).addmm_(weights.flatten(0, 1), values)
        self.weighted[rows] = weighted

    def _add_exactly(self, rows: Tensor, scores: Tensor, values: Tensor, visible: Tensor) -> None:
        """`add` without masks, one set of visible keys at a time: 0 * NaN would carry a hidden value into a row."""
        for pattern in visible.unique(dim=0):
            same = (visible == pattern).all(1)
            chosen = scores[same][..., pattern]
            self.add(rows[same], chosen, values[pattern], pattern[pattern].expand(chosen.shape[0], -1))

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output in ``dtype`` and the float32 natural log of the sums; 0 and -inf for a row without weight."""
        empty = self.total == 0
        out = self.weighted / torch.where(empty, 1.0, self.total)[..., None]
        lse = torch.where(empty, -torch.inf, self.maximum + self.total.log())
        return out.to(dtype), lse.to(torch.float32)


@one_thread()
def combine(partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge splits by their LSE: partial_out [S, T, Hq, D], partial_lse [S, T, Hq] (natural log) -> out, lse float32.

    ``out`` [T, Hq, D] has partial_out's dtype. A split with lse -inf is empty and whatever its output holds is ignored;
    a row of empty splits gives out 0 and lse -inf.
    """
    num_splits, total_q, num_heads, head_dim = partial_out.shape
    dtype = torch.promote_types(accumulator(partial_out.dtype), accumulator(partial_lse.dtype))
    out = torch.zeros((total_q, num_heads, head_dim), dtype=partial_out.dtype, device=partial_out.device)
    lse = torch.full((total_q, num_heads), -torch.inf, dtype=torch.float32, device=partial_out.device)
    if num_splits == 0:
        return out, lse
    rows = max(COMBINE_ELEMENTS // max(num_heads * head_dim, 1), 1)
    for begin in range(0, total_q, rows):
        part = slice(begin, begin + rows)
        split_lse = partial_lse[:, part].to(dtype)
        largest = split_lse.amax(0)
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        weights = torch.exp(split_lse - shift)
        total = weights.sum(0)
        merged = torch.zeros(out[part].shape, dtype=dtype, device=out.device)
        for split in range(num_splits):
            values = partial_out[split, part].to(dtype) * weights[split, ..., None]
            merged += values.masked_fill((split_lse[split] == -torch.inf)[..., None], 0.0)
        empty = total == 0
        out[part] = (merged / torch.where(empty, 1.0, total)[..., None]).to(out.dtype)
        lse[part] = torch.where(empty, -torch.inf, shift + total.log()).to(torch.float32)
    return out, lse
