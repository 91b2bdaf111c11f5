"""TMA loads of one KV block of one head into a stage of a ring; rows are named as in msa_tiles.dsl.tilelang.keys."""

import tilelang.language as T

from msa_tiles.dsl.tilelang.layout import described


@T.macro
def advance(at, depth):
    """at [2] holds a stage of a ring and its phase, which turns with every round."""
    at[0] = at[0] + 1
    if at[0] == depth:
        at[0] = 0
        at[1] = at[1] ^ 1


@T.macro
def load_stage(keys, page_table, row, head, shared, full, stage, block_size, head_dim, pages_per_block):
    """keys [total_k, heads, dim], or [pages, heads, page, dim] with pages_per_block > 0 -> shared[stage].

    Signals full[stage].
    """
    if pages_per_block == 0:
        T.tma_copy(described(keys)[row : row + block_size, head, :], shared[stage, :, :], barrier=full[stage])
    else:
        page_size = block_size // pages_per_block
        span = page_table.shape[1] * block_size
        for p in T.unroll(pages_per_block):
            page = page_table[row // span, T.min(row % span // page_size + p, page_table.shape[1] - 1)]
            for half in T.unroll(head_dim // 64):
                T.tma_copy(
                    described(keys)[page, head, 0:page_size, half * 64 : half * 64 + 64],
                    shared[stage, p * page_size : (p + 1) * page_size, half * 64 : half * 64 + 64],
                    barrier=full[stage],
                )


@T.macro
def clear_rows(tiles, place, rows, barrier):
    """Zero the rows from `rows` on of tiles[place], for a product by this warpgroup, which alone meets at the barrier.

    What a query does not see may be NaN or infinite, and a weight of 0 times that would reach its sum.
    """
    if rows < tiles.shape[1]:
        for j, c in T.Parallel(tiles.shape[1], tiles.shape[2]):
            if j >= rows:
                tiles[place, j, c] = 0
        T.fence_proxy_async()
        T.sync_threads(barrier, 128)
