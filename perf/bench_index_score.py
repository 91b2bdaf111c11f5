"""`index_score` against vLLM's score kernel. `python -m perf.bench_index_score --cases prefill_32k_u`"""

from __future__ import annotations

import functools

import torch

from msa_tiles import ops
from perf import cases, checks, inputs, peers
from perf.harness import OURS, Bench, Contender, main
from perf.timing import Call

OP = "index_score"


def prepare(case: cases.Case, device: torch.device, dsl: str) -> Bench:
    heads, dim = case["num_index_heads"], case["head_dim"]

    def bind(x: inputs.Indexer) -> Call:
        return lambda: ops.index_score(x.idx_q, x.idx_k, block_size=case["block_size"], backend=dsl)

    return Bench(
        case=case,
        make=functools.partial(inputs.indexer, case, heads, dim, device),
        bytes_per_set=2 * dim * (case.num_q * heads + case.num_k),
        ours=Contender(OURS, bind, functools.partial(checks.scores, case)),
        peers=[peers.vllm_index_score(case)],
        cells=[cases.cell(OP, dsl, device)],
    )


if __name__ == "__main__":
    raise SystemExit(main(OP, prepare, cases.labels(OP)))
