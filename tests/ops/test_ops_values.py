"""The public operators on CPU tensors: what they return, for every layout and buffer that the contracts name."""

from __future__ import annotations

import inspect

import pytest
import torch
from ops.calls import (
    ATTENTION,
    BLOCK,
    EVERY_OPERATOR,
    OPERATORS,
    RANKERS,
    SCORERS,
    TERMS,
    WITH_KEYS,
    call,
    paged,
    tensors,
)
from rounding import close

from msa_tiles import ops, reference

WHERE = (
    "cu_seqlens_q=None, cu_seqlens_k=None, page_table=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "q_positions=None, k_offset=None, check=False"
)
SIGNATURES = {
    "index_score": f"idx_q, idx_k, *, {WHERE}, block_size=128, causal=True, layout='head_major', k_scale=None, "
    "q_scale=None, out=None, backend='auto'",
    "topk_select": f"score, topk, *, {WHERE}, num_kv_heads=None, num_valid_blocks=None, block_size=128, init_blocks=0, "
    "local_blocks=1, order='ascending', layout='head_major', out=None, backend='auto'",
    "select_blocks": f"idx_q, idx_k, topk, *, {WHERE}, num_kv_heads=None, block_size=128, init_blocks=0, "
    "local_blocks=1, order='ascending', k_scale=None, q_scale=None, out=None, backend='auto'",
    "build_schedule": f"block_indices, *, {WHERE}, block_size=128",
    "sparse_attention": f"q, k, v, block_indices, *, {WHERE}, block_size=128, softmax_scale=None, q_scale=None, "
    "k_scale=None, v_scale=None, schedule=None, workspace=None, return_lse=False, out=None, lse=None, "
    "deterministic=None, batch_invariant=False, backend='auto'",
    "combine": "partial_out, partial_lse, *, out=None, lse=None, backend='auto'",
    "msa_decode": f"q, k, v, idx_q, idx_k, topk, *, {WHERE.replace(' k_offset=None,', '')}, block_size=128, "
    "init_blocks=0, local_blocks=1, softmax_scale=None, index_q_scale=None, index_k_scale=None, q_scale=None, "
    "k_scale=None, v_scale=None, workspace=None, return_lse=False, out=None, lse=None, block_indices=None, "
    "batch_invariant=False, backend='auto'",
}
# A decode operator takes what the operator takes whose answer it gives.
SIGNATURES |= {
    "decode_score": SIGNATURES["index_score"],
    "decode_topk": SIGNATURES["topk_select"],
    "sparse_decode": SIGNATURES["sparse_attention"].replace(" deterministic=None,", ""),
}


@pytest.mark.parametrize("op", EVERY_OPERATOR)
def test_signatures_are_the_contract(op):
    parameters = inspect.signature(OPERATORS[op]).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[op]})"


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_contract_shapes_and_dtypes(dtype):
    for op in SCORERS:
        score = OPERATORS[op](**call(op, dtype))
        assert score.shape == (4, 11, 5) and score.dtype == torch.float32
    ids = ops.select_blocks(**call("select_blocks", dtype))
    assert ids.shape == (2, 11, 3) and ids.dtype == torch.int32
    for op in RANKERS:
        equal(OPERATORS[op](**call(op)), ids)
    for op in (*ATTENTION, "msa_decode"):
        out, lse = OPERATORS[op](**call(op, dtype), return_lse=True)
        assert out.shape == (11, 4, 16) and out.dtype == dtype
        assert lse.shape == (11, 4) and lse.dtype == torch.float32
        equal(OPERATORS[op](**call(op, dtype)), out)
    merged, merged_lse = ops.combine(**call("combine", dtype))
    assert merged.shape == (5, 4, 16) and merged.dtype == dtype
    assert merged_lse.shape == (5, 4) and merged_lse.dtype == torch.float32


def test_results_are_the_reference():
    wanted = call("sparse_attention")
    out, lse = reference.plain.sparse_attention(**wanted)
    for op in ATTENTION:
        close(OPERATORS[op](**wanted, return_lse=True), (out, lse), terms=TERMS)
    wanted = call("select_blocks")
    equal(ops.select_blocks(**wanted), reference.plain.select_blocks(**wanted))
    wanted = call("index_score")
    for op in SCORERS:
        equal(OPERATORS[op](**wanted), reference.plain.index_score(**wanted))
        equal(OPERATORS[op](**wanted, causal=False), reference.plain.index_score(**wanted, causal=False))
    for options in ({}, {"order": "score", "init_blocks": 1}, {"num_valid_blocks": 2}):
        wanted = call("topk_select") | options
        for op in RANKERS:
            equal(OPERATORS[op](**wanted), reference.plain.topk_select(**wanted))
    wanted = call("combine")
    equal(ops.combine(**wanted), reference.combine(**wanted))


