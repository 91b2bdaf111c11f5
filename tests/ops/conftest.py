"""Stand-ins for kernels, and calls that are not remembered from one test to the next."""

from collections.abc import Iterator
from typing import Any

import pytest
from ops.decode_stand_ins import decode_kernels  # noqa: F401
from ops.kernel_stand_ins import kernels  # noqa: F401

from msa_tiles import runtime
from msa_tiles.call import backends
from msa_tiles.library import remember


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is remembered of a test's calls are kernels of its own."""
    remember.forget_all()
    yield
    remember.forget_all()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What kernels are found by and given, on CPU tensors."""
    seen: list[Any] = []

    def find(op: str, facts: Any, backend: str = "auto", **_: Any) -> Any:
        seen.append(facts)
        return lambda *arguments: seen.append(arguments)

    monkeypatch.setattr(backends, "has_kernels", lambda device: True)
    monkeypatch.setattr(runtime, "find_kernel", find)
    return seen
