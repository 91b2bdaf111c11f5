"""Index keys of one byte an element, and the float32 scales of queries and keys.

Rows are named as in msa_tiles.dsl.tilelang.keys. The scale of a key multiplies a column of a score tile, that of a
query a row; queries' are positive, so that a row is multiplied once, after its maximum is taken.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang import scores
from msa_tiles.dsl.tilelang.layout import strides


def scale_layout(block_size, pages_per_block, key_scales):
    """Shape and strides of the scales of index keys, which have the keys' rows.

    Without key_scales they are a vector, whose first element all keys may share.
    """
    rows, pages = T.dynamic("num_scale_rows, num_scale_pages")
    page_stride, row_stride = strides("scale_page, scale_row")
    if pages_per_block == 0 or not key_scales:
        return (rows,), (row_stride,)
    return (pages, block_size // pages_per_block), (page_stride, row_stride)


@T.macro
def read_key_scale(scales, page_table, row, place, block_size, pages_per_block, value):
    """value[0] = the scale of the key `place` rows behind `row`, of some key where there is none."""
    if pages_per_block == 0:
        value[0] = scales[T.min(row + place, scales.shape[0] - 1)]
    else:
        page_size = block_size // pages_per_block
        span = page_table.shape[1] * block_size
        page = page_table[row // span, T.min(row % span // page_size + place // page_size, page_table.shape[1] - 1)]
        value[0] = scales[T.max(T.min(page, scales.shape[0] - 1), 0), place % page_size]


@T.macro
def scale_keys(S, key_scale, slot, rows, block_size):
    """Multiply column j of a score tile by key_scale[slot, j]."""
    for i, j in T.Parallel(rows, block_size):
        S[i, j] = S[i, j] * key_scale[slot, j]


@T.macro
def scale_rows(row_max, row_factor, rows):
    """Multiply the maximum of row i by row_factor[i], which is 0 or more; the maximum of nothing stays -inf."""
    for i in T.Parallel(rows):
        row_max[i] = T.if_then_else(row_max[i] == -T.infinity("float32"), row_max[i], row_max[i] * row_factor[i])


@T.macro
def block_max(
    S, row_max, head_max, row_limit, rows, block_size, block, full_blocks,
    query_scale, w, head, heads_per_group, key_scale, slot, key_scales,
):  # fmt: skip
    """scores.block_max over scaled scores.

    With key_scales column j is multiplied by key_scale[slot, j]. Where a group has several heads, the maximum of row i
    is multiplied by query_scale[w, head, i]: it ranks the heads of the group among each other, and nothing else.
    """
    if key_scales:
        scale_keys(S, key_scale, slot, rows, block_size)
    if heads_per_group == 1:
        scores.block_max(S, row_max, row_limit, rows, block_size, block, full_blocks)
    else:
        T.fill(head_max, -T.infinity("float32"))
        scores.block_max(S, head_max, row_limit, rows, block_size, block, full_blocks)
        for i in T.Parallel(rows):
            row_max[i] = T.max(row_max[i], head_max[i] * query_scale[w, head, i])
