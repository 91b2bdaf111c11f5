"""How the decode kernels are launched on CUDA: grids from shapes alone, no allocation beside what the caller left out.

`score` splits the index keys over the GPU, `sparse_decode` gives every CTA a share of a query's slots and merges the
shares with combine, and `step` is scores, top-k, attention and merge one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import backends, formats, validate
from msa_tiles.call.attention import Attention, AttentionCall
from msa_tiles.call.indexer import Index
from msa_tiles.call.step import Step, StepCall
from msa_tiles.call.where import Where
from msa_tiles.call.workspace import WORKSPACE_BYTES
from msa_tiles.launch import index, lookup, operands, places, workspaces
from msa_tiles.launch.index import AppliedScales, applied_scales
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts
from msa_tiles.runtime.facts import facts_of, multiprocessors, standing_for, stands_for_another

LOG2_E = math.log2(math.e)

# Microseconds on an H100, to weigh splits: one block of one CTA, a CTA's start, a merge.
BLOCK_COST, START_COST, MERGE_COST = 2.5, 2.0, 2.5

# Slots of a split where the number of splits must not depend on how many rows there are: few rows are then read by a
# quarter of what would be fastest, and many rows have merges that they would not need.
INVARIANT_SLOTS = 4

# CTAs of decode_score on a multiprocessor: its two stages of keys fit twice.
SCORE_CTAS = 2

# The parts of a workspace begin at multiples of this many bytes.
PART = 256


def place(where: Where, total_q: int, total_k: int, device: torch.device) -> Place:
    """Like `places.place`, without its virtual rows: paged decode kernels find a request's pages by its number.

    Allocates nothing when the caller gives cu_seqlens_q, and cu_seqlens_k or pages.
    """
    starts_q = where.cu_seqlens_q
    if starts_q is None:
        starts_q = places.one_sequence(total_q, device)
    starts_k = where.cu_seqlens_k
    if starts_k is None:
        starts_k = starts_q if where.page_table is not None else places.one_sequence(total_k, device)
    return places.starting_at(where, starts_q, starts_k)


def num_sms(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return multiprocessors(index) if stands_for_another() else _num_sms(index)


@functools.lru_cache(maxsize=64)
def _num_sms(index: int) -> int:
    """Kept: torch takes as long to say it as a launch."""
    return multiprocessors(index)


@functools.lru_cache(maxsize=4096)
def choose_splits(rows: int, topk: int, sms: int, most: int) -> int:
    """How many CTAs share the slots of each of ``rows`` (query, KV head) pairs; at most ``most``."""

    def cost(splits: int) -> float:
        waves = -(-rows * splits // sms)
        merge = MERGE_COST if splits > 1 else 0.0
        return waves * (-(-topk // splits) * BLOCK_COST + START_COST) + merge

    return min(range(1, max(1, min(topk, most)) + 1), key=cost)


def score(
    kernel: Any, idx_q: Tensor, idx_k: Tensor, scales: AppliedScales, at: Place, causal: bool, out: Tensor
) -> None:
    """Fill the blocks that each request has of out [Hi, T, NB]."""
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
        out,
        at.use_seqused,
        at.use_positions if causal else 0,
        *scales.flags,
        int(causal),
        num_sms(idx_q.device.index) * SCORE_CTAS,
    )


def launch_scores(kernel: Any, given: Index, block_size: int, causal: bool, out: Tensor) -> None:
    """The kernel of decode_score, which writes the blocks that a request has."""
    out.fill_(-torch.inf)
    idx_q, idx_k, where, q_scale, k_scale, k_global = given
    at = place(where, idx_q.shape[0], idx_k.shape[0], idx_q.device)
    scales = applied_scales(idx_q, idx_k, q_scale, k_scale, k_global, at.cu_seqlens_q)
    score(kernel, idx_q, idx_k, scales, at, causal, out)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Attention ready to run on tensors of certain shapes, in as many splits as pay and fit the workspace."""

    attender: Any
    merger: Any
    splits: int
    scale_log2: float

    def __call__(self, given: Attention, workspace: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Fill out and lse."""
        at = place(given.where, given.q.shape[0], given.k.shape[0], given.q.device)
        self.attend(given, given.block_indices, at, None, (0, 0), workspace, out, lse)

    def attend(
        self,
        given: Attention | Step,
        block_indices: Tensor,
        at: Place,
        scores: Tensor | None,
        forced: tuple[int, int],
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """With ``scores`` [Hi, T, NB] the kernel chooses the ids first, with ``forced`` = (init, local) blocks, and
        writes them to ``block_indices``.
        """
        if self.splits == 1:
            partial_out, partial_lse = out[None], lse[None]
        else:
            partial_out, partial_lse = workspaces.partials(workspace, out, self.splits, given.q.shape[0])
        self.attender(
            given.q,
            *operands.keys_and_values(given),
            at.page_table,
            block_indices,
            at.cu_seqlens_q,
            at.cu_seqlens_k,
            at.seqused_k,
            at.q_positions,
            partial_lse if scores is None else scores,
            partial_out,
            partial_lse,
            self.scale_log2,
            at.use_seqused,
            at.use_positions,
            *forced,
        )
        if self.splits > 1:
            self.merger(partial_out, partial_lse, out, lse)


def prepare(call: AttentionCall) -> Launch | None:
    """What runs the kernels of a call of sparse_decode; None as `msa_tiles.launch.attention.prepare` has it."""
    if backends.runs_reference(call.backend, call.device):
        return None
    facts = operands.facts("sparse_decode", call, scored_blocks=0)
    if operands.is_empty(call.operands):
        lookup.find_kernel(facts, call.backend)
        return None
    q, (num_kv_heads, _, topk) = call.operands.q, call.operands.block_indices.shape
    splits = splits_for(q, num_kv_heads, topk, call.workspace_bytes, call.batch_invariant)
    return _find_launch(facts, call.backend, q, splits, call.softmax_scale)


def run(call: AttentionCall, out: Tensor, lse: Tensor, workspace: Tensor | None = None) -> None:
    """Fill out and lse of a call of sparse_decode."""
    launch = prepare(call)
    if launch is None:
        out.zero_()
        lse.fill_(-torch.inf)
    else:
        launch(call.operands, workspace, out, lse)


def _find_launch(facts: CallFacts, backend: str, q: Tensor, splits: int, softmax_scale: float) -> Launch:
    return Launch(
        _find(facts, backend, "sparse_decode", facts.variant),
        _find(facts, backend, "combine", {"head_dim": q.shape[2]}),
        splits,
        softmax_scale * LOG2_E,
    )


def splits_for(q: Tensor, num_kv_heads: int, topk: int, workspace_bytes: int, batch_invariant: bool) -> int:
    """The number of splits of a call, from shapes and the workspace's bound; ``batch_invariant`` ones from topk alone.

    Raises ValueError for a workspace that does not hold the latter.
    """
    total_q, num_q_heads, head_dim = q.shape
    one = split_bytes(total_q, num_q_heads, head_dim)
    if batch_invariant:
        splits = max(-(-topk // INVARIANT_SLOTS), 1)
        if splits > 1 and splits * one > workspace_bytes:
            wanted = f"at least {splits * one} with batch_invariant, for {splits} splits of {total_q} queries"
            validate.refuse("workspace", f"{workspace_bytes} bytes", wanted)
        return splits
    most = workspace_bytes // one
    return choose_splits(total_q * num_kv_heads, topk, num_sms(q.device.index), most)


def split_bytes(total_q: int, num_q_heads: int, head_dim: int) -> int:
    """What one split takes: BF16 outputs and float32 LSE."""
    return max(1, workspaces.partial_bytes(total_q, num_q_heads, head_dim))


def step_bytes(
    q: Tensor, idx_q: Tensor, topk: int, num_kv_heads: int, num_blocks: int, batch_invariant: bool
) -> tuple[int, int]:
    """The workspace of a step: bytes of the scores, rounded up to `PART`, and of the partial results behind them."""
    bound = sys.maxsize if batch_invariant else WORKSPACE_BYTES
    splits = splits_for(q, num_kv_heads, topk, bound, batch_invariant)
    scores = 4 * idx_q.shape[1] * q.shape[0] * num_blocks
    return -(-scores // PART) * PART, splits * split_bytes(*q.shape) if splits > 1 else 0


def bytes_on(
    device: str | torch.device | None,
    q: Tensor,
    idx_q: Tensor,
    topk: int,
    num_kv_heads: int,
    num_blocks: int,
    batch_invariant: bool,
) -> int:
    """The bytes of `step_bytes` on a device by its name, or that of q; 0 of one that runs no kernels."""
    if q.numel() == 0:
        return 0
    parts = q, idx_q, topk, num_kv_heads, num_blocks, batch_invariant
    if device is None:
        return sum(step_bytes(*parts))
    place, facts = facts_of(device)
    with standing_for(facts):
        return sum(step_bytes(*parts)) if place.type == "cuda" else 0


@dataclasses.dataclass(frozen=True)
class StepLaunch:
    """A decode step ready to run on tensors of certain shapes: scores, attention that begins with the top-k, merge."""

    scorer: Any
    attention: Launch
    num_blocks: int
    score_bytes: int
    partial_bytes: int
    forced: tuple[int, int]

    def __call__(self, given: Step, workspace: Tensor | None, out: Tensor, lse: Tensor, block_indices: Tensor) -> None:
        """Fill out, lse and block_indices. Raises ValueError when the workspace is too small."""
        q, idx_q = given.q, given.idx_q
        total = self.score_bytes + self.partial_bytes
        if workspace is None:
            workspace = torch.empty(total, dtype=torch.uint8, device=q.device)
        elif workspace.numel() < total:
            validate.refuse("workspace", f"{workspace.numel()} bytes", f"at least {total}, see decode_workspace_bytes")
        shape = (idx_q.shape[1], q.shape[0], self.num_blocks)
        used = 4 * math.prod(shape)
        # One call for all parts: each takes the host longer than the arithmetic about it.
        scores, _, partials = workspace.split_with_sizes(
            (used, self.score_bytes - used, workspace.numel() - self.score_bytes)
        )
        scores = scores.view(torch.float32).view(shape)
        at = place(given.where, q.shape[0], given.k.shape[0], q.device)
        scales = applied_scales(
            idx_q, given.idx_k, given.index_q_scale, given.index_k_scale, given.index_k_global_scale, at.cu_seqlens_q
        )  # fmt: skip
        score(self.scorer, idx_q, given.idx_k, scales, at, True, scores)
        self.attention.attend(given, block_indices, at, scores, self.forced, partials, out, lse)


def prepare_step(call: StepCall) -> StepLaunch | None:
    """Find the kernels of a step and measure its workspace; None on the reference, and where a size is 0, though
    kernels must be there for that call too.
    """
    if backends.runs_reference(call.backend, call.device):
        return None
    given, backend, block_size = call.operands, call.backend, call.block_size
    q, k, idx_q, where = given.q, given.k, given.idx_q, given.where
    pages = lookup.pages_per_block(where, k, block_size)
    facts = lookup.call_facts(
        "sparse_decode",
        where,
        q.device,
        lookup.precision(query=q, key_value=formats.stored(k, given.k_scale)),
        {
            "head_dim": q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "pages_per_block": pages,
            **operands.token_scales(k, given.k_scale, given.v_scale),
            "scored_blocks": call.num_blocks,
        },
        (q, k, given.v, idx_q, given.idx_k),
        lookup.broken_rules("decode_topk", topk=call.topk, max_blocks=call.num_blocks)
        + lookup.broken_rules("decode_score", num_index_heads=idx_q.shape[1])
        + lookup.oversized_table(where, block_size)
        + operands.interleaved_keys(given)
        + index.interleaved_keys(given.of_indexer),
        queries=lookup.size_of("sparse_decode", q.shape[0], call.batch_invariant),
        heads=max(q.shape[1], idx_q.shape[1]),
        unaligned=operands.has_odd_scales(given) or index.has_odd_scales(given.of_indexer),
    )
    variant = index.variant(given.of_indexer, block_size)
    of_index = lookup.precision(query=idx_q, index_key=formats.stored(given.idx_k, given.index_k_scale))
    scorer = lookup.part_kernel(facts, backend, "decode_score", variant, facts.features, of_index)
    score_bytes, partial_bytes = step_bytes(
        q, idx_q, call.topk, k.shape[1], call.num_blocks, call.batch_invariant
    )  # fmt: skip
    splits = splits_for(q, k.shape[1], call.topk, partial_bytes, call.batch_invariant)
    attention = _find_launch(facts, backend, q, splits, call.softmax_scale)
    if call.num_blocks == 0 or where.num_requests == 0 or 0 in (q.numel(), k.numel(), idx_q.numel()):
        return None
    forced = call.init_blocks, call.local_blocks
    return StepLaunch(scorer, attention, call.num_blocks, score_bytes, partial_bytes, forced)


def run_step(call: StepCall, out: Tensor, lse: Tensor, block_indices: Tensor, workspace: Tensor | None = None) -> None:
    """Fill the results of a decode step."""
    launch = prepare_step(call)
    if launch is None:
        out.zero_()
        lse.fill_(-torch.inf)
        block_indices.fill_(-1)
    else:
        launch(call.operands, workspace, out, lse, block_indices)


def _find(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    # Pages and positions concern the kernels that read keys; the merge reads our own buffers.
    features = frozenset() if op == "combine" else facts.features
    return lookup.part_kernel(facts, backend, op, variant, features)
