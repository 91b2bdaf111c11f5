"""Softmax pieces over a score tile held in registers."""

import tilelang.language as T


@T.macro
def block_softmax(S, P, row_max, row_sum, scale_log2, rows, columns):
    """Turn scores into unnormalised probabilities: P = exp2((S - row_max) * scale_log2), row_sum = sum of P.

    S is overwritten; P receives the rounded probabilities, row_sum is taken before rounding. Each row needs at least
    one finite score. scale_log2 must be positive, so that the largest score has the largest probability.
    """
    T.reduce_max(S, row_max, dim=1, clear=True)
    for i, j in T.Parallel(rows, columns):
        S[i, j] = T.exp2(S[i, j] * scale_log2 - row_max[i] * scale_log2)
    T.reduce_sum(S, row_sum, dim=1)
    T.copy(S, P)
