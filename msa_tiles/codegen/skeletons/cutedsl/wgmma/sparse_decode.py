"""Attention of few queries over their selected blocks, split over the blocks: the decode twin of sparse_attention.

Grid: (split, KV head, query). A CTA takes an equal share of the query's slots and walks those whose block the query
sees with a running softmax; the shares are merged by `combine`. One split writes the answer itself.

The products are turned round: S^T = K Q^T and O^T = V^T P^T, keys and columns of V as the 64 rows of the tensor cores
and the query's heads as 8 or 16 columns, so that no work is spent on rows without a head.

With scored_blocks > 0 the ids are not given but chosen first, by the whole CTA, from the scores of the row, as
msa_tiles.dsl.cutedsl.threshold describes; every split of a row chooses the same, and the first one writes the ids.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import softmax, threshold, tma, turned, wgmma
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gather import Rows
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.scores import choose
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.varlen import key_length, last_visible
from msa_tiles.dsl.cutedsl.warp import WARP, ballot, first_bit, request_of
from msa_tiles.dsl.cutedsl.wgmma import ROWS

ELEMENT = "bfloat16"  # <- precision.element
STAGES = 3  # <- tile.stages
THREADS = 256
GROUP = 128  # threads of the consumer warpgroup
WARPS = GROUP // WARP
WARP_ROWS = 16  # of 64 rows
LIST = 64
# Stands for a maximum over nothing: finite, so that differences with it are no NaN.
LOWEST = -1.0e30


def sparse_decode(head_dim: int, block_size: int, group: int, pages_per_block: int, scored_blocks: int):
    """Build the kernel for one head dim, block size, group, page size, and rows of so many scores (0: ids are given).

    q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or [pages, num_kv_heads, page,
    head_dim] with pages_per_block > 0 and page_table [requests, max_pages], block_indices [num_kv_heads, total_q, topk]
    -> partial_out [splits, total_q, num_q_heads, head_dim] and partial_lse [splits, total_q, num_q_heads] (natural
    logarithm); a share without a visible key gives 0 and -inf. scale_log2 is the softmax scale times log2(e). With
    scored_blocks > 0, score [num_index_heads, total_q, width] is ranked, topk <= LIST, and block_indices is an output.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SparseDecode(head_dim, block_size, group, pages_per_block, scored_blocks)
    return kernel, kernel.arguments()


class Shared(NamedTuple):
    """What the CTA keeps in shared memory; the barriers are pointers to the first of each kind."""

    queries: Any
    keys: Any
    values: Any
    weights: Any
    maxima: Any
    sums: Any
    best: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


class Share(NamedTuple):
    """What a CTA works on: some slots of one row, and what its query sees of its request."""

    head: Any
    token: Any
    first_slot: Any
    last_slot: Any
    wanted: Any  # slots that were filled, where ids are chosen here
    ids: Any  # block_indices[head, token]
    first_ids: Any  # the ids of the first 32 slots, one a lane, where they are given
    request: Any
    length: Any
    limit: Any  # the last visible key


