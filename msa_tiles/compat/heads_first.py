"""Batches [B, H, S, D], as most packages have them, as the packed tokens [T, H, D] of the operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGEST_START = 2**31 - 1  # starts of sequences are int32


class Tokens(NamedTuple):
    """Packed tokens [T, H, D]; row b of the batch begins at ``b * pitch`` and has ``length`` of them."""

    packed: Tensor
    batch: int
    length: int
    pitch: int


def rows(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B * S, H, D]: a view where one sequence or one token of each makes that possible."""
    batch, heads, length, dim = x.shape
    return x.transpose(1, 2).reshape(batch * length, heads, dim)


def copied(x: Tensor) -> Tokens:
    """[B, H, S, D] as packed tokens without gaps."""
    batch, _, length, _ = x.shape
    return Tokens(rows(x), batch, length, length)


def tokens(x: Tensor) -> Tokens:
    """[B, H, S, D] as packed tokens, copied only where gradients are recorded or strides leave no choice.

    Between two rows of a heads-first batch lie its other heads: as tokens of this head they are a gap, which no
    sequence covers. So a cache of any length is read in place.
    """
    batch, heads, length, dim = x.shape
    step, row = x.stride(2), x.stride(0)
    if batch == 1 or (torch.is_grad_enabled() and x.requires_grad) or length < 2 or step < 1 or row % step:
        return copied(x)
    pitch = row // step
    total = (batch - 1) * pitch + length
    if pitch < length or total > LARGEST_START:
        return copied(x)
    view = x.as_strided((total, heads, dim), (step, x.stride(1), x.stride(3)))
    return Tokens(view, batch, length, pitch)


def starts(batch: int, length: int, device: torch.device) -> Tensor:
    """int32 [B + 1]: where sequences of one length begin, and where the last one ends."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def where(num_queries: int, keys: Tokens, first: Tensor | None, end: int | Tensor) -> dict[str, Any]:
    """The keyword arguments that place ``num_queries`` queries and the keys of each row.

    The keys of row b are the slots from ``first[b]`` (None: 0) to ``end``, an integer, or a tensor [] or [B]; its
    queries are the last ones of these. Lengths are told for a single row, too, because a top-k sees no keys. Nothing
    synchronises.
    """
    bounds = {"max_seqlen_q": num_queries, "max_seqlen_k": keys.length}
    whole = first is None and isinstance(end, int) and end == keys.length
    device = keys.packed.device
    begin = starts(keys.batch, keys.pitch, device)
    if whole and keys.pitch == keys.length:
        return {"cu_seqlens_q": starts(keys.batch, num_queries, device), "cu_seqlens_k": begin, **bounds}
    begin[-1] = keys.packed.shape[0]
    used = torch.zeros(keys.batch, dtype=torch.int32, device=device) + (
        end if isinstance(end, int) else end.to(device=device, dtype=torch.int32)
    )
    if first is not None:
        begin[:-1] += first
        used = used - first
    return {
        "cu_seqlens_q": starts(keys.batch, num_queries, device),
        "cu_seqlens_k": begin,
        "seqused_k": used.contiguous(),
        **bounds,
    }


def segments(num_queries: int, keys: Tokens, first: Tensor | None, end: int | Tensor) -> dict[str, Any]:
    """The same for an operator without ``seqused_k``: every row is three sequences, of which the middle one counts.

    The first has the slots before ``first``, and the queries that lie there; the last has the slots behind ``end`` and
    no queries. Without a synchronisation, as above.
    """
    placed = where(num_queries, keys, first, end)
    if "seqused_k" not in placed:
        return placed
    begin, used, queries = placed["cu_seqlens_k"], placed["seqused_k"], placed["cu_seqlens_q"]
    row = torch.cat([starts(keys.batch, keys.pitch, begin.device)[:-1], begin[-1:]])
    stop = begin[:-1] + used
    # Of the queries of a row, those before `first` have none of its keys: the rule counts from the end.
    hidden = (num_queries - used).clamp(0, num_queries)
    between = queries[:-1] + hidden
    return {
        "cu_seqlens_q": torch.cat([torch.stack([queries[:-1], between, queries[1:]], 1).flatten(), queries[-1:]]),
        "cu_seqlens_k": torch.cat([torch.stack([row[:-1], begin[:-1], stop], 1).flatten(), row[-1:]]),
        "max_seqlen_q": num_queries,
        "max_seqlen_k": keys.length,
    }
