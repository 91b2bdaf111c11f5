"""What a format of index keys costs: how many blocks are still chosen, and how much of dense attention lies in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.bench import agreement
from msa_tiles.bench.precisions import INDEXER

TEXT = "text"
KINDS = (*agreement.KINDS, TEXT)
LENGTH, QUERIES = 4096, 256
BLOCK = 128


@dataclass(frozen=True)
class Inputs:
    """float32 index queries [N, Hi, Di] and keys [T, Di], and what attention of the last N tokens looks at.

    `q` [N, Hq, D], `k` and `v` [T, Hkv, D] are the main branch's: on drawn values `q` and `k` are the indexer's own.
    """

    idx_q: Tensor
    idx_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    topk: int


@dataclass(frozen=True)
class Cost:
    """Of blocks chosen in a precision: the share of float32's that are among them, and of dense attention inside them.

    `mass_of_float32` is the latter of the blocks that float32 scores choose.
    """

    precision: str
    kind: str
    tokens: int
    overlap: float
    mass: float
    mass_of_float32: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@functools.lru_cache(maxsize=len(KINDS))
def inputs(kind: str, length: int = LENGTH) -> Inputs:
    """On the CPU. `gaussian` and `outliers` as in `msa_tiles.bench.agreement`; `text` is the demo's, embedded."""
    if kind != TEXT:
        idx_q, idx_k = agreement.inputs(kind, length, torch.device("cpu"))
        k = idx_k[:, None].expand(-1, idx_q.shape[1], -1)
        _, v = agreement.inputs(kind, length, torch.device("cpu"), seed=1)
        return Inputs(idx_q, idx_k, idx_q, k, v[:, None].expand_as(k), agreement.TOPK)
    from msa_tiles.demo import embed, text

    source = text.load(None, length)
    layer = embed.embed(list(source.ids), embed.SMALL, torch.float32, torch.device("cpu"))
    rows = slice(-QUERIES, None)
    return Inputs(layer.idx_q[rows], layer.idx_k, layer.q[rows], layer.k, layer.v, embed.SMALL.topk)


def mass_inside(x: Inputs, ids: Tensor) -> float:
    """The mean share of causal dense attention of the queries that lies in blocks `ids [Hkv, N, k]`, -1 for none."""
    num_q, heads, dim = x.q.shape
    total, kv_heads, _ = x.k.shape
    hidden = torch.arange(total) > (torch.arange(num_q) + total - num_q)[:, None]
    blocks = -(-total // BLOCK)
    kept = torch.zeros(kv_heads, num_q, blocks + 1, dtype=torch.bool)
    kept.scatter_(2, torch.where(ids >= 0, ids, blocks).long(), True)
    shares = []
    for head in range(heads):
        group = head * kv_heads // heads
        logits = (x.q[:, head] @ x.k[:, group].T * dim**-0.5).masked_fill(hidden, -torch.inf)
        weights = torch.nn.functional.pad(logits.softmax(-1), (0, blocks * BLOCK - total))
        by_block = weights.unflatten(1, (blocks, BLOCK)).sum(-1)
        shares.append((by_block * kept[group, :, :blocks]).sum(-1))
    return float(torch.stack(shares).mean())


@functools.lru_cache(maxsize=8)
def costs(precisions: Sequence[str] = INDEXER, length: int = LENGTH) -> tuple[Cost, ...]:
    """For each kind of inputs and each precision of the indexer."""
    found = []
    for kind in KINDS:
        x = inputs(kind, length)
        heads = x.k.shape[1]
        wanted = reference.select_blocks(x.idx_q, x.idx_k, x.topk, num_kv_heads=heads)
        best = mass_inside(x, wanted)
        for precision in precisions:
            idx_q, idx_k = agreement.in_precision(x.idx_q, x.idx_k, precision)
            got = ops.select_blocks(idx_q, idx_k, x.topk, num_kv_heads=heads)
            found.append(Cost(precision, kind, length, agreement.overlap(got, wanted), mass_inside(x, got), best))
    return tuple(found)
