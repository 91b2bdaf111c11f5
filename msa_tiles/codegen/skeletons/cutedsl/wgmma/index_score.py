"""Indexer scores with block max-pool: one float32 per query, index head and KV block.

Grid: a CTA for every index head of every tile slot on the first axis, the tiles with the longest prefix first. A
tile is CONSUMERS * 64 consecutive queries of one request; slots follow msa_tiles.dsl.cutedsl.varlen, and the slots past
the last request pad the rows that belong to nobody. The parts that select_blocks shares stand in
msa_tiles.dsl.cutedsl.indexer.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from msa_tiles.dsl.cutedsl.grid import head_and_place
from msa_tiles.dsl.cutedsl.indexer import GROUP, ROWS, WARPS, Indexer, queries_of, roles_of
from msa_tiles.dsl.cutedsl.operands import index_plain as index_key  # <- operands.index_key
from msa_tiles.dsl.cutedsl.scores import row_of_lane, scaled
from msa_tiles.dsl.cutedsl.shared import by_rows
from msa_tiles.dsl.table import WARP, Table, buffer, declares, warps

STAGES = 4  # <- tile.stages
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
SCALARS = 3  # % if not precision.scale
SCALARS = 5  # % if precision.scale
WARP_ROWS = 16  # of a score tile
PADDED = 33  # a column more than a line holds: rows then begin in different banks


def index_score(
    head_dim: int,
    block_size: int,
    pages_per_block: int,
    key_scales: int,  # % if "key_scales" in plan.variants
):
    """Build the kernel for one index dim and block size.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_index_heads, total_q,
    max_blocks] float32 with any strides on heads and tokens: the largest product of each block's visible keys, -inf
    for a block without one.
    # % if "key_scales" in plan.variants
    Products are multiplied by q_scale [total_q, num_index_heads], where it is to be used, and by k_scale: [total_k] or
    [pages, page] with key_scales = 1, else its first element, where it is to be used. Scales are 0 or more.
    # % endif
    # % if precision.decoded
    Keys come in bytes with the scales of their groups, and are decoded. Products are multiplied by q_scale [total_q,
    num_index_heads], where it is to be used, and by the first element of the keys' global scale, if they have one.
    # % endif

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = IndexScore(
        head_dim,
        block_size,
        pages_per_block,
        key_scales=key_scales,  # % if "key_scales" in plan.variants
    )
    return kernel, kernel.arguments(Float32, SCALARS)


@declares
def cta(head_dim, block_size, pages_per_block, **scales):
    """What a thread block is made of."""
    queries = queries_of(CONSUMERS, 1, head_dim, index_key.multiplied())
    keys = index_key.parts("k", head_dim, block_size, STAGES, producer="producer", freed=warps("consumer"), **scales)
    return Table(
        roles=roles_of(
            CONSUMERS,
            "64 query rows a warpgroup: S = Q K^T for two KV blocks in turn, row maxima, stores",
            ("filler", "-inf for the blocks that no row of the tile sees"),  # % if not precision.decoded
            ("decoder", "makes tiles of the bytes that come, and fills unseen blocks"),  # % if precision.decoded
            PRODUCER_REGISTERS,
            CONSUMER_REGISTERS,
        ),
        pipelines=(*queries.pipelines, *keys.pipelines),
        buffers=(
            *queries.buffers,
            *keys.buffers,
            buffer("gathered", "float32", warps=CONSUMERS * WARPS, rows=WARP_ROWS, blocks=PADDED, note="32 in use"),
        ),
    )


