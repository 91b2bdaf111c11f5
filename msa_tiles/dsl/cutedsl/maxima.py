"""Block maxima of a score tile in fewer instructions than `scores.block_max` takes, with the scales of keys or without.

Tiles are as in msa_tiles.dsl.cutedsl.scores. Floats have no maximum of three operands on the GPUs that have wgmma,
integers do. The bits of a float are an integer that orders nonnegative numbers as they are, and puts negative ones
below them, although in reverse: the integer maximum is the true one unless that is negative. Lists whose bound is
positive do not care which negative number they turn down.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from msa_tiles.dsl.cutedsl.scores import choose
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
    factors = key_factors(scales, lane) if cutlass.const_expr(scales is not None) else None
    first = -Float32.inf
    second = -Float32.inf
    unsure = Boolean(True)
    if (positive != 0) & (not cut):
        first_bits = integer_maximum(columns_of(scores, factors, 0))
        second_bits = integer_maximum(columns_of(scores, factors, 1))
        first = first_bits.bitcast(Float32)
        second = second_bits.bitcast(Float32)
        # NaN is above all numbers here.
        unsure = cute.arch.vote_any_sync(cutlass.max(first_bits, second_bits) > INFINITY_BITS)
    if unsure:
        if cut:
            first = maximum(columns_of(scores, factors, 0), limits[0] - first_key - lane % 4 * 2)
            second = maximum(columns_of(scores, factors, 1), limits[1] - first_key - lane % 4 * 2)
        else:
            first = maximum(columns_of(scores, factors, 0), None)
            second = maximum(columns_of(scores, factors, 1), None)
    return first, second


def key_factors(scales, lane):
    """The scales of this lane's columns, in their order."""
    pairs = cute.make_tensor(
        cute.recast_ptr(scales.iterator, dtype=Int64), cute.make_layout((4, cute.size(scales) // 8), stride=(1, 4))
    )
    factors = []
    for j in range(cute.size(scales) // 8):
        pair = pairs[lane % 4, j]
        factors += [Int32(pair).bitcast(Float32), Int32(pair >> 32).bitcast(Float32)]
    return factors


def columns_of(scores, factors, half):
    """This lane's scores in one of its rows. The tile is only read, as `scores.fold` explains."""
    found = [scores[(column, half, j), 0, 0] for j in range(cute.size(scores) // 4) for column in range(2)]
    if factors is None:
        return found
    return [score * factor for score, factor in zip(found, factors, strict=True)]


def maximum(columns, room):
    """The maximum of the columns of a row, those up to `room` of them, or all of them for None."""
    # Two chains, so that one maximum need not wait for the last.
    chains = [-Float32.inf, -Float32.inf]
    for number, column in enumerate(columns):
        score = column
        if room is not None:
            score = choose(room >= number // 2 * 8 + number % 2, score, -Float32.inf)
        chains[number % 2] = cute.arch.fmax(chains[number % 2], score)
    return cute.arch.fmax(*chains)


def integer_maximum(columns):
    """The maximum of the bits of the columns of a row. Two dependent maxima become one instruction."""
    bits = [column.bitcast(Int32) for column in columns]
    chains = bits[:2]
    for number in range(2, len(bits) - 2, 4):
        for chain in range(2):
            pair = bits[number + 2 * chain : number + 2 * chain + 2]
            chains[chain] = cutlass.max(cutlass.max(chains[chain], pair[0]), pair[1])
    rest = bits[2 + (len(bits) - 4) // 4 * 4 :]
    highest = cutlass.max(*chains)
    for value in rest:
        highest = cutlass.max(highest, value)
    return highest


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
    sent = cute.arch.shuffle_sync_bfly(choose(second, value, other), distance)
    return cute.arch.fmax(choose(second, other, value), sent)
