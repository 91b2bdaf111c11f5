"""`norm_rope_append` against the same in torch's operators with `append_kv` and `append_index` behind them.

Rows are slices of one projection's output, queries go to buffers of their own so that every call has the same inputs,
and index keys are stored as keys and values are. Caches are those of `append_kv`'s benchmark.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles import ops, quant, reference
from msa_tiles.bench import cases, checks, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender
from msa_tiles.bench.inputs import Stored, in_format, is_e4m3, normal, sample_rows, wide
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

EPS, OFFSET = 1e-6, 1.0
# Of the largest number of a row: what is rounded twice may be a step of its format away.
STEPS = {"bf16": 2.0**-6, "e4m3": 2.0**-3, "nvfp4": 0.35, "mxfp4": 0.35}


@dataclass(frozen=True)
class Layer:
    """q, k, v, idx_q and idx_k [T, heads, D] of one projection, weights of each but v, and caches of k, v and idx_k."""

    rows: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    table: Tensor
    positions: Tensor
    slots: Tensor
    queries: tuple[Tensor, Tensor]
    caches: tuple[Stored, ...]

    @property
    def written(self) -> tuple[Stored, ...]:
        return (*self.queries, *self.caches)


def layer(case: cases.Case, form: str, device: torch.device, seed: int) -> Layer:
    pages, page, dim = case["num_pages"], case["page_size"], case["head_dim"]
    heads, index_heads = case["num_kv_heads"], case["num_index_heads"]
    sizes = [case["num_q_heads"], heads, heads, index_heads, 1]
    rows = normal(7 * seed, device, case.num_q, sum(sizes), dim).split(sizes, 1)
    weights = tuple(0.1 * normal(7 * seed + 1 + i, device, dim) for i in range(4))
    angles = normal(7 * seed + 5, device, case["num_positions"], case["rotary_dim"] // 2)
    generator = torch.Generator(device).manual_seed(seed)
    positions = torch.randint(0, case["num_positions"], (case.num_q,), generator=generator, device=device)
    slots = torch.randperm(pages * page, generator=generator, device=device)[: case.num_q]
    caches = []
    for of in (heads, heads, 1):
        shape = (pages, of, page, dim) if form in quant.GROUPS else (pages, page, of, dim)
        caches.append(in_format(torch.zeros(shape, device=device), form))
    queries = torch.empty_like(rows[0]), torch.empty_like(rows[3])
    table = torch.cat([angles.cos(), angles.sin()], -1)
    return Layer(rows, weights, table, positions, slots, queries, tuple(caches))


def heads_first(cache: Stored) -> Stored:
    """A cache as operators take it."""
    return cache.transpose(1, 2) if isinstance(cache, Tensor) else cache


def one_head(cache: Stored) -> Stored:
    """That of index keys."""
    if isinstance(cache, Tensor):
        return cache[:, :, 0]
    return dataclasses.replace(cache, data=cache.data[:, 0], scale=cache.scale[:, 0])


def check(form: str, inputs: Layer, written: tuple[Stored, ...]) -> str | None:
    """Some rows of each tensor, up to a step of what it is stored in."""
    some = sample_rows(len(inputs.slots), checks.ROWS, inputs.slots.device)
    weights = (*inputs.weights[:2], None, *inputs.weights[2:])
    for number, place in enumerate((0, 2, 3, 1, 4)):
        rows, weight, found = inputs.rows[number][some], weights[number], written[place]
        if weight is None:
            wanted = rows.float()
        else:
            wanted = reference.norm_rope(
                rows, weight, inputs.table, inputs.positions[some], eps=EPS, weight_offset=OFFSET
            )
        if place < 2:
            assert isinstance(found, Tensor)
            got, step = found[some].float(), STEPS["bf16"]
        else:
            flat = found if isinstance(found, Tensor) else found.dequantize().transpose(1, 2)
            got, step = flat.flatten(0, 1)[inputs.slots[some]].float(), STEPS[form]
            wanted = wide(in_format(wanted, form)).float()
        amiss = (got - wanted).abs() > step * wanted.abs().amax(-1, keepdim=True)
        if bool(amiss.any()):
            return f"tensor {number}: {int(amiss.sum())} values of {wanted.numel()} are others"
    return None


def fused(dsl: str, inputs: Layer) -> Call:
    q, k, v, idx_q, idx_k = inputs.rows
    q_weight, k_weight, idx_q_weight, idx_k_weight = inputs.weights
    k_cache, v_cache = map(heads_first, inputs.caches[:2])
    index_cache = one_head(inputs.caches[2])
    one = torch.ones((), device=q.device) if is_e4m3(inputs.caches[0]) else None

    def call() -> tuple[Stored, ...]:
        ops.norm_rope_append(
            q, k, v, q_weight, k_weight, inputs.table, inputs.positions, k_cache, v_cache, inputs.slots,
            idx_q=idx_q, idx_k=idx_k[:, 0], idx_q_weight=idx_q_weight, idx_k_weight=idx_k_weight,
            index_cache=index_cache, eps=EPS, weight_offset=OFFSET, q_out=inputs.queries[0],
            idx_out=inputs.queries[1], k_scale=one, v_scale=one, backend=dsl,
        )  # fmt: skip
        return inputs.written

    return call


def turned(rows: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """As models have it: the norm in float32 and rounded, then the rotation."""
    single = rows.float()
    single = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + EPS) * (weight.float() + OFFSET)
    normed = single.to(rows.dtype)
    half = cosines.shape[-1]
    first, second, rest = normed.split([half, half, rows.shape[-1] - 2 * half], -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], -1)


def unfused(inputs: Layer) -> Call:
    q, k, v, idx_q, idx_k = inputs.rows
    k_cache, v_cache = map(heads_first, inputs.caches[:2])
    index_cache = one_head(inputs.caches[2])
    one = torch.ones((), device=q.device) if is_e4m3(inputs.caches[0]) else None

    def call() -> tuple[Stored, ...]:
        angles = inputs.table[inputs.positions][:, None].to(q.dtype).chunk(2, -1)
        q_weight, k_weight, idx_q_weight, idx_k_weight = inputs.weights
        inputs.queries[0].copy_(turned(q, q_weight, *angles))
        inputs.queries[1].copy_(turned(idx_q, idx_q_weight, *angles))
        ops.append_kv(turned(k, k_weight, *angles), v, k_cache, v_cache, inputs.slots, k_scale=one, v_scale=one)
        ops.append_index(turned(idx_k, idx_k_weight, *angles)[:, 0], index_cache, inputs.slots)
        return inputs.written

    return call


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    form = precisions.stored(precision, "key_value")
    heads = 2 * case["num_kv_heads"] + 1
    queries = case["num_q_heads"] + case["num_index_heads"]
    cached = case["num_pages"] * case["page_size"] * heads * form.bits_with_scales / 8
    rows = case.num_q * 2 * (2 * queries + heads)
    judge = functools.partial(check, form.name)
    return Bench(
        case=case,
        make=functools.partial(layer, case, form.name, device),
        bytes_per_set=int((rows + cached) * case["head_dim"]) + 2 * case["num_positions"] * case["rotary_dim"],
        ours=fused,
        check=judge,
        peers=[Contender("torch", unfused, judge)],
    )


BENCHMARK: Benchmark = of_spec("norm_rope_append", prepare, precisions.ATTENTION)
