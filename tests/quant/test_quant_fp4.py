"""NVFP4 and MXFP4 quantisers against ml_dtypes' e2m1, e4m3 and e8m0, code by code and at every tie."""

from __future__ import annotations

import re
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from msa_tiles.paths import specs_dir
from msa_tiles.quant import GROUPS, PACKED, QuantizedTensor, dequantize, fp4, quantize_mxfp4, quantize_nvfp4, rounding
from msa_tiles.spec import load

E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
CODES = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
QUANTIZERS = {"nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def same(found: torch.Tensor, wanted: np.ndarray) -> bool:
    """Bit for bit, of 8-bit types."""
    return bool((found.contiguous().view(torch.uint8).numpy() == wanted.view(np.uint8)).all())


def around(points: np.ndarray) -> np.ndarray:
    """The points, the middle of every two, and the float64 numbers beside each of them."""
    middles = np.array([(a + b) / 2 for a, b in pairwise(sorted(set(points)))])
    near = np.concatenate([points, middles])
    return np.concatenate([near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)])


def test_specs_say_the_same():
    formats = load(specs_dir()).formats
    for name, groups in GROUPS.items():
        scale = formats[name].scale
        assert formats[name].storage == "uint8" and formats[name].packed == PACKED
        assert scale.group == groups.size and (scale.global_dtype == "float32") == groups.has_global
        assert getattr(torch, scale.dtype) == groups.dtype


def test_every_code_of_e2m1_and_every_tie():
    codes = torch.arange(16, dtype=torch.uint8)
    assert same(rounding.e2m1_values(codes).view(torch.uint8), CODES.astype(np.float32))
    values = around(CODES)
    # float32 has all ties, and numbers beside them that ml_dtypes rounds straight from there.
    narrow = np.concatenate([values.astype(np.float32), [-1e30, 1e30]]).astype(np.float32)
    narrow = np.concatenate([narrow, np.nextafter(narrow, np.float32(np.inf)), np.nextafter(narrow, np.float32(0))])
    wanted = narrow.clip(-6, 6).astype(E2M1)
    assert same(rounding.e2m1_codes(torch.from_numpy(narrow.astype(np.float64))), wanted)
    # float64 decides what float32 would see as a tie.
    middle = torch.tensor([0.25, 0.75, 2.5, 5.0], dtype=torch.float64)
    above, below = torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)
    assert rounding.e2m1_codes(above).tolist() == [1, 2, 5, 7]
    assert rounding.e2m1_codes(below).tolist() == [0, 1, 4, 6]
    assert rounding.e2m1_codes(middle).tolist() == [0, 2, 4, 6]
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=torch.float64)
    assert rounding.e2m1_codes(odd).tolist() == [0, 7, 15, 8]


def test_every_scale_of_e4m3_and_every_tie():
    numbers = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)
    values = around(numbers)
    values = values[values >= 0]
    narrow = values.astype(np.float32)
    wanted = np.minimum(narrow, 448).astype(E4M3)
    assert same(rounding.to_e4m3(torch.from_numpy(narrow.astype(np.float64))), wanted)
    ties = torch.from_numpy(np.array([(a + b) / 2 for a, b in pairwise(numbers)]))
    even = torch.arange(126) + torch.arange(126) % 2
    assert rounding.to_e4m3(ties).view(torch.uint8).tolist() == even.tolist()
    for direction, code in ((torch.inf, 1), (-torch.inf, 0)):
        beside = torch.nextafter(ties, torch.full_like(ties, direction))
        assert rounding.to_e4m3(beside).view(torch.uint8).tolist() == (torch.arange(126) + code).tolist()
    odd = torch.tensor([torch.nan, torch.inf, 1e300, 1e-300], dtype=torch.float64)
    assert rounding.to_e4m3(odd).view(torch.uint8).tolist() == [0x7F, 0x7E, 0x7E, 0]


def test_every_scale_of_e8m0():
    codes = np.arange(255, dtype=np.uint8)
    numbers = codes.view(E8M0).astype(np.float64)
    for values in (numbers, np.nextafter(numbers * 2, 0)):
        assert same(rounding.floor_e8m0(torch.from_numpy(values)), codes.view(E8M0))
    odd = torch.tensor([torch.nan, torch.inf, 0.0, 2.0**-140, 2.0**130], dtype=torch.float64)
    assert rounding.floor_e8m0(odd).view(torch.uint8)[2:].tolist() == [0, 0, 254]
    assert rounding.floor_e8m0(odd[:1]).view(torch.uint8).item() == 255


