"""Block maxima of a score tile in fewer instructions than `scores.block_max` takes, with the scales of keys or without.

Tiles are as in msa_tiles.dsl.cutedsl.scores. Floats have no maximum of three operands on the GPUs that have wgmma,
integers do. The bits of a float are an integer that orders nonnegative numbers as they are, and puts negative ones
below them, although in reverse: the integer maximum is the true one unless that is negative. Lists whose bound is
positive do not care which negative number they turn down.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from msa_tiles.dsl.cutedsl.scores import columns, maxima, pick_float
from msa_tiles.dsl.cutedsl.topk import INFINITY_BITS


@cute.jit
def tile_maxima(
    scores: cute.Tensor, scales, limits: cute.Tensor, first_key: Int32, cut: Boolean, positive: Int32, lane: Int32
):
    """Maxima of this lane's columns in its two rows, whose last visible keys are limits[0] and limits[1].

    Without `cut` the rows see the whole block. With `positive` (the same in all lanes) a negative maximum may come out
    as any negative number. NaN is ignored, and -inf is the maximum of nothing. Key j of the block is multiplied by
    scales[j], in shared memory; scales is None where keys have none.
    """
    first = -Float32.inf
    second = -Float32.inf
    unsure = Boolean(True)
    if (positive != 0) & (not cut):
        first_bits, second_bits = integer_maxima(scores, scales, lane)
        first = first_bits.bitcast(Float32)
        second = second_bits.bitcast(Float32)
        # NaN is above all numbers here.
        unsure = cute.arch.vote_any_sync(cutlass.max(first_bits, second_bits) > INFINITY_BITS)
    if unsure:
        if cut:
            rooms = [limits[half] - first_key - lane % 4 * 2 for half in range(2)]
            first, second = maxima(scores, scales, rooms, lane)
        else:
            first, second = maxima(scores, scales, None, lane)
    return first, second


def integer_maxima(scores, scales, lane):
    """The maxima of the bits of both rows. Two maxima that follow each other become one instruction."""
    chains = [[], []]
    left = []
    for j, pairs in enumerate(columns(scores, scales, lane)):
        for half, pair in enumerate(pairs):
            bits = [score.bitcast(Int32) for score in pair]
            if j == 0:
                chains[half].append(bits[0])
                left.append(bits[1])
            elif j == 1:
                chains[half].append(cutlass.max(*bits))
            else:
                chains[half][j % 2] = cutlass.max(cutlass.max(chains[half][j % 2], bits[0]), bits[1])
    return [cutlass.max(cutlass.max(*chain), last) for chain, last in zip(chains, left, strict=True)]


@cute.jit
def row_of_lane(upper: cute.Tensor, lower: cute.Tensor, lane: Int32) -> Float32:
    """Finish the maxima of two tiles: each lane gets the row that `place_of_lane` names.

    The four lanes of a row exchange halves of what they hold and so end up with one finished maximum each.
    """
    high = lane % 2 != 0
    upper_row = exchanged(high, upper[0], upper[1], 1)
    lower_row = exchanged(high, lower[0], lower[1], 1)
    return exchanged(lane % 4 >= 2, upper_row, lower_row, 2)


@cute.jit
def place_of_lane(warp: Int32, lane: Int32) -> Int32:
    """The row of a lane among the 128 of its warpgroup, the 64 of the upper tile first; warp counts in the group."""
    return lane % 4 // 2 * 64 + warp * 16 + lane % 2 * 8 + lane // 4


@cute.jit
def exchanged(second: Boolean, value: Float32, other: Float32, distance: cutlass.Constexpr) -> Float32:
    """The maximum of `other` where `second` holds, else of `value`, over this lane and the one at this distance."""
    sent = cute.arch.shuffle_sync_bfly(pick_float(second, value, other), distance)
    return cute.arch.fmax(pick_float(second, other, value), sent)
