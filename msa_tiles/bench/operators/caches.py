"""`append_kv` and `append_index` against torch's assignment by index, and vLLM's operator for dense layers.

Caches are token-major in memory, as vLLM keeps them on Hopper; quantised ones have a scale of 1 that is given. Those of
4 bits are contiguous pages, with scales behind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles import ops, quant
from msa_tiles.bench import cases, checks, peers, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender, Skipped
from msa_tiles.bench.inputs import Stored, in_format, is_e4m3, normal, sample_rows, wide
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

VLLM_OPERATORS = "vllm._custom_ops"


@dataclass(frozen=True)
class Rows:
    """Rows [T, heads, D] of one tensor or two, caches [pages, page, heads, D], and slots int64 [T].

    Caches of 4 bits are [pages, heads, page, D].
    """

    rows: tuple[Tensor, ...]
    caches: tuple[Stored, ...]
    slots: Tensor


def rows(case: cases.Case, heads: int, number: int, form: str, device: torch.device, seed: int) -> Rows:
    pages, page, dim = case["num_pages"], case["page_size"], case["head_dim"]
    made = tuple(normal(number * seed + i, device, case.num_q, heads, dim) for i in range(number))
    shape = (pages, heads, page, dim) if form in quant.GROUPS else (pages, page, heads, dim)
    caches = tuple(in_format(torch.zeros(shape, device=device), form) for _ in range(number))
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.randperm(pages * page, generator=generator, device=device)[: case.num_q]
    return Rows(made, caches, slots)


def check(inputs: Rows, written: tuple[Stored, ...]) -> str | None:
    """Rows that were written, up to the rounding to what the cache stores."""
    some = sample_rows(len(inputs.slots), checks.ROWS, inputs.slots.device)
    for source, cache in zip(inputs.rows, written, strict=True):
        if isinstance(cache, Tensor):
            found = cache.flatten(0, 1).float()[inputs.slots[some]]
            wanted = source[some].to(cache.dtype).float()
        else:
            found = cache.dequantize().transpose(1, 2).flatten(0, 1)[inputs.slots[some]]
            wanted = wide(in_format(source[some], cache.format)).float()
        if not torch.equal(found, wanted):
            return f"{int((found != wanted).sum())} values of {wanted.numel()} are others"
    return None


def torch_append(inputs: Rows) -> tuple[Stored, ...]:
    """What torch has: an assignment by index, of bytes where it moves no e4m3."""
    for source, cache in zip(inputs.rows, inputs.caches, strict=True):
        assert isinstance(cache, Tensor), "torch writes no 4 bits"
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
        caches = [cache for cache in inputs.caches if isinstance(cache, Tensor)]
        kind = "fp8" if is_e4m3(inputs.caches[0]) else "auto"
        stored = [cache.view(torch.uint8) if kind == "fp8" else cache for cache in caches]

        def call() -> tuple[Stored, ...]:
            function(k, v, *stored, inputs.slots, kind, one, one)
            return inputs.caches

        return call

    return Contender("vllm", bind, check)


def bench_of(
    case: cases.Case,
    device: torch.device,
    heads: int,
    precision: str,
    role: str,
    number: int,
    ours: Callable[[str, Rows], Call],
) -> Bench:
    values = number * heads * case["head_dim"]
    slots = case["num_pages"] * case["page_size"]
    form = precisions.stored(precision, role)
    of_torch: Contender | Skipped = Contender("torch", lambda inputs: lambda: torch_append(inputs), check)
    found = [of_torch, vllm_append()] if number > 1 else [of_torch]
    return Bench(
        case=case,
        make=functools.partial(rows, case, heads, number, form.name, device),
        bytes_per_set=int(values * (2 * case.num_q + form.bits_with_scales * slots / 8)) + 8 * case.num_q,
        ours=ours,
        check=check,
        peers=[peers.takes(precision, role, peer) for peer in found],
    )


def prepare_kv(case: cases.Case, device: torch.device, precision: str) -> Bench:
    def ours(dsl: str, inputs: Rows) -> Call:
        (k, v), (k_cache, v_cache) = (
            inputs.rows,
            (cache.transpose(1, 2) if isinstance(cache, Tensor) else cache for cache in inputs.caches),
        )
        one = torch.ones((), device=k.device) if is_e4m3(k_cache) else None

        def call() -> tuple[Stored, ...]:
            ops.append_kv(k, v, k_cache, v_cache, inputs.slots, k_scale=one, v_scale=one, backend=dsl)
            return inputs.caches

        return call

    return bench_of(case, device, case["num_kv_heads"], precision, "key_value", 2, ours)


def prepare_index(case: cases.Case, device: torch.device, precision: str) -> Bench:
    def ours(dsl: str, inputs: Rows) -> Call:
        (idx_k,), (cache,) = inputs.rows, inputs.caches
        keys: Stored
        if isinstance(cache, Tensor):
            keys = cache[:, :, 0]
        else:
            keys = dataclasses.replace(cache, data=cache.data[:, 0], scale=cache.scale[:, 0])

        def call() -> tuple[Stored, ...]:
            ops.append_index(idx_k[:, 0], keys, inputs.slots, backend=dsl)
            return inputs.caches

        return call

    return bench_of(case, device, 1, precision, "index_key", 1, ours)


BENCHMARKS: tuple[Benchmark, ...] = (
    of_spec("append_kv", prepare_kv, precisions.ATTENTION),
    of_spec("append_index", prepare_index, (*precisions.INDEXER[:3], precisions.INDEXER[4])),
)
