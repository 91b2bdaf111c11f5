"""Calls that write rows into paged caches, or read them all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import backends, formats, scales, validate
from msa_tiles.quant import FP8, QuantizedTensor

ROWS = (torch.bfloat16, torch.float32)
# What a cache stores by the name of its format; bytes may stand for it where the format is named.
STORED = {"bf16": torch.bfloat16, "e4m3": FP8}


class Rows(NamedTuple):
    """A validated call of append_kv, but for what it writes: k, v [T, Hkv, D], and scales that are given.

    The given scales of 4-bit caches are their global ones.
    """

    k: Tensor
    v: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    backend: str

    @property
    def device(self) -> torch.device:
        return self.k.device


class IndexRows(NamedTuple):
    """A validated call of append_index, but for what it writes: idx_k [T, Di], and a scale that is given, like that."""

    idx_k: Tensor
    slot_mapping: Tensor
    scale: Tensor | None
    backend: str

    @property
    def device(self) -> torch.device:
        return self.idx_k.device


class Whole(NamedTuple):
    """A validated call of dequantize_kv: k, v [Tk, Hkv, D], or [pages, Hkv, page, D] with a table, and their scales."""

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    seqused_k: Tensor | None
    k_scale: Tensor
    v_scale: Tensor
    k_global_scale: Tensor | None
    v_global_scale: Tensor | None
    backend: str

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what is written."""
        rows = self.k.shape[0] if self.page_table is None else self.page_table.numel() * self.k.shape[2]
        return rows, self.k.shape[1], formats.width(self.k)


class Cache(NamedTuple):
    """A cache in pages, [pages, Hkv, page, D] or [pages, page, Di], and its scales: given ones, and ones to write."""

    data: Tensor
    given: Tensor | None
    written: Tensor | None


def rows_of(name: str, value: Any, dims: str) -> Tensor:
    """Rows that are not quantised yet."""
    validate.tensor(name, value, dims)
    if value.dtype not in ROWS:
        validate.refuse_type(name, f"dtype {value.dtype}", " or ".join(map(str, ROWS)))
    validate.unit_last_stride(name, value)
    return value


def cache_of(
    name: str, value: Any, scale: Any, scale_name: str, format: str | None, like: Tensor, like_name: str
) -> Cache:
    """Check a cache for rows ``like`` [T, …, D], and its scale.

    It is [pages, …, page, D], or [slots, …, D], which becomes pages of one slot.
    """
    heads = like.dim() == 3
    paged, pool = ("[pages, Hkv, page, D]", "[slots, Hkv, D]") if heads else ("[pages, page, Di]", "[slots, Di]")
    quantised = value if isinstance(value, QuantizedTensor) else None
    global_scale = None
    if quantised is not None:
        if format not in (None, quantised.format):
            validate.refuse_type(name, f"format {quantised.format!r}", f"{format!r}, as format says")
        value, scale, global_scale = scales.unpacked_keys(name, value, scale, scale_name)
    if not isinstance(value, Tensor):
        validate.refuse_type(name, type(value).__name__, f"a tensor {paged} or {pool}, or a QuantizedTensor")
    if value.dim() not in (like.dim(), like.dim() + 1):
        validate.refuse(name, f"shape {validate.shape_text(value.shape)}", f"{paged} or {pool}")
    slots_alone = value.dim() == like.dim()
    packed = quantised is not None and formats.is_packed(value)
    if not packed:
        value = _stored(name, value, format)
    if formats.width(value) != like.shape[-1]:
        validate.refuse(name, f"{formats.width(value)} values in a row", f"{like.shape[-1]} like {like_name}")
    wanted = [None, *like.shape[1:-1], *([] if slots_alone else [None]), value.shape[-1]]
    validate.destination(name, value, wanted, pool if slots_alone else paged, value.dtype, like, like_name)
    data = value.unsqueeze(-2) if slots_alone else value
    if packed:
        validate.written(f"the scales of {name}", scale)
        if slots_alone and scale.dim() > value.dim():
            validate.refuse(f"the scales of {name}", "the layout 'interleaved' for slots", "'linear', or pages")
        return Cache(data, global_scale, scale.unsqueeze(-2) if slots_alone else scale)
    if value.dtype != FP8:
        validate.scale(scale_name, scale)
        return Cache(data, None, None)
    own = tuple(value.shape[:-1])
    shapes: dict[str, tuple[int, ...]] = {"[]": ()}
    if heads:
        shapes["[Hkv]"] = (like.shape[1],)
    shapes[
        "[slots, Hkv]"
        if heads and slots_alone
        else "[slots]"
        if slots_alone
        else paged.replace(", Di", "").replace(", D", "")
    ] = own
    scales.check_scale(scale_name, scale, value, name, shapes, required=heads)
    if scale is None or tuple(scale.shape) != own:
        return Cache(data, scale, None)
    validate.written(scale_name, scale)
    return Cache(data, None, scale.unsqueeze(-1) if slots_alone else scale)


