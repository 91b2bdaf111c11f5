"""`sparse_attention`, index building included, against vLLM's Triton kernel and against dense attention."""

from __future__ import annotations

import functools

import torch

from msa_tiles import ops
from msa_tiles.bench import cases, checks, flashinfer_peer, inputs, peers, precisions
from msa_tiles.bench.harness import Bench, Contender, Skipped
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call

OP = "sparse_attention"


def prepare(case: cases.Case, device: torch.device, precision: str, *, batch_invariant: bool = False) -> Bench:
    """FP8 keys and values, with scales of 1, lie under queries in BF16; dense attention gets all of them in BF16."""
    dtype = precisions.dtype(precision, "key_value")

    def ours(dsl: str, x: inputs.Attention) -> Call:
        scales = x.scales
        return lambda: ops.sparse_attention(
            x.q,
            x.k,
            x.v,
            x.block_indices,
            block_size=case["block_size"],
            batch_invariant=batch_invariant,
            backend=dsl,
            **scales,
        )

    return Bench(
        case=case,
        make=functools.partial(inputs.attention, case, device, dtype=dtype),
        bytes_per_set=attention_bytes(case, dtype),
        ours=ours,
        check=functools.partial(checks.attended, case),
        peers=[
            peers.vllm_attention(case),
            flashinfer_peer.attention(case, dtype),
            own_bf16(case, dtype),
            peers.fa4_dense(case),
            peers.cudnn_dense(case),
        ],
    )


def own_bf16(case: cases.Case, dtype: torch.dtype) -> Contender | Skipped:
    """What the same call takes on keys and values of bfloat16, whatever DSL serves it."""
    if dtype == torch.bfloat16:
        return Skipped("bf16", "it is what is timed")

    def bind(x: inputs.Attention) -> Call:
        tensors = (*peers.in_bfloat16(x), x.block_indices)
        return lambda: ops.sparse_attention(*tensors, block_size=case["block_size"])

    return Contender("bf16", bind, functools.partial(checks.attended, case))


def attention_bytes(case: cases.Case, dtype: torch.dtype) -> int:
    """Bytes of q in bfloat16, and of k and v in `dtype`."""
    queries, keys = case.num_q * case["num_q_heads"], case.num_k * case["num_kv_heads"]
    return case["head_dim"] * (2 * queries + 2 * dtype.itemsize * keys)


BENCHMARK = of_spec(OP, prepare, precisions.ATTENTION)
