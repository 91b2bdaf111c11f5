"""``k_offset`` on kernels: the shard becomes a call of its own, on the device, and the answer is numbered back.

Kernels know no ``k_offset``. Keys that begin at block ``first`` of their request are the keys of a whole call once
positions and block ids are counted from there; lengths, and the rule for positions that nobody gave, stay as they are.
Each function here takes an operator's writer and returns one that also serves shards; the reference serves them anyway.

- Scores: the columns that the kernel wrote move ``first`` columns to the right, -inf comes in.
- Top-k reads scores of the whole request: only the end of its keys moves, so that any offset is exact.
- Selection: forced blocks and the blocks in front of the shard, which count as valid with a score of -inf, follow from
  positions alone; the kernel ranks the others. Only a block of the shard whose own score is -inf (no product is a
  number above it) may rank otherwise than in the reference: before the blocks in front of the shard, not among them.
- Attention and schedules: ids in front of the shard become -1; those behind it are absent by themselves.

A shard that begins inside a block is no such call, nor is one below 0. Contents are on the device, so its queries get
NaN for scores, outputs and LSE and -1 for ids; ``check=True`` refuses it (`check_offsets`). Nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup

Write = Callable[..., None]

# Elements that one step of numbering back handles; it bounds the extra memory.
PIECE = 1 << 24

# The values of `Where` in a writer's arguments, k_offset the last.
PLACE = 8


class Shard:
    """A call's shards: ``where`` is the call in which each is everything.

    Per query (or [1] for one sequence): ``first`` int32, the shard's first block, and ``broken`` bool, whether no such
    call exists.
    """

    def __init__(self, where: Where, total_q: int, block_size: int) -> None:
        offsets = where.k_offset
        assert offsets is not None
        self.request = _requests(where, total_q, offsets.device)
        wrong = (offsets < 0) | (offsets % block_size != 0)
        offsets = offsets.masked_fill(wrong, 0)
        self.broken = self.per_query(wrong)
        self.first = self.per_query(torch.div(offsets, block_size, rounding_mode="floor"))
        positions = where.q_positions
        if positions is not None:
            # Whatever is below 0 sees nothing, and stays there without running over.
            positions = positions.clamp_min(-1) - self.per_query(offsets)
        self.where = replace(where, q_positions=positions, k_offset=None)

    def per_query(self, values: Tensor) -> Tensor:
        """Values of requests [B], for every query; 0 for those past the last request."""
        if self.request is None:
            return values
        return torch.nn.functional.pad(values, (0, 1)).index_select(0, self.request)

    def local_ids(self, block_indices: Tensor) -> Tensor:
        """Ids counted from the shard's first block; -1 for those in front of it."""
        first = self.first[:, None]
        return torch.where(block_indices >= first, block_indices - first, -1)


def scores(write: Write) -> Write:
    """``write(idx_q, idx_k, *where, block_size, causal, token_major, num_blocks, backend, out)``, also for shards."""

    def write_shards(idx_q: Tensor, idx_k: Tensor, *rest: Any) -> None:
        if _as_it_is(rest, rest[-2], idx_q):
            write(idx_q, idx_k, *rest)
            return
        block_size, _, token_major, *_, out = rest[PLACE:]
        shard = Shard(Where(*rest[:PLACE]), idx_q.shape[0], block_size)
        write(idx_q, idx_k, *shard.where.arguments(), *rest[PLACE:])
        _move_columns(out.transpose(0, 1) if token_major else out, shard)

    return write_shards


def ranking(write: Write) -> Write:
    """``write(score, topk, *where, …, backend, out)``, also for shards."""

    def write_shards(score: Tensor, topk: int, *rest: Any) -> None:
        if _as_it_is(rest, rest[-2], score):
            write(score, topk, *rest)
            return
        where = Where(*rest[:PLACE])
        ends = _key_ends(where, score.shape[1], None)
        where = replace(where, cu_seqlens_k=None, page_table=None, seqused_k=ends, k_offset=None)
        write(score, topk, *where.arguments(), *rest[PLACE:])

    return write_shards


def selection(write: Write) -> Write:
    """``write(idx_q, idx_k, topk, *where, num_kv_heads, block_size, init_blocks, …, out)``, also for shards."""

    def write_shards(idx_q: Tensor, idx_k: Tensor, topk: int, *rest: Any) -> None:
        if _as_it_is(rest, rest[-2], idx_q):
            write(idx_q, idx_k, topk, *rest)
            return
        where = Where(*rest[:PLACE])
        num_kv_heads, block_size, init_blocks, local_blocks, order, *further, out = rest[PLACE:]
        shard = Shard(where, idx_q.shape[0], block_size)
        # Nothing forced: which of the forced blocks are the shard's differs between requests. Those among the best of
        # the shard drop out later, and leave as many others as there are slots for.
        ranked = (num_kv_heads, block_size, 0, 0, "score", *further, out)
        write(idx_q, idx_k, topk, *shard.where.arguments(), *ranked)
        ends = _key_ends(where, idx_q.shape[0], idx_k.shape[0])
        valid = _num_valid_blocks(shard, ends, where, idx_q.shape[0], block_size)
        _rank_whole_request(out, shard.first, valid, init_blocks, local_blocks, order)

    return write_shards


