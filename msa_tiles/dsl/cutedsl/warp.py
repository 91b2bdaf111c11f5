"""What the lanes of a warp work out together: sums, orders and bit matrices. All lanes must call each of these."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.table import WARP

# (distance, columns that stay where they are in the upper half of the lanes) of a 32 x 32 transposition.
HALVES = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555))


def signed(bits):
    """The int that Int32 takes for 32 unsigned bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


@cute.jit
def ballot(condition: Boolean) -> Int32:
    """The lanes for which the condition holds, one bit each."""
    return Int32(cute.arch.vote_ballot_sync(condition))


@cute.jit
def count_bits(bits: Int32) -> Int32:
    return Int32(cute.arch.popc(bits))


@cute.jit
def first_bit(bits: Int32) -> Int32:
    """The place of the lowest bit set; 32 for none. Any lane may call it."""
    return Int32(cute.arch.popc(~bits & (bits - 1)))


@cute.jit
def bits_below(count: Int32) -> Int32:
    """The lowest `count` of 32 bits; none or all where count is out of range. Any lane may call it."""
    return pick(count <= 0, 0, pick(count >= 32, -1, (Int32(1) << count) - 1))


@cute.jit
def shift_right(bits: Int32, places: cutlass.Constexpr) -> Int32:
    """Zeros come in at the top."""
    return Int32(Uint32(bits) >> Uint32(places))


@cute.jit
def inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """The sum over the lanes up to and with this one."""
    for level in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(value, 1 << level)
        value = value + pick(lane >= 1 << level, lower, 0)
    return value


@cute.jit
def request_of(starts: cute.Tensor, token: Int32) -> Int32:
    """The last request that begins at or before a token: 32 of them a round, so one round for as many.

    starts ascends, with the end of the last request behind it; tokens past that end get the last request too.
    """
    low = Int32(0)
    count = Int32(cute.size(starts)) - 1
    # The answer is one of `count` places from `low` on.
    while count > 1:
        step = (count + WARP - 1) // WARP
        ahead = cute.arch.lane_idx() * step
        reached = Boolean(False)
        if ahead < count:
            reached = starts[low + ahead] <= token
        ahead = cutlass.max(count_bits(ballot(reached)) - 1, 0) * step
        low = low + ahead
        count = cutlass.min(count - ahead, step)
    return low


@cute.jit
def transpose(bits: Int32, lane: Int32) -> Int32:
    """Bit i of lane j moves to bit j of lane i."""
    for step in cutlass.range_constexpr(len(HALVES)):
        distance, low = HALVES[step]
        other = cute.arch.shuffle_sync_bfly(bits, distance)
        lower_half = (lane & distance) == 0
        moved = pick(lower_half, other << distance, shift_right(other, distance))
        stays = pick(lower_half, signed(low), ~signed(low))
        bits = (bits & stays) | (moved & ~stays)
    return bits


@cute.jit
def swap_across(values: cute.Tensor, across: cutlass.Constexpr, first: Boolean):
    """Exchange every element with that of the lane `lane ^ across`: the larger one stays with `first`."""
    for e in cutlass.range_constexpr(cute.size(values)):
        got = cute.arch.shuffle_sync_bfly(values[e], across)
        values[e] = pick((got > values[e]) == first, got, values[e])


@cute.jit
def sort_runs(values: cute.Tensor, run: cutlass.Constexpr, lane: Int32):
    """Sort the int32 of all lanes in descending runs; element e of lane l takes place 32 e + l."""
    size = cute.size(values)
    # Merges of two runs: the first round of one meets the other run backwards, so that all runs descend.
    for doubling in cutlass.range_constexpr(run.bit_length() - 1):
        length = 2 << doubling
        if cutlass.const_expr(length > WARP):
            span = length // WARP
            for e in cutlass.range_constexpr(size):
                if cutlass.const_expr(e & (span // 2) == 0):
                    got = cute.arch.shuffle_sync_bfly(values[e ^ (span - 1)], WARP - 1)
                    given = cute.arch.shuffle_sync_bfly(values[e], WARP - 1)
                    values[e ^ (span - 1)] = cutlass.min(values[e ^ (span - 1)], given)
                    values[e] = cutlass.max(values[e], got)
            for level in cutlass.range_constexpr(1, span.bit_length() - 1):
                stride = span >> (level + 1)
                for e in cutlass.range_constexpr(size):
                    if cutlass.const_expr(e & stride == 0):
                        larger = cutlass.max(values[e], values[e + stride])
                        values[e + stride] = cutlass.min(values[e], values[e + stride])
                        values[e] = larger
            for level in cutlass.range_constexpr(5):
                stride = WARP >> (level + 1)
                swap_across(values, stride, (lane & stride) == 0)
        else:
            for level in cutlass.range_constexpr(doubling + 1):
                stride = length >> (level + 1)
                swap_across(values, length - 1 if level == 0 else stride, (lane & stride) == 0)


@cute.jit
def sort_descending(values: cute.Tensor, lane: Int32):
    """Sort the int32 of all lanes, a power of two for each: element e of lane l takes place 32 e + l."""
    sort_runs(values, WARP * cute.size(values), lane)


@cute.jit
def least_of_larger_half(values: cute.Tensor, lane: Int32) -> Int32:
    """The least of the larger half of all lanes' int32, a power of two for each; leaves them in another order.

    With both halves sorted, the larger of each element and its mirror image make up the larger half.
    """
    size = cute.size(values)
    sort_runs(values, WARP * size // 2, lane)
    least = Int32(0)
    for e in cutlass.range_constexpr((size + 1) // 2):
        mirror = cute.arch.shuffle_sync_bfly(values[size - 1 - e], WARP - 1)
        larger = cutlass.max(values[e], mirror)
        least = larger if cutlass.const_expr(e == 0) else cutlass.min(least, larger)
    return Int32(cute.arch.warp_redux_sync(least, "min"))


@cute.jit
def at_place(values: cute.Tensor, place: Int32) -> Int32:
    """The element at a place of all lanes' elements, counted as sort_descending does."""
    found = cute.arch.shuffle_sync(values[0], place & (WARP - 1))
    for e in cutlass.range_constexpr(1, cute.size(values)):
        other = cute.arch.shuffle_sync(values[e], place & (WARP - 1))
        found = pick(place >= WARP * e, other, found)
    return found
