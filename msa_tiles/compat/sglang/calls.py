"""A call of SGLang's sparse prefill and decode: its arguments by name, and what of them is not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.quant import FP8

_CACHES = (torch.bfloat16, FP8)


class Prefill(NamedTuple):
    """The arguments of ``minimax_sparse_prefill``, in its order."""

    q: Tensor  # [T, Hq, D]
    k_cache: Tensor  # [slots, Hkv, D]
    v_cache: Tensor
    sink: Tensor | None
    idx_q: Tensor  # [T, Hi, D]
    idx_k_cache: Tensor  # [slots, 1, D]
    idx_v_cache: Tensor | None
    idx_sink: Tensor | None
    req_to_token: Tensor  # int32 [requests, longest]
    slot_ids: Tensor  # [B]
    cu_seqlens: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # [B]
    prefix_lens: Tensor  # [B]
    max_seqlen_q: int
    max_seqlen_k: int
    block_size_q: int
    block_size_k: int
    topk: int
    init_blocks: int
    local_blocks: int
    sm_scale: float | None = None
    idx_sm_scale: float | None = None
    score_type: str = "max"
    disable_index_value: bool = False
    use_msa: bool = False
    cu_seqblocks_q: Tensor | None = None
    max_seqblock_q: int | None = None
    all_seqblock_q: int | None = None
    seqlens_cpu: list[int] | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    idx_q_scale: float | None = None
    idx_k_scale: float | None = None
    idx_v_scale: float | None = None
    cached_topk_idx: Tensor | None = None
    return_topk_idx: bool = False
    loc_mapping: Tensor | None = None
    page_size: int = 1
    seq_lens_cpu: Tensor | None = None

    def why_not(self) -> str | None:
        """Why SGLang's own function has to answer; None where ours may."""
        if self.loc_mapping is not None:
            return "slots are mapped (loc_mapping)"
        if self.block_size_q != 1:
            return f"queries share selections (block_size_q = {self.block_size_q})"
        return _why_not(self)


class Decode(NamedTuple):
    """The arguments of ``minimax_sparse_decode``, in its order; one query a request, B = T."""

    q: Tensor
    sink: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    idx_q: Tensor
    idx_sink: Tensor | None
    idx_k_cache: Tensor
    idx_v_cache: Tensor | None
    req_to_token: Tensor
    slot_ids: Tensor
    seq_lens: Tensor
    max_seqlen: int
    block_size_q: int
    block_size_k: int
    topk: int
    init_blocks: int
    local_blocks: int
    sm_scale: float | None = None
    idx_sm_scale: float | None = None
    score_type: str = "max"
    disable_index_value: bool = False
    dense_main_attn_fn: Callable[..., Any] | None = None
    page_size: int = 1
    use_msa: bool = False
    msa_kv_indices: Tensor | None = None
    msa_plan: Any = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    idx_q_scale: float | None = None
    idx_k_scale: float | None = None
    idx_v_scale: float | None = None
    cached_topk_idx: Tensor | None = None
    topk_out: Tensor | None = None
    hisparse_swap_in_fn: Callable[..., Any] | None = None
    indexer_cp: Any = None
    packed_queries: int = 1

    def why_not(self) -> str | None:
        """Why SGLang's own function has to answer; None where ours may."""
        for name in ("dense_main_attn_fn", "hisparse_swap_in_fn", "indexer_cp"):
            if getattr(self, name) is not None:
                return f"{name} is given"
        if self.packed_queries != 1:
            return f"rows share requests (packed_queries = {self.packed_queries})"
        if self.cached_topk_idx is None and self.idx_k_cache.dtype != self.idx_q.dtype:
            return f"index queries are {self.idx_q.dtype}, index keys {self.idx_k_cache.dtype}"
        return _why_not(self)


def _why_not(call: Prefill | Decode) -> str | None:
    """What holds for both."""
    if torch.version.hip is not None:
        return "the GPU is AMD's"
    if call.sink is not None or call.idx_sink is not None:
        return "there are sinks"
    if not call.disable_index_value or call.idx_v_cache is not None:
        return "the indexer has values"
    if call.score_type != "max":
        return f"score_type is {call.score_type!r}"
    if call.use_msa:
        return "SGLang has kernels of its own for this GPU (use_msa)"
    if call.page_size < 1 or call.block_size_k % call.page_size != 0:
        return f"pages of {call.page_size} tokens do not divide blocks of {call.block_size_k}"
    if call.idx_q.shape[1] != call.k_cache.shape[1]:
        return f"{call.idx_q.shape[1]} index heads select for {call.k_cache.shape[1]} KV heads"
    if call.q.dtype != torch.bfloat16 or call.k_cache.dtype not in _CACHES or call.v_cache.dtype != call.k_cache.dtype:
        return f"q is {call.q.dtype}, k {call.k_cache.dtype}, v {call.v_cache.dtype}"
    return None
