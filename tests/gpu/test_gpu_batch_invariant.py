"""batch_invariant on a GPU: a row alone, in a batch of 37, in a graph padded to 64 and inside a mixed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_calls import Named
from torch import Tensor

from msa_tiles import ops
from msa_tiles.quant import FP8

pytestmark = pytest.mark.gpu

HEADS, GROUP, DIM, BLOCK, TOPK = 2, 16, 128, 128, 16
REQUESTS, PADDED, LONGEST = 37, 64, 12_000
SAMPLE = (0, 5, 36)
FLAG = {"batch_invariant": True, "block_size": BLOCK}

DSLS = [named for named in (Named("tilelang"), Named("cutedsl")) if named.has("sparse_attention")]
each_dsl = pytest.mark.parametrize("named", DSLS, ids=lambda named: named.backend)
each_precision = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@dataclass
class Pool:
    """Paged requests of different lengths, and for each the query of its last token and some before it."""

    fp8: bool
    device: str = "cuda"

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(int(torch.randint(1 << 31, ())))
        self.lengths = [int(n) for n in torch.randint(1, LONGEST, (REQUESTS,)).tolist()]
        self.lengths[:3] = [LONGEST, 1, BLOCK]
        width = -(-LONGEST // BLOCK)
        pages = REQUESTS * width
        self.table = torch.randperm(pages, generator=self.generator, device=self.device).to(torch.int32)
        self.table = self.table.view(REQUESTS, width)
        cache = self.normal(pages, HEADS, BLOCK, 2 * DIM)
        self.k, self.v = (cache.to(FP8) if self.fp8 else cache).split(DIM, -1)
        self.scales: dict[str, Tensor] = {}
        if self.fp8:
            self.scales = {name: torch.tensor([0.5, 1.5], device=self.device) for name in ("k_scale", "v_scale")}
        self.idx_k = self.normal(pages, BLOCK, DIM)
        self.used = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        self.q, self.idx_q = self.normal(REQUESTS, HEADS * GROUP, DIM), self.normal(REQUESTS, HEADS, DIM)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(torch.bfloat16)

    def where(self, requests: Sequence[int], padding: int = 0) -> dict[str, Any]:
        """One query each of these requests, and requests without keys behind them."""
        rows = torch.tensor(list(requests) + [0] * padding, device=self.device)
        used = self.used[rows].clone()
        used[len(requests) :] = 0
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=self.device)
        bounds = {"max_seqlen_q": 1, "max_seqlen_k": LONGEST}
        return {"cu_seqlens_q": starts, "page_table": self.table[rows], "seqused_k": used, **bounds}

    def step(self, named: Named, requests: Sequence[int], padding: int = 0, **buffers: Tensor) -> tuple[Tensor, ...]:
        """msa_decode of these requests."""
        rows = torch.tensor(list(requests) + [0] * padding, device=self.device)
        return named.msa_decode(
            self.q[rows], self.k, self.v, self.idx_q[rows], self.idx_k, TOPK, return_lse=True, **FLAG, **self.scales,
            **self.where(requests, padding), **buffers,
        )  # fmt: skip

    def ids(self) -> Tensor:
        """Ids [Hkv, B, k] of blocks of each request, in random order."""
        ids = torch.full((HEADS, REQUESTS, TOPK), -1, dtype=torch.int32, device=self.device)
        for request, length in enumerate(self.lengths):
            blocks = -(-length // BLOCK)
            for head in range(HEADS):
                chosen = torch.randperm(blocks, generator=self.generator, device=self.device)[:TOPK]
                ids[head, request, : len(chosen)] = chosen.to(torch.int32)
        return ids


def check(found: Sequence[Tensor], wanted: Sequence[Tensor], rows: Sequence[int]) -> None:
    """Bitwise: rows [len(rows)] of a call against the same ones of the whole batch."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[: len(rows)].view(torch.uint8), other[list(rows)].view(torch.uint8))


@each_dsl
@each_precision
def test_decode_alone_and_in_batches(named: Named, fp8: bool) -> None:
    pool = Pool(fp8)
    whole = pool.step(named, range(REQUESTS))
    for request in SAMPLE:
        check(pool.step(named, [request]), whole, [request])
    turned = list(range(REQUESTS))[::-1]
    check(pool.step(named, turned), whole, turned)
    check(pool.step(named, range(9), padding=3), whole, range(9))


