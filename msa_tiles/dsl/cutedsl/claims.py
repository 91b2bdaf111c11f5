"""Tasks of a window, claimed one after the other through one atomic counter by whatever CTA is ready for more."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Claim(NamedTuple):
    """Where the last claim ended: its head, the tasks of the heads before, and its own. Claims only grow."""

    head: Any
    passed: Any
    count: Any
    place: Any  # of the task among its head's


@cute.jit
def first_claim(counts: cute.Tensor, window_index: Int32):
    """Nothing claimed yet; counts [window, head]."""
    return Claim(Int32(0), Int32(0), counts[window_index, 0], Int32(0))


@cute.jit
def next_claim(
    last: Claim, claims: cute.Tensor, counts: cute.Tensor, window_index: Int32, heads: Int32, listed: cutlass.Constexpr
):
    """The next task: its head is `heads` when there are no more. A whole warp calls it; listed(head) has its tasks."""
    head, passed, count = last.head, last.passed, last.count
    claim = Int32(0)
    if cute.arch.lane_idx() == 0:
        claim = cute.arch.atomic_add(claims.iterator + window_index, Int32(1))
    claim = cute.arch.shuffle_sync(claim, 0)
    while (head < heads) & (claim - passed >= count):
        passed = passed + count
        head = head + 1
        count = Int32(0)
        if head < heads:
            count = counts[window_index, listed(head)]
    return Claim(head, passed, count, claim - passed)
