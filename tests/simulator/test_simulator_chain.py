"""Faults planted in copies of a kernel whose second product reads tensor memory: every one is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planting import planted

from msa_tiles.simulator import (
    DeadlockError,
    DivergenceError,
    InFlightError,
    RaceError,
    UninitialisedError,
    UnsupportedError,
    simulate,
)

SEEDS = range(4)
BLOCKS, BLOCK, DIM, USED = 5, 64, 64, 96


class WrongResultError(AssertionError):
    """The kernel ended without an error and its output is not the reference's."""


def multiply(kernel: Any, seed: int, late: bool = True) -> None:
    """Run a copy of the kernel on values whose first product BF16 holds exactly, and compare."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randint(-1, 2, (rows, DIM), generator=generator).bfloat16()
        for rows in (USED, BLOCKS * BLOCK, BLOCKS * BLOCK)
    )
    out = torch.full((BLOCKS, USED, DIM), torch.nan)
    simulate(kernel, q, k, v, out, seed=seed, late=late)
    keys, values = (t.float().reshape(BLOCKS, BLOCK, DIM) for t in (k, v))
    if not torch.equal(out, q.float() @ keys.transpose(1, 2) @ values):
        raise WrongResultError


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.drawn(3)
def test_the_whole_kernel_is_right(tmp_path: Path, seed: int, late: bool) -> None:
    multiply(planted("small_chain", tmp_path).chain(), seed, late)


LOOP = "\n" + " " * 20
STORE, P_FULL, P_ARRIVE = "T.copy(rounded, P)", "T.barrier_wait(p_full, before & 1)", "T.barrier_arrive(p_full)"
P_ROOM, P_FREE = "T.barrier_wait(p_free, (block & 1) ^ 1)", "T.tcgen05_mma_arrive(p_free)"
O_FULL, O_ROOM = "T.barrier_wait(o_full, block & 1)", "T.barrier_wait(o_free, (before & 1) ^ 1)"
READ, PRODUCT = "T.copy(PV, result)", "T.tcgen05_gemm(P, V_shared[before & 1, :, :], PV, clear_accum=True, mbar=None)"
LAST, REGISTERS = "            T.sync_threads()", "T.set_max_nreg(40, 0)"
LOADED = "T.tma_copy(q[0:USED, :], Q_shared[0:USED, :], barrier=full[stage])"
FLOATS, ROUNDED = 'S = T.alloc_tmem([ROWS, BLOCK], "float32")', 'P = T.alloc_tmem([ROWS, BLOCK], "bfloat16")'
# What a reader meets that comes too early: another one's writes, or nothing at all yet.
EARLY = (RaceError, UninitialisedError)

Fault = tuple[list[tuple[str, str]], type[Exception] | tuple[type[Exception], ...]]
FAULTS: dict[str, Fault] = {
    "dropped wait for P": ([(P_FULL, "pass")], EARLY),
    "wrong parity of P": ([(P_FULL, f"{P_FULL[:-1]} ^ 1)")], (*EARLY, DeadlockError)),
    "P announced before it is stored": ([(f"{STORE}{LOOP}{P_ARRIVE}", f"{P_ARRIVE}{LOOP}{STORE}")], EARLY),
    "dropped wait for room for P": ([(P_ROOM, "pass")], (RaceError, DeadlockError)),
    "P freed before its product": ([(P_FREE, "pass"), (PRODUCT, f"{P_FREE}\n{' ' * 28}{PRODUCT}")], RaceError),
    "P never freed": ([(P_FREE, "pass")], DeadlockError),
    "dropped wait for PV": ([(O_FULL, "pass")], EARLY),
    "dropped wait for room for PV": ([(O_ROOM, "pass")], (RaceError, DeadlockError)),
    "PV freed before it is read":
        ([(f"{READ}{LOOP}T.barrier_arrive(o_free)", f"T.barrier_arrive(o_free){LOOP}{READ}")], RaceError),
    "PV not cleared": ([(PRODUCT, PRODUCT.replace("clear_accum=True", "clear_accum=False"))], UninitialisedError),
    "PV not cleared again":
        ([(PRODUCT, PRODUCT.replace("clear_accum=True", "clear_accum=before == 0"))], WrongResultError),
    "second operand turned":
        ([(PRODUCT, PRODUCT.replace("clear_accum", "transpose_B=True, clear_accum"))], WrongResultError),
    "P stored over S": ([(STORE, "T.copy(part, S)")], (RaceError, UninitialisedError)),
    "tensor memory given back too early": ([(LAST, "")], (RaceError, InFlightError)),
    "no row of Q": ([(LOADED, "pass")], UninitialisedError),
    "rows of Q of which a part is missing":
        ([(LOADED, LOADED.replace("q[0:USED, :]", "q[0:USED, 0:32]").replace("USED, :]", "USED, 0:32]"))],
         UninitialisedError),
    "rows of V that nobody loads":
        ([("first + BLOCK, :], V_shared[stage, :, :]", "first + 8, :], V_shared[stage, 0:8, :]")], UninitialisedError),
    "rows of Q that nobody loads, used":
        ([(LOADED, LOADED.replace("USED", "64"))], WrongResultError),
    "registers given up by a part of a warpgroup":
        ([(REGISTERS, "pass"), ("if tx < 288:", f"if tx < 288:{LOOP}{REGISTERS}")], DivergenceError),
    "registers given up by one warp more often":
        ([("if tx < 288:", f"if tx < 288:{LOOP}{REGISTERS}")], DivergenceError),
    "products in BF16": ([(FLOATS, FLOATS.replace("float32", "bfloat16"))], UnsupportedError),
    "whole numbers in tensor memory": ([(ROUNDED, ROUNDED.replace("bfloat16", "int8"))], UnsupportedError),
    "tensor memory filled": ([(STORE, "T.fill(P, 0)")], UnsupportedError),
    "tensor memory to shared memory": ([(READ, "T.copy(PV[0:64, :], V_shared[0, :, :])")], UnsupportedError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_fault_is_caught(tmp_path: Path, fault: str) -> None:
    replacements, expected = FAULTS[fault]
    kernel = planted("small_chain", tmp_path, *replacements).chain()
    for seed in SEEDS:
        with pytest.raises(expected):
            multiply(kernel, seed)
