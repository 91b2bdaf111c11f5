"""The benchmark of a whole decode step, on small CPU cases and the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles import quant
from msa_tiles.bench import cases, inputs, peers, precisions
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.operators import decode as bench

CPU = torch.device("cpu")
CARD = "NVIDIA H100 80GB HBM3"
BENCHMARK_PRECISIONS = bench.BENCHMARK.precisions


@pytest.fixture
def case():
    """Three requests of eleven blocks, the last of them short."""
    point = {"group": 2, "num_kv_heads": 2, "num_index_heads": 2, "head_dim": 32, "block_size": 128, "topk": 4}
    return dataclasses.replace(bench.find("decode_128k_b8"), batch=3, keys=1301, dims=point)


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setattr(peers, "vllm_module", lambda: "no vllm here")
    monkeypatch.setattr(peers, "flash_attention_4", lambda: "no flash_attn here")


@pytest.fixture(params=BENCHMARK_PRECISIONS)
def prepared(case, no_peers, request):
    return bench.prepare(case, CPU, request.param)


@pytest.fixture
def made(prepared):
    return prepared.make(0)


def test_find():
    for label, (batch, keys) in bench.BATCHES.items():
        found = bench.find(label)
        assert (found.op, found.label, found.batch, found.keys) == ("msa_decode", label, batch, keys)
        assert found.pages * bench.PAGE == keys
    assert bench.find("decode_1m_b8").keys == 1 << 20 and bench.find("decode_1m_b8")["topk"] == 16
    with pytest.raises(ValueError, match="msa_decode has no case 'decode_2m'; it has decode_8k_b8, "):
        bench.find("decode_2m")


def test_inputs_are_paged_caches_of_every_request(case, made):
    assert case.pages == 11
    assert sorted(made.page_table.flatten().tolist()) == list(range(33))
    assert made.k.shape == made.v.shape == (33, 2, 128, 32) and made.index_cache.shape == (33, 128, 32)
    if isinstance(made.k, torch.Tensor):
        assert made.cache.shape == (33, 2, 128, 64)
    assert made.q.shape == (3, 4, 32) and made.idx_q.shape == (3, 2, 32)
    assert made.seq_lens.tolist() == [1301] * 3 and made.cu_seqlens_q.tolist() == [0, 1, 2, 3]


def test_sets_differ(prepared, made):
    other = prepared.make(1)
    again = prepared.make(0)
    for name in (field.name for field in dataclasses.fields(made) if getattr(made, field.name) is not None):
        mine, theirs, repeated = (inputs.wide(getattr(each, name)) for each in (made, other, again))
        assert torch.equal(mine, theirs) == (name in ("seq_lens", "cu_seqlens_q", "scale") or not mine.numel()), name
        assert torch.equal(mine, repeated)


def test_ours_passes_its_own_check(prepared, made):
    call = prepared.ours("reference", made)
    ids, out = call()
    assert ids.shape == (2, 3, 4) and out.shape == (3, 4, 32)
    assert prepared.check(made, (ids, out)) is None
    assert call()[1] is out, "every call writes the same buffers"


def test_bench_of_a_case(prepared, made):
    keys = made.index_cache
    size = keys.itemsize if isinstance(keys, torch.Tensor) else 0.5 + 1 / quant.GROUPS[keys.format].size
    assert prepared.bytes_per_set == size * 3 * 1301 * 32, "the index keys are what every call reads"
    assert [peer.name for peer in prepared.peers] == ["vllm", "flashinfer", "fp8_index", "fa4", "dense_bytes"]


@pytest.mark.parametrize(
    ("precision", "index_size", "size"),
    [
        ("bf16", 2, 2),
        ("q8k8+q16kv8", 1, 1),
        ("q16k4+q16kv8", 0.5625, 1),
        ("bf16+q16kv4", 2, 0.5625),
        ("q8kmx4+q16kvmx4", 0.53125, 0.53125),
    ],
)
def test_the_floor_reads_index_keys_and_selected_blocks_once(precision, index_size, size):
    index, selected = 32 * 131072 * 128, 2 * 32 * 4 * 16 * 128 * 128
    memory = cases.device_of(CARD).memory_gb_per_s
    floor = cases.floor_ms(bench.work("decode_128k_b32", precision), CARD)
    assert floor == pytest.approx((index_size * index + size * selected) / (memory * 1e9) * 1e3)


def test_dense_attention_is_checked_over_all_keys(case, made, monkeypatch):
    """Keys in contiguous rows, the pages of each request in its own order."""

    def attend(q, k, v, causal):
        assert q.shape == (3, 1, 4, 32) and k.shape == v.shape == (3, 11 * 128, 2, 32) and not causal
        keys, values = (x[:, :1301].repeat_interleave(2, dim=2).transpose(1, 2).float() for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2).float(), keys, values)
        return out.transpose(1, 2), None

    monkeypatch.setattr(peers, "flash_attention_4", lambda: attend)
    contender = bench.fa4_dense(case)
    out = contender.bind(made)()
    assert out.shape == (3, 4, 32)
    assert contender.check(made, out) is None
    assert contender.check(made, out.roll(1, 0)).startswith("request 0: outputs are off by")
    assert bench.fa4_dense(bench.find("decode_1m_b8")) == Skipped("fa4", "the keys have 2**31 elements or more")


def other_block(row):
    """A block that a row of ids has not, and that is not the last one."""
    return next(block for block in range(10) if block not in row)


def test_a_wrong_id_is_noticed(case, prepared, made):
    ids, out = prepared.ours("reference", made)()
    for request in (0, case.batch - 1):
        worst = ids.clone()
        slot = int((worst[1, request] != 10).nonzero()[0])
        scores = bench.reference.index_score(
            made.idx_q[request : request + 1],
            inputs.wide(made.index_cache),
            block_size=bench.PAGE,
            page_table=made.page_table[request : request + 1],
            seqused_k=made.seq_lens[request : request + 1],
        )[1, 0]
        worst[1, request, slot] = int(scores[:10].argmin())
        assert "score higher" in bench.check(case, made, (worst, out))
        assert f"request {request}: " in bench.check(case, made, (worst, out))
        for value in (-1, 11, int(ids[1, request, 1])):
            wrong = ids.clone()
            wrong[1, request, 0] = value
            assert "not distinct blocks" in bench.check(case, made, (wrong, out))
        wrong = ids.clone()
        last = int((wrong[0, request] == 10).nonzero()[0])
        wrong[0, request, last] = other_block(wrong[0, request].tolist())
        assert "the last block is missing" in bench.check(case, made, (wrong, out))


def test_a_wrong_output_is_noticed(case, prepared, made):
    ids, out = prepared.ours("reference", made)()
    assert "off by" in bench.check(case, made, (ids, out * 1.05))
    for request in (0, case.batch - 1):
        wrong = out.clone()
        wrong[request, 1] = wrong[request, 0]
        assert bench.check(case, made, (ids, wrong)).startswith(f"request {request}: outputs are off by")


def test_equal_scores_may_go_either_way():
    scores = torch.tensor([[1.0, 5.0, 5.0, 0.0]])
    for chosen in ([1, 3], [2, 3], [3, 2]):
        assert bench.ranked(scores, torch.tensor([chosen], dtype=torch.int32), 2, bench.SCORE_SLACK) is None
    assert "score higher" in bench.ranked(scores, torch.tensor([[0, 3]], dtype=torch.int32), 2, bench.SCORE_SLACK)


def test_dense_bytes_moves_as_much_as_the_cache_holds(case, made):
    contender = bench.dense_bytes(case)
    if not isinstance(made.k, torch.Tensor):
        call = contender.bind(made)
        inverted = next(cell.cell_contents for cell in call.__closure__ if torch.is_tensor(cell.cell_contents))
        call()
        assert (inverted == -1).all() and 2 * inverted.nbytes == 2 * 2 * 33 * 2 * 128 * 32
        return
    before, after = (cache.view(-1).view(torch.int32) for cache in (made.cache.clone(), made.cache))
    contender.bind(made)()
    half = before.numel() // 2
    if made.scale is None:
        assert torch.equal(after[:half], ~before[half : 2 * half]) and torch.equal(after[half:], before[half:])
    else:
        assert torch.equal(after, ~before)
    assert contender.check(made, None) is None


@pytest.mark.parametrize("pair", precisions.OTHER_PAIRS)
@pytest.mark.drawn(6)
def test_any_index_format_goes_with_any_format_of_keys_and_values(pair, case, no_peers):
    prepared = bench.prepare(case, CPU, pair)
    made = prepared.make(0)
    index, attention = precisions.halves(pair)
    for stored, precision, role in ((made.index_cache, index, "index_key"), (made.k, attention, "key_value")):
        form = precisions.stored(precision, role)
        name = stored.format if isinstance(stored, quant.QuantizedTensor) else str(stored.dtype)
        assert name.endswith(form.name if form.bits == 4 else form.storage)
    assert made.idx_q.dtype == (quant.FP8 if index.startswith("q8") else torch.bfloat16)
    assert prepared.check(made, prepared.ours("reference", made)()) is None


def test_the_pairs_are_all_combinations():
    pairs = {precisions.halves(name) for name in (*precisions.BOTH, *precisions.OTHER_PAIRS)}
    assert pairs == {(a, b) for a in precisions.INDEXER for b in precisions.ATTENTION}
    assert bench.BENCHMARK.precisions == precisions.BOTH and bench.BENCHMARK.on_request == precisions.OTHER_PAIRS
    assert precisions.part("sparse_decode", "bf16+q16kv4") == "q16kv4"
    assert precisions.part("decode_score", "bf16+q16kv4") == precisions.part("decode_topk", "q8k8") == "bf16"


def test_nvfp4_keys_and_values_are_vllms_pages(case):
    made = bench.make(case, CPU, "q16kv4", 0)
    assert made.cache.dtype == torch.uint8 and made.cache.shape == (33, 4, 128, 18)
    views = quant.vllm_pages(made.cache, made.k.global_scale, made.v.global_scale)
    assert (made.k.data.data_ptr(), made.v.scale.data_ptr()) == (views.k.data.data_ptr(), views.v.scale.data_ptr())
    assert (made.k.layout, made.v.layout) == ("linear", "interleaved")


def test_an_fp8_index_is_a_peer_of_an_index_of_4_bits(case, no_peers):
    def peer(precision: str):
        return next(p for p in bench.prepare(case, CPU, precision).peers if p.name == "fp8_index")

    made = bench.make(case, CPU, "q16k4+q16kv8", 0)
    contender = peer("q16k4+q16kv8")
    ids, out = bench.ours(case, "reference", made)()
    assert isinstance(contender, Contender) and contender.check(made, contender.bind(made)()) is None
    assert contender.check(made, (ids, out * 1.05))
    assert isinstance(peer("q8k8+q16kv8"), Skipped)


def test_vllm_takes_no_keys_of_4_bits(case, monkeypatch):
    monkeypatch.setattr(peers, "vllm_module", Vllm)
    for precision, reason in (("q16k4+q16kv8", "nvfp4"), ("q8k8+q16kvmx4", "mxfp4")):
        assert bench.prepare(case, CPU, precision).peers[0] == Skipped("vllm", f"it takes no keys of {reason}")


class Vllm:
    """The two operators as the benchmark calls them, answered by the reference."""

    def minimax_m3_index_decode(self, idx_q, cache, table, lengths, most, topk, init, local, heads, a, b, out):
        assert (init, local, a, b) == (0, 1, 1, 1) and most >= int(lengths.max())
        starts = torch.arange(len(idx_q) + 1, dtype=torch.int32)
        where = {"cu_seqlens_q": starts, "page_table": table, "seqused_k": lengths}
        idx_q, cache = inputs.wide(idx_q), inputs.wide(cache)
        chosen = bench.reference.select_blocks(idx_q, cache, topk, num_kv_heads=heads, **where)
        out.copy_(chosen)
        return out

    def minimax_m3_sparse_attn_decode(self, q, cache, ids, table, lengths, heads, scale, out, queries, **scales):
        assert heads == cache.shape[1] and queries == 1
        assert [x is None for x in scales.values()] == 2 * [cache.dtype == torch.bfloat16]
        k, v = inputs.wide(cache).chunk(2, -1)
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        where = {"cu_seqlens_q": starts, "page_table": table, "seqused_k": lengths}
        out.copy_(bench.reference.sparse_attention(q, k, v, ids, softmax_scale=scale, **where)[0])


@pytest.mark.parametrize("precision", precisions.SERVED)
def test_vllm_is_checked_like_ours(case, precision, monkeypatch):
    made = bench.make(case, CPU, precision, 0)
    monkeypatch.setattr(peers, "vllm_module", Vllm)
    contender = bench.vllm(case)
    assert isinstance(contender, Contender)
    ids, out = contender.bind(made)()
    assert contender.check(made, (ids, out)) is None
    assert contender.check(made, (ids, out * 1.05))


def test_vllm_is_skipped_where_it_is_absent(case, monkeypatch):
    monkeypatch.setattr(peers, "vllm_module", lambda: "no vllm here")
    assert bench.vllm(case) == Skipped("vllm", "no vllm here")
