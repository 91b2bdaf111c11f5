"""Decode steps as a server runs them: captured once, replayed with other lengths, ids and page tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.runtime import toolchain

pytestmark = pytest.mark.gpu

HEADS, GROUP, DIM, PAGE, TOPK = 4, 16, 128, 128, 16
MAX_PAGES, POOL = 40, 200
BATCH = 6
LONGEST = MAX_PAGES * PAGE


@dataclass
class Step:
    """A batch over vLLM's kind of caches: K beside V, index keys apart, one page table. Unused pages hold NaN."""

    queries: list[int]
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(self.seed)
        tokens = sum(self.queries)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        def whole(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()

        self.q, self.idx_q = normal(tokens, HEADS * GROUP, DIM), whole(tokens, HEADS, DIM)
        self.cache, self.index_cache = normal(POOL, HEADS, PAGE, 2 * DIM), whole(POOL, PAGE, DIM)
        # Whole numbers of pages and odd ones, one request without keys, one shorter than its queries.
        lengths = [0, 1, 700, LONGEST, 129 + self.seed, 5 * PAGE][: len(self.queries)]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda").roll(self.seed)
        order = torch.randperm(POOL, generator=generator, device="cuda").to(torch.int32)
        self.page_table = torch.full((len(self.queries), MAX_PAGES), -1, dtype=torch.int32, device="cuda")
        used = 0
        for row, length in enumerate(self.seq_lens.tolist()):
            pages = -(-length // PAGE)
            self.page_table[row, :pages] = order[used : used + pages]
            used += pages
        self.cache[order[used:].long()] = torch.nan
        self.index_cache[order[used:].long()] = torch.nan
        starts = torch.tensor([0, *self.queries], device="cuda").cumsum(0)
        self.cu_seqlens_q = starts.to(torch.int32)
        self.out, self.lse = torch.full_like(self.q, torch.nan), torch.full(self.q.shape[:2], torch.nan, device="cuda")
        self.ids = torch.full((HEADS, tokens, TOPK), -9, dtype=torch.int32, device="cuda")
        size = ops.decode_workspace_bytes(self.q, TOPK, HEADS, idx_q=self.idx_q, max_seqlen_k=LONGEST)
        self.workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def where(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_seqlens_q, "page_table": self.page_table, "seqused_k": self.seq_lens}

    def decode(self, backend: str = "auto") -> None:
        k, v = self.cache.split(DIM, -1)
        ops.msa_decode(
            self.q, k, v, self.idx_q, self.index_cache, TOPK, workspace=self.workspace, out=self.out, lse=self.lse,
            block_indices=self.ids, max_seqlen_q=max(self.queries), max_seqlen_k=LONGEST, backend=backend,
            **self.where(),
        )  # fmt: skip

    def attend(self) -> None:
        k, v = self.cache.split(DIM, -1)
        ops.sparse_decode(
            self.q, k, v, self.ids, workspace=self.workspace, out=self.out, lse=self.lse,
            max_seqlen_q=max(self.queries), max_seqlen_k=LONGEST, **self.where(),
        )  # fmt: skip

    def take(self, other: Step) -> None:
        for name in ("q", "idx_q", "cache", "index_cache", "seq_lens", "page_table", "cu_seqlens_q"):
            getattr(self, name).copy_(getattr(other, name))

    def answers(self) -> tuple[Tensor, ...]:
        return self.out.clone(), self.lse.clone(), self.ids.clone()

    def poison(self) -> None:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.workspace.fill_(0xFF)

    def check(self) -> None:
        k, v = self.cache.split(DIM, -1)
        wanted, lse = reference.sparse_attention(self.q.float(), k.float(), v.float(), self.ids, **self.where())
        torch.testing.assert_close(self.out.float(), wanted, atol=0.02, rtol=0.02)
        torch.testing.assert_close(self.lse, lse, atol=0.005, rtol=0)

    def check_ids(self) -> None:
        wanted = reference.select_blocks(
            self.idx_q.float(), self.index_cache.float(), TOPK, num_kv_heads=HEADS, **self.where()
        )
        assert torch.equal(self.ids, wanted)


BATCHES = {"one query each": [1] * BATCH, "speculative": [4] * BATCH, "ragged": [1, 3, 0, 8, 32, 2], "one request": [1]}


@pytest.fixture(params=BATCHES.values(), ids=BATCHES.keys())
def queries(request: pytest.FixtureRequest) -> list[int]:
    return request.param


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_a_captured_step_serves_other_batches(queries: list[int]) -> None:
    step = Step(queries, 1)
    graph = captured(step.decode)
    for seed in (2, 3):
        step.take(Step(queries, seed))
        step.poison()
        step.ids.fill_(-9)
        graph.replay()
        step.check_ids()
        step.check()
        first = step.answers()
        for _ in range(2):
            step.poison()
            graph.replay()
            for before, now in zip(first, (step.out, step.lse, step.ids), strict=True):
                assert torch.equal(before, now)


@pytest.mark.parametrize("backend", ["tilelang", "cutedsl"])
def test_each_step_of_a_graph_sees_what_was_written_just_before(queries: list[int], backend: str) -> None:
    """sparse_decode reads lengths and queries before it waits for the scores, whose kernel has waited for them."""
    if toolchain.missing(backend):
        pytest.skip(f"{backend}: {toolchain.missing(backend)}")
    step = Step(queries, 1)
    # Any page may be anybody's.
    step.cache.nan_to_num_()
    step.index_cache.nan_to_num_()
    written = ("q", "idx_q", "seq_lens", "page_table")
    batches = [{name: getattr(Step(queries, seed), name) for name in written} for seed in range(2, 34)]

    def take_and_decode(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        for name in written:
            getattr(step, name).copy_(batch[name])
        step.decode(backend)
        return step.answers()

    alone = []
    for batch in batches:
        torch.cuda.synchronize()
        step.poison()
        alone.append(take_and_decode(batch))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = [take_and_decode(batch) for batch in batches]
    for _ in range(10):
        for answers in together:
            for answer in answers:
                answer.fill_(-9)
        graph.replay()
        for wanted, got in zip(alone, together, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


def test_captured_attention_serves_other_ids(queries: list[int]) -> None:
    step = Step(queries, 1)
    step.decode()
    graph = captured(step.attend)
    for seed in (4, 5):
        step.take(Step(queries, seed))
        shuffled = torch.randperm(TOPK, device="cuda")
        step.decode()
        step.ids.copy_(step.ids[:, :, shuffled])
        step.ids[:, :, seed] = -1
        step.poison()
        graph.replay()
        step.check()


def test_other_queries_in_the_same_graph() -> None:
    """The same number of tokens, distributed otherwise: captured graphs are padded with requests of length 0."""
    step = Step([2, 2, 2, 2, 2, 2], 1)
    graph = captured(step.decode)
    step.take(Step([5, 0, 1, 0, 6, 0], 2))
    step.poison()
    graph.replay()
    step.check_ids()
    step.check()


@pytest.mark.parametrize("name", ["decode", "attend"])
def test_a_call_with_buffers_allocates_and_waits_for_nothing(queries: list[int], name: str) -> None:
    step = Step(queries, 1)
    step.decode()
    call = getattr(step, name)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    step.check()


def test_flat_keys() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    lengths, queries = [700, 0, 5000, 64], [1, 2, 4, 1]
    keys = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    starts = torch.tensor([0, *queries], device="cuda").cumsum(0).to(torch.int32)
    q = torch.randn(8, 64, 128, generator=generator, device="cuda").bfloat16()
    k, v = (torch.randn(5764, 4, 128, generator=generator, device="cuda").bfloat16() for _ in range(2))
    idx_q = torch.randint(-2, 3, (8, 8, 128), generator=generator, device="cuda").bfloat16()
    idx_k = torch.randint(-2, 3, (5764, 128), generator=generator, device="cuda").bfloat16()
    where = {"cu_seqlens_q": starts, "cu_seqlens_k": keys}
    out, lse = ops.msa_decode(q, k, v, idx_q, idx_k, 8, init_blocks=1, return_lse=True, **where)
    ids = reference.select_blocks(idx_q.float(), idx_k.float(), 8, num_kv_heads=4, init_blocks=1, **where)
    wanted, wanted_lse = reference.sparse_attention(q.float(), k.float(), v.float(), ids, **where)
    torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, wanted_lse, atol=0.005, rtol=0)
