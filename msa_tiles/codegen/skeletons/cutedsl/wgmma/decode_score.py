"""Indexer scores with block max-pool for few queries per request: the keys are split over all CTAs.

Grid: num_ctas CTAs. The unit of work is one KV block for one query tile; the units of all requests stand in one list,
request after request, tile after tile, block after block, and every CTA takes a run of it, equal to within one unit,
whatever the lengths are. A tile is ROWS // num_index_heads consecutive queries of a request with all their index heads.

The keys are read once from memory (once for each tile of a request from L2), and that is the floor: the tensor cores
work on 64 rows however few of them hold a query.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import scores, softmax, tma, wgmma
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.varlen import key_length, last_visible
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, wide
from msa_tiles.dsl.cutedsl.warp import WARP, ballot, count_bits, inclusive_sum
from msa_tiles.dsl.cutedsl.wgmma import ROWS

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 3  # <- tile.stages
THREADS = 256
GROUP = 128  # threads of the consumer warpgroup
WARPS = GROUP // WARP
WARP_ROWS = 16  # of a tile


def decode_score(head_dim: int, block_size: int, pages_per_block: int):
    """Build the kernel for one index dim, block size and page size.

    idx_q [total_q, num_index_heads, head_dim] with at most ROWS heads, idx_k [total_k, head_dim], or
    [pages, page, head_dim] with pages_per_block > 0 and page_table [requests, max_pages] -> out [num_index_heads,
    total_q, max_blocks] float32 with any strides on heads and tokens. Written are the blocks that hold keys of the
    query's request: the largest product of the block's visible keys, -inf for a block without one. The columns behind
    them, and the rows of no request, are left as they are.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = DecodeScore(head_dim, block_size, pages_per_block)
    return kernel, kernel.arguments()


