"""Indexer scores and top-k in one kernel: the score matrix never exists.

Grid: a CTA for every KV head of every tile slot on the first axis, the tiles with the longest prefix first. A tile
is CONSUMERS * 64 consecutive queries of one request; slots follow msa_tiles.dsl.cutedsl.varlen, and the slots past the
last request pad the rows that belong to nobody. The parts that index_score shares stand in
msa_tiles.dsl.cutedsl.indexer.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl import topk as top
from msa_tiles.dsl.cutedsl.grid import head_and_place
from msa_tiles.dsl.cutedsl.indexer import GROUP, ROWS, Indexer, queries_of, roles_of
from msa_tiles.dsl.cutedsl.operands import index_plain as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.scores import row_of_lane
from msa_tiles.dsl.cutedsl.varlen import last_visible
from msa_tiles.dsl.table import Table, declares, warps

STAGES = 3  # <- tile.stages
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
MOST_HEADS = 2  # beside whose queries so many stages have room, and their bytes  # % if precision.decoded


def select_blocks(head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.
    # % if precision.decoded
    Keys come in bytes with the scales of their groups, and are decoded. A global scale ranks no block before another
    and is not read: it is positive.
    # % endif

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = SelectBlocks(head_dim, block_size, topk, heads_per_group, pages_per_block)
    return kernel, kernel.arguments(Int32, scalars=5)


@declares
def cta(head_dim, block_size, topk, heads_per_group, pages_per_block):
    """What a thread block is made of."""
    queries = queries_of(CONSUMERS, heads_per_group, head_dim, index_key.multiplied())
    # % if not precision.decoded
    keys = index_key.parts("k", head_dim, block_size, STAGES, producer="producer", freed=warps("consumer"))
    # % endif
    # % if precision.decoded
    stages = STAGES if heads_per_group <= MOST_HEADS else STAGES - 1
    keys = index_key.parts("k", head_dim, block_size, stages, producer="producer", freed=warps("consumer"))
    # % endif
    return Table(
        roles=roles_of(
            CONSUMERS,
            "64 query rows a warpgroup: S = Q K^T for two KV blocks in turn, row maxima, top-k lists",
            ("idle", "nothing"),  # % if not precision.decoded
            ("decoder", "makes tiles of the bytes that come"),  # % if precision.decoded
            PRODUCER_REGISTERS,
            CONSUMER_REGISTERS,
        ),
        pipelines=(*queries.pipelines, *keys.pipelines),
        buffers=(*queries.buffers, *keys.buffers),
    )


class SelectBlocks(Indexer):
    """
    # <- cta

    The consumer has two score tiles: one is multiplied while the other is reduced; a list of 64 leaves it registers
    for one. Warp i owns rows 16i to 16i+15; lane l serves row l % 16 and takes the even blocks (l < 16) or the odd
    ones. The two lists of a row are merged at the end. With several index heads per KV head the maximum also runs over
    the heads.
    """

    def __init__(self, head_dim, block_size, topk, heads_per_group, pages_per_block):
        table = cta(head_dim, block_size, topk, heads_per_group, pages_per_block)
        keys = index_key.IndexKeys("k", table, head_dim, block_size, pages_per_block)
        super().__init__(table, keys, CONSUMERS, heads_per_group)
        self.topk = topk

    # % if precision.decoded
    def arguments(self, out_element, scalars):
        """The same but for scales of queries, which have none."""
        idx_q, _, *others = super().arguments(out_element, scalars)
        return idx_q, *others

    # % endif
    @cute.jit
    def __call__(
        self,
        idx_q: cute.Tensor,
        idx_k: cute.Tensor,  # <- tensors of operands.index_key
        page_table: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,
        q_positions: cute.Tensor,
        out: cute.Tensor,
        use_seqused: Int32,
        use_positions: Int32,
        init_blocks: Int32,
        local_blocks: Int32,
        order: Int32,
        stream,
    ):
        """Launch. An absent tensor is any other of its rank and type; order counts as in topk.emit."""
        self.kernel(
            self.described(idx_q),
            self.keys.stored(
                idx_k,  # <- tensors of operands.index_key
            ),
            page_table, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, out, use_seqused, use_positions,
            init_blocks, local_blocks, order,
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
        producer, idle = self.cta.first_warp("producer"), self.cta.first_warp("idle")  # % if not precision.decoded
        producer, idle = self.cta.first_warp("producer"), self.cta.first_warp("decoder")  # % if precision.decoded
        buffers, held, q_full = self.prepare(SmemAllocator(), (mQ.atom, *self.keys.atoms(stored)))
        sQ = buffers["queries"]
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
                # % if precision.decoded
                else:
                    self.keys.decode_blocks(held, num_blocks, warp - idle, self.cta.roles["decoder"].warps)
                # % endif
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                group = warp // 4
                self.consume(
                    sQ, q_full, held, group, thread % GROUP, head, first_token + group * ROWS, end_token,
                    first_limit + group * ROWS, length, num_blocks, q_positions, use_positions, init_blocks,
                    local_blocks, order, out,
                )  # fmt: skip

    @cute.jit
    def consume(
        self, sQ: cute.Tensor, q_full: cute.Pointer, held: tuple, group: Int32, thread: Int32, head: Int32,
        first_token: Int32, end_token: Int32, first_limit: Int32, length: Int32, num_blocks: Int32,
        q_positions: cute.Tensor, use_positions: Int32, init_blocks: Int32, local_blocks: Int32, order: Int32,
        out: cute.Tensor,
    ):  # fmt: skip
        """The 64 rows of one warpgroup; first_token and first_limit are its own, thread counts in it."""
        lane = cute.arch.lane_idx()
        token = first_token + thread // 32 * 16 + lane % 16
        inside = cutlass.min(token, end_token - 1)
        limit = last_visible(q_positions, use_positions, inside, first_token, first_limit, length)
        valid = cutlass.max(limit + self.block_size, 0) // self.block_size
        keys = cute.make_rmem_tensor(self.topk, Int32)
        ids = cute.make_rmem_tensor(self.topk, Int32)
        top.clear(keys, ids)
        limits, full_blocks = self.row_limits(
            q_positions, use_positions, first_token, end_token, first_limit, length, thread
        )
        operands = self.operands(sQ, held)
        state = (keys, ids, valid, init_blocks, local_blocks)
        score = self.score_pairs if cutlass.const_expr(self.topk <= 32) else self.score_singly
        score(operands, group * self.heads, q_full, held, limits, full_blocks, num_blocks, lane, state)
        top.merge(keys, ids, 16, lane < 16)
        if (lane < 16) & (token < end_token):
            top.emit(keys, ids, valid, Int32(out.shape[2]), order, out[head, token, None])

    @cute.jit
    def finish_pair(self, state, first_block: Int32, max_even: cute.Tensor, max_odd: cute.Tensor, lane: Int32):
        """Offer the maxima of two neighbouring blocks to the lists: lanes below 16 take the first one."""
        keys, ids, valid, init_blocks, local_blocks = state
        block = first_block + lane // 16
        key = top.order_key(row_of_lane(max_even, max_odd, lane))
        key = top.forced_key(key, block, valid, init_blocks, local_blocks)
        # An invisible block ranks with the empty entries and never gets in.
        top.insert(keys, ids, top.pick(block < valid, key, top.EMPTY), block)
