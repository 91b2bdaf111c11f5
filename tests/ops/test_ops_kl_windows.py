"""How index_kl cuts its queries into windows on CUDA."""

from __future__ import annotations

import types

import pytest
import torch

from msa_tiles.call.kl import Divergence
from msa_tiles.call.where import Where
from msa_tiles.launch import kl, places, schedules


@pytest.mark.parametrize(
    ("total_q", "bytes_per_query", "workspace", "window"),
    [(1, 8, 8, 1), (32768, 1 << 15, 1 << 30, 4096), (32768, 1 << 20, 1 << 30, 1024), (100, 8, 801, 64), (9, 4, 7, 1)],
)
def test_windows_fit_the_workspace(total_q: int, bytes_per_query: int, workspace: int, window: int) -> None:
    found = kl.choose_window(total_q, workspace, lambda queries: bytes_per_query * queries)
    assert found == window and found * bytes_per_query <= workspace


def test_a_workspace_below_one_query_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workspace: got 7 bytes; wanted at least 8 for the partial gradients of one"):
        kl.choose_window(5, 7, lambda queries: 8 * queries)


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_kernels_get_their_dtypes_whatever_the_default_is(monkeypatch, bfloat16_by_default) -> None:
    launched = {}
    monkeypatch.setattr(kl, "kernel", lambda facts, backend, op, variant: lambda *given: launched.update({op: given}))
    monkeypatch.setattr(schedules, "find", lambda *call: None)
    monkeypatch.setattr(schedules, "build", lambda *parts: None)
    chip = types.SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    q, k, idx_q, idx_k = torch.zeros(5, 4, 64), torch.zeros(5, 2, 64), torch.zeros(5, 2, 64), torch.zeros(5, 64)
    floats = {"loss": (), "d_idx_q": (5, 2, 64), "d_idx_k": (5, 64)}
    outputs = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in floats.items()}
    lse, ids = torch.zeros(5, 4, dtype=torch.float32), torch.zeros(2, 5, 3, dtype=torch.int32)
    where = Where()
    at = places.place(where, 5, 5, 64, q.device)
    call = Divergence(q, k, lse, idx_q, idx_k, ids, where, None, None, 64, 1.0, 1.0, 1 << 30, True, False, "auto")
    kl.launch(types.SimpleNamespace(op="index_kl", variant={}), call, at, 5, **outputs)
    assert set(launched) == {"index_lse", "index_kl", "index_gradients"}
    given = [
        tensor for tensor in launched["index_kl"] if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    ]
    assert [tensor.dtype for tensor in given] == [torch.bfloat16] * 2 + [torch.float32] + [torch.bfloat16] * 2 + [
        torch.float32
    ] * 5


def test_tasks_of_a_window() -> None:
    # Every block that the edges can touch, and one more task for each 128 edges.
    assert kl._most_tasks(65536, 1, 32768, 128) == 256 + 512
    assert kl._most_tasks(30, 3, 1000, 64) == 30
