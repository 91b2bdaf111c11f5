"""What the operators promise beside their answers: no synchronisation, the caller's stream, bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
from gpu_calls import Calls, Named
from torch import Tensor

from msa_tiles import ops, reference, runtime
from msa_tiles.launch import windows
from msa_tiles.library import remember

pytestmark = pytest.mark.gpu

NAMES = [
    "index_score", "topk_select", "select_blocks", "sparse_attention", "combine",
    "decode_score", "decode_topk", "sparse_decode", "msa_decode",
]  # fmt: skip
OF_DSL = [(named, name) for named in (Named("tilelang"), Named("cutedsl")) for name in NAMES if named.has(name)]
each_kernel = pytest.mark.parametrize(
    ("named", "name"), [pytest.param(*pair, id=f"{pair[1]}-{pair[0].backend}") for pair in OF_DSL]
)

each_dsl = pytest.mark.parametrize(
    "named", {named.backend: named for named, _ in OF_DSL}.values(), ids=lambda named: named.backend
)


@pytest.fixture(scope="module")
def calls() -> Calls:
    made = Calls(seed=int(os.environ["MSA_TILES_SEED"]))
    for named, name in OF_DSL:
        made.all(named)[name]()
    for call in made.all(ops).values():
        call()
    torch.cuda.synchronize()
    return made


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@each_kernel
def test_no_call_synchronises(calls: Calls, no_sync: None, named: Named, name: str) -> None:
    assert calls.all(named)[name]().is_cuda


def test_one_sequence_without_lengths_does_not_synchronise(calls: Calls, no_sync: None) -> None:
    assert ops.select_blocks(calls.idx_q, calls.idx_k[: len(calls.idx_q)], 4).shape == (4, len(calls.idx_q), 4)


@each_kernel
def test_work_goes_to_the_current_stream(calls: Calls, named: Named, name: str) -> None:
    wanted = calls.all(reference)[name]().float()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # The stream is busy for a while: work on any other stream would overtake it.
        torch.cuda._sleep(50_000_000)
        result = calls.all(named)[name]()
        busy = not stream.query()
        copied = result.float().clone()
    assert busy
    stream.synchronize()
    torch.testing.assert_close(copied, wanted, atol=0.02, rtol=0.02)


@each_kernel
def test_a_replayed_graph_follows_its_inputs(calls: Calls, named: Named, name: str) -> None:
    graph = torch.cuda.CUDAGraph()
    other = Calls(seed=12345)
    static = Calls(seed=0)
    with torch.cuda.graph(graph):
        result = static.all(named)[name]()
    for field in ("idx_q", "idx_k", "q", "k", "v", "partial_out", "partial_lse", "score", "ids"):
        getattr(static, field).copy_(getattr(other, field))
    graph.replay()
    torch.testing.assert_close(result.float(), other.all(reference)[name]().float(), atol=0.02, rtol=0.02)


@each_dsl
def test_new_lengths_do_not_compile(calls: Calls, named: Named) -> None:
    before = runtime.compile_count()
    for total in (1, 77, 513):
        named.select_blocks(calls.idx_q[:total].contiguous(), calls.idx_k[:total], 4)
        named.sparse_attention(calls.q[:total], calls.k[:total], calls.v[:total], calls.ids[:, :total] * 0)
    assert runtime.compile_count() == before


def test_attention_memory_is_bounded_by_the_workspace() -> None:
    total, bound = 8192, 64 << 20
    generator = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(total, 64, 128, generator=generator, device="cuda").to(torch.bfloat16)
    k, v = (torch.randn(total, 4, 128, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(2))
    ids = torch.randint(0, total // 128, (4, total, 1), generator=generator, device="cuda", dtype=torch.int32)
    ids = (ids + torch.arange(16, device="cuda", dtype=torch.int32) * 4) % (total // 128)
    ops.sparse_attention(q, k, v, ids, workspace=bound)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    small = ops.sparse_attention(q, k, v, ids, workspace=bound)
    extra = torch.cuda.max_memory_allocated() - held - small.numel() * 2 - total * 64 * 4
    # Beside partial results: the schedule, in the order of the ids themselves.
    assert extra <= bound + 8 * ids.numel() * 4
    torch.testing.assert_close(small, ops.sparse_attention(q, k, v, ids), atol=0, rtol=0)


@dataclass
class Prompt:
    """The rows of one attention call, to be copied into another's."""

    q: Tensor
    k: Tensor
    v: Tensor
    ids: Tensor
    cu_seqlens: Tensor

    @classmethod
    def random(cls, seed: int) -> Prompt:
        """Two sequences of 3,000 tokens in all, 9 blocks of 16 for each query, some of them neighbours'."""
        generator = torch.Generator("cuda").manual_seed(seed)
        q, k, v = (torch.randn(3000, heads, 128, generator=generator, device="cuda").bfloat16() for heads in (64, 4, 4))
        ids = torch.rand(4, 3000, 16, generator=generator, device="cuda").topk(9).indices.int().sort(-1).values
        ids[:, 1000:2000] = ids[:, 1000:2000:8].repeat_interleave(8, dim=1)
        starts = torch.tensor([0, 700 + 97 * seed % 1500, 3000], dtype=torch.int32, device="cuda")
        return cls(q, k, v, ids, starts)

    def take(self, other: Prompt) -> None:
        for name in ("q", "k", "v", "ids", "cu_seqlens"):
            getattr(self, name).copy_(getattr(other, name))

    def attend(self, backend: str) -> Tensor:
        return ops.sparse_attention(
            self.q, self.k, self.v, self.ids, cu_seqlens_q=self.cu_seqlens, cu_seqlens_k=self.cu_seqlens,
            workspace=64 << 20, backend=backend,
        )  # fmt: skip