@pytest.mark.parametrize("op", WITH_KEYS)
def test_paged_keys_give_what_flat_keys_give(op):
    flat, pages = OPERATORS[op](**call(op)), OPERATORS[op](**paged(op))
    if op in SCORERS:
        # The page table could hold more blocks than the flat keys; those are -inf.
        width = min(flat.shape[2], pages.shape[2])
        assert (pages[..., width:] == -torch.inf).all()
        flat, pages = flat[..., :width], pages[..., :width]
    equal(pages, flat)


def test_positions_and_offsets_reach_the_reference():
    """Each argument changes the answer, and it is the reference's."""
    positions = torch.tensor([3, 30, 9, 0, -1, 40, 22, 17, 8, 50, 31], dtype=torch.int32)
    offsets = torch.tensor([0, 5, 16], dtype=torch.int32)
    for where in ({"q_positions": positions}, {"q_positions": positions, "k_offset": offsets, "max_seqlen_k": 39}):
        for op in (*SCORERS, "select_blocks", *RANKERS, *ATTENTION):
            arguments = call(op) | where
            same = {"decode_score": "index_score", "decode_topk": "topk_select", "sparse_decode": "sparse_attention"}
            found, wanted = OPERATORS[op](**arguments), getattr(reference.plain, same.get(op, op))(**arguments)
            close(found, wanted[0] if op in ATTENTION else wanted, terms=TERMS)
            other = OPERATORS[op](**(arguments | {"k_offset" if "k_offset" in where else "q_positions": None}))
            assert not torch.equal(found, other)
        made = ops.build_schedule(**call("build_schedule") | where)
        parts = reference.build_schedule(**call("build_schedule") | where)
        equal((made.edges, made.tasks, made.counts), parts)


@pytest.mark.parametrize("op", [*ATTENTION, "msa_decode"])
def test_interleaved_keys_and_values_in_one_cache(op):
    arguments = paged(op)
    wanted = OPERATORS[op](**arguments)
    cache = torch.cat([arguments["k"], arguments["v"]], dim=-1)
    arguments["k"], arguments["v"] = cache[..., :16], cache[..., 16:]
    equal(OPERATORS[op](**arguments), wanted)


@pytest.mark.parametrize("op", [*ATTENTION, "msa_decode"])
def test_pool_shared_by_layers_and_tokens_before_heads(op):
    """NHD storage seen as HND, and one layer's slice of a pool of all layers."""
    arguments = paged(op)
    wanted = OPERATORS[op](**arguments)
    for name in ("k", "v"):
        pool = torch.full((12, 3, BLOCK // 2, 2, 16), torch.nan)
        pool[:, 1] = arguments[name].transpose(1, 2)
        arguments[name] = pool[:, 1].transpose(1, 2)
    equal(OPERATORS[op](**arguments), wanted)


@pytest.mark.parametrize("op", [*ATTENTION, "msa_decode"])
def test_queries_of_a_fused_projection(op):
    arguments = call(op)
    wanted = OPERATORS[op](**arguments)
    fused = torch.cat([arguments["q"], torch.full((11, 4, 16), torch.nan)], dim=1)
    arguments["q"] = fused[:, :4]
    equal(OPERATORS[op](**arguments), wanted)


@pytest.mark.parametrize("square", [False, True], ids=["T != H", "T == H"])
def test_token_major_ids_as_a_strided_view(square):
    data = tensors()
    tokens = 2 if square else 11
    q, k, v = data["q"][:tokens], data["k"], data["v"]
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(2 * tokens)])
    ids = ids.reshape(2, tokens, 3).to(torch.int32)
    wanted = ops.sparse_attention(q, k, v, ids, block_size=BLOCK)
    token_major = torch.full((tokens, 2, 7), 99, dtype=torch.int32)
    token_major[..., 2:5] = ids.transpose(0, 1)
    equal(ops.sparse_attention(q, k, v, token_major.transpose(0, 1)[..., 2:5], block_size=BLOCK), wanted)
    view = torch.full((2, tokens + 6, 3), 99, dtype=torch.int32)
    view[:, :tokens] = ids
    equal(ops.sparse_attention(q, k, v, view[:, :tokens], block_size=BLOCK), wanted)


