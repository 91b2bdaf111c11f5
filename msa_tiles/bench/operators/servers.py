"""A layer's step as vLLM's model calls it, indexer and attention: what its plugin runs, against vLLM's own operators.

Both get vLLM's tensors: caches with K beside V, tables of pages, a token-major buffer for ids. `by_name` is ours
through the functions of vLLM's names, operator by operator.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_tiles.bench import cases, peers, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender
from msa_tiles.bench.inputs import Attention
from msa_tiles.bench.operators import decode, prefill
from msa_tiles.bench.timing import Call
from msa_tiles.compat import vllm
from msa_tiles.compat.vllm import steps
from msa_tiles.spec.work import Work

PREFILL, DECODE = "server_prefill", "server_decode"
LOCAL_BLOCKS = 1
SWEEP = {
    "decode_8k_b1": (1, 1 << 13),
    "decode_32k_b1": (1, 1 << 15),
    "decode_512k_b1": (1, 1 << 19),
    "decode_8k_b32": (32, 1 << 13),
    "decode_32k_b32": (32, 1 << 15),
    "decode_512k_b32": (32, 1 << 19),
}
"""Requests and keys beside `decode.BATCHES`: a sweep of the context length for one request and for 32, as for eight."""


@dataclass(frozen=True)
class Metadata:
    """What vLLM's metadata say of a prefill or of a decode step, by their names."""

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int
    max_seq_len: int
    decode_query_len: int = 1


def selecting(topk: int) -> steps.Selecting:
    return steps.Selecting(topk, 0, LOCAL_BLOCKS)


def our_decode(case: decode.Case, dsl: str, x: decode.Inputs) -> Call:
    """One operator, as the plugin calls it."""
    assert isinstance(x.index_cache, Tensor), "vLLM's caches of index keys have no 4 bits"
    metadata = Metadata(x.page_table, x.seq_lens, x.cu_seqlens_q, 1, case.keys)
    deferred = steps.Deferred(x.idx_q, x.index_cache, metadata, selecting(case["topk"]))
    attending = steps.Attending(x.cache, case["num_kv_heads"], case["head_dim"] ** -0.5, x.scale, x.scale)
    out = torch.empty_like(x.q)
    ids = ids_buffer(len(x.q), case["num_kv_heads"], case["topk"], x.q.device)

    def call() -> tuple[Tensor, Tensor]:
        steps.decode(x.q, ids, deferred, attending, out, backend=dsl)
        return ids, out

    return call


def our_prefill(case: cases.Case, topk: int, dsl: str, x: prefill.Inputs) -> Call:
    """Selection and attention, as the plugin calls them, on pages."""
    index, main = x
    where = peers.OneRequest.of(case, main.q.device)
    metadata = Metadata(where.block_table, where.seq_lens, where.cu_seqlens_q, case.num_q, case.num_k)
    index_cache, cache = peers.paged(index.idx_k), peers.interleaved_cache(main.k, main.v)
    scale = scale_of(main)
    attending = steps.Attending(cache, case["num_kv_heads"], case["head_dim"] ** -0.5, scale, scale)
    ids = ids_buffer(case.num_q, case["num_kv_heads"], topk, main.q.device)
    out = torch.empty_like(main.q)

    def call() -> tuple[Tensor, Tensor]:
        steps.select_prefill(index.idx_q, index_cache, metadata, selecting(topk), ids, backend=dsl)
        steps.attend_prefill(main.q, ids, metadata, attending, out, backend=dsl)
        return ids, out

    return call


def scale_of(main: Attention) -> Tensor | None:
    """The scale of FP8 keys and values; one number for both."""
    return main.scales.get("k_scale")


def ids_buffer(tokens: int, heads: int, topk: int, device: torch.device) -> Tensor:
    return torch.empty(tokens, heads, topk, dtype=torch.int32, device=device).transpose(0, 1)


def by_name(contender: Contender) -> Contender:
    """Ours by the names of vLLM's operators, called like vLLM's."""
    return dataclasses.replace(contender, name="by_name")


def prepare_decode(case: decode.Case, device: torch.device, precision: str) -> Bench:
    like = decode.prepare(case, device, precision)
    return dataclasses.replace(
        like,
        ours=functools.partial(our_decode, case),
        peers=[decode.vllm(case), by_name(decode.of_vllm(case, vllm))],
    )


def prepare_prefill(case: cases.Case, device: torch.device, precision: str) -> Bench:
    like = prefill.prepare(case, device, precision)
    topk = cases.find("select_blocks", case.label)["topk"]
    return dataclasses.replace(
        like,
        ours=functools.partial(our_prefill, case, topk),
        peers=[peers.vllm_prefill(case, topk, like.check), by_name(peers.prefill_of(vllm, case, topk, like.check))],
    )


def find_prefill(label: str) -> cases.Case:
    return dataclasses.replace(prefill.find(label), op=PREFILL)


def find_decode(label: str) -> decode.Case:
    return decode.find(label, DECODE, SWEEP)


def decode_work(label: str, precision: str) -> list[Work]:
    return decode.step_work(find_decode(label), precision)


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        PREFILL,
        tuple(prefill.labels()),
        find_prefill,
        prepare_prefill,
        prefill.work,
        prefill.PARTS,
        precisions.SERVED,
    ),
    Benchmark(
        DECODE,
        (*decode.BATCHES, *SWEEP),
        find_decode,
        prepare_decode,
        decode_work,
        decode.PARTS,
        precisions.SERVED,
    ),
)
