"""`select_blocks` against vLLM's score and top-k kernels."""

from __future__ import annotations

import functools

import torch

from msa_tiles import ops
from msa_tiles.bench import cases, checks, flashinfer_peer, inputs, peers, precisions
from msa_tiles.bench.harness import Bench
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

OP = "select_blocks"


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    """FP8 queries and keys come without scales: vLLM's operators take none."""
    heads, dim, topk = case["num_index_heads"], case["head_dim"], case["topk"]

    def ours(dsl: str, x: inputs.Indexer) -> Call:
        return lambda: ops.select_blocks(
            x.idx_q, x.idx_k, topk, num_kv_heads=case["num_kv_heads"], block_size=case["block_size"], backend=dsl
        )

    return Bench(
        case=case,
        make=functools.partial(inputs.indexer, case, heads, dim, device, precision=precision),
        bytes_per_set=inputs.indexer_bytes(case, heads, dim, precision),
        ours=ours,
        check=functools.partial(checks.selected, case),
        peers=[
            peers.takes(precision, "index_key", peers.vllm_select(case, topk)),
            flashinfer_peer.select(case, precisions.dtype(precision, "index_key")),
        ],
    )


BENCHMARK = of_spec(OP, prepare, precisions.INDEXER)
