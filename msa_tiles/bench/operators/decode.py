"""A whole decode step, `msa_decode`, against vLLM's Triton kernels and dense decode on the same paged caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from msa_tiles import ops, quant, reference
from msa_tiles.bench import checks, flashinfer_peer, peers, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender, Skipped
from msa_tiles.bench.inputs import Stored, in_format, is_e4m3, normal, pages_of, wide
from msa_tiles.bench.timing import Call
from msa_tiles.spec.work import Work

OP = "msa_decode"
PARTS = ("decode_score", "sparse_decode")
BATCHES = {
    "decode_8k_b8": (8, 1 << 13),
    "decode_8k_b64": (64, 1 << 13),
    "decode_32k_b8": (8, 1 << 15),
    "decode_128k_b1": (1, 1 << 17),
    "decode_128k_b8": (8, 1 << 17),
    "decode_128k_b32": (32, 1 << 17),
    "decode_512k_b8": (8, 1 << 19),
    "decode_1m_b1": (1, 1 << 20),
    "decode_1m_b8": (8, 1 << 20),
}
"""Requests and keys of each; those of eight requests are a sweep of the context length."""
PAGE = 128
SCORE_SLACK = 1e-3
FA4_ELEMENTS = 1 << 31
"""Elements from which on 32-bit offsets of its tensors would overflow."""


@dataclass(frozen=True)
class Case:
    """`batch` requests of `keys` keys, with their last `queries` as queries, at the M3 point."""

    label: str
    batch: int
    keys: int
    dims: Mapping[str, int]
    op: str = OP
    queries: int = 1

    def __getitem__(self, dim: str) -> int:
        return self.dims[dim]

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return -(-self.keys // PAGE)


@dataclass(frozen=True)
class Inputs:
    """Queries, vLLM's caches, and where the requests stand in them.

    `k` and `v` [pages, Hkv, page, D] are views of `cache`: K beside V, or the bytes of NVFP4 pages. Those of MXFP4,
    which vLLM's pages have not, lie apart. `scale` is that of FP8 keys and of FP8 values, which stand for themselves.
    """

    q: Tensor
    idx_q: Tensor
    k: Stored
    v: Stored
    cache: Tensor
    index_cache: Stored
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    scale: Tensor | None = None

    def scales(self) -> dict[str, Any]:
        """k_scale and v_scale of a call."""
        return {"k_scale": self.scale, "v_scale": self.scale}

    def of_request(self, request: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Keys, values and index keys of one request, quantised ones widened, and where they are."""
        pages = self.page_table[request]
        k, v, index_cache = (wide(pages_of(pool, pages)) for pool in (self.k, self.v, self.index_cache))
        table = torch.arange(len(pages), dtype=torch.int32, device=pages.device)[None]
        where = {"page_table": table, "seqused_k": self.seq_lens[request : request + 1]}
        return k, v, index_cache, where


