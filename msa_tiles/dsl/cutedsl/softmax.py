"""Softmax of one block over a score tile that a warpgroup holds in registers.

A tile is wgmma's accumulator of 64 rows: warp i owns rows 16i to 16i + 15, and lane l of it holds, of rows l // 4 and
l // 4 + 8 (its halves), the columns 8j + 2 (l % 4) and the next one, for every j. Element ((column, half, j), 0, 0).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from msa_tiles.dsl.cutedsl.scores import fold, pick_float

LN_2 = 0.6931471805599453
# Stands for a maximum over nothing: finite, so that differences with it are no NaN, whatever the scale.
LOWEST = -1.0e30


@cute.jit
def block_softmax(
    scores: cute.Tensor, probabilities: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32,
    rooms,
):  # fmt: skip
    """probabilities = exp2((scores - row_max) * scale_log2), rounded; row_sum is taken before rounding.

    rooms[half] is the last column that a row sees, less the lane's first column, or None where rows see every column.
    Scores that are all -inf give probabilities of 0; a visible score that is NaN or inf makes its row and its sum NaN.
    scale_log2 must be positive, so that the largest score has the largest probability. The scores are only read: wgmma
    is still to write there.
    """
    exact = cute.make_rmem_tensor(scores.layout, Float32)
    for half in cutlass.range_constexpr(2):
        room = None
        if cutlass.const_expr(rooms is not None):
            room = rooms[half]
        row_max[half] = -Float32.inf
        fold(scores, row_max, half, room)
        largest = quad_max(row_max[half])
        row_max[half] = largest
        shift = cute.arch.fmax(largest, LOWEST) * scale_log2
        # Two chains, so that one addition need not wait for the last.
        sums = [Float32(0.0), Float32(0.0)]
        for j in cutlass.range_constexpr(cute.size(scores) // 4):
            for column in cutlass.range_constexpr(2):
                weight = cute.math.exp2(scores[(column, half, j), 0, 0] * scale_log2 - shift, fastmath=True)
                if cutlass.const_expr(room is not None):
                    weight = pick_float(room >= 8 * j + column, weight, Float32(0.0))
                exact[(column, half, j), 0, 0] = weight
                sums[column] = sums[column] + weight
        row_sum[half] = quad_sum(sums[0] + sums[1])
    # An accumulator's registers lie in the order of an operand A's.
    rounded = cute.make_tensor(probabilities.iterator, scores.layout)
    rounded.store(exact.load().to(probabilities.element_type))


@cute.jit
def quad_max(value: Float32) -> Float32:
    """The largest of the four lanes that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 2))


@cute.jit
def quad_maxima(values: cute.Tensor, halves: cutlass.Constexpr):
    """`quad_max` of the values of some halves, whose shuffles do not wait for each other."""
    for distance in cutlass.range_constexpr(1, 3):
        others = [cute.arch.shuffle_sync_bfly(values[half], distance) for half in halves]
        for half in cutlass.range_constexpr(len(halves)):
            values[halves[half]] = cute.arch.fmax(values[halves[half]], others[half])


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """The sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, 1)
    return value + cute.arch.shuffle_sync_bfly(value, 2)


@cute.jit
def log_sum(largest: Float32, total: Float32, scale_log2: Float32) -> Float32:
    """Natural logarithm of the sum of exponentials, from block_softmax's row_max and row_sum."""
    return (largest * scale_log2 + cute.math.log2(total, fastmath=True)) * LN_2
