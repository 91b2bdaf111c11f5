"""``k_offset`` on kernels: the shard becomes a call of its own, on the device, and the answer is numbered back.

Kernels know no ``k_offset``. Keys that begin at block ``first`` of their request are the keys of a whole call once
positions and block ids are counted from there; lengths, and the rule for positions that nobody gave, stay as they are.
Each function here takes what runs a call on kernels and returns what also serves shards; the reference serves them
anyway.

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
from typing import Concatenate, TypeVar

import torch
from torch import Tensor

from msa_tiles.call.attention import AttentionCall, Gradients
from msa_tiles.call.indexer import RankCall, ScoreCall, SelectCall
from msa_tiles.call.kl import Divergence
from msa_tiles.call.schedule import ScheduleCall
from msa_tiles.call.where import Where

Call = TypeVar("Call")
# Runs a call into its outputs.
Run = Callable[Concatenate[Call, ...], None]

# Elements that one step of numbering back handles; it bounds the extra memory.
PIECE = 1 << 24


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
        self.where = where._replace(q_positions=positions, k_offset=None)

    def per_query(self, values: Tensor) -> Tensor:
        """Values of requests [B], for every query; 0 for those past the last request."""
        if self.request is None:
            return values
        return torch.nn.functional.pad(values, (0, 1)).index_select(0, self.request)

    def local_ids(self, block_indices: Tensor) -> Tensor:
        """Ids counted from the shard's first block; -1 for those in front of it."""
        first = self.first[:, None]
        return torch.where(block_indices >= first, block_indices - first, -1)


def scores(run: Run[ScoreCall]) -> Run[ScoreCall]:
    """``run(call, out)``, also for shards."""

    def run_shards(call: ScoreCall, out: Tensor) -> None:
        given = call.operands
        if given.where.k_offset is None:
            run(call, out)
            return
        shard = Shard(given.where, given.idx_q.shape[0], call.block_size)
        run(call._replace(operands=given._replace(where=shard.where)), out)
        _move_columns(out.transpose(0, 1) if call.token_major else out, shard)

    return run_shards


def ranking(run: Run[RankCall]) -> Run[RankCall]:
    """``run(call, out)``, also for shards."""

    def run_shards(call: RankCall, out: Tensor) -> None:
        given = call.operands
        if given.where.k_offset is None:
            run(call, out)
            return
        ends = _key_ends(given.where, given.score.shape[1], None)
        where = given.where._replace(cu_seqlens_k=None, page_table=None, seqused_k=ends, k_offset=None)
        run(call._replace(operands=given._replace(where=where)), out)

    return run_shards


def selection(run: Run[SelectCall]) -> Run[SelectCall]:
    """``run(call, out)``, also for shards."""

    def run_shards(call: SelectCall, out: Tensor) -> None:
        given, where = call.operands, call.operands.where
        if where.k_offset is None:
            run(call, out)
            return
        total_q = given.idx_q.shape[0]
        shard = Shard(where, total_q, call.block_size)
        # Nothing forced: which of the forced blocks are the shard's differs between requests. Those among the best of
        # the shard drop out later, and leave as many others as there are slots for.
        ranked = call._replace(
            operands=given._replace(where=shard.where), init_blocks=0, local_blocks=0, order="score"
        )  # fmt: skip
        run(ranked, out)
        ends = _key_ends(where, total_q, given.idx_k.shape[0])
        valid = _num_valid_blocks(shard, ends, where, total_q, call.block_size)
        _rank_whole_request(out, shard.first, valid, call.init_blocks, call.local_blocks, call.order)

    return run_shards


def schedule(run: Run[ScheduleCall]) -> Run[ScheduleCall]:
    """``run(call, edges, tasks, counts)``, also for shards."""

    def run_shards(call: ScheduleCall, *parts: Tensor) -> None:
        if call.where.k_offset is None:
            run(call, *parts)
            return
        shard = Shard(call.where, call.block_indices.shape[1], call.block_size)
        run(call._replace(block_indices=shard.local_ids(call.block_indices), where=shard.where), *parts)

    return run_shards


def attention(run: Run[AttentionCall]) -> Run[AttentionCall]:
    """``run(call, out, lse, workspace)``, also for shards."""

    def run_shards(call: AttentionCall, out: Tensor, lse: Tensor, workspace: Tensor | None = None) -> None:
        given = call.operands
        if given.where.k_offset is None:
            run(call, out, lse, workspace)
            return
        shard = Shard(given.where, given.q.shape[0], call.block_size)
        local = given._replace(block_indices=shard.local_ids(given.block_indices), where=shard.where)
        run(call._replace(operands=local), out, lse, workspace)
        lse.masked_fill_(shard.broken[:, None], torch.nan)
        out.masked_fill_(shard.broken[:, None, None], torch.nan)

    return run_shards


def attention_backward(run: Run[Gradients]) -> Run[Gradients]:
    """``run(call, dq, dk, dv)``, also for shards."""

    def run_shards(call: Gradients, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        if call.where.k_offset is None:
            run(call, dq, dk, dv)
            return
        shard = Shard(call.where, call.q.shape[0], call.block_size)
        run(call._replace(block_indices=shard.local_ids(call.block_indices), where=shard.where), dq, dk, dv)
        _spoil_gradients(shard, dq, dk, dv)

    return run_shards


def divergence(run: Run[Divergence]) -> Run[Divergence]:
    """``run(call, loss, d_idx_q, d_idx_k)``, also for shards."""

    def run_shards(call: Divergence, loss: Tensor, d_idx_q: Tensor, d_idx_k: Tensor) -> None:
        if call.where.k_offset is None:
            run(call, loss, d_idx_q, d_idx_k)
            return
        shard = Shard(call.where, call.q.shape[0], call.block_size)
        local = None if call.block_indices is None else shard.local_ids(call.block_indices)
        run(call._replace(block_indices=local, where=shard.where), loss, d_idx_q, d_idx_k)
        loss.masked_fill_(shard.broken.any(), torch.nan)
        if d_idx_q.numel():
            _spoil_gradients(shard, d_idx_q, d_idx_k)

    return run_shards


def _spoil_gradients(shard: Shard, of_queries: Tensor, *of_keys: Tensor) -> None:
    """NaN for the queries of a shard that no kernel can serve, and for all keys: which are theirs is not looked up."""
    broken = shard.broken.view(-1, *[1] * (of_queries.dim() - 1))
    of_queries.masked_fill_(broken, torch.nan)
    for gradient in of_keys:
        gradient.masked_fill_(broken.any(), torch.nan)


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
