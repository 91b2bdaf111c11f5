"""Fresh random inputs, with poison wherever a kernel must not look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from msa_tiles.verify.cases import Disagreement

POISON_INT = -0x5A5A5A5A
_ALIGNED = 16  # bytes: a kernel's vector loads and TMA boxes want strides of this unit
TOKEN_MAJOR = (1, 0, 2)  # how the caller's buffers lay out [heads, tokens, …]


@dataclass(frozen=True)
class Lengths:
    """The packed requests of a call."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    longest_q: int
    longest_k: int

    def keywords(self) -> dict[str, Any]:
        """The arguments of an operator."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_k": self.seqused_k,
            "max_seqlen_q": self.longest_q,
            "max_seqlen_k": self.longest_k,
        }


class Source:
    """Random tensors on one device, from one seed."""

    def __init__(self, device: torch.device, seed: int, values: str) -> None:
        self.device = device
        self.integers = values == "integer"
        self._generator = torch.Generator(device).manual_seed(seed)

    def values(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Normal numbers, or small integers whose products and sums are exact in any precision and often tie."""
        if self.integers:
            return self.whole(-2, 3, shape).to(dtype)
        return torch.randn(tuple(shape), generator=self._generator, device=self.device).to(dtype)

    def scales(self, shape: Sequence[int]) -> Tensor:
        """Scales above 0 and at most 1, float32; powers of two beside integers, so that products stay exact."""
        if self.integers:
            return 0.5 ** self.whole(0, 3, shape).to(torch.float32)
        return 1.0 - 0.75 * torch.rand(tuple(shape), generator=self._generator, device=self.device)

    def whole(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """Integers in [low, high), int64."""
        return torch.randint(low, high, tuple(shape), generator=self._generator, device=self.device)

    def chance(self, probability: float, shape: Sequence[int]) -> Tensor:
        """A mask that holds with this probability."""
        return torch.rand(tuple(shape), generator=self._generator, device=self.device) < probability

    def lengths(self, sequences: Sequence[tuple[int, int]], shortened: bool) -> Lengths:
        """The requests of a workload; `shortened` ones use only a part of their keys, through seqused_k."""
        queries, keys = (torch.tensor([pair[side] for pair in sequences]) for side in (0, 1))
        used = None
        if shortened:
            part = torch.rand(len(sequences), generator=self._generator, device=self.device)
            used = (keys.to(self.device) * (0.5 + 0.5 * part)).ceil().to(torch.int32)
        return Lengths(
            self._starts(queries),
            self._starts(keys),
            used,
            int(queries.max()) if len(sequences) else 0,
            int(keys.max()) if len(sequences) else 0,
        )

    def selection(self, lengths: Lengths, num_kv_heads: int, topk: int, block_size: int, sticky: bool) -> Tensor:
        """Distinct ids in random order with -1 and ids of no block among them, int32 [num_kv_heads, total_q, topk].

        A sticky selection repeats itself over runs of 32 queries, so that some blocks are read by very many.
        """
        parts = []
        starts_q, starts_k = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
        for request in range(len(starts_q) - 1):
            queries = starts_q[request + 1] - starts_q[request]
            blocks = -(-(starts_k[request + 1] - starts_k[request]) // block_size)
            rows = -(-queries // 32) if sticky else queries
            ids = self._distinct(num_kv_heads * rows, max(blocks, topk), topk).view(num_kv_heads, rows, topk)
            ids = ids.repeat_interleave(32, 1)[:, :queries] if sticky else ids
            parts.append(ids.masked_fill(ids >= blocks, -1))
        shape = (num_kv_heads, starts_q[-1], topk)
        ids = torch.cat(parts, 1) if parts else torch.empty(shape, dtype=torch.int64, device=self.device)
        ids = ids.masked_fill(self.chance(0.1, shape), -1)
        ids = ids.masked_fill(self.chance(0.02, shape), 1 << 24).masked_fill(self.chance(0.02, shape), -7)
        ids = ids.masked_fill(self.chance(0.01, shape), torch.iinfo(torch.int32).max)
        return ids.to(torch.int32)

    def positions(self, lengths: Lengths) -> Tensor:
        """A position for every query, int32: anywhere in its request, past its end, or -1."""
        starts_q, starts_k = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
        parts = [
            self.whole(-1, starts_k[request + 1] - starts_k[request] + 3, (starts_q[request + 1] - starts_q[request],))
            for request in range(len(starts_q) - 1)
        ]
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([empty, *parts]).to(torch.int32)

    def _distinct(self, rows: int, population: int, count: int) -> Tensor:
        """int64 [rows, count] of different numbers below `population`, each row in random order."""
        step = max(1, (1 << 26) // max(population, 1))
        parts = [
            torch.rand(min(step, rows - first), population, generator=self._generator, device=self.device)
            .topk(count, dim=1)
            .indices
            for first in range(0, rows, step)
        ]
        empty = torch.empty((0, count), dtype=torch.int64, device=self.device)
        return torch.cat(parts) if parts else empty

    def _starts(self, lengths: Tensor) -> Tensor:
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(self.device)


@dataclass(frozen=True)
class Paged:
    """Keys of a batch in the pages of a pool, and the lengths that go with them."""

    pool: Tensor
    page_table: Tensor
    seqused_k: Tensor

    def keywords(self, lengths: Lengths) -> dict[str, Any]:
        """The arguments of an operator in place of those of the flat keys."""
        return {
            **lengths.keywords(),
            "cu_seqlens_k": None,
            "page_table": self.page_table,
            "seqused_k": self.seqused_k,
        }


def paged(source: Source, keys: Tensor, lengths: Lengths, page_size: int) -> Paged:
    """Flat keys [total_k, …] in shuffled pages [pages, page_size, …] of a pool that holds NaN everywhere else.

    Entries past a request's pages are -1 or name pages of NaN; rows are views into a table with more columns.
    """
    starts = lengths.cu_seqlens_k.tolist()
    used = (
        lengths.seqused_k.tolist()
        if lengths.seqused_k is not None
        else [end - start for start, end in pairwise(starts)]
    )
    counts = [-(-length // page_size) for length in used]
    spare = 3
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(len(keys)))
    pool = torch.full((len(order), page_size, *keys.shape[1:]), torch.nan, dtype=keys.dtype, device=keys.device)
    table = torch.full((len(counts), -(-max(lengths.longest_k, 1) // page_size) + 2), -1, dtype=torch.int32)
    table[:, -1] = int(order[-1])
    taken = 0
    for request, (start, length, count) in enumerate(zip(starts, used, counts, strict=False)):
        for page in range(count):
            at = int(order[taken])
            rows = keys[start + page * page_size : start + min((page + 1) * page_size, length)]
            pool[at, : len(rows)] = rows
            table[request, page] = at
            taken += 1
    used_k = torch.tensor(used, dtype=torch.int32, device=keys.device)
    return Paged(pool, table.to(keys.device)[:, :-1], used_k)


def placed(
    source: Source, lengths: Lengths, pages_per_block: int, block_size: int, strided: bool, *keys: Tensor
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """The arguments that place these flat keys, and the keys as the call stores them.

    Paged ones interleave in one pool, [pages, page, keys * dim] or [pages, heads, page, keys * dim]; `strided` calls
    also give every query a position of its own.
    """
    options = lengths.keywords()
    if pages_per_block:
        pool = paged(source, torch.cat(keys, -1), lengths, block_size // pages_per_block)
        options = pool.keywords(lengths)
        stored = pool.pool if pool.pool.ndim == 3 else pool.pool.transpose(1, 2)
        keys = stored.split(keys[0].shape[-1], -1)
    elif strided:
        keys = tuple(spread(tensor) for tensor in keys)
    if strided:
        options["q_positions"] = source.positions(lengths)
    return options, keys


def spread(tensor: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """The same values in a larger poisoned buffer, with gaps between the rows; `order` is how its dims lie there."""
    return Buffer(tensor.shape, tensor.dtype, tensor.device, order).holding(tensor)


class Buffer:
    """An output of the caller: a view with gaps, poisoned inside and outside."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, order: Sequence[int] | None = None
    ) -> None:
        rank = len(shape)
        order = list(range(rank)) if order is None else list(order)
        unit = _ALIGNED // dtype.itemsize
        widths = [shape[dim] + 1 for dim in order]
        widths[-1] = -(-shape[order[-1]] // unit) * unit + unit
        self._whole = torch.full(widths, poison(dtype), dtype=dtype, device=device)
        inverse = [order.index(dim) for dim in range(rank)]
        inside = tuple(slice(0, shape[dim]) for dim in order)
        self.view = self._whole[inside].permute(inverse)

    def holding(self, tensor: Tensor) -> Tensor:
        """Fill the view and return it."""
        self.view.copy_(tensor)
        return self.view

    def check_gaps(self, name: str) -> None:
        """Raise Disagreement when something outside the view was written."""
        kept = self.view.clone()
        self.view.fill_(poison(self._whole.dtype))
        intact = self._whole.isnan() if self._whole.dtype.is_floating_point else self._whole == POISON_INT
        self.view.copy_(kept)
        if not bool(intact.all()):
            raise Disagreement(f"{name}: {int((~intact).sum())} elements outside the caller's buffer were overwritten")


def poison(dtype: torch.dtype) -> float | int:
    """A value that no correct output holds."""
    return float("nan") if dtype.is_floating_point else POISON_INT


def poison_free_memory(device: torch.device, size: int = 1 << 28) -> None:
    """Leave NaN in the memory that torch hands out next, so that an output nobody wrote shows.

    What torch keeps of earlier tensors goes back first: it would be handed out before, with finite numbers in it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        filled = [torch.full((bytes_ // 4,), float("nan"), device=device) for bytes_ in (size, 1 << 20, 1 << 16, 512)]
        del filled
