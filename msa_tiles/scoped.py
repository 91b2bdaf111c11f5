"""Values that hold for a `with` block, in the thread or task that runs it and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def held(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """The variable has this value within the block, and afterwards the one that it had before."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
