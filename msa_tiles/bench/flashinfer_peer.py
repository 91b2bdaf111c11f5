"""FlashInfer's MSA operators on Hopper (0.7.4): a peer of FP8 cases.

They take e4m3 index queries and keys, BF16 queries on e4m3 keys and values, pages of 128 and 16 blocks a query, no
scales of tensors, and return no LSE. Scores come as [Hi, blocks, T], ids as [T, Hi, k]; attention wants [Hkv, T, k].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msa_tiles.bench import checks
from msa_tiles.bench.cases import Case
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.inputs import Attention, Indexer
from msa_tiles.bench.peers import OneRequest, interleaved_cache, optional_function, paged
from msa_tiles.bench.timing import Call
from msa_tiles.quant import FP8

NAME = "flashinfer"
PAGE = 128
TOPK = 16
_MODULE = "flashinfer.msa_ops"


def unless(case: Any, dtype: torch.dtype | None, *functions: str) -> list[Callable[..., Any]] | Skipped:
    """Its operators of these names, or why they cannot run a case with keys of this dtype (None: without keys)."""
    if dtype not in (FP8, None):
        return Skipped(NAME, "on Hopper it takes keys of e4m3 only")
    if (case["block_size"], case["topk"]) != (PAGE, TOPK) or (dtype is not None and case["head_dim"] != 128):
        return Skipped(NAME, f"it takes {TOPK} blocks of {PAGE} tokens, and heads of 128 dims")
    found = [optional_function(_MODULE, name) for name in functions]
    missing = [reason for reason in found if isinstance(reason, str)]
    return Skipped(NAME, missing[0]) if missing else [f for f in found if not isinstance(f, str)]


class Selection:
    """Scores, then top-k, of the last queries of one request, in buffers of its own."""

    def __init__(self, case: Case, x: Indexer) -> None:
        device, heads = x.idx_q.device, x.idx_q.shape[1]
        self.case, self.where = case, OneRequest.of(case, device)
        self.idx_q, self.cache = x.idx_q, paged(x.idx_k)[:, None]
        self.scores = torch.empty(heads, -(-case.num_k // PAGE), case.num_q, device=device)
        self.ids = torch.empty(case.num_q, heads, TOPK, dtype=torch.int32, device=device)
        self.valid = valid_blocks(case, device)

    def score(self, function: Callable[..., Any]) -> Tensor:
        """[Hi, blocks, T]; sums in float32."""
        return function(
            self.idx_q,
            self.cache,
            self.where.cu_seqlens_q,
            page_table=self.where.block_table,
            seqused_k=self.where.seq_lens,
            max_seqlen_q=self.case.num_q,
            max_k_tiles=self.scores.shape[1],
            output=self.scores,
        )

    def choose(self, function: Callable[..., Any]) -> Tensor:
        """[Hkv, T, k]"""
        function(self.scores, TOPK, num_valid_pages=self.valid, output=self.ids, force_end_blocks=1)
        return self.ids.transpose(0, 1)


def valid_blocks(case: Case, device: torch.device) -> Tensor:
    """int32 [T]: how many blocks each query sees something of."""
    positions = torch.arange(case.num_q, device=device) + case.first_position
    return (torch.div(positions, PAGE, rounding_mode="floor") + 1).int()


class Attending:
    """Attention of the last queries of one request over K beside V in pages."""

    def __init__(self, case: Case, x: Attention) -> None:
        self.where, self.q, self.out = OneRequest.of(case, x.q.device), x.q, torch.empty_like(x.q)
        self.k, self.v = interleaved_cache(x.k, x.v).split(x.k.shape[-1], -1)

    def attend(self, function: Callable[..., Any], ids: Tensor) -> Tensor:
        return function(
            self.q,
            self.k,
            self.v,
            ids.contiguous(),
            self.where.cu_seqlens_q,
            causal=True,
            page_table=self.where.block_table,
            seqused_k=self.where.seq_lens,
            out=self.out,
        )


def index_score(case: Case, dtype: torch.dtype) -> Contender | Skipped:
    """The score operator alone."""
    found = unless({**case.dims, "topk": TOPK}, dtype, "msa_proxy_score")
    if isinstance(found, Skipped):
        return found

    def bind(x: Indexer) -> Call:
        selection = Selection(case, x)
        return lambda: selection.score(found[0]).transpose(1, 2)

    return Contender(NAME, bind, functools.partial(checks.scores, case))


def select(case: Case, dtype: torch.dtype) -> Contender | Skipped:
    """Scores, then top-k, through a score matrix."""
    found = unless(case, dtype, "msa_proxy_score", "msa_topk_select")
    if isinstance(found, Skipped):
        return found

    def bind(x: Indexer) -> Call:
        selection = Selection(case, x)

        def call() -> Tensor:
            selection.score(found[0])
            return selection.choose(found[1])

        return call

    return Contender(NAME, bind, functools.partial(checks.selected, case))


def topk_select(case: Case, check: Callable[[Any, Any], str | None]) -> Contender | Skipped:
    """The top-k operator alone, on scores `[H, T, blocks]`, which lie as it wants them."""
    found = unless(case, None, "msa_topk_select")
    if isinstance(found, Skipped):
        return found

    def bind(scores: Tensor) -> Call:
        turned = scores.transpose(1, 2).contiguous()
        ids = torch.empty(case.num_q, scores.shape[0], TOPK, dtype=torch.int32, device=scores.device)
        valid = valid_blocks(case, scores.device)

        def call() -> Tensor:
            found[0](turned, TOPK, num_valid_pages=valid, output=ids, force_end_blocks=1)
            return ids.transpose(0, 1)

        return call

    return Contender(NAME, bind, check)


def attention(case: Case, dtype: torch.dtype) -> Contender | Skipped:
    """Attention over given blocks."""
    found = unless(case, dtype, "msa_sparse_attention")
    if isinstance(found, Skipped):
        return found

    def bind(x: Attention) -> Call:
        attending, ids = Attending(case, x), x.block_indices.contiguous()
        return lambda: attending.attend(found[0], ids)

    return Contender(NAME, bind, functools.partial(checks.attended, case))


def prefill(
    indexer: Case, case: Case, dtypes: tuple[torch.dtype, torch.dtype], check: Callable[[Any, Any], str | None]
) -> Contender | Skipped:
    """All three; inputs are `(Indexer, Attention)`, dtypes those of index keys and of keys and values."""
    names = ("msa_proxy_score", "msa_topk_select", "msa_sparse_attention")
    found = unless(case, dtypes[0] if dtypes[0] == dtypes[1] else torch.bfloat16, *names)
    if isinstance(found, Skipped):
        return found
    score, choose, attend = found

    def bind(inputs: tuple[Indexer, Attention]) -> Call:
        selection, attending = Selection(indexer, inputs[0]), Attending(case, inputs[1])

        def call() -> tuple[Tensor, Tensor]:
            selection.score(score)
            ids = selection.choose(choose)
            return ids, attending.attend(attend, ids)

        return call

    return Contender(NAME, bind, check)


def decode(case: Any, dtype: torch.dtype, check: Callable[[Any, Any], str | None]) -> Contender | Skipped:
    """A whole step; without top-k where one query is all there is, which its operator does not survive (0.7.4)."""
    found = unless(case, dtype, "msa_proxy_score", "msa_topk_select", "msa_sparse_decode_attention")
    if isinstance(found, Skipped):
        return found
    score, choose, attend = found

    def bind(x: Any) -> Call:
        heads, blocks = case["num_index_heads"], -(-case.keys // PAGE)
        k, v = x.cache.split(case["head_dim"], -1)
        out = torch.empty_like(x.q)
        scores = torch.empty(heads, blocks, case.batch, device=x.q.device)
        ids = torch.empty(case.batch, heads, TOPK, dtype=torch.int32, device=x.q.device)
        # Every request sees all of its blocks; the last one is forced.
        valid = torch.full((case.batch,), blocks, dtype=torch.int32, device=x.q.device)

        def scored() -> None:
            score(
                x.idx_q,
                x.index_cache[:, None],
                x.cu_seqlens_q,
                page_table=x.page_table,
                seqused_k=x.seq_lens,
                max_seqlen_q=1,
                max_k_tiles=blocks,
                output=scores,
            )

        if case.batch == 1:
            scored()
            scores[:, -1] = torch.inf
            ids.copy_(scores.topk(TOPK, dim=1).indices.sort(dim=1).values.permute(2, 0, 1))

        def call() -> tuple[Tensor, Tensor]:
            scored()
            if case.batch > 1:
                choose(scores, TOPK, num_valid_pages=valid, output=ids, force_end_blocks=1)
            chosen = ids.transpose(0, 1).contiguous()
            attend(x.q, k, v, chosen, page_table=x.page_table, seqused_k=x.seq_lens, seqlen_q=1, out=out)
            return chosen, out

        return call

    return Contender(NAME, bind, check)
