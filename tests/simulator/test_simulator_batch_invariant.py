"""batch_invariant: a row's bits alone, in a batch, at another place of it and beside padding, by simulated kernels."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from simulated_calls import kernel
from torch import Tensor

from msa_tiles import ops, quant, runtime
from msa_tiles.call import backends
from msa_tiles.launch import attention, decode
from msa_tiles.runtime import CallFacts
from msa_tiles.simulator import simulate

SEED = int(os.environ["MSA_TILES_SEED"])
BLOCK, DIM, HEADS, GROUP, TOPK = 64, 64, 2, 8, 5
LENGTHS = [400, 90, 0, 333, 64]  # keys of the requests
ROWS = [(0, 399), (3, 332), (3, 300), (1, 89), (4, 63), (0, 200), (4, 5), (1, 3)]  # of requests, at positions


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """TileLang's kernels in the simulator, for CPU tensors; the names of those that were launched."""
    launched: list[str] = []

    def find(op: str, facts: CallFacts, backend: str = "auto", *, helper: bool = False) -> Any:
        assert backend == "tilelang"

        def launch(*arguments: Any) -> None:
            launched.append(op)
            simulate(kernel(op, "bf16" if op in SHARED else facts.precision, **facts.variant), *arguments)

        return launch

    monkeypatch.setattr(backends, "has_kernels", lambda device: True)
    monkeypatch.setattr(runtime, "find_kernel", find)
    monkeypatch.setattr(runtime, "serves", lambda *_arguments, **_options: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(decode, "num_sms", lambda index: 3)
    return launched


SHARED = ("combine", "build_schedule", "split_selection")


class Batch:
    """Keys of some requests, and for each of ROWS its query and ids."""

    def __init__(self, fp8: bool) -> None:
        generator = torch.Generator().manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        self.q = normal(len(ROWS), HEADS * GROUP, DIM)
        self.keys = [(normal(length, HEADS, DIM), normal(length, HEADS, DIM)) for length in LENGTHS]
        self.ids = torch.full((HEADS, len(ROWS), TOPK), -1, dtype=torch.int32)
        for row, (_, position) in enumerate(ROWS):
            blocks = position // BLOCK + 1
            for head in range(HEADS):
                # Neighbours share blocks, in orders of their own.
                chosen = torch.randperm(blocks, generator=generator)[:TOPK]
                self.ids[head, row, : len(chosen)] = chosen.to(torch.int32)
        self.scales: dict[str, Tensor] = {}
        if fp8:
            self.keys = [tuple(each.to(quant.FP8) for each in pair) for pair in self.keys]  # type: ignore[misc]
            self.scales = {name: torch.tensor([0.5, 1.5]) for name in ("k_scale", "v_scale")}

    def call(self, op: Any, rows: Sequence[int], padding: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
        """Some rows, ascending by request, and behind them rows of requests without keys."""
        requests = sorted({ROWS[row][0] for row in rows})
        keys = [self.keys[request] for request in requests]
        k, v = (torch.cat([pair[side] for pair in keys]) for side in (0, 1))
        counts = [sum(ROWS[row][0] == request for row in rows) for request in requests] + [1] * padding
        lengths = [LENGTHS[request] for request in requests] + [0] * padding
        nothing = torch.zeros(padding, HEADS * GROUP, DIM).to(torch.bfloat16)
        ids = torch.cat([self.ids[:, rows], torch.zeros(HEADS, padding, TOPK, dtype=torch.int32)], 1)
        starts_q, starts_k = (
            torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (counts, lengths)
        )  # fmt: skip
        positions = torch.tensor([ROWS[row][1] for row in rows] + [-1] * padding, dtype=torch.int32)
        out, lse = op(
            torch.cat([self.q[rows], nothing]), k, v, ids, block_size=BLOCK, cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k, q_positions=positions, return_lse=True, backend="tilelang", **self.scales, **options,
        )  # fmt: skip
        return out[: len(rows)], lse[: len(rows)]


def by_request(rows: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: ROWS[row][0])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("op", [ops.sparse_attention, ops.sparse_decode])
@pytest.mark.drawn(1)
def test_a_row_has_the_same_bits_alone_and_in_batches(op: Any, fp8: bool, simulated: list[str]) -> None:
    batch = Batch(fp8)
    every = by_request(range(len(ROWS)))
    whole = batch.call(op, every, batch_invariant=True)
    assert "shared_attention" not in simulated and simulated.count("combine") == 1
    padded = batch.call(op, every, padding=5, batch_invariant=True)
    some = [row for row in every if row not in (1, 7)]
    fewer = batch.call(op, some, batch_invariant=True)
    for result in (0, 1):
        assert torch.equal(padded[result], whole[result])
        assert torch.equal(fewer[result], whole[result][[every.index(row) for row in some]])
    for row in (0, 4):
        alone = batch.call(op, [row], batch_invariant=True)
        for result in (0, 1):
            assert torch.equal(alone[result][0], whole[result][every.index(row)])


@pytest.mark.slow
def test_windows_and_schedules_do_not_touch_the_bits(simulated: list[str]) -> None:
    batch, every = Batch(False), by_request(range(len(ROWS)))
    whole = batch.call(ops.sparse_attention, every, batch_invariant=True)
    windowed = batch.call(
        ops.sparse_attention, every, batch_invariant=True, workspace=3 * TOPK * HEADS * GROUP * (2 * DIM + 4)
    )  # fmt: skip
    assert simulated.count("combine") == 1 + 3
    assert torch.equal(windowed[0], whole[0]) and torch.equal(windowed[1], whole[1])


@pytest.mark.slow
def test_without_it_splits_follow_the_batch(simulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That the comparison above can fail."""
    monkeypatch.setattr(decode, "num_sms", lambda index: 2 * len(ROWS))
    batch, every = Batch(False), by_request(range(len(ROWS)))
    whole, _ = batch.call(ops.sparse_decode, every)
    alone = torch.cat([batch.call(ops.sparse_decode, [row])[0] for row in every])
    assert not torch.equal(alone, whole)
    torch.testing.assert_close(alone.float(), whole.float(), rtol=0, atol=0.05)
    assert attention.HYBRID is None
    simulated.clear()
    batch.call(ops.sparse_attention, every)
    assert "shared_attention" in simulated
