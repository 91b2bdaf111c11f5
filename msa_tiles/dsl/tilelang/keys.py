"""TMA loads of one KV block, from flat keys or from the pages of a pool.

A block is named by the row where it begins. Flat keys have real rows. Paged keys have virtual ones: request b begins at
b * max_pages * block_size, whatever the page size, page_table being [requests, max_pages]. What an entry past the
request's keys names does not matter: its rows are masked, and TMA answers a page outside the pool with zeros.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.layout import described, strides

BOX_BYTES = 128  # of a row, at most: what a swizzle reaches
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}  # of an element


def box_columns(head_dim, element):
    """Columns of a row that one box takes."""
    return min(head_dim, BOX_BYTES // BYTES[element])


def index_keys(head_dim, block_size, pages_per_block):
    """Shape and strides of index keys: [total_k, dim], or [pages, page, dim] with pages_per_block > 0."""
    rows, pages = T.dynamic("num_key_rows, num_pages")
    page_stride, row_stride = strides("key_page, key_row_stride")
    if pages_per_block == 0:
        return (rows, head_dim), (row_stride, 1)
    return (pages, block_size // pages_per_block, head_dim), (page_stride, row_stride, 1)


def block_keys(heads, head_dim, block_size, pages_per_block, name):
    """Shape and strides of keys or values: [total_k, heads, dim], or [pages, heads, page, dim]."""
    rows, pages = T.dynamic(f"num_{name}_rows, num_{name}_pages")
    page_stride, row_stride, head_stride = strides(f"{name}_page, {name}_row, {name}_head")
    if pages_per_block == 0:
        return (rows, heads, head_dim), (row_stride, head_stride, 1)
    return (pages, heads, block_size // pages_per_block, head_dim), (page_stride, head_stride, row_stride, 1)


@T.macro
def load_index_block(keys, page_table, row, shared, full, stage, block_size, head_dim, pages_per_block, columns):
    """keys [total_k, dim], or [pages, page, dim] with pages_per_block > 0 -> shared[stage] [block_size, dim].

    Pages come in boxes of so many columns. Signals full[stage].
    """
    if pages_per_block == 0:
        T.tma_copy(described(keys)[row : row + block_size, :], shared[stage, :, :], barrier=full[stage])
    else:
        page_size = block_size // pages_per_block
        span = page_table.shape[1] * block_size
        for p in T.unroll(pages_per_block):
            page = page_table[row // span, T.min(row % span // page_size + p, page_table.shape[1] - 1)]
            for box in T.unroll(head_dim // columns):
                T.tma_copy(
                    described(keys)[page, 0:page_size, box * columns : box * columns + columns],
                    shared[stage, p * page_size : (p + 1) * page_size, box * columns : box * columns + columns],
                    barrier=full[stage],
                )
