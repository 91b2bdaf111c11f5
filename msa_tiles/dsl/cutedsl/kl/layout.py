"""Sizes of the index_kl kernel, what it keeps in shared memory, and the order of a chunk's edges."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.shared import barriers_of, by_rows, make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.wgmma import ROWS

GROUP = 128  # threads of a warpgroup
WARPS = 4  # of it
WARP_ROWS = 16  # of a tile
PREPARERS = 2  # warps
FIRST, LAST = 1, 2  # bits of a chunk's header: whether it is the first one of its task, or the last
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class Shared(NamedTuple):
    """What the CTA keeps in shared memory: the table's buffers, and pointers to the first of its barriers of a kind."""

    k_tile: Any
    keys: Any
    ring: Any
    index_queries: Any
    dS: Any
    lse: Any
    edges: Any
    index_lse: Any
    weights: Any
    headers: Any
    tasks: Any
    task_full: Any
    task_gathered_full: Any
    k_full: Any
    k_free: Any
    keys_full: Any
    keys_free: Any
    q_full: Any
    q_free: Any
    chunk_full: Any
    chunk_free: Any
    exchanged_full: Any


class Layout:
    """Sizes and shared memory; producers and consumers derive from it. `table` is that of the thread block."""

    def __init__(self, table, head_dim, index_dim, block_size, group, prefix):
        self.cta = table
        self.element = ELEMENTS[table.buffers["ring"].element]
        self.head_dim = head_dim
        self.index_dim = index_dim
        self.block_size = block_size
        self.group = group
        self.prefix = prefix
        self.stages = table.depth("q")
        self.chunks = table.depth("chunk")
        self.chunk_edges = table.buffers["edges"].dims["edges"]
        self.consumers = block_size // ROWS
        self.rows = Rows(self.element, head_dim, group)
        self.blocks = Blocks(self.element, head_dim, block_size, 0)
        self.index_blocks = Blocks(self.element, index_dim, block_size, 0)
        self.rows_per_query = self.rows.rows_per_token
        self.queries = self.rows.tokens
        self.tiles = self.chunk_edges // self.queries
        # Of d_idx_q^T, the tiles of 64 rows that a consumer makes; where there is only one, all make it.
        self.own_tiles = max(index_dim // ROWS // self.consumers, 1)

    @cute.jit
    def allocate(self, memory: SmemAllocator):
        """Shared memory, with barriers ready for use on return."""
        rows = LayoutEnum.ROW_MAJOR
        of_chunk = (ROWS, self.chunk_edges)
        found = make_buffers(
            self.cta,
            memory,
            {
                "k_tile": hopper.make_smem_layout_a(rows, (self.block_size, ROWS, self.head_dim), self.element, 1),
                "keys": hopper.make_smem_layout_a(rows, (self.block_size, ROWS, self.index_dim), self.element, 2),
                "ring": self.rows.tiles_layout(self.stages),
                "index_queries": hopper.make_smem_layout_b(
                    rows, (*of_chunk, self.index_dim), self.element, self.chunks
                ),
                "dS": hopper.make_smem_layout_b(rows, (*of_chunk, self.block_size), self.element, self.chunks),
                **by_rows(self.cta, "edges", "index_lse", "weights", "headers", "tasks"),
            },
        )
        if cutlass.const_expr(self.group < self.rows_per_query):
            # The rows that no head fills meet an LSE of infinity: their scores must be finite.
            ring = found["ring"].iterator
            words = cute.make_tensor(
                cute.recast_ptr(ring, dtype=Int64), cute.make_layout(self.cta.buffers["ring"].bytes // 8)
            )
            for word in cutlass.range(cute.arch.thread_idx()[0], cute.size(words), self.cta.threads, unroll=1):
                words[word] = Int64(0)
            cute.arch.fence_view_async_shared()
        barriers = make_barriers(self.cta, memory, ())
        return Shared(**found, **barriers_of(self.cta, barriers))

    def listed(self, head):
        """The head of the schedule that a KV head follows."""
        return Int32(0) if self.prefix else head

    def column_of(self, edge):
        """The column of a chunk's accumulators that an edge takes.

        A lane has two neighbouring columns of every eight. Of a tile, it ends up with the queries of its own place:
        one of four, which is a column of it, or two neighbours of eight.
        """
        if self.queries == 8:
            return edge
        return (edge >> 3 << 3) + (edge & 3) * 2 + (edge >> 2 & 1)

    def edge_of(self, column):
        """The edge of a column."""
        if self.queries == 8:
            return column
        return (column >> 3 << 3) + (column & 1) * 4 + (column >> 1 & 3)
