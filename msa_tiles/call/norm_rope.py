"""Calls that norm and rotate rows on their way to attention and into caches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles.call import backends, validate
from msa_tiles.call.caches import Cache, cache_of, caches_of, rows_of, slots_of
from msa_tiles.quant import FP8, QuantizedTensor

TABLES = (torch.bfloat16, torch.float32)
# What comes together: an index branch has all of them.
INDEX = ("idx_q", "idx_k", "idx_q_weight", "idx_k_weight", "index_cache")
ALONE = ("idx_out", "index_slot_mapping", "index_cache_scale")


class NormRope(NamedTuple):
    """A validated call of norm_rope_append, but for what it writes, and scales that are given.

    q is None where the queries lie in q_out already, idx_q where they lie in idx_out. Without an index branch
    everything of it is None.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    idx_q: Tensor | None
    idx_k: Tensor | None
    q_weight: Tensor
    k_weight: Tensor
    idx_q_weight: Tensor | None
    idx_k_weight: Tensor | None
    cos_sin: Tensor
    positions: Tensor
    slot_mapping: Tensor
    index_slot_mapping: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    index_cache_scale: Tensor | None
    eps: float
    weight_offset: float
    backend: str

    @property
    def device(self) -> torch.device:
        return self.k.device


class Buffers(NamedTuple):
    """What a call writes, in the order of the operator's schema."""

    q_out: Tensor
    idx_out: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    index_cache: Tensor | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    index_scales: Tensor | None


class Written(NamedTuple):
    """What a call writes: queries in place or elsewhere, and caches."""

    q_out: Tensor
    idx_out: Tensor | None
    keys: Cache
    values: Cache
    index_keys: Cache | None

    @property
    def buffers(self) -> Buffers:
        index, scales = (None, None) if self.index_keys is None else (self.index_keys.data, self.index_keys.written)
        caches = (self.keys.data, self.values.data, index)
        return Buffers(self.q_out, self.idx_out, *caches, self.keys.written, self.values.written, scales)


def norm_rope_append(
    q: Any,
    k: Any,
    v: Any,
    q_weight: Any,
    k_weight: Any,
    cos_sin: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    eps: Any,
    weight_offset: Any,
    q_out: Any,
    format: str | None,
    k_scale: Any,
    v_scale: Any,
    backend: str,
    **index: Any,
) -> tuple[NormRope, Written]:
    """Check everything. ``index`` holds INDEX and ALONE."""
    rows_of("q", q, "[T, Hq, D]")
    for name, value, dims in (("k", k, "[T, Hkv, D]"), ("v", v, "[T, Hkv, D]")):
        _rows_like(name, value, dims, q)
    if v.shape != k.shape:
        validate.refuse("v", f"shape {validate.shape_text(v.shape)}", f"{validate.shape_text(k.shape)} like k")
    for name, value in (("q", q), ("k", k)):
        if 0 in value.shape[1:]:
            wanted = "at least one head and a head dim of at least 1"
            validate.refuse(name, f"shape {validate.shape_text(value.shape)}", wanted)
    _weight("q_weight", q_weight, q)
    _weight("k_weight", k_weight, q)
    _table(cos_sin, q)
    slots_of(positions, q, "q", "positions")
    slots_of(slot_mapping, q, "q")
    backends.check(backend, q.device)
    eps, weight_offset = _number("eps", eps), _number("weight_offset", weight_offset)
    if not (eps > 0 and math.isfinite(eps)):
        validate.refuse("eps", repr(eps), "a finite number above 0")
    if weight_offset not in (0.0, 1.0):
        validate.refuse("weight_offset", repr(weight_offset), "0 or 1, what is added to each weight")
    q, q_out = _queries("q", q, "q_out", q_out, (q.dtype,))
    keys, values = caches_of(k, v, k_cache, v_cache, format, k_scale, v_scale)
    idx, idx_out, held = _index(format=format, like=k, **index)
    call = NormRope(
        q=q,
        k=k,
        v=v,
        idx_q=idx["idx_q"],
        idx_k=idx["idx_k"],
        q_weight=q_weight,
        k_weight=k_weight,
        idx_q_weight=idx["idx_q_weight"],
        idx_k_weight=idx["idx_k_weight"],
        cos_sin=cos_sin,
        positions=positions,
        slot_mapping=slot_mapping,
        index_slot_mapping=idx["index_slot_mapping"],
        k_scale=keys.given,
        v_scale=values.given,
        index_cache_scale=None if held is None else held.given,
        eps=eps,
        weight_offset=weight_offset,
        backend=backend,
    )
    return call, Written(q_out, idx_out, keys, values, held)


