"""The words in which kernels of both DSLs and their launches name work for each other. Plain Python: the functions take
ints, tensor elements and expressions of either DSL.

An *edge* is one query that selected a block: query in window << 13 | slot << 7 | visible tokens - 1, or -1 for none.
A *task* is (row where the block begins, first edge, number of edges, extent, …), its extent being valid rows << 1 |
cut: valid rows end with the request's keys, and cut says that some edge sees only a part of the block.
A *shared block* of a tile of queries is (row where it begins, valid rows << 9 | cut << 8 | mask of the queries that
select it), where cut says that some query of the tile sees less than the block.
"""

SLOT_SHIFT, QUERY_SHIFT = 7, 13
MOST_VISIBLE = 1 << SLOT_SHIFT  # rows of a block
MOST_SLOTS = 1 << QUERY_SHIFT - SLOT_SHIFT
MOST_QUERIES = 1 << 31 - QUERY_SHIFT  # of a window

TASK_CUT, TASK_VALID_SHIFT = 1, 1

CUT, VALID_SHIFT = 1 << 8, 9
MOST_TILE_QUERIES = 8  # bits of the mask


def edge_of(query, slot, last_column):
    return query << QUERY_SHIFT | slot << SLOT_SHIFT | last_column


def query_of(edge):
    """The edge's query, counted from where the window begins."""
    return edge >> QUERY_SHIFT


def slot_of(edge):
    """Which of its query's selected blocks an edge is."""
    return (edge >> SLOT_SHIFT) & (MOST_SLOTS - 1)


def last_column_of(edge):
    """The last row of the block that the edge's query sees, MOST_VISIBLE - 1 for no edge."""
    return edge & (MOST_VISIBLE - 1)


def extent_of(valid_rows, cut):
    return valid_rows << TASK_VALID_SHIFT | cut


def valid_rows_of(extent):
    """Rows of a task's block that belong to the request."""
    return extent >> TASK_VALID_SHIFT


def is_cut(extent):
    """Not 0 if some edge of a task sees only a part of the block."""
    return extent & TASK_CUT
