"""Which kernels a call launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from msa_tiles.runtime.launch import Kernel
from msa_tiles.runtime.registry import Cell


@contextlib.contextmanager
def launched() -> Iterator[dict[str, Cell]]:
    """The cells of all kernels that are launched inside, by id, in order of their first launch.

    Kernels count nothing themselves: a launch takes a few microseconds, and only benchmarks ask.
    """
    seen: dict[str, Cell] = {}
    launch = Kernel.__call__

    def noted(kernel: Kernel, *args: Any) -> None:
        seen.setdefault(kernel.cell.id, kernel.cell)
        launch(kernel, *args)

    Kernel.__call__ = noted  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        Kernel.__call__ = launch  # type: ignore[method-assign]
