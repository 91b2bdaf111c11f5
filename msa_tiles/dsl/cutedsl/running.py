"""Running softmax over score tiles in registers, which lie there as msa_tiles.dsl.cutedsl.softmax says."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from msa_tiles.dsl.cutedsl.gradients import round_pair
from msa_tiles.dsl.cutedsl.scores import choose, fold
from msa_tiles.dsl.cutedsl.softmax import quad_max

# Stands for a maximum over nothing: finite, so that differences with it are no NaN, whatever the scale.
LOWEST = -1.0e30


@cute.jit
def running_softmax(
    scores: cute.Tensor, rounded: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, rescale: cute.Tensor,
    scale_log2: Float32, rooms,
):  # fmt: skip
    """rounded = exp2((scores - row_max) * scale_log2), two keys in an int, with row_max the largest score so far.

    row_max [2] goes on from what it holds, LOWEST or more, and rescale [2] is what earlier exponentials have to be
    multiplied with. row_sum [2] is the lane's share of the sum: it is rescaled, and grows by this tile's columns of the
    lane before they are rounded. rooms[half] is the last column that a row sees, less the lane's first column, or None
    where rows see every column. scale_log2 must be positive. The scores are only read: wgmma is still to write there.
    """
    for half in cutlass.range_constexpr(2):
        room = None
        if cutlass.const_expr(rooms is not None):
            room = rooms[half]
        before = row_max[half]
        fold(scores, row_max, half, room)
        largest = quad_max(row_max[half])
        row_max[half] = largest
        factor = cute.math.exp2((before - largest) * scale_log2, fastmath=True)
        shift = largest * scale_log2
        # Two chains, so that one addition need not wait for the last.
        sums = [row_sum[half] * factor, Float32(0.0)]
        for j in cutlass.range_constexpr(cute.size(scores) // 4):
            pair = []
            for column in cutlass.range_constexpr(2):
                weight = cute.math.exp2(scores[(column, half, j), 0, 0] * scale_log2 - shift, fastmath=True)
                if cutlass.const_expr(room is not None):
                    weight = choose(room >= 8 * j + column, weight, Float32(0.0))
                pair.append(weight)
                sums[column] = sums[column] + weight
            # At once: until then the exact ones take twice the registers.
            rounded[2 * j + half] = round_pair(pair[0], pair[1])
        rescale[half] = factor
        row_sum[half] = sums[0] + sums[1]
