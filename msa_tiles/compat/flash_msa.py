"""flash-msa's training functions by name, signature and layout, over ours.

    from msa_tiles.compat.flash_msa import flash_msa_func, flash_msa_func_warmup

After flash-msa 0.1.1. Served besides what it serves: sequences of any length (there multiples of 128), more blocks than
a sequence has, other head dims, the CPU. The loss that comes back is the divergence itself, where flash-msa returns 0
that has its gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.compat import arguments, heads_first

__all__ = ["flash_msa_func", "flash_msa_func_warmup", "flash_msa_warmup_func", "sparse_attention_warmup"]

BLOCK_SIZE = 128


class _Heads(NamedTuple):
    """Packed tensors of a call with as many proxy heads as KV heads, and how many proxy key heads they share."""

    idx_q: Tensor
    idx_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    repeats: int  # of each proxy head, where it serves several KV heads
    where: dict[str, Any]


@arguments.told(idx_q="q_proxy", idx_k="k_proxy", topk="top_k", softmax_scale="scale", index_scale="scale")
def flash_msa_func(
    q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Select with the proxy, attend to the selected blocks of 128 tokens, and the loss that trains the proxy.

    ``q_proxy`` [B, Hp, S, Di], ``k_proxy`` [B, Hpk, S, Di], ``q`` [B, Hq, S, D], ``k``, ``v`` [B, Hkv, S, D]; one
    dtype: bfloat16, float32 or float64. Hpk divides Hp; Hp and Hkv divide Hq and one of them the other; a head of a
    smaller number serves as many neighbours of the larger. ``top_k`` counts *tokens*, a multiple of 128; the block of
    the query is always among them. ``scale``, above 0, is that of both attentions.

    Returns ``(out, kl_loss)``: out [B, S, Hq * D], differentiable in q, k and v, and the mean over queries and proxy
    heads of ``KL(mean of the main heads || proxy)`` over the selected tokens, a float32 scalar, differentiable in
    q_proxy and k_proxy alone. Where a proxy head serves several KV heads, it is the mean of its divergences from each,
    which has the same gradient. Raises ``ValueError`` or ``TypeError`` for what does not fit.
    """
    if top_k < BLOCK_SIZE or top_k % BLOCK_SIZE:
        raise ValueError(f"top_k: got {top_k}; wanted tokens, a multiple of {BLOCK_SIZE} above 0")
    heads = _heads(q_proxy, k_proxy, q, k, v)
    chosen = [
        ops.select_blocks(idx_q.detach(), idx_k.detach(), top_k // BLOCK_SIZE, block_size=BLOCK_SIZE, **heads.where)
        for idx_q, idx_k in _by_key_head(heads)
    ]
    ids = torch.cat(chosen).repeat_interleave(heads.repeats, dim=0)
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "softmax_scale": float(scale), **heads.where}
    out, lse = ops.sparse_attention(heads.q, heads.k, heads.v, ids, return_lse=True, **options)
    return _shaped(out, q), _loss(heads, lse, ids, scale, options)


@arguments.told(idx_q="q_proxy", idx_k="k_proxy", topk="top_k", softmax_scale="scale", index_scale="scale")
def flash_msa_func_warmup(
    q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`flash_msa_func` for the first steps: dense causal attention, and the loss over the whole prefix.

    ``top_k`` has no effect. Tensors, results and errors are those of `flash_msa_func`.
    """
    heads = _heads(q_proxy, k_proxy, q, k, v)
    packed = heads_first.rows(k), heads_first.rows(v)
    out, lse = ops.dense_attention(heads.q, *packed, softmax_scale=float(scale), return_lse=True, **heads.where)
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "softmax_scale": float(scale), **heads.where}
    return _shaped(out, q), _loss(heads, lse, None, scale, options)


flash_msa_warmup_func = sparse_attention_warmup = flash_msa_func_warmup


def _heads(q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> _Heads:
    """Packed, and with K and V, or the proxy's queries, repeated until both have the same number of heads."""
    tensors = {"q_proxy": q_proxy, "k_proxy": k_proxy, "q": q, "k": k, "v": v}
    for name, each in tensors.items():
        if each.dim() != 4:
            raise ValueError(f"{name}: got shape {list(each.shape)}; wanted [B, heads, S, D]")
    for name, each in tensors.items():
        if (each.shape[0], each.shape[2]) != (q.shape[0], q.shape[2]):
            raise ValueError(
                f"{name}: got shape {list(each.shape)}; wanted B = {q.shape[0]} and S = {q.shape[2]} like q"
            )
    proxy, proxy_keys, main, stored = (tensors[name].shape[1] for name in ("q_proxy", "k_proxy", "q", "k"))
    fits = min(proxy, proxy_keys, stored) > 0 and max(proxy, stored) % min(proxy, stored) == 0
    if not fits or proxy % proxy_keys or main % max(proxy, stored):
        raise ValueError(
            f"q_proxy: got {proxy} heads beside {proxy_keys} of k_proxy, {main} of q and {stored} of k; wanted a "
            "multiple of k_proxy's, of which k's are a multiple or a divisor, and both divisors of q's"
        )
    batch, _, length, _ = q.shape
    where: dict[str, Any] = {}
    if batch > 1:
        starts = heads_first.starts(batch, length, q.device)
        where = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    times = max(1, proxy // stored)
    if times > 1:
        k, v = k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)
    rows = heads_first.rows
    return _Heads(rows(q_proxy), rows(k_proxy), rows(q), rows(k), rows(v), max(1, stored // proxy), where)


def _by_key_head(heads: _Heads) -> list[tuple[Tensor, Tensor]]:
    """Proxy queries [T, Hp / Hpk, Di] and their key [T, Di], for each head of proxy keys."""
    count = heads.idx_k.shape[1]
    return list(zip(heads.idx_q.chunk(count, dim=1), heads.idx_k.unbind(1), strict=True))


def _loss(heads: _Heads, lse: Tensor, ids: Tensor | None, scale: float, options: dict[str, Any]) -> Tensor:
    """The mean divergence; every head of proxy keys teaches as many heads as the others."""
    count = heads.idx_k.shape[1]
    queries, keys, norms = heads.q.chunk(count, dim=1), heads.k.chunk(count, dim=1), lse.chunk(count, dim=1)
    chosen = [None] * count if ids is None else ids.chunk(count)
    losses = [
        ops.index_kl(
            queries[head], keys[head], norms[head], idx_q.repeat_interleave(heads.repeats, dim=1), idx_k, chosen[head],
            index_scale=float(scale), **options,
        )
        for head, (idx_q, idx_k) in enumerate(_by_key_head(heads))
    ]  # fmt: skip
    return torch.stack(losses).mean()


def _shaped(out: Tensor, q: Tensor) -> Tensor:
    batch, _, length, _ = q.shape
    return out.reshape(batch, length, -1)
