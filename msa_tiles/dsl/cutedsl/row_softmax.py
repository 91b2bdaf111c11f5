"""Softmax of one block over a row of scores that one thread holds, as tensor memory hands them out."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.scores import pick_float

CHAINS = 4  # of maxima and of sums, so that one operation need not wait for the last


@cute.jit
def hide(scores: cute.Tensor, room: Int32):
    """Give the columns past `room` scores without weight, whatever they hold."""
    for column in cutlass.range_constexpr(cute.size(scores)):
        scores[column] = pick_float(room >= column, scores[column], -Float32.inf)


@cute.jit
def exponentials(scores: cute.Tensor, scale_log2: Float32) -> tuple[Float32, Float32]:
    """scores = exp2((scores - largest) * scale_log2); returns the largest score and the sum.

    The row needs a finite score. scale_log2 must be positive, so that the largest score has the largest exponential.
    """
    columns = cute.size(scores)
    chains = [-Float32.inf for _ in range(CHAINS)]
    for column in cutlass.range_constexpr(columns):
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
    return largest, low + high


@cute.jit
def scaled(values: cute.Tensor, first: cutlass.Constexpr, factor: Float32, rounded: cute.Tensor):
    """rounded = values from `first` on, as many as it holds, times factor."""
    exact = cute.make_rmem_tensor(rounded.layout, Float32)
    for column in cutlass.range_constexpr(0, cute.size(rounded), 2):
        pair = (values[first + column], values[first + column + 1])
        exact[column], exact[column + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))
    rounded.store(exact.load().to(rounded.element_type))
