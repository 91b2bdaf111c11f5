"""The whole sparse prefill, `select_blocks` then `sparse_attention`, against dense attention and vLLM's kernels."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from msa_tiles import ops
from msa_tiles.bench import cases, checks, flashinfer_peer, inputs, peers, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender, Skipped
from msa_tiles.bench.operators.sparse_attention import attention_bytes
from msa_tiles.bench.timing import Call
from msa_tiles.spec.work import Work

OP = "prefill"
PARTS = ("select_blocks", "sparse_attention")
Inputs = tuple[inputs.Indexer, inputs.Attention]


def labels() -> list[str]:
    """Cases that both parts have. Selections come from the indexer here, so they are U."""
    return [label for label in cases.labels("sparse_attention") if label in cases.labels("select_blocks")]


def find(label: str) -> cases.Case:
    if label not in labels():
        raise ValueError(f"--cases: {OP} has no case {label!r}; it has {', '.join(labels())}")
    return dataclasses.replace(cases.find("sparse_attention", label), op=OP)


def check(case: cases.Case, x: Inputs, result: tuple[Tensor, Tensor]) -> str | None:
    """The selection against the indexer's inputs, the output against attention over that selection."""
    index, main_inputs = x
    ids, out = result
    wrong = checks.selected(case, index, ids)
    return wrong or checks.attended(case, dataclasses.replace(main_inputs, block_indices=ids), out)


def prepare(case: cases.Case, device: torch.device, precision: str) -> Bench:
    dtypes = precisions.dtype(precision, "index_key"), precisions.dtype(precision, "key_value")
    indexer = cases.find("select_blocks", case.label)
    heads, dim, topk = indexer["num_index_heads"], indexer["head_dim"], indexer["topk"]

    def make(seed: int) -> Inputs:
        return (
            inputs.indexer(indexer, heads, dim, device, seed, precision),
            inputs.attention(case, device, seed, with_selection=False, precision=precision),
        )

    def ours(dsl: str, x: Inputs) -> Call:
        index, attend = x
        scales = attend.scales

        def call() -> tuple[Tensor, Tensor]:
            ids = ops.select_blocks(
                index.idx_q,
                index.idx_k,
                topk,
                num_kv_heads=case["num_kv_heads"],
                block_size=case["block_size"],
                backend=dsl,
            )
            out = ops.sparse_attention(
                attend.q, attend.k, attend.v, ids, block_size=case["block_size"], backend=dsl, **scales
            )
            return ids, cast(Tensor, out)

        return call

    verify = functools.partial(check, case)
    return Bench(
        case=case,
        make=make,
        bytes_per_set=attention_bytes(case, precision),
        ours=ours,
        check=verify,
        peers=[
            vllm(case, topk, precision, verify),
            flashinfer_peer.prefill(indexer, case, dtypes, verify),
            peers.fa4_dense(case, operator.itemgetter(1)),
            peers.cudnn_dense(case, operator.itemgetter(1)),
        ],
    )


def vllm(case: cases.Case, topk: int, precision: str, check: Callable[[Any, Any], str | None]) -> Contender | Skipped:
    """vLLM's operators, where they take the index keys, and the keys and values."""
    peer = peers.takes(precision, "index_key", peers.vllm_prefill(case, topk, check))
    return peers.takes(precision, "key_value", peer)


def work(label: str, precision: str) -> list[Work]:
    return [cases.work(part, label, precisions.part(part, precision)) for part in PARTS]


BENCHMARK = Benchmark(OP, tuple(labels()), find, prepare, work, PARTS, precisions.BOTH, precisions.OTHER_PAIRS)
