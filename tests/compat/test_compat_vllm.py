"""vLLM's operators by name, over its grid drawn at random, against a dense oracle."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest
import torch
from compat.m3 import (
    DIM,
    FP8,
    HEADS,
    PAGE,
    Batch,
    Parameters,
    chosen,
    draw_decode,
    draw_prefill,
    drawn,
    ranks,
    token_major,
)
from rounding import close, softmax_terms

from msa_tiles.compat import kept, vllm
from msa_tiles.compat.vllm import caches

SCALE = DIM**-0.5
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
DRAWS = pytest.mark.parametrize("number", range(4))


def attended(batch: Batch, found, ids, k_scale=None, v_scale=None) -> None:
    """Compare an output with the oracle's."""
    want, logit = batch.attention(ids, SCALE, k_scale, v_scale)
    values = batch.cache[..., DIM:].float().nan_to_num().abs().max() * (1 if v_scale is None else v_scale.max())
    close(
        found,
        want.to(found.dtype),
        terms=softmax_terms(max(batch.lengths), DIM, logit),
        size=float(values),
        roundings=2,
    )


def scored(batch: Batch, score: torch.Tensor, given: Parameters | None = None) -> None:
    """Compare scores with the oracle's; given parameters are those of the blocks that a decode step forces."""
    want = torch.full(score.shape, -torch.inf)
    for row, heads in enumerate(batch.scores()):
        for head, scores in enumerate(heads):
            blocks = torch.arange(len(scores))
            want[head, row, : len(scores)] = torch.tensor(scores)
            if given is not None:
                want[head, row, blocks[: given.init_blocks]] = 1e30
                want[head, row, blocks[max(len(scores) - given.local_blocks, 0) :]] = 1e29
    assert torch.equal(score, want)


def test_what_is_selected_is_the_best_by_what_vllm_ranks_blocks_by() -> None:
    """Where fewer blocks are selected than are forced, and where a block is an init block and a local one, too."""
    both = 0
    for topk, init, local, count in itertools.product((1, 2, 4), range(3), range(4), range(1, 7)):
        given, scores = Parameters(topk, init, local), [float(7 * block % 5) for block in range(count)]
        ranked = ranks(scores, given)
        best = sorted(ranked, reverse=True)[:topk]
        assert sorted((ranked[block] for block in chosen(scores, given)), reverse=True) == best, (given, count)
        both += init + local > count > topk
    assert both


