"""Ctrl-C that Python cannot lose.

A KeyboardInterrupt that comes up in a finaliser, as torch has them, is printed and forgotten, and the command goes on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

AGAIN = 0.02  # seconds until an interrupt that was lost is raised once more


@contextlib.contextmanager
def insistent() -> Iterator[None]:
    """In this context a KeyboardInterrupt that a finaliser ignores comes again, until it comes through.

    Of the main thread, where signals arrive; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    outer = sys.unraisablehook

    def ignored(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            outer(unraisable)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = ignored
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = outer
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
