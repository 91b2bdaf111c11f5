"""One valid call of every operator, small; tests change one argument at a time."""

from __future__ import annotations

from typing import Any

import torch

from msa_tiles import ops

BLOCK = 8
# Additions in a result of these calls (40 keys, head dim 16), and what exponents are off by: scores are sums of 16
# products of integers up to 4, over 4.
TERMS = 40 + 4 * 20 * 64
# Values are integers up to 4; bfloat16 partial results, merged, and the reference's single result are rounded.
PARTIAL = {"terms": TERMS, "size": 4.0, "roundings": 3}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Two requests and an empty one between them: 11 queries on 40 keys, 4 index heads, 4 query and 2 KV heads."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    starts_q = torch.tensor([0, 5, 5, 11], dtype=torch.int32)
    starts_k = torch.tensor([0, 17, 17, 40], dtype=torch.int32)
    return {
        "idx_q": random(11, 4, 16),
        "idx_k": random(40, 16),
        "q": random(11, 4, 16),
        "k": random(40, 2, 16),
        "v": random(40, 2, 16),
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
    }


def lengths(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: data[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}


def call(op: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments, by name, of a valid call of ``op``."""
    data = tensors(dtype)
    common = {**lengths(data), "block_size": BLOCK}
    if op in SCORERS:
        return {"idx_q": data["idx_q"], "idx_k": data["idx_k"], **common}
    if op in RANKERS:
        score = ops.index_score(**call("index_score"), backend="reference")
        return {"score": score, "topk": 3, "num_kv_heads": 2, **common}
    if op == "select_blocks":
        return {"idx_q": data["idx_q"], "idx_k": data["idx_k"], "topk": 3, "num_kv_heads": 2, **common}
    if op == "msa_decode":
        return {**{name: data[name] for name in ("q", "k", "v", "idx_q", "idx_k")}, "topk": 3, **common}
    if op == "combine":
        generator = torch.Generator().manual_seed(1)
        return {
            "partial_out": torch.randn(3, 5, 4, 16, generator=generator).to(dtype),
            "partial_lse": torch.randn(3, 5, 4, generator=generator),
        }
    ids = ops.select_blocks(**call("select_blocks"), backend="reference")
    if op == "build_schedule":
        return {"block_indices": ids, **common}
    return {"q": data["q"], "k": data["k"], "v": data["v"], "block_indices": ids, **common}


def paged(op: str) -> dict[str, Any]:
    """The same keys of ``call(op)`` in pages of half a block, in a shuffled pool."""
    arguments = call(op)
    starts = arguments.pop("cu_seqlens_k").tolist()
    used = [starts[b + 1] - starts[b] for b in range(3)]
    page = BLOCK // 2
    table = torch.full((3, 6), -1, dtype=torch.int32)
    numbers = torch.randperm(12, generator=torch.Generator().manual_seed(2)).tolist()
    for request, length in enumerate(used):
        for slot in range(-(-length // page)):
            table[request, slot] = numbers.pop()
    for name in ("idx_k", "k", "v"):
        if name not in arguments:
            continue
        flat = arguments[name]
        pool = torch.full((12, *flat.shape[1:-1], page, flat.shape[-1]), torch.nan)
        for request, length in enumerate(used):
            for token in range(length):
                row = flat[starts[request] + token]
                pool[int(table[request, token // page]), ..., token % page, :] = row
        arguments[name] = pool
    arguments |= {"page_table": table, "seqused_k": torch.tensor(used, dtype=torch.int32)}
    return arguments


# Operators that only training calls have tests of their own.
TRAINING = ["dense_attention", "index_kl", "msa_attention", "sparse_attention_backward"]
# Those that write into the caller's caches alone, too.
IN_PLACE = ["append_index", "append_kv", "norm_rope_append"]
# And those that take quantised tensors alone.
QUANTISED = ["dequantize_kv"]
_OTHERS = ("Schedule", "decode_workspace_bytes", *TRAINING, *IN_PLACE, *QUANTISED)
OPERATORS = {name: getattr(ops, name) for name in ops.__all__ if name not in _OTHERS}
EVERY_OPERATOR = sorted(OPERATORS)
# Operators of one contract each.
SCORERS = ["index_score", "decode_score"]
RANKERS = ["topk_select", "decode_topk"]
ATTENTION = ["sparse_attention", "sparse_decode"]
WITH_LENGTHS = [name for name in EVERY_OPERATOR if name != "combine"]
WITH_OFFSETS = [name for name in WITH_LENGTHS if name != "msa_decode"]
WITH_KEYS = [*SCORERS, "select_blocks", *ATTENTION, "msa_decode"]
