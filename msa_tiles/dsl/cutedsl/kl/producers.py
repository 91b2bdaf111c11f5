"""The producer warps of the index_kl kernel: they claim tasks, gather query rows, and prepare chunks."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.claims import first_claim, next_claim
from msa_tiles.dsl.cutedsl.kl.layout import FIRST, LAST, LOG2_E, PREPARERS, Layout, Shared
from msa_tiles.dsl.cutedsl.pipeline import arrive, arrive_alone, following
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, wide
from msa_tiles.dsl.table import WARP
from msa_tiles.dsl.words import query_of, slot_of, valid_rows_of


class Producers(Layout):
    """What the four warps of the last warpgroup do."""

    @cute.jit
    def claim(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, index_atom: cute.CopyAtom, mIndex: cute.Tensor, shared: Shared,
        tasks: cute.Tensor, counts: cute.Tensor, claims: cute.Tensor, window_index: Int32, heads: Int32,
    ):  # fmt: skip
        """The claiming warp: one task after the other, its entry, then its keys and index keys."""
        lane = cute.arch.lane_idx()
        k_boxes = self.blocks.boxes(shared.k_tile)
        index_boxes = tma.boxes(shared.keys, self.block_size, self.block_size, self.index_dim, 2)
        cpasync.prefetch_descriptor(k_atom)
        cpasync.prefetch_descriptor(index_atom)
        claim = first_claim(counts, window_index)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_gathered_full, parity ^ 1)
            claim = next_claim(claim, claims, counts, window_index, heads, self.listed)
            head = claim.head
            row = Int32(0)
            if head < heads:
                task = tasks[window_index, self.listed(head), claim.place, None]
                row = task[0]
                if lane == 0:
                    shared.tasks[parity, 0] = task[1]
                    shared.tasks[parity, 1] = task[2]
                    shared.tasks[parity, 2] = head
                    shared.tasks[parity, 3] = valid_rows_of(task[3])
                    shared.tasks[parity, 4] = claim.place
            else:
                running = Int32(0)
                if lane == 0:
                    shared.tasks[parity, 1] = Int32(-1)
            arrive_alone(shared.task_full + parity)
            if running > 0:
                cute.arch.mbarrier_wait(shared.k_free, parity ^ 1)
                self.blocks.load(k_atom, mK, row, [], head, k_boxes, shared.k_full)
                cute.arch.mbarrier_wait(shared.keys_free + parity, (turn >> 1) & 1 ^ 1)
                full = shared.keys_full + parity
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.cta.bytes_of("keys"))
                for panel in cutlass.range_constexpr(self.index_dim // tma.PANEL):
                    tma.load_box(index_atom, mIndex, row, panel, index_boxes[None, None, 0, panel, parity], full)
            turn = turn + 1

    @cute.jit
    def gather(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, shared: Shared, edges: cute.Tensor, present: cute.Tensor,
        window_index: Int32, first_token: Int32, gradients: Int32,
    ):  # fmt: skip
        """The gathering warp: the query rows of every tile of each task, as fast as the ring takes them.

        It also marks the edges whose gradients will come.
        """
        lane = cute.arch.lane_idx()
        cpasync.prefetch_descriptor(q_atom)
        boxes = self.rows.boxes(shared.ring, self.stages)
        slot = Int32(0)
        phase = Int32(1)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            first_edge = shared.tasks[parity, 0]
            num = shared.tasks[parity, 1]
            head = shared.tasks[parity, 2]
            if num < 0:
                running = Int32(0)
            else:
                of_head = edges[window_index, self.listed(head), None]
                # Lane i holds the edge of the tile's i-th query; it is read one tile ahead of need.
                edge = of_head[first_edge + cutlass.min(lane, num - 1)]
                left = num
                tiles = (num + self.chunk_edges - 1) // self.chunk_edges * self.tiles
                for number in cutlass.range(tiles, unroll=1):
                    if (number == tiles - self.tiles) & (lane == 0):
                        cute.arch.mbarrier_arrive(shared.task_gathered_full)
                    current = edge
                    queries = cutlass.max(cutlass.min(left, self.queries), 0)
                    left = left - self.queries
                    edge = of_head[first_edge + cutlass.min(num - left + lane, num - 1)]
                    if (lane < queries) & (gradients > 0):
                        present[query_of(current), slot_of(current), head] = Int32(1)
                    cute.arch.mbarrier_wait(shared.q_free + slot, phase)
                    full = shared.q_full + slot
                    if lane == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(full, queries * self.rows.token_bytes)
                    for r in cutlass.range_constexpr(self.queries):
                        token = first_token + query_of(cute.arch.shuffle_sync(current, r))
                        if r < queries:
                            target = boxes[None, None, None, None, None, r, slot]
                            self.rows.load(q_atom, mQ, token, head, target, full)
                    slot, phase = following(slot, phase, self.stages)
            turn = turn + 1

    @cute.jit
    def prepare(
        self, given: tuple, shared: Shared, edges: cute.Tensor, window_index: Int32, first_token: Int32, part: Int32
    ):
        """A preparing warp: its half of every chunk, read before the chunk's buffer is free."""
        lane = cute.arch.lane_idx()
        of_row = self.index_dim // VECTOR
        index_queries = cute.make_rmem_tensor((VECTOR, self.chunk_edges // PREPARERS * of_row // WARP), self.element)
        lse = cute.make_rmem_tensor(self.chunk_edges // PREPARERS * self.rows_per_query // WARP, Float32)
        buffer = Int32(0)
        phase = Int32(1)
        turn = Int32(0)
        running = Int32(1)
        while running > 0:
            parity = turn & 1
            cute.arch.mbarrier_wait(shared.task_full + parity, (turn >> 1) & 1)
            first_edge = shared.tasks[parity, 0]
            num = shared.tasks[parity, 1]
            head = shared.tasks[parity, 2]
            if num < 0:
                running = Int32(0)
                cute.arch.mbarrier_wait(shared.chunk_free + buffer, phase)
                if lane == 0:
                    shared.headers[buffer, 0] = Int32(-1)
                    cute.arch.mbarrier_arrive(shared.chunk_full + buffer)
            else:
                of_head = edges[window_index, self.listed(head), None]
                queries_of_head = given[0][None, head, None]
                # A lane has the same head of every query that it reads the LSE of.
                lse_of_member = given[1][None, head * self.group + (lane & self.group - 1)]
                # Lane i holds the chunk's i-th edge, or the task's last one: no column may meet what is no number.
                edge = of_head[first_edge + cutlass.min(lane % self.chunk_edges, num - 1)]
                for first in cutlass.range(0, num, self.chunk_edges, unroll=1):
                    if (first + self.chunk_edges >= num) & (lane == 0):
                        cute.arch.mbarrier_arrive(shared.task_gathered_full)
                    current = edge
                    edge = of_head[
                        first_edge + cutlass.min(first + self.chunk_edges + lane % self.chunk_edges, num - 1)
                    ]
                    query = first_token + query_of(current)
                    for v in cutlass.range_constexpr(index_queries.shape[1]):
                        column = part * (self.chunk_edges // PREPARERS) + (v * WARP + lane) // of_row
                        token = cute.arch.shuffle_sync(query, self.edge_of(column))
                        copy_wide(wide(queries_of_head[token, None], lane % of_row), index_queries[None, v])
                    for v in cutlass.range_constexpr(cute.size(lse)):
                        number = part * (self.chunk_edges // PREPARERS) + (v * WARP + lane) // self.rows_per_query
                        lse[v] = lse_of_member[cute.arch.shuffle_sync(query, number)]
                    index_lse = given[2][query, head]
                    weight = given[3][query]
                    cute.arch.mbarrier_wait(shared.chunk_free + buffer, phase)
                    self.fill_chunk(shared, buffer, part, index_queries, lse, lane)
                    if lane // (self.chunk_edges // PREPARERS) == part:
                        column = self.column_of(lane)
                        shared.edges[buffer, column] = pick(first + lane < num, current, -1)
                        shared.index_lse[buffer, column] = index_lse * LOG2_E
                        shared.weights[buffer, column] = weight
                    if (lane == 0) & (part == 0):
                        bits = pick(first == 0, FIRST, 0) | pick(first + self.chunk_edges >= num, LAST, 0)
                        shared.headers[buffer, 0] = bits
                        shared.headers[buffer, 1] = head
                        shared.headers[buffer, 2] = shared.tasks[parity, 4]
                        shared.headers[buffer, 3] = shared.tasks[parity, 3]
                        shared.headers[buffer, 4] = turn
                    cute.arch.fence_view_async_shared()
                    arrive(shared.chunk_full + buffer)
                    buffer, phase = following(buffer, phase, self.chunks)
            turn = turn + 1

    @cute.jit
    def fill_chunk(
        self, shared: Shared, buffer: Int32, part: Int32, index_queries: cute.Tensor, lse: cute.Tensor, lane: Int32
    ):
        """What a preparing warp has read of index queries and LSE -> shared memory."""
        of_row = self.index_dim // VECTOR
        base = shared.index_queries.iterator.toint() + buffer * (self.chunk_edges * self.index_dim * BYTES // VECTOR)
        for v in cutlass.range_constexpr(index_queries.shape[1]):
            column = part * (self.chunk_edges // PREPARERS) + (v * WARP + lane) // of_row
            address = base + self.place(column, lane % of_row) * BYTES
            target = cute.make_ptr(self.element, address, cute.AddressSpace.smem, assumed_align=BYTES)
            copy_wide(index_queries[None, v], cute.make_tensor(target, cute.make_layout(VECTOR)))
        log2_group = self.group.bit_length() - 1
        for v in cutlass.range_constexpr(cute.size(lse)):
            place = v * WARP + lane
            member = place % self.rows_per_query
            edge = part * (self.chunk_edges // PREPARERS) + place // self.rows_per_query
            # The mean over the group's heads is a sum of probabilities that are smaller by as much.
            shift = -lse[v] * LOG2_E - log2_group
            if cutlass.const_expr(self.group < self.rows_per_query):
                shift = pick_float(member < self.group, shift, -Float32.inf)
            shared.lse[(member >> 3) * 2 + (member & 1), member >> 1 & 3, edge, buffer] = shift

    def place(self, row, vector):
        """Where the vector-th 16 bytes of an index query lie in a chunk, in units of 16 bytes.

        Rows of a panel are 128 bytes apart; the swizzle exchanges the vectors of a row by its number in the atom.
        """
        return (vector >> 3) * (self.chunk_edges * 8) + row * 8 + (vector & 7 ^ row & 7)
