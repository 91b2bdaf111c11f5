"""How the decode kernels are launched on CUDA: grids from shapes alone, no allocation beside what the caller left out.

`score` splits the index keys over the GPU, `sparse_decode` gives every CTA a share of a query's slots and merges the
shares with combine, and `step` is scores, top-k, attention and merge one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.scales import Indexer, applied_scales
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, places, workspaces
from msa_tiles.launch.places import Place
from msa_tiles.runtime import CallFacts

LOG2_E = math.log2(math.e)

# Microseconds on an H100, to weigh splits: one block of one CTA, a CTA's start, a merge.
BLOCK_COST, START_COST, MERGE_COST = 2.5, 2.0, 2.5

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


@functools.lru_cache(maxsize=64)
def num_sms(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.lru_cache(maxsize=4096)
def choose_splits(rows: int, topk: int, sms: int, most: int) -> int:
    """How many CTAs share the slots of each of ``rows`` (query, KV head) pairs; at most ``most``."""

    def cost(splits: int) -> float:
        waves = -(-rows * splits // sms)
        merge = MERGE_COST if splits > 1 else 0.0
        return waves * (-(-topk // splits) * BLOCK_COST + START_COST) + merge

    return min(range(1, max(1, min(topk, most)) + 1), key=cost)


def score(kernel: Any, call: Indexer, at: Place, causal: bool, out: Tensor) -> None:
    """Fill the blocks that each request has of out [Hi, T, NB]."""
    scales = applied_scales(call, at.cu_seqlens_q)
    kernel(
        call.idx_q,
        *scales.of_queries,
        call.idx_k,
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
        num_sms(call.idx_q.device.index) * SCORE_CTAS,
    )


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention ready to run on tensors of certain shapes, in as many splits as pay and fit the workspace."""

    attender: Any
    merger: Any
    splits: int
    scale_log2: float

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_indices: Tensor,
        where: Where,
        schedule: None,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Fill out and lse."""
        at = place(where, q.shape[0], k.shape[0], q.device)
        self.attend(q, k, v, block_indices, at, None, (0, 0), workspace, out, lse)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
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
            partial_out, partial_lse = workspaces.partials(workspace, q, self.splits, q.shape[0])
        self.attender(
            q,
            k,
            v,
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


def prepare(
    facts: CallFacts,
    backend: str,
    q: Tensor,
    block_indices: Tensor,
    *,
    softmax_scale: float,
    workspace_bytes: int,
    **rest: Any,
) -> Attention:
    """What runs a call of sparse_decode; of the arguments of an attention call it needs these."""
    num_kv_heads, _, topk = block_indices.shape
    return _prepare_attention(facts, backend, q, splits_for(q, num_kv_heads, topk, workspace_bytes), softmax_scale)


def _prepare_attention(facts: CallFacts, backend: str, q: Tensor, splits: int, softmax_scale: float) -> Attention:
    return Attention(
        _find(facts, backend, "sparse_decode", facts.variant),
        _find(facts, backend, "combine", {"head_dim": q.shape[2]}),
        splits,
        softmax_scale * LOG2_E,
    )


def splits_for(q: Tensor, num_kv_heads: int, topk: int, workspace_bytes: int) -> int:
    """The number of splits of a call, from shapes and the workspace's bound."""
    total_q, num_q_heads, head_dim = q.shape
    most = workspace_bytes // split_bytes(total_q, num_q_heads, head_dim)
    return choose_splits(total_q * num_kv_heads, topk, num_sms(q.device.index), most)


def split_bytes(total_q: int, num_q_heads: int, head_dim: int) -> int:
    """What one split takes: BF16 outputs and float32 LSE."""
    return max(1, workspaces.partial_bytes(total_q, num_q_heads, head_dim))


def step_bytes(q: Tensor, idx_q: Tensor, topk: int, num_kv_heads: int, num_blocks: int) -> tuple[int, int]:
    """The workspace of `step`: bytes of the scores, rounded up to `PART`, and of the partial results behind them."""
    splits = splits_for(q, num_kv_heads, topk, workspaces.WORKSPACE_BYTES)
    scores = 4 * idx_q.shape[1] * q.shape[0] * num_blocks
    return -(-scores // PART) * PART, splits * split_bytes(*q.shape) if splits > 1 else 0


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step ready to run on tensors of certain shapes: scores, attention that begins with the top-k, merge."""

    scorer: Any
    attention: Attention
    num_blocks: int
    score_bytes: int
    partial_bytes: int
    forced: tuple[int, int]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        idx_q: Tensor,
        idx_k: Tensor,
        where: Where,
        workspace: Tensor | None,
        out: Tensor,
        lse: Tensor,
        block_indices: Tensor,
    ) -> None:
        """Fill out, lse and block_indices. Raises ValueError when the workspace is too small."""
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
        at = place(where, q.shape[0], k.shape[0], q.device)
        score(self.scorer, Indexer(idx_q, idx_k, None, None), at, True, scores)
        self.attention.attend(q, k, v, block_indices, at, scores, self.forced, partials, out, lse)


def prepare_step(
    facts: CallFacts,
    backend: str,
    q: Tensor,
    idx_q: Tensor,
    topk: int,
    num_kv_heads: int,
    *,
    block_size: int,
    num_blocks: int,
    softmax_scale: float,
    forced: tuple[int, int],
) -> Step:
    """Find the kernels of a step and measure its workspace. ``facts`` are those of sparse_decode."""
    pages = facts.variant["pages_per_block"]
    index = {"head_dim": idx_q.shape[2], "block_size": block_size, "pages_per_block": pages}
    scorer = _find(facts, backend, "decode_score", index)
    score_bytes, partial_bytes = step_bytes(q, idx_q, topk, num_kv_heads, num_blocks)
    splits = splits_for(q, num_kv_heads, topk, partial_bytes)
    attention = _prepare_attention(facts, backend, q, splits, softmax_scale)
    return Step(scorer, attention, num_blocks, score_bytes, partial_bytes, forced)


def _find(facts: CallFacts, backend: str, op: str, variant: Mapping[str, int]) -> Any:
    # Pages and positions concern the kernels that read keys; the merge reads our own buffers.
    features = frozenset() if op == "combine" else facts.features
    return lookup.part_kernel(facts, backend, op, variant, features)
