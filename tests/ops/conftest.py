"""Stand-ins for kernels, and calls that are not remembered from one test to the next."""

from collections.abc import Iterator

import pytest
from ops.decode_stand_ins import decode_kernels  # noqa: F401
from ops.kernel_stand_ins import kernels  # noqa: F401

from msa_tiles.library import remember


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is remembered of a test's calls are kernels of its own."""
    remember.forget_all()
    yield
    remember.forget_all()