class SparseDecode:
    """Warps
      warps 0 .. 3   consumer warpgroup: S^T = K Q^T, softmax, O^T += V^T P^T, one block after the other
      warp 4         producer: loads Q once, then K and V of one block a stage; its lanes look up ids and pages
      warps 5 .. 7   with scores: they help to choose the ids, and write them; else idle

    Pipelines (name: depth, arrivals)
      q_full: 1, 1 producer lane + TMA bytes
      k_full, v_full: STAGES, 1 producer lane + TMA bytes      k_free, v_free: STAGES, 1 lane of each consumer warp

    Shared memory, tiles swizzled by 128 bytes
      keys and values [STAGES, block_size, head_dim], in panels of 64 columns
      queries [columns, head_dim], laid out as msa_tiles.dsl.cutedsl.gather says; columns is 8 or 16
      weights [columns, block_size]: P, in panels of 64 keys
      maxima, sums: of each consumer warp's rows      counts, candidates, list: for the choice of the ids      barriers

    A warp holds 16 of every 64 rows, that is keys, of S^T: the maxima of a column go through shared memory, the sums
    only at the end. Two barriers a block: maxima written, and P written, which also parts the readers of the maxima
    from the writers of the next ones. Columns past the group hold stale data; no column depends on another, and theirs
    are dropped.
    """

    def __init__(self, head_dim, block_size, group, pages_per_block, scored_blocks):
        self.element = ELEMENTS[ELEMENT]
        self.head_dim = head_dim
        self.block_size = block_size
        self.group = group
        self.scored_blocks = scored_blocks
        self.rows = Rows(self.element, head_dim, group)
        self.blocks = Blocks(self.element, head_dim, block_size, pages_per_block)
        self.columns = self.rows.rows_per_token

    def arguments(self):
        """Stand-ins for cute.compile: 12 tensors, 5 scalars and the stream."""
        total_q, q_heads, kv_heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
        splits = cute.sym_int()
        # Without scores any tensor of their rank stands in, of any strides.
        score_stride = 1 if self.scored_blocks else cute.sym_int64()

        def tensor(element, *shape, align=None, last=1):
            # The strides of what may be large are 64-bit, whatever the lengths.
            strides = (*(cute.sym_int64() for _ in shape[1:]), last)
            return make_fake_tensor(element, shape, strides, assumed_align=align)

        def keys():
            shape = (cute.sym_int(), kv_heads, self.head_dim)
            if self.blocks.pages_per_block:
                shape = (cute.sym_int(), kv_heads, self.blocks.box_rows, self.head_dim)
            return tensor(self.element, *shape, align=tma.BYTES)

        return (
            tensor(self.element, total_q, q_heads, self.head_dim, align=tma.BYTES),
            keys(),
            keys(),
            tensor(Int32, cute.sym_int(), cute.sym_int()),
            tensor(Int32, kv_heads, total_q, cute.sym_int(), last=cute.sym_int64()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Int32, cute.sym_int()),
            tensor(Float32, cute.sym_int(), cute.sym_int(), cute.sym_int(), last=score_stride),
            tensor(self.element, splits, total_q, q_heads, self.head_dim),
            tensor(Float32, splits, total_q, q_heads, last=cute.sym_int64()),
            Float32(0.0),
            *(Int32(0) for _ in range(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, page_table: cute.Tensor, block_indices: cute.Tensor,
        cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor,
        score: cute.Tensor, partial_out: cute.Tensor, partial_lse: cute.Tensor, scale_log2: Float32,
        use_seqused: Int32, use_positions: Int32, init_blocks: Int32, local_blocks: Int32, stream,
    ):  # fmt: skip
        """Launch, as early as the kernel before allows. An absent tensor is any other of its rank and type."""
        q_atom, mQ = self.rows.atom(cpasync.CopyBulkTensorTileG2SOp(), self.rows.described(q))
        k_atom, mK = self.blocks.described(k)
        v_atom, mV = self.blocks.described(v)
        self.kernel(
            q_atom, mQ, k_atom, mK, v_atom, mV, page_table, block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k,
            q_positions, score, partial_out, partial_lse, scale_log2, use_seqused, use_positions, init_blocks,
            local_blocks,
        ).launch(
            grid=(partial_out.shape[0], block_indices.shape[0], block_indices.shape[1]),
            block=(THREADS, 1, 1),
            # One CTA fills the shared memory: it may have all registers.
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor, v_atom: cute.CopyAtom,
        mV: cute.Tensor, page_table: cute.Tensor, block_indices: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, score: cute.Tensor,
        partial_out: cute.Tensor, partial_lse: cute.Tensor, scale_log2: Float32, use_seqused: Int32,
        use_positions: Int32, init_blocks: Int32, local_blocks: Int32,
    ):  # fmt: skip
        split, head, token = cute.arch.block_idx()
        splits, num_kv_heads, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(SmemAllocator(), (q_atom, k_atom, v_atom))
        topk = Int32(block_indices.shape[2])
        # Slots split * topk / splits and on: shares differ by one slot at most.
        first_slot, last_slot = split * topk // splits, (split + 1) * topk // splits
        heads = Int32(score.shape[0]) // num_kv_heads
        if cutlass.const_expr(self.scored_blocks == 0):
            cute.arch.griddepcontrol_wait()
        # With scores, the kernel before is the one that writes them and nothing else, and it began when all before it
        # was there: only the scores are waited for.
        if warp_index == WARPS:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full, self.rows.token_bytes)
            boxes = self.rows.boxes(shared.queries, 1)[None, None, None, None, None, 0, 0]
            self.rows.load(q_atom, mQ, token, head, boxes, shared.q_full)
        # Given ids are on their way while the request is looked up.
        first_ids = Int32(-1)
        if cutlass.const_expr(self.scored_blocks == 0):
            if first_slot + cute.arch.lane_idx() < last_slot:
                first_ids = block_indices[head, token, first_slot + cute.arch.lane_idx()]
        request, length, limit = self.see(
            cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions, token
        )
        wanted = topk
        if cutlass.const_expr(self.scored_blocks > 0):
            cute.arch.griddepcontrol_wait()
        # The kernel behind may come up, and wait in turn.
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.scored_blocks > 0):
            row = threshold.Row(score, head * heads, heads, token)
            valid = cutlass.min((limit + self.block_size) // self.block_size, Int32(score.shape[2]))
            wanted = cutlass.min(topk, valid)
            read = cute.make_rmem_tensor(self.scored_blocks // THREADS, Float32)
            read.fill(Float32.nan)
            threshold.read_scores(row, valid, read, THREADS)
            keys = threshold.keys_of(read, valid, init_blocks, local_blocks, THREADS)
            threshold.list_best(keys, wanted, valid, shared.best, THREADS)
        share = Share(
            head, token, first_slot, last_slot, wanted, block_indices[head, token, None], first_ids, request, length,
            limit,
        )  # fmt: skip
        if warp_index < WARPS:
            out = partial_out[split, token, None, None]
            lse = partial_lse[split, token, None]
            self.consume(shared, share, scale_log2, warp_index, out, lse)
        elif warp_index == WARPS:
            self.produce(k_atom, mK, v_atom, mV, page_table, cu_seqlens_k, shared, share)
        elif cutlass.const_expr(self.scored_blocks > 0):
            if split == 0:
                threshold.write_row(shared.best, thread - (GROUP + WARP), wanted, share.ids)

    @cute.jit
    def allocate(self, memory: SmemAllocator, atoms: tuple):
        """Shared memory, with barriers ready for use on return."""
        rows, columns = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        q_layout = cute.tile_to_shape(atom, (self.columns, self.head_dim, 1), order=(1, 0, 2))
        k_layout = hopper.make_smem_layout_a(rows, (self.block_size, ROWS, self.head_dim), self.element, STAGES)
        v_layout = hopper.make_smem_layout_a(columns, (self.head_dim, ROWS, self.block_size), self.element, STAGES)
        p_layout = cute.tile_to_shape(atom, (self.columns, self.block_size, 1), order=(0, 1, 2))
        keys = memory.allocate_tensor(self.element, k_layout.outer, 1024, k_layout.inner)
        values = memory.allocate_tensor(self.element, v_layout.outer, 1024, v_layout.inner)
        queries = memory.allocate_tensor(self.element, q_layout.outer, 1024, q_layout.inner)
        weights = memory.allocate_tensor(self.element, p_layout.outer, 1024, p_layout.inner)
        maxima = memory.allocate_tensor(Float32, cute.make_layout((WARPS, self.columns)), 16)
        sums = memory.allocate_tensor(Float32, cute.make_layout((WARPS, self.columns)), 16)
        best = None
        if cutlass.const_expr(self.scored_blocks > 0):
            counts = memory.allocate_tensor(Int32, cute.make_layout((THREADS // WARP, 2, 2)), 16)
            candidates = memory.allocate_tensor(Int32, cute.make_layout((THREADS, 2)), 16)
            best = threshold.Best(counts, candidates, memory.allocate_tensor(Int32, cute.make_layout(LIST), 16))
        arrivals = [1, *[1] * (2 * STAGES), *[WARPS] * (2 * STAGES)]
        barriers = memory.allocate_array(Int64, len(arrivals))
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(len(arrivals)):
                cute.arch.mbarrier_init(barriers + i, arrivals[i])
            cute.arch.mbarrier_init_fence()
            for i in cutlass.range_constexpr(len(atoms)):
                cpasync.prefetch_descriptor(atoms[i])
        cute.arch.sync_threads()
        later = (barriers + 1 + i * STAGES for i in range(4))
        return Shared(queries, keys, values, weights, maxima, sums, best, barriers, *later)

    @cute.jit
    def see(
        self, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, token: Int32,
    ):  # fmt: skip
        """Request, its keys and the last visible one of a token; -1 for none. All lanes of a warp must call it.

        Tokens past the last request belong to nobody and see nothing.
        """
        length = Int32(0)
        limit = Int32(-1)
        request = request_of(cu_seqlens_q, token)
        if token < cu_seqlens_q[cute.size(cu_seqlens_q) - 1]:
            length = key_length(cu_seqlens_k, seqused_k, use_seqused, request)
            end_token = cu_seqlens_q[request + 1]
            limit = last_visible(q_positions, use_positions, token, end_token, length, length)
        return request, length, cutlass.max(limit, -1)

    @cute.jit
    def blocks_of_lanes(self, shared: Shared, share: Share, first: Int32):
        """The block of slot `first` + lane, 0 if unseen, and which of the 32 slots the query sees, one bit each."""
        slot = first + cute.arch.lane_idx()
        block = share.first_ids
        if cutlass.const_expr(self.scored_blocks > 0):
            if slot < cutlass.min(share.last_slot, share.wanted):
                block = shared.best.ids[slot]
        elif first > share.first_slot:
            block = Int32(-1)
            if slot < share.last_slot:
                block = share.ids[slot]
        seen = (block >= 0) & (block < (share.limit + self.block_size) // self.block_size)
        return pick(seen, block, 0), ballot(seen)

    @cute.jit
    def pages_of_lane(self, page_table: cute.Tensor, share: Share, block: Int32, seen: Int32):
        """The pages of the lane's block; nothing for flat keys, and nothing is read where no lane has a block."""
        found = []
        for p in cutlass.range_constexpr(self.blocks.pages_per_block):
            page = Int32(0)
            if seen != 0:
                entry = block * self.blocks.pages_per_block + p
                page = page_table[share.request, cutlass.min(entry, Int32(page_table.shape[1]) - 1)]
            found.append(page)
        return found

    @cute.jit
    def produce(
        self, k_atom: cute.CopyAtom, mK: cute.Tensor, v_atom: cute.CopyAtom, mV: cute.Tensor,
        page_table: cute.Tensor, cu_seqlens_k: cute.Tensor, shared: Shared, share: Share,
    ):  # fmt: skip
        """The producer warp: keys and values of one block a stage."""
        shape = (self.blocks.box_rows, self.block_size, self.head_dim, STAGES)
        k_boxes, v_boxes = (tma.boxes(x, *shape) for x in (shared.keys, shared.values))
        stage = Int32(0)
        phase = Int32(1)
        for first in cutlass.range(share.first_slot, share.last_slot, WARP, unroll=1):
            block, left = self.blocks_of_lanes(shared, share, first)
            pages = self.pages_of_lane(page_table, share, block, left)
            while left != 0:
                lane = first_bit(left)
                left = left & (left - 1)
                row = Int32(0)
                if cutlass.const_expr(self.blocks.pages_per_block == 0):
                    row = cu_seqlens_k[share.request] + cute.arch.shuffle_sync(block, lane) * self.block_size
                of_block = [cute.arch.shuffle_sync(page, lane) for page in pages]
                cute.arch.mbarrier_wait(shared.k_free + stage, phase)
                boxes = k_boxes[None, None, None, None, stage]
                self.blocks.load(k_atom, mK, row, of_block, share.head, boxes, shared.k_full + stage)
                cute.arch.mbarrier_wait(shared.v_free + stage, phase)
                boxes = v_boxes[None, None, None, None, stage]
                self.blocks.load(v_atom, mV, row, of_block, share.head, boxes, shared.v_full + stage)
                stage = stage + 1
                if stage == STAGES:
                    stage = Int32(0)
                    phase = phase ^ 1

    @cute.jit
    def consume(
        self, shared: Shared, share: Share, scale_log2: Float32, member: Int32, out: cute.Tensor, lse: cute.Tensor
    ):
        """A consumer warp, of rows 16 member to 16 member + 15 of every 64."""
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        score = turned.product(self.element, self.columns, OperandMajorMode.K)
        weigh = turned.product(self.element, self.columns, OperandMajorMode.MN)
        keys = wgmma.operand_a(score, shared.keys)
        queries = wgmma.operand_b(score, shared.queries)[None, None, None, 0]
        values = wgmma.operand_a(weigh, shared.values)
        weights = wgmma.operand_b(weigh, shared.weights)[None, None, None, 0]
        S = turned.accumulator(score, self.block_size, self.columns)
        part = turned.accumulator(weigh, self.head_dim, self.columns)
        # What the products write only they may write: the running sum, which is rescaled, stands beside.
        O = cute.make_rmem_tensor(part.layout, Float32)
        O.fill(0.0)
        of_lane = cute.make_layout((2, self.columns // 8))  # its columns 2 (lane % 4), the next one, and 8 further on
        row_max = cute.make_rmem_tensor(of_lane, Float32)
        row_sum = cute.make_rmem_tensor(of_lane, Float32)
        scale = cute.make_rmem_tensor(of_lane, Float32)
        row_max.fill(LOWEST)
        row_sum.fill(0.0)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, self.columns // 4), self.element)
        staging = cute.make_tiled_copy_C(stmatrix, score[0]).get_slice(thread)
        by_key = cute.make_tensor(shared.weights.iterator, cute.select(shared.weights.layout, mode=[1, 0]))
        staged = staging.partition_D(by_key)
        first_row = member * WARP_ROWS + lane // 4
        stage = Int32(0)
        phase = Int32(0)
        cute.arch.mbarrier_wait(shared.q_full, 0)
        for first in cutlass.range(share.first_slot, share.last_slot, WARP, unroll=1):
            blocks, left = self.blocks_of_lanes(shared, share, first)
            while left != 0:
                first_key = cute.arch.shuffle_sync(blocks, first_bit(left)) * self.block_size
                left = left & (left - 1)
                cute.arch.mbarrier_wait(shared.k_full + stage, phase)
                wgmma.multiply(score, S, keys[None, None, None, stage], queries)
                warpgroup.wait_group(0)
                self.release(shared.k_free + stage)
                exact = cute.make_rmem_tensor(S.layout, Float32)
                room = share.limit - first_key - first_row
                self.softmax(S, exact, row_max, row_sum, scale, room, shared.maxima, member, scale_log2)
                rounded = cute.make_rmem_tensor(S.layout, self.element)
                rounded.store(exact.load().to(self.element))
                cute.copy(stmatrix, staging.retile(rounded), staged)
                cute.arch.mbarrier_wait(shared.v_full + stage, phase)
                if first_key + self.block_size > share.length:
                    of_stage = shared.values[None, None, stage]
                    self.blocks.clear_rows(of_stage, share.length - first_key, thread, GROUP)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)
                wgmma.multiply(weigh, part, values[None, None, None, stage], weights)
                warpgroup.wait_group(0)
                self.release(shared.v_free + stage)
                for m in cutlass.range_constexpr(self.head_dim // ROWS):
                    for j in cutlass.range_constexpr(self.columns // 8):
                        for half in cutlass.range_constexpr(2):
                            for c in cutlass.range_constexpr(2):
                                place = self.place(c, half, j, m)
                                O[place] = O[place] * scale[c, j] + part[place]
                stage = stage + 1
                if stage == STAGES:
                    stage = Int32(0)
                    phase = phase ^ 1
        self.emit(shared, share, O, row_max, row_sum, scale_log2, member, out, lse)

    def place(self, c, half, j, m):
        """Where an accumulator has column 2 (lane % 4) + c + 8 j of the row 64 m + 16 warp + lane // 4 + 8 half."""
        return c + 2 * half + 4 * j + self.columns // 2 * m

    @cute.jit
    def release(self, free: cute.Pointer):
        """One arrival for each consumer warp: waiting for a product brings the warp together."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(free)

    @cute.jit
    def softmax(
        self, S: cute.Tensor, exact: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale: cute.Tensor,
        room: Int32, maxima: cute.Tensor, member: Int32, scale_log2: Float32,
    ):  # fmt: skip
        """exact = exp2((S - row_max) * scale_log2), with maxima over all blocks up to this one.

        The lane's first row sees the block's keys up to `room` rows further down. row_sum takes up the exponentials
        of the lane's own rows; `scale` is what earlier sums and products are worth now.
        """
        lane = cute.arch.lane_idx()
        tiles = self.block_size // ROWS
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                largest = -Float32.inf
                for m in cutlass.range_constexpr(tiles):
                    for half in cutlass.range_constexpr(2):
                        seen = room >= m * ROWS + half * 8
                        largest = cute.arch.fmax(largest, choose(seen, S[self.place(c, half, j, m)], -Float32.inf))
                for level in cutlass.range_constexpr(2, 5):
                    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << level))
                if lane < 4:
                    maxima[member, 8 * j + 2 * lane + c] = largest
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                of_warps = maxima[None, 8 * j + 2 * (lane % 4) + c].load()
                largest = row_max[c, j]
                for w in cutlass.range_constexpr(WARPS):
                    largest = cute.arch.fmax(largest, of_warps[w])
                scale[c, j] = cute.math.exp2((row_max[c, j] - largest) * scale_log2, fastmath=True)
                row_max[c, j] = largest
                shift = largest * scale_log2
                total = row_sum[c, j] * scale[c, j]
                for m in cutlass.range_constexpr(tiles):
                    for half in cutlass.range_constexpr(2):
                        weight = cute.math.exp2(S[self.place(c, half, j, m)] * scale_log2 - shift, fastmath=True)
                        weight = choose(room >= m * ROWS + half * 8, weight, Float32(0.0))
                        exact[self.place(c, half, j, m)] = weight
                        total = total + weight
                row_sum[c, j] = total

    @cute.jit
    def emit(
        self, shared: Shared, share: Share, O: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor,
        scale_log2: Float32, member: Int32, out: cute.Tensor, lse: cute.Tensor,
    ):  # fmt: skip
        """Add up the sums of all rows, normalise, and write out [heads, head_dim] and lse [heads] of the split."""
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                total = row_sum[c, j]
                for level in cutlass.range_constexpr(2, 5):
                    total = total + cute.arch.shuffle_sync_bfly(total, 1 << level)
                if lane < 4:
                    shared.sums[member, 8 * j + 2 * lane + c] = total
        cute.arch.barrier(barrier_id=1, number_of_threads=GROUP)
        for j in cutlass.range_constexpr(self.columns // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + 2 * (lane % 4) + c
                of_warps = shared.sums[None, column].load()
                total = Float32(0.0)
                for w in cutlass.range_constexpr(WARPS):
                    total = total + of_warps[w]
                inverse = Float32(0.0)
                log = -Float32.inf
                if total > 0.0:
                    inverse = cute.arch.rcp_approx(total)
                    log = softmax.log_sum(row_max[c, j], total, scale_log2)
                if column < self.group:
                    row = out[share.head * self.group + column, None]
                    for m in cutlass.range_constexpr(self.head_dim // ROWS):
                        for half in cutlass.range_constexpr(2):
                            place = m * ROWS + member * WARP_ROWS + lane // 4 + half * 8
                            row[place] = (O[self.place(c, half, j, m)] * inverse).to(self.element)
                    if (member == 0) & (lane < 4):
                        lse[share.head * self.group + column] = log
