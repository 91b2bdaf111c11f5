"""Indexer scores and top-k in one kernel: the score matrix never exists.

Grid: a CTA for every KV head of every tile slot on the first axis, the tiles with the longest prefix first. A tile
is 128 consecutive queries of one request; slots follow msa_tiles.dsl.cutedsl.varlen, and the slots past the last
request pad the rows that belong to nobody. The producer, the multiplying warp and the reading of tensor memory stand in
msa_tiles.dsl.cutedsl.tensor_memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import topk as top
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.grid import head_and_place
from msa_tiles.dsl.cutedsl.tensor_memory import CHAINS, MULTIPLIER, PRODUCER, TensorIndexer, fence_after_sync
from msa_tiles.dsl.cutedsl.varlen import last_visible

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 3  # <- tile.stages
ACCUMULATORS = 2  # <- tile.accumulators


def select_blocks(head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SelectBlocks(head_dim, block_size, topk, heads_per_group, pages_per_block)
    return kernel, kernel.arguments(Int32, scalars=5)


class SelectBlocks(TensorIndexer):
    """Warps
      0 .. 3   epilogue: thread i reads row i of every product, keeps its maximum and the row's top-k list
      4        producer: loads Q once, then streams the index keys, one block a stage
      5        multiplies: S = Q K^T for every block and head in turn; owns the tensor memory
      6, 7     idle: tensor memory is given to whole warpgroups

    Pipelines (name: depth, arrivals)
      q_full: 1, 1 producer thread + TMA bytes
      k_full: STAGES, 1 producer thread + TMA bytes      k_free: STAGES, 1 commit of the products that read it
      s_full: ACCUMULATORS, 1 commit of the product      s_free: ACCUMULATORS, one of each epilogue warp

    Shared memory, tiles swizzled by 128 bytes, in panels of 64 columns
      queries [heads_per_group, 128, head_dim]      keys [STAGES, block_size, head_dim]      barriers      an address
    Tensor memory
      S [ACCUMULATORS, 128 lanes, block_size columns] float32

    A product is reduced while the next one is multiplied. A row and its list belong to one thread, so that nothing is
    shuffled and no lists are merged. With several index heads per KV head the maximum also runs over the heads.
    """

    def __init__(self, head_dim, block_size, topk, heads_per_group, pages_per_block):
        super().__init__(
            ELEMENTS[ELEMENT], head_dim, block_size, heads_per_group, pages_per_block, STAGES, ACCUMULATORS
        )
        self.topk = topk

    @cute.jit
    def __call__(
        self, idx_q: cute.Tensor, idx_k: cute.Tensor, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, init_blocks: Int32, local_blocks: Int32, order: Int32, stream,
    ):  # fmt: skip
        """Launch. An absent tensor is any other of its rank and type; order counts as in topk.emit."""
        q_atom, mQ, k_atom, mK = self.describe(idx_q, idx_k)
        self.kernel(
            q_atom, mQ, k_atom, mK, page_table, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, out, use_seqused,
            use_positions, init_blocks, local_blocks, order,
        ).launch(**self.launch(out.shape[0], idx_q, cu_seqlens_q), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, q_atom: cute.CopyAtom, mQ: cute.Tensor, k_atom: cute.CopyAtom, mK: cute.Tensor, page_table: cute.Tensor,
        cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor,
        out: cute.Tensor, use_seqused: Int32, use_positions: Int32, init_blocks: Int32, local_blocks: Int32,
        order: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        head, slot_reversed, slots = head_and_place(out.shape[0])
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        sQ, sK, scores, q_full, k_full, k_free, s_full, s_free = self.prepare(SmemAllocator(), q_atom, k_atom)
        request, first_token, end_token, length, first_limit, num_blocks = self.find_tile(
            slots - 1 - slot_reversed, Int32(out.shape[1]), cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions,
            use_seqused, use_positions, Int32(1),
        )  # fmt: skip
        if first_token < end_token:
            if warp == PRODUCER:
                self.produce(
                    q_atom, mQ, k_atom, mK, sQ, sK, q_full, k_full, k_free, page_table, cu_seqlens_k, head, request,
                    first_token, num_blocks,
                )  # fmt: skip
            elif warp == MULTIPLIER:
                self.multiply_all(sQ, sK, scores, q_full, k_full, k_free, s_full, s_free, num_blocks)
            elif warp < PRODUCER:
                self.consume(
                    scores, s_full, s_free, thread, head, first_token, end_token, first_limit, length, num_blocks,
                    q_positions, use_positions, init_blocks, local_blocks, order, out,
                )  # fmt: skip
        self.finish(scores)

    @cute.jit
    def consume(
        self, scores: cute.Tensor, s_full: cute.Pointer, s_free: cute.Pointer, thread: Int32, head: Int32,
        first_token: Int32, end_token: Int32, first_limit: Int32, length: Int32, num_blocks: Int32,
        q_positions: cute.Tensor, use_positions: Int32, init_blocks: Int32, local_blocks: Int32, order: Int32,
        out: cute.Tensor,
    ):  # fmt: skip
        """The epilogue; the row of a thread is its token."""
        lane = cute.arch.lane_idx()
        token = first_token + thread
        inside = cutlass.min(token, end_token - 1)
        limit = last_visible(q_positions, use_positions, inside, first_token, first_limit, length)
        valid = cutlass.max(limit + self.block_size, 0) // self.block_size
        full_blocks = self.full_blocks(q_positions, use_positions, first_token, end_token, first_limit, length)
        keys = cute.make_rmem_tensor(self.topk, Int32)
        ids = cute.make_rmem_tensor(self.topk, Int32)
        chains = cute.make_rmem_tensor(CHAINS, Float32)
        top.clear(keys, ids)
        reader = self.reader(scores, thread)
        place = Int32(0)
        phase = Int32(0)
        for block in cutlass.range(num_blocks, unroll=1):
            chains.fill(-Float32.inf)
            room = limit - block * self.block_size
            for _ in cutlass.range(self.heads, unroll=1):
                cute.arch.mbarrier_wait(s_full + place, phase)
                # The lanes may have parted when they updated their lists; tensor memory is read by whole warps.
                cute.arch.sync_warp()
                fence_after_sync()
                self.fold_product(reader, place, s_free, chains, room, block < full_blocks, lane)
                place, phase = self.advance(place, phase, self.accumulators)
            maximum = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
            key = top.forced_key(top.order_key(maximum), block, valid, init_blocks, local_blocks)
            # An invisible block ranks with the empty entries and never gets in.
            top.insert(keys, ids, top.pick(block < valid, key, top.EMPTY), block)
        if token < end_token:
            top.emit(keys, ids, valid, Int32(out.shape[2]), order, out[head, token, None])
