"""Quantised tensors and their quantisers, in plain torch, on any device."""

from msa_tiles.quant.fp8 import FP8, quantize_fp8
from msa_tiles.quant.tensor import QuantizedTensor, dequantize, scale_per

__all__ = ["FP8", "QuantizedTensor", "dequantize", "quantize_fp8", "scale_per"]
