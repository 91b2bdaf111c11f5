"""``k_offset`` on kernels, without a GPU: the stand-ins of `kernel_stand_ins` know no offset, the reference does."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.calls import BLOCK, OPERATORS, TERMS, WITH_OFFSETS, call, paged
from reference.batches import Batch, batches
from rounding import close
from seeds import examples

from msa_tiles import cli, ops
from msa_tiles.call.where import Where
from msa_tiles.launch import lookup, shards

BIG = torch.iinfo(torch.int32)
ORDERS = ("ascending", "score", "local_last")
# Operators on keys that the stand-ins serve: the decode operators rewrite calls with the same functions.
WITH_KEYS = ["index_score", "select_blocks", "sparse_attention"]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(shards, "PIECE", 64)


@st.composite
def batches_of_shards(draw):
    """A random batch of at least one request whose keys begin at a block's first position."""
    batch = draw(batches(BLOCK, shards=True))
    return replace(batch, offsets=[offset // BLOCK * BLOCK for offset in batch.offsets])


random_shards = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def indexer(batch, heads=2):
    """Integer queries and keys, so that scores are exact in any order of summation."""
    (keys,) = batch.store(batch.keys(16, integers=True), dtype=torch.float32)
    return batch.random(batch.total_q, heads, 16, integers=True).float(), keys


@random_shards
@given(batch=batches_of_shards(), causal=st.booleans(), token_major=st.booleans())
def test_scores_have_the_columns_of_the_whole_request(kernels, batch, causal, token_major):
    layout = "token_major" if token_major else "head_major"
    options = {"block_size": BLOCK, "causal": causal, "layout": layout, **batch.where()}
    idx_q, idx_k = indexer(batch)
    wanted = ops.index_score(idx_q, idx_k, backend="reference", **options)
    equal(ops.index_score(idx_q, idx_k, **options), wanted)
    narrow = torch.full((*wanted.shape[:2], max(wanted.shape[2] - 1, 0)), torch.nan)
    options["max_seqlen_k"] = None
    equal(ops.index_score(idx_q, idx_k, out=narrow, **options), wanted[..., : narrow.shape[2]])


@random_shards
@given(
    batch=batches_of_shards(),
    topk=st.integers(1, 6),
    init=st.integers(0, 4),
    local=st.integers(0, 4),
    order=st.sampled_from(ORDERS),
    heads=st.sampled_from([1, 2]),
)
def test_selections_are_those_of_the_whole_request(kernels, batch, topk, init, local, order, heads):
    """Forced blocks and unscored ones in front of the shard included."""
    options = {"block_size": BLOCK, "init_blocks": init, "local_blocks": local, "order": order, "num_kv_heads": heads}
    options |= batch.where()
    idx_q, idx_k = indexer(batch)
    wanted = ops.select_blocks(idx_q, idx_k, topk, backend="reference", **options)
    equal(ops.select_blocks(idx_q, idx_k, topk, **options), wanted)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.drawn(3)
def test_selections_from_many_blocks(kernels, seed):
    """More blocks than slots: what is forced in a shard must not push out what ranks there.

    A fourth of the combinations for each batch: every fault in the ranking of shards that was tried shows in 7% of the
    calls or more, and the batches make 800 of them.
    """
    pick = random.Random(seed)
    batch = Batch(
        lengths_q=[pick.randrange(1, 8) for _ in range(3)],
        lengths_k=[pick.randrange(90) for _ in range(3)],
        offsets=[BLOCK * pick.randrange(6) for _ in range(3)],
        rows_behind=pick.randrange(3),
        storage=pick.choice(["flat", "used", "paged"]),
        page=BLOCK // 2,
        given_positions=None,
        has_offsets=True,
        seed=seed,
    )
    if seed % 2:
        batch.given_positions = [pick.randrange(-2, batch.max_end + 2) for _ in range(sum(batch.lengths_q))]
    idx_q, idx_k = indexer(batch)
    combinations = [*itertools.product(ORDERS, (0, 2, 5), (0, 1, 3), (2, 4, 7))]
    for order, init, local, topk in pick.sample(combinations, 20):
        options = {"block_size": BLOCK, "init_blocks": init, "local_blocks": local, "order": order, **batch.where()}
        wanted = ops.select_blocks(idx_q, idx_k, topk, backend="reference", **options)
        equal(ops.select_blocks(idx_q, idx_k, topk, **options), wanted)


@random_shards
@given(
    batch=batches(BLOCK, shards=True),
    topk=st.integers(1, 6),
    local=st.integers(0, 2),
    counted=st.sampled_from([None, 2, 3]),
)
def test_top_k_takes_any_offset(kernels, batch, topk, local, counted):
    width = -(-batch.max_end // BLOCK) + 1
    valid = None if counted is None else min(counted, width)
    if counted == 3:
        valid = torch.full((batch.total_q,), valid, dtype=torch.int32)
    options = {"block_size": BLOCK, "local_blocks": local, "num_valid_blocks": valid, "order": "score", **batch.where()}
    score = batch.random(2, batch.total_q, width, integers=True).float()
    equal(ops.topk_select(score, topk, **options), ops.topk_select(score, topk, backend="reference", **options))


def random_ids(batch, topk):
    """Distinct ids, of blocks in front of the shard and behind it too, some of them -1."""
    blocks = max(-(-batch.max_end // BLOCK) + 2, topk)
    ids = torch.rand(2, batch.total_q, blocks, generator=batch.generator).argsort(-1)[..., :topk].to(torch.int32)
    return ids.masked_fill(torch.rand(ids.shape, generator=batch.generator) < 0.2, -1)


@random_shards
@given(batch=batches_of_shards(), topk=st.integers(1, 4), scheduled=st.booleans())
def test_attention_reads_the_blocks_of_the_shard(kernels, batch, topk, scheduled):
    k, v = batch.store(batch.keys(2, 16), batch.keys(2, 16), dtype=torch.float32)
    q, ids = batch.random(batch.total_q, 4, 16).float(), random_ids(batch, topk)
    options = {"block_size": BLOCK, **batch.where()}
    wanted = ops.sparse_attention(q, k, v, ids, return_lse=True, backend="reference", **options)
    known = "cu_seqlens_k" in options or "seqused_k" in options
    made = ops.build_schedule(ids, **options) if scheduled and known else None
    found = ops.sparse_attention(q, k, v, ids, schedule=made, return_lse=True, **options)
    close(found, wanted, terms=TERMS)


@pytest.mark.parametrize("cuts", [[0, 3, 5], [0, 0, 5], [0, 1, 2, 3, 4, 5]], ids=str)
def test_shards_merge_to_the_whole(kernels, cuts):
    """Context parallelism: scores of shards by max, one top-k, attention of shards by LSE."""
    generator = torch.Generator().manual_seed(len(cuts))
    lengths, total = torch.tensor([40, 19, 33]), 92
    idx_q, idx_k = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((12, 2, 16), (total, 16)))
    q, k, v = (torch.randn(rows, heads, 16, generator=generator) for rows, heads in ((12, 4), (total, 2), (total, 2)))
    whole = {"cu_seqlens_q": int32(0, 5, 5, 12), "cu_seqlens_k": int32(0, 40, 59, 92), "block_size": BLOCK}
    wanted_ids = ops.select_blocks(idx_q, idx_k, 3, backend="reference", **whole)
    wanted = ops.sparse_attention(q, k, v, wanted_ids, return_lse=True, backend="reference", **whole)
    positions = int32(*range(35, 40), *range(26, 33))
    parts = []
    for begin, end in itertools.pairwise(cuts):
        held = torch.minimum(lengths, torch.tensor(end * BLOCK)) - torch.minimum(lengths, torch.tensor(begin * BLOCK))
        rows = [torch.arange(int(n)) + s + begin * BLOCK for s, n in zip((0, 40, 59), held, strict=True)]
        shard = {
            **whole,
            "cu_seqlens_k": torch.nn.functional.pad(held.cumsum(0), (1, 0)).to(torch.int32),
            "k_offset": int32(*[begin * BLOCK] * 3),
            "q_positions": positions,
            "max_seqlen_k": 48,
        }
        parts.append((torch.cat(rows), shard))
    scores = [ops.index_score(idx_q, idx_k[rows], **shard) for rows, shard in parts]
    ids = ops.topk_select(torch.stack(scores).amax(0), 3, **whole)
    equal(ids, wanted_ids)
    found = [ops.sparse_attention(q, k[rows], v[rows], ids, return_lse=True, **shard) for rows, shard in parts]
    merged = ops.combine(torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found]))
    close(merged, wanted, terms=TERMS)


BROKEN = {"k_offset": int32(16, 0, 12), "max_seqlen_k": 48}
NEGATIVE = {"k_offset": int32(16, 0, -8), "max_seqlen_k": 48}


@pytest.mark.parametrize("where", [BROKEN, NEGATIVE], ids=["inside a block", "below 0"])
def test_a_shard_that_is_none_gives_no_numbers(kernels, where):
    """Its queries only: those of other requests are answered."""
    other = {"k_offset": int32(16, 0, 8), "max_seqlen_k": 48}
    arguments = call("index_score")
    score, wanted = ops.index_score(**arguments | where), ops.index_score(**arguments | other)
    equal(score[:, :5], wanted[:, :5])
    assert score[:, 5:].isnan().all()
    arguments = call("select_blocks")
    ids, wanted = ops.select_blocks(**arguments | where), ops.select_blocks(**arguments | other)
    equal(ids[:, :5], wanted[:, :5])
    assert (ids[:, 5:] == -1).all()
    arguments = call("sparse_attention")
    for made in (None, ops.build_schedule(**call("build_schedule") | where)):
        out, lse = ops.sparse_attention(**arguments | where, schedule=made, return_lse=True)
        wanted = ops.sparse_attention(**arguments | other, return_lse=True)
        equal((out[:5], lse[:5]), (wanted[0][:5], wanted[1][:5]))
        assert out[5:].isnan().all() and lse[5:].isnan().all()


@pytest.mark.parametrize("op", ["build_schedule", *WITH_KEYS])
def test_checking_refuses_what_kernels_cannot_serve(kernels, op):
    ids = {"block_indices": torch.full((2, 11, 3), -1, dtype=torch.int32)}
    arguments = call(op) | (ids if "block_indices" in call(op) else {})
    message = "k_offset: got 12 for request 2; wanted multiples of block_size = 8: kernels serve shards of whole blocks"
    with pytest.raises(ValueError, match=re.escape(message)):
        OPERATORS[op](**arguments | BROKEN, check=True)
    if op in WITH_KEYS:
        OPERATORS[op](**arguments | BROKEN, check=True, backend="reference")
    OPERATORS[op](**arguments | {"k_offset": int32(16, 0, 8), "max_seqlen_k": 48}, check=True)


def test_checking_knows_blocks_behind_a_shard(kernels):
    arguments = call("sparse_attention") | {"k_offset": int32(0, 0, 0)}
    arguments["block_indices"] = torch.where(arguments["block_indices"] == 0, 7, arguments["block_indices"])
    ops.sparse_attention(**arguments, check=True)
    with pytest.raises(ValueError, match="block_indices: got id -2 at"):
        arguments["block_indices"][1, 7, 0] = -2
        ops.sparse_attention(**arguments, check=True)


@pytest.mark.parametrize("op", WITH_KEYS)
def test_a_table_holds_the_pages_of_a_shard_only(kernels, op):
    """max_seqlen_k counts the keys in front of it too."""
    arguments = paged(op) | {"k_offset": int32(80, 0, 160), "max_seqlen_k": 183}
    equal(OPERATORS[op](**arguments, check=True), OPERATORS[op](**arguments, backend="reference"))


def test_contents_at_the_ends_of_int32(kernels):
    """Nothing runs over into a visible position or block."""
    arguments = call("sparse_attention") | {"k_offset": int32(0, 0, 8), "max_seqlen_k": 31}
    arguments["q_positions"] = int32(0, 40, BIG.max, BIG.min, -1, BIG.min, BIG.max, 8, 7, -1, 20)
    arguments["block_indices"] = arguments["block_indices"].clone()
    arguments["block_indices"][:, ::2, 0] = BIG.min
    arguments["block_indices"][:, 1::2, 1] = BIG.max
    wanted = ops.sparse_attention(**arguments, return_lse=True, backend="reference")
    close(ops.sparse_attention(**arguments, return_lse=True), wanted, terms=TERMS)
    for op in ("index_score", "select_blocks", "topk_select"):
        arguments = call(op) | {name: arguments[name] for name in ("q_positions", "k_offset", "max_seqlen_k")}
        equal(OPERATORS[op](**arguments), OPERATORS[op](**arguments, backend="reference"))


def test_ids_are_counted_from_the_shard():
    where = Where(int32(0, 2, 3), k_offset=int32(16, 0))
    ids = int32(2, 0, 5, -1, 0, BIG.min, 3, BIG.max, 2, 1).view(1, 5, 2)
    found = shards.Shard(where, 5, BLOCK).local_ids(ids)
    assert found.flatten().tolist() == [0, -1, 3, -1, 0, -1, 3, BIG.max, 2, 1]


def test_a_schedule_belongs_to_its_shards(kernels):
    shard = {"k_offset": int32(0, 0, 8)}
    made, whole = (ops.build_schedule(**call("build_schedule") | where) for where in (shard, {}))
    with pytest.raises(ValueError, match="schedule: got one made with k_offset; wanted one made of the arguments of"):
        ops.sparse_attention(**call("sparse_attention"), schedule=made)
    with pytest.raises(ValueError, match="schedule: got one made without k_offset"):
        ops.sparse_attention(**call("sparse_attention") | shard, schedule=whole)


@pytest.mark.parametrize("op", [op for op in WITH_OFFSETS if op != "build_schedule"])
def test_no_kernel_is_asked_to_serve_an_offset(kernels, monkeypatch, op):
    """An operator that forgot to rewrite would be refused: no kernel serves k_offset."""

    def call_facts(op, where, *rest, **options):
        raise RuntimeError(f"{op} asks with k_offset {where.k_offset}")

    monkeypatch.setattr(lookup, "call_facts", call_facts)
    with pytest.raises(RuntimeError, match=f"{op} asks with k_offset None"):
        OPERATORS[op](**call(op) | {"k_offset": int32(0, 0, 8), "max_seqlen_k": 48})


def test_whole_requests_are_handed_on_as_they_are(kernels, monkeypatch):
    monkeypatch.setattr(shards.Shard, "__init__", lambda *_: pytest.fail("nothing to rewrite"))
    for op in WITH_KEYS:
        OPERATORS[op](**call(op))
        OPERATORS[op](**call(op) | BROKEN, backend="reference")


@pytest.mark.parametrize(("op", "served"), [("sparse_attention", True), ("topk_select", True), ("combine", False)])
def test_explain_knows_that_operators_rewrite_shards(op, served, capsys):
    assert cli.main(["explain", op, "--device", "sm90", "--feature", "k_offset"]) == (0 if served else 1)
    printed = capsys.readouterr().out
    assert ("k_offset: the operator hands its kernel the shard as a call of its own" in printed) == served
    assert ("does not serve k_offset" in printed) != served
