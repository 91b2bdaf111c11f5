"""Softmax pieces over a score tile held in registers."""

import tilelang.language as T

# Stands for a maximum over nothing: finite, so that differences with it are no NaN, whatever the scale.
LOWEST = -1.0e30
# Added to sums that may be 0; next to the weight of 1 of a largest score it is nothing.
TINY = 1.0e-30


@T.macro
def block_softmax(S, row_max, row_sum, scale_log2, rows, columns):
    """Scores become unnormalised probabilities: S = exp2((S - row_max) * scale_log2), and row_sum their sum.

    A row whose scores are all -inf gets probabilities of 0, and one with a score of NaN or inf gets NaN. scale_log2
    must be positive, so that the largest score has the largest probability.
    """
    T.reduce_max(S, row_max, dim=1, clear=True)
    for i, j in T.Parallel(rows, columns):
        S[i, j] = T.exp2(S[i, j] * scale_log2 - T.max(row_max[i], LOWEST) * scale_log2)
    T.reduce_sum(S, row_sum, dim=1)
