"""The dense pass of MiniMax's ``fmha_sm100``: its plan, scores of blocks, attention to everything or to some blocks."""

from __future__ import annotations

import inspect

import pytest
import rounding
import torch
from compat import packed_batches
from compat.packed_batches import BLOCK, DIM, HEADS, KV_HEADS, LENGTHS_K, LENGTHS_Q, Packed
from torch import Tensor

from msa_tiles.compat import fmha_dense, fmha_sm100

SCALE = DIM**-0.5
FP8 = torch.float8_e4m3fn
TILES = 128  # three blocks, rounded up


def plan(batch: Packed, **options: object) -> tuple:
    lengths = torch.tensor(batch.lengths_q), torch.tensor(batch.lengths_k)
    return fmha_sm100.fmha_sm100_plan(*lengths, HEADS, num_kv_heads=KV_HEADS, device="cpu", **options)


def everything(batch: Packed) -> Tensor:
    """All blocks of every query's request."""
    return torch.arange(3, dtype=torch.int32).expand(KV_HEADS, batch.total_q, 3)


def listed(batch: Packed, page: int = BLOCK) -> Tensor:
    """The pages of all requests, one after another."""
    counts = [-(-length // page) for length in batch.lengths_k]
    return torch.cat([batch.page_table[request, :count] for request, count in enumerate(counts)])


def check(out: Tensor, wanted: Tensor, v: Tensor) -> None:
    rounding.close(
        out, wanted, terms=rounding.softmax_terms(384, DIM, 20.0), size=float(v.abs().max()), dtype=out.dtype
    )


@pytest.mark.parametrize("chunk", [64, 2])
@pytest.mark.parametrize("layout", ["flat", "list", "table"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.drawn(5)
def test_the_dense_pass(monkeypatch: pytest.MonkeyPatch, chunk: int, layout: str, causal: bool) -> None:
    """Whole numbers give exact scores; more blocks than one call takes are merged."""
    monkeypatch.setattr(fmha_dense, "CHUNK", chunk)
    batch = Packed(f"dense {chunk} {layout} {causal}")
    q, k, v = batch.queries(whole=True), batch.keys(whole=True), batch.keys()
    keys, values, where = k, v, {}
    if layout != "flat":
        keys, values = batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM)
        where = {"kv_indices": listed(batch)} if layout == "list" else {"page_table": batch.page_table}
    made = plan(batch, output_maxscore=True, causal=causal, page_size=-1 if layout == "flat" else BLOCK)
    limits = batch.limits(causal)
    out, score = fmha_sm100.fmha_sm100(q, keys, values, made, **where, sm_scale=0.1, check_input_valid=True)
    assert score.shape == (HEADS, TILES, batch.total_q)
    assert torch.equal(score.double(), packed_batches.scores(batch, q, k, limits, TILES))
    check(out, packed_batches.attention(batch, q, k, v, everything(batch), limits, 0.1)[0], v)
    given = torch.full_like(q, torch.nan), torch.full_like(score, torch.nan)
    again = fmha_sm100.fmha_sm100(q, keys, values, made, **where, sm_scale=0.1, out=given[0], max_score=given[1])
    assert again[0] is given[0] and again[1] is given[1]
    assert torch.equal(given[0], out) and torch.equal(given[1], score)
    alone = fmha_sm100.fmha_sm100(q, keys, values, made, **where, output_o=False)
    assert alone[0] is None and torch.equal(alone[1], score)
    for options in ({"output_maxscore": False}, {"output_maxscore": False, "output_o": False}):
        unscored = fmha_sm100.fmha_sm100(q, keys, values, made, **where, sm_scale=0.1, **options)
        assert unscored[1] is None and torch.equal(unscored[0], out)


@pytest.mark.parametrize("when", ["plan", "call"])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_an_offset(when: str, kind: str) -> None:
    """Queries that begin elsewhere than before the end, some of them before the first key."""
    batch = Packed(f"dense offset {when} {kind}")
    q, k, v = batch.queries(whole=True), batch.keys(whole=True), batch.keys()
    offsets = [7] * 5 if kind == "number" else [130, 0, -3, 2, 100]
    given = 7 if kind == "number" else torch.tensor(offsets)
    planned, called = ({"qo_offset": given}, {}) if when == "plan" else ({"qo_offset": 1}, {"q_offset_override": given})
    made = plan(batch, output_maxscore=True, **planned)
    out, score = fmha_sm100.fmha_sm100(q, k, v, made, **called)
    limits = batch.limits(True, offsets)
    assert torch.equal(score.double(), packed_batches.scores(batch, q, k, limits, TILES))
    check(out, packed_batches.attention(batch, q, k, v, everything(batch), limits, SCALE)[0], v)


@pytest.mark.parametrize("layout", ["flat", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_scales(layout: str, dtype: torch.dtype) -> None:
    """Numbers that multiply products and out, of e4m3 and of others; scores are those of the stored elements."""
    batch = Packed(f"dense scales {layout} {dtype}")
    q, k, v = (each.to(dtype) for each in (batch.queries(), batch.keys(), batch.keys()))
    keys, values, where, page = k, v, {}, -1
    if layout == "paged":
        keys, values, where, page = (
            batch.pages(k, 2 * DIM),
            batch.pages(v, 2 * DIM),
            {"kv_indices": listed(batch)},
            BLOCK,
        )
    made = plan(batch, output_maxscore=True, page_size=page)
    scales = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 2.0, "o_scale": 1.0}
    out, score = fmha_sm100.fmha_sm100(q, keys, values, made, **where, **scales)
    exact = [each.float() for each in (q, k, v)]
    limits = batch.limits(True)
    wanted = packed_batches.attention(batch, *exact, everything(batch), limits, 1.5 * SCALE)[0]
    assert out.dtype == (torch.bfloat16 if dtype == FP8 else dtype)
    check(out, 2 * wanted, 2 * exact[2])
    size = DIM * float(exact[0].abs().max() * exact[1].abs().max())
    rounding.close(score, packed_batches.scores(batch, *exact[:2], limits, TILES), terms=DIM, size=size)


@pytest.mark.parametrize("heads", [KV_HEADS, HEADS])
@pytest.mark.parametrize("queries", [3, 40])
def test_selected_blocks(heads: int, queries: int) -> None:
    """Ids of each head of keys, or of queries, of which those of a group's first head count; prefill and decode."""
    batch = Packed(f"dense blocks {heads} {queries}", (queries,) * 4, (300, 50, 290, 129), 0)
    q, k, v, ids = batch.queries(), batch.keys(), batch.keys(), batch.ids(2)
    given = ids.transpose(0, 1).repeat_interleave(heads // KV_HEADS, dim=1)
    if heads > KV_HEADS:
        given[:, 1::2] = 77
    made = plan(batch, page_size=BLOCK, kv_block_num=2)
    out = torch.full_like(q, torch.nan)
    found = fmha_sm100.fmha_sm100(
        q, batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM), made, listed(batch), given, out=out, output_o=False
    )
    assert found[0] is out and found[1] is None
    check(out, packed_batches.attention(batch, q, k, v, ids, batch.limits(True), SCALE)[0], v)


def test_scores_go_on_to_selection_and_attention() -> None:
    """The three steps as MiniMax's own code takes them: what was chosen is what the scores rank highest."""
    batch = Packed("dense step", (40,) * 4, (300, 260, 290, 384), 0)
    proxy, index = batch.queries(KV_HEADS, whole=True), batch.keys(1, whole=True)
    q, k, v = batch.queries(), batch.keys(), batch.keys()
    lengths = torch.tensor(batch.lengths_q), torch.tensor(batch.lengths_k)
    dense = fmha_sm100.fmha_sm100_plan(*lengths, KV_HEADS, 1, output_maxscore=True, device="cpu")
    _, score = fmha_sm100.fmha_sm100(proxy, index, index, dense, output_o=False)
    chosen = fmha_sm100.sparse_topk_select(score.contiguous(), 2, num_valid_pages=3)
    exact = packed_batches.scores(batch, proxy, index, batch.limits(True), 3)
    for row in range(batch.total_q):
        for head in range(KV_HEADS):
            best = sorted(range(3), key=lambda block: -float(exact[head, block, row]))[:2]
            assert chosen[row, head].tolist() == sorted(best)
    made = plan(batch, page_size=BLOCK, kv_block_num=2)
    pages = batch.pages(k, 2 * DIM), batch.pages(v, 2 * DIM)
    out, _ = fmha_sm100.fmha_sm100(q, *pages, made, kv_indices=listed(batch), kv_block_indexes=chosen)
    ids = chosen.transpose(0, 1)
    check(out, packed_batches.attention(batch, q, k, v, ids, batch.limits(True), SCALE)[0], v)


def test_requests_without_keys() -> None:
    batch = Packed("dense nothing", (2, 0), (0, 0), 1)
    q, k = batch.queries(), torch.zeros(0, KV_HEADS, DIM)
    made = plan(batch, output_maxscore=True, causal=False)
    out, score = fmha_sm100.fmha_sm100(q, k, k, made)
    assert not bool(out.any()) and score.shape == (HEADS, 0, len(q)) and score.dtype == torch.float32
    out, score = fmha_sm100.fmha_sm100(q, k, k, made, output_o=False, max_score=torch.empty(HEADS, 0, len(q)))
    assert out is None and score.shape == (HEADS, 0, len(q))
    pages = torch.full((2, KV_HEADS, BLOCK, DIM), torch.nan)
    made = plan(batch, page_size=BLOCK)
    out, _ = fmha_sm100.fmha_sm100(q, pages, pages, made, kv_indices=torch.zeros(0, dtype=torch.int32))
    assert not bool(out.any())


def test_signatures_begin_as_those_of_the_original() -> None:
    names = {
        "fmha_sm100": "q k v plan_info kv_indices kv_block_indexes q_offset_override out max_score page_table sm_scale "
        "q_scale k_scale v_scale o_scale output_maxscore output_o check_input_valid",
        "fmha_sm100_plan": "qo_segment_lens kv_segment_lens num_qo_heads num_kv_heads qo_offset split_prefill_decode "
        "num_kv_splits page_size output_maxscore kv_block_num usable_SM_count causal sparse_kernel_mode "
        "use_fp8_kvcache device stream",
    }
    for name, parameters in names.items():
        assert [*inspect.signature(getattr(fmha_sm100, name)).parameters] == parameters.split()


def test_what_is_not_served_is_a_sentence() -> None:
    batch = Packed("dense errors")
    q, k, ids = batch.queries(), batch.keys(), batch.ids(2)
    pages, made = batch.pages(k, DIM), plan(batch, output_maxscore=True)
    call, prepare, lengths = fmha_sm100.fmha_sm100, fmha_sm100.fmha_sm100_plan, torch.tensor(LENGTHS_Q)
    of_pages, chosen = plan(batch, page_size=BLOCK), plan(batch, kv_block_num=2, page_size=BLOCK)
    with_pages = {"kv_indices": listed(batch)}
    for error, message, run in (
        (ValueError, "kv_segment_lens: got shape", lambda: prepare(lengths, lengths[1:], HEADS)),
        (ValueError, "kv_segment_lens: got shape", lambda: prepare(lengths[:0], lengths[:0], HEADS)),
        (ValueError, "kv_segment_lens: got -40", lambda: prepare(lengths, -lengths, HEADS, device="cpu")),
        (ValueError, "output_maxscore: got True", lambda: plan(batch, output_maxscore=True, kv_block_num=2)),
        (TypeError, "plan_info: got a dict", lambda: call(q, k, k, {})),
        (ValueError, "plan_info: got one for 4 query heads", lambda: call(q[:, :2], k, k, made)),
        (ValueError, "plan_info: got a plan for cpu", lambda: call(q.to("meta"), k, k, made)),
        (ValueError, "k: got shape", lambda: call(q, pages, pages, made)),
        (ValueError, "k: got shape", lambda: call(q, k, k, made, **with_pages)),
        (ValueError, "pages of -1 tokens", lambda: call(q, pages, pages, made, **with_pages)),
        (ValueError, "kv_block_indexes: got None", lambda: call(q, pages, pages, chosen, **with_pages)),
        (ValueError, "kv_block_indexes: got shape", lambda: call(q, pages, pages, chosen, listed(batch), ids)),
        (NotImplementedError, "o_scale: got 2", lambda: call(q, k, k, made, o_scale=2.0)),
        (ValueError, "max_score: got", lambda: call(q, k, k, made, max_score=torch.zeros(HEADS, 3, len(q)))),
        (ValueError, "out: got", lambda: call(q, k, k, made, out=q[:1])),
        (ValueError, "out: got", lambda: call(q, pages, pages, of_pages, **with_pages, out=q[:1])),
        (TypeError, "float16", lambda: call(q.half(), k, k, made)),
    ):
        with pytest.raises(error, match=message):
            run()
    assert len(LENGTHS_K) == made[2] and made[:2] == (False, 0) and made[4] is None
