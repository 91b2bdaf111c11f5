"""Sizes of the index_kl kernel, what it keeps in shared memory, and the order of a chunk's edges."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.wgmma import ROWS

GROUP = 128  # threads of a warpgroup
WARP = 32
WARPS = GROUP // WARP
WARP_ROWS = 16  # of a tile
PREPARERS = 2  # warps
FIRST, LAST = 1, 2  # bits of a chunk's header: whether it is the first one of its task, or the last
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class Shared(NamedTuple):
    """What the CTA keeps in shared memory; the barriers are pointers to the first of each kind."""

    block: Any
    keys: Any
    ring: Any
    index_queries: Any
    dS: Any
    tasks: Any
    headers: Any
    edges: Any
    lse: Any
    index_lse: Any
    weights: Any
    task_full: Any
    task_gathered: Any
    k_full: Any
    k_free: Any
    keys_full: Any
    keys_free: Any
    q_full: Any
    q_free: Any
    chunk_full: Any
    chunk_free: Any
    exchanged: Any


class Layout:
    """Sizes and shared memory; producers and consumers derive from it.

    The rings have `stages` tiles of queries, and `chunks` chunks of `chunk_edges` edges.
    """

    def __init__(self, element, head_dim, index_dim, block_size, group, prefix, stages, edges, chunks):
        self.element = element
        self.head_dim = head_dim
        self.index_dim = index_dim
        self.block_size = block_size
        self.group = group
        self.prefix = prefix
        self.stages = stages
        self.chunk_edges = edges
        self.chunks = chunks
        self.consumers = block_size // ROWS
        self.rows = Rows(self.element, head_dim, group)
        self.blocks = Blocks(self.element, head_dim, block_size, 0)
        self.index_blocks = Blocks(self.element, index_dim, block_size, 0)
        self.rows_per_query = self.rows.rows_per_token
        self.queries = self.rows.tokens
        self.tiles = edges // self.queries
        # Of d_idx_q^T, the tiles of 64 rows that a consumer makes; where there is only one, all make it.
        self.own_tiles = max(index_dim // ROWS // self.consumers, 1)

    @cute.jit
    def allocate(self, memory: SmemAllocator):
        """Shared memory, with barriers ready for use on return."""
        rows = LayoutEnum.ROW_MAJOR
        tiler = (self.block_size, ROWS, self.index_dim)
        k_layout = hopper.make_smem_layout_a(rows, (self.block_size, ROWS, self.head_dim), self.element, 1)
        keys_layout = hopper.make_smem_layout_a(rows, tiler, self.element, 2)
        q_layout = self.rows.tiles_layout(self.stages)
        index_layout = hopper.make_smem_layout_b(
            rows, (ROWS, self.chunk_edges, self.index_dim), self.element, self.chunks
        )
        dS_layout = hopper.make_smem_layout_b(
            rows, (ROWS, self.chunk_edges, self.block_size), self.element, self.chunks
        )
        block = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        keys = memory.allocate_tensor(self.element, keys_layout.outer, 1024, keys_layout.inner)
        ring = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        index_queries = memory.allocate_tensor(self.element, index_layout.outer, 1024, index_layout.inner)
        dS = memory.allocate_tensor(self.element, dS_layout.outer, 1024, dS_layout.inner)
        # Of an edge, what the four lanes of a row need: the same number of heads each, neighbours in the accumulators.
        heads = self.rows_per_query // 4
        lse_layout = cute.make_layout(
            (heads, 4, self.chunk_edges, self.chunks), stride=(1, heads, 4 * heads, 4 * heads * self.chunk_edges)
        )
        lse = memory.allocate_tensor(Float32, lse_layout, 16)
        of_edges = cute.make_layout((self.chunks, self.chunk_edges), stride=(self.chunk_edges, 1))
        edges = memory.allocate_tensor(Int32, of_edges, 16)
        index_lse = memory.allocate_tensor(Float32, of_edges, 16)
        weights = memory.allocate_tensor(Float32, of_edges, 16)
        headers = memory.allocate_tensor(Int32, cute.make_layout((self.chunks, 5), stride=(5, 1)), 16)
        tasks = memory.allocate_tensor(Int32, cute.make_layout((2, 5), stride=(5, 1)), 16)
        consumers = self.consumers * WARPS
        counts = [2, 1, 1, 1, 2, 2, self.stages, self.stages, self.chunks, self.chunks, self.chunks]
        arrivals = [1, 1 + PREPARERS, 1, consumers, 1, consumers, 1, consumers, PREPARERS, consumers, consumers]
        barriers = memory.allocate_array(Int64, sum(counts))
        if cute.arch.thread_idx()[0] == 0:
            for kind in cutlass.range_constexpr(len(counts)):
                for i in cutlass.range_constexpr(counts[kind]):
                    cute.arch.mbarrier_init(barriers + sum(counts[:kind]) + i, arrivals[kind])
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.group < self.rows_per_query):
            # The rows that no head fills meet an LSE of infinity: their scores must be finite.
            words = cute.make_tensor(
                cute.recast_ptr(ring.iterator, dtype=Int64), cute.make_layout(self.stages * ROWS * self.head_dim // 4)
            )
            for word in cutlass.range(
                cute.arch.thread_idx()[0], cute.size(words), (self.consumers + 1) * GROUP, unroll=1
            ):
                words[word] = Int64(0)
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        places = (barriers + sum(counts[:kind]) for kind in range(len(counts)))
        return Shared(
            block, keys, ring, index_queries, dS, tasks, headers, edges, lse, index_lse, weights, *places
        )  # fmt: skip

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

    @cute.jit
    def chunk_before(self, buffer: Int32, phase: Int32):
        """Buffer and phase of the chunk before the one in `buffer`."""
        return pick(buffer == 0, self.chunks - 1, buffer - 1), pick(buffer == 0, phase ^ 1, phase)
