"""How the kernels that write rows into caches are launched on CUDA: one launch, no allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles.call import backends, formats
from msa_tiles.call.caches import Cache, IndexRows, Rows
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, packed
from msa_tiles.quant import FP8
from msa_tiles.runtime import CallFacts

# Kernels count slots, and rows of tokens and heads, in int32; the last thread block's rows go past the last row.
MOST_SLOTS, MOST_ROWS = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Launch:
    """A kernel ready to write rows of certain shapes into caches as their caller has them.

    ``slots_alone`` says that these are pools, ``computed`` that their scales are written, ``index`` that rows have no
    heads.
    """

    kernel: Any
    slots_alone: bool
    computed: bool
    index: bool

    def __call__(
        self, rows: Sequence[Tensor], caches: Sequence[Any], slot_mapping: Tensor, scales: Sequence[Any]
    ) -> None:
        held = [paged(cache, -2, self.slots_alone) for cache in caches]
        written = [paged(scale, -1, self.slots_alone) if self.computed else None for scale in scales]
        given = [None if self.computed else scale for scale in scales]
        if self.index:
            self.kernel(*index_arguments(IndexRows(rows[0], slot_mapping, given[0], ""), held[0], written[0]))
        else:
            self.kernel(*kv_arguments(Rows(rows[0], rows[1], slot_mapping, given[0], given[1], ""), *held, *written))

    def written(self, caches: Sequence[Any], scales: Sequence[Any]) -> tuple[Any, ...]:
        """What of a call's tensors was written."""
        return (*caches, *scales) if self.computed else tuple(caches)


def paged(value: Any, dim: int, slots_alone: bool) -> Any:
    """A caller's cache or scales as kernels take them, of pools as pages of one slot."""
    if value is None:
        return None
    if value.dtype == torch.uint8:
        value = value.view(FP8)
    return value.unsqueeze(dim) if slots_alone else value


def prepare_kv(call: Rows, keys: Cache, values: Cache, slots_alone: bool) -> Launch | None:
    """What runs the kernel of a call; None on the reference, and where there is nothing to do."""
    if backends.runs_reference(call.backend, call.device) or not (call.k.numel() and keys.data.numel()):
        return None
    tensors = call.k, call.v, keys.data, values.data
    stored = formats.stored(keys.data, keys.written)
    facts = _facts("append_kv", call.k, tensors, keys.data, keys.written, key_value=stored)
    return Launch(lookup.find_kernel(facts, call.backend), slots_alone, keys.written is not None, False)


def prepare_index(call: IndexRows, held: Cache, slots_alone: bool) -> Launch | None:
    """The same for index keys."""
    if backends.runs_reference(call.backend, call.device) or not (call.idx_k.numel() and held.data.numel()):
        return None
    idx_k, cache = call.idx_k[:, None], held.data[:, None]
    facts = _facts(
        "append_index", idx_k, (idx_k, cache), cache, held.written, index_key=formats.stored(cache, held.written)
    )
    return Launch(lookup.find_kernel(facts, call.backend), slots_alone, held.written is not None, True)


def run_kv(
    call: Rows, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None = None, v_scales: Tensor | None = None
) -> None:
    """Write keys and values."""
    tensors = call.k, call.v, k_cache, v_cache
    facts = _facts("append_kv", call.k, tensors, k_cache, k_scales, key_value=formats.stored(k_cache, k_scales))
    kernel = lookup.find_kernel(facts, call.backend)
    if call.k.numel() and k_cache.numel():
        kernel(*kv_arguments(call, k_cache, v_cache, k_scales, v_scales))


def kv_arguments(
    call: Rows, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> tuple[Tensor, ...]:
    """What the kernel takes."""
    words = slot_words(call.slot_mapping)
    keys = with_scales(k_cache, call.k_scale, k_scales, words)
    return call.k, call.v, words, *keys, *with_scales(v_cache, call.v_scale, v_scales, words)


def run_index(call: IndexRows, cache: Tensor, scales: Tensor | None = None) -> None:
    """Write index keys."""
    idx_k, cache = call.idx_k[:, None], cache[:, None]
    facts = _facts("append_index", idx_k, (idx_k, cache), cache, scales, index_key=formats.stored(cache, scales))
    kernel = lookup.find_kernel(facts, call.backend)
    if idx_k.numel() and cache.numel():
        kernel(*index_arguments(call, cache[:, 0], scales))


def index_arguments(call: IndexRows, cache: Tensor, scales: Tensor | None) -> tuple[Tensor | int, ...]:
    """What the kernel takes: keys and caches of one head."""
    words = slot_words(call.slot_mapping)
    stored = with_scales(cache[:, None], call.scale, None if scales is None else scales[:, None], words)
    if not formats.is_quantised(cache) or formats.is_packed(cache):
        return call.idx_k[:, None], words, *stored
    return call.idx_k[:, None], words, *stored, int(call.scale is not None)


def slot_words(slot_mapping: Tensor) -> Tensor:
    """Slots [T] as kernels take them, int32 [T, words]: the lower word, and of int64 the upper one behind it."""
    return slot_mapping[:, None].view(torch.int32)


def _facts(
    op: str, rows: Tensor, wide: tuple[Tensor, ...], cache: Tensor, written: Tensor | None, **stored: str
) -> CallFacts:
    num_heads, head_dim = rows.shape[1:]
    variant = {"head_dim": head_dim, "float32_rows": int(rows.dtype == torch.float32)}
    if formats.is_quantised(cache) and not formats.is_packed(cache):
        variant["token_scales"] = int(written is not None)
    refusals = []
    num_slots, num_rows = cache.shape[0] * cache.shape[2], rows.shape[0] * num_heads
    if num_slots >= MOST_SLOTS:
        refusals.append(f"the cache has {num_slots} slots, wanted fewer than 2**31")
    if num_rows >= MOST_ROWS:
        refusals.append(f"{num_rows} rows of tokens and heads, wanted fewer than 2**30")
    return lookup.call_facts(
        op,
        Where(),
        rows.device,
        lookup.precision(**stored),
        variant,
        wide,
        tuple(refusals),
        queries=rows.shape[0],
    )


def with_scales(cache: Tensor, given: Tensor | None, written: Tensor | None, unread: Tensor) -> tuple[Tensor, ...]:
    """A cache, and behind a quantised one its scales: [heads] given, or [pages, heads, page] to write.

    Of 4 bits those of groups are written, and global ones given.

    ``unread``, int32 of any shape but empty, stands in for what is not there.
    """
    if not formats.is_quantised(cache):
        return (cache,)
    if formats.is_packed(cache):
        assert written is not None
        return packed.to_write(cache, written, given)
    if written is not None:
        return cache, written
    if given is None:
        given = unread.view(torch.float32)[0, 0]
    return cache, given.expand(cache.shape[1])