@pytest.mark.parametrize(("scorer", "ranker"), list(zip(SCORERS, RANKERS, strict=True)))
def test_token_major_scores_and_a_wider_buffer(scorer, ranker):
    arguments = call(scorer)
    wanted = OPERATORS[scorer](**arguments)
    equal(OPERATORS[scorer](**arguments, layout="token_major"), wanted.transpose(0, 1).contiguous())
    buffer = torch.full((11, 4, 9), torch.nan)
    assert OPERATORS[scorer](**arguments, layout="token_major", out=buffer) is buffer
    equal(buffer[..., :5].transpose(0, 1), wanted)
    assert (buffer[..., 5:] == -torch.inf).all()
    ids = OPERATORS[ranker](**call(ranker))
    token_major = call(ranker) | {"score": buffer, "layout": "token_major"}
    equal(OPERATORS[ranker](**token_major), ids)


@pytest.mark.parametrize("op", SCORERS)
def test_width_of_the_scores(op):
    score, arguments = OPERATORS[op], call(op)
    assert score(**arguments, max_seqlen_k=23).shape[2] == 3
    assert score(**arguments).shape[2] == 5
    narrow = torch.empty(4, 11, 3)
    score(**arguments, out=narrow)
    equal(narrow, score(**arguments, max_seqlen_k=23))
    assert score(**paged(op)).shape[2] == 3
    assert score(torch.zeros(2, 1, 8), torch.zeros(0, 8)).shape == (1, 2, 0)


@pytest.mark.parametrize("op", [*ATTENTION, "msa_decode"])
def test_attention_fills_and_returns_buffers_of_the_caller(op):
    """Strided buffers, poisoned before the call; what lies between their rows stays."""
    arguments = call(op)
    wanted = OPERATORS[op](**arguments, return_lse=True)
    out, lse = torch.full((11, 7, 20), 77.0), torch.full((11, 9), torch.nan)[:, 3:7]
    found = OPERATORS[op](**arguments, return_lse=True, out=out[:, 1:5, 2:18], lse=lse)
    assert found[1] is lse
    equal((out[:, 1:5, 2:18], lse), wanted)
    assert (out[:, 0] == 77).all() and (out[..., :2] == 77).all() and (out[..., 18:] == 77).all()
    only_lse = torch.full((11, 4), torch.nan)
    assert isinstance(OPERATORS[op](**arguments, lse=only_lse), torch.Tensor)
    equal(only_lse, wanted[1])


def test_buffers_of_the_caller_are_filled_and_returned():
    arguments = call("select_blocks")
    ids = torch.full((11, 2, 3), 99, dtype=torch.int32)
    ops.select_blocks(**arguments, out=ids.transpose(0, 1))
    equal(ids.transpose(0, 1).contiguous(), ops.select_blocks(**arguments))
    for op in RANKERS:
        again = torch.full_like(ids, 99)
        OPERATORS[op](**call(op), out=again.transpose(0, 1))
        equal(again, ids)
    again = torch.full_like(ids, 99)
    ops.msa_decode(**call("msa_decode"), block_indices=again.transpose(0, 1))
    equal(again, ids)

    arguments = call("combine")
    wanted = ops.combine(**arguments)
    out, lse = torch.full((5, 4, 16), torch.nan), torch.full((5, 4), torch.nan)
    equal(ops.combine(**arguments, lse=lse)[1], lse)
    equal(ops.combine(**arguments, out=out)[0], out)
    equal((out, lse), wanted)


def test_a_schedule_serves_several_calls():
    arguments = call("sparse_attention")
    schedule = ops.build_schedule(**call("build_schedule"))
    assert (schedule.window, schedule.topk, schedule.block_size, schedule.total_q) == (11, 3, BLOCK, 11)
    assert schedule.num_kv_heads == 2
    wanted = ops.sparse_attention(**arguments, return_lse=True)
    equal(ops.sparse_attention(**arguments, schedule=schedule, return_lse=True), wanted)
    # It is used, not rebuilt: a schedule of other ids gives the attention of those.
    other = torch.where(arguments["block_indices"] == 0, -1, arguments["block_indices"])
    parts = call("build_schedule") | {"block_indices": other}
    equal(
        ops.sparse_attention(**arguments, schedule=ops.build_schedule(**parts)),
        ops.sparse_attention(**(arguments | {"block_indices": other})),
    )


