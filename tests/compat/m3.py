"""Batches of MiniMax-M3 in a server's paged caches, and a dense oracle that knows nothing of ours.

The oracle gathers the keys of a request, multiplies in float64, and ranks in plain Python.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = DIM = 128
HEADS = {1: (64, 4), 2: (32, 2), 4: (16, 1), 8: (8, 1)}  # tensor parallel ranks: query heads, KV heads of one
WIDTHS = (37, 65, 8192)
FP8 = torch.float8_e4m3fn
LENGTHS = (0, 1, 5, 127, 128, 129, 255, 256, 300, 513, 640)


def drawn(name: str) -> random.Random:
    """What a random test draws from: other values in every run, the same ones for one MSA_TILES_SEED."""
    return random.Random(f"{os.environ['MSA_TILES_SEED']} {name}")


@dataclass
class Parameters:
    """What a call says beside its tensors."""

    topk: int
    init_blocks: int
    local_blocks: int

    @staticmethod
    def draw(draw: random.Random) -> Parameters:
        return Parameters(draw.choice([1, 2, 4, 8, 16]), draw.randrange(3), draw.randrange(4))


class Batch:
    """Requests of ``queries`` queries behind ``prefixes`` keys each.

    Index queries and keys are whole numbers, so that scores are exact, and often equal. Pages lie in random order in a
    pool of some more, or of ``pool``; NaN is on all others and in the tails of the last ones, and what a table names
    behind a request's pages is no page.
    """

    def __init__(
        self,
        draw: random.Random,
        heads: tuple[int, int],
        queries: list[int],
        lengths: list[int],
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        index_dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        pool: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 31))
        self.queries, self.lengths, self.ends, self.width = queries, lengths, lengths, width
        self.num_q_heads, self.num_kv_heads = heads
        tokens = sum(queries)
        needed = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(needed) + 3 if pool is None else pool, generator=generator).to(torch.int32)
        table = torch.full((len(queries), width), draw.choice([-1, 1 << 30]), dtype=torch.int32)
        index_cache = torch.full((len(order), PAGE, DIM), math.nan)
        cache = torch.full((len(order), heads[1], PAGE, 2 * DIM), math.nan)
        first = 0
        for request, (pages, length) in enumerate(zip(needed, lengths, strict=True)):
            mine = order[first : first + pages]
            table[request, :pages] = mine
            first += pages
            for number, page in enumerate(mine.tolist()):
                used = min(PAGE, length - number * PAGE)
                index_cache[page, :used] = torch.randint(-2, 3, (used, DIM), generator=generator).float()
                cache[page, :, :used] = torch.randn(heads[1], used, 2 * DIM, generator=generator)
        idx_q = torch.randint(-2, 3, (tokens, heads[1], DIM), generator=generator).float()
        q = torch.randn(tokens, heads[0], DIM, generator=generator)
        self.table = table.to(device)
        self.index_cache, self.idx_q = (x.to(index_dtype).to(device) for x in (index_cache, idx_q))
        self.cache, self.q = cache.to(dtype).to(device), q.bfloat16().to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        starts = torch.tensor([0, *queries]).cumsum(0)
        self.cu_seqlens_q = starts.to(torch.int32).to(device)
        self.prefix_lens = (torch.tensor(lengths) - torch.tensor(queries)).to(torch.int32).to(device)

    def hide(self, lengths: list[int]) -> None:
        """Let the requests have so many keys; where their queries sit does not change."""
        self.lengths = lengths

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The request and the position of every query."""
        return [
            (request, end - count + number)
            for request, (count, end) in enumerate(zip(self.queries, self.ends, strict=True))
            for number in range(count)
        ]

    def keys(self, cache: Tensor, request: int, end: int) -> Tensor:
        """The first ``end`` keys of a request from [pages, …, 128, D], in float64, as far as it has them."""
        end = min(end, self.lengths[request])
        pages = self.table[request, : -(-end // PAGE)].long().cpu()
        return cache.cpu()[pages].double().movedim(-2, 1).flatten(0, 1)[:end]

    def scores(self) -> list[list[list[float]]]:
        """The scores of the blocks that a query sees, by row and head."""
        found = []
        for row, (request, position) in enumerate(self.rows):
            keys = self.keys(self.index_cache, request, max(position + 1, 0))
            products = self.idx_q[row].double().cpu() @ keys.T
            found.append([[float(part.max()) for part in head.split(PAGE)] if len(keys) else [] for head in products])
        return found

    def selections(self, given: Parameters) -> Tensor:
        """int32 [Hkv, T, topk]: init blocks, local ones, then by descending score; lower ids first among equals."""
        ids = torch.full((self.num_kv_heads, len(self.rows), given.topk), -1, dtype=torch.int32)
        for row, heads in enumerate(self.scores()):
            for head, scores in enumerate(heads):
                best = chosen(scores, given)
                ids[head, row, : len(best)] = torch.tensor(best, dtype=torch.int32)
        return ids

    def attention(self, ids: Tensor, scale: float, k_scale: Tensor | None = None, v_scale: Tensor | None = None):
        """out float64 [T, Hq, D], and the largest sum of magnitudes of a score's products.

        Scales are one number or [Hkv, tokens of the pool].
        """
        k, v = (part.double().cpu() for part in self.cache.split(DIM, -1))
        k, v = _scaled(k, k_scale), _scaled(v, v_scale)
        out, logit = torch.zeros(self.q.shape, dtype=torch.float64), 0.0
        group = self.num_q_heads // self.num_kv_heads
        for row, (request, position) in enumerate(self.rows):
            keys, values = (self.keys(x, request, max(position + 1, 0)) for x in (k, v))
            for head in range(self.num_kv_heads):
                blocks = [block for block in ids[head, row].tolist() if block >= 0]
                places = [p for block in blocks for p in range(block * PAGE, min(block * PAGE + PAGE, len(keys)))]
                if not places:
                    continue
                mine = slice(head * group, (head + 1) * group)
                queries = self.q[row, mine].double().cpu()
                weights = torch.softmax(queries @ keys[places, head].T * scale, -1)
                out[row, mine] = weights @ values[places, head]
                logit = max(logit, float((queries.abs() @ keys[places, head].abs().T).max()) * scale)
        return out, logit


def chosen(scores: list[float], given: Parameters) -> list[int]:
    """The blocks that a query selects."""
    count = len(scores)
    forced = [block for block in range(count) if block < given.init_blocks or block >= count - given.local_blocks]
    others = sorted(set(range(count)) - set(forced), key=lambda block: (-scores[block], block))
    return [*forced, *others][: given.topk]


def ranks(scores: list[float], given: Parameters) -> list[float]:
    """What vLLM ranks blocks by: those at either end are forced, and a block at both counts as a local one."""
    count = len(scores)
    return [
        1e29 if block >= count - given.local_blocks else 1e30 if block < given.init_blocks else score
        for block, score in enumerate(scores)
    ]


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return values
    scale = scale.double().cpu()
    if scale.numel() == 1:
        return values * scale.reshape(())
    return values * scale.unflatten(1, (values.shape[0], PAGE)).transpose(0, 1)[..., None]


def draw_prefill(draw: random.Random, **options: object) -> Batch:
    """Some requests of up to 20 queries, some of none, behind keys of all kinds of lengths."""
    queries = [draw.choice([0, 1, 2, 7, 20]) for _ in range(draw.randint(1, 4))]
    if not any(queries):
        queries[0] = 3
    lengths = [count + draw.choice(LENGTHS) for count in queries]
    return Batch(draw, HEADS[draw.choice([*HEADS])], queries, lengths, draw.choice(WIDTHS), **options)


def draw_decode(draw: random.Random, **options: object) -> tuple[Batch, int]:
    """Requests of as many queries each; the last ones of the batch may pad it. Also how many queries that are."""
    count = draw.randint(1, 8)
    lengths = [draw.choice(LENGTHS[1:]) for _ in range(draw.randint(1, 4))] + [0] * draw.randrange(3)
    batch = Batch(
        draw, HEADS[draw.choice([*HEADS])], [count] * len(lengths), lengths, draw.choice(WIDTHS), **options
    )  # fmt: skip
    return batch, count


def token_major(heads: int, tokens: int, topk: int, device: str = "cpu") -> Tensor:
    """[H, T, topk] as a server keeps it, [T, H, topk] in memory, full of what is no id."""
    return torch.full((tokens, heads, topk), -9, dtype=torch.int32, device=device).transpose(0, 1)
