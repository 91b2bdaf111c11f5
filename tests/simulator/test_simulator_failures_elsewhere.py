"""Failures that users of other block-sparse attention met, each as a call of the generated kernels with its answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simulated_calls import Call, kernel, make_schedule
from torch import Tensor

from msa_tiles import reference
from msa_tiles.simulator import simulate
from msa_tiles.verify.inputs import spread

BLOCK, DIM = 64, 64
LOG2_E = math.log2(math.e)


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and lse of the kernels, then of the reference; all queries are one window, k and v are flat."""
    heads, total_q, topk = ids.shape
    at, stored, where = call.place(BLOCK, k, v)
    made = make_schedule(call, at, ids, BLOCK, total_q)
    partial_out = torch.full((total_q, topk, q.shape[1], DIM), math.nan).bfloat16()
    partial_lse = torch.full((total_q, topk, q.shape[1]), -math.inf)
    variant = {"head_dim": DIM, "block_size": BLOCK, "group": q.shape[1] // heads}
    claims = torch.zeros(1, dtype=torch.int32)
    simulate(
        kernel("sparse_attention", **variant, pages_per_block=call.pages_per_block),
        q, *stored, at.page_table, made.edges, made.tasks, made.counts, claims, partial_out, partial_lse,
        DIM**-0.5 * LOG2_E, 0, 2,
    )  # fmt: skip
    out, lse = torch.full(q.shape, math.nan).bfloat16(), torch.full(q.shape[:2], math.nan)
    splits = partial_out.transpose(0, 1), partial_lse.transpose(0, 1)
    simulate(kernel("combine", head_dim=DIM), *splits, out, lse)
    wanted, wanted_lse = reference.sparse_attention(
        q.float(), *(part.float() for part in stored), ids, block_size=BLOCK, **where
    )
    return out.float(), lse, wanted, wanted_lse


def check(call: Call, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, wanted, wanted_lse = attend(call, q, k, v, ids)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-3, rtol=0)
    torch.testing.assert_close(out, wanted, atol=0.04, rtol=0)
    return out, lse


def inputs(call: Call, heads: int = 1, group: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return (
        call.tensor(call.total_q, heads * group, DIM),
        call.tensor(call.total_k, heads, DIM),
        call.tensor(call.total_k, heads, DIM),
    )


def rank(score: Tensor, k: int, heads: int = 1, valid: Tensor | None = None, **options: int) -> Tensor:
    """topk_select of the kernel, checked against the reference's."""
    call = Call([(score.shape[1], score.shape[1])])
    at, _, _ = call.place(BLOCK)
    out = torch.full((heads, score.shape[1], k), -77, dtype=torch.int32)
    counts = torch.full((score.shape[1],), score.shape[2], dtype=torch.int32) if valid is None else valid
    init, local = options.get("init_blocks", 0), options.get("local_blocks", 1)
    capacity = min(size for size in (8, 16, 32, 64) if size >= k)
    scalars = (0, 0, 2, 0, BLOCK, init, local, 0, options.get("lanes_log2", 0))
    simulate(kernel("topk_select", topk=capacity), score, *at[:3], at.q_positions, counts, out, *scalars)
    wanted = reference.topk_select(
        score, k, num_kv_heads=heads, num_valid_blocks=counts, init_blocks=init, local_blocks=local
    )
    assert torch.equal(out, wanted)
    return out


def test_token_major_ids_as_a_strided_view_even_when_tokens_equal_heads() -> None:
    call = Call([(2, 130)], seed=1)
    q, k, v = inputs(call, heads=2)
    token_major = torch.tensor([[[0, 1], [2, 1]], [[2, 0], [0, -1]]], dtype=torch.int32)  # [T, H, k], T == H
    check(call, q, k, v, token_major.transpose(0, 1))


def test_a_slice_of_a_larger_id_buffer() -> None:
    call = Call([(5, 200)], seed=2)
    buffer = torch.full((1, 9, 7), 12345, dtype=torch.int32)
    buffer[:, :5, :3] = torch.tensor([3, 0, 1], dtype=torch.int32)
    check(call, *inputs(call), buffer[:, :5, :3])


@pytest.mark.parametrize("pages_per_block", [1, 4])
@pytest.mark.drawn(1)
def test_interleaved_pages_with_real_strides_and_minus_one_as_a_page(pages_per_block: int) -> None:
    """Unused entries are -1 or name pages of NaN, and so is the unused tail of the last page."""
    call = Call([(3, 70), (6, 100)], seed=3, pages_per_block=pages_per_block, shortened=True)
    ids = torch.tensor([[[-1, 0, 1]] * 9], dtype=torch.int32)
    check(call, *inputs(call), ids)


def test_queries_that_are_a_part_of_a_fused_projection() -> None:
    call = Call([(9, 90)], seed=4)
    q, k, v = inputs(call)
    fused = torch.full((9, 3, 8, DIM), math.nan).bfloat16()
    fused[:, 1] = q
    check(call, fused[:, 1], spread(k), spread(v), torch.tensor([[[1, 0]] * 9], dtype=torch.int32))


def test_merging_only_empty_splits_gives_no_nan() -> None:
    out, lse = torch.full((2, 3, DIM), math.nan).bfloat16(), torch.full((2, 3), math.nan)
    partial = torch.full((4, 2, 3, DIM), math.nan).bfloat16()
    simulate(kernel("combine", head_dim=DIM), partial, torch.full((4, 2, 3), -math.inf), out, lse)
    assert not out.any() and (lse == -math.inf).all()


def test_minus_one_in_front_of_ids_and_rows_of_nothing_else() -> None:
    call = Call([(6, 200)], seed=5)
    ids = torch.tensor([[[-1, -1, 2], [-1, 0, -1], [-1, -1, -1], [3, -1, 1], [-1, -1, -1], [0, 1, 2]]])
    out, lse = check(call, *inputs(call), ids.to(torch.int32))
    assert not out[2].any() and (lse[2] == -math.inf).all()


def test_more_ids_than_a_short_request_has_blocks() -> None:
    call = Call([(20, 20), (70, 150)], seed=6, values="integer")
    arguments = _select(call, topk=16, k=16)
    assert (arguments[:, :20, 1:] == -1).all() and (arguments[:, :20, 0] == 0).all()


def test_nan_in_the_unused_tail_reaches_nothing() -> None:
    """Flat keys: what lies behind seqused_k is NaN."""
    call = Call([(4, 100), (5, 120)], seed=7, shortened=True)
    q, k, v = inputs(call)
    used, starts = call.lengths.seqused_k, call.lengths.cu_seqlens_k
    assert used is not None
    for request in range(2):
        tail = slice(int(starts[request] + used[request]), int(starts[request + 1]))
        k[tail], v[tail] = math.nan, math.nan
    out, _, _, _ = attend(call, q, k, v, torch.tensor([[[0, 1]] * 9], dtype=torch.int32))
    assert not out.isnan().any()


@pytest.mark.parametrize("sequences", [[(3, 70), (0, 0), (0, 50), (4, 60)], [(0, 0), (0, 30)]], ids=["some", "all"])
def test_requests_of_length_zero(sequences: list[tuple[int, int]]) -> None:
    call = Call(sequences, seed=8, values="integer", rows_behind=2)
    assert (_select(call, topk=8, k=3)[:, -2:] == -1).all()


def test_ties_and_clusters_drop_no_candidate() -> None:
    equal = torch.zeros(1, 3, 90)
    assert rank(equal, 16)[0, 0].tolist() == [*range(15), 89]
    clustered = torch.full((1, 3, 90), 0.5)
    clustered[..., 40:55] = torch.arange(15.0) + 1
    assert set(range(40, 55)) < set(rank(clustered, 17)[0, 0].tolist())
    denormal = torch.full((1, 3, 90), 1e-42)
    denormal[..., 70], denormal[..., 71] = 2e-42, -1e-42
    assert 70 in rank(denormal, 3)[0, 0].tolist()
    infinite = torch.randn(1, 3, 90)
    infinite[..., 5], infinite[..., 6:] = math.inf, -math.inf
    assert rank(infinite, 8)[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 89]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    score = torch.randint(-2, 3, (1, 40, 70), generator=torch.Generator().manual_seed(9)).float()
    alone = torch.cat([rank(score[:, row : row + 1], 9) for row in (0, 17, 39)], 1)
    for lanes_log2 in (0, 2, 5):
        assert torch.equal(rank(score, 9, lanes_log2=lanes_log2)[:, [0, 17, 39]], alone)


def test_nan_ranks_last_and_still_before_padding() -> None:
    score = torch.full((1, 2, 6), math.nan)
    score[0, 1, 3] = -math.inf
    valid = torch.tensor([4, 5], dtype=torch.int32)
    ids = rank(score, 8, valid=valid)
    assert ids[0].tolist() == [[0, 1, 2, 3, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1, -1]]
    assert rank(score, 2, valid=valid)[0, 1].tolist() == [3, 4]  # -inf before NaN, and the local block


def test_every_token_has_its_own_number_of_blocks() -> None:
    score = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(10))
    valid = torch.tensor([0, 1, 33, 5, 2, 40, -3], dtype=torch.int32)
    counts = (rank(score, 8, heads=2, valid=valid) >= 0).sum(-1)
    assert counts[0].tolist() == [0, 1, 8, 5, 2, 8, 0]


@pytest.mark.slow  # beside it, three heads in test_simulator_kernels.py
def test_head_counts_that_are_no_powers_of_two() -> None:
    score = torch.randn(6, 3, 70, generator=torch.Generator().manual_seed(11))
    rank(score, 32, heads=6, init_blocks=1, local_blocks=2)
    call = Call([(3, 130)], seed=11)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(18)]).view(6, 3, 2).to(torch.int32)
    check(call, *inputs(call, heads=6, group=16), ids)