def test_a_schedule_for_the_last_queries_of_more_keys():
    """Without key lengths it would know as many keys as queries, and attention would lose the others."""
    data = tensors()
    ids = ops.select_blocks(data["idx_q"], data["idx_k"], 3, num_kv_heads=2, block_size=BLOCK)
    arguments = {name: data[name] for name in "qkv"} | {"block_indices": ids, "block_size": BLOCK}
    wanted = ops.sparse_attention(**arguments)
    for lengths in ({"cu_seqlens_k": torch.tensor([0, 40])}, {"seqused_k": torch.tensor([40])}):
        lengths = {name: value.to(torch.int32) for name, value in lengths.items()}
        made = ops.build_schedule(ids, block_size=BLOCK, **lengths)
        equal(ops.sparse_attention(**arguments, schedule=made), wanted)
    made = ops.build_schedule(ids, block_size=BLOCK)
    with pytest.raises(ValueError, match=r"^schedule: got one made without key lengths, for as many keys as queries"):
        ops.sparse_attention(**arguments, schedule=made)
    # As many keys as queries need no lengths.
    arguments |= {name: data[name][:11] for name in "kv"}
    equal(ops.sparse_attention(**arguments, schedule=made), ops.sparse_attention(**arguments))


@pytest.mark.parametrize("op", ATTENTION)
def test_workspace_may_be_bytes_or_a_tensor(op):
    arguments = call(op)
    wanted = OPERATORS[op](**arguments)
    equal(OPERATORS[op](**arguments, workspace=1 << 20), wanted)
    equal(OPERATORS[op](**arguments, workspace=torch.empty(64, dtype=torch.uint8)), wanted)


def test_empty_batches():
    none = torch.zeros(1, dtype=torch.int32)
    data = tensors()
    starts = {"cu_seqlens_q": none, "cu_seqlens_k": none}
    assert (ops.select_blocks(data["idx_q"], data["idx_k"], 3, **starts) == -1).all()
    for score in (ops.index_score, ops.decode_score):
        assert (score(data["idx_q"], data["idx_k"], **starts) == -torch.inf).all()
    ids = torch.zeros(2, 11, 3, dtype=torch.int32)
    for attend in (ops.sparse_attention, ops.sparse_decode):
        out, lse = attend(data["q"], data["k"], data["v"], ids, **starts, return_lse=True)
        assert not out.any() and (lse == -torch.inf).all()
        assert attend(data["q"][:0], data["k"], data["v"], ids[:, :0]).shape == (0, 4, 16)
        out, lse = attend(data["q"], data["k"][:0], data["v"][:0], ids, return_lse=True)
        assert not out.any() and (lse == -torch.inf).all()
    assert (ops.select_blocks(data["idx_q"], data["idx_k"][:0], 3) == -1).all()
    assert ops.select_blocks(data["idx_q"][:0], data["idx_k"], 3).shape == (4, 0, 3)
    assert ops.build_schedule(ids[:, :0]).counts.tolist() == [[[0, 0], [0, 0]]]
    for rank in (ops.topk_select, ops.decode_topk):
        assert rank(torch.zeros(4, 11, 0), 3).tolist() == [[[-1] * 3] * 11] * 4


def test_more_blocks_asked_for_than_there_are():
    arguments = call("select_blocks") | {"topk": 64}
    ids = ops.select_blocks(**arguments)
    assert (ids[..., 3:] == -1).all() and (ids[..., 0] == 0).all()
    out = ops.sparse_attention(**(call("sparse_attention") | {"block_indices": ids}))
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(call("sparse_attention")[name][rows].transpose(0, 1) for name, rows in _first_request()),
        attn_mask=torch.ones(5, 17, dtype=torch.bool).tril(12),
        enable_gqa=True,
    )
    close(out[:5], whole.transpose(0, 1), terms=TERMS)


def _first_request():
    return ("q", slice(0, 5)), ("k", slice(0, 17)), ("v", slice(0, 17))


def test_many_heads_that_are_no_power_of_two():
    """6 KV heads with 96 query heads, k 32, init 1, local 2."""
    generator = torch.Generator().manual_seed(4)
    idx_q, idx_k = torch.randn(9, 6, 16, generator=generator), torch.randn(300, 16, generator=generator)
    positions = torch.randint(0, 300, (9,), generator=generator, dtype=torch.int32)
    where = {"q_positions": positions, "block_size": 4}
    ids = ops.select_blocks(idx_q, idx_k, 32, init_blocks=1, local_blocks=2, **where)
    for row, position in enumerate(positions.tolist()):
        last = position // 4
        for chosen in ids[:, row].tolist():
            assert {0, last, max(last - 1, 0)} <= set(chosen)
            assert sum(block >= 0 for block in chosen) == min(32, last + 1)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((9, 96), (300, 6), (300, 6)))
    out = ops.sparse_attention(q, k, v, ids, **where)
    close(out, reference.plain.sparse_attention(q, k, v, ids, **where)[0], terms=TERMS)