class IndexScore(Indexer):
    """
    # <- cta

    The consumer has two score tiles: one is multiplied while the other is reduced. Warp i owns rows 16i to 16i+15;
    their maxima gather in shared memory, 32 blocks a row, and leave as whole 128-byte lines.
    # % if "key_scales" in plan.variants

    Scales of queries, and one that all keys share, multiply a maximum before it is gathered. Where each key has a scale
    (key_scales) it multiplies the products as they are reduced, and a stage of keys is freed behind that; else a stage
    is free once its product is done.
    # % endif
    """

    def __init__(self, head_dim, block_size, pages_per_block, **scales):
        table = cta(head_dim, block_size, pages_per_block, **scales)
        keys = index_key.IndexKeys("k", table, head_dim, block_size, pages_per_block, **scales)
        super().__init__(table, keys, CONSUMERS, 1)

    def layouts(self):
        """The same, and of the maxima of every warp, a row after the other."""
        return {**by_rows(self.cta, "gathered"), **super().layouts()}

    @cute.jit
    def __call__(
        self,
        idx_q: cute.Tensor,
        q_scale: cute.Tensor,  # % if precision.scale
        idx_k: cute.Tensor,  # <- tensors of operands.index_key
        page_table: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_k: cute.Tensor,
        q_positions: cute.Tensor,
        out: cute.Tensor,
        use_seqused: Int32,
        use_positions: Int32,
        use_q_scale: Int32,  # % if precision.scale
        use_k_scale: Int32,  # % if precision.scale
        causal: Int32,
        stream,
    ):
        """Launch. An absent tensor is any other of its rank and type."""
        keys = self.keys.stored(
            idx_k,  # <- tensors of operands.index_key
        )
        scales = None  # % if not precision.scale
        scales = index_key.Scales(q_scale, use_q_scale, use_k_scale)  # % if precision.scale
        self.kernel(
            self.described(idx_q), keys, scales, page_table, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, out,
            use_seqused, use_positions, causal,
        ).launch(**self.launch(out.shape[0], idx_q, cu_seqlens_q), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ: tuple, stored: tuple, scales, page_table: cute.Tensor, cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor, seqused_k: cute.Tensor, q_positions: cute.Tensor, out: cute.Tensor,
        use_seqused: Int32, use_positions: Int32, causal: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        head, slot_reversed, slots = head_and_place(out.shape[0])
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer, filler = self.cta.first_warp("producer"), self.cta.first_warp("filler")  # % if not precision.decoded
        producer, filler = self.cta.first_warp("producer"), self.cta.first_warp("decoder")  # % if precision.decoded
        buffers, held, q_full = self.prepare(SmemAllocator(), (mQ.atom, *self.keys.atoms(stored)))
        sQ, gathered = buffers["queries"], buffers["gathered"]
        request, first_token, end_token, length, first_limit, num_blocks = self.find_tile(
            slots - 1 - slot_reversed, Int32(out.shape[1]), cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions,
            use_seqused, use_positions, causal,
        )  # fmt: skip
        scored = cutlass.min(num_blocks, Int32(out.shape[2]))
        if first_token < end_token:
            if warp >= producer:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp < filler:
                    self.produce(
                        mQ, sQ, q_full, stored, held, page_table, cu_seqlens_k, head, request, first_token, num_blocks
                    )
                else:
                    self.keys.decode_blocks(held, num_blocks, warp - filler, WARPS - 1)  # % if precision.decoded
                    self.fill_unseen(warp - filler, head, first_token, end_token, scored, out)
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                group = warp // 4
                self.consume(
                    sQ, held, stored, scales, gathered[warp, None, None], q_full, group, thread % GROUP, head,
                    first_token + group * ROWS, end_token, first_limit + group * ROWS, length, num_blocks, scored,
                    q_positions, use_positions, out,
                )  # fmt: skip

    @cute.jit
    def fill_unseen(
        self, worker: Int32, head: Int32, first_token: Int32, end_token: Int32, scored: Int32, out: cute.Tensor
    ):
        """-inf for the blocks from `scored` on; the fillers take the rows in turn."""
        lane = cute.arch.lane_idx()
        token = first_token + worker
        last = cutlass.min(first_token + self.tile, end_token)
        while token < last:
            row = out[head, token, None]
            block = scored + lane
            while block < Int32(out.shape[2]):
                row[block] = -Float32.inf
                block = block + WARP
            token = token + self.cta.roles["filler"].warps  # % if not precision.decoded
            token = token + WARPS - 1  # % if precision.decoded

    @cute.jit
    def consume(
        self, sQ: cute.Tensor, held: tuple, stored: tuple, scales, gathered: cute.Tensor, q_full: cute.Pointer,
        group: Int32, thread: Int32, head: Int32, first_token: Int32, end_token: Int32, first_limit: Int32,
        length: Int32, num_blocks: Int32, scored: Int32, q_positions: cute.Tensor, use_positions: Int32,
        out: cute.Tensor,
    ):  # fmt: skip
        """The 64 rows of one warpgroup; first_token and first_limit are its own, thread counts in it."""
        lane = cute.arch.lane_idx()
        limits, full_blocks = self.row_limits(
            q_positions, use_positions, first_token, end_token, first_limit, length, thread
        )
        token = first_token + thread // WARP * WARP_ROWS
        rows = cutlass.min(end_token - token, WARP_ROWS)
        factor = self.keys.row_factor(stored, scales, cutlass.min(token + lane % WARP_ROWS, end_token - 1), head)
        state = (gathered, factor, head, token, rows, scored, out)
        self.score_pairs(self.operands(sQ, held), group, q_full, held, limits, full_blocks, num_blocks, lane, state)
        # What is left of the last line; nothing if a pair has just completed it, with 31 or 32 blocks, or of none.
        if (num_blocks + 1) % WARP >= 2:
            self.store_line(state, num_blocks // WARP * WARP, lane)

    @cute.jit
    def finish_pair(self, state, first_block: Int32, max_even: cute.Tensor, max_odd: cute.Tensor, lane: Int32):
        """Gather the maxima of two neighbouring blocks; a complete line of them leaves."""
        found = scaled(row_of_lane(max_even, max_odd, lane), state[1])
        state[0][lane % WARP_ROWS, first_block % WARP + lane // WARP_ROWS] = found
        if (first_block + 2) % WARP == 0:
            self.store_line(state, first_block + 2 - WARP, lane)

    @cute.jit
    def store_line(self, state, first_block: Int32, lane: Int32):
        """Write this warp's rows of the blocks from first_block on, as many as gathered but those not `scored`."""
        gathered, _, head, token, rows, scored, out = state
        cute.arch.sync_warp()
        if first_block + lane < scored:
            for row in cutlass.range(rows, unroll=1):
                out[head, token + row, first_block + lane] = gathered[row, lane]
        cute.arch.sync_warp()
