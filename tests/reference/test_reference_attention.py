"""Attention, its schedule and the merge of splits in the reference, against the dense oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import dense, magnitudes
from reference.batches import DTYPES, batches, selections
from rounding import close, softmax_terms
from seeds import examples

from msa_tiles import reference
from msa_tiles.reference import schedule as schedule_module

FORMS = pytest.mark.parametrize("form", [reference, reference.plain], ids=["blockwise", "plain"])
BLOCK_SIZES = st.sampled_from([4, 64, 128])
STORAGES = ("flat", "used", "paged", "interleaved")
FEW = settings(max_examples=examples(40), deadline=None)
TERMS = 500  # keys of a row, and what scores of about 10 are off by


@FORMS
@FEW
@given(data=st.data())
def test_attention_equals_the_dense_oracle(form, data):
    block_size = data.draw(BLOCK_SIZES)
    batch = data.draw(batches(block_size, STORAGES))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    dtype, scale = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([None, 0.5]))
    blocks, topk = -(-batch.max_end // block_size), data.draw(st.sampled_from([1, 2, 4, 16, 64]))
    ids = data.draw(selections(kv_heads, batch.total_q, blocks, topk))
    q, keys, values = batch.random(batch.total_q, kv_heads * group, 8), batch.keys(kv_heads, 8), batch.keys(kv_heads, 8)
    where = batch.where()
    if keys:
        k, v = batch.store(keys, values, dtype=dtype)
    else:
        k = v = torch.zeros(0, kv_heads, 8, dtype=dtype)
        where.pop("page_table", None)
    out, lse = form.sparse_attention(q.to(dtype), k, v, ids, block_size=block_size, softmax_scale=scale, **where)
    oracle_keys, oracle_values = [k.numpy() for k in keys], [v.numpy() for v in values]
    want, want_lse = dense.attention(
        batch, q.numpy(), oracle_keys, oracle_values, ids.numpy(), block_size, scale or 8**-0.5
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    terms = softmax_terms(batch.max_end, 8, magnitudes.logit(q, keys, scale or 8**-0.5))
    most = max((float(part.abs().max()) for part in values if part.numel()), default=0.0)
    close(out, torch.from_numpy(want), terms=terms, size=most)
    close(lse, torch.from_numpy(want_lse), terms=terms)


@pytest.mark.parametrize("storage", ["flat", "paged"])
def test_hidden_values_never_reach_a_row(storage):
    """Keys and values behind a query's position are NaN or inf for that query only."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(24, 2, 8, generator=generator) for _ in range(3))
    ids = torch.arange(3, dtype=torch.int32).expand(2, 24, 3)
    want, want_lse = reference.sparse_attention(q, k, v, ids, block_size=8)
    k[21:], v[21], v[22:] = torch.nan, torch.inf, torch.nan
    where = {}
    if storage == "paged":
        k, v = (x.reshape(6, 4, 2, 8).transpose(1, 2) for x in (k, v))
        where = {"page_table": torch.arange(6, dtype=torch.int32)[None], "seqused_k": torch.tensor([24])}
    out, lse = reference.sparse_attention(q, k, v, ids, block_size=8, **where)
    close((out[:21], lse[:21]), (want[:21], want_lse[:21]), terms=TERMS)
    assert out[22:].isnan().all()


@FORMS
def test_visible_minus_infinity_scores_weigh_nothing(form):
    q, k, v = torch.ones(1, 1, 2), torch.full((4, 1, 2), -torch.inf), torch.ones(4, 1, 2)
    out, lse = form.sparse_attention(q, k, v, torch.zeros(1, 1, 1, dtype=torch.int32), block_size=4)
    assert out.tolist() == [[[0.0, 0.0]]] and lse.tolist() == [[-math.inf]]


