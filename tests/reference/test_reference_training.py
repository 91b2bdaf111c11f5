"""Gradients of attention and the index KL in the reference, against float64 autograd of the dense formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import differentiable, magnitudes
from reference.batches import DTYPES, Batch, batches, selections
from rounding import close, softmax_terms
from seeds import examples

from msa_tiles import reference
from msa_tiles.reference import pieces

FORMS = pytest.mark.parametrize("form", [reference, reference.plain], ids=["blockwise", "plain"])
FEW = settings(max_examples=examples(30), deadline=None)
TERMS = 1000  # keys and queries of a result, and what scores of about 10 are off by
GROUPS = st.sampled_from([1, 2, 4, 8, 16])
TOPKS = st.sampled_from([1, 4, 8, 16, 32])


def flat(batch: Batch, tensors: list[torch.Tensor], *shape: int) -> torch.Tensor:
    """Gradients of the keys of each request, in flat storage, 0 for rows that hold no key."""
    slack = 3 if batch.storage == "used" else 0
    parts = [part for rows in tensors for part in (rows, torch.zeros(slack, *shape).double())]
    return torch.cat(parts) if parts else torch.zeros(0, *shape).double()


def stored(batch: Batch, tensors: list[torch.Tensor], dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return batch.store(tensors, dtype=dtype)[0] if tensors else torch.zeros(0, *shape, dtype=dtype)


def agree(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, **accepted: Any) -> None:
    assert got.dtype == dtype, name
    try:
        close(got, want, **accepted)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@FORMS
@FEW
@given(data=st.data())
def test_attention_backward_equals_autograd(form, data):
    block_size = data.draw(st.sampled_from([4, 64, 128]))
    batch = data.draw(batches(block_size, ("flat", "used")))
    kv_heads, group, topk = data.draw(st.integers(1, 2)), data.draw(GROUPS), data.draw(TOPKS)
    dtype, scale = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([None, 0.5]))
    ids = data.draw(selections(kv_heads, batch.total_q, -(-batch.max_end // block_size), topk))
    shape = (batch.total_q, kv_heads * group, 8)
    q, *keys = leaves(batch.random(*shape), *batch.keys(kv_heads, 8), *batch.keys(kv_heads, 8))
    keys, values = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    dout, dlse = batch.random(*shape), batch.random(*shape[:2]) if data.draw(st.booleans()) else None

    out, lse = differentiable.attention(batch, q, keys, values, ids, block_size, scale or 8**-0.5)
    seen = lse > -torch.inf
    total = (out * dout).sum() + (0.0 if dlse is None else (lse[seen] * dlse[seen]).sum())
    if total.requires_grad:
        total.backward()
    want_dq, want_dk, want_dv = (
        [torch.zeros_like(part) if part.grad is None else part.grad for part in tensors]
        for tensors in ([q], keys, values)
    )
    batch_dout, batch_dlse = dout, dlse
    # Whoever sees nothing has no say: its gradients may hold anything.
    dout = dout.masked_fill(~seen[..., None], torch.nan)
    dlse = None if dlse is None else dlse.masked_fill(~seen, torch.nan)
    q, k, v = (
        q.detach().to(dtype),
        *(stored(batch, [x.detach() for x in t], dtype, kv_heads, 8) for t in (keys, values)),
    )
    given = lse.detach() if dtype == torch.float64 else lse.detach().float()
    got = form.sparse_attention_backward(
        dout.to(dtype), q, k, v, out.detach().to(dtype), given, ids, dlse=dlse, block_size=block_size,
        softmax_scale=scale, **batch.where(),
    )  # fmt: skip
    logit = magnitudes.logit(q, [x.detach() for x in keys], scale or 8**-0.5)
    sizes = magnitudes.gradients(
        batch, q.double(), keys, values, out, batch_dout, batch_dlse, ids, block_size, scale or 8**-0.5
    )
    # `out` was rounded to the dtype too, and its error reaches dS.
    accepted = {"terms": softmax_terms(batch.max_end, 8, logit) + batch.total_q * group, "roundings": 2}
    agree("dq", got[0], want_dq[0], dtype, size=sizes[0], **accepted)
    agree("dk", got[1], flat(batch, want_dk, kv_heads, 8), dtype, size=flat(batch, sizes[1], kv_heads, 8), **accepted)
    agree("dv", got[2], flat(batch, want_dv, kv_heads, 8), dtype, size=flat(batch, sizes[2], kv_heads, 8), **accepted)


@FORMS
@FEW
@given(data=st.data())
def test_index_kl_equals_autograd(form, data):
    block_size = data.draw(st.sampled_from([4, 64, 128]))
    batch = data.draw(batches(block_size, ("flat", "used")))
    kv_heads, group, topk = data.draw(st.integers(1, 2)), data.draw(GROUPS), data.draw(TOPKS)
    dtype = data.draw(st.sampled_from(DTYPES))
    scale, index_scale = data.draw(st.sampled_from([(None, None), (0.5, 0.25)]))
    weights = batch.random(batch.total_q).abs() if data.draw(st.booleans()) else None
    ids = None
    if data.draw(st.booleans()):
        ids = data.draw(selections(kv_heads, batch.total_q, -(-batch.max_end // block_size), topk))
    q, keys = batch.random(batch.total_q, kv_heads * group, 8), batch.keys(kv_heads, 8)
    idx_q, *idx_keys = leaves(batch.random(batch.total_q, kv_heads, 16), *batch.keys(16))

    scales = scale or 8**-0.5, index_scale or 0.25
    some = torch.ones(batch.total_q) if weights is None else weights
    loss = differentiable.index_kl(batch, q, keys, idx_q, idx_keys, ids, block_size, *scales, some)
    loss.backward()
    want_dk = [torch.zeros_like(part) if part.grad is None else part.grad for part in idx_keys]
    _, lse = differentiable.attention(batch, q, keys, keys, ids, block_size, scales[0])

    k, idx_k = stored(batch, keys, dtype, kv_heads, 8), stored(batch, [x.detach() for x in idx_keys], dtype, 16)
    arguments = (q.to(dtype), k, lse if dtype == torch.float64 else lse.float(), idx_q.detach().to(dtype), idx_k, ids)
    options = {"block_size": block_size, "softmax_scale": scale, "index_scale": index_scale, "token_weights": weights}
    got = form.index_kl(*arguments, **options, **batch.where())
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    logits = magnitudes.logit(q, keys, scales[0]), magnitudes.logit(idx_q, [x.detach() for x in idx_keys], scales[1])
    size, d_idx_q, d_idx_k = magnitudes.divergence(
        batch, q, keys, idx_q, idx_keys, ids, block_size, *scales, some.double()
    )
    terms = softmax_terms(batch.max_end, 16, max(logits)) + 2 * batch.total_q
    close(got[0], loss, terms=terms, size=size)
    agree("d_idx_q", got[1], idx_q.grad, dtype, terms=terms, size=d_idx_q)
    agree("d_idx_k", got[2], flat(batch, want_dk, 16), dtype, terms=terms, size=flat(batch, d_idx_k, 16))
    if form is reference:
        value, *nothing = form.index_kl(*arguments, **options, gradients=False, **batch.where())
        assert torch.equal(value, got[0]) and nothing == [None, None]


@FEW
@given(data=st.data())
def test_dense_attention_is_attention_to_every_block(data):
    """Forward and backward, in chunks that cut the sequences."""
    batch = data.draw(batches(4, ("flat", "used")))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(GROUPS)
    q, keys, values = batch.random(batch.total_q, kv_heads * group, 8), batch.keys(kv_heads, 8), batch.keys(kv_heads, 8)
    k, v = (stored(batch, part, torch.float64, kv_heads, 8) for part in (keys, values))
    blocks = max(-(-batch.max_end // 4), 1)
    ids = torch.arange(blocks, dtype=torch.int32).expand(kv_heads, batch.total_q, blocks)
    where, dout, dlse = batch.where(), batch.random(*q.shape), batch.random(*q.shape[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "QUERY_CHUNK", 3)
        patch.setattr(pieces, "KEY_CHUNK", 5)
        out, lse = reference.dense_attention(q, k, v, softmax_scale=0.5, **where)
        gradients = reference.dense_attention_backward(dout, q, k, v, out, lse, dlse=dlse, softmax_scale=0.5, **where)
    want = reference.plain.sparse_attention(q, k, v, ids, block_size=4, softmax_scale=0.5, **where)
    close((out, lse), want, terms=TERMS)
    wanted = reference.plain.sparse_attention_backward(
        dout, q, k, v, out, lse, ids, dlse=dlse, block_size=4, softmax_scale=0.5, **where
    )
    close(gradients, wanted, terms=TERMS)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_of_zero_give_a_finite_divergence(form, dtype):
    """P with zeros where Q is not, Q so small that its exponential is 0, and a query whose set is one key."""
    q = torch.tensor([[[0.0, 0.0]], [[400.0, 0.0]], [[0.0, 400.0]]], dtype=dtype)
    k = torch.tensor([[[8.0, 0.0]], [[0.0, 8.0]], [[-8.0, 0.0]]], dtype=dtype)
    idx_q, idx_k = q.clone(), k[:, 0].flip(0).clone()
    scores = (q.double() @ k[:, 0].double().T)[:, 0] * 2**-0.5
    lse = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf).logsumexp(-1, keepdim=True)
    ids = torch.tensor([[[0], [0], [0]]], dtype=torch.int32)
    for blocks in (ids, None):
        loss, d_idx_q, d_idx_k = form.index_kl(q, k, lse.float(), idx_q, idx_k, blocks, block_size=4)
        # Query 1 looks at key 0, its index query at key 1, 400 * 8 / sqrt(2) above; query 2 looks at key 1 in both.
        assert loss.item() == pytest.approx(400 * 8 * 2**-0.5 / 3, rel=1e-3)
        assert d_idx_q.isfinite().all() and d_idx_k.isfinite().all()
        assert not d_idx_q[0].any()


@FORMS
def test_a_query_with_one_block_learns_nothing_beyond_it(form):
    generator = torch.Generator().manual_seed(4)
    q, k, idx_q = (torch.randn(40, 2, 8, generator=generator) for _ in range(3))
    idx_k = torch.randn(40, 8, generator=generator)
    ids = torch.full((2, 40, 4), -1, dtype=torch.int32)
    ids[:, :, 2] = torch.arange(40) // 8
    _, lse = reference.sparse_attention(q, k, k, ids, block_size=8)
    loss, d_idx_q, d_idx_k = form.index_kl(q, k, lse, idx_q, idx_k, ids, block_size=8)
    one_block = torch.zeros(2, 8, 1, dtype=torch.int32)
    parts = [
        form.index_kl(*(tensor[begin : begin + 8] for tensor in (q, k, lse, idx_q, idx_k)), one_block, block_size=8)
        for begin in range(0, 40, 8)
    ]
    close(loss, torch.stack([part[0] for part in parts]).mean(), terms=TERMS)
    close(d_idx_q, torch.cat([part[1] for part in parts]) / 5, terms=TERMS, size=1 / 40)
    close(d_idx_k, torch.cat([part[2] for part in parts]) / 5, terms=TERMS, size=8 / 40)


@FORMS
def test_the_divergence_of_equal_branches_is_zero(form):
    generator = torch.Generator().manual_seed(8)
    q, k = (torch.randn(30, 1, 16, generator=generator) for _ in range(2))
    _, lse = reference.dense_attention(q, k, k)
    loss, d_idx_q, d_idx_k = form.index_kl(q, k, lse, q, k[:, 0], None)
    assert abs(loss.item()) < 1e-6 and d_idx_q.abs().max() < 1e-6 and d_idx_k.abs().max() < 1e-6
    assert form.index_kl(q, k, lse, q + 1, k[:, 0], None)[0].item() > 1e-3


def test_a_task_of_many_queries_is_cut_without_a_change():
    """More readers of one block than a task holds: its gradients come from several tasks."""
    generator = torch.Generator().manual_seed(9)
    q, k, v, dout = (torch.randn(700, heads, 8, generator=generator).double() for heads in (2, 1, 1, 2))
    idx_q, idx_k = (torch.randn(shape, generator=generator).double() for shape in ((700, 1, 8), (700, 8)))
    ids = reference.select_blocks(idx_q, idx_k, 3, block_size=64, init_blocks=1)
    out, lse = reference.sparse_attention(q, k, v, ids, block_size=64)
    arguments = (dout, q, k, v, out, lse, ids)
    found = reference.sparse_attention_backward(*arguments, block_size=64)
    close(found, reference.plain.sparse_attention_backward(*arguments, block_size=64), terms=TERMS)
    kl = (q, k, lse, idx_q, idx_k, ids)
    for options in ((ids, {"block_size": 64}), (None, {})):
        found, wanted = (form.index_kl(*kl[:-1], options[0], **options[1]) for form in (reference, reference.plain))
        close(found, wanted, terms=TERMS)
