"""`select_blocks` against vLLM's score and top-k kernels.

`python -m perf.bench_select_blocks --cases prefill_32k_u prefill_128k_u --precision fp8`
"""

from __future__ import annotations

import functools

import torch

from msa_tiles import ops
from perf import cases, checks, inputs, peers
from perf.harness import OURS, Bench, Contender, main
from perf.timing import Call

OP = "select_blocks"


def prepare(case: cases.Case, device: torch.device, dsl: str, precision: str = "bf16") -> Bench:
    """FP8 queries and keys come without scales: vLLM's operators take none."""
    heads, dim, topk = case["num_index_heads"], case["head_dim"], case["topk"]
    dtype = inputs.DTYPES[precision]

    def bind(x: inputs.Indexer) -> Call:
        return lambda: ops.select_blocks(
            x.idx_q, x.idx_k, topk, num_kv_heads=case["num_kv_heads"], block_size=case["block_size"], backend=dsl
        )

    return Bench(
        case=case,
        make=functools.partial(inputs.indexer, case, heads, dim, device, dtype=dtype),
        bytes_per_set=dtype.itemsize * dim * (case.num_q * heads + case.num_k),
        ours=Contender(OURS, bind, functools.partial(checks.selected, case)),
        peers=[peers.vllm_select(case, topk)],
        cells=[cases.cell(OP, dsl, device, precision)],
    )


if __name__ == "__main__":
    raise SystemExit(main(OP, prepare, cases.labels(OP), precisions=tuple(inputs.DTYPES)))
