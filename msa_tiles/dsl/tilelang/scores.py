"""Block max-pool over a score tile held in registers."""

import tilelang.language as T


@T.macro
def block_max(S, row_max, row_limit, rows, block_size, block, full_blocks):
    """Fold one block's scores into row_max; row i sees the keys up to row_limit[i].

    Blocks below full_blocks are visible to every row and need no mask. NaN products are ignored (fmax).
    """
    if block >= full_blocks:
        for i, j in T.Parallel(rows, block_size):
            S[i, j] = T.if_then_else(block * block_size + j <= row_limit[i], S[i, j], -T.infinity("float32"))
    T.reduce_max(S, row_max, dim=1, clear=False)
