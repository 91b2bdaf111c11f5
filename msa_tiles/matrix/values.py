"""What a format of keys and values costs: how far attention over them lies from attention over float32 ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.bench import precisions
from msa_tiles.bench.inputs import in_format
from msa_tiles.matrix import selection
from msa_tiles.quant import QuantizedTensor


@dataclass(frozen=True)
class Cost:
    """`error` is the root mean square of what attention's output is off by, over that of the output.

    The same blocks are read, and the arithmetic is float32's: what differs is how keys and values are stored.
    """

    precision: str
    kind: str
    tokens: int
    error: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def stored(values: Tensor, precision: str) -> Tensor:
    """Keys or values [T, Hkv, D] as they are read from a cache of that precision, in float32."""
    held = in_format(values, precisions.stored(precision, "key_value").name, fitted=True)
    return held.dequantize(torch.float32) if isinstance(held, QuantizedTensor) else held.float()


def errors(x: selection.Inputs, names: Sequence[str]) -> list[float]:
    """Of attention in these precisions to the blocks that float32 scores choose."""
    ids = reference.select_blocks(x.idx_q, x.idx_k, x.topk, num_kv_heads=x.k.shape[1])
    wanted = reference.sparse_attention(x.q, x.k, x.v, ids)[0]
    found = (reference.sparse_attention(x.q, stored(x.k, name), stored(x.v, name), ids)[0] for name in names)
    return [float((out - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()) for out in found]


@functools.lru_cache(maxsize=8)
def costs(names: Sequence[str] = precisions.ATTENTION, length: int = selection.LENGTH) -> tuple[Cost, ...]:
    """For each kind of inputs and each precision of attention."""
    found = {kind: errors(selection.inputs(kind, length), names) for kind in selection.KINDS}
    return tuple(
        Cost(name, kind, length, error)
        for kind, of_kind in found.items()
        for name, error in zip(names, of_kind, strict=True)
    )
