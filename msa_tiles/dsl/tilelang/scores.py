"""Block max-pool over a score tile held in registers."""

import tilelang.language as T


@T.macro
def block_max(S, row_max, rows, block_size, block, full_blocks, first_limit, last_limit):
    """Fold one block's scores into row_max; row i sees the keys up to min(first_limit + i, last_limit).

    Blocks below full_blocks are visible to every row and need no mask. NaN products are ignored (fmax).
    """
    if block >= full_blocks:
        for i, j in T.Parallel(rows, block_size):
            S[i, j] = T.if_then_else(
                block * block_size + j <= T.min(first_limit + i, last_limit), S[i, j], -T.infinity("float32")
            )
    T.reduce_max(S, row_max, dim=1, clear=False)
