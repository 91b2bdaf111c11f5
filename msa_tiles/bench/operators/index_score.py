"""`index_score` against vLLM's score kernel."""

from __future__ import annotations

import functools

import torch

from msa_tiles import ops
from msa_tiles.bench import cases, checks, flashinfer_peer, inputs, peers, precisions
from msa_tiles.bench.harness import Bench
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

OP = "index_score"


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    heads, dim = case["num_index_heads"], case["head_dim"]

    def ours(dsl: str, x: inputs.Indexer) -> Call:
        return lambda: ops.index_score(x.idx_q, x.idx_k, block_size=case["block_size"], backend=dsl)

    return Bench(
        case=case,
        make=functools.partial(inputs.indexer, case, heads, dim, device, precision=precision),
        bytes_per_set=inputs.indexer_bytes(case, heads, dim, precision),
        ours=ours,
        check=functools.partial(checks.scores, case),
        peers=[
            peers.takes(precision, "index_key", peers.vllm_index_score(case)),
            flashinfer_peer.index_score(case, precisions.dtype(precision, "index_key")),
        ],
    )


BENCHMARK = of_spec(OP, prepare, precisions.INDEXER)
