"""How many threads of torch the reference uses: one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For work made of many small steps, whose threads would spend it waiting for each other; also a decorator.

    The number of threads that the caller had comes back, whatever happens. torch keeps that number for each thread:
    calls from several threads do not disturb each other. Only a thread that computes for the first time while another
    one is in here starts with one thread.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
