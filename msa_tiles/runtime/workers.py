"""Compile kernels in processes of their own, side by side.

A compiler changes what is its whole process's, holds the interpreter's lock for seconds, and is safe neither to fork
nor to share between threads: the process that calls operators is spared all that. A worker is a fresh interpreter that
gets tasks through a pipe. It is no child of `multiprocessing`, which runs programs without a guarded main module again.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msa_tiles.errors import ToolError
from msa_tiles.runtime import audit, compiler, toolchain
from msa_tiles.runtime.cache import Cache, CacheError, Entry
from msa_tiles.runtime.compiler import CompileError, variant_text
from msa_tiles.runtime.registry import Cell
from msa_tiles.sources import forget_operands, search_operands

VARIABLE = "MSA_TILES_JOBS"
MOST = 8  # workers of a process by default: each takes about a gigabyte
# The first line says where to import from, as the parent does; what follows are tasks.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); from msa_tiles.runtime.workers import"
_FAILURES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CompileError, toolchain.ToolchainError, CacheError, OSError, ValueError)
}


@dataclass(frozen=True)
class Task:
    """One variant of one cell to compile into a cache, and to measure there if it is to be audited."""

    cell: Cell
    variant: Mapping[str, int]
    arch: str
    root: Path
    audited: bool = False

    def __str__(self) -> str:
        return f"{self.cell.id} {variant_text(self.variant)}"


class Done(NamedTuple):
    """What became of a task: the entry, the seconds it took, and how many kernels were compiled for it (0 or 1)."""

    entry: Entry
    seconds: float
    compiled: int


def most_workers() -> int:
    """How many processes compile side by side: MSA_TILES_JOBS, or one for each core, at most 8. Raises ValueError."""
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return min(len(os.sched_getaffinity(0)), MOST)
    if not (given.isascii() and given.isdigit() and int(given)):
        raise ValueError(f"{VARIABLE} is {given!r}, wanted a number of processes, at least 1")
    return int(given)


def perform(task: Task) -> Done:
    """Do a task in this process. Raises what `compile_variant` raises."""
    before, start = compiler.compile_count(), time.perf_counter()
    entry = compiler.compile_variant(task.cell, task.variant, task.arch, Cache(task.root))
    seconds = time.perf_counter() - start
    if task.audited:
        # Measured here, so that the disassemblers run side by side too; who reads the verdict hears of their absence.
        with contextlib.suppress(toolchain.ToolchainError):
            audit.measured(entry)
    return Done(entry, seconds, compiler.compile_count() - before)


class Workers:
    """Up to `most` processes, which start as tasks come and end when none has come for `linger` seconds."""

    def __init__(self, most: int, linger: float = 0.0) -> None:
        self._most, self._linger = most, linger
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[Task, concurrent.futures.Future[Done]]] = collections.deque()
        self._threads = self._idle = 0
        self._closed = False

    def submit(self, task: Task) -> concurrent.futures.Future[Done]:
        """Have a task done. The future raises what `perform` does, and CompileError when a compiler process dies."""
        future: concurrent.futures.Future[Done] = concurrent.futures.Future()
        with self._changed:
            self._waiting.append((task, future))
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name="msa_tiles compiler", daemon=True).start()
        return future

    def close(self) -> None:
        """Begin nothing more. Whoever waits for a task that has not begun gets CancelledError."""
        with self._changed:
            self._closed = True
            for _, future in self._waiting:
                future.cancel()
            self._changed.notify_all()

    def _work(self) -> None:
        """Serve tasks with one process, in a thread of this one."""
        process: _Process | None = None
        try:
            while (found := self._next()) is not None:
                task, future = found
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    process = process or _Process()
                    done = process.ask(task)
                except _Died as error:
                    process = None
                    future.set_exception(CompileError(f"{task}: {error}"))
                except BaseException as error:
                    future.set_exception(error)
                else:
                    compiler.count(done.compiled)
                    future.set_result(done)
        finally:
            if process is not None:
                process.end()

    def _next(self) -> tuple[Task, concurrent.futures.Future[Done]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed, self._linger)
            self._idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None


class _Died(Exception):
    """A worker ended before it answered."""


class _Process:
    """A worker, seen from the process that it works for."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # what compilers print, as long as it lives
        # Compilers read docstrings.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
        command = [sys.executable, "-c", f"{_BOOT} serve; serve()"]
        try:
            # In a session of its own, so that it can be ended with all compilers that it has started.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise toolchain.ToolchainError(f"no process to compile in can be started: {error}") from error
        _alive.add(self)
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(sys.path).encode() + b"\n")

    @property
    def _stdin(self) -> Any:
        return self._child.stdin

    def ask(self, task: Task) -> Done:
        """Have a task done. Raises what it raised there, and _Died."""
        try:
            pickle.dump(task, self._stdin)
            self._stdin.flush()
            answer = pickle.load(self._child.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.end()
            raise _Died(f"its compiler process ended by {self._child.returncode}: {self._last_words()}") from error
        if isinstance(answer, Done):
            return answer
        kind, message = answer
        raise _FAILURES[kind](message)

    def end(self) -> None:
        """End it, and what it started."""
        _alive.discard(self)
        with contextlib.suppress(OSError):
            self._stdin.close()
        # An idle worker ends by itself now; one that compiles does not.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.5)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(5)

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 1000))
        return self._errors.read().decode(errors="replace").strip() or "it said nothing"


_alive: weakref.WeakSet[_Process] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for process in list(_alive):
        process.kill()


def _forget_all() -> None:
    """In a child of a fork: the workers are its parent's."""
    global _alive
    _alive = weakref.WeakSet()


os.register_at_fork(after_in_child=_forget_all)


def serve() -> None:
    """Do tasks from standard input until it ends. The main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_answer(task), answers)
        answers.flush()


def _answer(task: Task) -> Done | tuple[str, str]:
    """What came of a task; not every exception survives the way between processes."""
    try:
        # Whoever sends tasks may have changed operands, or the trees in which they are found.
        forget_operands()
        for directory in dict.fromkeys((task.cell.file.parents[2], *task.cell.search)):
            search_operands(directory)
        return perform(task)
    except ToolError as error:
        kind = type(error).__name__
        return (kind if kind in _FAILURES else "CompileError"), str(error)
    except (OSError, ValueError) as error:
        return ("OSError" if isinstance(error, OSError) else "ValueError"), str(error)
    except Exception as error:
        return "CompileError", f"{task}: {type(error).__name__}: {error}"
