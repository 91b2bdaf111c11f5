"""Quantisers of 4 bits give the same bits on a GPU as on the CPU, where they are held against ml_dtypes."""

from __future__ import annotations

import pytest
import torch

from msa_tiles.quant import quantize_fp8, quantize_mxfp4, quantize_nvfp4, quantize_pages, rounding

pytestmark = pytest.mark.gpu


def values() -> torch.Tensor:
    """Sizes from subnormal to the largest, with ties, zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(64, 8, 128, generator=generator) * 2.0 ** torch.linspace(-145, 126, 64)[:, None, None]
    found[:, 1] = torch.tensor([0.25, 0.75, 1.25, 2.5, 3.5, 5.0, -5.0, 6.0]).repeat(16)
    found[3, 2], found[4, 2, 5], found[5, 2, 7] = 0.0, torch.nan, -torch.inf
    return found


def test_the_same_bits() -> None:
    given = values()
    for make in (
        quantize_mxfp4,
        quantize_nvfp4,
        lambda x: quantize_nvfp4(x, 1e-6),
        lambda x: quantize_nvfp4(x, 1e4, layout="swizzled"),
        lambda x: quantize_nvfp4(x.bfloat16(), layout="interleaved"),
    ):
        here, there = make(given), make(given.cuda())
        assert torch.equal(there.data.cpu(), here.data)
        assert torch.equal(there.scale.view(torch.uint8).cpu(), here.scale.view(torch.uint8))
        torch.testing.assert_close(there.dequantize().cpu(), here.dequantize(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("per", ["tensor", "head", "token_head"])
def test_the_same_bits_of_e4m3(per: str) -> None:
    given = values().clamp(-1e38, 1e38)
    here, there = quantize_fp8(given, per=per), quantize_fp8(given.cuda(), per=per)
    assert torch.equal(there.scale.cpu(), here.scale)
    assert torch.equal(there.data.view(torch.uint8).cpu(), here.data.view(torch.uint8))


def test_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8, device="cuda")
    assert torch.equal(rounding.e2m1_values(codes).cpu(), rounding.e2m1_values(codes.cpu()))


def test_pages_are_made_in_a_graph() -> None:
    """Nothing synchronises and nothing is read to the host."""
    keys = torch.randn(3, 2, 128, 128, device="cuda").bfloat16()
    pool = torch.empty(3, 4, 128, 72, dtype=torch.uint8, device="cuda")
    outer = torch.tensor(0.02, device="cuda")
    quantize_pages(keys, -keys, "vllm", k_global_scale=outer, v_global_scale=outer, pool=pool)
    wanted = pool.clone()
    pool.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_pages(keys, -keys, "vllm", k_global_scale=outer, v_global_scale=outer, pool=pool)
    graph.replay()
    assert torch.equal(pool, wanted)
