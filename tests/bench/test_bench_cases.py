"""Cases, floors and cells follow from the specs."""

from __future__ import annotations

import pytest

from msa_tiles.bench import cases
from msa_tiles.bench.operators import BENCHMARKS

H100 = "NVIDIA H100 80GB HBM3"


def test_case_names_are_the_ones_of_the_results():
    assert {"prefill_32k_u", "prefill_32k_s", "prefill_128k_u", "chunk8k_1m_u"} <= set(cases.labels("sparse_attention"))
    for op in ("select_blocks", "index_score", "topk_select"):
        assert {"prefill_32k_u", "prefill_128k_u", "chunk8k_1m_u"} <= set(cases.labels(op))
    whole = {f"prefill_{length}k_u" for length in (4, 8, 16, 32, 64, 128)}
    last = {"chunk512_100k_u", "chunk8k_32k_u", "chunk8k_128k_u", "chunk8k_512k_u", "chunk8k_1m_u"}
    assert whole | last == set(BENCHMARKS["prefill"].labels)


def test_the_sweep_has_lengths_beside_those_of_the_specs():
    assert "prefill_8k_s" in cases.labels("sparse_attention") and "chunk8k_512k_s" not in cases.labels(
        "sparse_attention"
    )
    assert "chunk8k_512k_u" not in cases.labels("topk_select") and "prefill_8k_u" in cases.labels("topk_select")
    case = cases.find("sparse_attention", "chunk8k_512k_u")
    assert (case.num_q, case.num_k, case.selection, case["max_blocks"]) == (8192, 524288, "uniform", 4096)
    assert cases.find("sparse_attention", "prefill_8k_s").selection == "sticky"


def test_cases_have_the_m3_shape():
    case = cases.find("sparse_attention", "prefill_128k_s")
    assert (case.num_q, case.num_k, case.selection) == (131072, 131072, "sticky")
    assert [case[d] for d in ("num_q_heads", "num_kv_heads", "head_dim", "block_size", "topk")] == [64, 4, 128, 128, 16]
    case = cases.find("select_blocks", "chunk8k_1m_u")
    assert (case.num_q, case.num_k, case.first_position) == (8192, 1048576, 1040384)
    assert [case[d] for d in ("num_index_heads", "head_dim", "topk")] == [4, 128, 16]


def test_an_unknown_case_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"--cases: select_blocks has no case 'prefill_1k'; it has prefill_4k_u,"):
        cases.find("select_blocks", "prefill_1k")


@pytest.mark.parametrize(
    ("op", "label", "ms"),
    [
        # Worked out by hand from 989.4 TFLOPS and 3.352 TB/s.
        ("select_blocks", "prefill_32k_u", 4 * 128 * 2 * (32768 * 32769 / 2) / 989.4e9),
        ("select_blocks", "prefill_128k_u", 4 * 128 * 2 * (131072 * 131073 / 2) / 989.4e9),
        ("sparse_attention", "prefill_128k_u", 4 * 64 * 128 * 128 * 16 * (131072 - 15 * 64) / 989.4e9),
        ("topk_select", "prefill_128k_u", (4 * 4 * 128 * 1024 * 1025 / 2 + 4 * 4 * 131072 * 16) / 3.352e9),
    ],
)
def test_floors_are_the_roofline(op, label, ms):
    assert cases.floor_ms([cases.work(op, label, "bf16")], H100) == pytest.approx(ms, rel=1e-6)


def test_a_card_is_found_by_the_name_cuda_gives_it_and_an_unknown_one_has_no_floor():
    assert cases.device_of(H100).name == H100
    assert cases.device_of("NVIDIA H200").memory_gb_per_s == 4800
    assert cases.device_of("NVIDIA GeForce RTX 4090") is None
    assert cases.floor_ms([cases.work("select_blocks", "prefill_32k_u", "bf16")], "NVIDIA GeForce RTX 4090") is None
