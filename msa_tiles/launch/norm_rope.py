"""How the kernel that norms, rotates and inserts is launched on CUDA: one launch, no allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import backends, formats
from msa_tiles.call.norm_rope import Buffers, NormRope, Written
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup
from msa_tiles.launch.caches import MOST_ROWS, MOST_SLOTS, paged, slot_words, with_scales
from msa_tiles.runtime import CallFacts

OP = "norm_rope_append"


@dataclass(frozen=True)
class Launch:
    """A kernel ready for calls of certain shapes, whose caches are as their caller has them.

    ``pools`` says which of the caches (keys and values, index) are slots without pages, ``computed`` which of their
    scales are written.
    """

    kernel: Any
    pools: tuple[bool, bool]
    computed: tuple[bool, bool]

    def __call__(
        self,
        call: NormRope,
        q_out: Tensor,
        idx_out: Tensor | None,
        caches: tuple[Any, Any, Any],
        scales: tuple[Any, Any, Any],
    ) -> tuple[Tensor | None, ...]:
        """Launch, and tell what was written; scales of the ``call`` are looked at where they are given."""
        kinds = (0, 0, 1)
        held = [paged(cache, -2, self.pools[kind]) for cache, kind in zip(caches, kinds, strict=True)]
        written = [
            paged(scale, -1, self.pools[kind]) if self.computed[kind] else None
            for scale, kind in zip(scales, kinds, strict=True)
        ]
        given = [None if self.computed[kind] else scale for scale, kind in zip(scales, kinds, strict=True)]
        call = call._replace(k_scale=given[0], v_scale=given[1], index_cache_scale=given[2])
        self.kernel(*arguments(call, Buffers(q_out, idx_out, *held, *written)))
        return (q_out, idx_out, *caches, *(scale for scale, of in zip(scales, written, strict=True) if of is not None))


def prepare(call: NormRope, written: Written, pools: tuple[bool, bool]) -> Launch | None:
    """What runs the kernel of a call; None on the reference, and where there is nothing to do."""
    if backends.runs_reference(call.backend, call.device) or not call.k.numel():
        return None
    kernel = lookup.find_kernel(_facts(call, written.buffers), call.backend)
    index = written.index_keys is not None and written.index_keys.written is not None
    return Launch(kernel, pools, (written.keys.written is not None, index))


def run(call: NormRope, *buffers: Any) -> None:
    """Norm, rotate and write."""
    into = Buffers(*buffers)
    kernel = lookup.find_kernel(_facts(call, into), call.backend)
    if call.k.numel():
        kernel(*arguments(call, into))


def arguments(call: NormRope, into: Buffers) -> tuple[Any, ...]:
    """What the kernel takes. The keys stand in for what is not there, and their scales for those of a plain index."""
    q_out, idx_out, k_cache, v_cache, index_cache, k_scales, v_scales, index_scales = into
    words = slot_words(call.slot_mapping)
    keys = with_scales(k_cache, call.k_scale, k_scales, words)
    values = with_scales(v_cache, call.v_scale, v_scales, words)
    heads, index, index_words = 0, keys, words
    idx_q, idx_k, out = call.k, call.k, call.k
    weights: tuple[Tensor | None, ...] = (call.k_weight, call.k_weight)
    if index_cache is not None and idx_out is not None and call.idx_k is not None:
        heads, idx_k, weights = idx_out.shape[1], call.idx_k[:, None], (call.idx_q_weight, call.idx_k_weight)
        idx_q = idx_out if call.idx_q is None else call.idx_q
        # Kernels tell e4m3 from bfloat16 by how long a row is.
        out = idx_out.view(torch.bfloat16)
        if call.index_slot_mapping is not None:
            index_words = slot_words(call.index_slot_mapping)
        scales = None if index_scales is None else index_scales[:, None]
        index = with_scales(index_cache[:, None], call.index_cache_scale, scales, words)
        index = (*index, *keys[len(index) :])
    return (
        *(q_out if call.q is None else call.q, call.k, call.v, idx_q, idx_k, q_out, out),
        *(call.q_weight, call.k_weight, *weights, call.cos_sin),
        *(slot_words(call.positions), words, index_words),
        *(*keys, *values, *index),
        *(heads, call.weight_offset, call.eps),
        *((int(call.index_cache_scale is not None),) if _scaled(k_cache) else ()),
    )


def _scaled(cache: Tensor) -> bool:
    """Whether each of its rows may have a scale."""
    return formats.is_quantised(cache) and not formats.is_packed(cache)


def _facts(call: NormRope, into: Buffers) -> CallFacts:
    q_out, idx_out, k_cache, v_cache, index_cache, k_scales, _, index_scales = into
    of_keys = formats.stored(k_cache, k_scales)
    of_index = of_keys if index_cache is None else formats.stored(index_cache, index_scales)
    variant = {
        "head_dim": call.k.shape[2],
        "float32_table": int(call.cos_sin.dtype == torch.float32),
        "bf16_index": int(of_index == "bfloat16" != of_keys),
    }
    refusals = list(lookup.broken_rules(OP, rotary_dim=call.cos_sin.shape[1], head_dim=call.k.shape[2]))
    if _scaled(k_cache):
        variant["token_scales"] = int(k_scales is not None)
        if index_cache is not None and _scaled(index_cache) and (index_scales is None) != (k_scales is None):
            came, wanted = ("given", "computed")[:: 1 if index_scales is None else -1]
            refusals.append(f"index_cache_scale is {came}, wanted one that is {wanted}, as k_scale is")
    if of_index not in (of_keys, "bfloat16"):
        refusals.append(f"index_cache stores {of_index}, wanted {of_keys}, as k_cache does, or bfloat16")
    if call.k.dtype != torch.bfloat16:
        refusals.append(f"rows are {call.k.dtype}, wanted torch.bfloat16")
    rows = (q_out, call.q, call.k, call.v, idx_out, call.idx_q, call.idx_k)
    weights = (call.q_weight, call.k_weight, call.idx_q_weight, call.idx_k_weight, call.cos_sin)
    caches = (k_cache, v_cache, index_cache)
    for name, cache in zip(("k_cache", "index_cache"), (k_cache, index_cache), strict=True):
        if cache is not None and cache.shape[0] * cache.shape[-2] >= MOST_SLOTS:
            refusals.append(f"{name} has {cache.shape[0] * cache.shape[-2]} slots, wanted fewer than 2**31")
    num_rows = sum(each.shape[0] * (each.shape[1] + 1) for each in (q_out, call.k, call.v, idx_out) if each is not None)
    if num_rows >= MOST_ROWS:
        refusals.append(f"{num_rows} rows of tokens and heads, wanted fewer than 2**30")
    return lookup.call_facts(
        OP,
        Where(),
        call.device,
        lookup.precision(key_value=of_keys),
        variant,
        tuple(each for each in (*rows, *weights, *caches) if each is not None),
        tuple(refusals),
        queries=call.k.shape[0],
    )