@FORMS
def test_missing_pages_are_absent(form):
    """A page number of -1, or past the pool, in a page that is in use: its keys are not there."""
    pool = torch.randn(3, 1, 4, 8, generator=torch.Generator().manual_seed(5))
    q, ids = torch.ones(1, 1, 8), torch.tensor([[[0, 1]]], dtype=torch.int32)
    where = {"seqused_k": torch.tensor([12], dtype=torch.int32), "block_size": 8}
    table = torch.tensor([[2, -1, 9]], dtype=torch.int32)
    out, lse = form.sparse_attention(q, pool, pool, ids, page_table=table, **where)
    want = form.sparse_attention(q, pool[2, 0, :, None], pool[2, 0, :, None], ids, block_size=8)
    close((out, lse), want, terms=TERMS)
    empty = pool[:0]
    out, lse = form.sparse_attention(q, empty, empty, ids, page_table=table, **where)
    assert not out.any() and lse.item() == -math.inf
    score = form.index_score(q, pool[:, 0], page_table=table, **where)
    want_score = form.index_score(q, pool[2, 0], block_size=8)
    close(score.flatten(), torch.tensor([want_score.item(), -math.inf]), terms=TERMS)


@FORMS
def test_shards_merge_to_the_whole(form):
    """Two shards of the keys, cut inside a block, with global ids and positions: combine gives attention over all."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(50, heads, 8, generator=generator).double() for heads in (4, 2, 2))
    idx_q, idx_k = (torch.randint(-4, 5, shape, generator=generator).double() for shape in ((50, 2, 8), (50, 8)))
    ids = form.select_blocks(idx_q, idx_k, 3, block_size=8)
    whole = form.sparse_attention(q, k, v, ids, block_size=8)
    positions = torch.arange(50, dtype=torch.int32)
    parts, scores = [], []
    for begin, end in ((0, 21), (21, 50)):
        shard = {"q_positions": positions, "k_offset": torch.tensor([begin]), "max_seqlen_k": 50, "block_size": 8}
        parts.append(form.sparse_attention(q, k[begin:end], v[begin:end], ids, **shard))
        scores.append(form.index_score(idx_q, idx_k[begin:end], **shard))
    merged = reference.combine(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    # The weights of the merge come from LSEs in float32.
    close(merged, whole, terms=TERMS, dtype=torch.float32)
    assert torch.equal(torch.maximum(*scores), form.index_score(idx_q, idx_k, block_size=8))


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_merges_splits_of_a_softmax(form, dtype):
    generator = torch.Generator().manual_seed(7)
    logits, values = torch.randn(5, 6, 3, 20, generator=generator).double(), torch.randn(5, 20, 4, generator=generator)
    logits[2, 1], logits[:, 2] = -torch.inf, -torch.inf
    partial_lse = logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(partial_lse == -torch.inf, 0.0, partial_lse)[..., None])
    partial_out = torch.einsum("sthj,sjd->sthd", weights, values.double())
    # An empty split may hold anything.
    partial_out[partial_lse == -torch.inf] = torch.nan
    out, lse = form.combine(partial_out.to(dtype), partial_lse.float())
    whole = logits.permute(1, 2, 0, 3).reshape(6, 3, 100)
    want = whole.softmax(-1).nan_to_num(0.0) @ values.double().reshape(100, 4)
    # The splits' outputs were rounded to the dtype and their LSEs to float32.
    close(
        out,
        want,
        terms=TERMS,
        size=float(values.abs().max()),
        roundings=2,
        dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )
    close(lse, whole.logsumexp(-1), terms=TERMS)
    assert not out[2].any() and (lse[2] == -math.inf).all()


def test_combine_without_splits_and_across_chunks(monkeypatch):
    out, lse = reference.combine(torch.zeros(0, 3, 2, 4), torch.zeros(0, 3, 2))
    assert not out.any() and (lse == -math.inf).all() and out.shape == (3, 2, 4)
    partial = torch.randn(2, 9, 2, 4), torch.randn(2, 9, 2)
    want = reference.combine(*partial)
    monkeypatch.setattr("msa_tiles.reference.attention.COMBINE_ELEMENTS", 16)
    torch.testing.assert_close(reference.combine(*partial), want, rtol=0, atol=0)


@FEW
@given(data=st.data())
def test_schedule_lists_every_visible_edge_once(data):
    block_size = data.draw(BLOCK_SIZES)
    batch = data.draw(batches(block_size, ("flat",)))
    kv_heads, topk = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3, 16]))
    ids = data.draw(selections(kv_heads, batch.total_q, -(-batch.max_end // block_size), topk))
    where = batch.where() | {"cu_seqlens_k": torch.tensor([0, *np.cumsum(batch.lengths_k).tolist()])}
    if not batch.lengths_q:
        where["cu_seqlens_q"] = torch.tensor([0])
    edges, tasks, counts = reference.build_schedule(ids, block_size=block_size, **where)
    plain = reference.plain.build_schedule(ids, block_size=block_size, **where)
    for head in range(kv_heads):
        want = {}
        for row, (request, position) in enumerate(batch.rows()):
            for slot, block in enumerate(ids[head, row].tolist()):
                end = batch.offsets[request] + batch.lengths_k[request] if request >= 0 else 0
                if 0 <= block * block_size <= min(position, end - 1):
                    want.setdefault((request, block), []).append(row * topk + slot)
        num_tasks, num_edges = counts[0, head].tolist()
        found = {}
        cursor = 0
        for request, block, first, length in tasks[0, head, :num_tasks].tolist():
            assert first == cursor and 0 < length <= schedule_module.MAX_TASK_EDGES
            cursor += length
            found.setdefault((request, block), []).extend(edges[0, head, first : first + length].tolist())
        assert cursor == num_edges
        assert found == want == plain[head]
        assert list(found) == sorted(found)
        assert (edges[0, head, num_edges:] == -1).all() and (tasks[0, head, num_tasks:] == -1).all()


def test_a_block_that_every_query_reads_is_cut(monkeypatch):
    monkeypatch.setattr(schedule_module, "MAX_TASK_EDGES", 32)
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(100, heads, 8, generator=generator) for heads in (2, 1, 1))
    ids = torch.tensor([0, 3], dtype=torch.int32).expand(1, 100, 2)
    schedule = reference.build_schedule(ids, block_size=16)
    lengths = schedule[1][0, 0, : int(schedule[2][0, 0, 0]), 3]
    assert lengths.tolist() == [32, 32, 32, 4, 32, 20]
    out = reference.sparse_attention(q, k, v, ids, block_size=16, schedule=schedule)
    close(out, reference.plain.sparse_attention(q, k, v, ids, block_size=16), terms=TERMS)


@pytest.mark.slow  # beside it, shorter ones
def test_sixteen_thousand_tokens():
    """A long sequence, some of its rows checked one by one against a softmax over their keys."""
    tokens, heads, dim, topk = 16384, 2, 128, 16
    generator = torch.Generator().manual_seed(9)
    idx_q, idx_k, k, v = (
        torch.randn(tokens, *shape, generator=generator).bfloat16() for shape in ((1, dim), (dim,), (1, dim), (1, dim))
    )
    q = torch.randn(tokens, heads, dim, generator=generator).bfloat16()
    ids = reference.select_blocks(idx_q, idx_k, topk)
    out, lse = reference.sparse_attention(q, k, v, ids)
    for row in (0, 127, 128, 5000, tokens - 1):
        chosen = torch.cat([torch.arange(b * 128, min(b * 128 + 128, row + 1)) for b in ids[0, row].tolist() if b >= 0])
        logits = q[row].double() @ k[chosen, 0].double().T * dim**-0.5
        terms = softmax_terms(len(chosen), dim, 8.0)
        close(lse[row], logits.logsumexp(-1), terms=terms)
        want = logits.softmax(-1) @ v[chosen, 0].double()
        close(out[row], want, terms=terms, size=float(v[chosen].abs().max()))
