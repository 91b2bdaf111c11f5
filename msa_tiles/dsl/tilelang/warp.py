"""What the lanes of a warp work out together: sums, orders and bit matrices. All lanes must call each of these."""

import tilelang.language as T

WARP = 32


def ballot(condition):
    """The lanes for which the condition holds, one bit of a uint32 each."""
    return T.cast(T.ballot(condition), "uint32")


def count_bits(bits):
    return T.cast(T.popcount(bits), "int32")


def first_bit(bits):
    """The place of the lowest bit set of a uint32; 32 for none. Any lane may call it."""
    return count_bits(~bits & (bits - T.uint32(1)))


def bits_below(count):
    """The lowest `count` of 32 bits; none or all where count is out of range. Any lane may call it."""
    # A shift of 64 bits takes all of 0 to 32 places, and nothing branches.
    places = T.cast(32 - T.max(T.min(count, 32), 0), "uint64")
    return T.cast(T.uint64(0xFFFFFFFF) >> places, "uint32")


@T.macro
def inclusive_sum(value, lane):
    """value[0] becomes the sum over the lanes up to and with this one."""
    lower = T.alloc_var("int32")
    for level in T.unroll(5):
        lower = T.shfl_up(value[0], 1 << level)
        value[0] = value[0] + T.if_then_else(lane >= (1 << level), lower, 0)


@T.macro
def transpose(bits, lane):
    """Bit i of bits[0] of lane j moves to bit j of lane i."""
    other = T.alloc_var("uint32")
    stays = T.alloc_var("uint32")
    for step in T.unroll(5):
        distance = T.uint32(16) >> T.cast(step, "uint32")
        # The columns that stay where they are in lanes of the lower half: runs of `distance` ones and zeros.
        low = T.uint32(0xFFFFFFFF) // ((T.uint32(1) << distance) + T.uint32(1))
        other = T.shfl_xor(bits[0], 16 >> step)
        if (lane & (16 >> step)) == 0:
            other = other << distance
            stays = low
        else:
            other = other >> distance
            stays = ~low
        bits[0] = (bits[0] & stays) | (other & ~stays)


@T.macro
def swap_across(values, size, across, first):
    """Exchange every element with that of the lane `lane ^ across`: the larger one stays with `first`."""
    got = T.alloc_var("int32")
    for e in T.unroll(size):
        got = T.shfl_xor(values[e], across)
        values[e] = T.if_then_else(first, T.max(values[e], got), T.min(values[e], got))


@T.macro
def sort_runs(values, size, run, lane):
    """Sort the int32 of all lanes in descending runs; element e of lane l takes place 32 e + l."""
    given = T.alloc_var("int32")
    got = T.alloc_var("int32")
    # Merges of two runs: the first round of one meets the other run backwards, so that all runs descend.
    for doubling in T.unroll(min(run, WARP).bit_length() - 1):
        for level in T.unroll(doubling + 1):
            stride = (1 << doubling) >> level
            swap_across(values, size, T.if_then_else(level == 0, (2 << doubling) - 1, stride), (lane & stride) == 0)
    # From here on runs go over several elements of every lane.
    for doubling in T.unroll(max(run // WARP, 1).bit_length() - 1):
        span = 2 << doubling
        for e in T.unroll(size):
            if (e & (1 << doubling)) == 0:
                got = T.shfl_xor(values[e ^ (span - 1)], WARP - 1)
                given = T.shfl_xor(values[e], WARP - 1)
                values[e ^ (span - 1)] = T.min(values[e ^ (span - 1)], given)
                values[e] = T.max(values[e], got)
        for level in T.unroll(doubling):
            stride = (1 << doubling) >> (level + 1)
            for e in T.unroll(size):
                if (e & stride) == 0:
                    given = T.max(values[e], values[e + stride])
                    values[e + stride] = T.min(values[e], values[e + stride])
                    values[e] = given
        for level in T.unroll(5):
            swap_across(values, size, 16 >> level, (lane & (16 >> level)) == 0)


@T.macro
def sort_descending(values, size, lane):
    """Sort the int32 of all lanes, a power of two for each: element e of lane l takes place 32 e + l."""
    sort_runs(values, size, WARP * size, lane)


@T.macro
def least_of_larger_half(values, size, lane, least):
    """least[0] = the least of the larger half of all lanes' int32, a power of two for each; values change places.

    With both halves sorted, the larger of each element and its mirror image make up the larger half.
    """
    mirror = T.alloc_var("int32")
    sort_runs(values, size, WARP * size // 2, lane)
    for e in T.unroll((size + 1) // 2):
        mirror = T.shfl_xor(values[size - 1 - e], WARP - 1)
        mirror = T.max(values[e], mirror)
        least[0] = T.if_then_else(e == 0, mirror, T.min(least[0], mirror))
    least[0] = T.warp_reduce_min(least[0])


@T.macro
def at_place(values, size, place, found):
    """found[0] = the element at a place of all lanes' elements, counted as sort_descending does."""
    other = T.alloc_var("int32")
    for e in T.unroll(size):
        other = T.shfl_sync(values[e], place & (WARP - 1))
        if e == 0 or place >= WARP * e:
            found[0] = other
