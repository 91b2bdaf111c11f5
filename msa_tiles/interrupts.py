"""Ctrl-C that Python cannot lose.

A KeyboardInterrupt that comes up in a finaliser, as torch has them, is printed and forgotten, and the command goes on.
One that comes up while extension modules are loaded, as numpy is, becomes an ImportError.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

INTERRUPTED = 130  # what a shell says of a program that SIGINT ended
SENTENCE = "msa-tiles: interrupted"
AGAIN = 0.02  # seconds until an interrupt that was lost is raised once more


def end(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT while there is nothing to tidy up: modules are imported, or the interpreter shuts down."""
    os.write(2, f"{SENTENCE}\n".encode())
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def insistent() -> Iterator[None]:
    """In this context a KeyboardInterrupt that a finaliser ignores comes again, until it comes through.

    What fails after Ctrl-C is interrupted, whatever the exception says. All this is of the main thread, where signals
    arrive; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
        yield
        return
    outer, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    hears = handler in (signal.default_int_handler, end)  # else Ctrl-C is ignored, or somebody's own
    came = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def ignored(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            outer(unraisable)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    if hears:
        signal.signal(signal.SIGINT, hear)
    sys.unraisablehook = ignored
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = outer
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if hears:
            signal.signal(signal.SIGINT, handler)
