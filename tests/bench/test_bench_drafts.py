"""The benchmark of a step with drafts, on small CPU cases and the reference; for vLLM's operators ours by its names."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from msa_tiles.bench.operators import BENCHMARKS, decode, drafts
from msa_tiles.compat import vllm

CPU = torch.device("cpu")
SMALL = {"num_kv_heads": 2, "num_index_heads": 2, "group": 2, "head_dim": 128, "topk": 4}


def small(label: str) -> drafts.Case:
    """Three requests of 45 blocks, the last one short."""
    case = drafts.find(label)
    return dataclasses.replace(case, batch=3, keys=5701, dims={**case.dims, **SMALL})


@pytest.fixture(params=drafts.BENCHMARK.precisions)
def precision(request):
    return request.param


@pytest.mark.parametrize("label", ["drafts_32k_b8", "alike_32k_b64"])
@pytest.mark.drawn(1)
def test_ours_and_vllms_names_pass_the_check(label, precision):
    case = small(label)
    bench = drafts.prepare(case, CPU, precision)
    x = bench.make(0)
    assert len(x.q) == len(x.idx_q) == 12 and x.cu_seqlens_q.tolist() == [0, 4, 8, 12]
    for result in (bench.ours("reference", x)(), decode.of_vllm(case, vllm).bind(x)()):
        assert bench.check(x, result) is None
        ids, out = result
        for request in (0, 2):
            wrong = out.clone()
            wrong[4 * request + 3, 1] += 0.5
            assert bench.check(x, (ids, wrong)).startswith(f"request {request}: outputs are off by")
            wrong = ids.clone()
            wrong[1, 4 * request + 2] = torch.arange(4)
            assert bench.check(x, (wrong, out)).startswith(f"request {request}: ")


def test_alike_queries_share_blocks_and_others_do_not():
    """Of the 64 blocks that a request's queries select at 32K for each head, as SPREAD's docstring says."""

    def distinct(label: str) -> float:
        case = dataclasses.replace(drafts.find(label), batch=2)
        x = drafts.make(dataclasses.replace(case, dims={**case.dims, "num_kv_heads": 0}), CPU, "bf16", 0)
        scores = torch.stack([decode.scores_of(x, request, case.queries) for request in range(2)])
        best = scores.topk(case["topk"], -1).indices.flatten(2).flatten(0, 1)  # [requests x heads, 64]
        return sum(len(set(row.tolist())) for row in best) / len(best)

    assert 18 < distinct("alike_32k_b8") < 30
    assert 52 < distinct("drafts_32k_b8") < 62


def test_cases_differ_in_nothing_but_likeness():
    assert BENCHMARKS["drafts"] is drafts.BENCHMARK
    for label in drafts.LABELS:
        case = drafts.find(label)
        assert (case.label, case.op, case.queries, case.keys) == (label, "drafts", 4, 32768)
        assert case.alike == label.startswith("alike_") and f"_b{case.batch}" in label
    with pytest.raises(ValueError, match="drafts has no case 'decode_32k_b8'; it has drafts_32k_b8, "):
        drafts.find("decode_32k_b8")


def test_the_floor_has_the_bytes_of_one_query_and_the_products_of_all():
    (score, attention), one = drafts.work("drafts_32k_b8", "bf16"), decode.find("decode_32k_b8")
    assert (score.bytes, attention.bytes) == tuple(part.bytes for part in decode.step_work(one, "bf16"))
    assert (score.flops, attention.flops) == tuple(4 * part.flops for part in decode.step_work(one, "bf16"))
