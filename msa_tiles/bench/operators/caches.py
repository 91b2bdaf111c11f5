"""`append_kv` and `append_index` against torch's assignment by index, and vLLM's operator for dense layers.

Caches are token-major in memory, as vLLM keeps them on Hopper; quantised ones have a scale of 1 that is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles import ops, quant
from msa_tiles.bench import cases, checks, peers, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender, Skipped
from msa_tiles.bench.inputs import normal, sample_rows
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

VLLM_OPERATORS = "vllm._custom_ops"


@dataclass(frozen=True)
class Rows:
    """Rows [T, heads, D] of one tensor or two, caches [pages, page, heads, D], and slots int64 [T]."""

    rows: tuple[Tensor, ...]
    caches: tuple[Tensor, ...]
    slots: Tensor


def rows(case: cases.Case, heads: int, number: int, dtype: torch.dtype, device: torch.device, seed: int) -> Rows:
    pages, page, dim = case["num_pages"], case["page_size"], case["head_dim"]
    made = tuple(normal(number * seed + i, device, case.num_q, heads, dim) for i in range(number))
    caches = tuple(torch.zeros(pages, page, heads, dim, device=device).to(dtype) for _ in range(number))
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.randperm(pages * page, generator=generator, device=device)[: case.num_q]
    return Rows(made, caches, slots)


def check(inputs: Rows, written: tuple[Tensor, ...]) -> str | None:
    """Rows that were written, up to the rounding to what the cache stores."""
    some = sample_rows(len(inputs.slots), checks.ROWS, inputs.slots.device)
    for source, cache in zip(inputs.rows, written, strict=True):
        found = cache.flatten(0, 1).float()[inputs.slots[some]]
        wanted = source[some].to(cache.dtype).float()
        if not torch.equal(found, wanted):
            return f"{int((found != wanted).sum())} values of {wanted.numel()} are others"
    return None


def torch_append(inputs: Rows) -> tuple[Tensor, ...]:
    """What torch has: an assignment by index, of bytes where it moves no e4m3."""
    for source, cache in zip(inputs.rows, inputs.caches, strict=True):
        flat = cache.flatten(0, 1)
        if cache.dtype == quant.FP8:
            flat.view(torch.uint8)[inputs.slots] = quant.round_fp8(source.float()).view(torch.uint8)
        else:
            flat.index_copy_(0, inputs.slots, source)
    return inputs.caches


def vllm_append() -> Contender | Skipped:
    """reshape_and_cache_flash, which writes keys and values into token-major pages."""
    function = peers.optional_function(VLLM_OPERATORS, "reshape_and_cache_flash")
    if isinstance(function, str):
        return Skipped("vllm", function)

    def bind(inputs: Rows) -> Call:
        (k, v), one = inputs.rows, torch.ones((), device=inputs.slots.device)
        kind = "fp8" if inputs.caches[0].dtype == quant.FP8 else "auto"
        stored = [cache.view(torch.uint8) if kind == "fp8" else cache for cache in inputs.caches]

        def call() -> tuple[Tensor, ...]:
            function(k, v, *stored, inputs.slots, kind, one, one)
            return inputs.caches

        return call

    return Contender("vllm", bind, check)


def bench_of(
    case: cases.Case,
    device: torch.device,
    heads: int,
    dtype: torch.dtype,
    number: int,
    ours: Callable[[str, Rows], Call],
) -> Bench:
    values = number * heads * case["head_dim"]
    slots = case["num_pages"] * case["page_size"]
    vllm = [vllm_append()] if number > 1 else []
    return Bench(
        case=case,
        make=functools.partial(rows, case, heads, number, dtype, device),
        bytes_per_set=values * (2 * case.num_q + dtype.itemsize * slots) + 8 * case.num_q,
        ours=ours,
        check=check,
        peers=[Contender("torch", lambda inputs: lambda: torch_append(inputs), check), *vllm],
    )


def prepare_kv(case: cases.Case, device: torch.device, precision: str) -> Bench:
    def ours(dsl: str, inputs: Rows) -> Call:
        (k, v), (k_cache, v_cache) = inputs.rows, (cache.transpose(1, 2) for cache in inputs.caches)
        one = None if k_cache.dtype != quant.FP8 else torch.ones((), device=k.device)

        def call() -> tuple[Tensor, ...]:
            ops.append_kv(k, v, k_cache, v_cache, inputs.slots, k_scale=one, v_scale=one, backend=dsl)
            return inputs.caches

        return call

    return bench_of(case, device, case["num_kv_heads"], precisions.dtype(precision, "key_value"), 2, ours)


def prepare_index(case: cases.Case, device: torch.device, precision: str) -> Bench:
    def ours(dsl: str, inputs: Rows) -> Call:
        (idx_k,), (cache,) = inputs.rows, inputs.caches

        def call() -> tuple[Tensor, ...]:
            ops.append_index(idx_k[:, 0], cache[:, :, 0], inputs.slots, backend=dsl)
            return inputs.caches

        return call

    return bench_of(case, device, 1, precisions.dtype(precision, "index_key"), 1, ours)


BENCHMARKS: tuple[Benchmark, ...] = (
    of_spec("append_kv", prepare_kv, precisions.ATTENTION[:2]),
    of_spec("append_index", prepare_index, precisions.INDEXER[:2]),
)