@pytest.mark.parametrize("scale", range(0, 256, 5))
def test_every_code_under_every_scale(scale):
    """A byte is two codes, the even element in the low nibble."""
    data = torch.arange(256, dtype=torch.uint8)
    pairs = np.stack([CODES[np.arange(256) % 16], CODES[np.arange(256) // 16]], -1).reshape(-1).astype(np.float32)
    for name, kind in (("nvfp4", E4M3), ("mxfp4", E8M0)):
        groups = GROUPS[name]
        stored = torch.full((512 // groups.size,), scale, dtype=torch.uint8).view(groups.dtype)
        found = QuantizedTensor(data, stored, name).dequantize()
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = pairs * np.uint8(scale).reshape(1).view(kind).astype(np.float32)
        np.testing.assert_array_equal(found.numpy(), wanted)
        assert (found.signbit().numpy() == np.signbit(wanted)).all() or np.isnan(wanted).all()


@pytest.mark.parametrize("outer", [1.0, 1e-6, 1e4, 0.3, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_is_rounded_once(outer, dtype):
    sizes = torch.logspace(-4, 4, 24)[:, None]
    values = (normal(24, 64) * sizes * (outer or 1.0)).to(dtype)
    made = quantize_nvfp4(values, outer)
    assert made.format == "nvfp4" and made.shape == values.shape and made.layout == "linear"
    assert made.global_scale is not None and made.global_scale.shape == ()
    held = np.float64(made.global_scale.item())
    exact = values.double().numpy().reshape(24, 4, 16)
    largest = np.abs(exact).max(-1)
    if outer is None:
        assert held == np.float32(largest.max() / 2688)
    # Quotients of float64 are no ties of float32, so that float32 would round most of them as well; compare exactly.
    scale = rounding.to_e4m3(torch.from_numpy(largest / (6 * held)))
    assert torch.equal(made.scale.view(torch.uint8), scale.view(torch.uint8))
    unit = scale.double().numpy()[..., None] * held
    found = CODES[rounding.unpacked(made.data).numpy()].reshape(24, 4, 16)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(unit > 0, exact / unit, 0.0).clip(-6, 6)
    assert (np.abs(found) <= 6).all()
    distance = np.abs(wanted[..., None] - CODES)
    assert (np.abs(found - wanted) == distance.min(-1)).all()
    back = found * scale.float().numpy()[..., None] * np.float32(held)
    np.testing.assert_array_equal(made.dequantize().numpy(), back.reshape(24, 64).astype(np.float32))


def test_mxfp4_is_rounded_once():
    values = normal(24, 64) * torch.logspace(-30, 30, 24)[:, None]
    made = quantize_mxfp4(values)
    assert made.format == "mxfp4" and made.global_scale is None
    exact = values.double().numpy().reshape(24, 2, 32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(exact).max(-1))) - 2)
    assert same(made.scale, scale.astype(E8M0))
    wanted = (exact / scale[..., None]).clip(-6, 6).astype(np.float32).astype(E2M1)
    codes = rounding.unpacked(made.data)
    assert same(codes.view(24, 2, 32), wanted)
    np.testing.assert_array_equal(made.dequantize().double().numpy().reshape(24, 2, 32), CODES[codes].reshape(
        24, 2, 32) * scale[..., None])  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_saturation_nan_and_infinity(name):
    group = GROUPS[name].size
    values = torch.zeros(7, 2 * group)
    values[1, 3], values[1, 4] = torch.nan, 5.0
    values[2, 0], values[2, 1], values[2, 2] = torch.inf, -torch.inf, 1.0
    values[3, :] = 6.0
    values[4, 0], values[4, 1] = 1e30, 1.0
    values[5, 0] = -1e-30
    values[6, 0] = -3e38
    more = () if name == "mxfp4" else (1.0,)
    made = QUANTIZERS[name](values, *more)
    back = made.dequantize()
    assert torch.equal(back[0], torch.zeros(2 * group)) and made.data[0].count_nonzero() == 0
    # A group with NaN is NaN, and no other.
    assert back[1, :group].isnan().all() and torch.equal(back[1, group:], torch.zeros(group))
    assert made.scale[1].view(torch.uint8).tolist() == [0x7F if name == "nvfp4" else 0xFF, 0x00]
    assert not back[[0, 2, 3, 4, 5, 6]].isnan().any() and back.nan_to_num(0.0).isfinite().all()
    largest = 2688.0 if name == "nvfp4" else 6 * 2.0**125
    assert back[2, :3].tolist() == [largest, -largest, 0.0] and back[6, 0] == -largest
    assert torch.equal(back[3], torch.full((2 * group,), 6.0))
    if name == "nvfp4":
        assert back[4, 0] == largest and back[5, 0] == 0
    else:
        assert back[4, 0] < 1e30 and back[4, 0] / 1e30 > 0.75 and back[5, 0] / -1e-30 > 0.75


def test_global_scales():
    values = normal(3, 5, 32)
    plain = quantize_nvfp4(values)
    assert torch.equal(plain.dequantize(), quantize_nvfp4(values, plain.global_scale).dequantize())
    assert quantize_nvfp4(torch.zeros(2, 16)).global_scale == 1
    assert quantize_nvfp4(torch.full((2, 16), torch.nan)).global_scale == 1
    values[0, 0, 0] = torch.inf
    assert quantize_nvfp4(values).global_scale == torch.where(values.isfinite(), values, 0).abs().amax() / 2688
    tiny = quantize_nvfp4(torch.full((2, 16), 1e-40))
    assert tiny.global_scale > 0 and tiny.dequantize().isfinite().all()
    # None stands for 1, and nothing else does.
    without = QuantizedTensor(plain.data, plain.scale, "nvfp4")
    assert torch.equal(without.dequantize() * plain.global_scale, plain.dequantize())
    zero = quantize_nvfp4(values, torch.tensor(0.0)).dequantize()
    assert torch.equal(zero, torch.zeros_like(zero))


def test_a_code_times_its_scale_may_exceed_e4m3():
    """6 * 448 is no e4m3: whoever decodes to it loses what 16 bits hold."""
    made = QuantizedTensor(
        torch.full((1, 8), 0x77, dtype=torch.uint8), torch.tensor([[448.0]]).to(torch.float8_e4m3fn), "nvfp4"
    )
    assert (made.dequantize() == 2688).all() and (made.dequantize(torch.bfloat16).float() == 2688).all()


def test_pieces_do_not_matter(monkeypatch):
    values = normal(37, 3, 64)[::2].transpose(0, 1)
    whole = quantize_nvfp4(values)
    monkeypatch.setitem(fp4.CHUNK, "cpu", 200)
    assert torch.equal(quantize_nvfp4(values).data, whole.data)
    assert torch.equal(quantize_mxfp4(values[:0]).dequantize(), values[:0])
    assert quantize_nvfp4(values[:, :0]).data.shape == (3, 0, 32)


REFUSED = {
    "tensor: got shape [3, 24]; wanted [..., T, D] with D a multiple of 16": lambda: quantize_nvfp4(normal(3, 24)),
    "tensor: got shape [48]; wanted [..., T, D] with D a multiple of 32": lambda: quantize_mxfp4(normal(48)),
    "tensor: got dtype torch.uint8; wanted values that are not quantised yet: bfloat16, float16, float32": lambda: (
        quantize_mxfp4(torch.zeros(3, 32, dtype=torch.uint8))
    ),
    "tensor: got list; wanted a tensor": lambda: quantize_nvfp4([1.0]),  # type: ignore[arg-type]
    "global_scale: got -1.0; wanted a number above 0": lambda: quantize_nvfp4(normal(3, 16), -1.0),
    "global_scale: got bool; wanted": lambda: quantize_nvfp4(normal(3, 16), True),
    "global_scale: got torch.float32 of shape [2]": lambda: quantize_nvfp4(normal(3, 16), torch.ones(2)),
    "layout: got 'round'; wanted one of 'linear', 'interleaved', 'swizzled'": lambda: quantize_nvfp4(
        normal(4, 16), layout="round"
    ),
    "layout: got 'interleaved' for 3 tokens; wanted a multiple of 4": lambda: quantize_nvfp4(
        normal(3, 16), layout="interleaved"
    ),
    "scale: got dtype torch.float32; wanted torch.float8_e4m3fn": lambda: QuantizedTensor(
        torch.zeros(3, 8, dtype=torch.uint8), torch.ones(3, 1), "nvfp4"
    ),
    "scale: got shape [3, 2]; wanted [3, 1], linear": lambda: QuantizedTensor(
        torch.zeros(3, 8, dtype=torch.uint8), torch.ones(3, 2).to(torch.float8_e4m3fn), "nvfp4"
    ),
    "data: got shape [3, 8]; wanted [..., D / 2] with D a multiple of 32": lambda: QuantizedTensor(
        torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu), "mxfp4"
    ),
    "global_scale: got a Tensor; wanted None for 'mxfp4'": lambda: QuantizedTensor(
        torch.zeros(3, 16, dtype=torch.uint8),
        torch.zeros(3, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "mxfp4",
        "linear",
        torch.tensor(1.0),
    ),
    "global_scale: got dtype torch.float64": lambda: QuantizedTensor(
        torch.zeros(3, 8, dtype=torch.uint8),
        torch.ones(3, 1).to(torch.float8_e4m3fn),
        "nvfp4",
        global_scale=torch.tensor(1.0, dtype=torch.float64),
    ),
    "global_scale: got shape [1]; wanted []": lambda: QuantizedTensor(
        torch.zeros(3, 8, dtype=torch.uint8),
        torch.ones(3, 1).to(torch.float8_e4m3fn),
        "nvfp4",
        global_scale=torch.ones(1),
    ),
    "layout: got 'swizzled'; wanted 'linear' for 'e4m3'": lambda: QuantizedTensor(
        torch.zeros(3, 8).to(torch.float8_e4m3fn), torch.tensor(1.0), layout="swizzled"
    ),
    "scale: got None; wanted float8_e4m3fn (nvfp4)": lambda: dequantize(torch.zeros(3, 8, dtype=torch.uint8)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        REFUSED[message]()
