"""Whether a caller's buffer shares memory with what its call reads or writes: results would depend on the order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.workspace import address

_MOST_PLACES = 4  # at a stride, that are looked at one by one


def refuse_overlaps(
    names: Sequence[str], arguments: Sequence[Any], buffer_names: Sequence[str], buffers: Sequence[Tensor | None]
) -> None:
    """Raise ValueError where a buffer overlaps an argument or another buffer. From host facts alone."""
    read = [(name, value) for name, value in zip(names, arguments, strict=True) if isinstance(value, Tensor)]
    for name, buffer in zip(buffer_names, buffers, strict=True):
        if buffer is None:
            continue
        for other_name, other in read:
            if _overlap(buffer, other):
                validate.refuse(name, f"memory of {other_name}", "a buffer of its own")
        read.append((name, buffer))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share bytes, as far as can be told: rows that interleave do not."""
    if not one.numel() or not other.numel():
        return False
    sizes = (_sizes(one), _sizes(other))
    strides = sorted({*sizes[0], *sizes[1]}, reverse=True)
    steps = [(stride, sizes[0].get(stride, 1), sizes[1].get(stride, 1)) for stride in strides]
    return _meet(address(other) - address(one), steps)


def _sizes(value: Tensor) -> dict[int, int]:
    """How many places there are at each stride in bytes, those of an element at 1."""
    found = {1: value.element_size()}
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if size > 1 and stride:
            step = stride * value.element_size()
            found[step] = found.get(step, 1) + size - 1
    return found


def _meet(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether some byte is of two tensors, the second of which begins `distance` behind the first.

    ``steps`` are strides and how many places each of the two has at them, the largest first. Where too many pairs of
    places would have to be looked at, they are taken to meet.
    """
    reach, other_reach = (sum((step[side] - 1) * step[0] for step in steps) for side in (1, 2))
    if not -other_reach <= distance <= reach:
        return False
    if not steps:
        return True
    (stride, size, other_size), *smaller = steps
    reach, other_reach = (sum((step[side] - 1) * step[0] for step in smaller) for side in (1, 2))
    # How many strides lie between two places, so that what remains may be bridged by the smaller ones.
    least = max(-((reach - distance) // stride), 1 - other_size)
    most = min((distance + other_reach) // stride, size - 1)
    if most - least >= _MOST_PLACES:
        return True
    return any(_meet(distance - count * stride, smaller) for count in range(least, most + 1))
