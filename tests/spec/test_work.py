"""The sums that rooflines use, against counting one query at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_tiles import paths
from msa_tiles.spec import Workload, dims_of, floor_ms, load, quantities_of

SPECS = load(paths.specs_dir())
BF16 = SPECS.precisions["bf16"]
lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=4)


def workload_of(op: str, **changes: object) -> Workload:
    return replace(SPECS.operators[op].verify[0], **changes)  # type: ignore[arg-type]


@settings(deadline=None)
@given(lengths, st.integers(1, 3), st.sampled_from([1, 2, 7]), st.booleans())
def test_visible_sums(distinct: list[tuple[int, int]], times: int, topk: int, causal: bool) -> None:
    sequences = distinct * times
    operator = SPECS.operators["select_blocks"]
    workload = workload_of(
        "select_blocks",
        sequences=tuple(sequences),
        dims={"num_kv_heads": 1, "topk": topk, "block_size": 8},
        parameters={"causal": causal},
    )
    known = quantities_of(operator, workload, BF16, operator.m3)
    keys = blocks = selected = 0
    for len_q, len_k in sequences:
        for i in range(len_q):
            sees = max(0, len_k - len_q + i + 1) if causal else len_k
            keys += sees
            blocks += -(-sees // 8)
            selected += min(topk, -(-sees // 8))
    assert (known["visible_keys"], known["visible_blocks"], known["selected_blocks"]) == (keys, blocks, selected)


def test_derived_dims_follow_the_point() -> None:
    operator = SPECS.operators["sparse_attention"]
    workload = workload_of("sparse_attention", sequences=((3, 5), (0, 9)), dims={"num_kv_heads": 4, "topk": 2})
    dims = dims_of(operator, workload, {"head_dim": 64, "block_size": 64, "group": 8})
    assert dims["num_q_heads"] == 32
    assert (dims["total_q"], dims["total_k"], dims["num_sequences"], dims["max_blocks"]) == (3, 14, 2, 1)


@pytest.mark.parametrize(
    ("op", "label", "floor"),
    [
        ("select_blocks", "prefill_32k", lambda: 2 * 4 * 128 * 32768 * 32769 / 2 / 989.4e9),
        ("topk_select", "prefill_128k", lambda: 4 * (4 * 128 * 1024 * 1025 / 2 + 4 * 131072 * 16) / 3352e6),
        ("build_schedule", "prefill_32k_u", lambda: 8 * 4 * 32768 * 16 / 3352e6),
    ],
)
def test_floor_on_an_h100(op: str, label: str, floor: Callable[[], float]) -> None:
    operator = SPECS.operators[op]
    device = SPECS.targets["sm90"].devices["NVIDIA H100 80GB HBM3"]
    workload = next(workload for workload in operator.bench if workload.label == label)
    assert floor_ms(operator, workload, BF16, operator.m3, device, "bfloat16") == pytest.approx(floor())


def test_an_unknown_peak_leaves_the_bandwidth() -> None:
    operator = SPECS.operators["select_blocks"]
    device = SPECS.targets["sm90"].devices["NVIDIA H200"]
    arguments = (operator, operator.bench[0], BF16, operator.m3, device)
    assert 0 < floor_ms(*arguments, "int32") < floor_ms(*arguments, "bfloat16")


def test_groups_have_a_share_in_the_bytes_of_an_element() -> None:
    """Of nvfp4 8 bits for 16 elements, of mxfp4 for 32; other scales do not count."""
    operator = SPECS.operators["sparse_decode"]
    workload = operator.verify[0]
    found = {
        name: quantities_of(operator, workload, SPECS.precisions[name], operator.m3)["element_bits"]
        for name in ("bf16", "q16kv8", "q16kv4", "q16kvmx4")
    }
    assert found == {"bf16": 16, "q16kv8": 8, "q16kv4": 4.5, "q16kvmx4": 4.25}
