"""`sparse_attention`, index building included, against vLLM's Triton kernel and against dense attention.

`python -m perf.bench_sparse_attention --cases prefill_32k_u prefill_32k_s`
"""

from __future__ import annotations

import functools

import torch

from msa_tiles import ops
from perf import cases, checks, inputs, peers
from perf.harness import OURS, Bench, Contender, main
from perf.timing import Call

OP = "sparse_attention"


def prepare(case: cases.Case, device: torch.device, dsl: str) -> Bench:
    def bind(x: inputs.Attention) -> Call:
        return lambda: ops.sparse_attention(x.q, x.k, x.v, x.block_indices, block_size=case["block_size"], backend=dsl)

    return Bench(
        case=case,
        make=functools.partial(inputs.attention, case, device),
        bytes_per_set=attention_bytes(case),
        ours=Contender(OURS, bind, functools.partial(checks.attended, case)),
        peers=[peers.vllm_attention(case), peers.fa4_dense(case), peers.cudnn_dense(case)],
        cells=[cases.cell(OP, dsl, device)],
    )


def attention_bytes(case: cases.Case) -> int:
    """Bytes of q, k and v in bfloat16."""
    return 2 * case["head_dim"] * (case.num_q * case["num_q_heads"] + 2 * case.num_k * case["num_kv_heads"])


if __name__ == "__main__":
    raise SystemExit(main(OP, prepare, cases.labels(OP)))
