"""Kernels that are compiled while the call that needs them goes on: all of a call side by side.

A call looks for all of its kernels before it launches the first, so that every one that is missing is being compiled by
then; the first launch of each waits for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import sys
import threading
from collections.abc import Mapping

from msa_tiles.runtime import compiler, toolchain, workers
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.registry import Cell
from msa_tiles.runtime.workers import Done, Task, Workers

LINGER = 10.0  # seconds that a worker waits for another task: starting one takes about three
_log = logging.getLogger(__name__)
_state = threading.Lock()
_workers: Workers | None = None
_running: dict[tuple, Pending] = {}
_unsaid: list[Pending] = []


def obtain(cell: Cell, variant: Mapping[str, int], arch: str) -> Entry | Pending:
    """The cache entry of a variant, or what will become it: its compilation has begun.

    Raises ToolchainError when there is nothing to compile it with.
    """
    cache = Cache()
    entry = compiler.find_compiled(cell, variant, arch, cache)
    if entry is not None:
        return entry
    toolchain.require_compiler(cell.dsl)
    if not sys.executable:  # an embedded interpreter, of which there is no second one to be had
        return compiler.compile_variant(cell, variant, arch, cache)
    key = (cell.id, cell.file, cell.source_hash(), tuple(variant.items()), arch, cache.root)
    with _state:
        found = _running.get(key)
        if found is None:
            found = _running[key] = Pending(key, Task(cell, variant, arch, cache.root))
            _unsaid.append(found)
        return found


class Pending:
    """A kernel that is being compiled. Made by `obtain`."""

    def __init__(self, key: tuple, task: Task) -> None:
        self._key, self._task = key, task
        self._future: concurrent.futures.Future[Done] | None = _submit(task)

    def __str__(self) -> str:
        return str(self._task)

    def wait(self) -> Entry:
        """The entry, once it is there.

        Raises what `compile_variant` raises; whoever waits again then has it compiled again.
        """
        _announce()
        with _state:
            future = self._future = self._future or _submit(self._task)
        try:
            done = future.result()
        except BaseException:
            with _state:
                self._future = None
            raise
        finally:
            with _state:
                _running.pop(self._key, None)
        if done.compiled:
            _log.info("compiled %s in %.1f s", self, done.seconds)
        return done.entry


def _submit(task: Task) -> concurrent.futures.Future[Done]:
    """Begin a task. The caller holds the lock."""
    global _workers
    if _workers is None:
        _workers = Workers(workers.most_workers(), LINGER)
    return _workers.submit(task)


def _announce() -> None:
    """Say once, before anybody waits, what is being compiled, how long that takes and what spares it."""
    with _state:
        begun = [str(pending) for pending in _unsaid]
        dsls = sorted({pending._task.cell.dsl for pending in _unsaid})
        _unsaid.clear()
    if begun:
        usual = ", ".join(
            "{} to {} s of a core for a {} kernel".format(*compiler.USUAL_SECONDS[dsl], dsl) for dsl in dsls
        )
        _log.warning(
            "compiling %d kernel%s in up to %d processes, usually %s, for the first call only; `msa-tiles build --for "
            "CALL` compiles ahead of time, and a pack holds kernels that are compiled: %s",
            len(begun),
            "s" if len(begun) > 1 else "",
            workers.most_workers(),
            usual,
            ", ".join(begun),
        )


def _fresh() -> None:
    """In a child of a fork: threads and workers are its parent's, and what they compile comes to the parent."""
    global _state, _workers
    _state, _workers = threading.Lock(), None
    for pending in _running.values():
        pending._future = None
    _running.clear()
    _unsaid.clear()


os.register_at_fork(after_in_child=_fresh)
