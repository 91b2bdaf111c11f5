"""Checks of the operators that write into caches: bit for bit, and nothing beside the slots that were asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.call.workspace import ALIGNMENT
from msa_tiles.quant import FP8, GROUPS, PACKED, QuantizedTensor
from msa_tiles.quant.layouts import TOKENS, shape_in
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case
from msa_tiles.verify.inputs import Source, spread

NAN_CODES = {FP8: 0x7F, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GAP = 16  # elements between the rows of one cache and those of the next
BEYOND = 1 << 32  # what a slot of 64 bits has more than its lower word says


class Caches(NamedTuple):
    """Caches [pages, heads, page, D] of one pool, their scales [pages, heads, page] or none, and the pool."""

    views: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    pool: Tensor

    def copied(self) -> Caches:
        """The same views of a copy."""
        pool = self.pool.clone()
        views = tuple(pool.as_strided(v.shape, v.stride(), v.storage_offset()) for v in self.views)
        return Caches(views, tuple(_copied(scale) for scale in self.scales), pool)

    def codes(self) -> tuple[Tensor, ...]:
        """The bits of the caches, of their scales, and of the whole pool; all NaN alike."""
        return (*(bits(view) for view in self.views), *(bits(scale) for scale in self.scales), bits(self.pool))


class PackedCaches(NamedTuple):
    """Caches of 4 bits, [pages, heads, page, D / 2], and the scales of their groups: parts of a pool of bytes."""

    made: tuple[QuantizedTensor, ...]
    pool: Tensor

    @property
    def views(self) -> tuple[Tensor, ...]:
        return tuple(cache.data for cache in self.made)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        return tuple(cache.scale for cache in self.made)

    def copied(self) -> PackedCaches:
        """The same parts of a copy."""
        pool = self.pool.clone()

        def there(part: Tensor) -> Tensor:
            return pool.as_strided(part.shape, part.stride(), part.storage_offset())

        made = [
            dataclasses.replace(
                cache, data=there(cache.data), scale=there(cache.scale.view(torch.uint8)).view(cache.scale.dtype)
            )
            for cache in self.made
        ]
        return PackedCaches(tuple(made), pool)

    def codes(self) -> tuple[Tensor, ...]:
        """The bytes of the caches, of their scales, and of the whole pool."""
        return (*self.views, *(scale.view(torch.uint8) for scale in self.scales), self.pool)


def _copied(scale: Tensor) -> Tensor:
    return torch.empty_strided(scale.shape, scale.stride(), dtype=scale.dtype, device=scale.device).copy_(scale)


def bits(values: Tensor) -> Tensor:
    """The bits of float values, all NaN alike."""
    kind = INTEGERS[values.dtype.itemsize]
    wide = values.float()
    return values.contiguous().view(kind).masked_fill(wide.isnan(), NAN_CODES[values.dtype])


def wild_rows(source: Source, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, some with NaN, infinities and subnormal numbers in them, some of random bits.

    Others hold quarters, many of which lie in the middle between two numbers of 4 bits.
    """
    rows = shape[:-1]
    values = source.values(shape, torch.float32) * 2.0 ** source.whole(-24, 24, rows)[..., None]
    some = source.chance(0.3, rows)[..., None]
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40):
        values = values.masked_fill(some & source.chance(0.02, shape), value)
    quarters = source.whole(-24, 25, shape) / 4 * 2.0 ** source.whole(-3, 4, rows)[..., None]
    values = torch.where(source.chance(0.2, rows)[..., None], quarters, values)
    values = values.masked_fill(source.chance(0.05, rows)[..., None], 0.0).to(dtype)
    kind = INTEGERS[dtype.itemsize]
    half = 1 << 8 * dtype.itemsize - 1
    random = source.whole(-half, half, shape).to(kind).view(dtype)
    return torch.where(source.chance(0.2, rows)[..., None], random, values)


