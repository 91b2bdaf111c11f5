"""Sums over the threads of a block."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl.topk import pick


@cute.jit
def inclusive_sum(value: Int32, sums: cute.Tensor, warp: Int32, lane: Int32):
    """The sum of the values of all threads up to and with this one, and of all threads; every thread must call it.

    `sums` is shared memory, one element for each warp, in use by nobody else until the next barrier.
    """
    own = value
    for level in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(own, 1 << level)
        own = own + pick(lane >= 1 << level, lower, 0)
    if lane == cute.arch.WARP_SIZE - 1:
        sums[warp] = own
    cute.arch.sync_threads()
    below, everything = Int32(0), Int32(0)
    for other in cutlass.range_constexpr(cute.size(sums)):
        below = below + pick(other < warp, sums[other], 0)
        everything = everything + sums[other]
    return below + own, everything
