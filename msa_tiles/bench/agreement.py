"""How many of the blocks that float32 scores choose are chosen from quantised queries and keys, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.bench import precisions
from msa_tiles.bench.inputs import Stored, in_format

LENGTHS = (4096, 32768, 131072)
QUERIES = 256  # the last ones of a prompt
HEADS, DIM, TOPK = 4, 128, 16
OUTLIERS, FACTOR = 4, 20.0  # channels of that many times the others' size, as queries and keys of real models have
KINDS = ("gaussian", "outliers")


def inputs(kind: str, length: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """float32 queries [QUERIES, Hi, Di] and keys [length, Di]."""
    generator = torch.Generator(device).manual_seed(seed)
    queries = torch.randn(min(QUERIES, length), HEADS, DIM, generator=generator, device=device)
    keys = torch.randn(length, DIM, generator=generator, device=device)
    if kind == "outliers":
        channels = torch.randperm(DIM, generator=generator, device=device)[:OUTLIERS]
        queries[..., channels] *= FACTOR
        keys[:, channels] *= FACTOR
    return queries, keys


def in_precision(queries: Tensor, keys: Tensor, precision: str) -> tuple[Stored, Stored]:
    """Queries and keys of the indexer in the formats of a precision."""
    query, key = (precisions.stored(precision, role).name for role in ("index_query", "index_key"))
    return in_format(queries, query, fitted=True), in_format(keys, key, fitted=True)


def overlap(got: Tensor, wanted: Tensor) -> float:
    """The share of ids `wanted [H, N, k]` that are among `got`; -1 stands for none."""
    kept = (got[..., None] == wanted[..., None, :]).any(-1) & (got >= 0)
    return float(kept.sum() / (wanted >= 0).sum())


def agreement(
    kind: str, length: int, device: torch.device, backend: str = "auto", precision: str = precisions.INDEXER[1]
) -> float:
    """The share of blocks chosen from float32 inputs that are chosen from the same in a precision."""
    queries, keys = inputs(kind, length, device)
    wanted = reference.select_blocks(queries, keys, TOPK)
    got = ops.select_blocks(*in_precision(queries, keys, precision), TOPK, backend=backend)
    return overlap(got, wanted)


def table(
    device: torch.device,
    lengths: Iterable[int] = LENGTHS,
    backend: str = "auto",
    known: Sequence[str] = precisions.INDEXER[1:2],
) -> list[Sequence[str]]:
    """Rows of a table, the heading first: for each precision and length."""
    rows: list[Sequence[str]] = [("precision", "keys", *KINDS)]
    for precision in known:
        for length in lengths:
            shares = (f"{100 * agreement(kind, length, device, backend, precision):.2f}%" for kind in KINDS)
            rows.append((precision, str(length), *shares))
    return rows
