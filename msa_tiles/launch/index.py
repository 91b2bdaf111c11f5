"""How the indexer runs on CUDA: scores, rankings, and both in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import backends, formats
from msa_tiles.call.indexer import ORDERS, Index, RankCall, Ranked, ScoreCall, SelectCall
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, packed, places
from msa_tiles.spec.reach import WIDENING

SCORE, SELECT = "index_score", "select_blocks"

# Launches a kernel that scores blocks: (kernel, operands, block size, causal, out [Hi, T, NB]).
LaunchScores = Callable[[Any, Index, int, bool, Tensor], None]


class KernelScales(NamedTuple):
    """What a kernel gets beside other tensors, beside keys, and as flags; nothing where values are not quantised."""

    tensors: tuple[Tensor, ...]
    of_keys: tuple[Tensor, ...]
    flags: tuple[int, ...]


def has_key_scales(k_scale: Tensor | None) -> bool:
    """Whether every key has a scale of its own. One for all keys ranks no block before another."""
    return k_scale is not None and k_scale.dim() > 0


def kernel_scales(given: Index, heads_per_group: int, unread: Tensor) -> KernelScales:
    """Scales as the kernels of a selection take them: q_scale [T, Hi], k_scale, and whether q_scale is to be read.
    Those of keys of 4 bits, under queries that have none here, are as `packed.of_index` says.

    A positive factor of all scores of a query ranks blocks only among the heads of a group. ``unread``, an int32 tensor
    [n] of the call, stands in for what cannot change a ranking; nothing is allocated.
    """
    if formats.is_packed(given.idx_k) and given.k_scale is not None:
        return KernelScales((), packed.of_index(given.idx_k, given.k_scale, given.k_global_scale), ())
    if not formats.is_quantised(given.idx_q):
        return KernelScales((), (), ())
    unread = unread.view(torch.float32)
    q_scale, k_scale = given.q_scale, given.k_scale
    use_q_scale = heads_per_group > 1 and q_scale is not None and q_scale.dim() > 0
    if q_scale is None or not use_q_scale:
        q_scale = unread[0]
    if k_scale is None or k_scale.dim() == 0:
        k_scale = unread
    return KernelScales((q_scale.expand(given.idx_q.shape[:2]), k_scale), (), (int(use_q_scale),))


class AppliedScales(NamedTuple):
    """What a kernel that writes scores gets beside queries, beside keys, and as flags; nothing for values without."""

    of_queries: tuple[Tensor, ...]
    of_keys: tuple[Tensor, ...]
    flags: tuple[int, ...]


_NO_SCALES = AppliedScales((), (), ())


def applied_scales(
    idx_q: Tensor,
    idx_k: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    k_global_scale: Tensor | None,
    unread: Tensor,
) -> AppliedScales:
    """Scales as these kernels take them: q_scale [T, Hi] and k_scale, [n] where all keys share one, its first; those of
    keys of 4 bits as `packed.of_index` says.

    The flags say whether q_scale, and whether the one of all keys, is to be read. ``unread``, an int32 tensor [n] of
    the call, stands in for what is not; nothing is allocated.
    """
    if not (formats.is_quantised(idx_q) or formats.is_packed(idx_k)):
        return _NO_SCALES
    unread = unread.view(torch.float32)
    if formats.is_packed(idx_k) and k_scale is not None:
        of_queries = unread[0] if q_scale is None else q_scale
        of_keys = packed.of_index(idx_k, k_scale, k_global_scale)
        return AppliedScales((of_queries.expand(idx_q.shape[:2]),), of_keys, (int(q_scale is not None), 1))
    flags = (int(q_scale is not None), int(k_scale is not None and not has_key_scales(k_scale)))
    if q_scale is None:
        q_scale = unread[0]
    if k_scale is None:
        k_scale = unread
    elif k_scale.dim() == 0:
        k_scale = k_scale[None]
    return AppliedScales((q_scale.expand(idx_q.shape[:2]),), (k_scale,), flags)


def is_widened(op: str, given: Index) -> bool:
    """Whether queries are e4m3 under keys of 4 bits, and kernels of the operator take BF16 ones there."""
    return op in WIDENING and formats.is_packed(given.idx_k) and formats.is_quantised(given.idx_q)


def widened(op: str, given: Index) -> Index:
    """The same with queries in bfloat16, which holds every e4m3 value; their scales stay beside them."""
    return given._replace(idx_q=given.idx_q.to(torch.bfloat16)) if is_widened(op, given) else given


def widened_for_selection(given: Index, heads_per_group: int) -> Index:
    """The same, without scales of queries: they rank nothing but heads of a group, whose queries are multiplied by
    theirs and rounded to bfloat16.
    """
    if not is_widened(SELECT, given):
        return given
    scale = given.q_scale
    if heads_per_group > 1 and scale is not None and scale.dim() > 0:
        return given._replace(idx_q=(given.idx_q.float() * scale[..., None]).to(torch.bfloat16), q_scale=None)
    return widened(SELECT, given)._replace(q_scale=None)


def variant(given: Index, block_size: int) -> dict[str, int]:
    """The compile-time dims that all kernels of index keys share."""
    dims = {
        "head_dim": given.idx_q.shape[2],
        "block_size": block_size,
        "pages_per_block": lookup.pages_per_block(given.where, given.idx_k, block_size),
    }
    if formats.is_quantised(given.idx_k) and not formats.is_packed(given.idx_k):
        dims["key_scales"] = int(has_key_scales(given.k_scale))
    return dims


def interleaved_keys(given: Index) -> tuple[str, ...]:
    """Why no kernel takes the scales of keys, if none does."""
    if not formats.is_packed(given.idx_k) or given.k_scale is None or given.k_scale.dim() == given.idx_k.dim():
        return ()
    return ("scales of idx_k are interleaved, wanted linear ones",)


def has_odd_scales(given: Index) -> bool:
    """Whether scales of groups lie where a key's cannot be read at once."""
    scale = given.k_scale
    return formats.is_packed(given.idx_k) and scale is not None and packed.is_odd(given.idx_k, scale)


