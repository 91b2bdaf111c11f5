"""Packed batches in the layouts of serving packages, and a dense oracle: one query at a time, float64, plain torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from msa_tiles import quant

BLOCK = 128
LENGTHS_Q = (3, 0, 40, 1, 2)
LENGTHS_K = (300, 50, 290, 0, 129)
BEHIND = 2  # rows that belong to no request
HEADS, KV_HEADS, DIM = 4, 2, 16


class FourBits(NamedTuple):
    """NVFP4 pages as servers keep them: bytes and scales of K and V [pages, heads, 128, …], and the values, flat."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_values: Tensor
    v_values: Tensor

    @staticmethod
    def draw(batch: Packed, dim: int, k_global: float, v_global: float) -> FourBits:
        """Values of the elements and scales alone are times the global scales; rows without a key are NaN."""
        pages = [batch.pages(batch.keys(dim=dim), dim) for _ in range(2)]
        made = quant.quantize_pages(
            *pages, "vllm", k_global_scale=torch.tensor(k_global), v_global_scale=torch.tensor(v_global)
        )
        v_scale = made.v.scale.flatten(-3).unflatten(-1, (BLOCK, dim // 16))  # four tokens of a group side by side
        values = [batch.unpaged(each.dequantize()) for each in (made.k, made.v)]
        return FourBits(made.k.data, made.v.data, made.k.scale, v_scale, *values)


@dataclass
class Packed:
    """Requests with queries and keys; what is drawn is the same for one MSA_TILES_SEED and name."""

    name: str
    lengths_q: tuple[int, ...] = LENGTHS_Q
    lengths_k: tuple[int, ...] = LENGTHS_K
    behind: int = BEHIND
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        seed = sum(map(ord, self.name)) + int(os.environ["MSA_TILES_SEED"])
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def total_q(self) -> int:
        return sum(self.lengths_q) + self.behind

    @property
    def cu_q(self) -> Tensor:
        return starts(self.lengths_q)

    @property
    def cu_k(self) -> Tensor:
        return starts(self.lengths_k)

    @property
    def used(self) -> Tensor:
        return torch.tensor(self.lengths_k, dtype=torch.int32)

    def queries(self, heads: int = HEADS, whole: bool = False, dim: int = DIM) -> Tensor:
        return self.draw((self.total_q, heads, dim), whole)

    def keys(self, heads: int = KV_HEADS, whole: bool = False, dim: int = DIM) -> Tensor:
        return self.draw((sum(self.lengths_k), heads, dim), whole)

    def draw(self, shape: tuple[int, ...], whole: bool) -> Tensor:
        """Normal numbers, or whole ones whose sums of products are exact."""
        if whole:
            return torch.randint(-4, 5, shape, generator=self.generator).float()
        return torch.randn(shape, generator=self.generator)

    def pages(self, flat: Tensor, width: int) -> Tensor:
        """Flat keys in pages [pages, heads, 128, width]: views of wider ones, NaN wherever no key is."""
        count = int(((self.used + BLOCK - 1) // BLOCK).sum()) + 2
        pool = torch.full((count, flat.shape[1], BLOCK, width), torch.nan).to(flat.dtype)
        view, table, start = pool[..., : flat.shape[2]], self.page_table, 0
        for request, length in enumerate(self.lengths_k):
            for page, begin in enumerate(range(0, length, BLOCK)):
                part = flat[start + begin : start + min(begin + BLOCK, length)]
                view[table[request, page], :, : len(part)] = part.transpose(0, 1)
            start += length
        return view

    @property
    def page_table(self) -> Tensor:
        """int32 [B, pages of the longest]: physical pages in reverse order, page 0 for what a request lacks."""
        table = torch.zeros(len(self.lengths_k), -(-max(self.lengths_k) // BLOCK), dtype=torch.int32)
        count = int(((self.used + BLOCK - 1) // BLOCK).sum()) + 2
        for request, length in enumerate(self.lengths_k):
            for page in range(-(-length // BLOCK)):
                count -= 1
                table[request, page] = count
        return table

    def unpaged(self, pages: Tensor) -> Tensor:
        """Flat keys [Tk, heads, D] of pages [pages, heads, 128, D] that `page_table` leads to."""
        table, parts = self.page_table, []
        for request, length in enumerate(self.lengths_k):
            for page, begin in enumerate(range(0, length, BLOCK)):
                parts.append(pages[table[request, page], :, : min(length - begin, BLOCK)].transpose(0, 1))
        return torch.cat(parts)

    def limits(self, causal: bool, offsets: list[int] | None = None) -> list[tuple[int, int]]:
        """(request, last visible key) of every row; (-1, -1) behind the last request."""
        rows = []
        for request, (queries, keys) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            first = keys - queries if offsets is None else offsets[request]
            rows += [(request, min(first + place, keys - 1) if causal else keys - 1) for place in range(queries)]
        return rows + [(-1, -1)] * self.behind

    def request_keys(self, flat: Tensor, request: int) -> Tensor:
        begin = sum(self.lengths_k[:request])
        return flat[begin : begin + self.lengths_k[request]].double()

    def ids(self, topk: int, heads: int = KV_HEADS) -> Tensor:
        """Distinct blocks of each query's request, ascending, -1 behind: int32 [heads, T, topk]."""
        ids = torch.full((heads, self.total_q, topk), -1, dtype=torch.int32)
        for row, (request, _) in enumerate(self.limits(True)):
            blocks = -(-self.lengths_k[request] // BLOCK) if request >= 0 else 0
            for head in range(heads):
                chosen = torch.randperm(blocks, generator=self.generator)[: min(topk, blocks)].sort().values
                ids[head, row, : len(chosen)] = chosen
        return ids


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def scores(batch: Packed, q: Tensor, k: Tensor, limits: list[tuple[int, int]], tiles: int) -> Tensor:
    """[Hq, tiles, T] float64."""
    found = torch.full((q.shape[1], tiles, q.shape[0]), -torch.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row, (request, last) in enumerate(limits):
        if request < 0:
            continue
        keys = batch.request_keys(k, request)[: max(last + 1, 0)]
        for head in range(q.shape[1]):
            for tile, part in enumerate((keys[:, head // group] @ q[row, head].double()).split(BLOCK)):
                if tile < tiles and len(part):
                    found[head, tile, row] = part.max()
    return found


def attention(
    batch: Packed, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, limits: list[tuple[int, int]], scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] and lse [T, Hq], float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row, (request, last) in enumerate(limits):
        if request < 0:
            continue
        keys, values = batch.request_keys(k, request), batch.request_keys(v, request)
        for head in range(q.shape[1]):
            chosen = set(ids[head // group, row].tolist())
            visible = [place for place in range(last + 1) if place // BLOCK in chosen]
            if visible:
                logits = keys[visible, head // group] @ q[row, head].double() * scale
                out[row, head] = logits.softmax(0) @ values[visible, head // group]
                lse[row, head] = logits.logsumexp(0)
    return out, lse
