"""A million tokens in one call, and paged layouts in a replayed graph."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, reference
from msa_tiles.bench.operators import training

pytestmark = pytest.mark.gpu

BLOCK, DIM, TOPK = 128, 128, 16
GIB = 1 << 30


def row(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, token: int) -> Tensor:
    """One query's output in float32, by the formula: [Hq, D]."""
    group = q.shape[1] // k.shape[1]
    parts = []
    for head in range(k.shape[1]):
        blocks = ids[head, token][ids[head, token] >= 0].long()
        keys = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=q.device)).flatten()
        keys = keys[keys <= token]
        heads = slice(head * group, (head + 1) * group)
        weights = (q[token, heads].float() @ k[keys, head].float().T * DIM**-0.5).softmax(-1)
        parts.append(weights @ v[keys, head].float())
    return torch.cat(parts)


@pytest.mark.slow
def test_a_million_tokens_in_one_call() -> None:
    total = 1 << 20
    if torch.cuda.mem_get_info()[0] < 60 * GIB:
        pytest.skip("needs 60 GiB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)

    idx_q, idx_k = normal(total, 4, DIM), normal(total, DIM)
    q, k, v = normal(total, 64, DIM), normal(total, 4, DIM), normal(total, 4, DIM)
    ids = torch.full((4, total, TOPK), -7, dtype=torch.int32, device="cuda")
    out = torch.full_like(q, math.nan)
    lse = torch.full((total, 64), math.nan, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ops.select_blocks(idx_q, idx_k, TOPK, out=ids)
    ops.sparse_attention(q, k, v, ids, out=out, lse=lse)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held <= 2 * GIB
    for token in (0, 127, 128, 70_001, total // 2 + 3, total - 1):
        scores = (idx_q[token].float() @ idx_k[: token + 1].float().T).contiguous()
        scores = torch.nn.functional.pad(scores, (0, -(token + 1) % BLOCK), value=-math.inf)
        scores = scores.unflatten(1, (-1, BLOCK)).amax(-1)
        wanted = reference.topk_select(scores[:, None], TOPK, num_valid_blocks=token // BLOCK + 1, num_kv_heads=4)[:, 0]
        assert (ids[:, token] == wanted).float().mean() > 0.95  # near ties may fall otherwise in bfloat16
        torch.testing.assert_close(out[token].float(), row(q, k, v, ids, token), atol=0.01, rtol=0.02)
    assert not bool(out[::4099].isnan().any()) and not bool(lse[::4099].isnan().any())


@pytest.mark.slow
def test_training_on_256k_tokens() -> None:
    """Forward, backward and KL of one sequence, with little beside inputs, results and the workspace of 1 GiB."""
    total = 1 << 18
    if torch.cuda.mem_get_info()[0] < 70 * GIB:
        pytest.skip("needs 70 GiB of free GPU memory")
    case = dataclasses.replace(training.find("train_128k"), num_q=total, num_k=total)
    bench = training.prepare(case, torch.device("cuda"), "bf16")
    inputs = bench.make(int(torch.randint(1 << 20, ())))
    call = bench.ours("auto", inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - held - sum(tensor.nbytes for tensor in results)
    # Sums of dK and dV in float32 are as large as K and V four times over; schedules count ids.
    assert extra <= GIB + 4 * inputs.main.k.nbytes + 4 * results[2].nbytes + GIB // 2
    assert bench.check(inputs, results) is None


def paged_batch(lengths_q: list[int], lengths_k: list[int], page: int, seed: int) -> dict[str, Tensor]:
    """Inputs of one step: a pool of 512 pages, K and V interleaved, and three requests somewhere in it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = torch.randperm(512, generator=generator, device="cuda")[: 3 * 64].to(torch.int32).view(3, 64)
    starts = torch.tensor([0, *lengths_q], device="cuda").cumsum(0).to(torch.int32)
    return {
        "cache": torch.randn(512, 4, page, 2 * DIM, generator=generator, device="cuda").to(torch.bfloat16),
        "idx_cache": torch.randint(-2, 3, (512, page, DIM), generator=generator, device="cuda").to(torch.bfloat16),
        "q": torch.randn(96, 64, DIM, generator=generator, device="cuda").to(torch.bfloat16),
        "idx_q": torch.randint(-2, 3, (96, 4, DIM), generator=generator, device="cuda").to(torch.bfloat16),
        "cu_seqlens_q": starts,
        "page_table": pages,
        "seqused_k": torch.tensor(lengths_k, dtype=torch.int32, device="cuda"),
    }


def step(batch: dict[str, Tensor], backend: str = "auto") -> tuple[Tensor, Tensor]:
    where = {name: batch[name] for name in ("cu_seqlens_q", "page_table", "seqused_k")}
    k, v = batch["cache"].split(DIM, -1)
    ids = ops.select_blocks(batch["idx_q"], batch["idx_cache"], 4, backend=backend, **where)
    return ids, ops.sparse_attention(batch["q"], k, v, ids, backend=backend, **where)


@pytest.mark.parametrize("page", [128, 64, 16])
def test_a_replayed_graph_follows_lengths_and_page_tables(page: int) -> None:
    static = paged_batch([90, 0, 6], [20 * page, 5, 64 * page], page, 0)
    other = paged_batch([1, 70, 3], [17 * page + 3, 64 * page, 0], page, 1)
    step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, out = step(static)
    for name, value in other.items():
        static[name].copy_(value)
    graph.replay()
    wanted_ids, wanted = step(other, backend="reference")
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(out.float(), wanted.float(), atol=0.02, rtol=0.02)


def test_the_pool_is_never_copied() -> None:
    batch = paged_batch([90, 0, 6], [900, 5, 2000], 64, 2)
    step(batch)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    where = {name: batch[name] for name in ("cu_seqlens_q", "page_table", "seqused_k")}
    ops.select_blocks(batch["idx_q"], batch["idx_cache"], 4, **where)
    assert torch.cuda.max_memory_allocated() - held < batch["idx_cache"].numel() * 2 // 8
