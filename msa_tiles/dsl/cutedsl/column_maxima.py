"""Block maxima of S^T = K Q^T, whose rows are the keys of a block and whose columns are queries.

A tile is wgmma's accumulator of 64 rows by COLUMNS: warp i owns rows 16 i to 16 i + 15, and lane l of it holds, of rows
l // 4 and l // 4 + 8 (its halves) of each of the block's m-th 64 keys, the columns 2 (l % 4) and the next one. So a
column's maximum takes three shuffles, and what the four warps found meets in shared memory, for some products at a
time: SLOTS of them are written between two barriers, while the others that were written before are read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from msa_tiles.dsl.cutedsl.query_columns import COLUMNS
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import buffer, declares

WARPS = 4
SLOTS = 16  # products, of eight columns each: one for every thread of the four warps
TURNS = 2


@declares
def buffers():
    """What the warps found."""
    return (
        buffer("maxima", "float32", turns=TURNS, slots=SLOTS, warps=WARPS, columns=COLUMNS, note="of some products"),
    )


def place(c, half, m):
    """Where an accumulator has column 2 (lane % 4) + c of the row 64 m + 16 warp + lane // 4 + 8 half."""
    return c + 2 * half + 4 * m


@cute.jit
def fold(
    S: cute.Tensor, limits: cute.Tensor, first_column: Int32, first_key: Int32, cut: Boolean, member: Int32,
    lane: Int32, target: cute.Tensor,
):  # fmt: skip
    """The maxima of a warp's rows in every column -> target [warps, COLUMNS].

    With `cut` the query of column i sees keys up to limits[first_column + i], the lane's first row being the key
    `first_key`; else queries see all of them. NaN is ignored as long as there is a number; -inf is the maximum of
    nothing.
    """
    first = -Float32.inf
    second = -Float32.inf
    if cut:
        rooms = [limits[first_column + 2 * (lane % 4) + c] - first_key for c in range(2)]
        first, second = (largest(S, c, rooms[c]) for c in range(2))
    else:
        first, second = (largest(S, c, None) for c in range(2))
    for level in cutlass.range_constexpr(2, 5):
        first = cute.arch.fmax(first, cute.arch.shuffle_sync_bfly(first, 1 << level))
        second = cute.arch.fmax(second, cute.arch.shuffle_sync_bfly(second, 1 << level))
    if lane < 4:
        target[member, 2 * lane] = first
        target[member, 2 * lane + 1] = second


def largest(S, c, room):
    """Of a lane's rows in one of its columns. The tile is only read: wgmma is still to write there."""
    found = None
    for m in range(cute.size(S) // 4):
        for half in range(2):
            score = S[place(c, half, m)]
            if room is not None:
                score = pick_float(room >= ROWS * m + 8 * half, score, -Float32.inf)
            found = score if found is None else cute.arch.fmax(found, score)
    return found


def of_warps(maxima, column):
    """The largest of what the warps found: maxima [warps, COLUMNS]."""
    found = maxima[0, column]
    for warp in range(1, WARPS):
        found = cute.arch.fmax(found, maxima[warp, column])
    return found