def critical_rows(source: Source, rows: Tensor, global_scale: Tensor | None) -> Tensor:
    """Some rows become ones whose groups' scales are next to the middle of two numbers of e4m3, or in it.

    A quotient of them that is rounded to float32 before it is rounded to e4m3 ends on the wrong side.
    """
    codes = torch.arange(8, 127, dtype=torch.uint8, device=rows.device).view(FP8).double()
    middles = ((codes[1:] + codes[:-1]) / 2)[source.whole(0, 118, (*rows.shape[:-1], 1))]
    outer = 1.0 if global_scale is None else global_scale.double()
    largest = (6 * outer * middles).to(rows.dtype)
    return torch.where(source.chance(0.2, rows.shape[:-1])[..., None], largest.expand(rows.shape), rows)


def wild_slots(source: Source, total: int, num_slots: int, wide: bool) -> Tensor:
    """Distinct slots in random order, some of them negative and some outside of the cache; int64 if `wide`."""
    order = torch.rand(num_slots, generator=source._generator, device=source.device).argsort()[:total]
    slots = order.masked_fill(source.chance(0.1, order.shape), -1)
    slots = torch.where(source.chance(0.05, slots.shape), num_slots + slots.clamp_min(0), slots)
    slots = slots.masked_fill(source.chance(0.03, slots.shape), torch.iinfo(torch.int32).min)
    if not wide:
        return slots.to(torch.int32)
    slots = torch.where(source.chance(0.05, slots.shape), slots + BEYOND, slots)
    return torch.where(source.chance(0.03, slots.shape), slots - BEYOND, slots)


def wild_caches(
    source: Source, number: int, dims: Mapping[str, int], heads: int, dtype: torch.dtype, strided: bool, computed: bool
) -> Caches:
    """Caches that hold random bits: token-major beside each other with gaps in between, or each of its own."""
    pages, page, dim = dims["num_pages"], dims["page_size"], dims["head_dim"]
    shape = (pages, page, heads, number * dim + GAP) if strided else (number, pages, heads, page, dim)
    scales = []
    for _ in range(number if computed else 0):
        drawn = source.scales((pages, page, heads))
        scales.append(drawn.transpose(1, 2) if strided else drawn.transpose(1, 2).contiguous())
    raw = source.whole(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize)).to(torch.uint8)
    pool = raw.view(dtype)
    if not strided:
        return Caches(tuple(pool), tuple(scales), pool)
    parts = (pool[..., i * dim : (i + 1) * dim].transpose(1, 2) for i in range(number))
    return Caches(tuple(parts), tuple(scales), pool)


