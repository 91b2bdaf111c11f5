"""Block maxima of products whose columns are groups of keys (e4m3_columns): msa_tiles.dsl.cutedsl.column_maxima, for
accumulators whose columns i and i + COLUMNS add up to the scores of query i.

Lane l of warp i has, of rows 16 i + l // 4 and 8 further on, the queries 2 (l % 2) and the next one: so does the lane
that is two away, for the other group, and once both have been added both know the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl.column_maxima import TURNS, WARPS, of_warps
from msa_tiles.dsl.cutedsl.e4m3_columns import COLUMNS
from msa_tiles.dsl.cutedsl.registers import lane_anew
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.table import buffer, declares

SLOTS = 28  # blocks; times four columns they are fewer than threads: with 32, four CTAs would not fit a multiprocessor

__all__ = ["SLOTS", "buffers", "fold", "of_warps", "wait"]


@declares
def buffers():
    """What the warps found."""
    return (buffer("maxima", "float32", columns=COLUMNS, warps=WARPS, slots=SLOTS, turns=TURNS, note="of some blocks"),)


@cute.jit
def wait(
    keys: cutlass.Constexpr, S: cute.Tensor, scales, limits: cute.Tensor, first_column: Int32, first_key: Int32,
    cut: Boolean, lane: Int32,
):  # fmt: skip
    """Wait for all products -> the maxima of a lane's rows in its two columns.

    `keys` and `scales` are an operand and what its `group_scales` gave. Of the rest column_maxima.wait tells, and why
    both branches wait.
    """
    first = -Float32.inf
    second = -Float32.inf
    if cut:
        warpgroup.wait_group(0)
        lane = lane_anew(lane)
        rooms = [limits[first_column + 2 * (lane % 2) + c] - first_key for c in range(2)]
        first, second = (largest(row, rooms[c]) for c, row in enumerate(totals(keys, S, scales)))
    else:
        warpgroup.wait_group(0)
        first, second = (largest(row, None) for row in totals(keys, S, scales))
    return first, second


def totals(keys, S, scales):
    """The scores of both columns, of either row."""
    return [[both_groups(keys.scaled(S, scales, c, half)) for half in range(2)] for c in range(2)]


def both_groups(total):
    """What a lane and the one two away have found of a row."""
    return total + Float32(cute.arch.shuffle_sync_bfly(total, 2))


def largest(row, room):
    """Of the two rows in a column, the second of which is eight keys further on."""
    found = None
    for half, score in enumerate(row):
        if room is not None:
            score = pick_float(room >= 8 * half, score, -Float32.inf)
        found = score if found is None else cute.arch.fmax(found, score)
    return found


@cute.jit
def fold(first: Float32, second: Float32, member: Int32, lane: Int32, target: cute.Tensor, more: cutlass.Constexpr):
    """What the lanes of a warp found in each column -> target [COLUMNS, warps], or with `more` the larger of both."""
    # Lanes that are four apart have the same columns: from here on one has the first, the other the second.
    lane = lane_anew(lane)
    upper = lane // 4 % 2 == 1
    given = pick_float(upper, first, second)
    found = cute.arch.fmax(pick_float(upper, second, first), cute.arch.shuffle_sync_bfly(given, 4))
    for level in cutlass.range_constexpr(3, 5):
        found = cute.arch.fmax(found, cute.arch.shuffle_sync_bfly(found, 1 << level))
    if (lane & -6) == 0:
        column = 2 * (lane % 2) + lane // 4
        if cutlass.const_expr(more):
            found = cute.arch.fmax(found, target[column, member])
        target[column, member] = found
