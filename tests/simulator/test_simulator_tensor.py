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
def test_the_whole_kernel_is_right(tmp_path: Path, seed: int, late: bool) -> None:
    score(planted("small_tensor", tmp_path).maxima(), seed, late)


LOOP = "\n" + " " * 20
K_FULL, K_FREE = "T.barrier_wait(k_full[block % STAGES], (block // STAGES) & 1)", "T.tcgen05_mma_arrive(k_free[block % STAGES])"
S_FULL, S_FREE = "T.barrier_wait(s_full[block % 2], (block // 2) & 1)", "T.barrier_wait(s_free[block % 2], ((block // 2) & 1) ^ 1)"
S_COMMIT, S_ARRIVE = "T.tcgen05_mma_arrive(s_full[block % 2])", "T.barrier_arrive(s_free[block % 2])"
K_ROOM = "T.barrier_wait(k_free[block % STAGES], ((block // STAGES) & 1) ^ 1)"
READ, LAST = "T.copy(S[block % 2, :, :], part)", "T.sync_threads()"
GEMM = "T.tcgen05_gemm(Q_shared, K_shared[block % STAGES, :, :], S[block % 2, :, :], transpose_B=True, clear_accum=True, mbar=None)"

Fault = tuple[list[tuple[str, str]], type[Exception] | tuple[type[Exception], ...]]
FAULTS: dict[str, Fault] = {
    "dropped wait for K": ([(K_FULL, "pass")], (RaceError, UninitialisedError)),
    "dropped wait for Q": ([("T.barrier_wait(q_full, 0)", "pass")], (RaceError, UninitialisedError)),
    "wrong parity of a full stage": ([(K_FULL, K_FULL[:-1] + " ^ 1)")], (RaceError, UninitialisedError, DeadlockError)),
    "dropped wait for room for K": ([(K_ROOM, "pass")], RaceError),
    "stage freed before its product": ([(f"{K_FREE}{LOOP}", ""), (GEMM, f"{K_FREE}{LOOP}{GEMM}")], RaceError),
    "stage freed by a thread": ([(K_FREE, "T.barrier_arrive(k_free[block % STAGES])"),
                                 ("k_free = T.alloc_barrier(arrive_count=[1]", "k_free = T.alloc_barrier(arrive_count=[32]")], RaceError),
    "stage never freed": ([(f"{K_FREE}{LOOP}", "")], DeadlockError),
    "dropped wait for a product": ([(S_FULL, "pass")], (RaceError, UninitialisedError)),
    "wrong parity of a product": ([(S_FULL, S_FULL[:-1] + " ^ 1)")], (RaceError, UninitialisedError, DeadlockError)),
    "product announced before it is issued":
        ([(f"{S_COMMIT}", "pass"), (GEMM, f"{S_COMMIT}{LOOP}{GEMM}")], (RaceError, UninitialisedError, InFlightError)),
    "product announced by a thread":
        ([(S_COMMIT, "T.barrier_arrive(s_full[block % 2])"),
          ("s_full = T.alloc_barrier(arrive_count=[1]", "s_full = T.alloc_barrier(arrive_count=[32]")], (RaceError, InFlightError)),
    "product never announced": ([(S_COMMIT, "pass")], DeadlockError),
    "product announced twice": ([(S_COMMIT, f"{S_COMMIT}{LOOP}{S_COMMIT}")], (BarrierError, RaceError, InFlightError, DeadlockError, UninitialisedError)),
    "dropped wait for an accumulator": ([(S_FREE, "pass")], (RaceError, BarrierError, DeadlockError)),
    "accumulator freed before it is read": ([(f"{READ}{LOOP}{S_ARRIVE}", f"{S_ARRIVE}{LOOP}{READ}")], RaceError),
    "accumulator freed by one thread":
        ([(S_ARRIVE, f"if tx == 0:{LOOP}    {S_ARRIVE}"),
          ("s_free = T.alloc_barrier(arrive_count=[128]", "s_free = T.alloc_barrier(arrive_count=[1]")], RaceError),
    "accumulator never freed": ([(S_ARRIVE, "pass")], DeadlockError),
    "one accumulator for two": ([(GEMM, GEMM.replace("S[block % 2,", "S[0,"))], (RaceError, UninitialisedError)),
    "accumulator never cleared": ([("clear_accum=True", "clear_accum=False")], UninitialisedError),
    "accumulator not cleared again": ([("clear_accum=True", "clear_accum=block < 2")], WrongResultError),
    "wrong stage": ([(GEMM, GEMM.replace("K_shared[block % STAGES,", "K_shared[0,"))], (RaceError, WrongResultError)),
    "not transposed": ([("transpose_B=True", "transpose_B=False")], WrongResultError),
    "tensor memory given back too early": ([(LAST, "pass")], (RaceError, InFlightError)),
    "commit under way at the end": ([(f"{K_FREE}{LOOP}{S_COMMIT}", f"{S_COMMIT}{LOOP}{K_FREE}")], InFlightError),
    "read by half of a warpgroup": ([("if tx < 128:", "if tx < 64:")], UnsupportedError),
    "products of two warps": ([("tx >= 160 and tx < 192", "tx >= 160")], UnsupportedError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(tmp_path: Path, fault: str) -> None:
    replacements, expected = FAULTS[fault]
    kernel = planted("small_tensor", tmp_path, *replacements).maxima()
    for seed in SEEDS:
        with pytest.raises(expected):
            score(kernel, seed)