@each_dsl
@each_precision
def test_sparse_decode_and_attention_alone_and_in_batches(named: Named, fp8: bool) -> None:
    """Each by itself: their bits need not agree with each other."""
    pool = Pool(fp8)
    ids = pool.ids()
    for op in ("sparse_decode", "sparse_attention"):

        def attend(requests: Sequence[int], op: str = op) -> tuple[Tensor, Tensor]:
            rows = torch.tensor(list(requests), device=pool.device)
            return getattr(named, op)(
                pool.q[rows], pool.k, pool.v, ids[:, rows], return_lse=True, **FLAG, **pool.scales,
                **pool.where(requests),
            )  # fmt: skip

        whole = attend(range(REQUESTS))
        for request in SAMPLE:
            check(attend([request]), whole, [request])
        check(attend(range(20, 5, -1)), whole, range(20, 5, -1))


@each_dsl
@each_precision
def test_in_a_graph_padded_to_64(named: Named, fp8: bool) -> None:
    pool = Pool(fp8)
    whole = pool.step(named, range(REQUESTS))
    rows = torch.arange(PADDED, device=pool.device).clamp_max(REQUESTS - 1)
    q, idx_q = pool.q[rows].clone(), pool.idx_q[rows].clone()
    where = pool.where(range(REQUESTS), PADDED - REQUESTS)
    size = ops.decode_workspace_bytes(
        q, TOPK, HEADS, idx_q=idx_q, max_seqlen_k=LONGEST, block_size=BLOCK, batch_invariant=True
    )  # fmt: skip
    buffers = {
        "workspace": torch.empty(size, dtype=torch.uint8, device=pool.device),
        "block_indices": torch.empty(HEADS, PADDED, TOPK, dtype=torch.int32, device=pool.device),
        "out": torch.empty_like(q),
        "lse": torch.empty(q.shape[:2], device=pool.device),
    }

    def step() -> None:
        named.msa_decode(q, pool.k, pool.v, idx_q, pool.idx_k, TOPK, **FLAG, **pool.scales, **where, **buffers)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in (list(range(REQUESTS)), list(range(REQUESTS))[::-1], [5]):
        for part in (buffers["out"], buffers["lse"]):
            part.fill_(torch.nan)
        now = pool.where(turn, PADDED - len(turn))
        for name in ("page_table", "seqused_k"):
            where[name].copy_(now[name])
        q[: len(turn)], idx_q[: len(turn)] = pool.q[turn], pool.idx_q[turn]
        graph.replay()
        check((buffers["out"], buffers["lse"]), whole, turn)
        assert (buffers["out"][len(turn) :] == 0).all() and (buffers["lse"][len(turn) :] == -torch.inf).all()


@each_dsl
@each_precision
def test_inside_a_mixed_batch(named: Named, fp8: bool) -> None:
    """Decoded queries beside chunks of prompts, in sparse_attention: windows, tasks and tiles are others there."""
    pool = Pool(fp8)
    ids = pool.ids()
    where = pool.where(range(REQUESTS))
    whole = named.sparse_attention(
        pool.q, pool.k, pool.v, ids, return_lse=True, **FLAG, **pool.scales, **where
    )  # fmt: skip
    counts = [1 if request % 3 else min(length, 300) for request, length in enumerate(pool.lengths)]
    starts = torch.tensor([0, *counts], device=pool.device).cumsum(0).to(torch.int32)
    last = starts[1:].long() - 1  # the last query of a request is the one of the other calls
    q = pool.normal(int(starts[-1]), HEADS * GROUP, DIM)
    q[last] = pool.q
    mixed = torch.zeros(HEADS, len(q), TOPK, dtype=torch.int32, device=pool.device)
    mixed[..., 1:] = -1
    mixed[:, last] = ids
    chunked = {**where, "cu_seqlens_q": starts, "max_seqlen_q": max(counts)}
    for workspace in (None, 64 * TOPK * HEADS * GROUP * (2 * DIM + 4)):
        out, lse = named.sparse_attention(
            q, pool.k, pool.v, mixed, return_lse=True, workspace=workspace, **FLAG, **pool.scales, **chunked
        )  # fmt: skip
        check((out[last], lse[last]), whole, range(REQUESTS))
