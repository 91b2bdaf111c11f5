"""SGLang's own sparse attention of MiniMax M3 from its files, and batches as its pools hold them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from compat.m3 import DIM, PAGE, Batch, Parameters, draw_decode
from compat.stand_ins import Finder, Source, standing_in

from msa_tiles.compat import plugins

HOOKS = "sglang.srt.plugins.hook_registry"
KERNELS = "sglang.kernels.ops.attention.minimax_sparse"
REAL = ("sglang.srt.plugins", HOOKS, plugins.SGLANG_MODULE)


@contextmanager
def sglang_files(source: Source, kernels: bool = False) -> Iterator[SimpleNamespace]:
    """`sparse`, the module of SGLang's functions, and `registry`, that of hooks, importable until the end of the block.

    Its Triton kernels are hollow unless ``kernels`` are asked for, which need Triton.
    """

    def off() -> bool:
        return False

    platform = SimpleNamespace(is_sm90=True, is_sm100=False)
    quiet = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    names: dict[str, dict[str, Any]] = {
        "sglang.srt.environ": {
            "envs": SimpleNamespace(
                SGLANG_USE_AITER=SimpleNamespace(get=off),
                SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX=SimpleNamespace(get=off),
            )
        },
        "sglang.srt.utils": {"is_hip": off, "is_gfx95_supported": off, "is_xpu": off},
        "sglang.srt.runtime_context": {"get_exec": lambda: quiet, "get_platform": lambda: platform},
    }
    real = REAL
    if kernels:
        real += (KERNELS, f"{KERNELS}.")
    else:
        names[f"{KERNELS}.common.utils"] = {"get_cu_seqblocks": lambda *given: (None, 1, 1, 0, 0, 0)}
    with standing_in(Finder(source, "sglang", real), names):
        yield SimpleNamespace(
            sparse=importlib.import_module(plugins.SGLANG_MODULE),
            registry=importlib.import_module(HOOKS).HookRegistry,
        )


def pooled(draw: random.Random, batch: Batch) -> dict[str, Any]:
    """The caches of a batch as SGLang keeps them: slots of K, V and index keys, and a map from tokens to slots."""
    k, v = (part.transpose(1, 2).flatten(0, 1) for part in batch.cache.split(DIM, -1))
    table = batch.table.cpu().long()
    tokens = torch.zeros(len(batch.queries) + 3, max(batch.lengths) + draw.randrange(300), dtype=torch.int32)
    requests = torch.randperm(len(tokens))[: len(batch.queries)]
    for request, (row, length) in enumerate(zip(requests.tolist(), batch.lengths, strict=True)):
        places = torch.arange(length)
        tokens[row, :length] = (table[request, places // PAGE] * PAGE + places % PAGE).int()
    device = batch.q.device
    return {
        "k_cache": k,
        "v_cache": v,
        "idx_k_cache": batch.index_cache.flatten(0, 1)[:, None],
        "idx_v_cache": None,
        "req_to_token": tokens.to(device),
        "slot_ids": requests.to(device),
    }


def prefill_of(draw: random.Random, batch: Batch, given: Parameters, **further: Any) -> dict[str, Any]:
    """Arguments of a prefill by name."""
    return {
        "q": batch.q,
        "sink": None,
        "idx_q": batch.idx_q,
        "idx_sink": None,
        **pooled(draw, batch),
        "cu_seqlens": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens.to(draw.choice([torch.int32, torch.int64])),
        "prefix_lens": batch.prefix_lens,
        "max_seqlen_q": max(batch.queries),
        "max_seqlen_k": max(batch.lengths),
        "block_size_q": 1,
        "block_size_k": PAGE,
        "topk": given.topk,
        "init_blocks": given.init_blocks,
        "local_blocks": given.local_blocks,
        "disable_index_value": True,
        "page_size": PAGE,
        **further,
    }


def decode_of(draw: random.Random, batch: Batch, given: Parameters, **further: Any) -> dict[str, Any]:
    """Arguments of a decode step by name, one query a request."""
    arguments = prefill_of(draw, batch, given)
    for name in ("cu_seqlens", "prefix_lens", "max_seqlen_q", "max_seqlen_k"):
        del arguments[name]
    most = draw.choice([max(batch.lengths), arguments["req_to_token"].shape[1], 1 << 20])
    return arguments | {"max_seqlen": most, "seq_lens": batch.seq_lens.long(), **further}


def decoding(draw: random.Random, **options: Any) -> Batch:
    """A batch of one query a request."""
    while True:
        batch, count = draw_decode(draw, **options)
        if count == 1:
            return batch


def never(*given: Any, **named: Any) -> None:
    """In the place of SGLang's function, where ours serves the call."""
    raise AssertionError("SGLang's function was called")
