"""What attention over quantised keys and values may differ by: kernels of either order of rounding pass, faults do not.

A stand-in multiplies as kernels of `q16kv8` with a scale for every token do: scores and sums in float32, weights in
bfloat16 beside values in bfloat16, a partial result in bfloat16 for each block, and their merge.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from seeds import examples
from torch import Tensor

from msa_tiles import paths, reference, spec
from msa_tiles.reference.batch import read_batch
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify import inputs, operators
from msa_tiles.verify.cases import Case, Disagreement, cases

CPU = torch.device("cpu")
SEEDS = range(examples(40))


@functools.cache
def case_of_tokens() -> Case:
    """A case at a point with a scale for every token."""
    (cell,) = default_registry().select("sparse_attention", "tilelang", precision="q16kv8")
    found = cases(cell, spec.load(paths.specs_dir()))
    return next(case for case in found if case.point["token_scales"] and case.point["head_dim"] == 64)


def check_of(sequences: tuple[tuple[int, int], ...], strided: bool, seed: int) -> operators.SparseAttention:
    case = case_of_tokens()
    workload = dataclasses.replace(case.workload, sequences=sequences)
    case = dataclasses.replace(case, workload=workload)
    return operators.SparseAttention(case, inputs.Source(CPU, seed, workload.values), strided, "reference")


def answer(check: operators.SparseAttention, order: str) -> tuple[Tensor, Tensor]:
    """out and lse of a kernel that applies the values' scales as `order` says; lse is the reference's."""
    assert check.scaled is not None
    stored, scales = check.scaled[0].float(), check.scaled[1]
    if order == "of the token before":
        scales = scales.roll(1, 0)
    values = (stored * scales[..., None]).bfloat16().float()
    if order == "as eight bits again":
        values = (stored * scales[..., None] / scales.amax()).to(torch.float8_e4m3fn).float() * scales.amax()
    keys, q = check.flat[0].float(), check.q.float()
    group, block_size = q.shape[1] // keys.shape[1], check.options["block_size"]
    where = {name: value for name, value in check.flat_options.items() if name != "block_size"}
    batch = read_batch(len(q), CPU, total_k=len(keys), **where)
    topk = check.ids.shape[2]
    partial_out = torch.zeros(topk, *q.shape).bfloat16()
    partial_lse = torch.full((topk, *q.shape[:2]), -torch.inf)
    for row, request in enumerate(batch.request.tolist()):
        for head in range(keys.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            for slot, block in enumerate(check.ids[head, row].tolist()):
                last = min((block + 1) * block_size, int(batch.limit[row]) + 1)
                if block < 0 or last <= block * block_size:
                    continue
                first_row = batch.requests[request].key_row
                rows = slice(first_row + block * block_size, first_row + last)
                scores = q[row, heads] @ keys[rows, head].T * q.shape[2] ** -0.5
                weights = (scores - scores.amax(-1, keepdim=True)).exp()
                if order in ("weights", "of the token before"):
                    total = (weights * scales[rows, head]).bfloat16().float() @ stored[rows, head]
                else:
                    total = weights.bfloat16().float() @ values[rows, head]
                partial_out[slot, row, heads] = (total / weights.sum(-1, keepdim=True)).bfloat16()
                partial_lse[slot, row, heads] = scores.logsumexp(-1)
    out, _ = reference.combine(partial_out.float(), partial_lse)
    _, lse = reference.sparse_attention(check.q.float(), *check.keys, check.ids, **check.options)
    return out.bfloat16(), lse


@pytest.mark.parametrize("order", ["values", "weights"])
def test_a_query_that_sees_one_key(order: str) -> None:
    """Its output is one product, whose factors and itself may be rounded: few elements, all of them with that error."""
    refused = 0
    for seed in SEEDS:
        check = check_of(((1, 1),), False, seed)
        outputs = answer(check, order)
        check.compare(outputs)
        check.scaled = None  # measured by scaled values alone
        try:
            check.compare(outputs)
        except Disagreement:
            refused += 1
    assert (refused > 0) == (order == "weights"), "it takes the other order to tell a right answer from a wrong one"


@pytest.mark.parametrize("order", ["values", "weights"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.drawn(1)
def test_queries_that_see_several_blocks(order: str, strided: bool) -> None:
    for seed in SEEDS[:3]:
        check = check_of(((40, 150), (3, 5)), strided, seed)
        check.compare(answer(check, order))


@pytest.mark.parametrize("sequences", [((2, 2),), ((40, 150), (3, 5))])
@pytest.mark.parametrize("order", ["of the token before", "as eight bits again"])
@pytest.mark.drawn(1)
def test_a_fault_is_still_one(order: str, sequences: tuple[tuple[int, int], ...]) -> None:
    for seed in SEEDS[:3]:
        check = check_of(sequences, False, seed)
        with pytest.raises(Disagreement, match="error"):
            check.compare(answer(check, order))


def given(check: operators.SparseAttention, keys: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of the reference over other flat keys [total_k, Hkv, D]."""
    values = check.flat[1].float()
    out, lse = reference.sparse_attention(check.q.float(), keys, values, check.ids, **check.flat_options)
    return out.bfloat16(), lse


def test_keys_are_rounded_once_they_are_scaled() -> None:
    """A kernel that multiplies keys by their tokens' scales has bfloat16 of them, and so has torch."""
    beyond = 0
    for seed in SEEDS:
        check = check_of(((9, 9),) * 6, False, seed)
        out, lse = given(check, check.flat[0].float())
        _, wanted = reference.sparse_attention(check.q.float(), *check.keys, check.ids, **check.options)
        beyond += float((lse - wanted).abs().nan_to_num(nan=0.0).max()) > check.case.tolerance["lse"]
        check.compare((out, lse))
    assert beyond, "the bound of rounded keys is never needed"


def test_scales_of_other_keys_are_noticed() -> None:
    for seed in SEEDS[:3]:
        check = check_of(((9, 9),) * 6, False, seed)
        keys = check.flat[0].float()
        with pytest.raises(Disagreement, match="lse: error"):
            check.compare((given(check, keys)[0], given(check, keys.roll(1, 0))[1]))
