"""What a server's log is told, once a process, and what is not tried again after no kernel served it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from msa_tiles.runtime import CompileError, NoKernelError, ToolchainError

_SAID: set[tuple[str, str]] = set()
_KINDS: dict[Hashable, Kinds] = {}


def once(log: logging.Logger, level: int, text: str) -> None:
    """Log a sentence unless it was logged before."""
    key = (log.name, text)
    if key not in _SAID:
        _SAID.add(key)
        log.log(level, text)


class Untaken(Exception):
    """No kernel serves this kind of call; the server's own operator has to."""


class Kinds:
    """Kinds of calls, such as "prefill", and those among them that no kernel served."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._refused: set[str] = set()

    def takes(self, *kinds: str) -> bool:
        """Whether all of these may be tried."""
        return self._refused.isdisjoint(kinds)

    @contextmanager
    def trying(self, kind: str) -> Iterator[None]:
        """Raises `Untaken` where no kernel serves what is called inside, or one does not compile, now and from now on.

        Nothing was launched for such a call. The log is told why.
        """
        try:
            yield
        except (NoKernelError, CompileError, ToolchainError) as error:
            self._refused.add(kind)
            once(self._log, logging.WARNING, f"msa_tiles leaves {kind} of {self._what} to the server: {error}")
            raise Untaken(kind) from error


def kinds_of(log: logging.Logger, what: str, *alike: Hashable) -> Kinds:
    """The same for all layers that are alike: a kernel that does not compile is not tried again in each of them."""
    key = (log.name, what, *alike)
    if key not in _KINDS:
        _KINDS[key] = Kinds(log, what)
    return _KINDS[key]
