"""Integers of other kinds than Python's are integers: NumPy's come from every loader of data."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from calls import EVERY_OPERATOR, OPERATORS, call, paged

from msa_tiles import ops


def as_numpy(value: Any, kind: type) -> Any:
    return kind(value) if type(value) is int else value


def numbers(op: str) -> dict[str, int]:
    """Every integer that an operator takes, beside those that the call has."""
    further = {"max_seqlen_q": 40, "max_seqlen_k": 64}
    if op in ("select_blocks", "topk_select", "decode_topk", "msa_decode"):
        further |= {"init_blocks": 1, "local_blocks": 1}
    if op in ("topk_select", "decode_topk"):
        further["num_valid_blocks"] = 2
    return {} if op == "combine" else further


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, ops.Schedule):
        assert all(type(getattr(other, name)) is int for name in ("window", "topk", "block_size", "total_q"))
        return same((one.edges, one.tasks, one.counts), (other.edges, other.tasks, other.counts))
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize("op", EVERY_OPERATOR)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_a_call_with_integers_of_numpy(op: str, kind: type) -> None:
    given = {**call(op), **numbers(op)}
    wanted = OPERATORS[op](**given)
    assert same(wanted, OPERATORS[op](**{name: as_numpy(value, kind) for name, value in given.items()}))


def test_into_the_callers_buffers_twice() -> None:
    given = {**call("select_blocks"), "topk": np.int64(3), "block_size": np.int64(8), "max_seqlen_k": np.int64(64)}
    wanted = ops.select_blocks(**call("select_blocks"))
    for _ in range(2):
        out = torch.full_like(wanted, -7)
        ops.select_blocks(**given, out=out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("wrong", [True, np.True_, 3.0, np.float64(3), "3", torch.tensor(3), torch.tensor([3])])
def test_what_is_no_integer_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"topk: got .*; wanted an integer of at least 1"):
        ops.select_blocks(**{**call("select_blocks"), "topk": wrong})


def test_a_bound_of_numpy_is_checked() -> None:
    with pytest.raises(ValueError, match="topk: got 0; wanted at least 1"):
        ops.select_blocks(**{**call("select_blocks"), "topk": np.int64(0)})
    with pytest.raises(ValueError, match="max_seqlen_k: got -1"):
        ops.select_blocks(**call("select_blocks"), max_seqlen_k=np.int64(-1))


@pytest.mark.parametrize("op", EVERY_OPERATOR)
@pytest.mark.parametrize("count", [2**31, 2**63, 2**70])
def test_a_number_beyond_int32_is_refused_by_name(op: str, count: int) -> None:
    for name in numbers(op):
        with pytest.raises(ValueError, match=f"{name}: got {count}; wanted at most 2147483647"):
            OPERATORS[op](**{**call(op), name: count})


def flags() -> list[tuple[str, str]]:
    """Every operator with each of its flags."""
    names = {op: inspect.signature(OPERATORS[op]).parameters for op in EVERY_OPERATOR}
    return [(op, flag) for op, known in names.items() for flag in ("check", "return_lse") if flag in known]


@pytest.mark.parametrize(("op", "flag"), flags())
@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_what_is_no_flag_is_refused(op: str, flag: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{flag}: got {type(wrong).__name__}; wanted True or False"):
        OPERATORS[op](**{**call(op), flag: wrong})


@pytest.mark.parametrize("flag", ["check", "return_lse"])
def test_what_is_no_flag_of_dense_attention_is_refused(flag: str) -> None:
    q = torch.zeros(4, 2, 16)
    with pytest.raises(TypeError, match=f"{flag}: got str; wanted True or False"):
        ops.dense_attention(q, q, q, **{flag: "yes"})


@pytest.mark.parametrize("op", ["index_score", "decode_score", "select_blocks", "sparse_attention", "sparse_decode",
                                "msa_decode"])  # fmt: skip
def test_several_requests_without_their_queries_blame_what_is_missing(op: str) -> None:
    """Not the page table and lengths, which are right."""
    given = paged(op)
    del given["cu_seqlens_q"]
    with pytest.raises(ValueError, match="cu_seqlens_q: got None beside page_table of 3 requests; wanted int32"):
        OPERATORS[op](**given)
    given = call(op)
    del given["cu_seqlens_q"]
    with pytest.raises(ValueError, match="cu_seqlens_q: got None beside cu_seqlens_k of 3 requests; wanted int32"):
        OPERATORS[op](**given)
