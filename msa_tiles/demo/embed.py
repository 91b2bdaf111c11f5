"""Tensors from tokens: fixed random projections of the context in front of each token.

Nothing is learnt. A token, or a pair or triple of neighbouring tokens, owns a random sign vector; a context is the sum
of the vectors of what it holds, rare things weighing more, so that the inner product of two contexts measures what
they share. Two contexts are used:

- the indexer's: the words and word pairs among the last `PHRASE` tokens, whatever their order elsewhere; index heads
  differ in how they weigh words against pairs, as they share one index key;
- the attention's: the one, two and three tokens that end at a position; KV heads have projections of their own and the
  query heads of a group differ in sharpness.

Keys describe the context **before** their token, queries the context that **includes** it, and a value says which token
stands there. A query whose context occurred before therefore finds the token that followed it then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles.demo.questions import PHRASE

_SEED = 20260613
_PEAK_LOGIT = 22.0


@dataclass(frozen=True)
class Shape:
    """Head counts and dims of the layer that the demo runs."""

    num_q_heads: int
    num_kv_heads: int
    num_index_heads: int
    head_dim: int
    block_size: int = 128
    topk: int = 16

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads


M3 = Shape(num_q_heads=64, num_kv_heads=4, num_index_heads=4, head_dim=128)
SMALL = Shape(num_q_heads=16, num_kv_heads=2, num_index_heads=2, head_dim=64)
"""The shape for a CPU: same block, top-k and group proportions, an eighth of the arithmetic."""


@dataclass(frozen=True)
class Layer:
    """What one attention layer gets: `q [T, Hq, D]`, `k v [T, Hkv, D]`, `idx_q [T, Hi, D]`, `idx_k [T, D]`.

    `words [Hkv, vocabulary, D]` is the table that the values were taken from, to read answers out of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    idx_q: Tensor
    idx_k: Tensor
    words: Tensor


def _signs(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (rows, dim), generator=generator, dtype=torch.int8).to(torch.float32) * 2 - 1


def _ngrams(ids: Tensor, longest: int) -> list[Tensor]:
    """`[T]` ids of the 1-, 2-, ... `longest`-gram that ends at each token; equal n-grams share an id."""
    orders = [ids]
    for n in range(1, longest):
        # The n-gram ending at t: the (n-1)-gram ending at t-1, then token t. The first ones start with nothing (0).
        before = torch.cat([torch.zeros(1, dtype=ids.dtype), orders[n - 1][:-1] + 1])
        pairs = before * (int(ids.max()) + 1) + ids
        orders.append(torch.unique(pairs, return_inverse=True)[1])
    return orders


def _weights(ngram: Tensor) -> Tensor:
    """`[T]` weight of each n-gram: the logarithm of how rare it is."""
    count = torch.bincount(ngram)
    return torch.log1p(len(ngram) / count[ngram].to(torch.float32))


def _window_sum(x: Tensor, width: int) -> Tensor:
    """Row t of the result is the sum of rows `t - width + 1 .. t` of `x [T, D]`."""
    padded = torch.cat([x.new_zeros(width, x.shape[1]), x]).to(torch.float64).cumsum(0)
    return (padded[width:] - padded[:-width]).to(torch.float32)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def _before(x: Tensor) -> Tensor:
    """Contexts that end one token earlier; the first token has an empty context."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def _index(orders: list[Tensor], shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    contexts = []
    for n, ngram in enumerate(orders[:2], start=1):
        table = _signs(int(ngram.max()) + 1, shape.head_dim, generator)
        weighted = table[ngram] * _weights(ngram)[:, None]
        # A window of PHRASE tokens holds PHRASE words and PHRASE - 1 whole pairs.
        contexts.append(_unit(_window_sum(weighted, PHRASE + 1 - n)))
    words, pairs = contexts
    share = torch.linspace(0.2, 0.8, shape.num_index_heads)
    scale = math.sqrt(shape.head_dim)
    idx_q = torch.stack([_unit((1 - s) * words + s * pairs) for s in share], dim=1) * scale
    return idx_q, _before(_unit(words + pairs)) * scale


def _attention(orders: list[Tensor], shape: Shape, generator: torch.Generator, like: Tensor) -> tuple[Tensor, Tensor]:
    sharpness = torch.linspace(0.6, 1.2, shape.group) if shape.group > 1 else torch.ones(1)
    # softmax_scale is D**-0.5, so that a context that matches in full gets the logit `_PEAK_LOGIT * sharpness`.
    scale = math.sqrt(_PEAK_LOGIT * math.sqrt(shape.head_dim))
    total = len(orders[0])
    # Only one head's context is ever held in float32: at 1M tokens all query heads would be 34 GB.
    queries = like.new_empty(total, shape.num_kv_heads, shape.group, shape.head_dim)
    keys = like.new_empty(total, shape.num_kv_heads, shape.head_dim)
    for head in range(shape.num_kv_heads):
        context = torch.zeros(total, shape.head_dim)
        for ngram in orders:
            table = _signs(int(ngram.max()) + 1, shape.head_dim, generator)
            context += table[ngram] * _weights(ngram)[:, None]
        context = (_unit(context) * scale).to(like)
        for member, sharp in enumerate(sharpness.tolist()):
            queries[:, head, member] = context * sharp
        keys[:, head] = _before(context)
    return queries.flatten(1, 2), keys


def embed(ids: list[int], shape: Shape, dtype: torch.dtype, device: torch.device) -> Layer:
    """The layer's inputs for a text. Same ids, same tensors, on every device."""
    generator = torch.Generator().manual_seed(_SEED)
    like = torch.empty(0, dtype=dtype, device=device)
    orders = _ngrams(torch.tensor(ids, dtype=torch.int64), 3)
    idx_q, idx_k = _index(orders, shape, generator)
    q, k = _attention(orders, shape, generator, like)
    words = torch.stack([_signs(max(ids) + 1, shape.head_dim, generator) for _ in range(shape.num_kv_heads)])
    v = words[:, orders[0]].transpose(0, 1).contiguous()
    return Layer(q, k, v.to(like), idx_q.to(like), idx_k.to(like), words.to(device=device))


def read_out(layer: Layer, out: Tensor) -> Tensor:
    """`[N]` token ids that the rows `out [N, Hq, D]` point at, by the votes of all heads."""
    by_group = out.to(torch.float32).unflatten(1, (layer.words.shape[0], -1)).sum(2)
    return torch.einsum("nhd,hvd->nv", by_group, layer.words).argmax(-1)