def _stored(name: str, value: Tensor, format: str | None) -> Tensor:
    """A cache in the dtype of its format."""
    if format is None:
        if value.dtype in (*validate.FLOATS, FP8):
            return value
        wanted = f"{', '.join(map(str, validate.FLOATS))} or {FP8}; bytes with the format that they are of"
        validate.refuse_type(name, f"dtype {value.dtype} without a format", wanted)
    validate.one_of("format", format, tuple(STORED))
    stored = STORED[format]
    if value.dtype == torch.uint8 and stored.itemsize == 1:
        return value.view(stored)
    if value.dtype != stored:
        further = " or torch.uint8" if stored.itemsize == 1 else ""
        validate.refuse_type(name, f"dtype {value.dtype}", f"{stored}{further} for format={format!r}")
    return value


def slots_of(slots: Any, like: Tensor, like_name: str, name: str = "slot_mapping") -> Tensor:
    """Check slots, or positions: int64 or int32 [T]."""
    validate.tensor(name, slots, "[T]")
    if slots.dtype not in (torch.int64, torch.int32):
        validate.refuse_type(name, f"dtype {slots.dtype}", "torch.int64 or torch.int32")
    if slots.shape[0] != like.shape[0]:
        wanted = f"[T] = [{like.shape[0]}] like {like_name}"
        validate.refuse(name, f"shape {validate.shape_text(slots.shape)}", wanted)
    validate.same_device(name, slots, like, like_name)
    return slots


def caches_of(
    k: Tensor, v: Tensor, k_cache: Any, v_cache: Any, format: str | None, k_scale: Any, v_scale: Any
) -> tuple[Cache, Cache]:
    """Check the caches of keys and values, which are alike, and their scales."""
    keys = cache_of("k_cache", k_cache, k_scale, "k_scale", format, k, "k")
    values = cache_of("v_cache", v_cache, v_scale, "v_scale", format, v, "v")
    if values.data.dtype != keys.data.dtype:
        validate.refuse_type("v_cache", f"dtype {values.data.dtype}", f"{keys.data.dtype} like k_cache")
    if values.data.shape != keys.data.shape:
        wanted = f"{validate.shape_text(keys.data.shape)} like k_cache"
        validate.refuse("v_cache", f"shape {validate.shape_text(values.data.shape)}", wanted)
    if (came := formats.stored(values.data, values.written)) != (wanted := formats.stored(keys.data, keys.written)):
        validate.refuse_type("v_cache", f"format {came!r}", f"{wanted!r} like k_cache")
    if (keys.written is None) != (values.written is None):
        came = "given scales" if values.written is None else "scales to be computed"
        validate.refuse("v_scale", came, "the same kind as k_scale: both given, or one for every token of both caches")
    return keys, values


