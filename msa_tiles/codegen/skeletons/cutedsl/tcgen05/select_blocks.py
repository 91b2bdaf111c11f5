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
from msa_tiles.dsl.cutedsl.grid import head_and_place
from msa_tiles.dsl.cutedsl.indexer import queries_of
from msa_tiles.dsl.cutedsl.operands import index_plain as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.pipeline import following
from msa_tiles.dsl.cutedsl.tensor_memory import CHAINS, TensorIndexer, fence_after_sync
from msa_tiles.dsl.cutedsl.varlen import last_visible
from msa_tiles.dsl.table import Columns, Pipeline, Role, Table, buffer, commits, declares, warps

STAGES = 3  # <- tile.stages
ACCUMULATORS = 2  # <- tile.accumulators
BOXES = 2  # of a tile of queries


def select_blocks(head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SelectBlocks(head_dim, block_size, topk, heads_per_group, pages_per_block)
    return kernel, kernel.arguments(Int32, scalars=5)


@declares
def cta(head_dim, block_size, topk, heads_per_group, pages_per_block):
    """What a thread block is made of."""
    queries = queries_of(BOXES, heads_per_group, head_dim, index_key.multiplied())
    keys = index_key.parts("k", head_dim, block_size, STAGES, producer="producer", freed=commits("multiplier"))
    return Table(
        roles=(
            Role("epilogue", 4, "thread i reads row i of every product, keeps its maximum and the row's top-k list"),
            Role("producer", 1, "loads Q once, then streams the index keys, one block a stage"),
            Role("multiplier", 1, "S = Q K^T for every block and head in turn; owns tensor memory"),
            Role("idle", 2, "nothing: tensor memory is given to whole warpgroups"),
        ),
        pipelines=(
            *queries.pipelines,
            *keys.pipelines,
            Pipeline("s", ACCUMULATORS, (commits("multiplier"),), (warps("epilogue"),)),
        ),
        buffers=(*queries.buffers, *keys.buffers, buffer("address", "int32", ids=1, note="of the tensor memory")),
        tensor_memory=(Columns("S", ACCUMULATORS, block_size, "float32, a query a lane"),),
    )


class SelectBlocks(TensorIndexer):
    """
    # <- cta

    A product is reduced while the next one is multiplied. A row and its list belong to one thread, so that nothing is
    shuffled and no lists are merged. With several index heads per KV head the maximum also runs over the heads.
    """

    def __init__(self, head_dim, block_size, topk, heads_per_group, pages_per_block):
        table = cta(head_dim, block_size, topk, heads_per_group, pages_per_block)
        super().__init__(table, index_key.IndexKeys("k", table, head_dim, block_size, pages_per_block), heads_per_group)
        self.topk = topk

    @cute.jit
    def __call__(
        self, idx_q: cute.Tensor, idx_k: cute.Tensor, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, init_blocks: Int32, local_blocks: Int32, order: Int32, stream,
    ):  # fmt: skip
        """Launch. An absent tensor is any other of its rank and type; order counts as in topk.emit."""
        self.kernel(
            self.described(idx_q), self.keys.stored(idx_k), page_table, cu_seqlens_q, cu_seqlens_k, seqused_k,
            q_positions, out, use_seqused, use_positions, init_blocks, local_blocks, order,
        ).launch(**self.launch(out.shape[0], idx_q, cu_seqlens_q), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ: tuple, stored: tuple, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32,
        init_blocks: Int32, local_blocks: Int32, order: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        head, slot_reversed, slots = head_and_place(out.shape[0])
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer, multiplier, idle = map(self.cta.first_warp, ("producer", "multiplier", "idle"))
        sQ, held, scores, q_full, s_full, s_free = self.prepare(SmemAllocator(), (mQ.atom, *self.keys.atoms(stored)))
        request, first_token, end_token, length, first_limit, num_blocks = self.find_tile(
            slots - 1 - slot_reversed, Int32(out.shape[1]), cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions,
            use_seqused, use_positions, Int32(1),
        )  # fmt: skip
        if first_token < end_token:
            if warp < producer:
                self.consume(
                    scores, s_full, s_free, thread, head, first_token, end_token, first_limit, length, num_blocks,
                    q_positions, use_positions, init_blocks, local_blocks, order, out,
                )  # fmt: skip
            elif warp < multiplier:
                self.produce(
                    mQ, sQ, q_full, stored, held, page_table, cu_seqlens_k, head, request, first_token, num_blocks
                )
            elif warp < idle:
                self.multiply_all(sQ, held, scores, q_full, s_full, s_free, num_blocks)
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
                place, phase = following(place, phase, self.accumulators)
            maximum = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
            key = top.forced_key(top.order_key(maximum), block, valid, init_blocks, local_blocks)
            # An invisible block ranks with the empty entries and never gets in.
            top.insert(keys, ids, top.pick(block < valid, key, top.EMPTY), block)
        if token < end_token:
            top.emit(keys, ids, valid, Int32(out.shape[2]), order, out[head, token, None])
