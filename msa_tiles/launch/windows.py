"""How many queries go through the kernels at a time: arithmetic on sizes alone."""

from __future__ import annotations

import functools
import math

# Queries per window: the queries of one head group stay in L2 up to here, and a window is long enough to fill the GPU.
MOST_QUERIES = 4096
WINDOW_MULTIPLE = 128

# The CTAs of shared_attention that share an SM.
CTAS_PER_SM = 2

# Hybrid attention may take longer windows than MOST_QUERIES, while the queries of a head group stay in L2; with 132 SMs
# this is what eight tiles of one head for each CTA take, four queries each.
LONGEST_WINDOW = 8448
# What `choose_rounds` weighs, in microseconds on an H100: the ends and launches of a window's two kernels, reading a
# megabyte of keys and values, and the schedule's walk over a query.
ROUND_COST, MEGABYTE_COST, WALK_COST = 15.0, 0.35, 0.027

# The largest attention that kernels serve.
LARGEST_GROUP = 16
LARGEST_HEAD_DIM = 128

# The schedule kernel cuts a block's edges into tasks of at most this many (CHUNK of its skeletons).
CHUNK = 128


def window_for(total_q: int, most: int) -> int:
    """Queries per window when ``most`` fit the workspace: as few windows as possible, of nearly equal size."""
    most = min(most, MOST_QUERIES)
    if most >= WINDOW_MULTIPLE:
        most -= most % WINDOW_MULTIPLE
    windows = max(1, -(-total_q // most))
    window = max(1, -(-total_q // windows))
    return min(most, -(-window // WINDOW_MULTIPLE) * WINDOW_MULTIPLE)


@functools.lru_cache(maxsize=4096)
def choose_rounds(
    total_q: int,
    most: int,
    topk: int,
    num_kv_heads: int,
    longest_k: int,
    block_size: int,
    block_bytes: int,
    tile_tokens: int,
    num_sms: int,
) -> tuple[int, int]:
    """KV heads at a time, a divisor of their number, and queries per window, where ``most`` queries with all heads fit
    the workspace. ``block_bytes`` is what keys and values of one block take, ``longest_k`` how many a query may see.
    """
    blocks = -(-longest_k // block_size)
    least, choice = math.inf, (0, 0)
    for heads in (heads for heads in range(num_kv_heads, 0, -1) if num_kv_heads % heads == 0):
        rounds = num_kv_heads // heads
        for longest in (MOST_QUERIES, LONGEST_WINDOW):
            window = even_window(total_q, min(most * rounds, longest), tile_tokens, heads, CTAS_PER_SM * num_sms)
            windows = -(-total_q // window)
            # A block with many edges is read once for every CHUNK of them.
            edges = min(window, total_q) * topk
            reads = windows * num_kv_heads * max(min(blocks, edges), edges // CHUNK)
            waves = -(-windows * num_kv_heads // num_sms)
            cost = (
                windows * rounds * ROUND_COST
                + reads * block_bytes / 1e6 * MEGABYTE_COST
                + waves * min(window, total_q) * WALK_COST
            )
            # Of equals the first: more heads at a time, shorter windows.
            if cost < least:
                least, choice = cost, (heads, window)
    return choice


def even_window(total_q: int, most: int, tile_tokens: int, num_kv_heads: int, num_ctas: int) -> int:
    """Queries per window when ``most`` fit the workspace, a multiple of ``tile_tokens``.

    Where possible the tiles of a window come out even on the CTAs that take them in turn; of a single window there are
    as many as there are queries for.
    """
    step = tile_tokens * (num_ctas // math.gcd(num_ctas, num_kv_heads))
    if step > most:
        step = tile_tokens
    most -= most % step
    windows = max(1, -(-total_q // most))
    if windows == 1:
        step = tile_tokens
    return min(most, -(-total_q // (windows * step)) * step)