def run_scores(op: str, launch: LaunchScores, call: ScoreCall, out: Tensor, widened: bool = False) -> None:
    """Fill the scores; ``launch`` gets calls with keys, requests and an output that is not empty. Queries may have been
    ``widened``.
    """
    given, block_size = call.operands, call.block_size
    idx_q, idx_k, where, *_ = given
    facts = lookup.call_facts(
        op,
        where,
        idx_q.device,
        lookup.precision(query=idx_q, index_key=formats.stored(idx_k, given.k_scale)),
        variant(given, block_size),
        (idx_q, idx_k),
        lookup.broken_rules(op, num_index_heads=idx_q.shape[1])
        + lookup.oversized_table(where, block_size)
        + interleaved_keys(given),
        queries=idx_q.shape[0],
        heads=idx_q.shape[1],
        unaligned=has_odd_scales(given),
        widened=widened,
    )
    kernel = lookup.find_kernel(facts, call.backend)
    score = out.transpose(0, 1) if call.token_major else out
    if score.numel() == 0:
        return
    if idx_k.numel() == 0 or where.num_requests == 0:
        score.fill_(-torch.inf)
        return
    launch(kernel, given, block_size, call.causal, score)


def run_index_scores(call: ScoreCall, out: Tensor) -> None:
    """The same for index_score."""
    wide = call._replace(operands=widened(SCORE, call.operands))
    run_scores(SCORE, launch_scores, wide, out, is_widened(SCORE, call.operands))


def launch_scores(kernel: Any, given: Index, block_size: int, causal: bool, score: Tensor) -> None:
    """The kernel of index_score."""
    idx_q, idx_k = given.idx_q, given.idx_k
    at = places.place(given.where, idx_q.shape[0], idx_k.shape[0], block_size, idx_q.device)
    scales = applied_scales(idx_q, idx_k, given.q_scale, given.k_scale, given.k_global_scale, at.cu_seqlens_q)
    kernel(
        idx_q,
        *scales.of_queries,
        idx_k,
        *scales.of_keys,
        at.page_table,
        at.cu_seqlens_q,
        at.cu_seqlens_k,
        at.seqused_k,
        at.q_positions,
        score,
        at.use_seqused,
        at.use_positions if causal else 0,
        *scales.flags,
        int(causal),
    )


@dataclass(frozen=True)
class Ranking:
    """A kernel ready to rank scores of certain shapes; ``lanes`` is what it takes beside what the others do."""

    kernel: Any
    block_size: int
    parameters: tuple[int, ...]
    lanes: tuple[int, ...]

    def __call__(self, given: Ranked, out: Tensor) -> None:
        score, where, counts = given
        at = places.place(where, score.shape[1], None, self.block_size, score.device)
        self.kernel(
            score,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.seqused_k,
            at.q_positions,
            at.cu_seqlens_q if counts is None else counts,
            out,
            at.use_seqused,
            at.use_positions,
            *self.parameters,
            *self.lanes,
        )


def prepare_topk_select(call: RankCall, out: Tensor) -> Ranking | None:
    """What runs topk_select; None on the reference, and where a size is 0, though a kernel must be there then too."""
    lanes = (_lanes_log2(out.shape[0] * out.shape[1]),)
    return _prepare_ranking("topk_select", {"topk": call.topk}, lanes, call, out)


