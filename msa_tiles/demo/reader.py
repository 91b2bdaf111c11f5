"""A small model whose attention can answer and whose indexer has yet to learn where to look.

The layer is `msa_tiles.nn.MiniMaxSparseAttention`. Its main branch is given, as that of a model that was trained
densely: the query of a token sums what the last `CONTEXT` tokens are, the key of a token what the `CONTEXT` tokens in
front of it are, so that a query finds the places where its context occurred before, and the value says which token
followed there. The index branch starts from random projections of the same hidden states and is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from msa_tiles.demo.embed import Shape
from msa_tiles.demo.lesson import CONTEXT
from msa_tiles.nn import AttentionOutput, MiniMaxSparseAttention

_SEED = 20260613
_PEAK_LOGIT = 22.0  # of a context that matches in full
_ROTARY = 8


@dataclass(frozen=True)
class Sizes:
    """The layer's shape, and the dimensions of one token's embedding (at most the head dim)."""

    shape: Shape
    embedding: int


class Reader(nn.Module):
    """Token ids in, `AttentionOutput` out; `read_out` turns its hidden states into the next token."""

    embedding: Tensor

    def __init__(self, counts: Tensor, sizes: Sizes) -> None:
        """`counts [V]`: how often each token occurs; rare ones weigh more in a context."""
        super().__init__()
        generator = torch.Generator().manual_seed(_SEED)
        shape, width = sizes.shape, sizes.embedding
        rarity = torch.log1p(counts.sum() / counts.clamp_min(1))
        vectors = torch.randn(len(counts), width, generator=generator)
        self.register_buffer("embedding", nn.functional.normalize(vectors, dim=-1) * rarity[:, None])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            self.layer = MiniMaxSparseAttention(
                width * (CONTEXT + 1),
                shape.num_q_heads,
                shape.num_kv_heads,
                head_dim=shape.head_dim,
                index_dim=shape.head_dim,
                topk=shape.topk,
                block_size=shape.block_size,
                rotary_dim=_ROTARY,
            )
        self._give_main_branch(shape, width, generator)

    def _give_main_branch(self, shape: Shape, width: int, generator: torch.Generator) -> None:
        """Fixed projections for queries, keys, values and the output."""
        layer = self.layer
        main = [parameter for name, parameter in layer.named_parameters() if not name.startswith("index_")]
        with torch.no_grad():
            for parameter in main:
                parameter.zero_()
                parameter.requires_grad_(False)
            # softmax_scale is D ** -0.5, and equal vectors of norm sqrt(D) * gain have the product D * gain ** 2.
            gain = math.sqrt(_PEAK_LOGIT / math.sqrt(shape.head_dim))
            for norm in (layer.q_norm, layer.k_norm):
                norm.weight.fill_(gain - 1)
            q, o = (weight.unflatten(dim, (shape.num_kv_heads, shape.group, shape.head_dim))
                    for weight, dim in ((layer.q_proj.weight, 0), (layer.o_proj.weight, 1)))  # fmt: skip
            k, v = (p.weight.unflatten(0, (shape.num_kv_heads, shape.head_dim)) for p in (layer.k_proj, layer.v_proj))
            for head in range(shape.num_kv_heads):
                for back in range(CONTEXT):
                    # Dimensions that rotate carry positions, and a context is the same wherever it stands.
                    projection = _directions(shape.head_dim - _ROTARY, width, generator)
                    q[head, :, _ROTARY:, back * width : (back + 1) * width] = projection
                    k[head, _ROTARY:, (back + 1) * width : (back + 2) * width] = projection
                projection = _directions(shape.head_dim, width, generator)
                v[head, :, :width] = projection
                o[:width, head] = projection.T[:, None] / shape.num_q_heads

    def forward(self, tokens: Tensor, **options: bool) -> AttentionOutput:
        """`tokens [T]` of one sequence; `options` as in the layer."""
        return self.layer(self.hidden(tokens), **options)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[T, hidden]: what a token and the `CONTEXT` tokens in front of it are, of one length."""
        own = self.embedding[tokens]
        before = [torch.cat([own.new_zeros(back, own.shape[1]), own])[: len(own)] for back in range(1, CONTEXT + 1)]
        joined = torch.cat([own, *before], -1)
        return nn.functional.normalize(joined, dim=-1) * math.sqrt(joined.shape[1])

    def read_out(self, hidden: Tensor) -> Tensor:
        """The tokens that rows of the layer's output point at."""
        vectors = nn.functional.normalize(self.embedding, dim=-1)
        return (hidden[:, : vectors.shape[1]].to(vectors.dtype) @ vectors.T).argmax(-1)

    def index_parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


def _directions(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random [rows, columns] that keeps lengths: orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator))[0]
