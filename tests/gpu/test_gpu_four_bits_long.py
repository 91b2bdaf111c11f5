"""Decode of eight requests of a million tokens each from caches of 4 bits, against the reference on some of them."""

from __future__ import annotations

import pytest
import torch

from msa_tiles.bench import precisions
from msa_tiles.bench.operators import decode
from msa_tiles.quant import QuantizedTensor
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.registry import default_registry

pytestmark = pytest.mark.gpu

PAIRS = ("q16k4+q16kv8", "q16k4+q16kv4", "q16kmx4+q16kvmx4")
SERVED = [
    (dsl, pair)
    for dsl in ("tilelang", "cutedsl")
    for pair in PAIRS
    if toolchain.missing(dsl) is None
    and all(default_registry().select(op, dsl, "sm90", precisions.part(op, pair)) for op in decode.PARTS)
]


@pytest.mark.parametrize(("dsl", "pair"), SERVED)
def test_a_million_tokens_at_batch_eight(dsl: str, pair: str) -> None:
    """The first and the last request, their ids and outputs; caches of 4 bits take what they should."""
    case = decode.find("decode_1m_b8")
    before = torch.cuda.memory_allocated()
    try:
        x = decode.make(case, torch.device("cuda"), pair, 0)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("the caches, and what they are made of, do not fit this card")
    held = torch.cuda.memory_allocated() - before
    whole = case.batch * case.keys * case["num_kv_heads"] * case["head_dim"] * 4
    index = case.batch * case.keys * case["head_dim"] * 2
    if isinstance(x.k, QuantizedTensor):
        assert held <= 0.29 * (whole + index) + (64 << 20), "keys and values, index keys, and small things"
    call = decode.ours(case, dsl, x)
    result = call()
    assert decode.check(case, x, result) is None
    again = [part.clone() for part in result]
    for first, second in zip(again, call(), strict=True):
        assert torch.equal(first, second)
