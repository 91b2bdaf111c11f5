"""vLLM's operators by name, and its layer with our plugin, on a GPU: right, like vLLM's own, and safe in graphs.

vLLM's Triton operators are taken where they can be imported (`vllm`, or on their own as `minimax_m3_ops`); its layer
from `MSA_TILES_VLLM_FILES`, as in tests/compat.
"""

from __future__ import annotations

import importlib
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compat.m3 import DIM, FP8, HEADS, PAGE, Batch, Parameters, draw_decode, draw_prefill, drawn, ranks, token_major
from compat.stand_ins import source_of
from compat.vllm_layer import Layer, vllm_files
from torch import Tensor

from msa_tiles.bench import peers
from msa_tiles.compat import notes, vllm
from msa_tiles.compat.vllm import steps

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SCALE = DIM**-0.5
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
DRAWS = pytest.mark.parametrize("number", range(6))


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    found = peers.vllm_module()
    if isinstance(found, str):
        pytest.skip(f"vLLM's operators cannot be imported: {found}")
    return found


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An operation that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def scales_of(draw, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    if batch.cache.dtype != FP8:
        return None, None
    numbers = tuple(torch.tensor(draw.uniform(0.5, 2), device=DEVICE) for _ in range(2))
    tokens = batch.cache.shape[0] * PAGE
    many = tuple(torch.rand(tokens, batch.num_kv_heads, device=DEVICE).add(0.5).T for _ in range(2))
    return draw.choice([(None, None), numbers, many])


def close(out: Tensor, batch: Batch, ids: Tensor, scales: tuple[Tensor | None, Tensor | None] = (None, None)) -> None:
    """Compare with the oracle, as `msa-tiles verify` accepts it: 0.03 of the values' scale."""
    want, _ = batch.attention(ids.cpu(), SCALE, *scales)
    most = 1.0 if scales[1] is None else float(scales[1].max())
    torch.testing.assert_close(out.double().cpu(), want, atol=0.03 * most, rtol=0.02)


def run_prefill(module: Any, batch: Batch, given: Parameters, scales: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and output of a prefill through a module's operators."""
    where = batch.cu_seqlens_q, batch.seq_lens, batch.prefix_lens, max(batch.queries)
    tokens, heads = len(batch.rows), batch.num_kv_heads
    score = module.minimax_m3_index_score(
        batch.idx_q, batch.index_cache, batch.table, *where, max(batch.lengths), heads
    )  # fmt: skip
    ids = module.minimax_m3_index_topk(
        score, *where[::2], where[3], given.topk, given.init_blocks, given.local_blocks,
        out=token_major(heads, tokens + 3, given.topk, DEVICE),
    )  # fmt: skip
    out = torch.full_like(batch.q, torch.nan)
    module.minimax_m3_sparse_attn(batch.q, batch.cache, ids, batch.table, *where, heads, SCALE, out, *scales)
    return score, ids, out


def run_decode(module: Any, batch: Batch, count: int, given: Parameters, scales: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and output of a decode step through a module's operators; scores block by block in memory."""
    tokens, heads, blocks = len(batch.rows), batch.num_kv_heads, -(-max(batch.lengths) // PAGE)
    score = torch.full((blocks + 1, tokens, heads), torch.nan, device=DEVICE).permute(2, 1, 0)
    ids = module.minimax_m3_index_decode(
        batch.idx_q, batch.index_cache, batch.table, batch.seq_lens, max(batch.lengths), given.topk, given.init_blocks,
        given.local_blocks, heads, count, 8, out=token_major(heads, tokens + 3, given.topk, DEVICE), score_out=score,
    )  # fmt: skip
    out = torch.full_like(batch.q, torch.nan)
    module.minimax_m3_sparse_attn_decode(
        batch.q, batch.cache, ids, batch.table, batch.seq_lens, heads, SCALE, out, count, *scales
    )  # fmt: skip
    return score, ids, out


def same_choice(batch: Batch, given: Parameters, ids: Tensor) -> None:
    """The forced blocks and others of the best scores: which of equal ones is each side's own affair."""
    want, scores = batch.selections(given), batch.scores()
    for row, heads in enumerate(scores):
        for head, of_blocks in enumerate(heads):
            ranked = ranks(of_blocks, given)
            found = [block for block in ids[head, row].tolist() if block >= 0]
            wanted = [block for block in want[head, row].tolist() if block >= 0]
            assert len(set(found)) == len(found) == min(len(of_blocks), given.topk)
            assert sorted(ranked[block] for block in found) == sorted(ranked[block] for block in wanted)


@DTYPES
@DRAWS
def test_prefill(theirs, number, dtype):
    draw = drawn(f"gpu prefill {number} {dtype}")
    given, batch = Parameters.draw(draw), draw_prefill(draw, dtype=dtype, index_dtype=dtype, device=DEVICE)
    scales = scales_of(draw, batch)
    run_prefill(vllm, batch, given, scales)  # compiles
    with nothing_waits():
        score, ids, out = run_prefill(vllm, batch, given, scales)
    for row, heads in enumerate(batch.scores()):
        for head, wanted in enumerate(heads):
            assert score[head, row, : len(wanted)].tolist() == wanted
            assert (score[head, row, len(wanted) :] == -torch.inf).all()
    assert torch.equal(ids.cpu(), batch.selections(given))
    close(out, batch, ids, scales)
    _, ids, out = run_prefill(theirs, batch, given, scales)
    same_choice(batch, given, ids)
    close(out, batch, ids, scales)


@DTYPES
@DRAWS
def test_decode(theirs, number, dtype):
    draw = drawn(f"gpu decode {number} {dtype}")
    given, (batch, count) = Parameters.draw(draw), draw_decode(draw, dtype=dtype, index_dtype=dtype, device=DEVICE)
    scales = scales_of(draw, batch)
    run_decode(vllm, batch, count, given, scales)
    with nothing_waits():
        score, ids, out = run_decode(vllm, batch, count, given, scales)
    assert torch.equal(ids.cpu(), batch.selections(given))
    close(out, batch, ids, scales)
    theirs_score, ids, out = run_decode(theirs, batch, count, given, scales)
    same_choice(batch, given, ids)
    live = torch.tensor([position >= 0 for _, position in batch.rows])
    # vLLM's merge of nothing is NaN in rows that pad.
    out[~live] = 0
    close(out, batch, ids, scales)
    for row, heads in enumerate(batch.scores()):
        for head, wanted in enumerate(heads):
            assert score[head, row, : len(wanted)].equal(theirs_score[head, row, : len(wanted)])


@DTYPES
@pytest.mark.parametrize("whole", [True, False], ids=["one operator", "by name"])
def test_a_graph_serves_later_steps(dtype, whole):
    """Captured with one batch, replayed with others, the last requests of which pad it."""
    given, width, most = Parameters(4, 0, 1), 65, 65 * PAGE
    draw = drawn(f"gpu graph {dtype} {whole}")

    def step(lengths: list[int]) -> Batch:
        options = {"dtype": dtype, "index_dtype": dtype, "device": DEVICE, "pool": 80}
        return Batch(draw, HEADS[4], [3] * len(lengths), lengths, width, **options)

    static = step([640, 300, 129, 5])
    ids, out = token_major(1, 12, 4, DEVICE), torch.full_like(static.q, torch.nan)
    attending = steps.Attending(static.cache, 1, SCALE, None, None)
    metadata = SimpleNamespace(
        block_table=static.table, seq_lens=static.seq_lens, max_seq_len=most, decode_query_len=3
    )  # fmt: skip
    deferred = steps.Deferred(static.idx_q, static.index_cache, metadata, steps.Selecting(4, 0, 1))

    def call() -> None:
        if whole:
            steps.decode(static.q, ids, deferred, attending, out)
            return
        vllm.minimax_m3_index_decode(
            static.idx_q, static.index_cache, static.table, static.seq_lens, most, 4, 0, 1, 1, 3, 3, out=ids
        )  # fmt: skip
        vllm.minimax_m3_sparse_attn_decode(
            static.q, static.cache, ids, static.table, static.seq_lens, 1, SCALE, out, 3
        )  # fmt: skip

    graph = captured(call)
    for lengths in ([640, 300, 129, 5], [3, 500, 0, 0], [8000, 0, 0, 0], [0, 0, 0, 0]):
        batch = step(lengths)
        for name in ("q", "idx_q", "cache", "index_cache", "table", "seq_lens"):
            target, source = getattr(static, name), getattr(batch, name)
            target.view(torch.uint8).copy_(source.view(torch.uint8))
        out.fill_(torch.nan)
        ids.fill_(-9)
        vllm.minimax_m3_sparse_attn_decode(  # another batch size in between moves nothing that the graph reads
            *(x[:3] if x is static.q else x for x in (static.q, static.cache)), ids[:, :3], static.table[:1],
            static.seq_lens[:1], 1, SCALE, torch.empty_like(static.q[:3]), 3,
        )  # fmt: skip
        graph.replay()
        want = batch.selections(given)
        assert torch.equal(ids.cpu().sort(-1)[0], want.sort(-1)[0])
        close(out, batch, want)


def test_pools_are_not_copied():
    """A call takes far less memory than its pool holds."""
    batch = Batch(drawn("gpu pool"), HEADS[4], [1], [300], 37, device=DEVICE, pool=2000)
    given = Parameters(4, 0, 1)
    for run in (
        lambda: run_decode(vllm, batch, 1, given, (None, None)),
        lambda: run_prefill(vllm, batch, given, (None,) * 2),
    ):
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        assert torch.cuda.max_memory_allocated() - before < batch.index_cache.nbytes // 8


STEPS = {
    "prefill": ([(130, 0), (1, 300), (7, 250)], 0, 0),
    "padded decode": ([(1, 300), (1, 127)], 0, 2),
    "drafts": ([(4, 300), (4, 0), (4, 200)], 3, 0),
    "mixed drafts": ([(3, 400), (3, 5), (1, 100), (9, 200)], 2, 0),
}


@pytest.fixture
def state(monkeypatch):
    source = source_of("vllm", "MSA_TILES_VLLM_FILES")
    monkeypatch.setattr(notes, "_SAID", set())
    monkeypatch.setattr(notes, "_KINDS", {})
    with vllm_files(source) as found:
        importlib.import_module("msa_tiles.compat.vllm.model")
        yield found


def layer_of(state, step: str, dtype: torch.dtype, reason: str | None = None) -> Layer:
    """A layer with our implementations, or where there is a reason against them with vLLM's."""
    draw = drawn(f"gpu layer {step} {dtype}")
    requests, drafts, padded = STEPS[step]
    queries = [queries for queries, _ in requests] + [requests[0][0]] * padded
    lengths = [queries + prefix for queries, prefix in requests] + [0] * padded
    batch = Batch(draw, HEADS[4], queries, lengths, 65, dtype=dtype, index_dtype=dtype, device=DEVICE)
    with unittest.mock.patch("msa_tiles.compat.vllm.layers.why_not", lambda: reason):
        return Layer(state, batch, Parameters(4, 1, 2), drafts=drafts)


@DTYPES
@pytest.mark.parametrize("step", STEPS)
def test_a_layer_is_right_and_like_vllms(state, step, dtype):
    padded = STEPS[step][2]
    ours = layer_of(state, step, dtype)
    assert type(ours.layer.impl).__module__ == "msa_tiles.compat.vllm.layers"
    ours.forward(padded)
    hidden = ours.prepare(padded)
    output = torch.full_like(ours.batch.q, torch.nan)
    with nothing_waits():
        ours.attend(output)
    want = ours.batch.selections(ours.given)
    assert torch.equal(ours.ids.cpu().sort(-1)[0], want.sort(-1)[0])
    close(output, ours.batch, want)
    assert ours.layer.impl.kinds.takes("decode", "prefill") and len(hidden) == len(output)

    original = layer_of(state, step, dtype, "vLLM's is wanted")
    assert type(original.layer.impl).__module__.startswith("vllm.")
    theirs = original.forward(padded)
    same_choice(original.batch, original.given, original.ids)
    live = [position >= 0 for _, position in original.batch.rows]
    ids = original.ids.cpu()
    close(theirs[live], _rows(original.batch, live), ids[:, live])


def _rows(batch: Batch, live: list[bool]) -> Any:
    """The oracle for some rows of a batch."""

    class Some:
        @staticmethod
        def attention(ids: Tensor, scale: float, *scales: Any) -> Any:
            every = torch.full((ids.shape[0], len(live), ids.shape[2]), -1, dtype=ids.dtype)
            every[:, live] = ids
            out, logit = batch.attention(every, scale, *scales)
            return out[live], logit

    return Some


@DTYPES
def test_a_full_graph_of_a_layer(state, dtype):
    """Captured as vLLM does it, with the bound of the model, and replayed."""
    layer = layer_of(state, "padded decode", dtype)
    layer.prepare(2, most=layer.batch.width * PAGE)
    output = torch.full_like(layer.batch.q, torch.nan)
    graph = captured(lambda: layer.attend(output))
    output.fill_(torch.nan)
    layer.layer.topk_indices_buffer.fill_(-9)
    graph.replay()
    want = layer.batch.selections(layer.given)
    assert torch.equal(layer.ids.cpu().sort(-1)[0], want.sort(-1)[0])
    close(output, layer.batch, want)