def find(label: str, op: str = OP, more: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> Case:
    """The case `label` of `BATCHES` and `more`, at the M3 point. Raises ValueError for an unknown one."""
    batches = {**BATCHES, **more}
    if label not in batches:
        raise ValueError(f"--cases: {op} has no case {label!r}; it has {', '.join(batches)}")
    batch, keys = batches[label]
    point = {"group": 16, "num_kv_heads": 4, "num_index_heads": 4, "head_dim": 128, "block_size": PAGE, "topk": 16}
    return Case(label, batch, keys, point, op)


def make(case: Case, device: torch.device, precision: str, seed: int) -> Inputs:
    """Random caches whose pages lie in random order."""
    form, index = (precisions.stored(precision, role).name for role in ("key_value", "index_key"))
    dim, heads, pages = case["head_dim"], case["num_kv_heads"], case.batch * case.pages
    torch.manual_seed(seed)
    table = torch.randperm(pages, device=device).to(torch.int32).view(case.batch, case.pages)
    idx_q = normal(4 * seed + 1, device, case.batch, case["num_index_heads"], dim)
    k, v, cache = kept_in(normal(4 * seed + 2, device, pages, heads, PAGE, 2 * dim), form)
    return Inputs(
        normal(4 * seed, device, case.batch, heads * case["group"], dim),
        idx_q.to(precisions.dtype(precision, "index_query")),
        k,
        v,
        cache,
        in_format(normal(4 * seed + 3, device, pages, PAGE, dim), index),
        table,
        torch.full((case.batch,), case.keys, dtype=torch.int32, device=device),
        torch.arange(case.batch + 1, dtype=torch.int32, device=device),
        torch.ones((), device=device) if is_e4m3(k) else None,
    )


def kept_in(beside: Tensor, form: str) -> tuple[Stored, Stored, Tensor]:
    """K and V of a format from [pages, Hkv, page, 2 D] in BF16, K beside V, and the cache that holds them."""
    if form in quant.GROUPS:
        k, v = beside.split(beside.shape[-1] // 2, -1)
        if form == "nvfp4":
            one = torch.ones((), device=beside.device)
            pages = quant.quantize_pages(k, v, "vllm", k_global_scale=one, v_global_scale=one)
            return pages.k, pages.v, pages.pool
        return in_format(k, form), in_format(v, form), beside.new_empty(0)
    cache = in_format(beside, form)
    assert isinstance(cache, Tensor)
    k, v = cache.split(beside.shape[-1] // 2, -1)
    return k, v, cache


def make_indexer(case: Case, device: torch.device, precision: str, seed: int) -> Inputs:
    """The same with an empty cache of keys and values, for steps that do not read it."""
    without_cache = dataclasses.replace(case, dims={**case.dims, "num_kv_heads": 0})
    return make(without_cache, device, precision, seed)


def ours(case: Case, dsl: str, x: Inputs) -> Call:
    """The call with every buffer handed in."""
    heads, topk = case["num_kv_heads"], case["topk"]
    out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device=x.q.device)
    ids = torch.empty(heads, len(x.q), topk, dtype=torch.int32, device=x.q.device)
    size = ops.decode_workspace_bytes(x.q, topk, heads, idx_q=x.idx_q, max_seqlen_k=case.keys)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.q.device)

    def call() -> tuple[Tensor, Tensor]:
        ops.msa_decode(
            x.q,
            x.k,
            x.v,
            x.idx_q,
            x.index_cache,
            topk,
            cu_seqlens_q=x.cu_seqlens_q,
            page_table=x.page_table,
            seqused_k=x.seq_lens,
            max_seqlen_q=case.queries,
            max_seqlen_k=case.keys,
            **x.scales(),
            workspace=workspace,
            out=out,
            lse=lse,
            block_indices=ids,
            backend=dsl,
        )
        return ids, out

    return call


def vllm(case: Case) -> Contender | Skipped:
    """Index scores, top-k and attention, three operators."""
    module = peers.vllm_module()
    return Skipped("vllm", module) if isinstance(module, str) else of_vllm(case, module)


def of_vllm(case: Case, module: ModuleType) -> Contender:
    """The same through the operators of a module that has vLLM's names."""
    heads, topk, queries = case["num_kv_heads"], case["topk"], case.queries

    def bind(x: Inputs) -> Call:
        out = torch.empty_like(x.q)
        buffer = torch.empty(len(x.q), heads, topk, dtype=torch.int32, device=x.q.device).transpose(0, 1)

        def call() -> tuple[Tensor, Tensor]:
            ids = module.minimax_m3_index_decode(
                x.idx_q, x.index_cache, x.page_table, x.seq_lens, case.keys, topk, 0, 1, heads, queries, queries,
                out=buffer,
            )  # fmt: skip
            module.minimax_m3_sparse_attn_decode(
                x.q, x.cache, ids, x.page_table, x.seq_lens, heads, x.q.shape[-1] ** -0.5, out, queries, **x.scales()
            )
            return ids, out

        return call

    return Contender("vllm", bind, functools.partial(check, case))


def fp8_index(case: Case, precision: str) -> Contender | Skipped:
    """Our own step on queries and index keys of e4m3, where those of the case have 4 bits; whatever DSL serves it."""
    if precisions.stored(precision, "index_key").bits >= 8:
        return Skipped("fp8_index", "it is a peer of index keys of 4 bits")

    def rounded(x: Inputs) -> Inputs:
        idx_q, index_cache = (in_format(wide(part), "e4m3") for part in (x.idx_q, x.index_cache))
        assert isinstance(idx_q, Tensor)
        return dataclasses.replace(x, idx_q=idx_q, index_cache=index_cache)

    return Contender(
        "fp8_index",
        lambda x: ours(case, "auto", rounded(x)),
        lambda x, result: check(case, rounded(x), result),
    )


def one_dtype(precision: str) -> torch.dtype:
    """That of index keys, keys and values, where they share one: peers take no two."""
    index, keys = (precisions.dtype(precision, role) for role in ("index_key", "key_value"))
    return keys if index == keys else torch.bfloat16


def fa4_dense(case: Case) -> Contender | Skipped:
    """FlashAttention-4 over all keys, which lie in contiguous rows for it."""
    attend = peers.flash_attention_4()
    if isinstance(attend, str):
        return Skipped("fa4", attend)
    if case.batch * case.keys * case["num_kv_heads"] * case["head_dim"] >= FA4_ELEMENTS:
        return Skipped("fa4", "the keys have 2**31 elements or more")

    def bind(x: Inputs) -> Call:
        k, v = (dense_rows(wide(part), x.page_table) for part in (x.k, x.v))

        def call() -> Tensor:
            result = attend(x.q[:, None], k, v, causal=False)
            return (result[0] if isinstance(result, tuple) else result)[:, 0]

        return call

    return Contender("fa4", bind, functools.partial(check_dense, case))


def dense_rows(pages: Tensor, page_table: Tensor) -> Tensor:
    """`[B, keys, Hkv, D]` of a pool `[pages, Hkv, page, D]`."""
    return pages.transpose(1, 2)[page_table.long()].flatten(1, 2)


def check_dense(case: Case, x: Inputs, out: Tensor) -> str | None:
    """The output of the first and last request against softmax over all of its keys."""
    for b in sorted({0, case.batch - 1}):
        *parts, _, where = x.of_request(b)
        k, v = (dense_rows(part, where["page_table"])[0, : case.keys] for part in parts)
        wanted = torch.empty(1, *out.shape[1:], device=out.device)
        for head in range(case["num_kv_heads"]):
            heads = slice(head * case["group"], (head + 1) * case["group"])
            logits = x.q[b, heads].float() @ k[:, head].float().T * case["head_dim"] ** -0.5
            wanted[0, heads] = logits.softmax(-1) @ v[:, head].float()
        wrong = checks.close(out[b : b + 1], wanted)
        if wrong:
            return f"request {b}: {wrong}"
    return None


def dense_bytes(case: Case) -> Contender:
    """The least that dense decode can take: as many bytes as all keys and values hold in BF16, at the speed of a copy.

    Half of the cache, inverted into the other half, reads and writes as many bytes as reading all of it; all of an FP8
    cache, or as many other bytes where a cache is smaller, inverted in place, as many as reading it in BF16.
    """

    @functools.lru_cache(maxsize=1)
    def others(device: torch.device) -> Tensor:
        keys = case.batch * case.pages * PAGE * case["num_kv_heads"]
        return torch.zeros(keys * case["head_dim"] // 2, dtype=torch.int32, device=device)

    def bind(x: Inputs) -> Call:
        if not isinstance(x.k, Tensor):
            source = target = others(x.q.device)
        else:
            flat = x.cache.view(-1).view(torch.int32)
            half = flat.numel() // 2
            source, target = (flat[half : 2 * half], flat[:half]) if x.scale is None else (flat, flat)

        def call() -> None:
            torch.bitwise_not(source, out=target)

        return call

    return Contender("dense_bytes", bind, lambda x, result: None)


def check(case: Case, x: Inputs, result: tuple[Tensor, Tensor]) -> str | None:
    """The ids of the first and last request against scores in float32, the output against attention over those ids."""
    ids, out = result
    for b in {0, case.batch - 1}:
        k, v, _, where = x.of_request(b)
        rows = slice(b * case.queries, (b + 1) * case.queries)
        scores = scores_of(x, b, case.queries)
        for row in range(case.queries):
            wrong = ranked(scores[:, row], ids[:, rows.start + row], case["topk"], slack(x))
            if wrong:
                return f"request {b}: {wrong}"
        wanted, _ = reference.sparse_attention(x.q[rows].float(), k, v, ids[:, rows], block_size=PAGE, **where)
        wrong = checks.close(out[rows], wanted)
        if wrong:
            return f"request {b}: {wrong}"
    return None


def scores_of(x: Inputs, request: int, queries: int = 1) -> Tensor:
    """float32 scores `[Hi, queries, blocks]` of one request, by the reference."""
    *_, index_cache, where = x.of_request(request)
    idx_q = wide(x.idx_q[request * queries : (request + 1) * queries])
    return reference.index_score(idx_q, index_cache, block_size=PAGE, **where)


def slack(x: Inputs) -> float:
    """What scores may be off by, as a part of the largest: the tensor cores add products of FP8 with fewer bits."""
    return checks.FP8_SCORE_LIMIT if is_e4m3(x.index_cache) else SCORE_SLACK


def ranked(scores: Tensor, ids: Tensor, topk: int, slack: float) -> str | None:
    """Are `ids [H, k]` distinct, with the last block among them, the others a best choice by `scores [H, blocks]`?"""
    last = scores.shape[1] - 1
    for head in range(len(ids)):
        row = ids[head].long()
        if len(set(row.tolist())) != topk or int(row.min()) < 0 or int(row.max()) > last:
            return "ids are not distinct blocks of the request"
        if not bool((row == last).any()):
            return "the last block is missing"
        free = row[row != last]
        left = scores[head].clone()
        left[row] = -torch.inf
        allowed = slack * scores[head].abs().max()
        if bool(scores[head][free].min() < left[:last].max() - allowed):
            return "blocks left out score higher than chosen ones"
    return None


def score_work(case: Case, precision: str) -> Work:
    """Every index key is read once and multiplied with every index head."""
    products = case["num_index_heads"] * case["head_dim"] * case.batch * case.keys
    return Work(2 * products, index_bytes(case, precision), precisions.multiplied("decode_score", precision))


def attention_work(case: Case, precision: str) -> Work:
    """The selected keys and values are read once for each KV head."""
    keys = case.batch * case["num_kv_heads"] * case["topk"] * PAGE * case["head_dim"]
    bits = precisions.stored(precision, "key_value").bits_with_scales
    return Work(4 * case["group"] * keys, 2 * bits * keys / 8, precisions.multiplied("sparse_decode", precision))


def index_bytes(case: Case, precision: str) -> int:
    """Bytes of the index keys, scales of groups included."""
    bits = precisions.stored(precision, "index_key").bits_with_scales
    return int(bits * case.batch * case.keys * case["head_dim"]) // 8


def step_work(case: Case, precision: str) -> list[Work]:
    return [score_work(case, precision), attention_work(case, precision)]


def work(label: str, precision: str) -> list[Work]:
    return step_work(find(label), precision)


def prepare(case: Case, device: torch.device, precision: str) -> Bench:
    return Bench(
        case=case,
        make=functools.partial(make, case, device, precision),
        bytes_per_set=index_bytes(case, precision),
        ours=functools.partial(ours, case),
        check=functools.partial(check, case),
        peers=[
            peers.takes(precision, "index_key", peers.takes(precision, "key_value", vllm(case))),
            flashinfer_peer.decode(case, one_dtype(precision), functools.partial(check, case)),
            fp8_index(case, precision),
            fa4_dense(case),
            dense_bytes(case),
        ],
    )


BENCHMARK = Benchmark(OP, tuple(BATCHES), find, prepare, work, PARTS, precisions.BOTH, precisions.OTHER_PAIRS)