def wild_packed(
    source: Source, number: int, dims: Mapping[str, int], heads: int, format: str, strided: bool
) -> PackedCaches:
    """Caches of 4 bits that hold random bits: in vLLM's slots, K before V, or values before scales, each of its own."""
    pages, page, dim = dims["num_pages"], dims["page_size"], dims["head_dim"]
    groups = GROUPS[format]
    data, scales = page * dim // PACKED, page * dim // groups.size
    slots = strided and page % TOKENS == 0
    # Values begin where kernels want rows to begin.
    each = -(-pages * heads * (data + scales) // ALIGNMENT) * ALIGNMENT
    pool = source.whole(0, 256, (number * each,)).to(torch.uint8)
    made = []
    for number_of in range(number):
        if slots:
            outer = (number * heads * (data + scales), number * (data + scales))
            places = number_of * (data + scales), number_of * (data + scales) + data
        else:
            outer = (heads * data, data)
            begin = number_of * each
            places = begin, begin + pages * heads * data
        layout = "interleaved" if slots and number_of else "linear"
        shape = shape_in(layout, page, dim // groups.size)
        scale_outer = outer if slots else (heads * scales, scales)
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        values = pool.as_strided((pages, heads, page, dim // PACKED), (*outer, dim // PACKED, 1), places[0])
        scale = pool.as_strided((pages, heads, *shape), (*scale_outer, *inner), places[1]).view(groups.dtype)
        # A cache that a caller has not given a global scale counts as one of 1.
        given = source.scales(()) if groups.has_global and not (strided and number_of == number - 1) else None
        made.append(QuantizedTensor(values, scale, format, layout, given))
    return PackedCaches(tuple(made), pool)


class AppendKV:
    """Keys and values against the reference, and all else of the pool as it was."""

    role = "key_value"
    names: tuple[str, ...] = ("k_cache", "v_cache")
    scale_names: tuple[str, ...] = ("k_scale", "v_scale")

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.backend, dtype = case.dims, backend, case.dtype(self.role)
        self.number, self.heads = len(self.names), dims.get("num_kv_heads", 1)
        shape = (dims["total_q"], self.heads, dims["head_dim"])
        kind = torch.float32 if dims["float32_rows"] else torch.bfloat16
        rows = [wild_rows(source, shape, kind) for _ in self.names]
        self.rows = tuple(spread(each) if strided else each for each in rows)
        self.slots = wild_slots(source, shape[0], dims["num_pages"] * dims["page_size"], strided)
        computed = dtype == FP8 and bool(dims["token_scales"])
        self.given: list[Tensor | None]
        self.caches: Caches | PackedCaches
        if case.packed:
            packed = wild_packed(source, self.number, dims, self.heads, case.packed, strided)
            self.caches, self.given = packed, [cache.global_scale for cache in packed.made]
            rows = [critical_rows(source, row, given) for row, given in zip(rows, self.given, strict=True)]
            self.rows = tuple(spread(each) if strided else each for each in rows)
            return
        self.caches = wild_caches(source, self.number, dims, self.heads, dtype, strided, computed)
        drawn = self.given_scales(source, strided) if dtype == FP8 and not computed else {}
        self.given = [drawn.get(name) for name in self.scale_names]

    def given_scales(self, source: Source, strided: bool) -> dict[str, Tensor]:
        """One of each head, which need not lie beside each other, or of the tensor."""
        drawn = (source.scales((self.heads, 2))[:, 0] if strided else source.scales(()) for _ in range(2))
        return dict(zip(self.scale_names, drawn, strict=True))

    def append(self, into: Caches | PackedCaches) -> None:
        """By the operator."""
        if isinstance(into, PackedCaches):
            (k, v), (keys, values) = self.rows, into.made
            ops.append_kv(k, v, keys, values, self.slots, backend=self.backend)
            return
        (k, v), (k_cache, v_cache) = self.rows, into.views
        k_scale, v_scale = into.scales or self.given
        ops.append_kv(
            k, v, k_cache, v_cache, self.slots, k_scale=k_scale, v_scale=v_scale, backend=self.backend
        )  # fmt: skip

    def call(self) -> None:
        """The operator alone, in place, as it is timed."""
        self.append(self.caches)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        into = self.caches.copied()
        self.append(into)
        return into.codes()

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        into = self.caches.copied()
        written: Sequence[Tensor | None] = into.scales or [None] * self.number
        for row, cache, given, scales in zip(self.rows, into.views, self.given, written, strict=True):
            reference.append_rows(row, cache, self.slots, given, scales)
        names = self.scale_names if into.scales else ()
        errors: compare.Errors = {}
        # The whole pool last, where nothing else may have been written.
        for name, got, codes in zip((*self.names, *names, self.names[0]), outputs, into.codes(), strict=True):
            errors |= compare.same(name, got, codes)
        return errors


class AppendIndex(AppendKV):
    """The same for index keys, which have no heads."""

    role, names, scale_names = "index_key", ("cache",), ("scale",)

    def given_scales(self, source: Source, strided: bool) -> dict[str, Tensor]:
        return {} if strided else {"scale": source.scales(())}

    def append(self, into: Caches | PackedCaches) -> None:
        if isinstance(into, PackedCaches):
            [cache] = into.made
            keys = dataclasses.replace(cache, data=cache.data[:, 0], scale=cache.scale[:, 0])
            ops.append_index(self.rows[0][:, 0], keys, self.slots, backend=self.backend)
            return
        scale = into.scales[0][:, 0] if into.scales else self.given[0]
        ops.append_index(self.rows[0][:, 0], into.views[0][:, 0], self.slots, scale=scale, backend=self.backend)


CHECKS = {"append_kv": AppendKV, "append_index": AppendIndex}