def schedule(write: Write) -> Write:
    """``write(block_indices, *where, block_size, …)``, also for shards."""

    def write_shards(block_indices: Tensor, *rest: Any) -> None:
        if _as_it_is(rest, "auto", block_indices):
            write(block_indices, *rest)
            return
        shard = Shard(Where(*rest[:PLACE]), block_indices.shape[1], rest[PLACE])
        write(shard.local_ids(block_indices), *shard.where.arguments(), *rest[PLACE:])

    return write_shards


def attention(write: Write) -> Write:
    """``write(q, k, v, block_indices, *where, block_size, scale, …, backend, out, lse, …)``, also for shards."""

    def write_shards(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *rest: Any) -> None:
        block_size, *_, backend, out, lse = rest[PLACE : PLACE + 10]
        if _as_it_is(rest, backend, q):
            write(q, k, v, block_indices, *rest)
            return
        shard = Shard(Where(*rest[:PLACE]), q.shape[0], block_size)
        write(q, k, v, shard.local_ids(block_indices), *shard.where.arguments(), *rest[PLACE:])
        lse.masked_fill_(shard.broken[:, None], torch.nan)
        out.masked_fill_(shard.broken[:, None, None], torch.nan)

    return write_shards


def attention_backward(write: Write) -> Write:
    """``write(dout, q, k, v, out, lse, block_indices, dlse, *where, block_size, …, dq, dk, dv)``, also for shards."""

    def write_shards(*arguments: Any) -> None:
        (*tensors, block_indices, dlse), rest = arguments[:8], arguments[8:]
        q, (*_, backend, dq, dk, dv) = tensors[1], rest
        if _as_it_is(rest, backend, q):
            write(*arguments)
            return
        shard = Shard(Where(*rest[:PLACE]), q.shape[0], rest[PLACE])
        write(*tensors, shard.local_ids(block_indices), dlse, *shard.where.arguments(), *rest[PLACE:])
        _spoil_gradients(shard, dq, dk, dv)

    return write_shards


def divergence(write: Write) -> Write:
    """``write(q, k, lse, idx_q, idx_k, block_indices, *where, block_size, …, loss, d_idx_q, d_idx_k)``, the same."""

    def write_shards(*arguments: Any) -> None:
        (*tensors, block_indices), rest = arguments[:6], arguments[6:]
        q, (*_, backend, loss, d_idx_q, d_idx_k) = tensors[0], rest
        if _as_it_is(rest, backend, q):
            write(*arguments)
            return
        shard = Shard(Where(*rest[:PLACE]), q.shape[0], rest[PLACE])
        local = None if block_indices is None else shard.local_ids(block_indices)
        write(*tensors, local, *shard.where.arguments(), *rest[PLACE:])
        loss.masked_fill_(shard.broken.any(), torch.nan)
        if d_idx_q.numel():
            _spoil_gradients(shard, d_idx_q, d_idx_k)

    return write_shards


def _spoil_gradients(shard: Shard, of_queries: Tensor, *of_keys: Tensor) -> None:
    """NaN for the queries of a shard that no kernel can serve, and for all keys: which are theirs is not looked up."""
    broken = shard.broken.view(-1, *[1] * (of_queries.dim() - 1))
    of_queries.masked_fill_(broken, torch.nan)
    for gradient in of_keys:
        gradient.masked_fill_(broken.any(), torch.nan)


def check_offsets(where: Where, block_size: int, backend: str, device: torch.device) -> None:
    """Refuse offsets that kernels cannot serve. Reads them to the host."""
    if where.k_offset is None or lookup.runs_reference(backend, device):
        return
    for request, offset in enumerate(where.k_offset.tolist()):
        if offset % block_size:
            wanted = f"multiples of block_size = {block_size}: kernels serve shards of whole blocks, the reference any"
            validate.refuse("k_offset", f"{offset} for request {request}", wanted)


def _as_it_is(rest: tuple[Any, ...], backend: str, like: Tensor) -> bool:
    """Whether a writer's arguments need no rewriting: there is no shard, or the reference serves it."""
    return rest[PLACE - 1] is None or lookup.runs_reference(backend, like.device)


def _requests(where: Where, total_q: int, device: torch.device) -> Tensor | None:
    """The request of each query, int32 [T], and the number of requests past the last one; None for one sequence."""
    if where.cu_seqlens_q is None:
        return None
    rows = torch.arange(total_q, dtype=torch.int32, device=device)
    return torch.searchsorted(where.cu_seqlens_q[1:], rows, right=True, out_int32=True)


