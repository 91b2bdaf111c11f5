"""Block max-pool over a score tile that a warpgroup holds in registers.

A tile is wgmma's accumulator of 64 rows: warp i owns rows 16i to 16i + 15, and lane l of it holds, of rows l // 4 and
l // 4 + 8, the columns 8j + 2 (l % 4) and the next one, for every j. Element ((column, half, j), 0, 0).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.jit
def block_max(
    scores: cute.Tensor,
    tile_max: cute.Tensor,
    limits: cute.Tensor,
    first_key: Int32,
    block: Int32,
    full_blocks: Int32,
    lane: Int32,
    factors,
):
    """Fold one block's scores into this lane's tile_max[half]; rows see the keys up to limits[half].

    Blocks below full_blocks are visible to every row and need no mask. NaN products are ignored (fmax). Key j of the
    block is multiplied by factors[j], in shared memory; factors is None where keys have none.
    """
    if block >= full_blocks:
        fold_rows(scores, tile_max, [limits[half] - first_key - lane % 4 * 2 for half in range(2)], lane, factors)
    else:
        fold_rows(scores, tile_max, None, lane, factors)


def fold_rows(scores, tile_max, rooms, lane, factors):
    """Fold both rows of a lane, the columns up to rooms[half] of them, or all of them for None."""
    if factors is None:
        for half in range(2):
            fold(scores, tile_max, half, None if rooms is None else rooms[half])
    else:
        for half, found in enumerate(maxima(scores, factors, rooms, lane)):
            tile_max[half] = cute.arch.fmax(tile_max[half], found)


@cute.jit
def fold(scores: cute.Tensor, maxima: cute.Tensor, half: cutlass.Constexpr, room):
    """Fold the columns of one half into maxima[half], those up to `room` of them, or all of them for None.

    The tile is only read: registers that anything but wgmma writes make the compiler wait for every single product.
    """
    # Two chains a row, so that one maximum need not wait for the last.
    chains = [maxima[half], -cutlass.Float32.inf]
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for column in cutlass.range_constexpr(2):
            score = scores[(column, half, j), 0, 0]
            if cutlass.const_expr(room is not None):
                score = pick_float(room >= 8 * j + column, score, -Float32.inf)
            chains[column] = cute.arch.fmax(chains[column], score)
    maxima[half] = cute.arch.fmax(chains[0], chains[1])


def columns(scores, scales, lane):
    """This lane's scores, two neighbouring columns after the other: pairs of both rows.

    The tile is only read, as `fold` explains. Scales are read where they are used, for the sake of registers.
    """
    if scales is not None:
        pairs = cute.make_tensor(
            cute.recast_ptr(scales.iterator, dtype=Int64), cute.make_layout((4, cute.size(scales) // 8), stride=(1, 4))
        )
    for j in range(cute.size(scores) // 4):
        found = [[scores[(column, half, j), 0, 0] for column in range(2)] for half in range(2)]
        if scales is not None:
            pair = pairs[lane % 4, j]
            factors = Int32(pair).bitcast(Float32), Int32(pair >> 32).bitcast(Float32)
            found = [[score * factor for score, factor in zip(row, factors, strict=True)] for row in found]
        yield found


def maxima(scores, scales, rooms, lane):
    """The maxima of both rows, over the columns up to rooms[half], or all of them for None."""
    # Two chains a row, so that one maximum need not wait for the last.
    chains = [[-Float32.inf, -Float32.inf], [-Float32.inf, -Float32.inf]]
    for j, pairs in enumerate(columns(scores, scales, lane)):
        for half, pair in enumerate(pairs):
            for column, score in enumerate(pair):
                seen = score if rooms is None else pick_float(rooms[half] >= 8 * j + column, score, -Float32.inf)
                chains[half][column] = cute.arch.fmax(chains[half][column], seen)
    return cute.arch.fmax(*chains[0]), cute.arch.fmax(*chains[1])


@cute.jit
def row_of_lane(even: cute.Tensor, odd: cute.Tensor, lane: Int32) -> Float32:
    """Finish the maxima of two tiles: lane l gets row l % 16 of its warp, of the even tile below lane 16, else the odd.

    The four lanes of a row exchange halves of what they hold and so end up with one finished maximum each: number
    l % 2 + 2 p, of half l % 2 and tile p. One more exchange sends it where it belongs.
    """
    high = lane % 2 != 0
    even_row = cute.arch.fmax(
        pick_float(high, even[1], even[0]), cute.arch.shuffle_sync_bfly(pick_float(high, even[0], even[1]), 1)
    )
    odd_row = cute.arch.fmax(
        pick_float(high, odd[1], odd[0]), cute.arch.shuffle_sync_bfly(pick_float(high, odd[0], odd[1]), 1)
    )
    second = lane % 4 >= 2
    row = cute.arch.fmax(
        pick_float(second, odd_row, even_row), cute.arch.shuffle_sync_bfly(pick_float(second, even_row, odd_row), 2)
    )
    return cute.arch.shuffle_sync(row, lane % 8 * 4 + lane // 16 * 2 + lane // 8 % 2)


@cute.jit
def pick_float(condition: cutlass.Boolean, value: Float32, other: Float32) -> Float32:
    """`value` where the condition holds, else `other`, without a branch."""
    return Float32(cutlass.select_(condition, value, other))


def scaled(score, factor):
    """A maximum times a factor of 0 or more, or as it is for None; -inf, the maximum of nothing, stays what it is."""
    return score if factor is None else cute.arch.fmax(score * factor, -Float32.inf)
