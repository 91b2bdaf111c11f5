"""Cases of FP8: our calls, FlashInfer's operators as the benchmark calls them, and how selections agree."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from msa_tiles import reference
from msa_tiles.bench import agreement, cases, flashinfer_peer, peers
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.operators import BENCHMARKS, decode
from msa_tiles.cli import main

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
SMALL = {"num_kv_heads": 2, "num_q_heads": 4, "group": 2, "num_index_heads": 2, "heads_per_group": 1}
find = cases.find


def shrunk(op: str, label: str) -> cases.Case:
    """The case with the last 300 of 3000 tokens and few heads."""
    case = find(op, label)
    dims = {name: SMALL.get(name, value) for name, value in case.dims.items()}
    return dataclasses.replace(case, num_q=300, num_k=3000, dims=dims)


@pytest.fixture
def prepared(monkeypatch):
    monkeypatch.setattr(cases, "find", shrunk)
    monkeypatch.setattr(flashinfer_peer, "optional_function", lambda module, name: getattr(FlashInfer, name))
    monkeypatch.setattr(peers, "vllm_module", lambda: "no vllm here")
    monkeypatch.setattr(peers, "flash_attention_4", lambda: "no flash_attn here")

    def prepare(op: str, label: str, precision: str):
        if op == "msa_decode":
            case = dataclasses.replace(decode.find(label), batch=int(label.rpartition("b")[2]), keys=3000)
            case = dataclasses.replace(case, dims={**case.dims, "group": 2, "num_kv_heads": 2, "num_index_heads": 2})
        else:
            case = BENCHMARKS[op].find(label) if op == "prefill" else shrunk(op, label)
        return BENCHMARKS[op].prepare(case, CPU, precision)

    return prepare


class FlashInfer:
    """What it takes and gives, answered by the reference."""

    @staticmethod
    def msa_proxy_score(q, k, cu_seqlens_q, *, page_table, seqused_k, max_seqlen_q, max_k_tiles, output):
        assert q.dtype == k.dtype == FP8 and k.shape[1:] == (1, 128, 128) and q.is_contiguous()
        assert output.shape == (q.shape[1], max_k_tiles, q.shape[0]) and output.is_contiguous()
        where = {"cu_seqlens_q": cu_seqlens_q, "page_table": page_table, "seqused_k": seqused_k}
        scores = reference.index_score(q.float(), k[:, 0].float(), num_blocks=max_k_tiles, **where)
        return output.copy_(scores.transpose(1, 2))

    @staticmethod
    def msa_topk_select(max_score, topk, *, num_valid_pages, output, force_end_blocks):
        heads, _, total_q = max_score.shape
        assert max_score.is_contiguous() and output.is_contiguous() and output.shape == (total_q, heads, topk)
        assert (topk, force_end_blocks, num_valid_pages.shape) == (16, 1, (total_q,)) and total_q > 1
        chosen = reference.topk_select(max_score.transpose(1, 2), topk, num_valid_blocks=num_valid_pages)
        return output.copy_(chosen.transpose(0, 1))

    @staticmethod
    def msa_sparse_attention(q, k, v, ids, cu_seqlens_q, *, causal, page_table, seqused_k, out):
        assert causal and ids.is_contiguous() and q.dtype == torch.bfloat16 and k.dtype == v.dtype == FP8
        assert k.shape[2:] == (128, 128) and k.stride() == v.stride() and ids.shape[2] == 16
        where = {"cu_seqlens_q": cu_seqlens_q, "page_table": page_table, "seqused_k": seqused_k}
        return out.copy_(reference.sparse_attention(q.float(), k.float(), v.float(), ids, **where)[0])

    @staticmethod
    def msa_sparse_decode_attention(q, k, v, ids, *, page_table, seqused_k, seqlen_q, out):
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        assert seqlen_q == 1 and len(seqused_k) == len(q)
        attend = functools.partial(FlashInfer.msa_sparse_attention, q, k, v, ids, starts, causal=True)
        return attend(page_table=page_table, seqused_k=seqused_k, out=out)


FOUR_BITS = [
    ("index_score", "q16k4"),
    ("index_score", "q8kmx4"),
    ("select_blocks", "q8k4"),
    ("sparse_attention", "q16kv4"),
    ("sparse_attention", "q16kvmx4"),
    ("prefill", "q16k4+q16kv8"),
]


@pytest.mark.parametrize(("op", "precision"), FOUR_BITS)
@pytest.mark.drawn(3)
def test_ours_takes_4_bits_in_prefill_and_peers_do_not(op, precision, prepared, monkeypatch):
    monkeypatch.setattr(peers, "vllm_module", lambda: FlashInfer)
    bench = prepared(op, "prefill_32k_u", precision)
    made = bench.make(0)
    assert bench.check(made, bench.ours("reference", made)()) is None
    by_name = {peer.name: peer for peer in bench.peers}
    for name in ("vllm", "flashinfer"):
        assert isinstance(by_name[name], Skipped)
    if op == "sparse_attention":
        own = by_name["fp8"]
        assert isinstance(own, Contender) and own.check(made, own.bind(made)()) is None
        assert isinstance(by_name["bf16"], Contender), "what 4 bits cost beside 16"


CASES = [
    ("index_score", "prefill_32k_u", "q8k8"),
    ("select_blocks", "prefill_32k_u", "q8k8"),
    ("topk_select", "prefill_32k_u", "bf16"),
    ("sparse_attention", "prefill_32k_s", "q16kv8"),
    ("prefill", "prefill_32k_u", "q8k8+q16kv8"),
    ("msa_decode", "decode_128k_b8", "q8k8+q16kv8"),
    ("msa_decode", "decode_128k_b1", "q8k8+q16kv8"),
]


@pytest.mark.parametrize(("op", "label", "precision"), CASES)
@pytest.mark.drawn(3)
def test_ours_and_flashinfer_pass_their_own_checks(op, label, precision, prepared):
    bench = prepared(op, label, precision)
    made = bench.make(0)
    assert bench.check(made, bench.ours("reference", made)()) is None
    (contender,) = (peer for peer in bench.peers if peer.name == "flashinfer")
    assert isinstance(contender, Contender)
    result = contender.bind(made)()
    assert contender.check(made, result) is None
    *rest, last = result if isinstance(result, tuple) else (result,)
    wrong = last + 1 if last.dtype == torch.int32 else last * 1.05
    assert contender.check(made, (*rest, wrong) if rest else wrong)


@pytest.mark.parametrize(("op", "label"), [("select_blocks", "prefill_32k_u"), ("msa_decode", "decode_128k_b8")])
def test_what_flashinfer_does_not_take_is_skipped(op, label, prepared, monkeypatch):
    def reason(precision: str) -> str:
        (peer,) = (peer for peer in prepared(op, label, precision).peers if peer.name == "flashinfer")
        assert isinstance(peer, Skipped)
        return peer.reason

    assert reason("bf16") == "on Hopper it takes keys of e4m3 only"
    monkeypatch.setattr(flashinfer_peer, "optional_function", lambda module, name: f"{module}: not installed")
    assert reason(BENCHMARKS[op].precisions[1]) == "flashinfer.msa_ops: not installed"


def test_our_bf16_is_a_peer_of_fp8_attention_alone(prepared):
    bench = prepared("sparse_attention", "prefill_32k_s", "q16kv8")
    (own,) = (peer for peer in bench.peers if peer.name == "bf16")
    made = bench.make(0)
    assert made.k.dtype == FP8 and own.check(made, own.bind(made)()) is None
    (own,) = (peer for peer in prepared("sparse_attention", "prefill_32k_s", "bf16").peers if peer.name == "bf16")
    assert isinstance(own, Skipped)


def test_selections_from_e4m3_mostly_agree(capsys, monkeypatch):
    shares = {kind: agreement.agreement(kind, 4096, CPU) for kind in agreement.KINDS}
    assert all(0.9 < share < 1.0 for share in shares.values())
    assert agreement.agreement("gaussian", 1024, CPU) == 1.0, "all blocks are chosen"
    monkeypatch.setattr(agreement, "table", functools.partial(agreement.table, lengths=(2048,)))
    assert main(["bench", "--agreement"]) == 0
    shown = capsys.readouterr().out
    assert "gaussian" in shown and "outliers" in shown and "2048" in shown
