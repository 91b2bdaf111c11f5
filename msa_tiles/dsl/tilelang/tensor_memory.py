"""Tensor memory as a table (msa_tiles.dsl.table) says."""

import tilelang.language as T

LANES = 128
COLUMN_BITS = 32


def make_tiles(table, name, element, bits):
    """Tiles of the table: [count, LANES, columns of elements], two of 16 bits to a column."""
    found = table.columns[name]
    return T.alloc_tmem([found.count, LANES, found.columns * COLUMN_BITS // bits], element)
