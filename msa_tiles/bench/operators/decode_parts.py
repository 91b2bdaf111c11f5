"""The steps of `msa_decode` by themselves: `decode_score`, `decode_topk` and `sparse_decode`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.bench import checks, peers, precisions
from msa_tiles.bench.harness import Bench, Benchmark, Contender, Skipped
from msa_tiles.bench.inputs import normal
from msa_tiles.bench.operators import decode
from msa_tiles.bench.operators.decode import PAGE, Case, Inputs
from msa_tiles.bench.timing import Call
from msa_tiles.spec.work import Work

LABELS = ("decode_128k_b1", "decode_128k_b32", "decode_1m_b8")


def blocks_of(case: Case) -> int:
    return -(-case.keys // PAGE)


def prepare_score(case: Case, device: torch.device, precision: str) -> Bench:
    def ours(dsl: str, x: Inputs) -> Call:
        out = torch.empty(case["num_index_heads"], case.batch, blocks_of(case), device=device)
        return lambda: ops.decode_score(
            x.idx_q,
            x.index_cache,
            cu_seqlens_q=x.cu_seqlens_q,
            page_table=x.page_table,
            seqused_k=x.seq_lens,
            max_seqlen_q=1,
            max_seqlen_k=case.keys,
            block_size=PAGE,
            out=out,
            backend=dsl,
        )

    return Bench(
        case=case,
        make=functools.partial(decode.make_indexer, case, device, precision),
        bytes_per_set=decode.index_bytes(case, precision),
        ours=ours,
        check=functools.partial(check_score, case),
        peers=[],
    )


def check_score(case: Case, x: Inputs, found: Tensor) -> str | None:
    """The scores of the first and last request against the reference in float32."""
    for b in sorted({0, case.batch - 1}):
        wanted = decode.scores_of(x, b)[:, 0]
        error = (found[:, b] - wanted).abs().max().item() / wanted.abs().max().item()
        if not error <= decode.slack(x):
            return f"request {b}: scores are off by {error:.3g} of the largest"
    return None


def make_scores(case: Case, device: torch.device, seed: int) -> Tensor:
    """Normal scores `[Hi, B, blocks]`; every request sees all of its blocks."""
    return normal(seed, device, case["num_index_heads"], case.batch, blocks_of(case), dtype=torch.float32)


def prepare_topk(case: Case, device: torch.device, precision: str) -> Bench:
    heads, topk = case["num_kv_heads"], case["topk"]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((case.batch,), case.keys, dtype=torch.int32, device=device)

    def ours(dsl: str, scores: Tensor) -> Call:
        out = torch.empty(heads, case.batch, topk, dtype=torch.int32, device=device)
        return lambda: ops.decode_topk(
            scores,
            topk,
            cu_seqlens_q=starts,
            seqused_k=lengths,
            max_seqlen_q=1,
            max_seqlen_k=case.keys,
            num_kv_heads=heads,
            block_size=PAGE,
            out=out,
            backend=dsl,
        )

    def torch_check(scores: Tensor, found: tuple[Tensor, Tensor]) -> str | None:
        same = torch.equal(found[0].sort(-1).values, scores.sort(-1).values[..., -topk:])
        return None if same else "the values are not the largest scores"

    return Bench(
        case=case,
        make=functools.partial(make_scores, case, device),
        bytes_per_set=4 * case["num_index_heads"] * case.batch * blocks_of(case),
        ours=ours,
        check=functools.partial(check_topk, case),
        peers=[Contender("torch", lambda scores: lambda: torch.topk(scores, topk, dim=-1), torch_check)],
    )


def check_topk(case: Case, scores: Tensor, ids: Tensor) -> str | None:
    """The ids of the first and last request: the last block, and the best of the others."""
    for b in sorted({0, case.batch - 1}):
        wrong = decode.ranked(scores[:, b], ids[:, b], case["topk"], slack=0.0)
        if wrong:
            return f"request {b}: {wrong}"
    return None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A step whose blocks are chosen: `x`, and ids `[Hkv, B, k]` of each request's own blocks, ascending."""

    x: Inputs
    ids: Tensor


