"""Random batches for property-based tests: what they mean, as plain lists, and how they are stored, as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass
class Batch:
    """A logical batch, free of any storage. Keys of request b hold the positions offsets[b] + 0 … lengths_k[b] - 1."""

    lengths_q: list[int]
    lengths_k: list[int]
    offsets: list[int]
    rows_behind: int  # query rows past the last request
    storage: str  # flat, used (flat with seqused_k), paged, interleaved (paged, K and V in one cache)
    page: int
    given_positions: list[int] | None
    has_offsets: bool
    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def total_q(self) -> int:
        return sum(self.lengths_q) + self.rows_behind

    @property
    def max_end(self) -> int:
        return max((o + n for o, n in zip(self.offsets, self.lengths_k, strict=True)), default=0)

    def rows(self) -> list[tuple[int, int]]:
        """(request, position) of every query row; (-1, -1) for rows past the last request."""
        found = []
        for b, (queries, keys, offset) in enumerate(zip(self.lengths_q, self.lengths_k, self.offsets, strict=True)):
            for i in range(queries):
                position = offset + keys - queries + i
                if self.given_positions is not None:
                    position = self.given_positions[len(found)]
                found.append((b, position))
        return found + [(-1, -1)] * self.rows_behind

    def random(self, *shape: int, integers: bool = False) -> Tensor:
        """Float64 numbers that bfloat16 holds exactly, so that every dtype sees the same data."""
        if integers:
            return torch.randint(-4, 5, shape, generator=self.generator).double()
        return torch.randn(shape, generator=self.generator).bfloat16().double()

    def keys(self, *shape: int, integers: bool = False) -> list[Tensor]:
        """Per request float64 [len_k, *shape]."""
        return [self.random(length, *shape, integers=integers) for length in self.lengths_k]

    def where(self) -> dict[str, Tensor | int]:
        """The operators' keyword arguments for this batch."""
        arguments: dict[str, Tensor | int] = {}
        if len(self.lengths_q) != 1 or self.rows_behind or self.seed % 2:
            arguments["cu_seqlens_q"] = _starts(self.lengths_q)
        if self.storage in ("flat", "used"):
            room = self.lengths_k if self.storage == "flat" else [n + 3 for n in self.lengths_k]
            if len(self.lengths_q) != 1 or self.seed % 2:
                arguments["cu_seqlens_k"] = _starts(room)
        if self.storage != "flat":
            arguments["seqused_k"] = torch.tensor(self.lengths_k, dtype=torch.int32)
        if self.storage in ("paged", "interleaved"):
            arguments["page_table"] = self._page_table()
        if self.given_positions is not None:
            arguments["q_positions"] = torch.tensor(self.given_positions + [5] * self.rows_behind, dtype=torch.int32)
        if self.has_offsets:
            arguments["k_offset"] = torch.tensor(self.offsets, dtype=torch.int32)
            arguments["max_seqlen_k"] = self.max_end
        return arguments

    def store(self, *tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Key tensors (one, or K and V) in this batch's storage; everything that is no key is NaN."""
        if self.storage in ("flat", "used"):
            slack = 0 if self.storage == "flat" else 3
            return [self._flat(keys, slack).to(dtype) for keys in tensors]
        pools = [self._paged(keys) for keys in tensors]
        if self.storage == "interleaved":
            width = pools[0].shape[-1]
            cache = torch.cat(pools, dim=-1).to(dtype)
            return [cache[..., i * width : (i + 1) * width] for i in range(len(pools))]
        return [pool.to(dtype) for pool in pools]

    def _flat(self, keys: list[Tensor], slack: int) -> Tensor:
        parts = []
        for rows in keys:
            parts += [rows, torch.full((slack, *rows.shape[1:]), torch.nan, dtype=rows.dtype)]
        return torch.cat(parts) if parts else torch.zeros(0, 1)

    def _pages(self) -> list[list[int]]:
        """Page numbers per request: a shuffled pool with one page that nobody owns."""
        counts = [-(-length // self.page) for length in self.lengths_k]
        numbers = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return [[numbers.pop() for _ in range(count)] for count in counts]

    def _page_table(self) -> Tensor:
        pages = self._pages()
        width = max((len(numbers) for numbers in pages), default=0) + 1
        rows = [numbers + [-1, 999][self.seed % 2 : self.seed % 2 + 1] * (width - len(numbers)) for numbers in pages]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(pages), width)

    def _paged(self, keys: list[Tensor]) -> Tensor:
        """[pages, *heads, page, D] from [len_k, *heads, D]."""
        pages = self._pages()
        shape = keys[0].shape[1:] if keys else torch.Size([1])
        pool = torch.full((sum(map(len, pages)) + 1, *shape[:-1], self.page, shape[-1]), torch.nan, dtype=torch.float64)
        for rows, numbers in zip(keys, pages, strict=True):
            for token in range(rows.shape[0]):
                pool[numbers[token // self.page], ..., token % self.page, :] = rows[token]
        return pool


def _starts(lengths: list[int]) -> Tensor:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32)


@st.composite
def batches(
    draw: st.DrawFn,
    block_size: int,
    storages: tuple[str, ...] = ("flat", "used", "paged"),
    *,
    shards: bool = False,
) -> Batch:
    """Up to three requests of a few queries on up to 2.5 blocks of keys; some are empty or have too many queries.

    With ``shards`` there is a request, and keys have offsets; without, both are left to chance.
    """
    lengths = st.one_of(
        st.integers(0, 5 * block_size // 2),
        st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size]),
    )
    requests = draw(st.lists(st.tuples(st.integers(0, 5), lengths), min_size=int(shards), max_size=3))
    storage = draw(st.sampled_from(storages))
    # A lone sequence of the flat kind may go without cumulative lengths; no request at all needs them.
    has_offsets = shards or draw(st.booleans())
    offsets = [draw(st.integers(0, 2 * block_size)) if has_offsets else 0 for _ in requests]
    total = sum(queries for queries, _ in requests)
    end = max((o + n for o, (_, n) in zip(offsets, requests, strict=True)), default=0)
    positions = None
    if draw(st.booleans()):
        positions = draw(st.lists(st.integers(-2, end + 2), min_size=total, max_size=total))
    return Batch(
        lengths_q=[queries for queries, _ in requests],
        lengths_k=[keys for _, keys in requests],
        offsets=offsets,
        rows_behind=draw(st.integers(0, 2)),
        storage=storage,
        page=draw(st.sampled_from([block_size, block_size // 2, block_size // 4])),
        given_positions=positions,
        has_offsets=has_offsets,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def selections(draw: st.DrawFn, kv_heads: int, rows: int, blocks: int, topk: int) -> Tensor:
    """Distinct ids in no order, -1 anywhere, some of blocks that do not exist."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    candidates = max(blocks + 2, topk)
    ids = torch.rand(kv_heads, rows, candidates, generator=generator).argsort(-1)[..., :topk]
    missing = torch.rand(ids.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    wild = draw(st.sampled_from([-1, -1, -7, -(2**31), 2**31 - 1]))
    return torch.where(missing, wild, ids).to(torch.int32)
