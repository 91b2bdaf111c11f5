"""What the demo stores its keys, values and index keys in, and what that costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles.bench.inputs import Stored, in_format
from msa_tiles.demo.embed import Layer

BF16 = "bf16"
FORMATS = {BF16: "bf16", "fp8": "e4m3", "nvfp4": "nvfp4", "fp4": "mxfp4"}
"""What a group of precisions stores keys, values and index keys in; index queries too where that is e4m3."""


@dataclass(frozen=True)
class Held:
    """A layer's inputs as its caches hold them: `q`, index queries and keys, keys and values."""

    q: Tensor
    idx_q: Stored
    idx_k: Stored
    k: Stored
    v: Stored


@dataclass(frozen=True)
class Cost:
    """What a precision costs beside the same layer unquantised, over all queries.

    `overlap` is the share of the unquantised layer's blocks that are chosen. `error` is the largest difference of an
    output of the checked rows from dense attention over the same blocks of unquantised keys and values, relative to the
    largest; `mean_error` is the mean difference by the mean output. One word for another, where two match a question
    nearly as well, is as large as an output. `found` and `found_unquantised` count questions whose answer's block is
    chosen.
    """

    overlap: float
    error: float
    mean_error: float
    found: int
    found_unquantised: int


def held(layer: Layer, group: str) -> Held:
    """The inputs in the formats of a group of precisions; as they are for BF16."""
    if group == BF16:
        return Held(layer.q, layer.idx_q, layer.idx_k, layer.k, layer.v)
    form = FORMATS[group]
    idx_q: Stored = in_format(layer.idx_q, form, fitted=True) if form == "e4m3" else layer.idx_q
    return Held(layer.q, idx_q, *(in_format(part, form, fitted=True) for part in (layer.idx_k, layer.k, layer.v)))


def rows(stored: Stored, begin: int, end: int) -> Stored:
    """Tokens `begin .. end`."""
    part = slice(begin, end)
    if isinstance(stored, Tensor):
        return stored[part]
    return dataclasses.replace(stored, data=stored.data[part], scale=stored.scale[part])


def values(stored: Stored) -> Tensor:
    """What the stored elements stand for, in float32 where they are quantised."""
    return stored if isinstance(stored, Tensor) else stored.dequantize(torch.float32)
