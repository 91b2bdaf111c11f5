"""Block maxima of products whose columns are groups of keys (e4m3_columns): columns i and i + COLUMNS add up to the
scores of query i.

Lane l of warp i has, of rows 16 i + l // 4 and 8 further on, the queries 2 (l % 2) and the next one of one group, and
the lane that is two away has them of the other. Each gives one of them and keeps one: a lane has one query, that of
`column_of`. What it finds goes to a place of its own, and is compared with what others found for many blocks at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from msa_tiles.dsl.cutedsl.e4m3_columns import COLUMNS
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.table import WARP, buffer, declares

WARPS = 4
SLOTS = 20  # products: at least as many as a tile has, and times its columns no more than threads
LANES = WARP // COLUMNS  # that have the same query


@declares
def buffers():
    """What the lanes found."""
    return (buffer("maxima", "float32", lanes=WARP, warps=WARPS, slots=SLOTS, note="of some products"),)


def column_of(lane):
    """The query, of four, that a lane keeps."""
    return 2 * (lane % 2) + lane // 2 % 2


@cute.jit
def reduce(
    keys: cutlass.Constexpr, S: cute.Tensor, scales, limits: cute.Tensor, first_column: Int32, first_key: Int32,
    cut: Boolean, lane: Int32,
):  # fmt: skip
    """The maximum of a lane's two rows, for its query. The products must be there.

    `keys` and `scales` are an operand and what its `group_scales` gave. With `cut` the query of column i sees keys up
    to limits[first_column + i], the lane's first row being the key `first_key`; else queries see all of them. NaN is
    ignored as long as there is a number; -inf is the maximum of nothing.
    """
    near, far = totals(keys, S, scales, lane)
    if cut:
        room = limits[first_column + column_of(lane)] - first_key
        near, far = pick_float(room >= 0, near, -Float32.inf), pick_float(room >= 8, far, -Float32.inf)
    return cute.arch.fmax(near, far)


def totals(keys, S, scales, lane):
    """Of a lane's two rows the scores of its query."""
    factors = keys.factors_of_rows(scales)
    upper = lane // 2 % 2 == 1
    found = []
    for half in range(2):
        first, second = (keys.scaled(S, factors, c, half) for c in range(2))
        given = Float32(cute.arch.shuffle_sync_bfly(pick_float(upper, first, second), 2))
        found.append(pick_float(upper, second, first) + given)
    return found


@cute.jit
def put(found: Float32, maxima: cute.Tensor, slot: Int32, member: Int32, lane: Int32, more: cutlass.Constexpr):
    """What a lane found of a product -> maxima [lanes, warps, slots], or with `more` the larger of both."""
    if cutlass.const_expr(more):
        found = cute.arch.fmax(found, maxima[lane, member, slot])
    maxima[lane, member, slot] = found


def largest(maxima, slot, column):
    """The largest of what all lanes found of a product for a query."""
    found = None
    first = column // 2 + 2 * (column % 2)
    for warp in range(WARPS):
        for i in range(LANES):
            # Threads of other slots begin with other lanes, so that they meet in no bank.
            each = maxima[first + COLUMNS * ((i + slot) % LANES), warp, slot]
            found = each if found is None else cute.arch.fmax(found, each)
    return found