def test_unordered_ids_keep_the_causal_mask_of_the_last_block() -> None:
    call = Call([(100, 100)], seed=12)
    for order in ([1, 0], [0, 1]):
        check(call, *inputs(call), torch.tensor([[order] * 100], dtype=torch.int32))


@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.drawn(1)
def test_lengths_around_a_block(length: int) -> None:
    call = Call([(length, length)], seed=length)
    check(call, *inputs(call), torch.tensor([[[1, 0]] * length], dtype=torch.int32))
    _select(Call([(length, length)], seed=length, values="integer"), topk=8, k=2)


def test_one_query_on_many_keys() -> None:
    _select(Call([(1, 5000)], seed=13, values="integer"), topk=16, k=16)


def _select(call: Call, topk: int, k: int, **options: Any) -> Tensor:
    """select_blocks of the kernel, checked against the reference's: int32 [2, T, k]."""
    idx_q = call.tensor(call.total_q, 2, DIM)
    at, (idx_k,), where = call.place(BLOCK, call.tensor(call.total_k, DIM))
    out = torch.full((2, call.total_q, k), -77, dtype=torch.int32)
    variant = {"head_dim": DIM, "block_size": BLOCK, "topk": topk, "heads_per_group": 1}
    simulate(
        kernel("select_blocks", **variant, pages_per_block=call.pages_per_block),
        idx_q, idx_k, at.page_table, *at[:3], at.q_positions, out, at.use_seqused, at.use_positions, 0, 1, 0,
    )  # fmt: skip
    wanted = reference.select_blocks(idx_q.float(), idx_k.float(), k, num_kv_heads=2, block_size=BLOCK, **where)
    assert torch.equal(out, wanted)
    return out
