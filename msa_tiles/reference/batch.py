"""Where every query and key of a packed batch stands, read to the host.

The position rule: query i of a request sits at ``key_offset + num_keys - num_queries + i``, so that the last query sits
at the last key; ``q_positions`` overrides it. A request's keys hold the positions
``[key_offset, key_offset + num_keys)`` and block b covers the positions ``[b * block_size, (b + 1) * block_size)``,
whichever part of them this call holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One request of a packed batch; every field is a host integer.

    ``key_row`` is the first row of its keys in flat storage, ``key_offset`` the position of the first key.
    """

    index: int
    query_begin: int
    query_end: int
    key_row: int
    num_keys: int
    key_offset: int

    @property
    def key_end(self) -> int:
        """The position one past the last key."""
        return self.key_offset + self.num_keys

    def block_rows(self, block: int, block_size: int) -> tuple[int, int]:
        """The request's key rows [begin, end) that block ``block`` covers; an empty range when it holds none."""
        begin = min(max(block * block_size - self.key_offset, 0), self.num_keys)
        end = min(max((block + 1) * block_size - self.key_offset, 0), self.num_keys)
        return begin, end

    def query_chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """Consecutive query ranges [begin, end) of at most ``size`` queries."""
        for begin in range(self.query_begin, self.query_end, size):
            yield begin, min(begin + size, self.query_end)


@dataclass(frozen=True)
class Batch:
    """A packed batch: its requests, and per query (int64 [T], on the tensors' device) the request and the positions.

    ``request`` is -1 for rows past ``cu_seqlens_q[B]``. ``limit`` is the last position that the query may see under the
    causal rule and -1 where it sees nothing; it never exceeds the request's last key.
    """

    requests: tuple[Request, ...]
    request: Tensor
    position: Tensor
    limit: Tensor

    def num_valid_blocks(self, block_size: int) -> Tensor:
        """How many blocks lie at or before each query's limit: int64 [T]."""
        return torch.div(self.limit, block_size, rounding_mode="floor") + 1


def read_batch(
    total_q: int,
    device: torch.device,
    *,
    total_k: int | None = None,
    page_size: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_positions: Tensor | None = None,
    k_offset: Tensor | None = None,
) -> Batch:
    """Read the arguments that say where things are.

    ``total_k`` is the number of flat key rows, ``page_size`` the page length of paged keys; with neither, only lengths
    matter and a request without a key length has as many keys as queries. The host bounds ``max_seqlen_*`` are accepted
    and not needed. Raises ``ValueError`` when the key lengths of several requests cannot be known, and for cumulative
    lengths that fall or count more keys than there are.
    """
    del max_seqlen_q, max_seqlen_k
    starts_q = [0, total_q] if cu_seqlens_q is None else _starts("cu_seqlens_q", cu_seqlens_q)
    num_requests = len(starts_q) - 1
    lengths_q = [starts_q[b + 1] - starts_q[b] for b in range(num_requests)]
    key_rows, num_keys = _key_lengths(lengths_q, total_k, page_size, cu_seqlens_k, page_table, seqused_k)
    key_offsets = [0] * num_requests if k_offset is None else k_offset.tolist()

    # On the host, since it is read there; never on torch's default device, which is the caller's affair.
    host = torch.device("cpu")
    request, position, last_key = (torch.full((total_q,), -1, dtype=torch.int64, device=host) for _ in range(3))
    requests = []
    for b in range(num_requests):
        begin, end = min(starts_q[b], total_q), min(starts_q[b + 1], total_q)
        requests.append(Request(b, begin, end, key_rows[b], num_keys[b], key_offsets[b]))
        first = key_offsets[b] + num_keys[b] - lengths_q[b]
        request[begin:end] = b
        position[begin:end] = torch.arange(first, first + end - begin, device=host)
        last_key[begin:end] = requests[-1].key_end - 1
    if q_positions is not None:
        position = torch.where(request >= 0, q_positions.to(host, torch.int64), position)
    limit = torch.minimum(position, last_key).clamp_min(-1)
    return Batch(tuple(requests), request.to(device), position.to(device), limit.to(device))