class Lengths(NamedTuple):
    """What says how many units a request has."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    use_seqused: Any
    tile_queries: Any
    max_blocks: Any


class DecodeScore:
    """Warps
      warps 0 .. 3   consumer warpgroup: loads the rows of a tile, S = Q K^T one block at a time, row maxima, stores
      warp 4         producer: streams the index keys, one block a stage; its lanes look up the pages of 32 blocks
      warps 5 .. 7   none: wgmma goes with whole warpgroups

    Pipeline (name: depth, arrivals)
      k_full: STAGES, 1 producer lane + TMA bytes      k_free: STAGES, 1 lane of each consumer warp

    Shared memory, tiles swizzled by 128 bytes, in panels of 64 columns
      queries [64, head_dim]      keys [STAGES, block_size, head_dim]      barriers

    Two CTAs share a multiprocessor. With three stages each instead of two DRAM delivers 2% less. Each of these warps
    finds the CTA's run by itself, 32 requests at a time.
    """

    def __init__(self, head_dim, block_size, pages_per_block):
        self.element = ELEMENTS[ELEMENT]
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.box_rows = block_size // max(pages_per_block, 1)
        self.block_bytes = block_size * head_dim * self.element.width // 8

    def arguments(self):
        """Stand-ins for cute.compile: 8 tensors, 4 scalars and the stream."""
        total_q, heads = cute.sym_int(), cute.sym_int()

        def tensor(element, *shape, align=None):
            # The strides of what may be large are 64-bit, whatever the lengths.
            strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
            return make_fake_tensor(element, shape, strides, assumed_align=align)

        keys = (cute.sym_int(), self.head_dim)
        if self.pages_per_block:
            keys = (cute.sym_int(), self.box_rows, self.head_dim)
        return (
            tensor(self.element, total_q, heads, self.head_dim, align=tma.BYTES),
            tensor(self.element, *keys, align=tma.BYTES),
            tensor(Int32, cute.sym_int(), cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Float32, heads, total_q, cute.sym_int()),
            *(Int32(0) for _ in range(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, idx_q: cute.Tensor, idx_k: cute.Tensor, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, causal: Int32, num_ctas: Int32, stream,
    ):  # fmt: skip
        """Launch, as early as the kernel before allows. An absent tensor is any other of its rank and type."""
        modes = (1, 2, 0) if self.pages_per_block else (0, 1)
        k_atom, mK = tma.box_atom(tma.described(idx_k, modes), self.box_rows)
        self.kernel(
            k_atom, mK, idx_q, page_table, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, out, use_seqused,
            use_positions, causal,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=2,
            # Stated, because the compiler would ask the GPU of this machine otherwise.
            preferred_smem_carveout=100,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, idx_q: cute.Tensor, page_table: cute.Tensor,
        cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor,
        out: cute.Tensor, use_seqused: Int32, use_positions: Int32, causal: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = SmemAllocator()
        tiler = (ROWS, self.block_size, self.head_dim)
        q_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, self.element, 1)
        k_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, self.element, STAGES)
        queries = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        keys = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        k_full = memory.allocate_array(Int64, 2 * STAGES)
        k_free = k_full + STAGES
        if thread == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(k_full + stage, 1)
                cute.arch.mbarrier_init(k_free + stage, WARPS)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(k_atom)
        cute.arch.sync_threads()
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        lengths = Lengths(
            cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, ROWS // Int32(idx_q.shape[1]), Int32(out.shape[2])
        )
        if warp == WARPS:
            self.produce(k_atom, mK, page_table, keys, k_full, k_free, lengths, self.find_run(lengths))
        elif warp < WARPS:
            run = self.find_run(lengths)
            self.consume(idx_q, q_positions, queries, keys, k_full, k_free, lengths, run, use_positions, causal, out)

    @cute.jit
    def measure(self, lengths: Lengths, request: Int32):
        """Keys, query tiles and blocks of a request."""
        length = key_length(lengths.cu_seqlens_k, lengths.seqused_k, lengths.use_seqused, request)
        tokens = lengths.cu_seqlens_q[request + 1] - lengths.cu_seqlens_q[request]
        tiles = (tokens + lengths.tile_queries - 1) // lengths.tile_queries
        blocks = (cutlass.max(length, 0) + self.block_size - 1) // self.block_size
        return length, tiles, cutlass.min(blocks, lengths.max_blocks)

    @cute.jit
    def measure_any(self, lengths: Lengths, request: Int32):
        """The same; nothing for a request behind the last one."""
        length, tiles, blocks = Int32(0), Int32(0), Int32(0)
        if request < Int32(cute.size(lengths.cu_seqlens_q)) - 1:
            length, tiles, blocks = self.measure(lengths, request)
        return length, tiles, blocks

    @cute.jit
    def find_run(self, lengths: Lengths):
        """This CTA's run, `left` units long: (left, request, tile, first block) and what `measure` says of the request.

        All lanes of a warp must call it.
        """
        lane = cute.arch.lane_idx()
        cta = cute.arch.block_idx()[0]
        num_ctas = cute.arch.grid_dim()[0]
        # Lane i measures request i, and keeps what it found: mostly there are no more than 32.
        length, tiles, blocks = self.measure_any(lengths, lane)
        total = Int32(cute.arch.warp_redux_sync(tiles * blocks, "add"))
        for first in cutlass.range(WARP, Int32(cute.size(lengths.cu_seqlens_q)) - 1, WARP, unroll=1):
            _, more_tiles, more_blocks = self.measure_any(lengths, first + lane)
            total = total + Int32(cute.arch.warp_redux_sync(more_tiles * more_blocks, "add"))
        share = total // num_ctas
        longer = total - share * num_ctas
        left = share + pick(cta < longer, 1, 0)
        skip = cta * share + cutlass.min(cta, longer)
        request = Int32(0)
        searching = left
        while searching > 0:
            own = tiles * blocks
            until = inclusive_sum(own, lane)
            passed = cute.arch.shuffle_sync(until, WARP - 1)
            if skip < passed:
                place = count_bits(ballot(until <= skip))
                passed = cute.arch.shuffle_sync(until - own, place)
                request = request + place
                length, tiles, blocks = (cute.arch.shuffle_sync(x, place) for x in (length, tiles, blocks))
                searching = Int32(0)
            else:
                request = request + WARP
                length, tiles, blocks = self.measure_any(lengths, request + lane)
            skip = skip - passed
        tile = skip // cutlass.max(blocks, 1)
        return left, request, tile, skip - tile * blocks, length, tiles, blocks

    @cute.jit
    def advance(
        self, lengths: Lengths, left: Int32, request: Int32, tile: Int32, length: Int32, tiles: Int32, blocks: Int32
    ):
        """The next tile; where a request has no more, the first one of the next request that has units."""
        tile = tile + 1
        if (left > 0) & (tile == tiles):
            tile = Int32(0)
            tiles = Int32(0)
            while tiles * blocks == 0:
                request = request + 1
                length, tiles, blocks = self.measure(lengths, request)
        return request, tile, length, tiles, blocks

    @cute.jit
    def produce(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, page_table: cute.Tensor, keys: cute.Tensor,
        k_full: cute.Pointer, k_free: cute.Pointer, lengths: Lengths, run,
    ):  # fmt: skip
        """The producer warp: one block of keys a stage."""
        lane = cute.arch.lane_idx()
        boxes = tma.boxes(keys, self.box_rows, self.block_size, self.head_dim, STAGES)
        left, request, tile, first_block, length, tiles, blocks = run
        stage = Int32(0)
        phase = Int32(1)
        while left > 0:
            taken = cutlass.min(left, blocks - first_block)
            for first in cutlass.range(first_block, first_block + taken, WARP, unroll=1):
                count = cutlass.min(first_block + taken - first, WARP)
                pages = self.pages_of_lane(page_table, request, first + cutlass.min(lane, count - 1))
                for i in cutlass.range(count, unroll=1):
                    cute.arch.mbarrier_wait(k_free + stage, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, self.block_bytes)
                    if cutlass.const_expr(self.pages_per_block > 0):
                        for p in cutlass.range_constexpr(self.pages_per_block):
                            source = mK[None, None, cute.arch.shuffle_sync(pages[p], i)]
                            self.load(k_atom, source, Int32(0), boxes[None, None, p, None, stage], k_full + stage)
                    else:
                        row = lengths.cu_seqlens_k[request] + (first + i) * self.block_size
                        self.load(k_atom, mK, row, boxes[None, None, 0, None, stage], k_full + stage)
                    stage = stage + 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase = phase ^ 1
            left = left - taken
            first_block = Int32(0)
            request, tile, length, tiles, blocks = self.advance(lengths, left, request, tile, length, tiles, blocks)

    def pages_of_lane(self, page_table, request, block):
        """The pages of a block; nothing for flat keys. What entries past the request's keys name does not matter."""
        entries = (block * self.pages_per_block + p for p in range(self.pages_per_block))
        return [page_table[request, cutlass.min(entry, Int32(page_table.shape[1]) - 1)] for entry in entries]

    @cute.jit
    def load(self, k_atom: cute.CopyAtom, source: cute.Tensor, row: Int32, boxes: cute.Tensor, full: cute.Pointer):
        """All panels of one box of rows. TMA answers a page outside the pool, and rows past the keys, with zeros."""
        for panel in cutlass.range_constexpr(self.head_dim // tma.PANEL):
            tma.load_box(k_atom, source, row, panel, boxes[None, None, panel], full)

    @cute.jit
    def consume(
        self, idx_q: cute.Tensor, q_positions: cute.Tensor, queries: cute.Tensor, keys: cute.Tensor,
        k_full: cute.Pointer, k_free: cute.Pointer, lengths: Lengths, run, use_positions: Int32, causal: Int32,
        out: cute.Tensor,
    ):  # fmt: skip
        """A consumer warp, of rows 16 warp to 16 warp + 15 of a tile."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        first_row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * WARP_ROWS
        heads = Int32(idx_q.shape[1])
        score = wgmma.product(self.element, self.block_size, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        left_operand = wgmma.operand_a(score, queries)[None, None, None, 0]
        right_operand = wgmma.operand_b(score, keys)
        S = wgmma.accumulator(score, self.block_size)
        limits = cute.make_rmem_tensor(2, Int32)
        maxima = cute.make_rmem_tensor(2, Float32)
        # Of the four lanes that share two rows, the first two write one each.
        half = lane % 4
        my_row = first_row + lane // 4 + half % 2 * 8
        left, request, tile, first_block, length, tiles, blocks = run
        stage = Int32(0)
        phase = Int32(0)
        self.clear_queries(queries, thread)
        while left > 0:
            taken = cutlass.min(left, blocks - first_block)
            end_token = lengths.cu_seqlens_q[request + 1]
            first_token = lengths.cu_seqlens_q[request] + tile * lengths.tile_queries
            rows = cutlass.min(end_token - first_token, lengths.tile_queries) * heads
            self.load_queries(idx_q, queries, first_token, rows, thread)
            for h in cutlass.range_constexpr(2):
                token = cutlass.min(first_token + (first_row + lane // 4 + h * 8) // heads, end_token - 1)
                limits[h] = length - 1
                if causal != 0:
                    limits[h] = last_visible(q_positions, use_positions, token, end_token, length, length)
            least = Int32(cute.arch.warp_redux_sync(cutlass.min(limits[0], limits[1]), "min"))
            full_blocks = cutlass.max(least + 1, 0) // self.block_size
            my_scores = out[my_row % heads, cutlass.min(first_token + my_row // heads, end_token - 1), None]
            for block in cutlass.range(first_block, first_block + taken, unroll=1):
                cute.arch.mbarrier_wait(k_full + stage, phase)
                wgmma.multiply(score, S, left_operand, right_operand[None, None, None, stage])
                warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(k_free + stage)
                stage = stage + 1
                if stage == STAGES:
                    stage = Int32(0)
                    phase = phase ^ 1
                if first_row < rows:
                    maxima.fill(-Float32.inf)
                    scores.block_max(S, maxima, limits, block * self.block_size, block, full_blocks, lane)
                    upper, lower = softmax.quad_max(maxima[0]), softmax.quad_max(maxima[1])
                    if (half < 2) & (my_row < rows):
                        my_scores[block] = scores.choose(half == 1, lower, upper)
            left = left - taken
            first_block = Int32(0)
            request, tile, length, tiles, blocks = self.advance(lengths, left, request, tile, length, tiles, blocks)

    @cute.jit
    def clear_queries(self, queries: cute.Tensor, thread: Int32):
        """Zeros for rows that never hold a query: products with them cost the least power, and so the memory's clock
        stays up. `load_queries` puts a barrier between these and its rows.
        """
        zeros = cute.make_rmem_tensor(VECTOR, self.element)
        zeros.fill(0.0)
        chunks = self.head_dim // VECTOR
        for i in cutlass.range_constexpr(ROWS * chunks // GROUP):
            place = i * GROUP + thread
            copy_wide(zeros, self.wide_of_tile(queries, place // chunks, place % chunks))

    @cute.jit
    def load_queries(self, idx_q: cute.Tensor, queries: cute.Tensor, first_token: Int32, rows: Int32, thread: Int32):
        """The rows of a tile, by all consumer warps, for wgmma to read. The others keep what they hold: no row's
        products depend on another row, and theirs are dropped.
        """
        heads = Int32(idx_q.shape[1])
        chunks = self.head_dim // VECTOR
        passes = ROWS * chunks // GROUP
        got = cute.make_rmem_tensor((VECTOR, passes), self.element)
        # All loads before the first store: they are in flight together.
        for i in cutlass.range_constexpr(passes):
            row = (i * GROUP + thread) // chunks
            if row < rows:
                source = idx_q[first_token + row // heads, row % heads, None]
                copy_wide(wide(source, thread % chunks), got[None, i])
        # The rows of the tile before are read until every warp has waited for its last product.
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)
        for i in cutlass.range_constexpr(passes):
            row = (i * GROUP + thread) // chunks
            if row < rows:
                copy_wide(got[None, i], self.wide_of_tile(queries, row, thread % chunks))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)

    @cute.jit
    def wide_of_tile(self, queries: cute.Tensor, row: Int32, place: Int32) -> cute.Tensor:
        """Elements 8 place to 8 place + 7 of a row of a tile: like `wide`, for panels swizzled by 128 bytes."""
        in_panel = tma.PANEL // VECTOR
        offset = (place // in_panel * ROWS + row) * tma.PANEL + ((place ^ row) % in_panel) * VECTOR
        start = queries.iterator.toint() + offset * self.element.width // 8
        aligned = cute.make_ptr(self.element, start, queries.iterator.memspace, assumed_align=BYTES)
        return cute.make_tensor(aligned, cute.make_layout(VECTOR))
