"""Faults planted in copies of a kernel that accumulates in tensor memory: every one is caught, under every seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planting import planted

from msa_tiles.simulator import (
    BarrierError,
    DeadlockError,
    InFlightError,
    RaceError,
    UninitialisedError,
    UnsupportedError,
    simulate,
)

SEEDS = range(4)
BLOCKS, BLOCK, DIM, ROWS = 7, 64, 64, 128


class WrongResultError(AssertionError):
    """The kernel ended without an error and its output is not the reference's."""


def score(kernel: Any, seed: int, late: bool = True) -> None:
    """Run a copy of the kernel and compare."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-4, 5, (ROWS, DIM), generator=generator).bfloat16()
    k = torch.randint(-4, 5, (BLOCKS * BLOCK, DIM), generator=generator).bfloat16()
    out = torch.full((BLOCKS, ROWS), torch.nan)
    simulate(kernel, q, k, out, seed=seed, late=late)
    wanted = (k.float() @ q.float().T).reshape(BLOCKS, BLOCK, ROWS).amax(1)
    if not torch.equal(out, wanted):
        raise WrongResultError


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.drawn(6)
def test_the_whole_kernel_is_right(tmp_path: Path, seed: int, late: bool) -> None:
    score(planted("small_tensor", tmp_path).maxima(), seed, late)


LOOP = "\n" + " " * 20
K_FULL, K_FREE = "T.barrier_wait(k_full[stage], (block // STAGES) & 1)", "T.tcgen05_mma_arrive(k_free[stage])"
K_ROOM = "T.barrier_wait(k_free[stage], ((block // STAGES) & 1) ^ 1)"
S_FULL, S_COMMIT = "T.barrier_wait(s_full[place], (block // 2) & 1)", "T.tcgen05_mma_arrive(s_full[place])"
S_ROOM, S_FREE = "T.barrier_wait(s_free[place], ((block // 2) & 1) ^ 1)", "T.barrier_arrive(s_free[place])"
READ, LAST = "T.copy(S[place, :, :], part)", "T.sync_threads()"
GEMM, OPERANDS = "T.tcgen05_gemm(", "Q_shared, K_shared[stage, :, :], S[place, :, :]"
COUNT = "T.alloc_barrier(arrive_count=["
# What a reader meets that comes too early: another one's writes, or nothing at all yet.
EARLY = (RaceError, UninitialisedError)

Fault = tuple[list[tuple[str, str]], type[Exception] | tuple[type[Exception], ...]]
FAULTS: dict[str, Fault] = {
    "dropped wait for K": ([(K_FULL, "pass")], EARLY),
    "dropped wait for Q": ([("T.barrier_wait(q_full, 0)", "pass")], EARLY),
    "wrong parity of a full stage": ([(K_FULL, f"{K_FULL[:-1]} ^ 1)")], (*EARLY, DeadlockError)),
    "dropped wait for room": ([(K_ROOM, "pass")], RaceError),
    "stage freed before its product": ([(f"{K_FREE}{LOOP}", ""), (GEMM, f"{K_FREE}{LOOP}{GEMM}")], RaceError),
    "stage freed by the threads":
        ([(K_FREE, "T.barrier_arrive(k_free[stage])"), (f"k_free = {COUNT}1", f"k_free = {COUNT}32")], RaceError),
    "stage never freed": ([(f"{K_FREE}{LOOP}", "")], DeadlockError),
    "dropped wait for a product": ([(S_FULL, "pass")], EARLY),
    "wrong parity of a product": ([(S_FULL, f"{S_FULL[:-1]} ^ 1)")], (*EARLY, DeadlockError)),
    "product announced before it is issued":
        ([(S_COMMIT, "pass"), (GEMM, f"{S_COMMIT}{LOOP}{GEMM}")], (*EARLY, InFlightError)),
    "product announced by the threads":
        ([(S_COMMIT, "T.barrier_arrive(s_full[place])"), (f"s_full = {COUNT}1", f"s_full = {COUNT}32")], RaceError),
    "product never announced": ([(S_COMMIT, "pass")], DeadlockError),
    "product announced twice":
        ([(S_COMMIT, f"{S_COMMIT}{LOOP}{S_COMMIT}")], (*EARLY, BarrierError, InFlightError, DeadlockError)),
    "dropped wait for an accumulator": ([(S_ROOM, "pass")], (RaceError, BarrierError, DeadlockError)),
    "accumulator freed before it is read": ([(f"{READ}{LOOP}{S_FREE}", f"{S_FREE}{LOOP}{READ}")], RaceError),
    "accumulator freed by one thread":
        ([(S_FREE, f"if tx == 0:{LOOP}    {S_FREE}"), (f"s_free = {COUNT}128", f"s_free = {COUNT}1")], RaceError),
    "accumulator never freed": ([(S_FREE, "pass")], DeadlockError),
    "one accumulator for two": ([(OPERANDS, OPERANDS.replace("place", "0"))], EARLY),
    "accumulator never cleared": ([("clear_accum=True", "clear_accum=False")], UninitialisedError),
    "accumulator not cleared again": ([("clear_accum=True", "clear_accum=block < 2")], WrongResultError),
    "wrong stage": ([(OPERANDS, OPERANDS.replace("stage", "0"))], (RaceError, WrongResultError)),
    "not transposed": ([("transpose_B=True", "transpose_B=False")], WrongResultError),
    "tensor memory given back too early": ([(LAST, "pass")], (RaceError, InFlightError)),
    "commit under way at the end": ([(f"{K_FREE}{LOOP}{S_COMMIT}", f"{S_COMMIT}{LOOP}{K_FREE}")], InFlightError),
    "read by half of a warpgroup": ([("if tx < 128:", "if tx < 64:")], UnsupportedError),
    "products of several warps": ([("tx >= 160 and tx < 192", "tx >= 160")], UnsupportedError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(6)
@pytest.mark.planted
def test_a_fault_is_caught(tmp_path: Path, fault: str) -> None:
    replacements, expected = FAULTS[fault]
    kernel = planted("small_tensor", tmp_path, *replacements).maxima()
    for seed in SEEDS:
        with pytest.raises(expected):
            score(kernel, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_product_announces_itself(tmp_path: Path, seed: int) -> None:
    itself = [("mbar=None", "mbar=k_free[stage]"), (f"{K_FREE}{LOOP}", "")]
    score(planted("small_tensor", tmp_path, *itself).maxima(), seed)
