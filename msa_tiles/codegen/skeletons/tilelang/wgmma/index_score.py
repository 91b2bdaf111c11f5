"""Indexer scores with block max-pool: one float32 per query, index head and KV block.

Grid: a CTA for every index head of every tile slot, the tiles with the longest prefix first; all on one axis, since the
others end at 65,535. A tile is CONSUMERS * 64 consecutive queries of one request; slots follow
msa_tiles.dsl.tilelang.varlen, and the slots past the last request pad the rows that belong to nobody.

# <- cta

The consumer has two score tiles: one is multiplied while the other is reduced. Warp i owns rows 16i to
16i+15; their maxima gather in shared memory, GATHER blocks a row, and leave as whole 128-byte lines.
# % if precision.decoded

Keys come as bytes to k_raw, and the producer decodes them. Nobody frees the bytes: its threads meet (named barrier 7)
before the next ones are sent for. Columns of keys stand in the order that decoding has; each warpgroup brings those of
its queries into it once (named barrier 8 or 9).
# % endif
"""

import tilelang.language as T

from msa_tiles.dsl.table import BYTES, TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang import scaled  # % if precision.scale
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
GATHER = 32
SLOTS = 2 * STAGES  # % if "key_scales" in plan.variants


@declares
def cta(head_dim, block_size, pages_per_block, key_scales=0):
    # % if precision.decoded
    keys = index_key.parts("k", head_dim, block_size, AHEAD, producer="producer")
    # % else
    scale = buffer("key_scale", "float32", slots=2 * STAGES, keys=128, note="twice the ring")
    # % endif
    atom = min(8 * head_dim * BYTES[ELEMENT], 1024)  # what a swizzle repeats after
    return Table(
        roles=(
            Role(
                "consumers",
                4 * CONSUMERS,
                "a warpgroup takes 64 query rows: S = Q K^T for two KV blocks in turn, row maxima, stores",
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
            buffer("queries", ELEMENT, align=atom, consumers=CONSUMERS, rows=ROWS, head_dim=head_dim),
            buffer("keys", ELEMENT, align=atom, stages=STAGES, block_size=block_size, head_dim=head_dim),
            buffer("gathered", "float32", consumers=CONSUMERS, rows=ROWS, blocks=GATHER + 1),
            *((scale,) if key_scales else ()),  # % if not precision.decoded
            *keys.buffers,  # % if precision.decoded
        ),
        static=TILELANG,
    )


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
    Keys come in bytes with the scales of their groups. Products are multiplied by q_scale [total_q, num_index_heads],
    where it is to be used, and by the first element of the keys' global scale, if they have one.
    # % endif
    """
    table = cta(
        head_dim, block_size, pages_per_block,
        key_scales,  # % if "key_scales" in plan.variants
    )  # fmt: skip
    total_q, num_index_heads, max_blocks = T.dynamic("total_q, num_index_heads, max_blocks")
    num_starts, num_requests = T.dynamic("num_starts, num_requests")
    q_token, q_head, out_head, out_token = strides("q_token, q_head, out_head, out_token")
    num_tables, max_pages, num_positions = T.dynamic("num_tables, max_pages, num_positions")
    table_stride = strides("table_stride")
    # % if precision.scale
    query_scale_shape, query_scale_strides = (total_q, num_index_heads), strides("scale_token, scale_head")
    # % endif
    # % if "key_scales" in plan.variants
    scale_shape, scale_strides = scaled.scale_layout(block_size, pages_per_block, key_scales)
    # % endif
    # % if precision.decoded
    keys = index_key.IndexKeys("k", head_dim, block_size, pages_per_block)
    # % else
    key_shape, key_strides = index_keys(head_dim, block_size, pages_per_block)
    columns = box_columns(head_dim, ELEMENT)
    # % endif

    @T.macro
    def store_rows(w, warp_row, lane, gathered, first_block, last_block, head, first_token, end_token, out):
        """Write blocks [first_block, last_block) of this warp's rows from the gathered maxima."""
        T.sync_warp()
        if first_block + lane < last_block:
            for i in T.serial(16):
                if first_token + warp_row + i < end_token:
                    out[head, first_token + warp_row + i, first_block + lane] = gathered[w, warp_row + i, lane]
        T.sync_warp()

    @T.macro
    def consume(
        w, tx, Q_shared, K_shared, gathered, q_full, k_full, k_free,
        head, first_token, end_token, first_limit, length, num_blocks, q_positions, use_positions, out,
        q_scale, k_scale, key_scale, use_q_scale, use_k_scale,  # % if precision.scale
    ):  # fmt: skip
        S_even = T.alloc_fragment([ROWS, block_size], "float32")
        S_odd = T.alloc_fragment([ROWS, block_size], "float32")
        max_even = T.alloc_fragment([ROWS], "float32")
        max_odd = T.alloc_fragment([ROWS], "float32")
        stage = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        even = T.alloc_var("int32")
        odd = T.alloc_var("int32")
        row_limit = T.alloc_fragment([ROWS], "int32")
        least = T.alloc_local([1], "int32")
        most = T.alloc_local([1], "int32")
        lane = tx % 32
        warp_row = (tx - w * 128) // 32 * 16
        for i in T.Parallel(ROWS):
            row_limit[i] = last_visible(
                q_positions, use_positions, T.min(first_token + i, end_token - 1), first_token, first_limit, length
            )
        tile_limits(
            q_positions, use_positions, first_token, T.min(first_token + ROWS, end_token) - 1, first_limit, length,
            least, most,
        )  # fmt: skip
        full_blocks = T.max(least[0] + 1, 0) // block_size
        # % if precision.scale
        row_factor = T.alloc_fragment([ROWS], "float32")
        for i in T.Parallel(ROWS):
            row_factor[i] = T.if_then_else(
                use_q_scale != 0, q_scale[T.min(first_token + i, end_token - 1), head], T.float32(1)
            )
        # % endif
        # % if precision.decoded
        for i in T.Parallel(ROWS):
            row_factor[i] = keys.whole(row_factor[i], k_scale, 0)
        # % endif
        # % if "key_scales" in plan.variants
        if not key_scales:
            if use_k_scale != 0:
                for i in T.Parallel(ROWS):
                    row_factor[i] = row_factor[i] * k_scale[0]
        # % endif
        scored = T.min(num_blocks, max_blocks)
        stage = 0
        phase = 0
        if num_blocks > 0:
            T.barrier_wait(q_full, 0)
            turn(Q_shared, (w,), tx - w * 128, 8 + w)  # % if precision.decoded
            T.barrier_wait(k_full[0], 0)
            T.wgmma_gemm(Q_shared[w, :, :], K_shared[0, :, :], S_even, transpose_B=True, clear_accum=True)
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
            T.wait_wgmma(0)
            T.barrier_arrive(k_free[even])
            # Past the last block this multiplies a stale stage and the result is dropped: the waits stay uniform.
            T.wgmma_gemm(Q_shared[w, :, :], K_shared[odd, :, :], S_odd, transpose_B=True, clear_accum=True)
            # % if "key_scales" in plan.variants
            if key_scales:
                scaled.scale_keys(S_even, key_scale, (pair * 2) % SLOTS, ROWS, block_size)
            # % endif
            block_max(S_even, max_even, row_limit, ROWS, block_size, pair * 2, full_blocks)
            stage = stage + 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
            if pair * 2 + 2 < num_blocks:
                T.barrier_wait(k_full[stage], phase)
            T.wait_wgmma(0)
            if pair * 2 + 1 < num_blocks:
                T.barrier_arrive(k_free[odd])
            T.wgmma_gemm(Q_shared[w, :, :], K_shared[stage, :, :], S_even, transpose_B=True, clear_accum=True)
            # % if "key_scales" in plan.variants
            if key_scales and pair * 2 + 1 < num_blocks:
                scaled.scale_keys(S_odd, key_scale, (pair * 2 + 1) % SLOTS, ROWS, block_size)
            # % endif
            block_max(S_odd, max_odd, row_limit, ROWS, block_size, pair * 2 + 1, full_blocks)
            # % if precision.scale
            scaled.scale_rows(max_even, row_factor, ROWS)
            scaled.scale_rows(max_odd, row_factor, ROWS)
            # % endif
            for i in T.Parallel(ROWS):
                gathered[w, i, (pair * 2) % GATHER] = max_even[i]
            for i in T.Parallel(ROWS):
                gathered[w, i, (pair * 2) % GATHER + 1] = max_odd[i]
            if (pair * 2 + 2) % GATHER == 0:
                store_rows(
                    w, warp_row, lane, gathered, pair * 2 + 2 - GATHER, scored, head, first_token, end_token, out
                )
        T.wait_wgmma(0)
        if num_blocks % GATHER != 0 and (num_blocks + 1) % GATHER != 0:
            store_rows(
                w, warp_row, lane, gathered, num_blocks // GATHER * GATHER, scored, head, first_token, end_token, out
            )
        for i in T.serial(16):
            if first_token + warp_row + i < end_token:
                for step in T.serial(T.ceildiv(max_blocks - scored, 32)):
                    if scored + step * 32 + lane < max_blocks:
                        out[head, first_token + warp_row + i, scored + step * 32 + lane] = -T.infinity("float32")

    @T.prim_func
    def main(
        idx_q: T.StridedTensor((total_q, num_index_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        q_scale: T.StridedTensor(query_scale_shape, query_scale_strides, "float32"),  # % if precision.scale
        idx_k: T.StridedTensor(key_shape, key_strides, ELEMENT),  # % if not precision.decoded
        k_scale: T.StridedTensor(scale_shape, scale_strides, "float32"),  # % if "key_scales" in plan.variants
        # % if precision.decoded
        key_bytes: keys.tensor(),
        group_scale: keys.scale(),
        global_scale: keys.of_heads(1),  # % if precision.scale.global_dtype
        # % endif
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        out: T.StridedTensor((num_index_heads, total_q, max_blocks), (out_head, out_token, 1), "float32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        use_q_scale: T.int32,  # % if precision.scale
        use_k_scale: T.int32,  # % if precision.scale
        causal: T.int32,
    ):
        with T.Kernel(num_index_heads * (total_q // TILE + num_starts), threads=table.threads) as cta_index:
            Q_shared = make_buffer(table, "queries")
            K_shared = make_buffer(table, "keys")
            gathered = make_buffer(table, "gathered")
            # % if "key_scales" in plan.variants
            key_scale = make_buffer(table, "key_scale") if key_scales else None
            scale_read = T.alloc_local([1], "float32")
            # % endif
            # % if precision.decoded
            held = index_key.allocate(keys, table, K_shared)
            stored = index_key.Stored(
                key_bytes,
                group_scale,
                global_scale,  # % if precision.scale.global_dtype
            )
            # % endif
            q_full = make_barrier(table, "q_full")
            k_full = make_barrier(table, "k_full")
            k_free = make_barrier(table, "k_free")
            request = T.alloc_local([1], "int32")
            length = T.alloc_var("int32")
            end_token = T.alloc_var("int32")
            num_blocks = T.alloc_var("int32")
            least = T.alloc_local([1], "int32")
            most = T.alloc_local([1], "int32")
            # Variables: an expression is computed wherever it is used, and these hold a division.
            head = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            tx = T.get_thread_binding()
            head = T.truncmod(cta_index, num_index_heads)
            slot = total_q // TILE + num_starts - 1 - T.truncdiv(cta_index, num_index_heads)
            last_tile_at_most(cu_seqlens_q, num_starts, TILE, slot, request)
            first_token = cu_seqlens_q[request[0]] + (slot - cu_seqlens_q[request[0]] // TILE - request[0]) * TILE
            length = 0
            end_token = total_q
            num_blocks = 0
            if request[0] < num_starts - 1:
                length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                end_token = cu_seqlens_q[request[0] + 1]
            first_limit = T.if_then_else(causal == 0, length, length - end_token + first_token)
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
                            T.tma_copy(
                                described(idx_q)[first_token + w * ROWS : first_token + w * ROWS + ROWS, head, :],
                                Q_shared[w, :, :],
                                barrier=q_full,
                            )
                        T.barrier_arrive(q_full)
                        index_key.begin(held)  # % if precision.decoded
                        for block in T.serial(num_blocks):
                            # % if precision.decoded
                            row = block * block_size
                            index_key.send(
                                keys, stored, page_table, key_row + row, length - row, held, k_full, k_free,
                                tx - CONSUMERS * 128,
                            )  # fmt: skip
                            # % else
                            # % if precision.scale
                            # Before the wait, so that the scale is there when the stage is free.
                            if key_scales:
                                scaled.read_key_scale(
                                    k_scale, page_table, key_row + block * block_size, tx % 128, block_size,
                                    pages_per_block, scale_read,
                                )  # fmt: skip
                            # % endif
                            T.barrier_wait(k_free[block % STAGES], ((block // STAGES) & 1) ^ 1)
                            load_index_block(
                                idx_k, page_table, key_row + block * block_size, K_shared, k_full, block % STAGES,
                                block_size, head_dim, pages_per_block, columns,
                            )  # fmt: skip
                            # % if precision.scale
                            if key_scales:
                                key_scale[block % SLOTS, tx % 128] = scale_read[0]
                            # % endif
                            T.barrier_arrive(k_full[block % STAGES])
                            # % endif
                        # % if precision.decoded
                        index_key.finish(keys, stored, held, k_full, k_free, tx - CONSUMERS * 128)
                        # % endif
                elif tx < 128:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    consume(
                        0, tx, Q_shared, K_shared, gathered, q_full, k_full, k_free, head, first_token, end_token,
                        first_limit, length, num_blocks, q_positions, use_positions, out,
                        q_scale, k_scale, key_scale, use_q_scale, use_k_scale,  # % if "key_scales" in plan.variants
                        q_scale, stored, None, use_q_scale, use_k_scale,  # % if precision.decoded
                    )  # fmt: skip
                else:
                    T.set_max_nreg(CONSUMER_REGISTERS, 1)
                    consume(
                        1, tx, Q_shared, K_shared, gathered, q_full, k_full, k_free, head, first_token + ROWS,
                        end_token, first_limit + ROWS, length, num_blocks, q_positions, use_positions, out,
                        q_scale, k_scale, key_scale, use_q_scale, use_k_scale,  # % if "key_scales" in plan.variants
                        q_scale, stored, None, use_q_scale, use_k_scale,  # % if precision.decoded
                    )  # fmt: skip

    return main
