"""Our implementations of indexer and attention in vLLM's MiniMax-M3 layers. Needs vLLM 0.33.

`install` replaces the functions by which vLLM's layers choose implementations. Where they would choose vLLM's Triton
ones, ours are chosen, which subclass them and hand back to them what our kernels do not serve; caches, metadata and
their builders stay vLLM's. With ``VLLM_BATCH_INVARIANT`` our operators are called as batch invariant, but for drafts:
whether vLLM takes a request's for a decode step depends on the other requests.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common import indexer as vllm_indexer
from vllm.models.minimax_m3.common import sparse_attention as vllm_attention
from vllm.platforms import current_platform

from msa_tiles.compat import notes, warm
from msa_tiles.compat.vllm import operators, steps
from msa_tiles.compat.vllm.caches import PAGE
from msa_tiles.quant import FP8

log = logging.getLogger("vllm.msa_tiles")
_INDEX_DTYPES = (torch.bfloat16, FP8)
_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")


class IndexerImpl(vllm_indexer.MiniMaxM3IndexerTritonImpl):
    """Selects blocks: in one kernel for a prefill; a decode step is left to attention where that is ours, too."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.layer_name: str = named["prefix"]
        self.by = steps.Selecting(self.topk_blocks, self.init_blocks, self.local_blocks)
        alike = self.index_cache.dtype, self.num_index_heads, self.by
        self.kinds = notes.kinds_of(log, "MiniMax M3's indexer", *alike)
        self.deferred: steps.Deferred | None = None
        # Kept beside it, to select by vLLM's operators after all.
        self.index_query: Tensor | None = None
        warm.ahead(log, warm.indexer(self.index_cache.dtype, self.topk_blocks))

    def forward(self, index_query: Tensor, **for_rocm: Any) -> tuple[Tensor | None, Tensor | None]:
        """The ids of decode and prefill, int32 [Hkv, T, topk] each, in ``topk_indices_buffer``.

        Those of a deferred decode step stand there after attention.
        """
        self.deferred = self.index_query = None
        metadata = get_forward_context().attn_metadata
        # Without metadata it is a run that measures memory, before there are caches.
        if not isinstance(metadata, dict) or any(value is not None for value in for_rocm.values()):
            return super().forward(index_query, **for_rocm)
        given = metadata[self.index_cache.prefix]
        if not self._takes(index_query, given):
            return super().forward(index_query)
        rows, count = given.num_actual_tokens, given.num_decode_tokens
        idx_q = index_query[:rows].view(-1, self.num_index_heads, self.index_head_dim)
        ids = None if self.topk_indices_buffer is None else self.topk_indices_buffer[:rows].transpose(0, 1)
        decoded = prefilled = None
        try:
            if given.num_decodes:
                decoded = self._decode(index_query, idx_q[:count], given.decode, ids, metadata)
            if given.num_prefills:
                out, cache = None if ids is None else ids[:, count:], self.index_cache.kv_cache
                with self.kinds.trying("prefill"):
                    prefilled = steps.select_prefill(idx_q[count:], cache, given.prefill, self.by, out)
        except notes.Untaken:
            return self.by_original(index_query)
        return decoded, prefilled

    def by_original(self, index_query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Select with vLLM's operators."""
        self.deferred = self.index_query = None
        return super().forward(index_query)

    def _takes(self, index_query: Tensor, metadata: Any) -> bool:
        dtype = index_query.dtype
        return (
            dtype in _INDEX_DTYPES
            and dtype == self.index_cache.kv_cache.dtype
            and self.block_size == PAGE
            and self.score_type == "max"
            and self.kinds.takes(*kinds_of(metadata))
        )

    def _decode(
        self, index_query: Tensor, idx_q: Tensor, decode: Any, ids: Tensor | None, metadata: dict[str, Any]
    ) -> Tensor:
        cache, out = self.index_cache.kv_cache, None if ids is None else ids[:, : idx_q.shape[0]]
        if out is not None and self._attention_decodes(decode, metadata):
            self.deferred, self.index_query = steps.Deferred(idx_q, cache, decode, self.by), index_query
            return out
        with self.kinds.trying("decode"):
            return operators.minimax_m3_index_decode(
                idx_q,
                cache,
                decode.block_table,
                decode.seq_lens,
                decode.max_seq_len,
                *self.by,
                self.num_kv_heads,
                decode.decode_query_len,
                decode.max_decode_query_len,
                out=out,
            )

    def _attention_decodes(self, decode: Any, metadata: dict[str, Any]) -> bool:
        """Whether this layer's attention is ours, and its keys lie on the pages of the same numbers."""
        layer = get_forward_context().no_compile_layers.get(self.layer_name)
        attention, attended = getattr(layer, "impl", None), metadata.get(self.layer_name)
        if attended is None or not isinstance(attention, SparseImpl) or not attention.takes(layer, attended):
            return False
        table, other = decode.block_table, attended.decode.block_table
        return table.data_ptr() == other.data_ptr() and table.stride() == other.stride()


class SparseImpl(vllm_attention.MiniMaxM3SparseTritonImpl):
    """Attends to the selected blocks, and decodes in one operator with the indexer where that left it to do."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        alike = self.kv_cache_dtype, self.num_heads, self.num_kv_heads, self.topk_blocks
        self.kinds = notes.kinds_of(log, "MiniMax M3's attention", *alike)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        warm.ahead(log, warm.attention(self.use_fp8_kv, self.num_heads // self.num_kv_heads))

    def takes(self, layer: Any, metadata: Any) -> bool:
        """Whether a step is ours, as far as can be said before it runs."""
        buffered = layer.topk_indices_buffer is not None
        return buffered and self.block_size == PAGE and self.kinds.takes(*kinds_of(metadata))

    def forward(
        self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, *, query_fp8: Tensor | None = None
    ) -> Tensor:
        """Attention of ``query`` [T, Hq * D] into those rows of ``output`` that the step has."""
        metadata = get_forward_context().attn_metadata
        plain = query_fp8 is None and query.dtype == output.dtype == torch.bfloat16
        if isinstance(metadata, dict) and plain and self.takes(layer, metadata[layer.layer_name]):
            try:
                self._attend(layer, query, kv_cache, output, metadata[layer.layer_name])
                return output
            except notes.Untaken:
                pass
        if (index_query := _indexer(layer).index_query) is not None:
            _indexer(layer).by_original(index_query)
        return super().forward(layer, query, kv_cache, output, query_fp8=query_fp8)

    def _attend(self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, given: Any) -> None:
        rows, count = given.num_actual_tokens, given.num_decode_tokens
        q, out = (x[:rows].view(-1, self.num_heads, self.head_size) for x in (query, output))
        ids = layer.topk_indices_buffer[:rows].transpose(0, 1)
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self.use_fp8_kv else (None, None)
        attending = steps.Attending(kv_cache, self.num_kv_heads, self.scale, k_scale, v_scale, self.batch_invariant)
        if given.num_decodes:
            indexer = _indexer(layer)
            with self.kinds.trying("decode"):
                if indexer.deferred is not None:
                    steps.decode(q[:count], ids[:, :count], indexer.deferred, attending, out[:count])
                else:
                    steps.attend_decode(q[:count], ids[:, :count], given.decode, attending, out[:count])
            indexer.deferred = indexer.index_query = None
        if given.num_prefills:
            with self.kinds.trying("prefill"):
                steps.attend_prefill(q[count:], ids[:, count:], given.prefill, attending, out[count:])


class _NothingDeferred:
    """Stands for an indexer that is not ours."""

    deferred = index_query = None


def _indexer(layer: Any) -> Any:
    impl = getattr(getattr(layer, "indexer", None), "impl", None)
    return impl if isinstance(impl, IndexerImpl) else _NothingDeferred()


def kinds_of(metadata: Any) -> tuple[str, ...]:
    """What a step consists of."""
    counts = {"decode": metadata.num_decodes, "prefill": metadata.num_prefills}
    return tuple(kind for kind, count in counts.items() if count)


def why_not() -> str | None:
    """Why this process leaves MiniMax M3 to vLLM."""
    if not current_platform.is_cuda():
        return "the platform is not CUDA"
    if envs.VLLM_BATCH_INVARIANT and get_current_vllm_config().speculative_config is not None:
        return "VLLM_BATCH_INVARIANT is set, and there are drafts"
    return None


def select_main_backend_and_impl_cls(**named: Any) -> tuple[type, type]:
    """The backend that vLLM chooses, and our implementation in the place of vLLM's Triton one."""
    backend, chosen = _MAIN(**named)
    dtype = named["kv_cache_dtype"]
    reason = why_not() or (None if dtype in _CACHE_DTYPES else f"kv_cache_dtype is {dtype}")
    return backend, _ours("attention", chosen, vllm_attention.MiniMaxM3SparseTritonImpl, SparseImpl, reason, named)


def select_indexer_impl_cls(**named: Any) -> type:
    """Our implementation in the place of vLLM's Triton one."""
    chosen = _INDEXER(**named)
    return _ours("indexer", chosen, vllm_indexer.MiniMaxM3IndexerTritonImpl, IndexerImpl, why_not(), named)


def _ours(part: str, chosen: type, replaced: type, ours: type, reason: str | None, named: dict[str, Any]) -> type:
    said = ", ".join(f"{name}={value}" for name, value in named.items())
    if chosen is not replaced:
        reason = reason or f"vLLM chose {chosen.__name__}"
    if reason is not None:
        notes.once(log, logging.INFO, f"msa_tiles leaves MiniMax M3's {part} to vLLM ({said}): {reason}")
        return chosen
    notes.once(log, logging.INFO, f"msa_tiles serves MiniMax M3's {part} ({said}) in the place of {chosen.__name__}")
    return ours


# Who imports this module again finds them replaced.
_MAIN: Any = getattr(vllm_attention, "_before_msa_tiles", vllm_attention.select_main_backend_and_impl_cls)
_INDEXER: Any = getattr(vllm_indexer, "_before_msa_tiles", vllm_indexer.select_indexer_impl_cls)


def install() -> None:
    """Have vLLM's layers for NVIDIA GPUs choose by our functions, in every module that has vLLM's."""
    if current_platform.is_rocm():
        return
    model = importlib.import_module("vllm.models.minimax_m3.nvidia.model")
    if not hasattr(model, _MAIN.__name__):
        raise AttributeError(f"{model.__name__} has no {_MAIN.__name__}")
    vllm_attention._before_msa_tiles, vllm_indexer._before_msa_tiles = _MAIN, _INDEXER
    for module in (vllm_attention, model):
        setattr(module, _MAIN.__name__, select_main_backend_and_impl_cls)
    vllm_indexer.select_indexer_impl_cls = select_indexer_impl_cls
