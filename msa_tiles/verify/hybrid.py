"""Checks of the kernels that only hybrid attention calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from msa_tiles import reference
from msa_tiles.call import backends
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, lookup, places
from msa_tiles.verify import compare
from msa_tiles.verify.cases import Case
from msa_tiles.verify.inputs import Source, spread

_NAMES = ("rest", "rest_counts", "shared", "shared_counts", "last_rows")


@contextmanager
def hybrid(on: bool, fill: int = 0) -> Iterator[None]:
    """Attention on CUDA takes the hybrid kernels, with at least ``fill`` shared blocks a tile if it can, or not.

    They read keys and values as they are stored.
    """
    before = attention.HYBRID, attention.FILL, attention.COPY
    attention.HYBRID, attention.FILL, attention.COPY = on, fill, False
    try:
        yield
    finally:
        attention.HYBRID, attention.FILL, attention.COPY = before


def defined_parts(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The five tensors of a split, -1 where nothing is promised."""
    rest, rest_counts, shared, shared_counts, last_rows = parts
    behind = torch.arange(shared.shape[2], device=shared.device) >= shared_counts[..., None]
    return rest, rest_counts, shared.masked_fill(behind[..., None], -1), shared_counts, last_rows


class SplitSelection:
    """Which blocks are shared and what is left, equal to the reference's."""

    def __init__(self, case: Case, source: Source, strided: bool, backend: str) -> None:
        dims = case.dims
        lengths = source.lengths(case.workload.sequences, shortened=strided)
        self.ids = source.selection(
            lengths, dims["num_kv_heads"], dims["topk"], dims["block_size"], case.workload.selection == "sticky"
        )
        self.where: dict[str, Any] = lengths.keywords()
        if strided:
            self.ids = spread(self.ids, (1, 0, 2))
            self.where["q_positions"] = source.positions(lengths)
        self.block_size, self.tile_tokens, self.total_k = dims["block_size"], dims["tile_tokens"], dims["total_k"]
        self.fill = case.workload.parameters.get("fill", 0)
        self.backend = backend

    def call(self) -> tuple[Tensor, ...]:
        where, device, total_q = Where(**self.where), self.ids.device, self.ids.shape[1]
        variant = {"block_size": self.block_size, "tile_tokens": self.tile_tokens}
        facts = lookup.call_facts("split_selection", where, device, "bf16", variant, queries=total_q)
        at = places.place(where, total_q, self.total_k, self.block_size, device)
        sizes = {"block_size": self.block_size, "tile_tokens": self.tile_tokens, "fill": self.fill}
        return attention.split_selection(facts, self.backend, self.ids, at, **sizes)

    def run(self, into_buffers: bool) -> tuple[Tensor, ...]:
        nothing = self.ids.numel() == 0 or Where(**self.where).num_requests == 0
        if nothing or backends.runs_reference(self.backend, self.ids.device):
            return self._wanted()
        return defined_parts(self.call())

    def compare(self, outputs: tuple[Tensor, ...]) -> compare.Errors:
        errors: compare.Errors = {}
        for name, got, wanted in zip(_NAMES, outputs, self._wanted(), strict=True):
            errors |= compare.same(name, got, wanted)
        return errors

    def _wanted(self) -> tuple[Tensor, ...]:
        return reference.split_selection(
            self.ids, tile_tokens=self.tile_tokens, block_size=self.block_size, fill=self.fill, **self.where
        )
