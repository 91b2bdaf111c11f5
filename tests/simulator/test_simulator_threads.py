"""What single threads, warps and fragments do, against torch and numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planting import planted
from torch import Tensor

from msa_tiles.simulator import (
    ArgumentError,
    DeadlockError,
    DivergenceError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
    simulate,
)


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """build(name, *replacements): a kernel of small_threads, or of a copy of it with pieces of text replaced."""
    return lambda name, *replacements: getattr(planted("small_threads", tmp_path, *replacements), name)()


LAST_VOTE = '            out[4, tx] = T.cast(T.popcount(bits), "int32")\n'


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(5), dtype=torch.int32)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(6))


def test_arithmetic_is_that_of_c(build: Any) -> None:
    n = 300
    a, b, x = whole(-1000, 1000, n), whole(-9, 9, n), real(n) * 4
    b[b == 0] = 7
    a[:3] = torch.tensor([0, -(2**31), 2**31 - 1])
    got, got_real = torch.empty((12, n), dtype=torch.int32), torch.empty((8, n))
    simulate(build("arithmetic"), a, b, x, got, got_real, 1.5, 2)
    i, j, f = a.numpy(), b.numpy(), x.numpy()
    long_i, long_j = i.astype(np.int64), j.astype(np.int64)
    truncated = (np.abs(long_i) // np.abs(long_j)) * np.sign(long_i) * np.sign(long_j)
    wanted = [
        truncated,
        long_i - truncated * long_j,
        long_i // long_j,
        long_i % long_j,
        np.maximum(i, j) - np.minimum(i, 2),
        (i & 0xFF) | (j ^ 3),
        i >> 2,
        (i.view(np.uint32) << 5).view(np.int32),
        f.view(np.int32),
        np.where((i > 0) & (j > 0), 1, np.where((i < 0) | (j < 0), 2, 3)),
        np.trunc(f),
        long_i * 65537,
    ]
    for row, values in enumerate(wanted):
        assert (got[row].numpy() == values.astype(np.int64).astype(np.int32)).all(), row
    infinite = torch.where(x > 0, torch.inf, -torch.inf)
    reals = [x.exp2() * 1.5, (x.abs() + 1).log2(), x, x.bfloat16().float(), x / b, x.abs().sqrt(), infinite,
             x.clamp_max(1.5)]  # fmt: skip
    for row, values in enumerate(reals):
        torch.testing.assert_close(got_real[row], values, rtol=1e-6, atol=1e-6, msg=str(row))


@pytest.mark.parametrize("n", [1, 32, 129])
def test_threads_leave_loops_when_they_are_done(build: Any, n: int) -> None:
    counts = whole(1, 28, n)
    steps, sums = torch.full((n,), -1, dtype=torch.int32), torch.full((n,), -1, dtype=torch.int32)
    simulate(build("divergent"), counts, steps, sums)
    for i, count in enumerate(counts.tolist()):
        value, step, fours = count, 0, 0
        while value > 1:
            value = value // 2 if value % 2 == 0 else value * 3 + 1
            fours += value % 4 == 0
            step += 1
        assert steps[i] == step
        assert sums[i] == sum(j * h for j in range(count) for h in range(i % 128 // 32 + 1)) + fours * 1000


@pytest.mark.parametrize("seed", range(3))
def test_shuffles_and_barriers(build: Any, seed: int) -> None:
    x = real(5, 200)[:, 16:144]
    sums = torch.empty((5, 2))
    simulate(build("reduction"), x, sums, seed=seed)
    torch.testing.assert_close(sums[:, 0], x.sum(1))
    torch.testing.assert_close(sums[:, 1], x[:, :32].sum(1))


@pytest.mark.planted
def test_a_missing_barrier_between_warps_is_a_race(build: Any) -> None:
    kernel = build("reduction", ("            T.sync_threads()\n", ""))
    for seed in range(4):
        with pytest.raises((RaceError, UninitialisedError), match="partial"):
            simulate(kernel, real(5, 128), torch.empty((5, 2)), seed=seed)


def test_a_barrier_or_shuffle_by_a_part_of_a_warp_is_refused(build: Any) -> None:
    x, sums = real(5, 128), torch.empty((5, 2))
    some = build(
        "reduction",
        ("            T.sync_threads()\n", "            if tx % 32 < 16:\n                T.sync_threads()\n"),
    )
    with pytest.raises(DivergenceError, match=r"sync_threads\(0\)"):
        simulate(some, x, sums)
    shuffle = "mine = mine + T.shfl_xor(mine, 1 << level)"
    half = build("reduction", (shuffle, "if tx % 32 < 16:\n" + " " * 20 + shuffle))
    with pytest.raises(DivergenceError, match="shuffle"):
        simulate(half, x, sums)


def test_votes_and_reductions_of_a_warp(build: Any) -> None:
    x, out = whole(-3, 6, 128), torch.full((5, 128), -77, dtype=torch.int32)
    x[32:64], x[5] = 1, -(2**31)
    simulate(build("votes"), x, out)
    for warp, (lanes, got) in enumerate(zip(x.view(4, 32).tolist(), out.view(5, 4, 32).unbind(1), strict=True)):
        bits = sum(1 << lane for lane, value in enumerate(lanes) if value > warp)
        assert (got[0] == np.uint32(bits).view(np.int32).item()).all()
        assert (got[1] == int(bits != 0)).all()
        assert (got[2] == min(lanes)).all()
        assert got[3].tolist() == [(value & 0xFFFFFFFF).bit_count() for value in lanes]
        assert (got[4] == bits.bit_count()).all()


@pytest.mark.parametrize("vote", ["T.ballot(x[tx] > 0)", "T.any_sync(x[tx] > 0)", "T.warp_reduce_min(x[tx])"])
def test_a_vote_by_a_part_of_a_warp_is_refused(build: Any, vote: str) -> None:
    half = build(
        "votes", (LAST_VOTE, f"            if tx % 32 < 16:\n                out[4, tx] = T.cast({vote}, 'int32')\n")
    )
    with pytest.raises(DivergenceError, match="by a part of a warp"):
        simulate(half, whole(-3, 6, 128), torch.empty((5, 128), dtype=torch.int32))


def test_warps_may_vote_apart(build: Any) -> None:
    some = build("votes", (LAST_VOTE, "            if tx < 64:\n                out[4, tx] = T.any_sync(x[tx] > 4)\n"))
    x, out = torch.arange(128, dtype=torch.int32), torch.full((5, 128), -77, dtype=torch.int32)
    simulate(some, x, out)
    assert (out[4] == torch.tensor([1, 1, -77, -77]).repeat_interleave(32)).all()


def test_float_arithmetic_makes_the_nan_of_the_gpu(build: Any) -> None:
    x, y, out = real(128), real(128), torch.empty(128, dtype=torch.int32)
    x[:3] = torch.tensor([math.inf, -math.inf, -math.nan])
    y[:4] = torch.tensor([math.inf, -math.inf, 1.0, math.nan])
    simulate(build("no_numbers"), x, y, out)
    assert (out[:4] == 0x7FFFFFFF).all()
    assert torch.equal(out[4:], (x - y)[4:].view(torch.int32))


def test_a_barrier_that_a_warp_skips_never_opens(build: Any) -> None:
    last = "                sums[row, 1] = other\n"
    kernel = build("reduction", (last, last + "            if tx < 96:\n                T.sync_threads()\n"))
    with pytest.raises(DeadlockError, match="96 of 128"):
        simulate(kernel, real(5, 128), torch.empty((5, 2)))


@pytest.mark.parametrize("late_sync", [True, False])
def test_lanes_need_sync_warp(build: Any, late_sync: bool) -> None:
    x, out = whole(0, 99, 2, 128), torch.empty((2, 128), dtype=torch.int32)
    simulate(build("turns"), x, out)
    assert (out == x.view(2, 4, 32).roll(-3, 2).view(2, 128)).all()
    after = "                carried = line[tx // 32 * 32 + (tx + 1) % 32]\n"
    sync = "                T.sync_warp()\n"
    with pytest.raises(RaceError, match="sync_warp"):
        simulate(build("turns", (after + sync, after) if late_sync else (sync + after, after)), x, out)


def test_atomics_serve_everybody_once(build: Any) -> None:
    x = whole(0, 5, 300)
    orders = set()
    for seed in range(3):
        counts, tickets = torch.zeros(5, dtype=torch.int32), torch.full((300,), -1, dtype=torch.int32)
        simulate(build("histogram"), x, counts, tickets, seed=seed)
        assert (counts == torch.bincount(x, minlength=5)).all()
        for value in range(5):
            assert (tickets[x == value].sort().values == torch.arange(int(counts[value]))).all()
        orders.add(tuple(tickets.tolist()))
    assert len(orders) == 3, "the seed shuffles who comes first"


def test_an_index_outside_is_refused(build: Any) -> None:
    x = torch.tensor([0, 1, 5], dtype=torch.int32)
    with pytest.raises(OutOfBoundsError, match="counts: index 5 in dimension 0 of extent 5"):
        simulate(build("histogram"), x, torch.zeros(5, dtype=torch.int32), torch.empty(3, dtype=torch.int32))


@pytest.mark.planted
def test_threads_that_store_different_values_to_one_element_are_a_race(build: Any) -> None:
    kernel = build("histogram", ("tickets[i] = ", "tickets[0] = "))
    with pytest.raises(RaceError, match="tickets"):
        simulate(kernel, whole(0, 1, 40), torch.zeros(5, dtype=torch.int32), torch.empty(40, dtype=torch.int32))


def test_named_barriers_of_some_warps(build: Any) -> None:
    for seed in range(4):
        out = torch.zeros(4, dtype=torch.int32)
        simulate(build("pairs"), torch.tensor([1, 0, 1, 0], dtype=torch.int32), out, seed=seed)
        assert out.tolist() == [4, 2, 4, 4]
    with pytest.raises((DeadlockError, RaceError)):
        simulate(build("pairs"), torch.tensor([1, 0, 0, 0], dtype=torch.int32), out)


WAIT = "T.pdl_sync()\n                "


def test_what_the_kernel_before_works_on_is_awaited_by_every_warp(build: Any) -> None:
    x, weights, out = real(64), real(64) + 1, torch.full((64,), torch.nan)
    simulate(build("handover"), x, weights, out, awaited=["x", "out"])
    assert torch.equal(out, torch.cat([weights[:32] * x[:32], weights[32:] + x[32:]]))
    for first in (f"{WAIT}out[tx] = weight *", f"{WAIT}out[tx] = weight +"):
        kernel = build("handover", (first, first.removeprefix(WAIT)))
        simulate(kernel, x, weights, out)
        for tensor in ("x", "out"):
            with pytest.raises(RaceError, match=f"{tensor}: accessed before pdl_sync"):
                simulate(kernel, x, weights, out, awaited=[tensor])
    with pytest.raises(RaceError, match="weights: accessed before pdl_sync"):
        simulate(build("handover"), x, weights, out, awaited=["weights"])
    with pytest.raises(ArgumentError, match="no tensor y"):
        simulate(build("handover"), x, weights, out, awaited=["y"])


def test_wide_accesses_respect_strides_alignment_and_gaps(build: Any) -> None:
    space, out = real(5, 80).bfloat16(), torch.full((5, 72), torch.nan).bfloat16()
    simulate(build("wide"), space[:, 8:72], out[:, :64])
    assert (out[:, :64] == space[:, 8:72]).all() and out[:, 64:].isnan().all()
    with pytest.raises(OutOfBoundsError, match="misaligned"):
        simulate(build("wide"), space[:, 4:68], out[:, :64])
    with pytest.raises(OutOfBoundsError, match="x: element offset"):
        simulate(build("wide", ("if tx < 8", "if tx < 9")), space[:, :64], out[:, :64])


def test_a_stride_that_its_integer_does_not_hold_leads_elsewhere(build: Any) -> None:
    x = torch.arange(128, dtype=torch.int8).view(2, 64)
    # Of the 2 GiB between the rows no page is touched.
    out = torch.empty(2**31 + 64, dtype=torch.int8).as_strided((2, 64), (2**31, 1))
    simulate(build("far"), x, out)
    assert torch.equal(out, x)
    cut = build("far", ('"stride, out_stride", "int64"', '"stride, out_stride"'))
    simulate(cut, x, x.clone())
    with pytest.raises(OutOfBoundsError, match="out: out_stride is 2147483648, of which int32 holds -2147483648"):
        simulate(cut, x, out)


def test_fragments(build: Any) -> None:
    x, rows, turned = real(64, 32), torch.full((3, 64), torch.nan), torch.full((32, 64), torch.nan)
    x[3, 5] = torch.nan
    x[4] = torch.nan
    simulate(build("tiles"), x, rows, turned)
    clean = x.nan_to_num(nan=-torch.inf)
    assert (rows[0] == clean.amax(1)).all(), "the maximum drops NaN"
    assert (rows[1] == x.nan_to_num(nan=torch.inf).amin(1)).all()
    torch.testing.assert_close(rows[2], x.sum(1), equal_nan=True)
    torch.testing.assert_close(turned, x.T, equal_nan=True)


def test_a_parallel_loop_reads_what_other_warps_stored_after_a_barrier(build: Any) -> None:
    kernel = build(
        "tiles",
        ("            T.copy(tile, staged)\n            T.sync_threads()\n", "            T.copy(tile, staged)\n"),
    )
    with pytest.raises(RaceError, match="staged"):
        simulate(kernel, real(64, 32), torch.empty((3, 64)), torch.empty((32, 64)))


def test_a_fragment_that_nobody_wrote_is_not_read(build: Any) -> None:
    kernel = build("tiles", ("            T.copy(x, tile)\n", ""))
    with pytest.raises(UninitialisedError, match="tile"):
        simulate(kernel, real(64, 32), torch.empty((3, 64)), torch.empty((32, 64)))


def test_a_private_variable_that_nobody_wrote_holds_poison(build: Any) -> None:
    x, sums = real(5, 128), torch.empty((5, 2))
    simulate(build("reduction", ("            mine = 0.0\n", "            mine = other\n")), x, sums)
    assert sums[:, 0].isnan().all()
