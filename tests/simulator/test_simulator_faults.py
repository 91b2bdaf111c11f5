"""Faults planted in copies of small kernels: every one is caught, under every seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from planting import planted
from torch import Tensor

from msa_tiles.simulator import (
    BarrierError,
    DeadlockError,
    InFlightError,
    OutOfBoundsError,
    ProxyFenceError,
    RaceError,
    SimulationError,
    UninitialisedError,
    simulate,
)

SEEDS = range(4)
DIM, ROWS, BLOCK = 64, 64, 64
TILES = 3


class WrongResultError(AssertionError):
    """The kernel ended without an error and its output is not the reference's."""


def inputs() -> tuple[Tensor, ...]:
    """Three tiles of queries, the last one short; four blocks, the last one short; a block that names nothing."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2 * ROWS + 37, DIM, generator=generator).bfloat16()
    k, v = (torch.randn(3 * BLOCK + 21, DIM, generator=generator).bfloat16() for _ in range(2))
    ids = torch.tensor([[2, 0, 3], [1, -1, 0], [3, 2, -1]], dtype=torch.int32)
    return q, k, v, ids, torch.tensor([BLOCK, BLOCK, BLOCK, 21], dtype=torch.int32)


def wanted(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor) -> Tensor:
    out = torch.empty(q.shape)
    for tile in range(TILES):
        rows = slice(tile * ROWS, (tile + 1) * ROWS)
        keys = torch.cat([torch.arange(int(visible[b])) + int(b) * BLOCK for b in ids[tile] if b >= 0])
        out[rows] = (q[rows].float() @ k[keys].float().T * DIM**-0.5).softmax(-1) @ v[keys].float()
    return out


def attend(kernel: Any, seed: int, late: bool = True) -> None:
    """Run a copy of the kernel and compare."""
    arguments = inputs()
    out = torch.full(arguments[0].shape, torch.nan).bfloat16()
    simulate(kernel, *arguments, out, DIM**-0.5 * math.log2(math.e), seed=seed, late=late)
    if not torch.allclose(out.float(), wanted(*arguments), atol=0.03):
        raise WrongResultError


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.drawn(3)
def test_the_whole_kernel_is_right(tmp_path: Path, seed: int, late: bool) -> None:
    attend(planted("small_attention", tmp_path).attention(), seed, late)


# Line ends of the kernel's text: in the loop over tiles, in the consumer's loop over blocks, and in a branch there.
TILE, BLOCKS, BRANCH = ("\n" + " " * n for n in (20, 24, 28))
WAIT, STORE_WAIT, FENCE, SYNC = (
    "T.wait_wgmma(0)",
    "T.tma_store_wait(0)",
    "T.fence_proxy_async()",
    "T.sync_threads(8, 128)",
)
K_FULL, V_FULL, Q_FULL = (
    "barrier_wait(k_full[stage], phase",
    "barrier_wait(v_full[stage], phase",
    "barrier_wait(q_full, tile",
)
KV_FREE = "barrier_wait(kv_free[stage], phase ^ 1)"
KV_ARRIVE, Q_ARRIVE = "T.barrier_arrive(kv_free[stage])", "T.barrier_arrive(q_free)"
COUNT, CLEAR = "T.alloc_barrier(arrive_count=", "clear_accum=n == 0"
ONE_THREAD = "if tx == 0:"
UNSEEN = (WrongResultError, RaceError)

Fault = tuple[list[tuple[str, str]], type[Exception] | tuple[type[Exception], ...]]
FAULTS: dict[str, Fault] = {
    "wrong parity of a full stage": ([(f"{K_FULL})", f"{K_FULL} ^ 1)")], (*UNSEEN, DeadlockError)),
    "wrong parity of a free stage": ([(KV_FREE, "barrier_wait(kv_free[stage], phase)")], DeadlockError),
    "parity that never flips": ([(KV_FREE, "barrier_wait(kv_free[stage], 1)")], UNSEEN),
    "dropped wait for K": ([(f"T.{K_FULL})", "pass")], UNSEEN),
    "dropped wait for V": ([(f"T.{V_FULL})", "pass")], UNSEEN),
    "dropped wait for Q": ([(f"T.{Q_FULL} & 1)", "pass")], UNSEEN),
    "dropped wait for room": ([(f"T.{KV_FREE}", "pass")], RaceError),
    "dropped arrival of the producer": ([("T.barrier_arrive(v_full[stage])", "pass")], DeadlockError),
    "dropped arrival of the consumer": ([(KV_ARRIVE, "pass")], DeadlockError),
    "arrival of one thread": ([(Q_ARRIVE, f"{ONE_THREAD}{BRANCH}    {Q_ARRIVE}")], DeadlockError),
    "barrier counts too few": ([(f"kv_free = {COUNT}[128", f"kv_free = {COUNT}[64")], BarrierError),
    "barrier counts too many": ([(f"q_free = {COUNT}128", f"q_free = {COUNT}256")], DeadlockError),
    "named barrier counts too few": ([(SYNC, "T.sync_threads(8, 64)")], BarrierError),
    "named barrier counts too many": ([(SYNC, "T.sync_threads(8, 256)")], (DeadlockError, BarrierError)),
    "dropped wait_wgmma of S": ([(WAIT, "pass")], InFlightError),
    "dropped wait_wgmma of O": ([(f"n == 0){BLOCKS}{WAIT}", "n == 0)")], (*UNSEEN, InFlightError)),
    "wait_wgmma that leaves one": ([(WAIT, "T.wait_wgmma(1)")], InFlightError),
    "stage freed before wait_wgmma": ([(f"{WAIT}{BLOCKS}{KV_ARRIVE}", f"{KV_ARRIVE}{BLOCKS}{WAIT}")], UNSEEN),
    "accumulator always cleared": ([(CLEAR, "clear_accum=True")], WrongResultError),
    "accumulator never cleared": ([(CLEAR, "clear_accum=False")], (UninitialisedError, WrongResultError)),
    "missing rescale of O": ([("if n > 0:", "if n > 99:")], WrongResultError),
    "missing rescale of the sum": ([("row_sum[i] * old_max[i] + part", "row_sum[i] + part")], WrongResultError),
    "maximum not carried on": ([("dim=1, clear=False", "dim=1, clear=True")], WrongResultError),
    "maximum not initialised": ([('T.fill(row_max, -T.infinity("float32"))', "pass")], UninitialisedError),
    "dropped tma_store_wait": ([(f"{STORE_WAIT}{TILE}", "")], UNSEEN),
    "dropped last tma_store_wait": ([(f"                {STORE_WAIT}\n\n", "\n")], InFlightError),
    "no barrier after tma_store_wait": ([(f"{STORE_WAIT}{TILE}{SYNC}", STORE_WAIT)], RaceError),
    "missing fence before a TMA store": ([(FENCE, "pass")], ProxyFenceError),
    "fence by one thread": ([(FENCE, f"{ONE_THREAD}{BLOCKS}{FENCE}")], ProxyFenceError),
    "fence after the barrier": ([(f"{FENCE}{TILE}{SYNC}", f"{SYNC}{TILE}{FENCE}")], ProxyFenceError),
    "no barrier before a TMA store": ([(f"{FENCE}{TILE}{SYNC}", FENCE)], RaceError),
    "wrong stage": ([("K_shared[stage, :, :], barrier", "K_shared[0, :, :], barrier")], UNSEEN),
    "bytes on another barrier": ([("barrier=v_full[stage]", "barrier=k_full[stage]")], UNSEEN),
    "load that nobody waits for": ([
        ("            else:\n", "                T.barrier_wait(q_free, (tiles & 1) ^ 1)\n"
         "                T.tma_copy(q[0:ROWS, :], Q_shared, barrier=q_full)\n            else:\n")], InFlightError),
    "id out of bounds": ([("visible[T.max(id, 0)])", "visible[T.max(id, 0) + 1])")], OutOfBoundsError),
    "id below zero": ([("T.if_then_else(id < 0, 0, visible[T.max(id, 0)])", "visible[id]")], OutOfBoundsError),
    "wrong block": ([("first = T.max(ids[tile, n], 0)", "first = T.max(ids[tile, n] + 1, 0)")], WrongResultError),
    "tail not masked": ([("j < keys", "j < 64")], WrongResultError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_fault_is_caught(tmp_path: Path, fault: str) -> None:
    replacements, expected = FAULTS[fault]
    kernel = planted("small_attention", tmp_path, *replacements).attention()
    for seed in SEEDS:
        with pytest.raises(expected):
            attend(kernel, seed)


def test_messages_say_where(tmp_path: Path) -> None:
    kernel = planted("small_attention", tmp_path, *FAULTS["missing fence before a TMA store"][0]).attention()
    with pytest.raises(
        SimulationError, match=r"O_shared\[0, 0\](.|\n)*threads 0-127 of CTA \(0,\), at (.|\n)*tma_copy"
    ):
        attend(kernel, 0)


def test_a_deadlock_names_every_waiter(tmp_path: Path) -> None:
    kernel = planted("small_attention", tmp_path, *FAULTS["dropped arrival of the consumer"][0]).attention()
    with pytest.raises(DeadlockError) as caught:
        attend(kernel, 0)
    assert "threads 128-255 wait for parity 0 of kv_free[0]: phase 0, 0 of 128 arrived" in str(caught.value)
    assert "threads 0-127 wait for parity" in str(caught.value)