def _starts(name: str, cumulative: Tensor) -> list[int]:
    starts = cumulative.tolist()
    for before, after in pairwise(starts):
        if after < before:
            raise ValueError(f"{name}: got {after} after {before}; wanted sorted values")
    return starts


def _key_lengths(
    lengths_q: list[int],
    total_k: int | None,
    page_size: int | None,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[list[int], list[int]]:
    """First flat row and number of keys per request."""
    num_requests = len(lengths_q)
    used = None if seqused_k is None else seqused_k.tolist()
    if page_size is not None:
        if page_table is None or used is None:
            raise ValueError("page_table and seqused_k: both are needed for paged keys")
        capacity = page_table.shape[1] * page_size
        return [0] * num_requests, [min(max(length, 0), capacity) for length in used]
    if cu_seqlens_k is not None:
        starts = _starts("cu_seqlens_k", cu_seqlens_k)
        if starts and total_k is not None and not 0 <= starts[0] <= starts[-1] <= total_k:
            raise ValueError(f"cu_seqlens_k: got {starts[0]} to {starts[-1]}; wanted 0 to the {total_k} keys at most")
        room = [starts[b + 1] - starts[b] for b in range(num_requests)]
        if used is None:
            return starts[:-1], room
        return starts[:-1], [min(max(length, 0), most) for length, most in zip(used, room, strict=True)]
    if total_k is None:
        return [0] * num_requests, lengths_q if used is None else used
    if num_requests > 1:
        raise ValueError(f"cu_seqlens_k: needed for the flat keys of {num_requests} requests")
    if used is None:
        return [0] * num_requests, [total_k] * num_requests
    return [0] * num_requests, [min(max(length, 0), total_k) for length in used]


def key_rows(
    tensor: Tensor, request: Request, begin: int, end: int, page_table: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Rows [begin, end) of one request's keys, and which of them are there (None: all).

    ``tensor`` is flat ``[Tk, …]`` or paged ``[pages, …, page, D]``; the result is ``[end - begin, …]``. Rows on pages
    that do not exist (a page number below 0 or past the pool) are absent, and zero.
    """
    if page_table is None:
        return tensor[request.key_row + begin : request.key_row + end], None
    rows = torch.arange(begin, end, device=tensor.device)
    page_size, num_pages = tensor.shape[-2], tensor.shape[0]
    pages = page_table[request.index].to(torch.int64)[rows // page_size]
    present = (pages >= 0) & (pages < num_pages)
    slots = rows % page_size
    if bool(present.all()):
        return tensor[pages, ..., slots, :], None
    values = tensor.new_zeros((end - begin, *tensor.shape[1:-2], tensor.shape[-1]))
    values[present] = tensor[pages[present], ..., slots[present], :]
    return values, present


def flat_or_paged(keys: Tensor, page_table: Tensor | None) -> dict[str, Any]:
    """The ``total_k`` or ``page_size`` argument of `read_batch` for this key tensor."""
    return {"total_k": keys.shape[0]} if page_table is None else {"page_size": keys.shape[-2]}


def score_width(
    keys: Tensor,
    block_size: int,
    page_table: Tensor | None = None,
    max_seqlen_k: int | None = None,
    k_offset: Tensor | None = None,
) -> int:
    """Columns of a score matrix: the blocks of ``max_seqlen_k`` positions, or of as many as the keys could hold."""
    if max_seqlen_k is None:
        max_seqlen_k = keys.shape[0] if page_table is None else page_table.shape[1] * keys.shape[-2]
        if k_offset is not None and k_offset.numel():
            max_seqlen_k += int(k_offset.max())
    return -(-max_seqlen_k // block_size)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which the reference computes: float64 for float64 tensors, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