def prepare_decode_topk(call: RankCall, out: Tensor) -> Ranking | None:
    """The same for decode_topk."""
    return _prepare_ranking("decode_topk", {"max_blocks": call.operands.score.shape[2]}, (), call, out)


def _prepare_ranking(
    op: str, dims: dict[str, int], lanes: tuple[int, ...], call: RankCall, out: Tensor
) -> Ranking | None:
    if backends.runs_reference(call.backend, call.device):
        return None
    score, where, counts = call.operands
    refusals = lookup.broken_rules(op, topk=call.topk, max_blocks=score.shape[2])
    if score.dtype != torch.float32:
        refusals = (f"score is {score.dtype}, wanted torch.float32", *refusals)
    facts = lookup.call_facts(
        op,
        # Positions play no part when the number of valid blocks is given, and pages never do.
        _positions_only(where, counts is not None or call.num_valid is not None),
        score.device,
        "bf16",
        dims,
        refusals=refusals,
        queries=score.shape[1],
        heads=score.shape[0],
    )
    kernel = lookup.find_kernel(facts, call.backend)
    if out.numel() == 0 or score.numel() == 0 or where.num_requests == 0:
        return None
    mode = 2 if counts is not None else int(call.num_valid is not None)
    order = ORDERS[call.order]
    parameters = (mode, call.num_valid or 0, call.block_size, call.init_blocks, call.local_blocks, order)
    return Ranking(kernel, call.block_size, parameters, lanes)


def _lanes_log2(rows: int) -> int:
    """Of how many shares of its most rows a warp takes one, as a power of two: all when the rows alone fill a GPU."""
    return 0 if rows >= 1 << 17 else 2 if rows >= 1 << 13 else 5


def _positions_only(where: Where, counted: bool) -> Where:
    if counted:
        where = where._replace(q_positions=None, k_offset=None)
    return where.without_pages()


@dataclass(frozen=True)
class Selection:
    """A kernel ready to choose the blocks of tensors of certain shapes."""

    kernel: Any
    block_size: int
    heads_per_group: int
    parameters: tuple[int, int, int]

    def __call__(self, given: Index, out: Tensor) -> None:
        given = widened_for_selection(given, self.heads_per_group)
        idx_q, idx_k, where, *_ = given
        at = places.place(where, idx_q.shape[0], idx_k.shape[0], self.block_size, idx_q.device)
        scales = kernel_scales(given, self.heads_per_group, at.cu_seqlens_q)
        self.kernel(
            idx_q,
            idx_k,
            *scales.of_keys,
            at.page_table,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.seqused_k,
            at.q_positions,
            *scales.tensors,
            out,
            at.use_seqused,
            at.use_positions,
            *scales.flags,
            *self.parameters,
        )


def prepare_selection(call: SelectCall, out: Tensor) -> Selection | None:
    """What runs select_blocks; None on the reference, and where a size is 0, though a kernel must be there then too."""
    if backends.runs_reference(call.backend, call.device):
        return None
    given, block_size, narrow = call.operands, call.block_size, is_widened(SELECT, call.operands)
    if narrow:  # what the launch makes of them is as dense as this
        given = given._replace(idx_q=given.idx_q.new_empty(given.idx_q.shape, dtype=torch.bfloat16), q_scale=None)
    idx_q, idx_k, where, *_ = given
    heads_per_group = idx_q.shape[1] // call.num_kv_heads
    dims = {**variant(given, block_size), "topk": call.topk, "heads_per_group": heads_per_group}
    facts = lookup.call_facts(
        SELECT,
        where,
        idx_q.device,
        lookup.precision(query=idx_q, index_key=formats.stored(idx_k, given.k_scale)),
        dims,
        (idx_q, idx_k),
        lookup.oversized_table(where, block_size) + interleaved_keys(given),
        queries=idx_q.shape[0],
        heads=idx_q.shape[1],
        unaligned=has_odd_scales(given),
        widened=narrow,
    )
    kernel = lookup.find_kernel(facts, call.backend)
    if out.numel() == 0 or idx_k.numel() == 0 or where.num_requests == 0:
        return None
    parameters = call.init_blocks, call.local_blocks, ORDERS[call.order]
    return Selection(kernel, block_size, heads_per_group, parameters)


def run_ranking(prepare: Callable[[Any, Tensor], Callable[[Any, Tensor], None] | None], call: Any, out: Tensor) -> None:
    """Fill the ids of a call that ranks scores, or scores blocks and ranks them."""
    launch = prepare(call, out)
    if launch is None:
        out.fill_(-1)
    else:
        launch(call.operands, out)
