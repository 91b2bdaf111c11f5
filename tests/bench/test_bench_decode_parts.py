"""The steps of a decode step by themselves, on small CPU cases and the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles.bench import cases, peers, precisions
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.operators import BENCHMARKS, decode

CPU = torch.device("cpu")
CARD = "NVIDIA H100 80GB HBM3"
OPS = ("decode_score", "decode_topk", "sparse_decode", "batch_invariant_decode")


@pytest.fixture
def prepare(monkeypatch):
    """Three requests of eleven blocks, the last of them short."""
    monkeypatch.setattr(peers, "vllm_module", lambda: "no vllm here")
    point = {"group": 2, "num_kv_heads": 2, "num_index_heads": 2, "head_dim": 32, "block_size": 128, "topk": 4}

    def prepared(op: str, precision: str = "bf16"):
        case = BENCHMARKS[op].find("decode_128k_b1")
        assert case.op == op
        return BENCHMARKS[op].prepare(dataclasses.replace(case, batch=3, keys=1301, dims=point), CPU, precision)

    return prepared


@pytest.mark.parametrize("op", OPS)
def test_ours_passes_its_own_check_and_writes_the_same_buffer(prepare, op):
    bench = prepare(op)
    made = bench.make(0)
    call = bench.ours("reference", made)
    result = call()
    assert bench.check(made, result) is None
    assert call() is result


@pytest.mark.parametrize(
    ("op", "complaint"), [("decode_score", "scores are off"), ("sparse_decode", "outputs are off")]
)
@pytest.mark.parametrize("request_at_fault", [0, 2])
def test_wrong_numbers_are_noticed(prepare, op, complaint, request_at_fault):
    bench = prepare(op)
    made = bench.make(0)
    result = bench.ours("reference", made)().clone()
    wrong = result[:, request_at_fault] if op == "decode_score" else result[request_at_fault]
    wrong *= 1.05
    assert bench.check(made, result).startswith(f"request {request_at_fault}: {complaint}")


@pytest.mark.planted
def test_a_wrong_choice_is_noticed(prepare):
    bench = prepare("decode_topk")
    scores = bench.make(0)
    ids = bench.ours("reference", scores)()
    assert ids.shape == (2, 3, 4)
    for request in (0, 2):
        wrong = ids.clone()
        slot = int((wrong[1, request] != 10).nonzero()[0])
        wrong[1, request, slot] = int(scores[1, request, :10].argmin())
        assert bench.check(scores, wrong) == f"request {request}: blocks left out score higher than chosen ones"


def test_torch_is_checked_by_its_values(prepare):
    bench = prepare("decode_topk")
    scores = bench.make(0)
    [torch_peer] = bench.peers
    assert isinstance(torch_peer, Contender)
    values, ids = torch_peer.bind(scores)()
    assert torch_peer.check(scores, (values, ids)) is None
    assert torch_peer.check(scores, (values - 1, ids))


@pytest.mark.parametrize("precision", [name for name in (*precisions.INDEXER, *precisions.ATTENTION) if name != "bf16"])
def test_ours_takes_every_format(prepare, precision):
    op = "sparse_decode" if "kv" in precision else "decode_score"
    bench = prepare(op, precision)
    made = bench.make(0)
    result = bench.ours("reference", made)()
    assert bench.check(made, result) is None
    assert bench.check(made, result * 1.05)


@pytest.mark.parametrize("precision", ["q16kv4", "q16kvmx4"])
def test_fp8_is_a_peer_of_4_bits(prepare, precision):
    bench = prepare("sparse_decode", precision)
    made = bench.make(0)
    [own] = (peer for peer in bench.peers if peer.name == "fp8")
    assert isinstance(own, Contender)
    # The pool of e4m3 is drawn from the same values.
    assert own.check(made, bench.ours("reference", made)()) is not None
    assert own.check(made, own.bind(made)()) is None


@pytest.mark.parametrize("op", OPS)
def test_sets_differ(prepare, op):
    first, second = (tensors(prepare(op).make(seed)) for seed in (0, 1))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def tensors(made) -> list[torch.Tensor]:
    if made is None:
        return []
    if isinstance(made, torch.Tensor):
        return [made]
    return [tensor for field in dataclasses.fields(made) for tensor in tensors(getattr(made, field.name))]


def test_attention_draws_other_blocks_of_one_pool(prepare):
    """A pool of its own for every set would not fit where what a call reads is a small part of it."""
    bench = prepare("sparse_decode")
    first, second = bench.make(0), bench.make(1)
    assert first.x.cache is second.x.cache
    assert not torch.equal(first.ids, second.ids)
    assert bench.bytes_per_set == 4 * 3 * 2 * 4 * 128 * 32
    for ids in (first.ids, second.ids):
        assert (ids.diff(dim=-1) > 0).all() and (ids[..., -1] == 10).all() and (ids >= 0).all()


def test_scores_need_no_keys_and_values(prepare):
    assert prepare("decode_score").make(0).cache.numel() == 0


@pytest.mark.parametrize(
    ("op", "moved"),
    [
        ("decode_score", 2 * 32 * 131072 * 128),
        ("decode_topk", 4 * 4 * 32 * 1024),
        ("sparse_decode", 4 * 32 * 4 * 16 * 128 * 128),
    ],
)
def test_floors_are_bytes_at_full_bandwidth(op, moved):
    floor = cases.floor_ms(BENCHMARKS[op].work("decode_128k_b32", "bf16"), CARD)
    assert floor == pytest.approx(moved / 3.352e12 * 1e3)


def test_an_unknown_case_names_the_operator():
    with pytest.raises(ValueError, match="sparse_decode has no case 'decode_2m'"):
        BENCHMARKS["sparse_decode"].find("decode_2m")
    assert set(BENCHMARKS["sparse_decode"].labels) <= set(decode.BATCHES)


class Vllm:
    """vLLM's attention as the benchmark calls it, answered by the reference."""

    def minimax_m3_sparse_attn_decode(self, q, cache, ids, table, lengths, heads, scale, out, queries, **scales):
        assert scales == {"k_scale": None, "v_scale": None}
        assert heads == cache.shape[1] and queries == 1 and ids.stride() == (ids.shape[2], heads * ids.shape[2], 1)
        k, v = cache.chunk(2, -1)
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        where = {"cu_seqlens_q": starts, "page_table": table, "seqused_k": lengths}
        out.copy_(decode.reference.sparse_attention(q, k, v, ids, softmax_scale=scale, **where)[0])


def test_vllm_is_checked_like_ours(prepare, monkeypatch):
    monkeypatch.setattr(peers, "vllm_module", Vllm)
    bench = prepare("sparse_decode")
    made = bench.make(0)
    peer, own = bench.peers
    assert isinstance(own, Skipped)
    out = peer.bind(made)()
    assert peer.check(made, out) is None
    assert peer.check(made, out * 1.05)
