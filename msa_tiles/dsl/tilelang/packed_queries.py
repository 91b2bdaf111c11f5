"""Queries above index keys of 4 bits, whose columns stand in the order of decoding: packed_index.column.

Queries that TMA has laid down are brought into it once, which spares to sort every block of keys.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.e2m1 import lower_halves, upper_halves
from msa_tiles.dsl.tilelang.packed import WORD

THREADS = 128  # of a warpgroup


def unit_of(queries, place, row, unit):
    """Where the columns begin that meet a word of codes."""
    return queries[(*place, row, unit * WORD)]


@T.macro
def turn(queries, place, thread, barrier):
    """Turn queries[place], [rows, head_dim] bfloat16, for products by this warpgroup, which alone meets at the barrier.

    A thread takes eight columns, that is a place of 16 bytes whatever the swizzle, and nobody else's.
    """
    words = T.alloc_local([4], "uint32")
    turned = T.alloc_local([4], "uint32")
    units = queries.shape[-1] // WORD
    for step in T.serial(queries.shape[-2] * units // THREADS):
        row = step * (THREADS // units) + thread // units
        words[0:4] = T.lds128(unit_of(queries, place, row, thread % units))
        for half in T.unroll(2):
            turned[2 * half] = lower_halves(words[half], words[half + 2])
            turned[2 * half + 1] = upper_halves(words[half], words[half + 2])
        T.sts128(unit_of(queries, place, row, thread % units), turned[0:4])
    T.fence_proxy_async()
    T.sync_threads(barrier, THREADS)
