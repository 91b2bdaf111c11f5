"""What blockwise attention goes through: some queries and one run of the keys that they may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles.reference.batch import Batch, Request

# The prefix is cut into QUERY_CHUNK queries by KEY_CHUNK keys: with 16 heads a chunk of float32 scores takes 16 MB.
QUERY_CHUNK = 512
KEY_CHUNK = 512

Schedule = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Piece:
    """Queries ``rows`` (int64 [n], distinct) against the key rows [begin, end) of their request."""

    rows: Tensor
    request: Request
    begin: int
    end: int

    @property
    def positions(self) -> Tensor:
        """The positions of the keys, int64 [end - begin]."""
        offset = self.request.key_offset
        return torch.arange(offset + self.begin, offset + self.end, device=self.rows.device)

    @property
    def flat(self) -> slice:
        """The keys' rows in flat storage."""
        return slice(self.request.key_row + self.begin, self.request.key_row + self.end)

    def visible(self, batch: Batch) -> Tensor:
        """Which keys each query may see, bool [n, end - begin]."""
        return self.positions <= batch.limit[self.rows, None]


def selected(batch: Batch, schedule: Schedule, head: int, topk: int, block_size: int) -> Iterator[Piece]:
    """The blocks that queries of one KV head selected, in the order of `reference.build_schedule`'s tasks."""
    edges, tasks, counts = (part[0, head] for part in schedule)
    for index, block, first, length in tasks[: int(counts[0])].tolist():
        request = batch.requests[index]
        begin, end = request.block_rows(block, block_size)
        rows = torch.div(edges[first : first + length].to(torch.int64), topk, rounding_mode="floor")
        yield Piece(rows, request, begin, end)


def prefix(batch: Batch) -> Iterator[Piece]:
    """Everything that the queries may see, keys outermost."""
    for request in batch.requests:
        chunks = [
            (torch.arange(begin, end, device=batch.limit.device), int(batch.limit[begin:end].max()))
            for begin, end in request.query_chunks(QUERY_CHUNK)
        ]
        for begin in range(0, request.num_keys, KEY_CHUNK):
            end = min(begin + KEY_CHUNK, request.num_keys)
            for rows, last in chunks:
                if last >= request.key_offset + begin:
                    yield Piece(rows, request, begin, end)
