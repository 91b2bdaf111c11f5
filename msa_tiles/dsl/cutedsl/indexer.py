"""What index_score and select_blocks share: finding the tile, the producer, and the loop over pairs of score tiles.

A kernel derives from `Indexer`, gives `finish_pair`, and calls the methods in the order in which they stand here.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import scores, tma
from msa_tiles.dsl.cutedsl.varlen import key_length, last_tile_at_most, last_visible, tile_limits

ROWS = 64  # of a consumer warpgroup: what one wgmma takes
GROUP = 128  # threads of a warpgroup


class Indexer:
    """Scores of tiles of consumers * ROWS consecutive queries of one request, by blocks of keys.

    Keys are idx_k [total_k, head_dim], or [pages, page, head_dim] with pages_per_block > 0. A block of a paged request
    is found through page_table [requests, max_pages]; what an entry past the request's keys names does not matter: its
    rows are masked, and TMA answers a page outside the pool with zeros.
    """

    def __init__(
        self, element, head_dim, block_size, heads, pages_per_block, stages, consumers, producer_registers,
        consumer_registers,
    ):  # fmt: skip
        """`heads` index heads are reduced to one maximum; the rest are the plan's tile sizes."""
        self.element = element
        self.head_dim = head_dim
        self.block_size = block_size
        self.heads = heads
        self.pages_per_block = pages_per_block
        self.stages = stages
        self.consumers = consumers
        self.producer_registers = producer_registers
        self.consumer_registers = consumer_registers
        self.tile = consumers * ROWS
        self.threads = (consumers + 1) * GROUP
        self.box_rows = block_size // max(pages_per_block, 1)
        self.query_bytes = consumers * heads * ROWS * head_dim * element.width // 8
        self.block_bytes = block_size * head_dim * element.width // 8

    def arguments(self, out_element, scalars):
        """Stand-ins for cute.compile: the tensors, the output, `scalars` int32 and the stream."""
        total_q, starts = cute.sym_int(), cute.sym_int()

        def tensor(element, *shape, align=None):
            # The strides of what may be large are 64-bit, whatever the lengths.
            strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
            return make_fake_tensor(element, shape, strides, assumed_align=align)

        keys = (cute.sym_int(), self.head_dim)
        if self.pages_per_block:
            keys = (cute.sym_int(), self.box_rows, self.head_dim)
        return (
            tensor(self.element, total_q, cute.sym_int(), self.head_dim, align=tma.BYTES),
            tensor(self.element, *keys, align=tma.BYTES),
            tensor(Int32, cute.sym_int(), cute.sym_int()),
            tensor(Int32, starts),
            tensor(Int32, starts),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(out_element, cute.sym_int(), total_q, cute.sym_int()),
            *(Int32(0) for _ in range(scalars)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    def describe(self, idx_q, idx_k):
        """On the host: copy atom and coordinates of the queries [token, dim, head] and of the keys.

        Keys are [row, dim], or [row, dim, page].
        """
        keys = tma.described(idx_k, (1, 2, 0) if self.pages_per_block else (0, 1))
        queries = tma.described(idx_q, (0, 2, 1))
        return (*tma.box_atom(queries, ROWS), *tma.box_atom(keys, self.box_rows))

    def launch(self, heads, idx_q, cu_seqlens_q):
        """A block for each head and tile slot: neighbours in the grid read the same keys."""
        return {
            "grid": (heads, idx_q.shape[0] // self.tile + cute.size(cu_seqlens_q), 1),
            "block": (self.threads, 1, 1),
            # Without it the compiler does not know how many registers a thread starts with, and ignores setmaxnreg.
            "min_blocks_per_mp": 1,
        }

    @cute.jit
    def prepare(self, memory: SmemAllocator, q_atom: cute.CopyAtom, k_atom: cute.CopyAtom):
        """Shared memory: queries [ROWS, head_dim, head and warpgroup], keys [block_size, head_dim, stage], barriers.

        Barriers: q_full, then k_full of every stage, then k_free of every stage; ready for use on return.
        """
        tiler = (ROWS, self.block_size, self.head_dim)
        rows = LayoutEnum.ROW_MAJOR
        q_layout = hopper.make_smem_layout_a(rows, tiler, self.element, self.consumers * self.heads)
        k_layout = hopper.make_smem_layout_b(rows, tiler, self.element, self.stages)
        queries = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        keys = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        barriers = memory.allocate_array(Int64, 1 + 2 * self.stages)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barriers, 1)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(barriers + 1 + stage, 1)
                cute.arch.mbarrier_init(barriers + 1 + self.stages + stage, self.consumers * GROUP // 32)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(q_atom)
            cpasync.prefetch_descriptor(k_atom)
        cute.arch.sync_threads()
        return queries, keys, barriers, barriers + 1, barriers + 1 + self.stages

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

    @cute.jit
    def produce(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor, sQ: cute.Tensor,
        sK: cute.Tensor, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer, page_table: cute.Tensor,
        cu_seqlens_k: cute.Tensor, head: Int32, request: Int32, first_token: Int32, num_blocks: Int32,
    ):  # fmt: skip
        """The producer warp: all query tiles once, then one block of keys a stage."""
        q_boxes = tma.boxes(sQ, ROWS, ROWS, self.head_dim, self.consumers * self.heads)
        k_boxes = tma.boxes(sK, self.box_rows, self.block_size, self.head_dim, self.stages)
        panels = self.head_dim // tma.PANEL
        if num_blocks > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, self.query_bytes)
            for w in cutlass.range_constexpr(self.consumers):
                for r in cutlass.range_constexpr(self.heads):
                    queries = mQ[None, None, head * self.heads + r]
                    for panel in cutlass.range_constexpr(panels):
                        target = q_boxes[None, None, 0, panel, w * self.heads + r]
                        tma.load_box(q_atom, queries, first_token + w * ROWS, panel, target, q_full)
        stage = Int32(0)
        phase = Int32(1)
        for block in cutlass.range(num_blocks, unroll=1):
            pages = []
            if cutlass.const_expr(self.pages_per_block > 0):
                for p in cutlass.range_constexpr(self.pages_per_block):
                    entry = cutlass.min(block * self.pages_per_block + p, Int32(page_table.shape[1]) - 1)
                    pages.append(page_table[request, entry])
            cute.arch.mbarrier_wait(k_free + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, self.block_bytes)
            for panel in cutlass.range_constexpr(panels):
                if cutlass.const_expr(self.pages_per_block > 0):
                    for p in cutlass.range_constexpr(self.pages_per_block):
                        target = k_boxes[None, None, p, panel, stage]
                        tma.load_box(k_atom, mK[None, None, pages[p]], Int32(0), panel, target, k_full + stage)
                else:
                    row = cu_seqlens_k[request] + block * self.block_size
                    tma.load_box(k_atom, mK, row, panel, k_boxes[None, None, 0, panel, stage], k_full + stage)
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1

    def operands(self, sQ, sK):
        """The two multiplications (the first step of a product, the steps after it) and their operands in smem."""
        major = OperandMajorMode.K
        shape = (ROWS, self.block_size)
        first, rest = (
            hopper.make_trivial_tiled_mma(self.element, self.element, major, major, cutlass.Float32, (1, 1, 1), shape)
            for _ in range(2)
        )
        first.set(warpgroup.Field.ACCUMULATE, False)
        rest.set(warpgroup.Field.ACCUMULATE, True)
        thread = first.get_slice(0)
        return first, rest, first.make_fragment_A(thread.partition_A(sQ)), first.make_fragment_B(thread.partition_B(sK))

    def score_tile(self, first):
        """Registers of one score tile."""
        return first.make_fragment_C(first.partition_shape_C((ROWS, self.block_size)))

    @cute.jit
    def multiply(self, operands, tile: Int32, stage: Int32, into: cute.Tensor):
        """Start into = queries of this tile x keys of this stage."""
        first, rest, queries, keys = operands
        warpgroup.fence()
        for step in cutlass.range_constexpr(self.head_dim // 16):
            mma = first if cutlass.const_expr(step == 0) else rest
            cute.gemm(mma, into, queries[None, None, step, tile], keys[None, None, step, stage], into)
        warpgroup.commit_group()

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
        self, operands, first_tile: Int32, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer,
        limits: cute.Tensor, full_blocks: Int32, num_blocks: Int32, lane: Int32, state,
    ):  # fmt: skip
        """Two score tiles: the even block's is reduced while the odd one's is multiplied, then the other way round.

        Calls finish_pair(state, first block, even maxima, odd maxima, lane) after every pair.
        """
        S_even = self.score_tile(operands[0])
        S_odd = self.score_tile(operands[0])
        max_even = cute.make_rmem_tensor(2, cutlass.Float32)
        max_odd = cute.make_rmem_tensor(2, cutlass.Float32)
        last = self.heads - 1
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(k_full, 0)
        self.multiply(operands, first_tile, stage, S_even)
        for pair in cutlass.range((num_blocks + 1) // 2, unroll=1):
            block = pair * 2
            max_even.fill(-cutlass.Float32.inf)
            max_odd.fill(-cutlass.Float32.inf)
            even = stage
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
            odd = stage
            stage = stage + 1
            next_phase = phase
            if stage == self.stages:
                stage = Int32(0)
                next_phase = phase ^ 1
            if block + 1 < num_blocks:
                cute.arch.mbarrier_wait(k_full + odd, phase)
            # Not unrolled: the compiler would keep the addresses of every head's queries in registers.
            for r in cutlass.range(self.heads, unroll=1):
                warpgroup.wait_group(0)
                next_tile = first_tile + r + 1
                next_stage = even
                if r == last:
                    next_tile = first_tile
                    next_stage = stage
                    self.release(k_free + even, lane)
                # Past the last block this multiplies a stale stage and the result is dropped: the waits stay uniform.
                self.multiply(operands, first_tile + r, odd, S_odd)
                scores.block_max(S_even, max_even, limits, block * self.block_size, block, full_blocks, lane)
                if (r == last) & (block + 2 < num_blocks):
                    cute.arch.mbarrier_wait(k_full + stage, next_phase)
                warpgroup.wait_group(0)
                if (r == last) & (block + 1 < num_blocks):
                    self.release(k_free + odd, lane)
                self.multiply(operands, next_tile, next_stage, S_even)
                scores.block_max(S_odd, max_odd, limits, (block + 1) * self.block_size, block + 1, full_blocks, lane)
            phase = next_phase
            self.finish_pair(state, block, max_even, max_odd, lane)
        warpgroup.wait_group(0)

    @cute.jit
    def score_singly(
        self, operands, first_tile: Int32, q_full: cute.Pointer, k_full: cute.Pointer, k_free: cute.Pointer,
        limits: cute.Tensor, full_blocks: Int32, num_blocks: Int32, lane: Int32, state,
    ):  # fmt: skip
        """The same with one score tile, for states that leave no registers for a second one."""
        S = self.score_tile(operands[0])
        max_even = cute.make_rmem_tensor(2, cutlass.Float32)
        max_odd = cute.make_rmem_tensor(2, cutlass.Float32)
        stage = Int32(0)
        phase = Int32(0)
        if num_blocks > 0:
            cute.arch.mbarrier_wait(q_full, 0)
        for pair in cutlass.range((num_blocks + 1) // 2, unroll=1):
            for parity in cutlass.range_constexpr(2):
                block = pair * 2 + parity
                maxima = max_even if cutlass.const_expr(parity == 0) else max_odd
                maxima.fill(-cutlass.Float32.inf)
                if block < num_blocks:
                    cute.arch.mbarrier_wait(k_full + stage, phase)
                for r in cutlass.range(self.heads, unroll=1):
                    # Past the last block the result is dropped, as above.
                    self.multiply(operands, first_tile + r, stage, S)
                    warpgroup.wait_group(0)
                    if (r == self.heads - 1) & (block < num_blocks):
                        self.release(k_free + stage, lane)
                    scores.block_max(S, maxima, limits, block * self.block_size, block, full_blocks, lane)
                stage = stage + 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
            self.finish_pair(state, pair * 2, max_even, max_odd, lane)

    @cute.jit
    def release(self, free: cute.Pointer, lane: Int32):
        """One arrival for each consumer warp: waiting for a product brings the warp together."""
        if lane == 0:
            cute.arch.mbarrier_arrive(free)