def index_format(cache: Any, format: str | None) -> str | None:
    """The format that a call's ``format`` gives to its index cache: only bytes need one."""
    bare = isinstance(cache, Tensor) and cache.dtype != torch.uint8
    return None if bare or isinstance(cache, QuantizedTensor) else format


def _index(*, format: str | None, like: Tensor, **given: Any) -> tuple[dict[str, Any], Tensor | None, Cache | None]:
    """The index branch: what of it is read, where its queries go, and its cache."""
    if all(given[name] is None for name in INDEX):
        for name in ALONE:
            if given[name] is not None:
                validate.refuse(name, f"a {type(given[name]).__name__}", f"None without {', '.join(INDEX)}")
        return given, None, None
    for name in INDEX:
        if given[name] is None:
            wanted = f"a tensor, or None for each of {', '.join(INDEX)}"
            validate.refuse(name, "None", wanted)
    idx_q, idx_k = given["idx_q"], given["idx_k"]
    _rows_like("idx_q", idx_q, "[T, Hi, D]", like, "k")
    if idx_q.shape[1] == 0:
        validate.refuse("idx_q", f"shape {validate.shape_text(idx_q.shape)}", "at least one head")
    _rows_like("idx_k", idx_k, "[T, D]", like, "k")
    for name in ("idx_q_weight", "idx_k_weight"):
        _weight(name, given[name], like)
    if given["index_slot_mapping"] is not None:
        slots_of(given["index_slot_mapping"], idx_k, "idx_k", "index_slot_mapping")
    cache = given["index_cache"]
    scale, of = given["index_cache_scale"], index_format(cache, format)
    held = cache_of("index_cache", cache, scale, "index_cache_scale", of, idx_k, "idx_k")
    queries, idx_out = _queries("idx_q", idx_q, "idx_out", given["idx_out"], (idx_q.dtype, FP8))
    return {**given, "idx_q": queries}, idx_out, held


def _queries(
    name: str, rows: Tensor, out_name: str, out: Any, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor | None, Tensor]:
    """What is read, None for queries in place, and what is written."""
    if out is None or out is rows:
        return None, validate.written(name, rows)
    dims = "[T, Hq, D]" if name == "q" else "[T, Hi, D]"
    if isinstance(out, Tensor) and out.dtype not in dtypes:
        validate.refuse_type(out_name, f"dtype {out.dtype}", " or ".join(map(str, dtypes)))
    return rows, validate.destination(
        out_name, out, rows.shape, dims, out.dtype if isinstance(out, Tensor) else rows.dtype, rows, name
    )


def _rows_like(name: str, value: Any, dims: str, like: Tensor, like_name: str = "q") -> None:
    """Rows of the same tokens, dtype and head dim as those of ``like``."""
    rows_of(name, value, dims)
    if value.dtype != like.dtype:
        validate.refuse_type(name, f"dtype {value.dtype}", f"{like.dtype} like {like_name}")
    if (value.shape[0], value.shape[-1]) != (like.shape[0], like.shape[-1]):
        wanted = f"{dims} with T = {like.shape[0]} and D = {like.shape[-1]} like {like_name}"
        validate.refuse(name, f"shape {validate.shape_text(value.shape)}", wanted)
    validate.same_device(name, value, like, like_name)


def _weight(name: str, value: Any, like: Tensor) -> None:
    validate.tensor(name, value, "[D]")
    if value.dtype != like.dtype:
        validate.refuse_type(name, f"dtype {value.dtype}", f"{like.dtype} like q")
    if value.shape[0] != like.shape[-1]:
        validate.refuse(name, f"shape {validate.shape_text(value.shape)}", f"[D] = [{like.shape[-1]}] like q")
    validate.same_device(name, value, like, "q")
    validate.unit_last_stride(name, value)


def _table(cos_sin: Any, like: Tensor) -> None:
    validate.tensor("cos_sin", cos_sin, "[positions, rotary_dim]")
    if cos_sin.dtype not in TABLES:
        validate.refuse_type("cos_sin", f"dtype {cos_sin.dtype}", " or ".join(map(str, TABLES)))
    width, most = cos_sin.shape[1], like.shape[-1]
    if width % 2 or not 2 <= width <= most:
        wanted = f"[positions, rotary_dim] with an even rotary_dim of 2 to D = {most}"
        validate.refuse("cos_sin", f"shape {validate.shape_text(cos_sin.shape)}", wanted)
    validate.same_device("cos_sin", cos_sin, like, "q")
    validate.unit_last_stride("cos_sin", cos_sin)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        validate.refuse_type(name, type(value).__name__, "a number")
    return float(value)
