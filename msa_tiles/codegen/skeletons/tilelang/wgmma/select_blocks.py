"""Indexer scores and top-k in one kernel: the score matrix never exists.

Grid: a CTA for every KV head of every tile slot, the tiles with the longest prefix first; all on one axis, since the
others end at 65,535. A tile is CONSUMERS * 64 consecutive queries of one request; slots follow
msa_tiles.dsl.tilelang.varlen, and the slots past the last request pad the rows that belong to nobody.

# <- cta

The consumer has two score tiles: one is multiplied while the other is reduced; a list of 64 leaves it
registers for one. Row maxima pass through
shared memory inside a warp: warp i owns rows 16i to 16i+15, lane l serves row l % 16 and takes the even blocks
(l < 16) or the odd ones. The two lists of a row are merged at the end. With several index heads per KV head the
maximum also runs over the heads.
# % if precision.decoded

Keys come as bytes to k_raw, and the producer decodes them. Nobody frees the bytes: its threads meet (named barrier 7)
before the next ones are sent for. Columns of keys stand in the order that decoding has; each warpgroup brings those of
its queries into it once (named barrier 8 or 9). A global scale changes no ranking and is not read.
# % endif
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang import topk as top
from msa_tiles.dsl.tilelang.keys import box_columns, index_keys, load_index_block  # % if not precision.decoded
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.operands import index_nvfp4 as index_key  # <- operands.index_key  # % if precision.decoded
from msa_tiles.dsl.tilelang.packed_queries import turn  # % if precision.decoded
from msa_tiles.dsl.tilelang.scores import block_max
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.varlen import key_length, last_tile_at_most, last_visible, tile_limits

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 4  # <- tile.stages
AHEAD = 3  # <- tile.ahead  # % if precision.decoded
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
ROWS = 64
TILE = CONSUMERS * ROWS


@declares
def cta(head_dim, block_size, topk, heads_per_group, pages_per_block):
    keys = index_key.parts("k", head_dim, block_size, AHEAD, producer="producer")  # % if precision.decoded
    return Table(
        roles=(
            Role(
                "consumers",
                4 * CONSUMERS,
                "a warpgroup takes 64 query rows: S = Q K^T for two KV blocks in turn, row maxima, top-k lists",
                CONSUMER_REGISTERS,
            ),
            # % if precision.decoded
            Role("producer", 4, "loads Q once, then streams the index keys and decodes them", PRODUCER_REGISTERS),
            # % else
            Role("producer", 4, "loads Q once, then streams the index keys, one block a stage", PRODUCER_REGISTERS),
            # % endif
        ),
        pipelines=(
            Pipeline("q", 1, (threads("producer"),), fills=("queries",)),
            # % if precision.decoded
            *keys.pipelines,
            Pipeline("k", STAGES, (threads("producer"),), (threads("consumers"),)),
            # % else
            Pipeline("k", STAGES, (threads("producer"),), (threads("consumers"),), fills=("keys",)),
            # % endif
        ),
        buffers=(
            buffer(
                "queries", ELEMENT, align=1024, consumers=CONSUMERS, heads=heads_per_group, rows=ROWS, head_dim=head_dim
            ),
            buffer("keys", ELEMENT, align=1024, stages=STAGES, block_size=block_size, head_dim=head_dim),
            *keys.buffers,  # % if precision.decoded
            buffer("maxima", "float32", consumers=CONSUMERS, blocks=2, rows=ROWS),
        ),
        static=TILELANG,
    )


def select_blocks(head_dim: int, block_size: int, topk: int, heads_per_group: int, pages_per_block: int):
    """Build the kernel for one index dim, block size, list capacity (topk) and number of index heads per KV head.

    idx_q [total_q, num_index_heads, head_dim], idx_k [total_k, head_dim], or [pages, page, head_dim] with
    pages_per_block > 0 and page_table [requests, max_pages] -> out [num_kv_heads, total_q, k] int32
    with k <= topk: the k highest-scoring visible blocks of each query, forced blocks first, padded with -1.
    # % if precision.decoded
    Keys come in bytes with the scales of their groups. A global scale is positive, and not read.
    # % endif
    """
    table = cta(head_dim, block_size, topk, heads_per_group, pages_per_block)
    total_q, num_index_heads, num_kv_heads, k = T.dynamic("total_q, num_index_heads, num_kv_heads, k")
    num_starts, num_requests = T.dynamic("num_starts, num_requests")
    q_token, q_head, out_head, out_token = strides("q_token, q_head, out_head, out_token")
    num_tables, max_pages, num_positions = T.dynamic("num_tables, max_pages, num_positions")
    table_stride = strides("table_stride")
    # % if precision.decoded
    operand = index_key.IndexKeys("k", head_dim, block_size, pages_per_block)
    # % else
    key_shape, key_strides = index_keys(head_dim, block_size, pages_per_block)
    # % endif

    @T.macro
    def rank_pair(
        w, lane, row, max_shared, max_even, max_odd, first_block, valid, init_blocks, local_blocks, keys, ids
    ):  # fmt: skip
        """Offer the maxima of two neighbouring blocks to the lists: lanes below 16 take the first one."""
        key = T.alloc_var("int32")
        block = T.alloc_var("int32")
        T.sync_warp()
        for i in T.Parallel(ROWS):
            max_shared[w, 0, i] = max_even[i]
        for i in T.Parallel(ROWS):
            max_shared[w, 1, i] = max_odd[i]
        T.sync_warp()
        block = first_block + lane // 16
        key = top.forced_key(top.order_key(max_shared[w, lane // 16, row]), block, valid, init_blocks, local_blocks)
        if block < valid:
            top.insert(keys, ids, topk, key, block)

    @T.macro
    def score_pairs(
        w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids,
        row_limit, valid, full_blocks, num_blocks, init_blocks, local_blocks,
    ):  # fmt: skip
        """Two score tiles: the even block's is reduced while the odd one's is multiplied, then the other way round."""
        S_even = T.alloc_fragment([ROWS, block_size], "float32")
        S_odd = T.alloc_fragment([ROWS, block_size], "float32")
        max_even = T.alloc_fragment([ROWS], "float32")
        max_odd = T.alloc_fragment([ROWS], "float32")
        stage = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        even = T.alloc_var("int32")
        odd = T.alloc_var("int32")
        stage = 0
        phase = 0
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
            T.barrier_wait(k_full[0], 0)
            T.wgmma_gemm(Q_shared[w, 0, :, :], K_shared[0, :, :], S_even, transpose_B=True, clear_accum=True)
        for pair in T.serial((num_blocks + 1) // 2):
            even = stage
            T.fill(max_even, -T.infinity("float32"))
            T.fill(max_odd, -T.infinity("float32"))
            stage = stage + 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
            odd = stage
            if pair * 2 + 1 < num_blocks:
                T.barrier_wait(k_full[odd], phase)
            for r in T.unroll(heads_per_group):
                T.wait_wgmma(0)
                if r == heads_per_group - 1:
                    T.barrier_arrive(k_free[even])
                # Past the last block this multiplies a stale stage and the result is dropped: the waits stay uniform.
                T.wgmma_gemm(Q_shared[w, r, :, :], K_shared[odd, :, :], S_odd, transpose_B=True, clear_accum=True)
                block_max(S_even, max_even, row_limit, ROWS, block_size, pair * 2, full_blocks)
                if r == heads_per_group - 1:
                    stage = stage + 1
                    if stage == STAGES:
                        stage = 0
                        phase = phase ^ 1
                    if pair * 2 + 2 < num_blocks:
                        T.barrier_wait(k_full[stage], phase)
                T.wait_wgmma(0)
                if r < heads_per_group - 1:
                    T.wgmma_gemm(
                        Q_shared[w, r + 1, :, :], K_shared[even, :, :], S_even, transpose_B=True, clear_accum=True
                    )
                else:
                    if pair * 2 + 1 < num_blocks:
                        T.barrier_arrive(k_free[odd])
                    T.wgmma_gemm(
                        Q_shared[w, 0, :, :], K_shared[stage, :, :], S_even, transpose_B=True, clear_accum=True
                    )
                block_max(S_odd, max_odd, row_limit, ROWS, block_size, pair * 2 + 1, full_blocks)
            rank_pair(
                w, lane, row, max_shared, max_even, max_odd, pair * 2, valid, init_blocks, local_blocks, keys, ids
            )
        T.wait_wgmma(0)

    @T.macro
    def score_singly(
        w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids,
        row_limit, valid, full_blocks, num_blocks, init_blocks, local_blocks,
    ):  # fmt: skip
        """One score tile at a time, for lists that leave no registers for a second one."""
        S = T.alloc_fragment([ROWS, block_size], "float32")
        max_even = T.alloc_fragment([ROWS], "float32")
        max_odd = T.alloc_fragment([ROWS], "float32")
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
        T.fill(max_even, -T.infinity("float32"))
        T.fill(max_odd, -T.infinity("float32"))
        for block in T.serial(num_blocks):
            T.barrier_wait(k_full[block % STAGES], (block // STAGES) & 1)
            for r in T.unroll(heads_per_group):
                T.wgmma_gemm(
                    Q_shared[w, r, :, :], K_shared[block % STAGES, :, :], S, transpose_B=True, clear_accum=True
                )
                T.wait_wgmma(0)
                if r == heads_per_group - 1:
                    T.barrier_arrive(k_free[block % STAGES])
                block_max(S, max_odd, row_limit, ROWS, block_size, block, full_blocks)
            if block % 2 == 0:
                T.copy(max_odd, max_even)
                T.fill(max_odd, -T.infinity("float32"))
            if block % 2 == 1 or block == num_blocks - 1:
                rank_pair(
                    w, lane, row, max_shared, max_even, max_odd, block // 2 * 2, valid, init_blocks, local_blocks,
                    keys, ids,
                )  # fmt: skip
                T.fill(max_odd, -T.infinity("float32"))

    @T.macro
    def consume(
        w, tx, Q_shared, K_shared, max_shared, q_full, k_full, k_free,
        head, first_token, end_token, first_limit, length, num_blocks, q_positions, use_positions,
        init_blocks, local_blocks, order, out,
    ):  # fmt: skip
        keys = T.alloc_local([topk], "int32")
        ids = T.alloc_local([topk], "int32")
        row_limit = T.alloc_fragment([ROWS], "int32")
        least = T.alloc_local([1], "int32")
        most = T.alloc_local([1], "int32")
        lane = tx % 32
        row = (tx - w * 128) // 32 * 16 + lane % 16
        token = T.min(first_token + row, end_token - 1)
        limit = last_visible(q_positions, use_positions, token, first_token, first_limit, length)
        valid = T.if_then_else(limit >= 0, limit // block_size + 1, 0)
        for i in T.Parallel(ROWS):
            row_limit[i] = last_visible(
                q_positions, use_positions, T.min(first_token + i, end_token - 1), first_token, first_limit, length
            )
        tile_limits(
            q_positions, use_positions, first_token, T.min(first_token + ROWS, end_token) - 1, first_limit, length,
            least, most,
        )  # fmt: skip
        full_blocks = T.max(least[0] + 1, 0) // block_size
        # % if precision.decoded
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
            for r in T.unroll(heads_per_group):
                turn(Q_shared, (w, r), tx - w * 128, 8 + w)
        # % endif
        top.clear(keys, ids, topk)
        if topk <= 32:
            score_pairs(
                w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids,
                row_limit, valid, full_blocks, num_blocks, init_blocks, local_blocks,
            )  # fmt: skip
        else:
            score_singly(
                w, lane, row, Q_shared, K_shared, max_shared, q_full, k_full, k_free, keys, ids,
                row_limit, valid, full_blocks, num_blocks, init_blocks, local_blocks,
            )  # fmt: skip
        top.merge(keys, ids, topk, 16, lane < 16)
        if lane < 16 and first_token + row < end_token:
            top.emit(keys, ids, topk, valid, k, order, out, head, first_token + row)

    @T.prim_func
    def main(
        idx_q: T.StridedTensor((total_q, num_index_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        idx_k: T.StridedTensor(key_shape, key_strides, ELEMENT),  # % if not precision.decoded
        # % if precision.decoded
        key_bytes: operand.tensor(),
        group_scale: operand.scale(),
        global_scale: operand.of_heads(1),  # % if precision.scale.global_dtype
        # % endif
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        out: T.StridedTensor((num_kv_heads, total_q, k), (out_head, out_token, 1), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
        order: T.int32,
    ):
        with T.Kernel(num_kv_heads * (total_q // TILE + num_starts), threads=table.threads) as cta_index:
            Q_shared = make_buffer(table, "queries")
            K_shared = make_buffer(table, "keys")
            max_shared = make_buffer(table, "maxima")
            # % if precision.decoded
            held = index_key.allocate(operand, table, K_shared)
            stored = index_key.Stored(key_bytes, group_scale)
            # % endif
            q_full = make_barrier(table, "q_full")
            k_full = make_barrier(table, "k_full")
            k_free = make_barrier(table, "k_free")
            request = T.alloc_local([1], "int32")
            least = T.alloc_local([1], "int32")
            most = T.alloc_local([1], "int32")
            length = T.alloc_var("int32")
            end_token = T.alloc_var("int32")
            num_blocks = T.alloc_var("int32")
            # Variables: an expression is computed wherever it is used, and these hold a division.
            head = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            tx = T.get_thread_binding()
            head = T.truncmod(cta_index, num_kv_heads)
            slot = total_q // TILE + num_starts - 1 - T.truncdiv(cta_index, num_kv_heads)
            last_tile_at_most(cu_seqlens_q, num_starts, TILE, slot, request)
            first_token = cu_seqlens_q[request[0]] + (slot - cu_seqlens_q[request[0]] // TILE - request[0]) * TILE
            length = 0
            end_token = total_q
            num_blocks = 0
            if request[0] < num_starts - 1:
                length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                end_token = cu_seqlens_q[request[0] + 1]
            first_limit = length - end_token + first_token
            if length > 0:
                tile_limits(
                    q_positions, use_positions, first_token, T.min(first_token + TILE, end_token) - 1, first_limit,
                    length, least, most,
                )  # fmt: skip
                num_blocks = T.max(most[0] + block_size, 0) // block_size
            if first_token < end_token:
                if tx >= CONSUMERS * 128:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    if num_blocks > 0:
                        key_row = cu_seqlens_k[request[0]]
                        for w in T.unroll(CONSUMERS):
                            for r in T.unroll(heads_per_group):
                                T.tma_copy(
                                    described(idx_q)[
                                        first_token + w * ROWS : first_token + w * ROWS + ROWS,
                                        head * heads_per_group + r,
                                        :,
                                    ],
                                    Q_shared[w, r, :, :],
                                    barrier=q_full,
                                )
                        T.barrier_arrive(q_full)
                        index_key.begin(held)  # % if precision.decoded
                        for block in T.serial(num_blocks):
                            # % if precision.decoded
                            first = block * block_size
                            index_key.send(
                                operand, stored, page_table, key_row + first, length - first, held, k_full, k_free,
                                tx - CONSUMERS * 128,
                            )  # fmt: skip
                            # % else
                            T.barrier_wait(k_free[block % STAGES], ((block // STAGES) & 1) ^ 1)
                            load_index_block(
                                idx_k, page_table, key_row + block * block_size, K_shared, k_full, block % STAGES,
                                block_size, head_dim, pages_per_block, box_columns(head_dim, ELEMENT),
                            )  # fmt: skip
                            T.barrier_arrive(k_full[block % STAGES])
                            # % endif
                        # % if precision.decoded
                        index_key.finish(operand, stored, held, k_full, k_free, tx - CONSUMERS * 128)
                        # % endif
                elif tx < 128:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    consume(
                        0, tx, Q_shared, K_shared, max_shared, q_full, k_full, k_free, head, first_token, end_token,
                        first_limit, length, num_blocks, q_positions, use_positions, init_blocks, local_blocks, order,
                        out,
                    )  # fmt: skip
                else:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    consume(
                        1, tx, Q_shared, K_shared, max_shared, q_full, k_full, k_free, head, first_token + ROWS,
                        end_token, first_limit + ROWS, length, num_blocks, q_positions, use_positions, init_blocks,
                        local_blocks, order, out,
                    )  # fmt: skip

    return main
