"""Sums over the threads of a block."""

import tilelang.language as T

from msa_tiles.dsl.tilelang.warp import WARP, inclusive_sum


@T.macro
def inclusive_sums(values, size, sums, warp, lane, everything):
    """Each of `size` values becomes the sum of those of all threads up to and with this one, and everything that of
    all threads; every thread must call it.

    `sums` [size, warps] is shared memory, in use by nobody else until the next barrier.
    """
    own = T.alloc_local([1], "int32")
    for i in T.unroll(size):
        own[0] = values[i]
        inclusive_sum(own, lane)
        values[i] = own[0]
        if lane == WARP - 1:
            sums[i, warp] = own[0]
    T.sync_threads()
    for i in T.unroll(size):
        everything[i] = 0
        for other in T.unroll(sums.shape[1]):
            if other < warp:
                values[i] = values[i] + sums[i, other]
            everything[i] = everything[i] + sums[i, other]
