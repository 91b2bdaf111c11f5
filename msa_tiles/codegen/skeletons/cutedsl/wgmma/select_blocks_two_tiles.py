"""Indexer scores and top-k in one kernel: the score matrix never exists.

Grid: a CTA for every KV head of every tile slot on the first axis, the tiles with the longest prefix first. A tile
is CONSUMERS * 128 consecutive queries of one request; slots follow msa_tiles.dsl.cutedsl.varlen, and the slots past the
last request pad the rows that belong to nobody. The producers and the loop over the score tiles stand in
msa_tiles.dsl.cutedsl.two_tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import candidate_queue
from msa_tiles.dsl.cutedsl import topk as top
from msa_tiles.dsl.cutedsl.grid import head_and_place
from msa_tiles.dsl.cutedsl.indexer import WARPS, queries_of, roles_of
from msa_tiles.dsl.cutedsl.maxima import place_of_lane
from msa_tiles.dsl.cutedsl.operands import index_e4m3 as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.two_tiles import GROUP_ROWS, TwoTileIndexer, query_scales_of
from msa_tiles.dsl.cutedsl.varlen import last_visible
from msa_tiles.dsl.table import Table, declares, warps

STAGES = 3  # <- tile.stages
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers


def select_blocks(
    head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int, key_scales: int
):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.
    q_scale [total_q, num_index_heads] is read with use_q_scale and heads_per_group > 1, k_scale [total_k] or
    [pages, page] with key_scales = 1. Scales are float32 and positive.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SelectBlocks(head_dim, block_size, topk, heads_per_group, pages_per_block, key_scales)
    return kernel, kernel.arguments(Int32, scalars=6)


@declares
def cta(head_dim, block_size, topk, heads_per_group, pages_per_block, key_scales):
    """What a thread block is made of."""
    queries = queries_of(2 * CONSUMERS, heads_per_group, head_dim, index_key.multiplied())
    keys = index_key.parts(
        "k", head_dim, block_size, STAGES, producer="producer", freed=warps("consumer"), key_scales=key_scales
    )
    return Table(
        roles=roles_of(
            CONSUMERS,
            "128 query rows a warpgroup, in two tiles: S = Q K^T of a KV block, row maxima, top-k lists",
            ("idle", "nothing"),
            PRODUCER_REGISTERS,
            CONSUMER_REGISTERS,
        ),
        pipelines=(*queries.pipelines, *keys.pipelines),
        buffers=(
            *queries.buffers,
            *keys.buffers,
            query_scales_of(2 * CONSUMERS, heads_per_group),
            candidate_queue.queues_of(CONSUMERS * WARPS),
        ),
    )


class SelectBlocks(TwoTileIndexer):
    """
    # <- cta

    The consumer has two score tiles, of the same keys: one is multiplied while the other is reduced; a list of 64
    leaves it registers for one. Warp i of a warpgroup owns rows 16i to 16i+15 of both tiles, and each of its lanes one
    of these 32 rows: its list, and the candidates that wait for it. With several index heads per KV head the maximum
    also runs over the heads.
    """

    def __init__(self, head_dim, block_size, topk, heads_per_group, pages_per_block, key_scales):
        table = cta(head_dim, block_size, topk, heads_per_group, pages_per_block, key_scales)
        keys = index_key.IndexKeys("k", table, head_dim, block_size, pages_per_block, key_scales)
        super().__init__(table, keys, 2 * CONSUMERS, heads_per_group)
        self.topk = topk

    @cute.jit
    def __call__(
        self, idx_q: cute.Tensor, idx_k: cute.Tensor, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, q_scale: cute.Tensor,
        k_scale: cute.Tensor, out: cute.Tensor, use_seqused: Int32, use_positions: Int32, use_q_scale: Int32,
        init_blocks: Int32, local_blocks: Int32, order: Int32, stream,
    ):  # fmt: skip
        """Launch. An absent tensor is any other of its rank and type; order counts as in topk.emit."""
        self.kernel(
            self.described(idx_q), self.keys.stored(idx_k, k_scale), page_table, cu_seqlens_q, cu_seqlens_k, seqused_k,
            q_positions, q_scale, out, use_seqused, use_positions, use_q_scale, init_blocks, local_blocks, order,
        ).launch(**self.launch(out.shape[0], idx_q, cu_seqlens_q), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ: tuple, stored: tuple, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor, q_positions: cute.Tensor, q_scale: cute.Tensor, out: cute.Tensor, use_seqused: Int32,
        use_positions: Int32, use_q_scale: Int32, init_blocks: Int32, local_blocks: Int32, order: Int32,
    ):  # fmt: skip
        head, slot_reversed, slots = head_and_place(out.shape[0])
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer, idle = self.cta.first_warp("producer"), self.cta.first_warp("idle")
        buffers, held, q_full = self.prepare(SmemAllocator(), (mQ.atom, *self.keys.atoms(stored)))
        sQ, query_scale = buffers["queries"], buffers["query_scales"]
        request, first_token, end_token, length, first_limit, num_blocks = self.find_tile(
            slots - 1 - slot_reversed, Int32(out.shape[1]), cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions,
            use_seqused, use_positions, Int32(1),
        )  # fmt: skip
        if first_token < end_token:
            if warp >= producer:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp < idle:
                    self.produce(
                        mQ, sQ, q_full, stored, held, page_table, cu_seqlens_k, head, request, first_token, num_blocks
                    )
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                rows = warp // WARPS * GROUP_ROWS
                self.consume(
                    sQ, q_full, held, query_scale, buffers["queues"][cute.arch.lane_idx(), None, warp], warp, head,
                    first_token + rows, end_token, first_limit + rows, length, num_blocks, q_positions, use_positions,
                    q_scale, use_q_scale, init_blocks, local_blocks, order, out,
                )  # fmt: skip

    @cute.jit
    def consume(
        self, sQ: cute.Tensor, q_full: cute.Pointer, held: tuple, query_scale: cute.Tensor, queue: cute.Tensor,
        warp: Int32, head: Int32, first_token: Int32, end_token: Int32, first_limit: Int32, length: Int32,
        num_blocks: Int32, q_positions: cute.Tensor, use_positions: Int32, q_scale: cute.Tensor, use_q_scale: Int32,
        init_blocks: Int32, local_blocks: Int32, order: Int32, out: cute.Tensor,
    ):  # fmt: skip
        """The 128 rows of one warpgroup; first_token and first_limit are its own, warp counts in the CTA."""
        place = place_of_lane(warp % WARPS, cute.arch.lane_idx())
        token = first_token + place
        inside = cutlass.min(token, end_token - 1)
        limit = last_visible(q_positions, use_positions, inside, first_token, first_limit, length)
        valid = cutlass.max(limit + self.block_size, 0) // self.block_size
        if cutlass.const_expr(self.heads > 1):
            self.read_query_scales(q_scale, use_q_scale, query_scale, inside, head, warp // WARPS * GROUP_ROWS + place)
        row = candidate_queue.Candidates(queue, self.topk, valid, init_blocks, local_blocks)
        candidate_queue.start(row)
        sight = self.sight(q_positions, use_positions, first_token, end_token, first_limit, length, warp % WARPS)
        operands = self.operands(sQ, held)
        score = self.score_blocks if cutlass.const_expr(self.topk <= 32) else self.score_blocks_singly
        score(operands, q_full, held, query_scale, warp, sight, num_blocks, row)
        candidate_queue.settle(row)
        if token < end_token:
            top.emit(row.keys, row.ids, valid, Int32(out.shape[2]), order, out[head, token, None])

    @cute.jit
    def finish_block(self, row, block: Int32, score: cutlass.Float32):
        """Offer the score of a block to the list of this lane's row."""
        candidate_queue.offer(row, score, block)
