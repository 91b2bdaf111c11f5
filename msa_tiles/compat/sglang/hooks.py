"""What wraps SGLang's sparse prefill and decode: ours where a kernel serves the call, SGLang's elsewhere.

Results are new tensors, as SGLang's are; ids are in ascending order in front of -1. Nothing synchronises: scales are
kept on the device, one for each number.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.compat import kept, notes, servers, warm
from msa_tiles.compat.sglang import forwards, pools
from msa_tiles.compat.sglang.calls import Decode, Prefill
from msa_tiles.quant import FP8

log = logging.getLogger("sglang.msa_tiles")
kinds = notes.Kinds(log, "MiniMax M3")
Where = dict[str, Tensor]
shared: forwards.Shared[Where] = forwards.Shared()
_Call = TypeVar("_Call", Prefill, Decode)


def prefill(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Around ``minimax_sparse_prefill``."""
    return _around("prefill", Prefill, _prefill, original, given, named)


def decode(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Around ``minimax_sparse_decode``."""
    return _around("decode", Decode, _decode, original, given, named)


@functools.lru_cache(maxsize=1)
def _listen() -> None:
    """With the first call: whoever makes it has loaded SGLang's backend."""
    forwards.listen(log, shared.begin)


def _around(
    kind: str,
    arguments: Callable[..., _Call],
    ours: Callable[[_Call, Callable[..., Any]], Any],
    original: Callable[..., Any],
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    try:
        call = arguments(*given, **named)
    except TypeError as error:  # another SGLang's
        reason: str | None = str(error)
    else:
        reason = call.why_not() or ("SGLang is to be deterministic" if _deterministic() else None)
        if reason is None and kinds.takes(kind):
            _listen()
            _ahead(call.idx_q.dtype, call.topk, call.k_cache.dtype, call.q.shape[1] // call.k_cache.shape[1])
            try:
                with kinds.trying(kind), torch.no_grad():
                    result = ours(call, original)
                notes.once(log, logging.INFO, f"msa_tiles serves MiniMax M3's {kind} ({_said(call)})")
                return result
            except notes.Untaken:
                pass
    if reason is not None:
        notes.once(log, logging.INFO, f"msa_tiles leaves {kind} of MiniMax M3 to SGLang: {reason}")
    return original(*given, **named)


def _prefill(call: Prefill, original: Callable[..., Any]) -> Any:
    most = min(call.max_seqlen_k, call.req_to_token.shape[1])

    def make() -> Where:
        positions = servers.positions(call.cu_seqlens, call.prefix_lens.to(torch.int32), call.q.shape[0])
        return {**_keys(call, most), "q_positions": positions}

    where: dict[str, Any] = {
        "cu_seqlens_q": call.cu_seqlens,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": most,
        "block_size": call.block_size_k,
        **_shared(call, (call.cu_seqlens, call.prefix_lens), most, make),
    }
    ids = call.cached_topk_idx
    if ids is None and call.idx_k_cache.dtype != call.idx_q.dtype:
        ids = _selected_by(original, call)
    elif ids is None:
        ids = torch.empty(_shape_of_ids(call), dtype=torch.int32, device=call.q.device)
        ops.select_blocks(
            call.idx_q,
            pools.of_index(call.idx_k_cache, call.page_size),
            call.topk,
            **where,
            init_blocks=call.init_blocks,
            local_blocks=call.local_blocks,
            out=ids,
        )
    out = torch.empty_like(call.q)
    k, v, scales = _keys_and_values(call)
    ops.sparse_attention(call.q, k, v, ids, **where, **scales, out=out)
    return (None, out, ids) if call.return_topk_idx else (None, out)


def _decode(call: Decode, original: Callable[..., Any]) -> tuple[None, Tensor]:
    del original
    requests = call.q.shape[0]
    most = servers.rounded(call.max_seqlen, call.req_to_token.shape[1])
    where: dict[str, Any] = {
        "cu_seqlens_q": kept.multiples(1, requests + 1, call.q.device),
        "max_seqlen_q": 1,
        "max_seqlen_k": most,
        "block_size": call.block_size_k,
        **_shared(call, (), most, lambda: _keys(call, most)),
    }
    k, v, scales = _keys_and_values(call)
    out = torch.empty_like(call.q)
    if call.cached_topk_idx is not None:
        ops.sparse_decode(call.q, k, v, call.cached_topk_idx, **where, **scales, out=out)
        return None, out
    shape = _shape_of_ids(call)
    ids = call.topk_out
    if ids is None:
        ids = torch.empty(shape, dtype=torch.int32, device=call.q.device)
    elif ids.shape != shape:
        raise ValueError(f"topk_out: got shape {list(ids.shape)}; wanted {list(shape)}")
    ops.msa_decode(
        call.q,
        k,
        v,
        call.idx_q,
        pools.of_index(call.idx_k_cache, call.page_size),
        call.topk,
        **where,
        **scales,
        init_blocks=call.init_blocks,
        local_blocks=call.local_blocks,
        workspace=servers.workspace(call.q, call.idx_q, call.topk, k.shape[1], most, call.block_size_k),
        out=out,
        lse=torch.empty(call.q.shape[:2], dtype=torch.float32, device=call.q.device),
        block_indices=ids,
    )
    return None, out


def _keys(call: Prefill | Decode, most: int) -> Where:
    """Where the keys of requests are, and how many."""
    table = pools.table(call.req_to_token, call.slot_ids, most, call.page_size)
    return {"page_table": table, "seqused_k": call.seq_lens.to(torch.int32)}


def _shared(call: Prefill | Decode, further: tuple[Tensor, ...], most: int, make: Callable[[], Where]) -> Where:
    """The same for all layers of a forward."""
    tensors = (call.req_to_token, call.slot_ids, call.seq_lens, *further)
    key = (most, call.page_size, call.q.shape[0], kept.capturing(call.q.device))
    return shared.of(call.k_cache, tensors, key, make)


def _keys_and_values(call: Prefill | Decode) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """k and v in pages, and the scales that go with them: SGLang multiplies scores by q_scale whatever q is."""
    k, v = (pools.of_heads(pool, call.page_size) for pool in (call.k_cache, call.v_cache))
    scale = call.q.shape[-1] ** -0.5 if call.sm_scale is None else call.sm_scale
    scales: dict[str, Any] = {"softmax_scale": scale * (1.0 if call.q_scale is None else call.q_scale)}
    of_k, of_v = (1.0 if given is None else float(given) for given in (call.k_scale, call.v_scale))
    if k.dtype == FP8:
        scales["k_scale"], scales["v_scale"] = (kept.scalar(number, call.q.device) for number in (of_k, of_v))
    return k, v, scales


def _selected_by(original: Callable[..., Any], call: Prefill) -> Tensor:
    """The ids that SGLang's indexer selects, which widens keys of 8 bits for wider queries."""
    module = sys.modules[original.__module__]
    _, ids = module.flash_prefill_with_topk_index(
        q=call.idx_q,
        k_cache=call.idx_k_cache,
        v_cache=None,
        sink=None,
        req_to_token=call.req_to_token,
        slot_ids=call.slot_ids,
        cu_seqlens=call.cu_seqlens,
        seq_lens=call.seq_lens,
        prefix_lens=call.prefix_lens,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        block_size_q=call.block_size_q,
        block_size_k=call.block_size_k,
        topk=call.topk,
        init_blocks=call.init_blocks,
        local_blocks=call.local_blocks,
        sm_scale=call.idx_sm_scale,
        score_type=call.score_type,
        disable_index_value=True,
        cu_seqblocks_q=call.cu_seqblocks_q,
        max_seqblock_q=call.max_seqblock_q,
        all_seqblock_q=call.all_seqblock_q,
        page_size=call.page_size,
        q_scale=call.idx_q_scale,
        k_scale=call.idx_k_scale,
    )
    return ids


def _shape_of_ids(call: Prefill | Decode) -> torch.Size:
    return torch.Size((call.k_cache.shape[1], call.q.shape[0], call.topk))


def _said(call: Prefill | Decode) -> str:
    heads = f"{call.q.shape[1]} query heads, {call.k_cache.shape[1]} KV heads"
    return f"{heads}, {str(call.k_cache.dtype).removeprefix('torch.')}, pages of {call.page_size}"


@functools.lru_cache(maxsize=16)
def _ahead(index_dtype: torch.dtype, topk: int, dtype: torch.dtype, group: int) -> None:
    """With the first call, which SGLang makes while it starts, compile what prefill and decode need."""
    warm.ahead(log, (*warm.indexer(index_dtype, topk), *warm.attention(dtype == FP8, group)))


@functools.lru_cache(maxsize=1)
def _deterministic() -> bool:
    """Whether SGLang runs with --enable-deterministic-inference: settled before it serves anything."""
    try:
        context = importlib.import_module("sglang.srt.runtime_context")
        return bool(context.get_exec().deterministic.enable_deterministic_inference)
    except (ImportError, AttributeError, LookupError, RuntimeError):
        return False
