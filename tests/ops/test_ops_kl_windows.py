"""How index_kl cuts its queries into windows on CUDA."""

from __future__ import annotations

import pytest

from msa_tiles.ops import _kl_kernels


@pytest.mark.parametrize(
    ("total_q", "bytes_per_query", "workspace", "window"),
    [(1, 8, 8, 1), (32768, 1 << 15, 1 << 30, 4096), (32768, 1 << 20, 1 << 30, 1024), (100, 8, 801, 64), (9, 4, 7, 1)],
)
def test_windows_fit_the_workspace(total_q: int, bytes_per_query: int, workspace: int, window: int) -> None:
    found = _kl_kernels.choose_window(total_q, workspace, lambda queries: bytes_per_query * queries)
    assert found == window and found * bytes_per_query <= workspace


def test_a_workspace_below_one_query_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workspace: got 7 bytes; wanted at least 8 for the partial gradients of one"):
        _kl_kernels.choose_window(5, 7, lambda queries: 8 * queries)


def test_tasks_of_a_window() -> None:
    # Every block that the edges can touch, and one more task for each 128 edges.
    assert _kl_kernels._most_tasks(65536, 1, 32768, 128) == 256 + 512
    assert _kl_kernels._most_tasks(30, 3, 1000, 64) == 30
