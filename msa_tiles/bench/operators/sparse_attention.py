"""`sparse_attention`, index building included, against vLLM's Triton kernel and against dense attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.bench import cases, checks, flashinfer_peer, inputs, peers, precisions
from msa_tiles.bench.harness import Bench, Contender, Skipped
from msa_tiles.bench.operators._own import of_spec
from msa_tiles.bench.timing import Call
from msa_tiles.launch import attention

OP = "sparse_attention"


def prepare(case: cases.Case, device: torch.device, precision: str, *, batch_invariant: bool = False) -> Bench:
    """Quantised keys and values lie under queries in BF16; dense attention gets all of them in BF16."""

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
        make=functools.partial(inputs.attention, case, device, precision=precision),
        bytes_per_set=attention_bytes(case, precision),
        ours=ours,
        check=functools.partial(checks.attended, case),
        peers=[
            peers.takes(precision, "key_value", peers.vllm_attention(case)),
            flashinfer_peer.attention(case, precisions.dtype(precision, "key_value")),
            own_bf16(case, precision),
            own_fp8(case, precision),
            own_way(case, precision, "stored", False),
            own_way(case, precision, "copied", True),
            peers.fa4_dense(case),
            peers.cudnn_dense(case),
        ],
    )


def own_bf16(case: cases.Case, precision: str) -> Contender | Skipped:
    """What the same call takes on keys and values of bfloat16, whatever DSL serves it."""
    if precision == precisions.BF16:
        return Skipped("bf16", "it is what is timed")

    def bind(x: inputs.Attention) -> Call:
        tensors = (*peers.in_bfloat16(x), x.block_indices)
        return lambda: ops.sparse_attention(*tensors, block_size=case["block_size"])

    return Contender("bf16", bind, functools.partial(checks.attended, case))


def own_fp8(case: cases.Case, precision: str) -> Contender | Skipped:
    """What the same call takes on keys and values of 4 bits once these are rounded to e4m3."""
    if precisions.stored(precision, "key_value").bits >= 8:
        return Skipped("fp8", "it is a peer of keys and values of 4 bits")

    def rounded(x: inputs.Attention) -> inputs.Attention:
        k, v = (inputs.in_format(inputs.wide(part), "e4m3") for part in (x.k, x.v))
        return inputs.Attention(x.q, k, v, x.block_indices)

    def bind(x: inputs.Attention) -> Call:
        fp8 = rounded(x)
        scales = fp8.scales
        return lambda: ops.sparse_attention(
            fp8.q, fp8.k, fp8.v, fp8.block_indices, block_size=case["block_size"], **scales
        )

    return Contender("fp8", bind, lambda x, out: checks.attended(case, rounded(x), out))


def own_way(case: cases.Case, precision: str, name: str, copied: bool) -> Contender | Skipped:
    """The same call where it reads keys and values as they are stored, or a copy of them in bfloat16."""
    if precision == precisions.BF16:
        return Skipped(name, "it is of quantised keys and values")

    def bind(x: inputs.Attention) -> Call:
        scales = x.scales

        def call() -> Tensor:
            before, attention.COPY = attention.COPY, copied
            try:
                result = ops.sparse_attention(x.q, x.k, x.v, x.block_indices, block_size=case["block_size"], **scales)
            finally:
                attention.COPY = before
            assert isinstance(result, Tensor)
            return result

        return call

    return Contender(name, bind, functools.partial(checks.attended, case))


def attention_bytes(case: cases.Case, precision: str) -> int:
    """Bytes of q in bfloat16, and of k and v with the scales of their groups."""
    queries, keys = case.num_q * case["num_q_heads"], case.num_k * case["num_kv_heads"]
    bits = precisions.stored(precision, "key_value").bits_with_scales
    return int(case["head_dim"] * (16 * queries + 2 * bits * keys)) // 8


BENCHMARK = of_spec(OP, prepare, precisions.ATTENTION)
