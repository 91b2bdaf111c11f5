"""append_kv and append_index on a GPU: all kinds of float32, graphs that serve other slots, no synchronisation."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import Named
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.quant import FP8, QuantizedTensor, quantize_mxfp4, quantize_nvfp4, vllm_pages
from msa_tiles.verify.caches import bits

pytestmark = pytest.mark.gpu

DSLS = [named for named in (Named("tilelang"), Named("cutedsl")) if named.has("append_kv")]
each_dsl = pytest.mark.parametrize("named", DSLS, ids=lambda named: named.backend)


@each_dsl
@pytest.mark.parametrize("scaled", [False, True])
def test_e4m3_is_that_of_torch_for_all_kinds_of_float32(named: Named, scaled: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(torch.seed() % (1 << 31))
    rows, head_dim = 1 << 15, 128
    patterns = torch.randint(-(1 << 31), 1 << 31, (rows, head_dim), generator=generator, device="cuda")
    values = patterns.to(torch.int32).view(torch.float32)
    # Random bits are rarely near e4m3's range: half of the rows are, ties and their neighbours among them.
    codes = torch.arange(127, dtype=torch.uint8, device="cuda").view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    picked = ties[torch.randint(0, 126, (rows // 2, head_dim), generator=generator, device="cuda")]
    moved = picked.view(torch.int32) + torch.randint(-1, 2, picked.shape, generator=generator, device="cuda")
    values[::2] = moved.to(torch.int32).view(torch.float32)
    scale = torch.rand((), generator=generator, device="cuda") + 0.1 if scaled else None
    found, wanted = (torch.zeros(rows, 1, head_dim, device="cuda").to(FP8) for _ in range(2))
    slots = torch.randperm(rows, generator=generator, device="cuda")
    named.append_index(values, found, slots, scale=scale)
    reference.append_index(values, wanted, slots, scale=scale)
    assert torch.equal(bits(found), bits(wanted))


@each_dsl
@pytest.mark.parametrize("token_scales", [False, True])
def test_a_graph_serves_other_rows_and_slots(named: Named, token_scales: bool) -> None:
    tokens, heads = 64, 4
    k, v = (torch.randn(tokens, heads, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    caches = [torch.zeros(9, 128, heads, 256, device="cuda").to(FP8).transpose(1, 2) for _ in range(2)]
    scales = [torch.ones(9, 128, heads, 2, device="cuda").transpose(1, 2) for _ in range(2)]
    slots = torch.arange(tokens, device="cuda")

    def append(append_kv: object, number: int) -> None:
        k_cache, v_cache = caches[number].split(128, -1)
        k_scale, v_scale = scales[number].unbind(-1) if token_scales else (torch.ones_like(scales[0][0, :, 0, 0]),) * 2
        append_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)  # type: ignore[operator]

    append(named.append_kv, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(named.append_kv, 0)
    for part in (*caches, *scales):
        part.zero_()
    for _ in range(3):
        slots.copy_(torch.randperm(9 * 128, device="cuda")[:tokens])
        slots[::7] = -1
        slots[3] = 9 * 128
        k.normal_()
        graph.replay()
        append(_by_reference, 1)
        assert torch.equal(bits(caches[0]), bits(caches[1])) and torch.equal(scales[0], scales[1])


def _by_reference(*arguments: Tensor, **scales: Tensor) -> None:
    ops.append_kv(*arguments, **scales, backend="reference")  # type: ignore[misc]


def all_kinds(rows: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, 128]: random bits, and values whose groups have scales near the middle of two e4m3 numbers."""
    patterns = torch.randint(-(1 << 31), 1 << 31, (rows, 128), generator=generator, device="cuda")
    values = patterns.to(torch.int32).view(torch.float32).clone()
    codes = torch.arange(8, 127, dtype=torch.uint8, device="cuda").view(FP8).double()
    middles = (codes[1:] + codes[:-1]) / 2
    near = (6 * middles[torch.randint(0, 118, (rows // 2, 1), generator=generator, device="cuda")]).float()
    shares = torch.randint(0, 25, (rows // 2, 128), generator=generator, device="cuda") / 24
    values[::2] = near * shares
    return values


@each_dsl
@pytest.mark.parametrize("global_scale", [1e-6, 0.37, 1.0, 1e4])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_four_bits_are_those_of_the_quantiser_for_all_kinds_of_float32(
    named: Named, format: str, global_scale: float
) -> None:
    if format == "mxfp4" and global_scale != 1.0:
        pytest.skip("mxfp4 has no global scale")
    generator = torch.Generator("cuda").manual_seed(torch.seed() % (1 << 31))
    rows = 1 << 13
    values = all_kinds(rows, generator) * global_scale
    made = quantize_mxfp4(values) if format == "mxfp4" else quantize_nvfp4(values, global_scale)
    cache = QuantizedTensor(
        torch.zeros_like(made.data), torch.zeros_like(made.scale), format, "linear", made.global_scale
    )
    slots = torch.randperm(rows, generator=generator, device="cuda")
    named.append_index(values[slots], cache, slots)
    nan = made.scale.float().isnan()
    assert torch.equal(cache.data, made.data) and torch.equal(cache.scale.float().isnan(), nan)
    found, wanted = (each.scale.view(torch.uint8).masked_fill(nan, 0) for each in (cache, made))
    assert torch.equal(found, wanted)


@each_dsl
def test_a_graph_fills_vllms_pages(named: Named) -> None:
    tokens, heads = 64, 4
    k, v = (torch.randn(tokens, heads, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    scale = torch.tensor(0.01, device="cuda")
    pages = [
        vllm_pages(torch.zeros(9, 2 * heads, 128, 72, dtype=torch.uint8, device="cuda"), scale, scale) for _ in range(2)
    ]
    slots = torch.arange(tokens, device="cuda")
    named.append_kv(k, v, pages[0].k, pages[0].v, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        named.append_kv(k, v, pages[0].k, pages[0].v, slots)
    pages[0].pool.zero_()
    for _ in range(3):
        slots.copy_(torch.randperm(9 * 128, device="cuda")[:tokens])
        slots[::7] = -1
        k.normal_()
        graph.replay()
        ops.append_kv(k, v, pages[1].k, pages[1].v, slots, backend="reference")
        assert torch.equal(pages[0].pool, pages[1].pool)


@each_dsl
def test_nothing_synchronises(named: Named) -> None:
    rows, cache = torch.randn(7, 128, device="cuda"), torch.zeros(4, 16, 128, device="cuda").to(torch.bfloat16)
    slots = torch.arange(7, device="cuda", dtype=torch.int32)
    named.append_index(rows, cache, slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        named.append_index(rows, cache, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(cache[0, :7], rows.to(torch.bfloat16))


@each_dsl
def test_offsets_have_64_bits(named: Named) -> None:
    """Slots behind 2**32 elements and bytes."""
    pages = (1 << 33) // (128 * 128) + 3
    try:
        cache = torch.zeros(pages, 128, 128, device="cuda", dtype=torch.uint8)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("8 GiB do not fit")
    slots = torch.tensor([pages * 128 - 1, 1 << 25, 3, pages * 128], device="cuda")
    rows = torch.randn(4, 128, device="cuda")
    named.append_index(rows, cache, slots, format="e4m3")
    kept = cache.view(128 * pages, 128)[slots[:3]].view(FP8)
    assert torch.equal(bits(kept), bits(rows[:3].clamp(-448, 448).to(FP8)))
