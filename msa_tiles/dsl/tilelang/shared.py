"""Shared memory and barriers as a table (msa_tiles.dsl.table) says."""

import tilelang.language as T

STATIC, DYNAMIC = "shared", "shared.dyn"


def make_buffer(table, name):
    """A buffer of the table."""
    found = table.buffers[name]
    scope = STATIC if found.static else DYNAMIC
    return T.alloc_shared(list(found.dims.values()), found.element, scope=scope)


def make_barrier(table, *names):
    """The barriers of the table that are called so, `<pipeline>_full` or `<pipeline>_free`, one for each stage."""
    return T.alloc_barrier(arrive_count=[count for name in names for count in table.arrivals(name)])