@DTYPES
@DRAWS
def test_prefill(number, dtype):
    draw = drawn(f"prefill {number} {dtype}")
    given = Parameters.draw(draw)
    batch = draw_prefill(draw, dtype=dtype, index_dtype=dtype)
    tokens, most = sum(batch.queries), max(batch.lengths) + draw.choice([0, 1, 1000, 1 << 21])
    longest = max(batch.queries) + draw.randrange(3)
    where = batch.cu_seqlens_q, batch.seq_lens, batch.prefix_lens, longest
    score = vllm.minimax_m3_index_score(
        batch.idx_q, batch.index_cache, batch.table, *where, most, batch.num_kv_heads
    )  # fmt: skip
    assert score.shape == (batch.num_kv_heads, tokens, -(-most // (16 * PAGE)) * 16)
    scored(batch, score)

    buffer = token_major(batch.num_kv_heads, tokens + 5, given.topk)
    ids = vllm.minimax_m3_index_topk(
        score, batch.cu_seqlens_q, batch.prefix_lens, longest, given.topk, given.init_blocks, given.local_blocks,
        out=buffer if draw.random() < 0.8 else None,
    )  # fmt: skip
    assert torch.equal(ids, batch.selections(given)) and (buffer[:, tokens:] == -9).all()

    scales, counting = scales_of(draw, batch)
    out = torch.full((tokens, 2, batch.num_q_heads, DIM), torch.nan, dtype=torch.bfloat16)[:, 1]
    stored = batch.cache.view(torch.uint8) if dtype == FP8 else batch.cache
    assert not vllm.minimax_m3_sparse_attn(
        batch.q, stored, ids, batch.table, *where, batch.num_kv_heads, SCALE, out, *scales
    )  # fmt: skip
    attended(batch, out, ids, *counting)


@DTYPES
@DRAWS
def test_decode(number, dtype):
    draw = drawn(f"decode {number} {dtype}")
    given = Parameters.draw(draw)
    batch, count = draw_decode(draw, dtype=dtype, index_dtype=dtype)
    tokens, most = len(batch.rows), max(batch.lengths) + draw.choice([0, 1, 1000, 1 << 21])
    blocks = -(-most // PAGE)
    forced = given.init_blocks, given.local_blocks
    where = batch.table, batch.seq_lens, most
    drafts = batch.num_kv_heads, count, draw.randint(count, 8)

    score = vllm.minimax_m3_index_decode_score(batch.idx_q, batch.index_cache, *where, *forced, *drafts)
    assert score.shape == (batch.num_kv_heads, tokens, -(-most // (16 * PAGE)) * 16)
    scored(batch, score, given)

    buffer = token_major(batch.num_kv_heads, tokens + 5, given.topk)
    published = {
        "none": lambda: None,
        "row by row": lambda: torch.full((batch.num_kv_heads, tokens + 2, blocks + 3), torch.nan),
        "block by block": lambda: torch.full((blocks + 3, batch.num_kv_heads, tokens + 2), torch.nan).permute(1, 2, 0),
    }[draw.choice(["none", "row by row", "block by block"])]()
    ids = vllm.minimax_m3_index_decode(
        batch.idx_q, batch.index_cache, *where, given.topk, *forced, *drafts, out=buffer, score_out=published
    )  # fmt: skip
    assert torch.equal(ids, batch.selections(given)) and (buffer[:, tokens:] == -9).all()
    assert ids.data_ptr() == buffer.data_ptr()
    if published is not None:
        scored(batch, published[:, :tokens, :blocks], given)
        assert published[:, tokens:].isnan().all() and published[:, :, blocks:].isnan().all()

    scales, counting = scales_of(draw, batch)
    out = torch.full_like(batch.q, torch.nan)
    assert not vllm.minimax_m3_sparse_attn_decode(
        batch.q, batch.cache, ids, batch.table, batch.seq_lens, batch.num_kv_heads, SCALE, out, count, *scales
    )  # fmt: skip
    attended(batch, out, ids, *counting)


def scales_of(draw, batch):
    """Scales as vLLM gives them, and those that count: of a cache in BF16 none is looked at."""
    if batch.cache.dtype != FP8:
        unread = torch.tensor(7.0), None
        return draw.choice([(None, None), unread, unread[::-1]]), (None, None)
    numbers = torch.tensor([draw.uniform(0.5, 2)]), torch.tensor(draw.uniform(0.5, 2))
    tokens = batch.cache.shape[0] * PAGE
    many = tuple(torch.rand(tokens, batch.num_kv_heads).add(0.5).T for _ in range(2))
    came = draw.choice([(None, None), numbers, many])
    return came, came


def test_positions_are_those_of_prefix_lens_and_keys_those_of_seq_lens():
    """vLLM's two arrays need not agree: a request may hold fewer keys, or more, than its queries end at."""
    draw = drawn("positions")
    for further in (-40, 100):
        batch = Batch(draw, HEADS[4], [5, 0, 3], [400, 128, 300], 37)
        shorter = batch.seq_lens + further
        ids = batch.selections(Parameters(4, 0, 1))
        out = torch.empty_like(batch.q)
        vllm.minimax_m3_sparse_attn(
            batch.q, batch.cache, ids, batch.table, batch.cu_seqlens_q, shorter, batch.prefix_lens, 5, 1, SCALE, out
        )  # fmt: skip
        batch.hide(shorter.tolist())
        attended(batch, out, ids)


def test_rows_behind_the_last_request_are_defined():
    batch = Batch(drawn("behind"), HEADS[8], [2, 1], [300, 130], 37)
    where = batch.cu_seqlens_q, batch.seq_lens, batch.prefix_lens, 2
    idx_q, q = (torch.cat([x, x[:2]]) for x in (batch.idx_q, batch.q))
    score = vllm.minimax_m3_index_score(idx_q, batch.index_cache, batch.table, *where, 300, 1)
    ids = vllm.minimax_m3_index_topk(score, batch.cu_seqlens_q, batch.prefix_lens, 2, 4, 0, 1)
    out = torch.full_like(q, torch.nan)
    vllm.minimax_m3_sparse_attn(q, batch.cache, ids, batch.table, *where, 1, SCALE, out)
    assert score[:, 3:].eq(-torch.inf).all() and (ids[:, 3:] == -1).all() and (out[3:] == 0).all()
    attended(batch, out[:3], ids[:, :3])


def test_a_batch_of_nobody():
    """No requests and no queries, as a rank without work has them."""
    batch = Batch(drawn("nobody"), HEADS[8], [1], [300], 37)
    nobody, q, idx_q, table = batch.seq_lens[:0], batch.q[:0], batch.idx_q[:0], batch.table[:0]
    where, out = (batch.cu_seqlens_q[:1], nobody, nobody, 0), torch.empty_like(q)
    score = vllm.minimax_m3_index_score(idx_q, batch.index_cache, table, *where, 300, 1)
    assert score.shape == (1, 0, 16)
    ids = vllm.minimax_m3_index_topk(score, where[0], nobody, 0, 4, 0, 1)
    assert ids.shape == vllm.minimax_m3_index_decode(
        idx_q, batch.index_cache, table, nobody, 300, 4, 0, 1, 1, 1, 1
    ).shape == (1, 0, 4)  # fmt: skip
    vllm.minimax_m3_sparse_attn(q, batch.cache, ids, table, *where, 1, SCALE, out)
    vllm.minimax_m3_sparse_attn_decode(q, batch.cache, ids, table, nobody, 1, SCALE, out, 1)


def test_signatures_are_those_of_vllm():
    """Names and order, as calls of vLLM's layers pass them by position and by name."""
    names = {
        "index_score": "idx_q index_kv_cache block_table cu_seqlens_q seq_lens prefix_lens max_query_len max_seq_len "
        "num_kv_heads",
        "index_topk": "score cu_seqlens_q prefix_lens max_query_len topk init_blocks local_blocks out",
        "index_decode_score": "idx_q index_kv_cache block_table seq_lens max_seq_len init_blocks local_blocks "
        "num_kv_heads decode_query_len max_decode_query_len score_out",
        "index_decode": "idx_q index_kv_cache block_table seq_lens max_seq_len topk init_blocks local_blocks "
        "num_kv_heads decode_query_len max_decode_query_len out score_out",
        "sparse_attn": "q kv_cache topk_idx block_table cu_seqlens_q seq_lens prefix_lens max_query_len num_kv_heads "
        "sm_scale output k_scale v_scale",
        "sparse_attn_decode": "q kv_cache topk_idx block_table seq_lens num_kv_heads sm_scale output "
        "decode_query_len k_scale v_scale",
    }
    assert {f"minimax_m3_{name}" for name in names} == set(vllm.__all__)
    for name, wanted in names.items():
        assert " ".join(inspect.signature(getattr(vllm, f"minimax_m3_{name}")).parameters) == wanted


def test_caches_are_views():
    cache = torch.zeros(3, 9, 2, PAGE, 2 * DIM, dtype=torch.uint8)[1]
    k, v = caches.keys_and_values(cache, 2, DIM)
    assert k.dtype == v.dtype == FP8 and k.stride() == v.stride() == cache.stride()
    assert (k.data_ptr(), v.data_ptr()) == (cache.data_ptr(), cache.data_ptr() + DIM)
    many = torch.rand(9 * PAGE, 2).T
    _, _, k_scale, v_scale = caches.scales(k, v, many, many)
    assert k_scale.shape == k.shape[:-1] and k_scale.data_ptr() == v_scale.data_ptr() == many.data_ptr()
    index = torch.zeros(4, 2, PAGE, DIM, dtype=torch.uint8)[:, 1]
    assert caches.index_keys(index).data_ptr() == index.data_ptr()


def test_a_pool_may_hold_more_pages_than_scales():
    draw = drawn("fewer scales")
    batch = Batch(draw, HEADS[8], [1], [200], 37, dtype=FP8)
    ids, out = batch.selections(Parameters(2, 0, 1)), torch.empty_like(batch.q)
    scale = torch.rand(1, batch.cache.shape[0] * PAGE) + 0.5
    pool = torch.cat([batch.cache.view(torch.uint8), torch.full((4, *batch.cache.shape[1:]), 0x7F, dtype=torch.uint8)])
    vllm.minimax_m3_sparse_attn_decode(
        batch.q, pool, ids, batch.table, batch.seq_lens, 1, SCALE, out, 1, scale, scale
    )  # fmt: skip
    attended(batch, out, ids, scale, scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache": torch.zeros(4, 1, 64, 256)}, "kv_cache: got shape [4, 1, 64, 256]; wanted [num_blocks, 1, 128,"),
        ({"num_kv_heads": 2}, "kv_cache: got shape [5, 1, 128, 256]; wanted [num_blocks, 2, 128, 256]"),
        ({"decode_query_len": 2}, "q: got 2 queries; wanted 2 for each of 2 requests"),
        ({"v_scale": None}, "v_scale: got None"),
        ({"k_scale": torch.ones(3)}, "k_scale: got shape [3]; wanted one number, or [1, tokens]"),
        ({"k_scale": torch.ones((), device="meta")}, "k_scale: got device meta"),
        ({"seq_lens": torch.tensor([9, 9])}, "seq_lens: got dtype torch.int64"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "q": torch.zeros(2, 8, DIM, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(5, 1, PAGE, 2 * DIM, dtype=torch.uint8),
        "topk_idx": torch.zeros(1, 2, 4, dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.tensor([9, 9], dtype=torch.int32),
        "num_kv_heads": 1,
        "sm_scale": SCALE,
        "output": torch.zeros(2, 8, DIM, dtype=torch.bfloat16),
        "decode_query_len": 1,
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        vllm.minimax_m3_sparse_attn_decode(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 2}, "idx_q: got shape [4, 1, 128]; wanted [T, num_kv_heads = 2, head_dim]"),
        (
            {"index_kv_cache": torch.zeros(5, 64, DIM)},
            "index_kv_cache: got shape [5, 64, 128]; wanted [num_blocks, 128",
        ),
        ({"decode_query_len": 4, "seq_lens": torch.zeros(1, dtype=torch.int32)}, "decode_query_len: got 4 beside"),
        ({"index_kv_cache": torch.zeros(5, PAGE, DIM).to(FP8)}, "index_kv_cache: got dtype torch.float8_e4m3fn"),
    ],
)
def test_wrong_arguments_of_the_indexer_are_named(change, message):
    arguments = {
        "idx_q": torch.zeros(4, 1, DIM, dtype=torch.bfloat16),
        "index_kv_cache": torch.zeros(5, PAGE, DIM, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "max_seq_len": 300,
        "topk": 4,
        "init_blocks": 0,
        "local_blocks": 1,
        "num_kv_heads": 1,
        "decode_query_len": 2,
        "max_decode_query_len": 2,
    }
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        vllm.minimax_m3_index_decode(**(arguments | change))


def test_narrow_queries_of_wider_keys_are_widened():
    batch = Batch(drawn("widened"), HEADS[8], [2], [300], 37)
    batch.idx_q = batch.idx_q.to(FP8)
    where = batch.table, batch.cu_seqlens_q, batch.seq_lens, batch.prefix_lens, 2, 300, 1
    scored(batch, vllm.minimax_m3_index_score(batch.idx_q, batch.index_cache, *where))


def test_queries_that_are_no_floats_are_refused():
    batch = Batch(drawn("integers"), HEADS[8], [2], [300], 37)
    where = batch.table, batch.cu_seqlens_q, batch.seq_lens, batch.prefix_lens, 2, 300, 1
    for dtype in (torch.int8, torch.uint8, torch.bool):
        with pytest.raises(TypeError, match=f"^idx_q: got dtype {dtype}"):
            vllm.minimax_m3_index_score(batch.idx_q.to(dtype), batch.index_cache, *where)


def test_constants_stay_where_they_are(monkeypatch):
    """A graph that was captured with one reads it after a larger batch has come, too."""
    cpu = torch.device("cpu")
    few = kept.multiples(3, 5, cpu)
    assert few.tolist() == [0, 3, 6, 9, 12] and few.dtype == torch.int32
    assert kept.multiples(3, 900, cpu).data_ptr() == few.data_ptr()
    many = kept.multiples(3, 5000, cpu)
    assert any(few._base is outgrown for outgrown in kept._OUTGROWN), "a graph may read it still"
    assert many.shape == (5000,) and many.data_ptr() != few.data_ptr() and few.tolist() == [0, 3, 6, 9, 12]
    assert kept.multiples(3, 5, cpu).data_ptr() == many.data_ptr()
    assert kept.scalar(0.25, cpu) is kept.scalar(0.25, cpu) and kept.scalar(0.25, cpu).item() == 0.25
    monkeypatch.setattr(kept, "capturing", lambda device: True)
    assert kept.multiples(3, 5, cpu).data_ptr() == many.data_ptr()
    for fresh in (lambda: kept.multiples(17, 5, cpu), lambda: kept.scalar(0.75, cpu)):
        assert fresh() is not fresh()
    assert kept.multiples(17, 5, cpu).tolist() == [0, 17, 34, 51, 68]
