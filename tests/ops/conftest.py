"""The tensors here are small: a thread pool costs more than it gives, and on a busy machine very much more."""

from collections.abc import Iterator

import pytest
import torch
from ops.decode_stand_ins import decode_kernels  # noqa: F401
from ops.kernel_stand_ins import kernels  # noqa: F401

from msa_tiles.library import remember

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is remembered of a test's calls are kernels of its own."""
    remember.forget_all()
    yield
    remember.forget_all()