@each_dsl
@pytest.mark.parametrize("rounds", [1, 4])
def test_each_call_of_a_graph_sees_what_was_written_just_before(
    monkeypatch: pytest.MonkeyPatch, named: Named, rounds: int
) -> None:
    """shared_attention reads what the kernels before sparse_attention wrote before it waits for that one."""
    monkeypatch.setattr(windows, "choose_rounds", lambda *_: (4 // rounds, 200))
    prompts, static = [Prompt.random(seed) for seed in range(6)], Prompt.random(9)
    alone = []
    for prompt in prompts:
        torch.cuda.synchronize()
        static.take(prompt)
        alone.append(static.attend(named.backend))
    torch.cuda.synchronize()
    graph, together = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for prompt in prompts:
            static.take(prompt)
            together.append(static.attend(named.backend))
    for _ in range(10):
        for out in together:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(wanted, got) for wanted, got in zip(alone, together, strict=True))


@each_dsl
def test_heads_that_take_turns_give_the_same_answer(monkeypatch: pytest.MonkeyPatch, named: Named) -> None:
    prompt = Prompt.random(1)
    wanted, _ = reference.sparse_attention(
        prompt.q.float(), prompt.k.float(), prompt.v.float(), prompt.ids, cu_seqlens_q=prompt.cu_seqlens,
        cu_seqlens_k=prompt.cu_seqlens,
    )  # fmt: skip
    results = []
    for choice in ((4, 200), (2, 1000), (1, 232)):
        monkeypatch.setattr(windows, "choose_rounds", lambda *_, choice=choice: choice)
        results.append(prompt.attend(named.backend))
    torch.testing.assert_close(results[0].float(), wanted, atol=0.02, rtol=0.02)
    assert all(torch.equal(results[0], other) for other in results[1:])


@each_dsl
@pytest.mark.parametrize(("group", "pages_per_block"), [(16, 2), (8, 0), (4, 4), (2, 8), (1, 0), (1, 4)])
def test_six_heads_that_take_turns_in_storage_with_gaps(
    monkeypatch: pytest.MonkeyPatch, named: Named, group: int, pages_per_block: int
) -> None:
    """Rows begin at multiples of 16 bytes and of nothing more, in pages too; what lies between them stays."""
    generator = torch.Generator("cuda").manual_seed(int(torch.randint(1 << 31, ())))

    def gapped(*shape: int) -> Tensor:
        whole = torch.randn(*shape[:-2], shape[-2] * shape[-1] + 8, generator=generator, device="cuda").bfloat16()
        return whole[..., :-8].unflatten(-1, shape[-2:])

    lengths, heads, topk = [700, 0, 1, 899], 6, 9
    total, starts = sum(lengths), torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    where: dict[str, Tensor] = {"cu_seqlens_q": starts}
    q = gapped(total, heads * group, 128)
    if pages_per_block:
        page, width = 128 // pages_per_block, 8 * pages_per_block
        pool = gapped(4 * width, page, heads, 2 * 128).transpose(1, 2)
        k, v = pool.split(128, -1)
        table = torch.randperm(4 * width, generator=generator, device="cuda").int().view(4, width)
        where |= {"page_table": table, "seqused_k": torch.tensor([700, 90, 200, 1000], device="cuda").int()}
    else:
        k, v = gapped(total, heads, 128), gapped(total, heads, 128)
        where["cu_seqlens_k"] = starts
    ids = torch.rand(heads, total, 12, generator=generator, device="cuda").topk(topk).indices.int()
    ids[:, 200:600] = ids[:, 200:600:8].repeat_interleave(8, dim=1)
    wanted, wanted_lse = reference.sparse_attention(q.float(), k.float(), v.float(), ids, **where)
    first = None
    for choice in ((6, 200), (3, 1600), (2, 64), (1, 512)):
        choose = Mock(return_value=choice)
        monkeypatch.setattr(windows, "choose_rounds", choose)
        remember.forget_all()
        rows = torch.full((total, heads * group * 128 + 8), torch.nan, device="cuda").bfloat16()
        out = rows[:, :-8].unflatten(-1, (heads * group, 128))
        _, lse = named.sparse_attention(q, k, v, ids, out=out, return_lse=True, **where)
        assert choose.called
        assert rows[:, -8:].isnan().all()
        if first is None:
            torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.02)
            torch.testing.assert_close(lse, wanted_lse, atol=0.005, rtol=0.005)
            first = out.clone(), lse.clone()
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_a_schedule_can_be_used_again(calls: Calls) -> None:
    schedule = ops.build_schedule(calls.ids, **calls.where)
    arguments = (calls.q, calls.k, calls.v, calls.ids)
    runs = (ops.sparse_attention(*arguments, schedule=schedule, check=check, **calls.where) for check in (False, True))
    first, again = runs
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    # A call without one may take other kernels, which add in another order.
    torch.testing.assert_close(first, ops.sparse_attention(*arguments, **calls.where), atol=2e-2, rtol=2e-2)
    others = calls.ids.clone()
    others[-1, -1] = -1  # the last query sees every block
    with pytest.raises(ValueError, match="schedule: got one of other block_indices or lengths at"):
        ops.sparse_attention(*arguments[:3], others, schedule=schedule, check=True, **calls.where)


def test_a_compiled_graph_calls_the_kernels(calls: Calls) -> None:
    def layer(idx_q: torch.Tensor, idx_k: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        ids = ops.select_blocks(idx_q, idx_k, 4, **calls.where)
        return ops.sparse_attention(q, k, v, ids, **calls.where)

    inputs = (calls.idx_q, calls.idx_k, calls.q, calls.k, calls.v)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), layer(*inputs), atol=0, rtol=0)
