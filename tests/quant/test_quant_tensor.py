"""What a quantised tensor can besides standing for values: go to another device and into a file."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch

from msa_tiles.quant import QuantizedTensor, dequantize, quantize_fp8, quantize_mxfp4, quantize_nvfp4

MAKERS: dict[str, Callable[[torch.Tensor], QuantizedTensor]] = {
    "e4m3": quantize_fp8,
    "nvfp4": quantize_nvfp4,
    "nvfp4 with a global scale": lambda x: quantize_nvfp4(x, global_scale=torch.tensor(0.5)),
    "nvfp4 swizzled": lambda x: quantize_nvfp4(x).with_layout("swizzled"),
    "mxfp4": quantize_mxfp4,
}


def parts(value: QuantizedTensor) -> list[torch.Tensor]:
    return [part for part in (value.data, value.scale, value.global_scale) if part is not None]


@pytest.mark.parametrize("kind", MAKERS)
def test_all_parts_go_to_another_device(kind: str) -> None:
    value = MAKERS[kind](torch.randn(8, 2, 64))
    moved = value.to("meta")
    assert value.device.type == "cpu" and value.to("cpu") is value
    assert moved.device.type == "meta" and {part.device.type for part in parts(moved)} == {"meta"}
    assert len(parts(moved)) == len(parts(value))
    assert (moved.format, moved.layout, moved.shape) == (value.format, value.layout, value.shape)


def test_a_dtype_is_no_device() -> None:
    value = quantize_fp8(torch.randn(8, 2, 64))
    with pytest.raises(TypeError, match=r"device: got torch\.bfloat16; wanted a device; dequantize\(\) takes a dtype"):
        value.to(torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device: got NoneType; wanted a device"):
        value.to(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MAKERS)
def test_it_comes_back_from_a_file_of_weights(kind: str) -> None:
    value, file = MAKERS[kind](torch.randn(8, 2, 64)), io.BytesIO()
    torch.save({"k": value}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["k"]
    assert (found.format, found.layout) == (value.format, value.layout)
    assert all(map(torch.equal, map(bits, parts(found)), map(bits, parts(value))))
    assert torch.equal(found.dequantize(), value.dequantize())


def bits(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "float32"])
def test_values_are_dequantised_to_floats_of_16_bits_or_more(dtype: torch.dtype) -> None:
    stored = quantize_fp8(torch.randn(2, 3))
    for run in (stored.dequantize, lambda dtype: dequantize(stored.data, stored.scale, dtype)):
        with pytest.raises(TypeError, match=r"dtype: got .*; wanted torch\.float32, bfloat16, float16 or float64"):
            run(dtype)
