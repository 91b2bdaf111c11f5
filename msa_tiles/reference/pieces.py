"""What blockwise attention goes through: some queries and keys that they may read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from msa_tiles.reference.batch import Batch, Request

# The prefix is cut into QUERY_CHUNK queries by KEY_CHUNK keys: with 16 heads a chunk of float32 scores takes 16 MB.
QUERY_CHUNK = 512
KEY_CHUNK = 512

Schedule = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Piece:
    """Queries ``rows`` (int64 [n], distinct) against the key rows [begin, end) of their request.

    ``some`` (int64, ascending) are those of the keys, counted from ``begin``; None for all.
    """

    rows: Tensor
    request: Request
    begin: int
    end: int
    some: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """The positions of the keys, int64 [keys]."""
        offset = self.request.key_offset
        if self.some is not None:
            return offset + self.begin + self.some
        return torch.arange(offset + self.begin, offset + self.end, device=self.rows.device)

    @property
    def flat(self) -> slice | Tensor:
        """The keys' rows in flat storage."""
        first = self.request.key_row + self.begin
        return slice(first, self.request.key_row + self.end) if self.some is None else first + self.some

    def visible(self, batch: Batch) -> Tensor:
        """Which keys each query may see, bool [n, keys]."""
        return self.positions <= batch.limit[self.rows, None]


def selected(batch: Batch, schedule: Schedule, head: int, topk: int, block_size: int) -> Iterator[Piece]:
    """The blocks that queries of one KV head selected, in the order of `reference.build_schedule`'s tasks."""
    edges, tasks, counts = (part[0, head] for part in schedule)
    for index, block, first, length in tasks[: int(counts[0])].tolist():
        request = batch.requests[index]
        begin, end = request.block_rows(block, block_size)
        rows = torch.div(edges[first : first + length].to(torch.int64), topk, rounding_mode="floor")
        yield Piece(rows, request, begin, end)


def exact(
    parts: Iterator[Piece], batch: Batch, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> Iterator[Piece]:
    """The same pieces, cut so that no product with a weight of 0 carries NaN or infinity where it may not be seen.

    ``queries`` [T, …] and ``keys`` [Tk, …] are what the weights are multiplied with. A piece that hides something and
    holds such a value falls apart into pieces that hide nothing.
    """
    for piece in parts:
        visible = piece.visible(batch)
        seeing = visible.any(1)
        part = replace(piece, rows=piece.rows[seeing])
        if bool(visible[seeing].all()) or (
            all(bool(tensor[part.flat].isfinite().all()) for tensor in keys)
            and all(bool(tensor[part.rows].isfinite().all()) for tensor in queries)
        ):
            yield part
            continue
        for pattern in visible[seeing].unique(dim=0):
            same = (visible == pattern).all(1)
            yield replace(piece, rows=piece.rows[same], some=pattern.nonzero()[:, 0])


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