def _values_like_keys(v: Tensor, k: Tensor) -> None:
    """Check that values are as their keys."""
    if v.dtype != k.dtype:
        validate.refuse_type("v", f"dtype {v.dtype}", f"{k.dtype} like k")
    if v.shape != k.shape:
        validate.refuse("v", f"shape {validate.shape_text(v.shape)}", f"{validate.shape_text(k.shape)} like k")
    validate.same_device("v", v, k, "k")


def append_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    format: str | None,
    k_scale: Any,
    v_scale: Any,
    backend: str,
) -> tuple[Rows, Cache, Cache]:
    """Check everything."""
    rows_of("k", k, "[T, Hkv, D]")
    rows_of("v", v, "[T, Hkv, D]")
    _values_like_keys(v, k)
    if 0 in k.shape[1:]:
        validate.refuse("k", f"shape {validate.shape_text(k.shape)}", "at least one head and a head dim of at least 1")
    slots_of(slot_mapping, k, "k")
    backends.check(backend, k.device)
    keys, values = caches_of(k, v, k_cache, v_cache, format, k_scale, v_scale)
    return Rows(k, v, slot_mapping, keys.given, values.given, backend), keys, values


def append_index(
    idx_k: Any, cache: Any, slot_mapping: Any, *, format: str | None, scale: Any, backend: str
) -> tuple[IndexRows, Cache]:
    """Check everything."""
    rows_of("idx_k", idx_k, "[T, Di]")
    if idx_k.shape[1] == 0:
        validate.refuse("idx_k", f"shape {validate.shape_text(idx_k.shape)}", "an index dim of at least 1")
    slots_of(slot_mapping, idx_k, "idx_k")
    backends.check(backend, idx_k.device)
    held = cache_of("cache", cache, scale, "scale", format, idx_k, "idx_k")
    return IndexRows(idx_k, slot_mapping, held.given, backend), held


def dequantize_kv(
    k: Any, v: Any, *, page_table: Any, seqused_k: Any, k_scale: Any, v_scale: Any, backend: str
) -> Whole:
    """Check everything."""
    k, k_scale, k_global = scales.unpacked_keys("k", k, k_scale, "k_scale")
    v, v_scale, v_global = scales.unpacked_keys("v", v, v_scale, "v_scale")
    paged = page_table is not None
    for name, value in (("k", k), ("v", v)):
        dims = validate.keys_dims(name, value, "[Tk, Hkv, D]", "[pages, Hkv, page, D]", paged)
        validate.tensor(name, value, dims)
        if not formats.is_quantised(value):
            validate.refuse_type(name, f"dtype {value.dtype}", f"{FP8}, or a QuantizedTensor")
        validate.unit_last_stride(name, value)
    _values_like_keys(v, k)
    if 0 in k.shape[1:]:
        wanted = "at least one head, a head dim and pages of at least 1"
        validate.refuse("k", f"shape {validate.shape_text(k.shape)}", wanted)
    scales.of_keys("k_scale", k_scale, k, "k", paged)
    scales.of_keys("v_scale", v_scale, v, "v", paged)
    if (came := formats.stored(v, v_scale)) != (wanted := formats.stored(k, k_scale)):
        validate.refuse_type("v", f"format {came!r}", f"{wanted!r} like k")
    if paged:
        table = validate.int32("page_table", page_table, [None, None], "[B, max_pages]", k, "k")
        validate.unit_last_stride("page_table", table)
        if seqused_k is None:
            validate.refuse("seqused_k", "None", "int32 [B] with page_table")
        validate.int32("seqused_k", seqused_k, [table.shape[0]], "[B]", k, "k")
        validate.dense("seqused_k", seqused_k)
    elif seqused_k is not None:
        validate.refuse("seqused_k", "a tensor", "None without page_table: all flat rows are written")
    backends.check(backend, k.device)
    return Whole(k, v, page_table, seqused_k, k_scale, v_scale, k_global, v_global, backend)
