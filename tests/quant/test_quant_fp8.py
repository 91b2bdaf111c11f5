"""FP8 quantisers against numpy's e4m3, and what a quantised tensor may be made of."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from msa_tiles.quant import (
    FP8,
    QuantizedTensor,
    dequantize,
    quantize_fp8,
    quantize_nvfp4,
    round_fp8,
    scale_of,
    scale_per,
)

LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
SCALES = {
    (7, 3, 16): {"tensor": (), "head": (3,), "token_head": (7, 3)},
    (5, 2, 4, 8): {"tensor": (), "head": (2,), "token_head": (5, 2, 4)},
    (9, 16): {"tensor": (), "token_head": (9,)},
}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("shape", "per"), [(shape, per) for shape, found in SCALES.items() for per in found])
def test_values_are_rounded_once_and_use_the_whole_range(shape, per):
    values = normal(*shape) * torch.rand(shape[:-1])[..., None] * 100
    made = quantize_fp8(values.to(torch.float64), per)
    assert made.data.dtype == FP8 and made.format == "e4m3"
    assert made.scale.dtype == torch.float32 and made.scale.shape == SCALES[shape][per]
    assert scale_per(made.scale, shape) == per
    kept = {"tensor": (), "head": (1,), "token_head": tuple(range(len(shape) - 1))}[per]
    scale = made.scale.numpy().reshape([n if dim in kept else 1 for dim, n in enumerate(shape)])
    reduced = tuple(dim for dim in range(len(shape)) if dim not in kept)
    assert np.abs(made.data.float().numpy()).max(reduced).min() == LARGEST
    wanted = (values.numpy() / scale).clip(-LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    assert (made.data.view(torch.uint8).numpy() == wanted.view(np.uint8)).all()
    assert (made.dequantize().numpy() == wanted.astype(np.float32) * scale).all()
    assert made.dequantize(torch.bfloat16).dtype == torch.bfloat16
    # Half a step of 3 bits of mantissa; numbers below 2**-6 have steps of 2**-9.
    assert (np.abs(made.dequantize().numpy() - values.numpy()) <= np.maximum(
        np.abs(values.numpy()) / 16, scale * 2.0**-10) * (1 + 1e-6)).all()  # fmt: skip


def test_zeros_nan_and_nothing():
    values = torch.zeros(3, 2, 8)
    values[1, 1, 3] = torch.nan
    values[1, 1, 4] = 5.0
    made = quantize_fp8(values, "token_head")
    assert made.scale[0, 0] == 1 and made.scale[1, 1] == torch.tensor(5.0) / 448
    back = made.dequantize()
    assert back[1, 1, 3].isnan() and back.nan_to_num(0.0).count_nonzero() == 1
    for per, shape in SCALES[(7, 3, 16)].items():
        empty = quantize_fp8(torch.zeros(0, 3, 16), per)
        assert empty.scale.shape == (0, *shape[1:]) if per == "token_head" else empty.scale.shape == shape
        assert empty.dequantize().shape == (0, 3, 16)


@pytest.mark.parametrize("tokens", [0, 3])
def test_scales_are_float32_whatever_the_default_is(tokens):
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = [quantize_fp8(torch.zeros(tokens, 2, 16), per).scale.dtype for per in ("tensor", "head", "token_head")]
    finally:
        torch.set_default_dtype(torch.float32)
    assert made == [torch.float32] * 3


def test_dequantize_takes_what_operators_take():
    data = normal(7, 3, 16).to(FP8)
    assert torch.equal(dequantize(data), data.float())
    heads, rows = torch.rand(3) + 1, torch.rand(7, 3) + 1
    assert torch.equal(dequantize(data, heads), data.float() * heads[:, None])
    assert torch.equal(dequantize(data, rows.T.contiguous().T), data.float() * rows[..., None])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: quantize_fp8(normal(3, 8), "block"), ValueError, "per: got 'block'; wanted one of 'tensor', 'head'"),
        (lambda: quantize_fp8(normal(3, 8), "head"), ValueError, "tensor: got shape [3, 8]; wanted heads"),
        (lambda: quantize_fp8(torch.ones(3, 8).int()), TypeError, "tensor: got dtype torch.int32"),
        (lambda: quantize_fp8(normal(3, 8).to(FP8)), TypeError, "wanted values that are not quantised yet"),
        (lambda: QuantizedTensor(normal(3, 8), torch.ones(())), TypeError, "data: got dtype torch.float32"),
        (
            lambda: QuantizedTensor(normal(3, 8).to(torch.float8_e5m2), torch.ones(())),
            TypeError,
            "data: got dtype torch.float8_e5m2; wanted torch.float8_e4m3fn for 'e4m3'",
        ),
        (
            lambda: QuantizedTensor(normal(3, 8).to(FP8), torch.ones(()), "int8"),
            ValueError,
            "format: got 'int8'; wanted one of 'e4m3'",
        ),
        (lambda: QuantizedTensor(normal(3, 8).to(FP8), torch.ones(3).double()), TypeError, "scale: got dtype"),
        (lambda: QuantizedTensor(normal(3, 8).to(FP8), torch.ones(8)), ValueError, "wanted one of [], [3]"),
        (
            lambda: QuantizedTensor(normal(3, 2, 8).to(FP8), torch.ones(3)),
            ValueError,
            "scale: got shape [3]; wanted one of [], [2], [3, 2]",
        ),
        (
            lambda: QuantizedTensor(normal(3, 8).to(FP8), torch.ones((), device="meta")),
            ValueError,
            "scale: got device meta; wanted cpu like data",
        ),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


QUANTISED = quantize_fp8(torch.ones(3, 8))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: quantize_fp8(QUANTISED), "tensor: got QuantizedTensor"),
        (lambda: quantize_fp8([1.0]), "tensor: got list"),
        (lambda: quantize_nvfp4([1.0]), "tensor: got list"),
        (lambda: dequantize(3), "data: got int"),
        (lambda: dequantize(QUANTISED.data, 1.0), "scale: got float"),
        (lambda: QuantizedTensor(QUANTISED.data, 1.0), "scale: got float"),
        (lambda: QuantizedTensor([1], QUANTISED.scale), "data: got list"),
        (lambda: round_fp8([1.0]), "values: got list"),
        (lambda: scale_of([1.0]), "largest: got list"),
        (lambda: scale_per(1.0, [3]), "scale: got float"),
    ],
)
def test_what_is_no_tensor_is_named(make, name):
    with pytest.raises(TypeError, match=re.escape(name)):
        make()


def test_a_quantised_tensor_is_dequantised_whole():
    made = quantize_nvfp4(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), 0.5)
    assert torch.equal(dequantize(made, dtype=torch.bfloat16), made.dequantize(torch.bfloat16))
    with pytest.raises(ValueError, match="which has its scales"):
        dequantize(made, made.scale)
