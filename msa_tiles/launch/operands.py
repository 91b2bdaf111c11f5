"""What the kernels of attention are chosen by, and how they take keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.call import formats, scales
from msa_tiles.call.attention import Attention, AttentionCall
from msa_tiles.call.step import Step
from msa_tiles.launch import lookup, packed
from msa_tiles.runtime import CallFacts


def facts(op: str, call: AttentionCall, **own_dims: int) -> CallFacts:
    """The facts of a call of attention; ``own_dims`` are compile-time dims that only this operator's kernels have."""
    operands, block_size = call.operands, call.block_size
    q, k, v, where = operands.q, operands.k, operands.v, operands.where
    return lookup.call_facts(
        op,
        where,
        q.device,
        lookup.precision(query=q, key_value=formats.stored(k, operands.k_scale)),
        {
            "head_dim": q.shape[2],
            "block_size": block_size,
            "group": q.shape[1] // k.shape[1],
            "pages_per_block": lookup.pages_per_block(where, k, block_size),
            **token_scales(k, operands.k_scale, operands.v_scale),
            **own_dims,
        },
        (q, k, v),
        lookup.broken_rules("sparse_attention", topk=operands.block_indices.shape[2])
        + lookup.oversized_table(where, block_size)
        + interleaved_keys(operands),
        queries=lookup.size_of(op, q.shape[0], call.batch_invariant),
        heads=q.shape[1],
        unaligned=has_odd_scales(operands),
    )


def interleaved_keys(operands: Attention | Step) -> tuple[str, ...]:
    """Why no kernel takes the scales of keys, if none does."""
    k, scale = operands.k, operands.k_scale
    if not formats.is_packed(k) or scale is None or scale.dim() == k.dim():
        return ()
    return ("scales of k are interleaved, wanted linear ones: kernels take those of v alone in either layout",)


def has_odd_scales(operands: Attention | Step) -> bool:
    """Whether scales of groups lie where a token's cannot be read at once."""
    pairs = ((operands.k, operands.k_scale), (operands.v, operands.v_scale))
    return any(formats.is_packed(x) and scale is not None and packed.is_odd(x, scale) for x, scale in pairs)


def longest_k(operands: Attention) -> int:
    """How many keys a request has at most."""
    k, where = operands.k, operands.where
    stored = k.shape[0] if where.page_table is None else where.page_table.shape[1] * k.shape[2]
    return stored if where.max_seqlen_k is None else min(stored, where.max_seqlen_k)


def is_empty(operands: Attention) -> bool:
    """Whether a size is 0, so that there is nothing to launch kernels for."""
    sizes = operands.q.numel(), operands.k.numel(), operands.block_indices.numel(), operands.where.num_requests
    return 0 in sizes or longest_k(operands) == 0


def token_scales(k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> dict[str, int]:
    """The kernels' variant of scaled keys and values: whether any of them has a scale for every row.

    Those of 4 bits have a scale for every group, in any case.
    """
    if not formats.is_quantised(k) or formats.is_packed(k):
        return {}
    return {"token_scales": int(scales.per_token(k_scale, k) or scales.per_token(v_scale, k))}


def keys_and_values(operands: Attention | Step) -> tuple[Tensor, ...]:
    """k and v as kernels take them: each followed by its scales, where they are quantised.

    Those of 4 bits come as [Tk, Hkv, D / group], or [pages, Hkv, page / 4, 4, D / group], whose strides tell their
    layout, followed by the global scale [Hkv] where the format has one. Others come as [Hkv], or all as k without its
    last dimension where one of them has a scale for every row. What holds one number for many is expanded, with strides
    of 0; nothing is copied.
    """
    k, v, k_scale, v_scale = operands.k, operands.v, operands.k_scale, operands.v_scale
    if k_scale is None:
        return k, v
    assert v_scale is not None
    if formats.is_packed(k):
        return (
            *packed.of_groups(k, k_scale, operands.k_global_scale),
            *packed.of_groups(v, v_scale, operands.v_global_scale),
        )
    shape = k.shape[:-1] if scales.per_token(k_scale, k) or scales.per_token(v_scale, k) else k.shape[1:2]
    return k, _expanded(k_scale, shape), v, _expanded(v_scale, shape)


def _expanded(scale: Tensor, shape: torch.Size) -> Tensor:
    if scale.dim() == 1 and len(shape) == 3:
        scale = scale[:, None]
    return scale.expand(shape)


def of_heads(keys: tuple[Tensor, ...], heads: slice) -> tuple[Tensor, ...]:
    """The same for some KV heads."""
    return tuple(part[heads] if part.dim() == 1 else part[:, heads] for part in keys)
