"""Kernels that a server is going to need, compiled while it loads its model instead of while somebody waits."""

from __future__ import annotations

import logging
import time

import torch

from msa_tiles import runtime
from msa_tiles.compat import notes
from msa_tiles.quant import FP8

_ASKED: set[str] = set()


def indexer(dtype: torch.dtype, topk: int) -> tuple[str, ...]:
    """What selects blocks, with an index head for each KV head and pages of a block."""
    precision = "q8k8" if dtype == FP8 else "bf16"
    return (
        f"select_blocks,precision={precision},topk={topk},heads_per_group=1,pages_per_block=1",
        f"decode_score,precision={precision},pages_per_block=1",
        "decode_topk",
    )


def attention(quantised: bool, group: int) -> tuple[str, ...]:
    """What attends to them, ``group`` query heads for a KV head, to BF16 or e4m3 keys with few scales."""
    precision = "q16kv8" if quantised else "bf16"
    return tuple(
        f"{op},precision={precision},group={group},pages_per_block=1" for op in ("sparse_attention", "sparse_decode")
    )


def ahead(log: logging.Logger, calls: tuple[str, ...]) -> None:
    """Compile what no pack and no cache has, once a process, where there is a GPU; never raises.

    What fails here fails again in the first call that needs it, which then says what becomes of it.
    """
    fresh = [call for call in calls if call not in _ASKED]
    if not fresh or not torch.cuda.is_available():
        return
    _ASKED.update(fresh)
    began = time.monotonic()
    try:
        count = runtime.warm(*fresh)
    except Exception as error:
        notes.once(log, logging.WARNING, f"msa_tiles could not compile ahead what MiniMax M3 needs: {error}")
        return
    taken = time.monotonic() - began
    log.info("msa_tiles has what MiniMax M3 needs, after %.0f s: %d compiled kernels", taken, count)
