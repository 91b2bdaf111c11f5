"""What index_score and select_blocks share: finding the tile, the producer, and the loop over pairs of score tiles.

A kernel derives from `Indexer`, gives `finish_pair`, and calls the methods in the order in which they stand here. Its
table has the roles of `roles_of`, the pipeline "q" of `queries_of`, and the index keys as "k".
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import scores, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.pipeline import arrive, arrive_alone, following
from msa_tiles.dsl.cutedsl.shared import make_barriers, make_buffers
from msa_tiles.dsl.cutedsl.varlen import key_length, last_tile_at_most, last_visible, tile_limits
from msa_tiles.dsl.table import Parts, Pipeline, Role, buffer, declares, lane

ROWS = 64  # of a consumer warpgroup: what one wgmma takes
GROUP = 128  # threads of a warpgroup
WARPS = 4  # of it


@declares
def roles_of(consumers, does, rest, producer_registers, consumer_registers):
    """Consumer warpgroups, then one of which a warp loads; `rest` is the role of the others, by name and what it does.

    What registers the last warpgroup gives away, it gives away as a whole.
    """
    name, what = rest
    return (
        Role("consumer", WARPS * consumers, does, consumer_registers),
        Role("producer", 1, "loads Q once, then streams the index keys, one block a stage", producer_registers),
        Role(name, WARPS - 1, what, producer_registers),
    )


@declares
def queries_of(tiles, heads, head_dim, element):
    """Tiles of ROWS queries of every head, which TMA brings once."""
    return Parts(
        (Pipeline("q", 1, (lane("producer"),), fills=("queries",)),),
        (
            buffer(
                "queries", element, align=1024, note="swizzled, in panels of 128 bytes",
                tiles=tiles, heads=heads, rows=ROWS, head_dim=head_dim,
            ),
        ),
    )  # fmt: skip


class Queries(NamedTuple):
    """The queries in global memory, as TMA sees them: [token, dim, head]."""

    atom: Any
    rows: Any


class Indexer:
    """Scores of tiles of consecutive queries of one request, by blocks of keys.

    `keys` is an operand, see msa_tiles.dsl.cutedsl.operands. A block of a paged request is found through page_table
    [requests, max_pages]. Queries are of the element that is multiplied, and have scales where keys have.
    """

    def __init__(self, table, keys, tiles, heads):
        """`heads` index heads are reduced to one maximum; a CTA has so many tiles of ROWS queries."""
        self.cta = table
        self.keys = keys
        self.element = keys.element
        self.head_dim = keys.head_dim
        self.block_size = keys.block_size
        self.stages = keys.stages
        self.heads = heads
        self.tiles = tiles
        self.tile = tiles * ROWS
        self.panel = tma.panel_columns(self.element, self.head_dim)

    def arguments(self, out_element, scalars):
        """Stand-ins for cute.compile: the queries, the keys, each with their scales if they have any; page_table,
        cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions; the output, `scalars` int32 and the stream.
        """
        total_q, heads, starts = cute.sym_int(), cute.sym_int(), cute.sym_int()
        queries = [stand_in(self.element, total_q, heads, self.head_dim, align=tma.BYTES)]
        if self.keys.scaled:
            queries.append(stand_in(Float32, total_q, heads, last=cute.sym_int64()))
        return (
            *queries,
            *self.keys.arguments(),
            stand_in(Int32, cute.sym_int(), cute.sym_int()),
            stand_in(Int32, starts),
            stand_in(Int32, starts),
            stand_in(Int32, cute.sym_int()),
            stand_in(Int32, cute.sym_int()),
            stand_in(out_element, cute.sym_int(), total_q, cute.sym_int()),
            *(Int32(0) for _ in range(scalars)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def described(self, idx_q):
        """On the host: the queries."""
        return Queries(*tma.box_atom(tma.described(idx_q, (0, 2, 1)), ROWS, self.panel))

    def launch(self, heads, idx_q, cu_seqlens_q):
        """A block for each head and tile slot: neighbours in the grid read the same keys."""
        return {
            "grid": (heads * (idx_q.shape[0] // self.tile + cute.size(cu_seqlens_q)), 1, 1),
            "block": (self.cta.threads, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            "min_blocks_per_mp": 1,
        }

    def layouts(self):
        """Of the queries, [ROWS, head_dim, tile and head], and of the keys."""
        tiler = (ROWS, self.block_size, self.head_dim)
        queries = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, self.element, self.tiles * self.heads)
        return {"queries": queries, **self.keys.layouts()}

    @cute.jit
    def prepare(self, memory: SmemAllocator, atoms: tuple):
        """Shared memory: the buffers by name, what the keys hold, and the barrier of the queries; all ready for use."""
        buffers = make_buffers(self.cta, memory, self.layouts())
        barriers = make_barriers(self.cta, memory, atoms)
        return buffers, self.keys.held(buffers, barriers), barriers + self.cta.place("q_full")

    @cute.jit
    def find_tile(
        self, slot: Int32, total_q: Int32, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor, q_positions: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        causal: Int32,
    ):  # fmt: skip
        """Request, first and end token, key count, last key of the first token, and number of blocks of a slot.

        Slots past the last request hold the rows that belong to nobody; they see no key.
        """
        num_requests = Int32(cute.size(cu_seqlens_q)) - 1
        request = last_tile_at_most(cu_seqlens_q, self.tile, slot)
        start = cu_seqlens_q[request]
        first_token = start + (slot - start // self.tile - request) * self.tile
        length = Int32(0)
        end_token = total_q
        if request < num_requests:
            length = key_length(cu_seqlens_k, seqused_k, use_seqused, request)
            end_token = cu_seqlens_q[request + 1]
        first_limit = length - end_token + first_token
        if causal == 0:
            first_limit = length
        num_blocks = Int32(0)
        if (length > 0) & (first_token < end_token):
            last_token = cutlass.min(first_token + self.tile, end_token) - 1
            _, most = tile_limits(q_positions, use_positions, first_token, last_token, first_limit, length)
            num_blocks = cutlass.max(most + self.block_size, 0) // self.block_size
        return request, first_token, end_token, length, first_limit, num_blocks

    def query_boxes(self, queries):
        """Where TMA writes queries: [rows, columns, tile, head, panel]."""
        size = ROWS * self.head_dim
        layout = cute.make_layout(
            (ROWS, self.panel, self.tiles, self.heads, self.head_dim // self.panel),
            stride=(self.panel, 1, self.heads * size, size, ROWS * self.panel),
        )
        return cute.make_tensor(queries.iterator, layout)

    @cute.jit
    def produce(
        self, mQ: Queries, sQ: cute.Tensor, q_full: cute.Pointer, stored: tuple, held: tuple, page_table: cute.Tensor,
        cu_seqlens_k: cute.Tensor, head: Int32, request: Int32, first_token: Int32, num_blocks: Int32,
    ):  # fmt: skip
        """The producer warp: all query tiles once, then one block of keys a stage."""
        boxes = self.query_boxes(sQ)
        if num_blocks > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, self.cta.bytes_of("q"))
            for tile in cutlass.range_constexpr(self.tiles):
                for r in cutlass.range_constexpr(self.heads):
                    queries = mQ.rows[None, None, head * self.heads + r]
                    for panel in cutlass.range_constexpr(self.head_dim // self.panel):
                        target = boxes[None, None, tile, r, panel]
                        tma.load_box(mQ.atom, queries, first_token + tile * ROWS, panel, target, q_full)
        stage = Int32(0)
        phase = Int32(1)
        for block in cutlass.range(num_blocks, unroll=1):
            row = cu_seqlens_k[request] + block * self.block_size
            self.keys.load(stored, held, stage, phase, row, self.keys.pages(page_table, request, block))
            stage, phase = following(stage, phase, self.stages)

    def operands(self, sQ, held):
        """The two multiplications (the first step of a product, the steps after it) and their operands in smem."""
        multiplications = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        return multiplications, wgmma.operand_a(multiplications, sQ), wgmma.operand_b(multiplications, held.tiles)

    def score_tile(self, operands):
        """Registers of one score tile."""
        return wgmma.accumulator(operands[0], self.block_size)

    @cute.jit
    def multiply(self, operands, tile: Int32, stage: Int32, into: cute.Tensor):
        """Start into = queries of this tile x keys of this stage."""
        multiplications, queries, keys = operands
        wgmma.multiply(multiplications, into, queries[None, None, None, tile], keys[None, None, None, stage])

    @cute.jit
    def row_limits(
        self, q_positions: cute.Tensor, use_positions: Int32, first_token: Int32, end_token: Int32,
        first_limit: Int32, length: Int32, thread: Int32,
    ):  # fmt: skip
        """Last visible keys of the two rows that this thread holds, and the number of blocks that all rows see whole.

        first_token and first_limit are the warpgroup's, thread counts in it.
        """
        limits = cute.make_rmem_tensor(2, Int32)
        for half in cutlass.range_constexpr(2):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * half
            token = cutlass.min(first_token + row, end_token - 1)
            limits[half] = last_visible(q_positions, use_positions, token, first_token, first_limit, length)
        last_token = cutlass.min(first_token + ROWS, end_token) - 1
        least, _ = tile_limits(q_positions, use_positions, first_token, last_token, first_limit, length)
        return limits, cutlass.max(least + 1, 0) // self.block_size

    @cute.jit
    def score_pairs(
        self, operands, first_tile: Int32, q_full: cute.Pointer, held: tuple, limits: cute.Tensor, full_blocks: Int32,
        num_blocks: Int32, lane: Int32, state,
    ):  # fmt: skip
        """Two score tiles: the even block's is reduced while the odd one's is multiplied, then the other way round.

        Calls finish_pair(state, first block, even maxima, odd maxima, lane) after every pair.
        """
        S_even = self.score_tile(operands)
        S_odd = self.score_tile(operands)
        max_even = cute.make_rmem_tensor(2, Float32)
        max_odd = cute.make_rmem_tensor(2, Float32)
        last = self.heads - 1
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(held.full, 0)
        self.multiply(operands, first_tile, stage, S_even)
        for pair in cutlass.range((num_blocks + 1) // 2, unroll=1):
            block = pair * 2
            max_even.fill(-Float32.inf)
            max_odd.fill(-Float32.inf)
            even = stage
            odd, phase = following(stage, phase, self.stages)
            stage, next_phase = following(odd, phase, self.stages)
            if block + 1 < num_blocks:
                cute.arch.mbarrier_wait(held.full + odd, phase)
            # Not unrolled: the compiler would keep the addresses of every head's queries in registers.
            for r in cutlass.range(self.heads, unroll=1):
                warpgroup.wait_group(0)
                next_tile = first_tile + r + 1
                next_stage = even
                if r == last:
                    next_tile = first_tile
                    next_stage = stage
                    self.release_tile(held, even, lane)
                # Past the last block this multiplies a stale stage and the result is dropped: the waits stay uniform.
                self.multiply(operands, first_tile + r, odd, S_odd)
                factors = self.keys.factors(held, even)
                scores.block_max(S_even, max_even, limits, block * self.block_size, block, full_blocks, lane, factors)
                if r == last:
                    self.release_factors(held, even)
                if (r == last) & (block + 2 < num_blocks):
                    cute.arch.mbarrier_wait(held.full + stage, next_phase)
                warpgroup.wait_group(0)
                if (r == last) & (block + 1 < num_blocks):
                    self.release_tile(held, odd, lane)
                self.multiply(operands, next_tile, next_stage, S_even)
                first_key = (block + 1) * self.block_size
                factors = self.keys.factors(held, odd)
                scores.block_max(S_odd, max_odd, limits, first_key, block + 1, full_blocks, lane, factors)
                if (r == last) & (block + 1 < num_blocks):
                    self.release_factors(held, odd)
            phase = next_phase
            self.finish_pair(state, block, max_even, max_odd, lane)
        warpgroup.wait_group(0)

    @cute.jit
    def score_singly(
        self, operands, first_tile: Int32, q_full: cute.Pointer, held: tuple, limits: cute.Tensor, full_blocks: Int32,
        num_blocks: Int32, lane: Int32, state,
    ):  # fmt: skip
        """The same with one score tile, for states that leave no registers for a second one."""
        S = self.score_tile(operands)
        max_even = cute.make_rmem_tensor(2, Float32)
        max_odd = cute.make_rmem_tensor(2, Float32)
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
        for pair in cutlass.range((num_blocks + 1) // 2, unroll=1):
            for parity in cutlass.range_constexpr(2):
                block = pair * 2 + parity
                maxima = max_even if cutlass.const_expr(parity == 0) else max_odd
                maxima.fill(-Float32.inf)
                if block < num_blocks:
                    cute.arch.mbarrier_wait(held.full + stage, phase)
                for r in cutlass.range(self.heads, unroll=1):
                    # Past the last block the result is dropped, as above.
                    self.multiply(operands, first_tile + r, stage, S)
                    warpgroup.wait_group(0)
                    if (r == self.heads - 1) & (block < num_blocks):
                        self.release_tile(held, stage, lane)
                    factors = self.keys.factors(held, stage)
                    scores.block_max(S, maxima, limits, block * self.block_size, block, full_blocks, lane, factors)
                    if (r == self.heads - 1) & (block < num_blocks):
                        self.release_factors(held, stage)
                stage, phase = following(stage, phase, self.stages)
            self.finish_pair(state, pair * 2, max_even, max_odd, lane)

    @cute.jit
    def release_tile(self, held: tuple, stage: Int32, lane: Int32):
        """Behind the last product of a stage, which has brought the warp together: one arrival a consumer warp."""
        if cutlass.const_expr(not self.keys.key_scales):
            arrive_alone(held.free + stage)

    @cute.jit
    def release_factors(self, held: tuple, stage: Int32):
        """The same where scales of keys lie in the stage until the products are reduced."""
        if cutlass.const_expr(self.keys.key_scales):
            arrive(held.free + stage)
