"""Running softmax over score tiles in registers, which lie there as msa_tiles.dsl.cutedsl.softmax says."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from msa_tiles.dsl.cutedsl.gradients import round_pair
from msa_tiles.dsl.cutedsl.scores import fold, pick_float
from msa_tiles.dsl.cutedsl.softmax import quad_maxima


@cute.jit
def running_softmax(
    scores: cute.Tensor, rounded: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, rescale: cute.Tensor,
    scales, rooms, element: cutlass.Constexpr,
):  # fmt: skip
    """rounded = exp2((scores - row_max) * scales), two keys of `element` in an int; row_max is the largest so far.

    row_max [2] goes on from what it holds, LOWEST or more, and rescale [2] is what earlier exponentials have to be
    multiplied with. row_sum [2] is the lane's share of the sum: it is rescaled, and grows by this tile's columns of the
    lane before they are rounded. rooms[half] is the last column that a row sees, less the lane's first column, or None
    where rows see every column. scales [2] must be positive. The scores are only read: wgmma is still to write there.
    """
    for halves in steps(rooms):
        before = {half: row_max[half] for half in halves}
        for half in halves:
            fold(scores, row_max, half, None if rooms is None else rooms[half])
        shift = {}
        # Two chains a row, so that one addition need not wait for the last.
        sums = {}
        quad_maxima(row_max, halves)
        for half in halves:
            rescale[half] = cute.math.exp2((before[half] - row_max[half]) * scales[half], fastmath=True)
            shift[half] = row_max[half] * scales[half]
            sums[half] = [row_sum[half] * rescale[half], Float32(0.0)]
        for j in cutlass.range_constexpr(cute.size(scores) // 4):
            for half in halves:
                pair = []
                for column in cutlass.range_constexpr(2):
                    score = scores[(column, half, j), 0, 0]
                    weight = cute.math.exp2(score * scales[half] - shift[half], fastmath=True)
                    if cutlass.const_expr(rooms is not None):
                        weight = pick_float(rooms[half] >= 8 * j + column, weight, Float32(0.0))
                    pair.append(weight)
                    sums[half][column] = sums[half][column] + weight
                # At once: until then the exact ones take twice the registers.
                rounded[2 * j + half] = round_pair(pair[0], pair[1], element)
        for half in halves:
            row_sum[half] = sums[half][0] + sums[half][1]


def steps(rooms):
    """Both halves abreast, whose chains of maxima and shuffles take long; one by one where masks take registers."""
    return ((0, 1),) if rooms is None else ((0,), (1,))
