"""How many of the blocks that float32 scores choose are chosen from e4m3 queries and keys, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.quant import quantize_fp8

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


def agreement(kind: str, length: int, device: torch.device, backend: str = "auto") -> float:
    """The share of blocks chosen from float32 inputs that are chosen from the same in e4m3, a scale for every row."""
    queries, keys = inputs(kind, length, device)
    wanted = reference.select_blocks(queries, keys, TOPK)
    got = ops.select_blocks(
        quantize_fp8(queries, "token_head"), quantize_fp8(keys, "token_head"), TOPK, backend=backend
    )
    kept = (got[..., None] == wanted[..., None, :]).any(-1) & (got >= 0)
    return float(kept.sum() / (wanted >= 0).sum())


def table(device: torch.device, lengths: Iterable[int] = LENGTHS, backend: str = "auto") -> list[Sequence[str]]:
    """Rows of a table, the heading first."""
    rows: list[Sequence[str]] = [("keys", *KINDS)]
    for length in lengths:
        rows.append((str(length), *(f"{100 * agreement(kind, length, device, backend):.2f}%" for kind in KINDS)))
    return rows
