"""The argument that bounds the memory of partial results."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from msa_tiles.call import validate

# TMA boxes and the widest loads start at multiples of this many bytes.
ALIGNMENT = 16

# What the partial results of one window of attention queries may take when the caller does not say.
WORKSPACE_BYTES = 1 << 30


def workspace_bytes(value: int | None) -> int:
    """The bound of partial results."""
    if value is None:
        return WORKSPACE_BYTES
    validate.integer("workspace", value, 1, validate.LARGEST_MEMORY)
    return validate.plain(value)


def workspace_or_bytes(value: Any, like: Tensor, like_name: str) -> tuple[Tensor | None, int]:
    """The caller's scratch tensor, if any, and how many bytes partial results may take."""
    if isinstance(value, Tensor):
        validate.scratch("workspace", value, like, like_name)
        return value, value.numel()
    return None, workspace_bytes(value)


def address(tensor: Tensor) -> int:
    """Where a tensor's elements begin; of a tensor without memory, where they would, behind an aligned place."""
    if isinstance(tensor, FakeTensor):
        tensor = getattr(tensor, "stands_for", tensor)
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return tensor.data_ptr()
    # Far from every other storage.
    return (tensor.untyped_storage()._cdata << 44) + tensor.storage_offset() * tensor.element_size()


def check_alignment(name: str, tensor: Tensor) -> None:
    """Refuse a scratch tensor that begins at an odd place; addresses are unknown while a graph is traced."""
    behind = address(tensor) % ALIGNMENT
    if behind:
        came = f"an address {behind} bytes behind a multiple of {ALIGNMENT}"
        validate.refuse(name, came, f"a multiple of {ALIGNMENT}")
