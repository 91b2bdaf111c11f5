"""Whether a caller's buffer shares memory with what its call reads or writes: results would depend on the order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msa_tiles.call import validate
from msa_tiles.call.workspace import address


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
    """Whether two tensors share bytes, as far as can be told: rows that interleave with equal strides do not."""
    first, last = address(one), address(other)
    if not one.numel() or not other.numel():
        return False
    if first + _span(one) <= last or last + _span(other) <= first:
        return False
    if one.stride() == other.stride() and one.dtype == other.dtype:
        steps = [step for step in zip(one.stride(), one.shape, other.shape, strict=True) if max(step[1:]) > 1]
        return _meet((last - first) // one.element_size(), sorted(steps, reverse=True))
    pitches = (_pitch(one), _pitch(other))
    if pitches[0] != pitches[1] or not pitches[0]:
        return True
    # Rows at equal distances: they interleave where each ends before the other's next begins.
    pitch = pitches[0]
    offset = (last - first) % pitch
    return not (_row(one) <= offset and offset + _row(other) <= pitch)


def _meet(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether elements of two tensors are the same, which begin at a distance.

    ``steps`` are stride, size and the other's size of each dimension, the largest stride first. Where every stride
    passes over what the smaller ones reach, each says of its index that it is one of two; elsewhere the answer may be
    that they meet where they do not.
    """
    if not steps:
        return distance == 0
    (stride, size, other_size), *smaller = steps
    reach = sum((max(sizes) - 1) * step for step, *sizes in smaller)
    if stride <= reach or stride == 0:
        return abs(distance) <= reach + (max(size, other_size) - 1) * stride
    nearest = distance // stride
    return any(
        -other_size < index < size and _meet(distance - index * stride, smaller) for index in (nearest, nearest + 1)
    )


def _span(value: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (reach + 1) * value.element_size()


def _pitch(value: Tensor) -> int:
    """The largest stride, in bytes; 0 for a single element."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return max(strides, default=0) * value.element_size()


def _row(value: Tensor) -> int:
    """Bytes of what lies within the largest stride."""
    pitch = _pitch(value) // value.element_size()
    counts = (size for size, stride in zip(value.shape, value.stride(), strict=True) if stride == pitch)
    return _span(value) - (max(counts, default=1) - 1) * pitch * value.element_size()
