"""Softmax of one block over a row of scores that one thread holds, as tensor memory hands them out."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from msa_tiles.dsl.cutedsl.scores import choose

CHAINS = 4  # of maxima and of sums, so that one operation need not wait for the last


@cute.jit
def row_softmax(scores: cute.Tensor, probabilities: cute.Tensor, scale_log2: Float32, room) -> tuple[Float32, Float32]:
    """probabilities = exp2((scores - largest) * scale_log2) / total, rounded; returns largest and total.

    The row sees the columns up to `room`, at least one, or all of them for None; what the others hold does not matter.
    scale_log2 must be positive, so that the largest score has the largest probability. The scores are overwritten.
    """
    columns = cute.size(scores)
    chains = [-Float32.inf for _ in range(CHAINS)]
    for column in cutlass.range_constexpr(columns):
        if cutlass.const_expr(room is not None):
            scores[column] = choose(room >= column, scores[column], -Float32.inf)
        chains[column % CHAINS] = cute.arch.fmax(chains[column % CHAINS], scores[column])
    largest = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
    shift = -largest * scale_log2
    # Two additions or products are one instruction.
    sums = [(Float32(0.0), Float32(0.0)) for _ in range(CHAINS // 2)]
    for column in cutlass.range_constexpr(0, columns, 2):
        pair = (scores[column], scores[column + 1])
        low, high = cute.arch.fma_packed_f32x2(pair, (scale_log2, scale_log2), (shift, shift))
        pair = (cute.math.exp2(low, fastmath=True), cute.math.exp2(high, fastmath=True))
        scores[column], scores[column + 1] = pair
        chain = column // 2 % (CHAINS // 2)
        sums[chain] = cute.arch.add_packed_f32x2(sums[chain], pair)
    low, high = cute.arch.add_packed_f32x2(sums[0], sums[1])
    total = low + high
    inverse = cute.arch.rcp_approx(total)
    for column in cutlass.range_constexpr(0, columns, 2):
        pair = cute.arch.mul_packed_f32x2((scores[column], scores[column + 1]), (inverse, inverse))
        scores[column], scores[column + 1] = pair
    probabilities.store(scores.load().to(probabilities.element_type))
    return largest, total
