"""Scores and selection of the reference against the dense oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import dense, magnitudes
from reference.batches import DTYPES, batches
from rounding import close
from seeds import examples

from msa_tiles import reference
from msa_tiles.reference import indexer

FORMS = pytest.mark.parametrize("form", [reference, reference.plain], ids=["blockwise", "plain"])
BLOCK_SIZES = st.sampled_from([4, 64, 128])
ORDERS = st.sampled_from(["ascending", "score", "local_last"])
# Few distinct values, so that ties are the rule, and everything that comparisons trip over.
SCORES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 1e-42, -1e-42, 3e38, math.inf, -math.inf, math.nan])
FEW = settings(max_examples=examples(40), deadline=None)


@FORMS
@FEW
@given(data=st.data())
def test_index_score_equals_the_dense_oracle(form, data):
    block_size = data.draw(BLOCK_SIZES)
    batch = data.draw(batches(block_size))
    dtype, heads = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 4))
    causal = data.draw(st.booleans())
    idx_q, keys = batch.random(batch.total_q, heads, 8), batch.keys(8)
    (idx_k,) = batch.store(keys, dtype=dtype) if keys else (torch.zeros(0, 8, dtype=dtype),)
    where = batch.where()
    if not keys:
        where.pop("page_table", None)
    score = form.index_score(idx_q.to(dtype), idx_k, block_size=block_size, causal=causal, **where)
    assert score.dtype == torch.float32
    assert score.shape[2] * block_size >= batch.max_end
    want = dense.index_score(batch, idx_q.numpy(), [k.numpy() for k in keys], score.shape[2], block_size, causal)
    # Sums of 8 products, and their rounding to float32.
    close(score, torch.from_numpy(want), terms=8, size=magnitudes.logit(idx_q, keys, 1.0))


@FORMS
def test_a_query_sees_its_own_position_and_nothing_behind_it(form, monkeypatch):
    """Key j scores j + 1, so a block's score tells the last key seen in it; every cut of queries and keys."""
    monkeypatch.setattr(indexer, "KEY_CHUNK", 4)
    for num_keys in range(1, 14):
        keys = torch.arange(1.0, num_keys + 1)[:, None]
        for num_queries in range(1, num_keys + 1):
            score = form.index_score(torch.ones(num_queries, 1, 1), keys, block_size=4)[0]
            for row in range(num_queries):
                last = num_keys - num_queries + row + 1
                want = [min(last, 4 * b + 4) if last > 4 * b else -math.inf for b in range(score.shape[1])]
                assert score[row].tolist() == want


@FORMS
def test_index_score_ignores_nan_products(form):
    idx_q, idx_k = torch.ones(8, 1, 2), torch.ones(8, 2)
    idx_k[0], idx_k[1], idx_k[4:] = torch.nan, 2.0, torch.nan
    score = form.index_score(idx_q, idx_k, block_size=4)[0]
    assert score[:, 0].tolist() == [-math.inf] + [4.0] * 7
    assert score[:, 1].tolist() == [-math.inf] * 8


@FORMS
@FEW
@given(data=st.data())
def test_topk_select_equals_repeated_search(form, data):
    group, kv_heads = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 2))
    width, tokens = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 3))
    count = group * kv_heads * width * tokens
    values = data.draw(st.one_of(st.lists(SCORES, min_size=count, max_size=count), st.none()))
    if values is None:
        values = torch.randn(count, generator=torch.Generator().manual_seed(width)).tolist()
    score = torch.tensor(values, dtype=data.draw(st.sampled_from(DTYPES))).reshape(group * kv_heads, tokens, width)
    valid = data.draw(st.lists(st.integers(0, width), min_size=tokens, max_size=tokens))
    topk, order = data.draw(st.integers(1, 64)), data.draw(ORDERS)
    forced = {"init_blocks": data.draw(st.integers(0, 4)), "local_blocks": data.draw(st.integers(0, 4))}
    layout = data.draw(st.sampled_from(["head_major", "token_major"]))
    ids = form.topk_select(
        score.transpose(0, 1) if layout == "token_major" else score,
        topk,
        num_kv_heads=kv_heads,
        num_valid_blocks=torch.tensor(valid, dtype=torch.int32),
        order=order,
        layout=layout,
        **forced,
    )
    want = dense.topk_select(score.double().numpy(), valid, topk, kv_heads, *forced.values(), order)
    assert ids.dtype == torch.int32
    np.testing.assert_array_equal(ids.numpy(), want)


@FORMS
@pytest.mark.parametrize("count", [0, 3, 7])
def test_topk_select_takes_one_count_for_every_token(form, count):
    score = torch.arange(7.0).repeat(2, 4, 1)
    ids = form.topk_select(score, 5, num_valid_blocks=count, local_blocks=0)
    best = list(range(max(count - 5, 0), count))
    assert ids.tolist() == [[best + [-1] * (5 - len(best))] * 4] * 2


@FORMS
def test_topk_select_without_key_lengths_has_as_many_keys_as_queries(form):
    score = torch.zeros(1, 7, 4)
    starts = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    ids = form.topk_select(score, 4, block_size=2, cu_seqlens_q=starts)
    assert (ids >= 0).sum(-1).tolist() == [[1, 1, 1, 1, 2, 2, 0]]


