"""A scale that turns the order of the scores round, or loses it, is refused by every operator that takes one."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
from ops import calls, training_calls
from ops.calls import TERMS
from rounding import close

from msa_tiles import nn, ops
from msa_tiles.call import validate

SCALES = ("softmax_scale", "index_scale")
TAKEN = [
    (op, name)
    for op in ops.__all__
    for name in SCALES
    if callable(getattr(ops, op)) and name in inspect.signature(getattr(ops, op)).parameters
]


def arguments_of(op: str) -> dict[str, object]:
    return (training_calls if op in training_calls.OPERATORS else calls).call(op)


def test_which_operators_take_a_scale() -> None:
    assert {op for op, _ in TAKEN} == {
        "dense_attention", "index_kl", "msa_attention", "msa_decode", "sparse_attention", "sparse_attention_backward",
        "sparse_decode",
    }  # fmt: skip
    assert not set(SCALES) & set(inspect.signature(nn.MiniMaxSparseAttention).parameters)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -0.125, -1, 1e-39, 1e39, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("op", "name"), TAKEN)
def test_a_scale_that_is_no_positive_number_is_refused(op: str, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {value}; wanted a number above 0")):
        getattr(ops, op)(**{**arguments_of(op), name: value})


@pytest.mark.parametrize("op", sorted({op for op, name in TAKEN if name == "softmax_scale"}))
def test_a_remembered_call_does_not_let_another_scale_pass(op: str) -> None:
    arguments = arguments_of(op)
    if "out" in inspect.signature(getattr(ops, op)).parameters and op not in training_calls.OPERATORS:
        arguments["out"] = torch.empty_like(arguments["q"])
    getattr(ops, op)(**arguments)
    with pytest.raises(ValueError, match="softmax_scale: got -1"):
        getattr(ops, op)(**{**arguments, "softmax_scale": -1})


@pytest.mark.parametrize("op", ["dense_attention", "sparse_attention", "sparse_decode"])
def test_the_least_scale_weighs_all_keys_alike(op: str) -> None:
    arguments = arguments_of(op)
    arguments["v"] = torch.ones_like(arguments["v"])
    _, lse = getattr(ops, op)(**arguments, softmax_scale=validate.SMALLEST_SCALE, return_lse=True)
    counts = lse.exp().masked_fill(lse.isneginf(), 0.0)
    # exp turns what the LSE is off by into a part of the count.
    close(counts, counts.round(), terms=TERMS)
    assert counts.max() > 1
