"""Block maxima of S^T = K Q^T, whose rows are the keys of a block and whose columns are queries.

A tile is wgmma's accumulator of 64 rows by COLUMNS: warp i owns rows 16 i to 16 i + 15, and lane l of it holds, of rows
l // 4 and l // 4 + 8 (its halves), the columns 2 (l % 4) and the next one. So a column's maximum takes three shuffles,
and what the four warps found meets in shared memory, for some blocks at a time: SLOTS are written between two barriers,
while the others that were written before are read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from msa_tiles.dsl.cutedsl.query_columns import COLUMNS
from msa_tiles.dsl.cutedsl.registers import lane_anew
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.table import buffer, declares

WARPS = 4
SLOTS = 16  # blocks times eight columns: one column for every thread of the four warps
TURNS = 2


@declares
def buffers():
    """What the warps found."""
    return (buffer("maxima", "float32", columns=COLUMNS, warps=WARPS, slots=SLOTS, turns=TURNS, note="of some blocks"),)


def place(c, half):
    """Where an accumulator has column 2 (lane % 4) + c of the row 16 warp + lane // 4 + 8 half."""
    return c + 2 * half


@cute.jit
def wait(S: cute.Tensor, limits: cute.Tensor, first_column: Int32, first_key: Int32, cut: Boolean, lane: Int32):
    """Wait for all products -> the maxima of a lane's rows in its two columns.

    With `cut` the query of column i sees keys up to limits[first_column + i], the lane's first row being the key
    `first_key`; else queries see all of them. NaN is ignored as long as there is a number; -inf is the maximum of
    nothing. Both branches wait: in front of them ptxas would move the wait to before whatever was to go on meanwhile.
    """
    first = -Float32.inf
    second = -Float32.inf
    if cut:
        warpgroup.wait_group(0)
        lane = lane_anew(lane)
        rooms = [limits[first_column + 2 * (lane % 4) + c] - first_key for c in range(2)]
        first, second = (largest(S, c, rooms[c]) for c in range(2))
    else:
        warpgroup.wait_group(0)
        first, second = (largest(S, c, None) for c in range(2))
    return first, second


def largest(S, c, room):
    """Of a lane's rows in one of its columns. The tile is only read: wgmma is still to write there."""
    found = None
    for half in range(2):
        score = S[place(c, half)]
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
    if lane < COLUMNS:
        column = 2 * (lane % 4) + lane // 4
        if cutlass.const_expr(more):
            found = cute.arch.fmax(found, target[column, member])
        target[column, member] = found


def of_warps(maxima, column):
    """The largest of what the warps found: maxima [COLUMNS, warps]."""
    found = maxima[column, 0]
    for warp in range(1, WARPS):
        found = cute.arch.fmax(found, maxima[column, warp])
    return found
