"""Infinite and NaN values in blocks that some query sees in part or not at all.

A probability of 0 times such a value is NaN: the product would bring it to queries that may not see its row. So it is
taken out of the tile before, and the rows that do see it are marked afterwards: what they get in its column is NaN,
whatever sign an infinity had.

Each thread of a warpgroup has a column of a tile of 16 bits; where there are fewer columns than threads, the threads
of a column take its rows in turn. Tiles are stages of a ring [stages, rows, columns] in shared memory.
"""

import tilelang.language as T

WARPGROUP = 128
EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


def unbounded(value):
    """Whether a number of 16 bits is infinite or NaN, by its bits: fast arithmetic need not tell."""
    exponent = T.uint16(EXPONENTS[str(value.dtype)])
    return (T.reinterpret(value, "uint16") & exponent) == exponent


def nan():
    """The NaN of bfloat16."""
    return T.reinterpret(T.uint16(0x7FC0), "bfloat16")


@T.macro
def find_unbounded(ring, stage, thread, rows, first):
    """first[0] = the first of the thread's rows below `rows` that has such a value; the number of all rows for none."""
    columns = ring.shape[2]
    shares = WARPGROUP // columns
    first[0] = ring.shape[1]
    for i in T.serial(ring.shape[1] // shares):
        # The last row again and again, where there are no more: nothing branches, so that loads overlap.
        row = T.min(i * shares + thread // columns, rows - 1)
        first[0] = T.min(first[0], T.Select(unbounded(ring[stage, row, thread % columns]), row, ring.shape[1]))


@T.macro
def take_out(ring, stage, thread, rows, part, parts):
    """Zero such values in the thread's rows below `rows`; `parts` warpgroups share the rows."""
    columns = ring.shape[2]
    shares = WARPGROUP // columns
    for i in T.serial(ring.shape[1] // (shares * parts)):
        row = (i * parts + part) * shares + thread // columns
        if row < rows:
            if unbounded(ring[stage, row, thread % columns]):
                ring[stage, row, thread % columns] = 0
