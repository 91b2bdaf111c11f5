"""A layer's step as vLLM calls it: ours, and ours by vLLM's names, on small CPU cases; vLLM's own needs a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles import ops
from msa_tiles.bench import cases, session
from msa_tiles.bench.harness import Contender, Skipped
from msa_tiles.bench.operators import BENCHMARKS, decode, servers

CPU = torch.device("cpu")
SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "num_index_heads": 2, "group": 2, "head_dim": 128, "topk": 4}
PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "q8k8+q16kv8"])
find = cases.find


@pytest.fixture
def benches(monkeypatch):
    """Both with few heads, and the last 300 of 1000 tokens, or two requests of 700 keys."""

    def shrunk(op: str, label: str) -> cases.Case:
        case = find(op, label)
        dims = {name: SMALL.get(name, value) for name, value in case.dims.items()}
        return dataclasses.replace(case, num_q=300, num_k=1000, dims=dims)

    monkeypatch.setattr(cases, "find", shrunk)
    monkeypatch.setitem(decode.BATCHES, "decode_8k_b8", (2, 700))

    def prepare(op: str, precision: str):
        label = {servers.PREFILL: "prefill_32k_u", servers.DECODE: "decode_8k_b8"}[op]
        case = BENCHMARKS[op].find(label)
        assert case.op == op and case.label == label
        if op == servers.DECODE:
            case = dataclasses.replace(case, dims={**case.dims, **SMALL})
        return BENCHMARKS[op].prepare(case, CPU, precision)

    return prepare


@PRECISIONS
@pytest.mark.parametrize("op", [servers.PREFILL, servers.DECODE])
@pytest.mark.drawn(2)
def test_ours_and_ours_by_name_pass_the_check(benches, monkeypatch, op, precision):
    bench = benches(op, precision)
    made = bench.make(0)
    named = {peer.name: peer for peer in bench.peers}
    assert set(named) == {"vllm", "by_name"} <= set(session.PEERS) and isinstance(named["vllm"], (Skipped, Contender))
    assert bench.check(made, bench.ours("reference", made)()) is None
    assert named["by_name"].check(made, named["by_name"].bind(made)()) is None
    ids, out = bench.ours("reference", made)()
    assert bench.check(made, (ids, out + 0.5))


@pytest.mark.parametrize("op", [servers.PREFILL, servers.DECODE])
def test_calls_run_on_the_dsl_that_is_named(benches, monkeypatch, op):
    """As the plugin calls them: nothing but these operators."""
    called = []
    for name in ("select_blocks", "sparse_attention", "msa_decode"):
        monkeypatch.setattr(ops, name, lambda *given, _name=name, **named: called.append((_name, named["backend"])))
    bench = benches(op, "bf16")
    bench.ours("cutedsl", bench.make(0))()
    wanted = ["msa_decode"] if op == servers.DECODE else ["select_blocks", "sparse_attention"]
    assert called == [(name, "cutedsl") for name in wanted]
