"""Quantised tensors and their quantisers, in plain torch, on any device.

Wrong arguments raise ``TypeError`` or ``ValueError`` that name them. Group sizes and what a format has besides are
``GROUPS``, the dtype of e4m3 is ``FP8``, and a byte holds ``PACKED`` elements of 4 bits.
"""

from msa_tiles.quant.fp4 import quantize_mxfp4, quantize_nvfp4
from msa_tiles.quant.fp8 import FP8, quantize_fp8, round_fp8, scale_of
from msa_tiles.quant.pages import (
    Pages,
    quantize_index_pages,
    quantize_pages,
    sglang_index_pages,
    sglang_pages,
    vllm_pages,
)
from msa_tiles.quant.tensor import GROUPS, PACKED, QuantizedTensor, dequantize, scale_per

__all__ = [
    "FP8",
    "GROUPS",
    "PACKED",
    "Pages",
    "QuantizedTensor",
    "dequantize",
    "quantize_fp8",
    "quantize_index_pages",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "quantize_pages",
    "round_fp8",
    "scale_of",
    "scale_per",
    "sglang_index_pages",
    "sglang_pages",
    "vllm_pages",
]
