"""Indexer scores with block max-pool for few queries per request: the keys are split over all CTAs.

Grid: num_ctas CTAs. The unit of work is one KV block for one query tile; the units of all requests stand in one list,
request after request, tile after tile, block after block, and every CTA takes a run of it, equal to within one unit,
whatever the lengths are. A tile is ROWS // num_index_heads consecutive queries of a request with all their index heads.

# <- cta

The keys are read once from memory (once for each tile of a request from L2), and that is the floor: the tensor cores
work on 64 rows however few of them hold a query.
# % if precision.decoded

Keys come as bytes to k_raw, and the producer decodes them. Nobody frees the bytes: its threads meet (named barrier 7)
before the next ones are sent for. Columns of keys and queries stand in the order that decoding has.
# % endif
# % if precision.query.element != precision.multiply
Queries of e4m3 become bfloat16, exactly, as their tile is laid down.
# % endif
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang import scaled  # % if precision.scale
from msa_tiles.dsl.tilelang.keys import box_columns, index_keys, load_index_block  # % if not precision.decoded
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.operands import index_nvfp4 as index_key  # <- operands.index_key  # % if precision.decoded
from msa_tiles.dsl.tilelang.scores import block_max
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.varlen import key_length, last_visible

ELEMENT = "bfloat16"  # <- precision.query.element
WIDE = "bfloat16"  # <- precision.multiply  # % if precision.query.element != precision.multiply
STAGES = 2  # <- tile.stages
AHEAD = 3  # <- tile.ahead  # % if precision.decoded
BATCH = 4  # <- tile.batch
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
ROWS = 64


@declares
def cta(head_dim, block_size, pages_per_block, key_scales=0):
    # % if precision.decoded
    keys = index_key.parts("k", head_dim, block_size, AHEAD, producer="producer")
    # % else
    scale = buffer("key_scale", "float32", slots=2 * STAGES, keys=128, note="twice the ring")
    # % endif
    return Table(
        roles=(
            Role("consumer", 4, "loads the rows of a tile, S = Q K^T one block at a time, row maxima, stores"),
            Role("producer", 4, "streams the index keys, one block a stage"),  # % if not precision.decoded
            Role("producer", 4, "streams the index keys and decodes them, one block a stage"),  # % if precision.decoded
        ),
        pipelines=(
            *keys.pipelines,  # % if precision.decoded
            Pipeline("k", STAGES, (threads("producer"),), (threads("consumer"),)),  # % if precision.decoded
            # % if not precision.decoded
            Pipeline("k", STAGES, (threads("producer"),), (threads("consumer"),), fills=("keys",)),
            # % endif
        ),
        buffers=(
            # % if precision.query.element == precision.multiply
            buffer("queries", ELEMENT, align=1024, rows=ROWS, head_dim=head_dim),
            buffer("keys", ELEMENT, align=1024, stages=STAGES, block_size=block_size, head_dim=head_dim),
            # % else
            buffer("queries", WIDE, align=1024, rows=ROWS, head_dim=head_dim),
            buffer("keys", WIDE, align=1024, stages=STAGES, block_size=block_size, head_dim=head_dim),
            # % endif
            *((scale,) if key_scales else ()),  # % if not precision.decoded
            *keys.buffers,  # % if precision.decoded
        ),
        static=TILELANG,
    )  # fmt: skip


def decode_score(
    head_dim: int,
    block_size: int,
    pages_per_block: int,
    key_scales: int,  # % if "key_scales" in plan.variants
):
    """Build the kernel for one index dim, block size and page size.

    idx_q [total_q, num_index_heads, head_dim] with at most ROWS heads, idx_k [total_k, head_dim], or
    [pages, page, head_dim] with pages_per_block > 0 and page_table [requests, max_pages] -> out [num_index_heads,
    total_q, max_blocks] float32 with any strides on heads and tokens. Written are the blocks that hold keys of the
    query's request: the largest product of the block's visible keys, -inf for a block without one. The columns behind
    them, and the rows of no request, are left as they are.
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
    num_starts, num_key_starts, num_requests = T.dynamic("num_starts, num_key_starts, num_requests")
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
    def measure(cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, request, tile_queries, length, tiles, blocks):
        """length[0], tiles[0] and blocks[0] of a request."""
        length[0] = key_length(cu_seqlens_k, seqused_k, use_seqused, request)
        tiles[0] = T.truncdiv(cu_seqlens_q[request + 1] - cu_seqlens_q[request] + tile_queries - 1, tile_queries)
        blocks[0] = T.min((T.max(length[0], 0) + block_size - 1) // block_size, max_blocks)

    @T.macro
    def advance(
        cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, tile_queries, left, request, tile, length, tiles, blocks
    ):
        """The next tile; where a request has no more, the first one of the next request that has units."""
        tile[0] = tile[0] + 1
        if left > 0 and tile[0] == tiles[0]:
            tile[0] = 0
            tiles[0] = 0
            while tiles[0] * blocks[0] == 0:
                request[0] = request[0] + 1
                measure(
                    cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, request[0], tile_queries, length, tiles, blocks
                )

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
        cu_seqlens_k: T.Tensor((num_key_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        out: T.StridedTensor((num_index_heads, total_q, max_blocks), (out_head, out_token, 1), "float32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        use_q_scale: T.int32,  # % if precision.scale
        use_k_scale: T.int32,  # % if precision.scale
        causal: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=table.threads) as cta_index:
            Q_shared = make_buffer(table, "queries")
            K_shared = make_buffer(table, "keys")
            # % if precision.decoded
            held = index_key.allocate(keys, table, K_shared)
            stored = index_key.Stored(
                key_bytes,
                group_scale,
                global_scale,  # % if precision.scale.global_dtype
            )
            # % endif
            # % if "key_scales" in plan.variants
            if key_scales:
                key_scale = make_buffer(table, "key_scale")
            scale_read = T.alloc_local([1], "float32")
            # % endif
            k_full = make_barrier(table, "k_full")
            k_free = make_barrier(table, "k_free")
            length = T.alloc_local([1], "int32")
            tiles = T.alloc_local([1], "int32")
            blocks = T.alloc_local([1], "int32")
            request = T.alloc_local([1], "int32")
            tile = T.alloc_local([1], "int32")
            tile_queries = T.alloc_var("int32")
            total = T.alloc_var("int32")
            skip = T.alloc_var("int32")
            left = T.alloc_var("int32")
            taken = T.alloc_var("int32")
            first_block = T.alloc_var("int32")
            stage = T.alloc_var("int32")
            phase = T.alloc_var("int32")
            tx = T.get_thread_binding()
            tile_queries = T.truncdiv(ROWS, num_index_heads)
            T.pdl_sync()
            T.pdl_trigger()
            total = 0
            for b in T.serial(num_starts - 1):
                measure(cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, b, tile_queries, length, tiles, blocks)
                total = total + tiles[0] * blocks[0]
            # This CTA's run: `left` units from unit `skip` on.
            left = T.truncdiv(total, num_ctas) + T.if_then_else(cta_index < T.truncmod(total, num_ctas), 1, 0)
            skip = cta_index * T.truncdiv(total, num_ctas) + T.min(cta_index, T.truncmod(total, num_ctas))
            request[0] = 0
            tile[0] = 0
            first_block = 0
            stage = 0
            phase = 0
            if left > 0:
                measure(cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, 0, tile_queries, length, tiles, blocks)
                while skip >= tiles[0] * blocks[0]:
                    skip = skip - tiles[0] * blocks[0]
                    request[0] = request[0] + 1
                    measure(
                        cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, request[0], tile_queries, length, tiles,
                        blocks,
                    )  # fmt: skip
                tile[0] = T.truncdiv(skip, blocks[0])
                first_block = T.truncmod(skip, blocks[0])
            if tx >= 128:
                index_key.begin(held)  # % if precision.decoded
                while left > 0:
                    taken = T.min(left, blocks[0] - first_block)
                    if pages_per_block > 0:
                        key_row = request[0] * max_pages * block_size
                    else:
                        key_row = cu_seqlens_k[request[0]]
                    for i in T.serial(taken):
                        # % if precision.decoded
                        row = (first_block + i) * block_size
                        index_key.send(
                            keys, stored, page_table, key_row + row, length[0] - row, held, k_full, k_free, tx - 128
                        )
                        # % else
                        # % if precision.scale
                        # Before the wait, so that the scale is there when the stage is free.
                        if key_scales:
                            scaled.read_key_scale(
                                k_scale, page_table, key_row + (first_block + i) * block_size, tx % 128, block_size,
                                pages_per_block, scale_read,
                            )  # fmt: skip
                        # % endif
                        T.barrier_wait(k_free[stage], phase ^ 1)
                        load_index_block(
                            idx_k, page_table, key_row + (first_block + i) * block_size, K_shared, k_full, stage,
                            block_size, head_dim, pages_per_block, columns,
                        )  # fmt: skip
                        # % if precision.scale
                        if key_scales:
                            key_scale[phase * STAGES + stage, tx % 128] = scale_read[0]
                        # % endif
                        T.barrier_arrive(k_full[stage])
                        stage = stage + 1
                        if stage == STAGES:
                            stage = 0
                            phase = phase ^ 1
                        # % endif
                    left = left - taken
                    first_block = 0
                    advance(
                        cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, tile_queries, left, request, tile, length,
                        tiles, blocks,
                    )  # fmt: skip
                index_key.finish(keys, stored, held, k_full, k_free, tx - 128)  # % if precision.decoded
            else:
                S = T.alloc_fragment([ROWS, block_size], "float32")
                row_max = T.alloc_fragment([ROWS], "float32")
                row_limit = T.alloc_fragment([ROWS], "int32")
                row_head = T.alloc_fragment([ROWS], "int32")
                row_token = T.alloc_fragment([ROWS], "int32")
                # % if precision.scale
                row_factor = T.alloc_fragment([ROWS], "float32")
                slot = T.alloc_var("int32")  # % if "key_scales" in plan.variants
                # % endif
                rows = T.alloc_var("int32")
                got = T.alloc_local([BATCH], ELEMENT)
                # Zeros for rows that never hold a query: products with them cost the least power, and so the memory's
                # clock stays up.
                for i in T.serial(ROWS * head_dim // 128):
                    Q_shared[(i * 128 + tx) // head_dim, tx % head_dim] = 0
                while left > 0:
                    taken = T.min(left, blocks[0] - first_block)
                    end_token = cu_seqlens_q[request[0] + 1]
                    first_token = cu_seqlens_q[request[0]] + tile[0] * tile_queries
                    rows = T.min(end_token - first_token, tile_queries) * num_index_heads
                    # Until every warp has waited for its last product, the rows of the tile before are read.
                    T.sync_threads(8, 128)
                    # Loads first, at clamped places, so that a batch of them is in flight.
                    for batch in T.serial(T.ceildiv(rows * head_dim, 128 * BATCH)):
                        for u in T.unroll(BATCH):
                            row = T.min(((batch * BATCH + u) * 128 + tx) // head_dim, rows - 1)
                            got[u] = idx_q[
                                first_token + T.truncdiv(row, num_index_heads), T.truncmod(row, num_index_heads),
                                tx % head_dim,
                            ]  # fmt: skip
                        for u in T.unroll(BATCH):
                            if ((batch * BATCH + u) * 128 + tx) // head_dim < ROWS:
                                # % if precision.decoded
                                place = index_key.column(tx % head_dim)
                                # % if precision.query.element == precision.multiply
                                Q_shared[((batch * BATCH + u) * 128 + tx) // head_dim, place] = got[u]
                                # % else
                                Q_shared[((batch * BATCH + u) * 128 + tx) // head_dim, place] = T.cast(
                                    T.cast(got[u], "float32"), WIDE
                                )
                                # % endif
                                # % else
                                Q_shared[((batch * BATCH + u) * 128 + tx) // head_dim, tx % head_dim] = got[u]
                                # % endif
                    T.fence_proxy_async()
                    T.sync_threads(8, 128)
                    for i in T.Parallel(ROWS):
                        row_head[i] = T.truncmod(i, num_index_heads)
                        row_token[i] = T.min(first_token + T.truncdiv(i, num_index_heads), end_token - 1)
                    for i in T.Parallel(ROWS):
                        row_limit[i] = T.if_then_else(
                            causal == 0,
                            length[0] - 1,
                            last_visible(q_positions, use_positions, row_token[i], end_token, length[0], length[0]),
                        )
                    # % if precision.scale
                    for i in T.Parallel(ROWS):
                        row_factor[i] = T.if_then_else(
                            use_q_scale != 0, q_scale[row_token[i], row_head[i]], T.float32(1)
                        )
                    # % endif
                    # % if precision.decoded
                    for i in T.Parallel(ROWS):
                        row_factor[i] = keys.whole(row_factor[i], stored, 0)
                    # % endif
                    # % if "key_scales" in plan.variants
                    if not key_scales:
                        if use_k_scale != 0:
                            for i in T.Parallel(ROWS):
                                row_factor[i] = row_factor[i] * k_scale[0]
                    # % endif
                    for i in T.serial(taken):
                        T.barrier_wait(k_full[stage], phase)
                        T.wgmma_gemm(Q_shared, K_shared[stage, :, :], S, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        T.barrier_arrive(k_free[stage])
                        slot = phase * STAGES + stage  # % if "key_scales" in plan.variants
                        stage = stage + 1
                        if stage == STAGES:
                            stage = 0
                            phase = phase ^ 1
                        T.fill(row_max, -T.infinity("float32"))
                        # % if "key_scales" in plan.variants
                        if key_scales:
                            scaled.scale_keys(S, key_scale, slot, ROWS, block_size)
                        # % endif
                        block_max(S, row_max, row_limit, ROWS, block_size, first_block + i, 0)
                        scaled.scale_rows(row_max, row_factor, ROWS)  # % if precision.scale
                        for r in T.Parallel(ROWS):
                            if r < rows:
                                out[row_head[r], row_token[r], first_block + i] = row_max[r]
                    left = left - taken
                    first_block = 0
                    advance(
                        cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, tile_queries, left, request, tile, length,
                        tiles, blocks,
                    )  # fmt: skip

    return main