def prepare_attention(case: Case, device: torch.device, precision: str, *, batch_invariant: bool = False) -> Bench:
    heads, topk = case["num_kv_heads"], case["topk"]

    @functools.lru_cache(maxsize=1)
    def pool() -> Inputs:
        return decode.make(case, device, precision, 0)

    def make(seed: int) -> Chosen:
        """Other queries and other blocks of the same caches: what a call reads is a small part of them."""
        torch.manual_seed(seed)
        chances = torch.rand(heads, case.batch, blocks_of(case), device=device)
        chances[..., -1] = 2.0  # the last block is always among them
        ids = chances.topk(topk, dim=-1).indices.sort(dim=-1).values.int()
        q = normal(seed + 1, device, *pool().q.shape)
        return Chosen(dataclasses.replace(pool(), q=q), ids)

    def ours(dsl: str, chosen: Chosen) -> Call:
        x = chosen.x
        out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device=device)
        size = ops.decode_workspace_bytes(x.q, topk, heads, batch_invariant=batch_invariant)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)

        def call() -> Tensor:
            ops.sparse_decode(
                x.q,
                x.k,
                x.v,
                chosen.ids,
                cu_seqlens_q=x.cu_seqlens_q,
                page_table=x.page_table,
                seqused_k=x.seq_lens,
                max_seqlen_q=1,
                max_seqlen_k=case.keys,
                block_size=PAGE,
                **x.scales(),
                workspace=workspace,
                out=out,
                lse=lse,
                batch_invariant=batch_invariant,
                backend=dsl,
            )
            return out

        return call

    return Bench(
        case=case,
        make=make,
        bytes_per_set=int(decode.attention_work(case, precision).bytes),
        ours=ours,
        check=functools.partial(check_attention, case),
        peers=[
            peers.takes(precision, "key_value", vllm_attention(case)),
            fp8_attention(case, device, precision, ours),
        ],
    )


def fp8_attention(
    case: Case, device: torch.device, precision: str, ours: Callable[[str, Chosen], Call]
) -> Contender | Skipped:
    """Our own attention over the same blocks of e4m3 keys and values, where those of the case have 4 bits."""
    if precisions.stored(precision, "key_value").bits >= 8:
        return Skipped("fp8", "it is a peer of keys and values of 4 bits")

    @functools.lru_cache(maxsize=1)
    def pool() -> Inputs:
        return decode.make(case, device, "q16kv8", 0)

    def rounded(chosen: Chosen) -> Chosen:
        return Chosen(dataclasses.replace(pool(), q=chosen.x.q), chosen.ids)

    return Contender(
        "fp8",
        lambda chosen: ours("auto", rounded(chosen)),
        lambda chosen, out: check_attention(case, rounded(chosen), out),
    )


def vllm_attention(case: Case) -> Contender | Skipped:
    """vLLM's attention over given blocks."""
    module = peers.vllm_module()
    if isinstance(module, str):
        return Skipped("vllm", module)

    def bind(chosen: Chosen) -> Call:
        x = chosen.x
        out, ids = torch.empty_like(x.q), peers.token_major(chosen.ids)

        def call() -> Tensor:
            module.minimax_m3_sparse_attn_decode(
                x.q,
                x.cache,
                ids,
                x.page_table,
                x.seq_lens,
                case["num_kv_heads"],
                x.q.shape[-1] ** -0.5,
                out,
                1,
                **x.scales(),
            )
            return out

        return call

    return Contender("vllm", bind, functools.partial(check_attention, case))


def check_attention(case: Case, chosen: Chosen, out: Tensor) -> str | None:
    """The output of the first and last request against attention over their blocks."""
    x = chosen.x
    for b in sorted({0, case.batch - 1}):
        rows = slice(b, b + 1)
        k, v, _, where = x.of_request(b)
        wanted, _ = reference.sparse_attention(x.q[rows].float(), k, v, chosen.ids[:, rows], block_size=PAGE, **where)
        wrong = checks.close(out[rows], wanted)
        if wrong:
            return f"request {b}: {wrong}"
    return None


def score_work(label: str, precision: str) -> list[Work]:
    return [decode.score_work(decode.find(label), precision)]


def topk_work(label: str, precision: str) -> list[Work]:
    case = decode.find(label)
    scores = case["num_index_heads"] * case.batch * blocks_of(case)
    return [Work(scores, 4 * scores, "float32")]


def attention_work(label: str, precision: str) -> list[Work]:
    return [decode.attention_work(decode.find(label), precision)]


BENCHMARKS = tuple(
    Benchmark(op, LABELS, functools.partial(decode.find, op=op), prepare, work, (op,), known)
    for op, prepare, work, known in (
        ("decode_score", prepare_score, score_work, precisions.INDEXER),
        ("decode_topk", prepare_topk, topk_work, (precisions.BF16,)),
        ("sparse_decode", prepare_attention, attention_work, precisions.ATTENTION),
    )
)
