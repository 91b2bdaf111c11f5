"""Layouts of scales and pages, against index formulas written out."""

from __future__ import annotations

import re

import pytest
import torch

from msa_tiles.quant import (
    QuantizedTensor,
    layouts,
    quantize_fp8,
    quantize_index_pages,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_pages,
    sglang_index_pages,
    sglang_pages,
    vllm_pages,
)


def codes(*shape: int) -> torch.Tensor:
    """e4m3 scales of random codes, NaN among them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)


def bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("rows", "groups"), [(128, 8), (256, 4), (132, 3), (4, 8), (64, 6)])
def test_where_scales_stand(rows, groups):
    scale = codes(2, rows, groups)
    flat = bits(layouts.from_linear(scale, "interleaved")).view(2, -1)
    tiles = -(-groups // 4)
    swizzled = bits(layouts.from_linear(scale, "swizzled")).view(2, -1)
    for t in range(0, rows, 3):
        for g in range(groups):
            value = bits(scale)[:, t, g]
            assert torch.equal(flat[:, t // 4 * 4 * groups + g * 4 + t % 4], value)
            tile = (t // 128 * tiles + g // 4) * 512
            assert torch.equal(swizzled[:, tile + t % 32 * 16 + t % 128 // 32 * 4 + g % 4], value)
    assert swizzled.shape[1] == -(-rows // 128) * tiles * 512
    for layout in layouts.LAYOUTS:
        there = layouts.from_linear(scale, layout)
        assert there.shape == (2, *layouts.shape_in(layout, rows, groups))
        assert torch.equal(bits(layouts.to_linear(there, layout, rows, groups)), bits(scale))


@pytest.mark.parametrize("quantize", [quantize_nvfp4, quantize_mxfp4])
def test_values_are_the_same_in_every_layout(quantize):
    values = torch.randn(3, 2, 20, 64, generator=torch.Generator().manual_seed(2))
    linear = quantize(values)
    for layout in layouts.LAYOUTS:
        made = quantize(values, layout=layout)
        assert made.layout == layout and torch.equal(made.dequantize(), linear.dequantize())
        for other in layouts.LAYOUTS:
            assert torch.equal(bits(made.with_layout(other).scale), bits(quantize(values, layout=other).scale))
    assert linear.with_layout("linear") is linear


def test_pages_of_vllm():
    values = [torch.randn(5, 3, 128, 128, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    scales = torch.tensor(0.01), torch.tensor(0.02)
    made = quantize_pages(*values, "vllm", k_global_scale=scales[0], v_global_scale=scales[1])
    assert made.pool.shape == (5, 6, 128, 72) and made.pool.dtype == torch.uint8
    for number, (found, given) in enumerate(zip((made.k, made.v), values, strict=True)):
        wanted = quantize_nvfp4(given, scales[number])
        assert torch.equal(found.dequantize(), wanted.dequantize())
        for head in range(3):
            slot = made.pool[:, 2 * head + number].reshape(5, -1)
            assert torch.equal(slot[:, : 128 * 64].view(5, 128, 64), wanted.data[:, head])
            for t in range(0, 128, 7):
                for g in range(8):
                    place = t * 8 + g if number == 0 else t // 4 * 32 + g * 4 + t % 4
                    assert torch.equal(slot[:, 8192 + place], bits(wanted.scale)[:, head, t, g])
    assert (made.k.layout, made.v.layout) == ("linear", "interleaved")


def test_pages_of_sglang():
    values = [torch.randn(3, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    made = quantize_pages(values[0].bfloat16(), values[1].bfloat16(), "sglang")
    assert made.pool.shape == (3, 2 * 2 * (64 * 32 + 64 * 4)) and made.k.global_scale is None
    begin = 0
    for found, given in zip((made.k, made.v), values, strict=True):
        wanted = quantize_nvfp4(given.bfloat16(), 1.0)
        assert found.layout == "linear" and torch.equal(found.dequantize(), wanted.dequantize())
        for part in (wanted.data, bits(wanted.scale)):
            size = part[0].numel()
            assert torch.equal(made.pool[:, begin : begin + size], part.reshape(3, -1))
            begin += size
    assert begin == made.pool.shape[1]


def test_index_pages():
    keys = torch.randn(4, 128, 128, generator=torch.Generator().manual_seed(7))
    pool, made = quantize_index_pages(keys, global_scale=torch.tensor(0.5))
    wanted = quantize_nvfp4(keys, 0.5)
    assert pool.shape == (4, 9216) and torch.equal(made.dequantize(), wanted.dequantize())
    assert torch.equal(pool[:, :8192].view(4, 128, 64), wanted.data)
    assert torch.equal(pool[:, 8192:].view(4, 128, 8), bits(wanted.scale))


def test_pools_are_views_of_any_larger_one(monkeypatch):
    """Nothing is copied; a slice of what all layers share is written in place, some pages at a time."""
    monkeypatch.setattr("msa_tiles.quant.pages.CHUNK", 1)
    keys = torch.randn(3, 2, 8, 64, generator=torch.Generator().manual_seed(8))
    layers = torch.full((3, 2, 4, 8, 36), 0xAB, dtype=torch.uint8)
    made = quantize_pages(keys, -keys, "vllm", pool=layers[:, 1])
    assert (layers[:, 0] == 0xAB).all()
    again = vllm_pages(layers[:, 1])
    for one, other in ((made.k, again.k), (made.v, again.v)):
        assert one.data.untyped_storage().data_ptr() == layers.untyped_storage().data_ptr()
        assert torch.equal(one.dequantize(), other.dequantize())
    assert torch.equal(made.k.dequantize(), -made.v.dequantize())
    rows = torch.zeros(3, 2, 2 * 2 * (8 * 32 + 8 * 4), dtype=torch.uint8)
    planar = quantize_pages(keys, keys, "sglang", pool=rows[:, 1])
    assert rows[:, 0].count_nonzero() == 0 and torch.equal(planar.v.dequantize(), made.k.dequantize())
    assert torch.equal(sglang_pages(rows[:, 1], 2, 8, 64).k.dequantize(), made.k.dequantize())


def test_a_cache_takes_less_than_a_third_of_16_bits():
    keys = torch.zeros(2, 4, 128, 128, dtype=torch.bfloat16)
    made = quantize_pages(keys, keys, "vllm")
    assert made.pool.numel() <= 0.29 * 2 * keys.numel() * keys.element_size()


POOL = torch.zeros(2, 4, 128, 72, dtype=torch.uint8)
REFUSED = {
    "pool: got dtype torch.int8": lambda: vllm_pages(POOL.view(torch.int8)),
    "pool: got shape [2, 3, 128, 72]": lambda: vllm_pages(POOL[:, :3]),
    "pool: got strides": lambda: vllm_pages(POOL[:, :, ::2]),
    "pool: got shape [2, 5]; wanted [pages, 9216]": lambda: sglang_index_pages(POOL.view(2, -1)[:, :5], 128, 128),
    "head dim: got 24; wanted a multiple of 16": lambda: sglang_pages(POOL.view(2, -1), 1, 8, 24),
    "order: got 'other'": lambda: quantize_pages(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16), "other"),
    "k: got NoneType; wanted a tensor [pages, H, P, D]": lambda: quantize_pages(None, torch.zeros(1, 1, 8, 16), "vllm"),
    "v: got list; wanted a tensor": lambda: quantize_pages(torch.zeros(1, 1, 8, 16), [1.0], "sglang"),
    "k: got dtype torch.int32": lambda: quantize_pages(
        torch.zeros(1, 1, 8, 16, dtype=torch.int32), torch.zeros(1, 1, 8, 16), "vllm"
    ),
    "idx_k: got int; wanted a tensor": lambda: quantize_index_pages(3),
    "pool: got NoneType; wanted a tensor [pages, 9216]": lambda: sglang_index_pages(None, 128, 128),
    "pool: got str; wanted a tensor [pages, 2 H, P": lambda: vllm_pages("pool"),
    "tensor: got layout torch.sparse_coo; wanted torch.strided": lambda: quantize_fp8(torch.eye(4).to_sparse()),
    "v: got shape [1, 1, 8, 32]": lambda: quantize_pages(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 32), "vllm"),
    "pool: got shape [2, 4, 128, 72]; wanted": lambda: quantize_pages(
        torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16), "vllm", pool=POOL
    ),
    "idx_k: got shape [8, 16]": lambda: quantize_index_pages(torch.zeros(8, 16)),
    "layout: got 'swizzled'; wanted 'linear' for 'e4m3'": lambda: QuantizedTensor(
        torch.zeros(3, 8).to(torch.float8_e4m3fn), torch.tensor(1.0)
    ).with_layout("swizzled"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        REFUSED[message]()
