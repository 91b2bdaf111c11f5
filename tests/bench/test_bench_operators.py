"""Every benchmark's inputs, calls and checks, on small CPU cases and the reference; GPU-only baselines are left out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles.bench import cases, checks, inputs, peers
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.operators import BENCHMARKS

CPU = torch.device("cpu")
SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "num_index_heads": 2, "group": 2, "head_dim": 64, "block_size": 64}
BENCHES = {
    "index_score": "prefill_32k_u",
    "topk_select": "prefill_32k_u",
    "select_blocks": "prefill_32k_u",
    "build_schedule": "prefill_32k_u",
    "sparse_attention": "prefill_32k_s",
    "combine": "prefill_4k",
    "prefill": "prefill_32k_u",
    "sparse_attention_backward": "train_32k_s",
    "index_kl": "train_32k_s",
    "msa_attention": "train_32k",
    "append_kv": "prefill_8k",
    "batch_invariant_attention": "prefill_32k_s",
    "append_index": "prefill_8k",
    "norm_rope_append": "prefill_8k",
}
# Of several operators; each makes its case out of theirs.
WHOLE = ("prefill", "msa_attention", "batch_invariant_attention")
find = cases.find


def shrunk(op: str, label: str) -> cases.Case:
    """The case with the last 300 of 1000 tokens and few heads."""
    case = find(op, label)
    dims = {name: SMALL.get(name, value) for name, value in case.dims.items()} | {"topk": 5, "num_splits": 3}
    return dataclasses.replace(case, num_q=300, num_k=1000, dims=dims)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cases, "find", shrunk)

    def prepare(op: str, precision: str = "bf16"):
        case = BENCHMARKS[op].find(BENCHES[op]) if op in WHOLE else shrunk(op, BENCHES[op])
        return BENCHMARKS[op].prepare(case, CPU, precision)

    return prepare


@pytest.mark.parametrize("op", BENCHES)
@pytest.mark.drawn(7)
def test_ours_and_torch_baselines_pass_their_own_checks(small, op):
    bench = small(op)
    made = bench.make(0)
    runnable = [peer for peer in bench.peers if isinstance(peer, Contender) and peer.name == "torch"]
    assert bench.check(made, bench.ours("reference", made)()) is None
    for contender in runnable:
        assert contender.check(made, contender.bind(made)()) is None


@pytest.mark.parametrize(("op", "precision"), [("append_kv", "q16kv4"), ("append_kv", "q16kvmx4"),
                                               ("append_index", "q16k4"), ("append_index", "q16kmx4")])  # fmt: skip
def test_caches_of_4_bits(small, op, precision):
    bench = small(op, precision)
    made = bench.make(0)
    written = bench.ours("reference", made)()
    assert bench.check(made, written) is None
    written[0].data[:] = 0
    assert "are others" in bench.check(made, written)
    assert all(isinstance(peer, Skipped) for peer in bench.peers)


@pytest.mark.parametrize("precision", ["q16kv8", "q16kv4", "q16kvmx4"])
def test_turned_rows_in_quantised_caches(small, precision):
    bench = small("norm_rope_append", precision)
    made = bench.make(0)
    [of_torch] = bench.peers
    for call in (bench.ours("reference", made), of_torch.bind(made)):
        assert bench.check(made, call()) is None
    made.queries[0][150:] *= 1.02
    assert "tensor 0" in bench.check(made, made.written)


@pytest.mark.parametrize("precision", ["q16kv8", "q16kv4", "q16kvmx4"])
def test_dequantised_caches(precision):
    bench = BENCHMARKS["dequantize_kv"].prepare(shrunk("dequantize_kv", "prefill_8k"), CPU, precision)
    made = bench.make(0)
    k, v = bench.ours("reference", made)()
    assert bench.check(made, (k, v)) is None
    [of_torch] = bench.peers
    assert of_torch.check(made, of_torch.bind(made)()) is None
    v[999] += 1
    assert "are others" in bench.check(made, (k, v))


def test_select_blocks_on_fp8(small):
    bench = small("select_blocks", "q8k8")
    made = bench.make(0)
    assert made.idx_q.dtype == made.idx_k.dtype == torch.float8_e4m3fn
    assert made.idx_q.nbytes + made.idx_k.nbytes == bench.bytes_per_set
    result = bench.ours("reference", made)()
    assert bench.check(made, result) is None
    assert bench.check(made, _spoil(result))


@pytest.mark.parametrize("op", BENCHES)
def test_sets_differ_and_their_size_is_told(small, op):
    bench = small(op)
    first, second = (_tensors(bench.make(seed)) for seed in (0, 1))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    assert 0.5 * bench.bytes_per_set <= size <= 1.5 * bench.bytes_per_set


def _tensors(made) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    parts = made if isinstance(made, tuple) else [getattr(made, f.name) for f in dataclasses.fields(made)]
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize("op", [op for op in BENCHES if op != "build_schedule"])
@pytest.mark.drawn(7)
def test_checks_notice_a_wrong_result(small, op):
    bench = small(op)
    made = bench.make(0)
    result = bench.ours("reference", made)()
    wrong = _spoil(result)
    assert bench.check(made, wrong)


def test_a_peer_that_selects_by_itself_is_mostly_right(small):
    case = BENCHMARKS["msa_attention"].find("train_32k")
    bench = small("msa_attention")
    made = bench.make(0)
    out, _, _, dq, *_ = bench.ours("reference", made)()
    assert checks.mostly_trained(case, 5, made, (out, dq)) is None
    assert "outputs" in checks.mostly_trained(case, 5, made, (out * 1.05, dq))
    assert "dq" in checks.mostly_trained(case, 5, made, (out, dq * 1.05))
    half = torch.where(torch.arange(len(out))[:, None, None] % 2 == 0, out, 0.0)
    assert "outputs" in checks.mostly_trained(case, 5, made, (half, dq))


def _spoil(result):
    if isinstance(result, tuple):
        # The index KL answers with a loss first, which its check only looks at; what follows is what it compares.
        at = 1 if result[0].ndim == 0 else 0
        return (*result[:at], _spoil(result[at]), *result[at + 1 :])
    if result.dtype == torch.int32:
        # Another block in the place of one that was chosen, the own block left in.
        return torch.cat([result[..., 1:2], result[..., 1:]], dim=-1)
    return result * 1.05


def ids_case(scores: list[float], ids: list[int], local_blocks: int = 1) -> str | None:
    """One row at the end of `len(scores)` blocks of 64."""
    blocks = len(scores)
    case = dataclasses.replace(shrunk("select_blocks", "prefill_32k_u"), num_q=1, num_k=64 * blocks)
    found = torch.tensor(ids, dtype=torch.int32).view(1, 1, -1)
    return checks.ids_by_score(case, torch.tensor(scores).view(1, 1, -1), torch.tensor([0]), found, local_blocks)


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([1, 2, 4], None),
        ([4, 2, 1], None),
        ([0, 1, 4], "score higher"),
        ([1, 2, 3], "lack their own block"),
        ([1, 4, 4], "twice"),
        ([1, 4, -1], "min(k, visible blocks)"),
        ([1, 2, 5], "behind the query"),
    ],
)
def test_selection_check_knows_right_from_wrong(ids, complaint):
    said = ids_case([1.0, 5.0, 4.0, 3.0, 0.0], ids)
    assert said is None if complaint is None else complaint in said


def test_selection_check_lets_equal_scores_go_either_way():
    assert ids_case([1.0, 5.0, 5.0, 0.0], [1, 3]) is None
    assert ids_case([1.0, 5.0, 5.0, 0.0], [2, 3]) is None


def test_dense_check_is_causal_attention():
    case = shrunk("sparse_attention", "prefill_32k_u")
    made = inputs.attention(case, CPU, 0)
    keys, values = (x.repeat_interleave(2, dim=1).transpose(0, 1)[None].float() for x in (made.k, made.v))
    mask = torch.ones(300, 1000, dtype=torch.bool).tril(700)
    out = torch.nn.functional.scaled_dot_product_attention(
        made.q.transpose(0, 1)[None].float(), keys, values, attn_mask=mask
    )[0].transpose(0, 1)
    assert checks.dense(case, made, out) is None
    assert "off by" in checks.dense(case, made, out * 1.05)


def test_vllm_layouts():
    k, v = torch.randn(2, 300, 2, 64)
    cache = peers.interleaved_cache(k, v)
    assert cache.shape == (3, 2, 128, 128)
    for token, head in ((0, 0), (127, 1), (128, 0), (299, 1)):
        assert torch.equal(cache[token // 128, head, token % 128], torch.cat([k[token, head], v[token, head]]))
    assert torch.equal(peers.paged(k[:, 0])[1, 5], k[133, 0])
    ids = torch.arange(24).view(2, 3, 4)
    stored = peers.token_major(ids)
    assert torch.equal(stored, ids) and stored.stride() == (4, 8, 1)


def test_absent_peers_are_skipped_with_what_was_tried(monkeypatch):
    monkeypatch.setattr(peers, "VLLM_MODULES", ("no_such_vllm.ops", "no_such_ops"))
    peers.vllm_module.cache_clear()
    skipped = peers.vllm_attention(dataclasses.replace(find("sparse_attention", "prefill_32k_u")))
    peers.vllm_module.cache_clear()
    assert isinstance(skipped, Skipped) and skipped.name == "vllm"
    assert "no_such_vllm" in skipped.reason and "no_such_ops" in skipped.reason


def test_cudnn_is_not_compared_where_its_mask_is_another():
    skipped = peers.cudnn_dense(find("sparse_attention", "chunk8k_1m_u"))
    assert isinstance(skipped, Skipped) and "aligned to the first key" in skipped.reason