@FORMS
def test_forced_blocks_beyond_topk(form):
    score = torch.arange(10.0).reshape(1, 1, 10)
    for init, local, want in [(3, 3, [0, 1, 2, 7]), (9, 3, [0, 1, 2, 3]), (1, 8, [0, 2, 3, 4]), (10, 10, [0, 1, 2, 3])]:
        ids = form.topk_select(score, 4, num_valid_blocks=10, init_blocks=init, local_blocks=local)
        assert ids.flatten().tolist() == want


@FORMS
@FEW
@given(data=st.data())
def test_select_blocks_is_exact_on_integers(form, data):
    block_size = data.draw(BLOCK_SIZES)
    batch = data.draw(batches(block_size))
    group, kv_heads = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 2))
    dtype, topk, order = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 64)), data.draw(ORDERS)
    forced = {"init_blocks": data.draw(st.integers(0, 3)), "local_blocks": data.draw(st.integers(0, 3))}
    idx_q, keys = batch.random(batch.total_q, group * kv_heads, 8, integers=True), batch.keys(8, integers=True)
    where = batch.where()
    (idx_k,) = batch.store(keys, dtype=dtype) if keys else (torch.zeros(0, 8, dtype=dtype),)
    if not keys:
        where.pop("page_table", None)
    ids = form.select_blocks(
        idx_q.to(dtype), idx_k, topk, num_kv_heads=kv_heads, block_size=block_size, order=order, **forced, **where
    )
    width = -(-batch.max_end // block_size)
    score = dense.index_score(batch, idx_q.numpy(), [k.numpy() for k in keys], width, block_size)
    valid = dense.valid_blocks(batch, block_size)
    np.testing.assert_array_equal(ids.numpy(), dense.topk_select(score, valid, topk, kv_heads, *forced.values(), order))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_blocks_is_topk_of_index_score_across_chunks(dtype, monkeypatch):
    monkeypatch.setattr(indexer, "QUERY_CHUNK", 7)
    monkeypatch.setattr(indexer, "KEY_CHUNK", 32)
    generator = torch.Generator().manual_seed(1)
    idx_q = torch.randn(40, 4, 8, generator=generator).to(dtype)
    idx_k = torch.randn(300, 8, generator=generator).to(dtype)
    starts = {"cu_seqlens_q": torch.tensor([0, 19, 40]), "cu_seqlens_k": torch.tensor([0, 101, 300])}
    score = reference.index_score(idx_q, idx_k, block_size=16, **starts)
    ids = reference.select_blocks(idx_q, idx_k, 5, num_kv_heads=2, block_size=16, **starts)
    assert torch.equal(ids, reference.topk_select(score, 5, num_kv_heads=2, block_size=16, **starts))
    close(score, reference.plain.index_score(idx_q, idx_k, block_size=16, **starts), terms=8)


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    generator = torch.Generator().manual_seed(2)
    score = torch.randint(0, 3, (2, 50, 90), generator=generator).float()
    valid = torch.randint(0, 91, (50,), generator=generator, dtype=torch.int32)
    ids = reference.topk_select(score, 16, num_valid_blocks=valid)
    for row in range(0, 50, 7):
        alone = reference.topk_select(score[:, row : row + 1], 16, num_valid_blocks=valid[row : row + 1])
        assert torch.equal(alone, ids[:, row : row + 1])


def test_topk_select_keeps_every_candidate_among_many_blocks():
    """All equal; a few distinct and the rest equal; a cluster within one bin of a radix."""
    blocks = 16384
    rows = torch.zeros(3, blocks)
    rows[1, torch.arange(15) * 1000 + 7] = torch.arange(1.0, 16.0)
    rows[2] = 1.0 + torch.arange(blocks) * 2.0**-23
    ids = reference.topk_select(rows[None], 16, num_valid_blocks=blocks, local_blocks=0)[0].tolist()
    assert ids[0] == list(range(16))
    assert ids[1] == sorted([0] + [i * 1000 + 7 for i in range(15)])
    assert ids[2] == list(range(blocks - 16, blocks))


def test_group_maximum_counts_nan_only_where_every_head_has_it():
    score = torch.tensor([[[math.nan, math.nan, -math.inf]], [[1.0, math.nan, math.nan]]])
    ids = reference.topk_select(score, 3, num_kv_heads=1, num_valid_blocks=3, local_blocks=0, order="score")
    assert ids.flatten().tolist() == [0, 2, 1]


def test_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order: 'random'"):
        reference.topk_select(torch.zeros(1, 1, 1), 1, order="random")


def test_flat_keys_of_several_requests_need_their_starts():
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        reference.index_score(torch.zeros(2, 1, 4), torch.zeros(2, 4), cu_seqlens_q=starts)
    with pytest.raises(ValueError, match="seqused_k"):
        reference.index_score(torch.zeros(2, 1, 4), torch.zeros(2, 4, 4), page_table=torch.zeros(1, 1))
