"""The check of norm_rope_append: what is rounded from float32 within a bound, all else bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.quant import FP8, GROUPS, round_fp8, scale_of
from msa_tiles.quant.layouts import TOKENS
from msa_tiles.quant.rounding import LARGEST_E2M1, e2m1_codes, e2m1_values, floor_e8m0, to_e4m3, unpacked
from msa_tiles.verify import compare
from msa_tiles.verify.caches import (
    GAP,
    INTEGERS,
    Caches,
    PackedCaches,
    bits,
    wild_caches,
    wild_packed,
    wild_rows,
    wild_slots,
)
from msa_tiles.verify.cases import Case, Disagreement
from msa_tiles.verify.compare import Error, Errors
from msa_tiles.verify.inputs import Source

# An error is that of float32's arithmetic: over the magnitudes that add up to a number, before it is rounded.
BEFORE_ROUNDING = "relative, before rounding"
HALVINGS = 6  # of the tolerance, in search of the least that holds
EPS = 1e-5
SCALES = {"k": "k_scale", "v": "v_scale", "index": "index_cache_scale"}  # the outputs of each cache


class Turned(NamedTuple):
    """Rows [n, H, D] as they should be, in float64, and the magnitudes that add up to each."""

    values: Tensor
    sizes: Tensor


class NormRopeAppend:
    """Queries and keys within the tolerance, values and all else of the pools as the reference has them."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims, self.backend, self.tolerance = case.dims, backend, case.tolerance
        total, width = dims["total_q"], dims["head_dim"]
        heads, index_heads = dims["num_kv_heads"], dims["num_index_heads"]
        dtype, packed = case.dtype("key_value"), case.packed
        of_index = (torch.bfloat16, "") if dims["bf16_index"] else (dtype, packed)
        # All are slices of one projection's output.
        sizes = [dims["num_q_heads"], heads, heads, index_heads, 1]
        projected = source.values((total, sum(sizes), width + GAP * strided), torch.float32)
        projected = (projected * 2.0 ** source.whole(-6, 7, projected.shape[:2])[..., None]).to(torch.bfloat16)
        self.rows = projected[..., :width].split(sizes, 1)
        self.projected = projected
        self.weights = [(0.3 * source.values((width,), torch.float32)).to(torch.bfloat16) for _ in range(4)]
        angles = source.values((dims["num_positions"], dims["rotary_dim"] // 2), torch.float32)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        self.table = table if dims["float32_table"] else table.to(torch.bfloat16)
        positions = source.whole(-2, dims["num_positions"] + 2, (total,))
        self.positions = positions if strided else positions.to(torch.int32)
        slots = dims["num_pages"] * dims["page_size"]
        self.slots = wild_slots(source, total, slots, strided)
        self.index_slots = wild_slots(source, total, slots, not strided) if strided else self.slots
        self.rows[2].copy_(wild_rows(source, self.rows[2].shape, torch.bfloat16))
        for rows, places in ((self.rows[1], self.slots), (self.rows[4], self.index_slots)):
            rows.masked_fill_(~kept(places, slots)[:, None, None], torch.nan)
        computed = dtype == FP8 and bool(dims["token_scales"])
        self.caches, self.given = _caches(source, 2, dims, heads, dtype, packed, strided, computed)
        computed = computed and of_index[0] == FP8
        self.index, self.index_given = _caches(source, 1, dims, 1, *of_index, strided, computed)
        self.offset = float(strided)
        self.queries = FP8 if strided and not dims["bf16_index"] else torch.bfloat16

    def keywords(self, rows: Sequence[Tensor], into: Any, index: Any) -> dict[str, Any]:
        """The call but for where queries go, on these rows and caches."""
        keys, values = into.made if isinstance(into, PackedCaches) else into.views
        k_scale, v_scale = self.given if isinstance(into, PackedCaches) or not into.scales else into.scales
        if isinstance(index, PackedCaches):
            [made] = index.made
            index_cache: Any = dataclasses.replace(made, data=made.data[:, 0], scale=made.scale[:, 0])
        else:
            index_cache = index.views[0][:, 0]
        index_cache_scale = index.scales[0][:, 0] if isinstance(index, Caches) and index.scales else self.index_given[0]
        scales = {"k_scale": k_scale, "v_scale": v_scale} if isinstance(into, Caches) else {}
        q, k, v, idx_q, idx_k = rows
        return scales | {
            "index_cache_scale": index_cache_scale if isinstance(index, Caches) else None,
            "q": q, "k": k, "v": v, "idx_q": idx_q, "idx_k": idx_k[:, 0],
            **dict(zip(("q_weight", "k_weight", "idx_q_weight", "idx_k_weight"), self.weights, strict=True)),
            "cos_sin": self.table, "positions": self.positions, "eps": EPS, "weight_offset": self.offset,
            "k_cache": keys, "v_cache": values, "slot_mapping": self.slots,
            "index_cache": index_cache, "index_slot_mapping": self.index_slots,
        }  # fmt: skip

    def prepared(self, into_buffers: bool) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """The arguments of a call on copies, and what `compare` looks at behind it."""
        return self._arguments(self.projected.clone(), self.caches.copied(), self.index.copied(), into_buffers)

    def _arguments(
        self, projected: Tensor, into: Any, index: Any, into_buffers: bool
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        rows = projected[..., : self.rows[0].shape[-1]].split([each.shape[1] for each in self.rows], 1)
        call = self.keywords(rows, into, index)
        queries = (rows[0], rows[3])
        if into_buffers or self.queries == FP8:
            queries = (torch.full_like(rows[0], torch.nan), torch.full_like(rows[3], torch.nan).to(self.queries))
            call |= dict(zip(("q_out", "idx_out"), queries, strict=True))
        return call, self.outputs(*queries, into, index)

    @functools.cached_property
    def _in_place(self) -> dict[str, Any]:
        return self._arguments(self.projected, self.caches, self.index, False)[0]

    def call(self) -> None:
        """The operator alone, in place, as it is timed: rows are normalised and rotated once more."""
        ops.norm_rope_append(**self._in_place, backend=self.backend)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        call, outputs = self.prepared(into_buffers)
        ops.norm_rope_append(**call, backend=self.backend)
        return outputs

    @staticmethod
    def outputs(q: Tensor, idx_q: Tensor, into: Any, index: Any) -> tuple[Tensor, ...]:
        """What `compare` looks at: queries, pools, and scales that lie elsewhere."""
        elsewhere = [scale for caches in (into, index) if isinstance(caches, Caches) for scale in caches.scales]
        return (q, idx_q, into.pool, index.pool, *elsewhere)

    def compare(self, outputs: tuple[Tensor, ...]) -> Errors:
        q, idx_q, pool, index_pool, *scales = outputs
        number = len(self.caches.scales) if isinstance(self.caches, Caches) else 0
        got, got_index = _over(self.caches, pool, scales[:number]), _over(self.index, index_pool, scales[number:])
        wanted, wanted_index = self.caches.copied(), self.index.copied()
        errors = self._queries("q_out", q, 0, 0) | self._queries("idx_out", idx_q, 3, 2)
        errors |= self._keys("k", got, wanted, self.given[0], 1, 1, self.slots)
        errors |= self._keys("index", got_index, wanted_index, self.index_given[0], 4, 3, self.index_slots)
        written = wanted.scales[1] if wanted.scales else None
        reference.append_rows(self.rows[2], wanted.views[1], self.slots, self.given[1], written)
        errors |= compare.same("v_cache", _codes(got.views[1]), _codes(wanted.views[1]))
        if wanted.scales:
            pair = [caches.scales[1] for caches in (got, wanted)]
            if isinstance(wanted, PackedCaches):
                pair = [scale.view(torch.uint8) for scale in pair]
            errors |= compare.same("v_scale", *map(_codes, pair))
        # Nothing else of the pools may have been written.
        for name, mine, theirs in (("k_cache", got, wanted), ("index_cache", got_index, wanted_index)):
            beside = zip(mine.scales, theirs.scales, strict=True) if isinstance(mine, Caches) else ()
            for one, other in ((mine.pool, theirs.pool), *beside):
                compare.same(f"{name}: what has no slot", _codes(one), _codes(other))
        return errors

    def _turned(self, number: int, weight: int) -> Turned:
        """Some of the rows in float64."""
        rows, scale = self.rows[number], self.weights[weight]
        nowhere = torch.full_like(self.positions, -1)
        values, still = (
            reference.norm_rope(
                rows, scale, self.table, places, eps=EPS, weight_offset=self.offset, dtype=torch.float64
            )
            for places in (self.positions, nowhere)
        )
        still = still.abs()
        half = self.table.shape[1] // 2
        first, second, rest = still.split([half, half, still.shape[-1] - 2 * half], -1)
        return Turned(values, torch.cat([first + second, first + second, rest], -1))

    def _queries(self, name: str, got: Tensor, number: int, weight: int) -> Errors:
        rounded = round_fp8 if got.dtype == FP8 else lambda values: values.to(got.dtype)
        turned = self._turned(number, weight)
        return self._within(name, got.float().double(), lambda values: rounded(values.float()).float().double(), turned)

    def _keys(
        self, name: str, got: Any, wanted: Any, given: Tensor | None, number: int, weight: int, slots: Tensor
    ) -> Errors:
        """Rows of keys in their slots; those of `wanted` become what was found."""
        cache, target = got.views[0], wanted.views[0]
        page_size = cache.shape[2]
        mask = kept(slots, cache.shape[0] * page_size)
        page, place = slots[mask].long() // page_size, slots[mask].long() % page_size
        turned = Turned(*(each[mask] for each in self._turned(number, weight)))
        found = _ints(cache)[page, :, place]
        _ints(target)[page, :, place] = found
        found = found.view(cache.dtype)
        errors: Errors = {}
        if isinstance(got, PackedCaches):
            scale = _OfGroups(got.made[0].scale, page, place).take()
            _OfGroups(wanted.made[0].scale, page, place).put(scale)
            outer = 1.0 if given is None else given.double()
            errors |= self._groups(name, found, scale, turned, got.made[0].format, outer)
        elif cache.dtype == FP8 and got.scales:
            scale = got.scales[0][page, :, place]
            wanted.scales[0][page, :, place] = scale
            largest = Turned(*(each.amax(-1) for each in (turned.values.abs(), turned.sizes)))
            errors |= self._within(SCALES[name], scale.double(), lambda v: scale_of(v.float()).double(), largest)
            errors |= self._fp8(name, found, scale[..., None].double(), turned)
        elif cache.dtype == FP8:
            scale = torch.ones((), device=found.device) if given is None else given
            errors |= self._fp8(name, found, scale.expand(found.shape[1])[:, None].double(), turned)
        else:
            kind = cache.dtype
            errors |= self._within(
                f"{name}_cache", found.float().double(), lambda values: values.float().to(kind).double(), turned
            )
        return errors

    def _fp8(self, name: str, found: Tensor, scale: Tensor, turned: Turned) -> Errors:
        over_scale = Turned(turned.values / scale, turned.sizes / scale)
        return self._within(
            f"{name}_cache",
            found.float().double(),
            lambda values: round_fp8(values.float()).float().double(),
            over_scale,
        )

    def _groups(self, name: str, found: Tensor, scale: Tensor, turned: Turned, kind: str, outer: Any) -> Errors:
        """Codes and scales of 4 bits; codes by the scales that were found."""
        size = GROUPS[kind].size
        values, sizes = (each.unflatten(-1, (-1, size)) for each in turned)
        largest = Turned(values.abs().amax(-1), sizes.amax(-1))

        def rounded(most: Tensor) -> Tensor:
            made = to_e4m3(most / (LARGEST_E2M1 * outer)) if kind == "nvfp4" else floor_e8m0(most / 4)
            return made.float().double()

        errors = self._within(SCALES[name], scale.float().double(), rounded, largest)
        unit = (scale.float().double() * outer)[..., None]
        codes = e2m1_values(unpacked(found)).double().unflatten(-1, (-1, size))
        unit = torch.where(unit > 0, unit, torch.inf)
        in_units = Turned(values / unit, sizes / unit)
        return errors | self._within(f"{name}_cache", codes, lambda v: e2m1_values(e2m1_codes(v)).double(), in_units)

    def _within(self, name: str, got: Tensor, rounded: Callable[[Tensor], Tensor], turned: Turned) -> Errors:
        """Whether everything is what a number within the tolerance is rounded to, and how much less would do."""
        tolerance = self.tolerance[name]

        def outside(bound: float) -> Tensor:
            low, high = (rounded(turned.values + side * bound * turned.sizes) for side in (-1, 1))
            return ~((low <= got) & (got <= high))

        amiss = outside(tolerance)
        if bool(amiss.any()):
            where = tuple(amiss.nonzero()[0].tolist())
            came, wanted = got[where].item(), rounded(turned.values)[where].item()
            raise Disagreement(f"{name}: {int(amiss.sum())} elements differ, first at {where}: {came} for {wanted}")
        bounds = [0.0, *(tolerance / 2**step for step in range(HALVINGS, 0, -1)), tolerance]
        worst = next(bound for bound in bounds if bound == tolerance or not bool(outside(bound).any()))
        return {name: Error(worst, tolerance, BEFORE_ROUNDING)}


class _OfGroups:
    """The scales of groups of some slots: of a cache [pages, H, page, G], or interleaved [pages, H, page / 4, G, 4]."""

    def __init__(self, scale: Tensor, page: Tensor, place: Tensor) -> None:
        self.bytes, self.dtype = scale.view(torch.uint8), scale.dtype
        whole = slice(None)
        self.at: tuple[Any, ...] = (page, whole, place)
        if scale.dim() > 4:
            self.at = (page, whole, place // TOKENS, whole, place % TOKENS)

    def take(self) -> Tensor:
        return self.bytes[self.at].view(self.dtype)

    def put(self, values: Tensor) -> None:
        self.bytes[self.at] = values.view(torch.uint8)


def kept(slots: Tensor, number: int) -> Tensor:
    """Which tokens have a slot."""
    return (slots >= 0) & (slots < number)


def _caches(
    source: Source, number: int, dims: Any, heads: int, dtype: torch.dtype, packed: str, strided: bool, computed: bool
) -> tuple[Any, list[Tensor | None]]:
    """Caches that hold random bits, and the scales that are given of each."""
    if packed:
        made = wild_packed(source, number, dims, heads, packed, strided)
        return made, [cache.global_scale for cache in made.made]
    caches = wild_caches(source, number, dims, heads, dtype, strided, computed)
    if dtype != FP8 or computed:
        return caches, [None] * number
    if number == 1:  # an index cache without a scale counts as one of 1
        return caches, [None if strided else source.scales(())]
    return caches, [source.scales((heads, 2))[:, 0] if strided else source.scales(()) for _ in range(number)]


def _over(caches: Any, pool: Tensor, scales: Sequence[Tensor]) -> Any:
    """The same caches in another pool, with other scales beside it."""

    def there(part: Tensor) -> Tensor:
        return pool.as_strided(part.shape, part.stride(), part.storage_offset())

    if isinstance(caches, Caches):
        return Caches(tuple(there(view) for view in caches.views), tuple(scales), pool)
    made = [
        dataclasses.replace(
            cache, data=there(cache.data), scale=there(cache.scale.view(torch.uint8)).view(cache.scale.dtype)
        )
        for cache in caches.made
    ]
    return PackedCaches(tuple(made), pool)


def _codes(values: Tensor) -> Tensor:
    """The bits of a cache or of scales, all NaN alike."""
    return values if values.dtype == torch.uint8 else bits(values)


def _ints(values: Tensor) -> Tensor:
    """A view of a cache as integers, which torch moves about."""
    return values.view(INTEGERS[values.dtype.itemsize])


CHECKS = {"norm_rope_append": NormRopeAppend}
