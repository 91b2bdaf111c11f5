"""How the tensors of a call are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from msa_tiles.quant import FP8


def is_quantised(tensor: Tensor) -> bool:
    """Whether its elements stand for values only together with a scale."""
    return tensor.dtype == FP8


def output_dtype(query: Tensor) -> torch.dtype:
    """The dtype of attention's output: the query's, bfloat16 for quantised ones."""
    return torch.bfloat16 if is_quantised(query) else query.dtype