def _key_ends(where: Where, total_q: int, total_k: int | None) -> Tensor:
    """The position one past the last key of each request, int32 [B]; for operators without keys total_k is None."""
    assert where.k_offset is not None
    if where.seqused_k is not None:
        return where.seqused_k + where.k_offset
    if where.cu_seqlens_k is not None:
        return where.cu_seqlens_k.diff() + where.k_offset
    if total_k is None and where.cu_seqlens_q is not None:
        return where.cu_seqlens_q.diff() + where.k_offset
    return where.k_offset + (total_q if total_k is None else total_k)


def _num_valid_blocks(shard: Shard, ends: Tensor, where: Where, total_q: int, block_size: int) -> Tensor:
    """Blocks of the whole request at or before each query's limit, int32 [T]; not above 0 where it sees nothing."""
    key_end = shard.per_query(ends)
    position = where.q_positions
    if position is None:
        query_end = total_q if where.cu_seqlens_q is None else shard.per_query(where.cu_seqlens_q[1:])
        position = torch.arange(total_q, dtype=torch.int32, device=ends.device) - query_end + key_end
    limit = torch.minimum(position, key_end - 1)
    valid = torch.div(limit, block_size, rounding_mode="floor") + 1
    return valid.masked_fill(shard.broken, 0)


def _pieces(total_q: int, elements: int) -> list[slice]:
    """Ranges of queries, for a tensor of ``elements`` elements per query."""
    rows = max(PIECE // max(elements, 1), 1)
    return [slice(begin, begin + rows) for begin in range(0, total_q, rows)]


def _move_columns(score: Tensor, shard: Shard) -> None:
    """Columns of score [Hi, T, NB], counted from each query's shard, to their places in the whole request."""
    num_heads, total_q, width = score.shape
    first, broken = (part.expand(total_q)[:, None] for part in (shard.first, shard.broken))
    column = torch.arange(width, device=score.device)
    outside = torch.where(broken, torch.nan, -torch.inf)
    for part in _pieces(total_q, num_heads * width):
        source = column - first[part]
        inside = (source >= 0) & ~broken[part]
        moved = score[:, part].gather(2, source.clamp_min_(0).expand(num_heads, -1, -1))
        score[:, part] = torch.where(inside, moved, outside[part])


def _rank_whole_request(
    ids: Tensor, first: Tensor, valid: Tensor, init_blocks: int, local_blocks: int, order: str
) -> None:
    """Turn ids [Hkv, T, k], ranked in each query's shard, into the selection from its ``valid`` [T] first blocks."""
    num_heads, total_q, topk = ids.shape
    first = first.expand(total_q)
    for part in _pieces(total_q, num_heads * topk):
        chosen = _rank(ids[:, part], first[part, None], valid[part, None], init_blocks, local_blocks, order)
        ids[:, part] = chosen


def _rank(ids: Tensor, first: Tensor, valid: Tensor, init_blocks: int, local_blocks: int, order: str) -> Tensor:
    """`_rank_whole_request` for one piece; ``first`` and ``valid`` are [n, 1].

    The classes take slots in this order: init, local, ranked by the kernel, in front of the shard. Each but the third
    is a range of ids, so that counts are enough.
    """
    topk = ids.shape[2]
    ranked_begin = valid.clamp_max(init_blocks)
    local_begin = torch.maximum(valid - local_blocks, ranked_begin)
    ranked = ids + first
    kept = (ids >= 0) & (ranked >= ranked_begin) & (ranked < local_begin)
    ranked = ranked.gather(2, kept.logical_not().to(torch.int8).argsort(dim=2, stable=True))

    free = torch.full_like(valid, topk)
    num_init, free = _take(ranked_begin, free)
    num_local, free = _take(valid - local_begin, free)
    num_ranked, free = _take(kept.sum(2, keepdim=True, dtype=torch.int32), free)
    num_before, free = _take(torch.minimum(first, local_begin) - ranked_begin, free)
    if order == "local_last":
        at_ranked = num_init
        at_before = at_ranked + num_ranked
        at_local = at_before + num_before
    else:
        at_local = num_init
        at_ranked = at_local + num_local
        at_before = at_ranked + num_ranked

    slot = torch.arange(topk, dtype=torch.int32, device=ids.device)
    out = torch.where(slot < num_init, slot, -1)
    out = torch.where((slot >= at_local) & (slot < at_local + num_local), local_begin + slot - at_local, out)
    out = torch.where((slot >= at_before) & (slot < at_before + num_before), ranked_begin + slot - at_before, out)
    source = (slot - at_ranked).clamp(0, topk - 1).to(torch.int64).expand(ids.shape)
    out = torch.where((slot >= at_ranked) & (slot < at_ranked + num_ranked), ranked.gather(2, source), out)
    if order == "ascending":
        largest = torch.iinfo(torch.int32).max
        out = out.masked_fill(out < 0, largest).sort(dim=2).values
        out = out.masked_fill(out == largest, -1)
    return out


def _take(wanted: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the free slots a class gets, and what is left."""
    taken = torch.minimum(wanted.clamp_min(0), free)
    return taken, free - taken
