"""The query side of hybrid attention: the blocks that neighbouring queries share, then the merge of the other results.

Grid: persistent CTAs, two a SM, which take the window's tiles in turn, head after head. Each may have half of the SM's
shared memory; generation and audit check for one. A tile is 64 rows: 64 // rows_per_query neighbouring queries, each
with its `group` heads in the first of rows_per_query rows (8 is the least that keeps a 128-byte swizzle atom whole;
rows past `group` hold stale data and are never stored).

# <- cta

`tile` needs no counterpart: a tile takes a stage of the ring at least and TILES is more than STAGES, so that the
producer never overwrites what is still to be read. The consumers arrive at `done` once all tiles have had their turn.

A stage of the ring holds K of a block, then the next one its V. Behind the blocks come partial results, block_size //
64 slots of all rows a stage: the rows of a query with fewer slots are not loaded, and stay out of the sum. Every tile
ends with at least one such stage, in which its rows are staged on their way out; it is free once the next tile's first
product is under way.
# % if "token_scales" in plan.variants

K and V come as bytes to k_raw and v_raw, and the producer decodes them into their stages of the ring. Nobody frees the
bytes: its threads meet (named barrier 7) before the next ones are sent for. A scale that a head shares is folded into
the softmax's (keys) and multiplies O behind the last shared block (values); those of tokens multiply rows as they are
decoded.
# % endif
# % if precision.keys.packed > 1

K and V come as bytes to k_raw and v_raw, and the producer decodes them into their stages of the ring with the scales of
their groups. Nobody frees the bytes: its threads meet (named barrier 7) before the next ones are sent for. A scale that
a head has besides is folded into the softmax's (keys) and multiplies O behind the last shared block (values).
# % endif

The next block's S is issued behind the current P V, so that one wait covers both. While a tile is merged its Q is free,
so that the next tile is on its way: the memory never waits for a tile to end, and while one CTA of a SM merges the
other one multiplies.

The maximum of a row starts as the largest LSE of its slots, so that the merge never rescales O.

Launched while the kernel before ends (programmatic dependent launch). That is the window's sparse_attention, which
itself began when everything before it was there: only its partial results are waited for, by each role before it first
reads them, and nothing is written before. Q, keys and values of a CTA's first tile are on their way meanwhile.

Infinite and NaN values of a block reach queries that do not see their rows, as 0 times infinity or NaN, and leave all
rows of a tile so in their column. Nobody looks for them beforehand: where the first row of a tile has such a number the
consumer notes it, and both roles go through their tiles once more, from the first one that was noted. There such
values are taken out of blocks that some query sees in part or not at all (msa_tiles.dsl.tilelang.hidden).

The fields of the `shared` words are those that the split_selection kernel documents.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang.hidden import find_unbounded, nan, take_out, unbounded
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.softmax import LOWEST
from msa_tiles.dsl.tilelang.stages import advance, clear_rows

ELEMENT = "bfloat16"  # <- precision.output
STAGES = 3  # <- tile.stages
PRODUCER_REGISTERS = 48  # <- tile.producer_registers
CONSUMER_REGISTERS = 208  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
ROWS = 64
TILES = 4
# Slots whose LSE are loaded at a time.
AHEAD = 8
CUT, VALID_SHIFT = 1 << 8, 9
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@declares
def cta(head_dim, block_size, group, pages_per_block, **scales):
    sides = {"producer": "producer", "readers": ["consumer"], "own": False, **scales}
    keys = key_value.parts("k", head_dim, block_size, 1, **sides)
    values = key_value.parts("v", head_dim, block_size, 1, **sides)
    loads = "what a tile consists of, its Q, K and V of each shared block, then the partial results of the rest"
    return Table(
        roles=(
            Role(
                "consumer", 4,
                "S = Q K^T, running softmax and O += P V for every shared block; then O += weight * partial for every "
                "slot of the rest, and the store of the rows",
                CONSUMER_REGISTERS,
            ),
            Role("producer", 4, f"loads {loads}", PRODUCER_REGISTERS),
        ),
        pipelines=(
            *keys.pipelines,
            *values.pipelines,
            Pipeline("tile", TILES, (threads("producer"),)),
            Pipeline("q", 1, (threads("producer"),), (threads("consumer"),), fills=("queries",)),
            Pipeline("ring", STAGES, (threads("producer"),), (threads("consumer"),), fills=("ring",)),
            Pipeline("done", 1, (threads("consumer"),)),
        ),
        buffers=(
            buffer("queries", ELEMENT, align=1024, rows=ROWS, head_dim=head_dim),
            buffer("ring", ELEMENT, align=1024, stages=STAGES, block_size=block_size, head_dim=head_dim),
            *keys.buffers,
            *values.buffers,
            buffer(
                "tiles", "int32", static=True, tiles=TILES, fields=2 + 2 * (ROWS // max(group, 8)),
                note="shared blocks, most slots of a query; of each query its slots and its last row",
            ),
            buffer("again", "int32", static=True, warps=4, note="the first place that each warp takes once more"),
        ),
        static=TILELANG,
    )  # fmt: skip


def first_again(noted):
    """The first place that a consumer warp has noted; the end of all where none has."""
    return T.min(T.min(noted[0], noted[1]), T.min(noted[2], noted[3]))


def shared_attention(
    head_dim: int,
    block_size: int,
    group: int,
    pages_per_block: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or [pages, num_kv_heads, page,
    head_dim] with pages_per_block > 0 and page_table [requests, max_pages]; shared, shared_counts, rest_counts and
    last_rows as split_selection writes them; partial_out [window, topk, num_q_heads, head_dim] and partial_lse
    [window, topk, num_q_heads] (natural logarithm) of the window's rest, of which a query's first rest_counts slots
    are read, and none with LSE -inf -> out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads], the rows
    of the window. A row that sees nothing gets out 0 and lse -inf. scale_log2 is the softmax scale times log2(e). A
    window begins at a multiple of the queries of a tile.
    """
    rows_per_query = max(group, 8)
    queries = ROWS // rows_per_query
    halves = head_dim // 64
    # Slots of partial results in a stage: one or two.
    parts = block_size // ROWS

    table = cta(
        head_dim, block_size, group, pages_per_block,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )  # fmt: skip
    total_q, num_q_heads, num_kv_heads = T.dynamic("total_q, num_q_heads, num_kv_heads")
    num_tables, max_pages = T.dynamic("num_tables, max_pages")
    table_stride = strides("table_stride")
    num_tiles, capacity, window, topk = T.dynamic("num_tiles, capacity, window, topk")
    q_token, q_head = strides("q_token, q_head")
    out_token, out_head, lse_token, lse_head = strides("out_token, out_head, lse_token, lse_head")
    # Of a tensor without gaps as well: products of its extents would be made anew in 64 bits for every slot.
    plse_token, plse_slot = strides("plse_token, plse_slot")
    # Both in the element of the partial results, with which they share the ring.
    keys, values = (
        key_value.Operand(
            name, head_dim, block_size, pages_per_block, ELEMENT,
            token_scales=token_scales,  # % if "token_scales" in plan.variants
        )
        for name in "kv"
    )  # fmt: skip

    @T.macro
    def begin(operand, stored, page_table, shared, head, tile, u, held, thread):
        """Start the way of a shared block."""
        rows = shared[head, tile, u, 1] >> VALID_SHIFT
        key_value.start(operand, stored, page_table, shared[head, tile, u, 0], head, held, 0, rows, thread)

    @T.prim_func
    def main(
        q: T.StridedTensor((total_q, num_q_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        k: keys.tensor(num_kv_heads),
        k_scale: keys.scale(num_kv_heads),  # % if precision.scale
        k_global_scale: keys.of_heads(num_kv_heads),  # % if precision.scale and precision.scale.global_dtype
        v: values.tensor(num_kv_heads),
        v_scale: values.scale(num_kv_heads),  # % if precision.scale
        v_global_scale: values.of_heads(num_kv_heads),  # % if precision.scale and precision.scale.global_dtype
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        shared: T.Tensor((num_kv_heads, num_tiles, capacity, 2), "int32"),
        shared_counts: T.Tensor((num_kv_heads, num_tiles), "int32"),
        rest_counts: T.Tensor((num_kv_heads, total_q), "int32"),
        last_rows: T.Tensor((total_q,), "int32"),
        partial_out: T.Tensor((window, topk, num_q_heads, head_dim), ELEMENT),
        partial_lse: T.StridedTensor((window, topk, num_q_heads), (plse_token, plse_slot, 1), "float32"),
        out: T.StridedTensor((total_q, num_q_heads, head_dim), (out_token, out_head, 1), ELEMENT),
        lse: T.StridedTensor((total_q, num_q_heads), (lse_token, lse_head), "float32"),
        scale_log2: T.float32,
        window_index: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=table.threads) as cta_index:
            T.annotate_min_blocks_per_sm(2)
            Q_shared = make_buffer(table, "queries")
            ring = make_buffer(table, "ring")
            K_shared = key_value.allocate(keys, table, 1, ring)
            V_shared = key_value.allocate(values, table, 1, ring)
            stored_k = key_value.Stored(
                k,  # <- tensors of operands.key_value
            )
            stored_v = key_value.Stored(
                v,  # <- tensors of operands.key_value
            )
            tile_shared = make_buffer(table, "tiles")
            tile_full = make_barrier(table, "tile_full")
            q_full = make_barrier(table, "q_full")
            q_free = make_barrier(table, "q_free")
            full = make_barrier(table, "ring_full")
            free = make_barrier(table, "ring_free")
            again_shared = make_buffer(table, "again")
            done = make_barrier(table, "done_full")
            head = T.alloc_var("int32")
            tile = T.alloc_var("int32")
            token = T.alloc_var("int32")
            num = T.alloc_var("int32")
            most = T.alloc_var("int32")
            number = T.alloc_var("int32")
            key_row = T.alloc_var("int32")
            tx = T.get_thread_binding()
            window_first = window_index * window
            window_last = T.min(window_first + window, total_q)
            tiles = T.ceildiv(window_last - window_first, queries)
            end = tiles * num_kv_heads
            # Each role counts in variables of its own: ptxas keeps one that both start from in one place for both, and
            # that is the stack where either has no register for it.
            if tx >= 128:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                at = T.alloc_local([2], "int32")
                q_phase = T.alloc_var("int32")
                place = T.alloc_var("int32")
                turn = T.alloc_var("int32")
                again = T.alloc_var("int32")
                at[0] = 0
                at[1] = 0
                q_phase = 0
                # Of the tiles of all heads; a tile that is taken again has one more turn.
                place = cta_index
                turn = 0
                again = 0
                landed_phase = T.alloc_var("int32")
                landed_phase = 0
                # Four counts a word: the producer has few registers.
                slots = T.alloc_local([queries // 4], "int32")
                while place < end:
                    head = T.truncdiv(place, tiles)
                    tile = place - head * tiles
                    token = window_first + tile * queries
                    tile = tile + T.truncdiv(window_first, queries)
                    num = shared_counts[head, tile]
                    most = 1
                    for r in T.unroll(queries):
                        number = 0
                        if token + r < window_last:
                            number = rest_counts[head, token + r]
                        most = T.max(most, number)
                        if r % 4 == 0:
                            slots[r // 4] = number
                        else:
                            slots[r // 4] = slots[r // 4] | (number << (r % 4 * 8))
                    if tx == 128:
                        tile_shared[turn % TILES, 0] = num
                        tile_shared[turn % TILES, 1] = most
                        for r in T.unroll(queries):
                            tile_shared[turn % TILES, 2 + r] = (slots[r // 4] >> (r % 4 * 8)) & 255
                            tile_shared[turn % TILES, 2 + queries + r] = last_rows[T.min(token + r, total_q - 1)]
                    T.barrier_arrive(tile_full[turn % TILES])
                    if num > 0:
                        T.barrier_wait(q_free, q_phase ^ 1)
                        for r in T.unroll(queries):
                            for half in T.unroll(halves):
                                T.tma_copy(
                                    described(q)[
                                        T.min(token + r, total_q - 1),
                                        head * group : head * group + group,
                                        half * 64 : half * 64 + 64,
                                    ],
                                    Q_shared[
                                        r * rows_per_query : r * rows_per_query + group, half * 64 : half * 64 + 64
                                    ],
                                    barrier=q_full,
                                    eviction_policy="evict_first",
                                )
                        T.barrier_arrive(q_full)
                        q_phase = q_phase ^ 1
                    if key_value.STARTS:
                        if num > 0:
                            begin(keys, stored_k, page_table, shared, head, tile, 0, K_shared, tx - 128)
                            begin(values, stored_v, page_table, shared, head, tile, 0, V_shared, tx - 128)
                    for u in T.serial(num):
                        key_row = shared[head, tile, u, 0]
                        T.barrier_wait(free[at[0]], at[1] ^ 1)
                        key_value.fill(
                            keys, stored_k, page_table, key_row, head, K_shared, full, at[0], 0, landed_phase, tx - 128
                        )
                        T.barrier_arrive(full[at[0]])
                        advance(at, STAGES)
                        if key_value.STARTS:
                            # All threads are done with the bytes.
                            T.sync_threads(7, 128)
                            if u + 1 < num:
                                begin(keys, stored_k, page_table, shared, head, tile, u + 1, K_shared, tx - 128)
                        T.barrier_wait(free[at[0]], at[1] ^ 1)
                        key_value.fill(
                            values, stored_v, page_table, key_row, head, V_shared, full, at[0], 0, landed_phase,
                            tx - 128,
                        )  # fmt: skip
                        T.barrier_arrive(full[at[0]])
                        advance(at, STAGES)
                        if key_value.STARTS:
                            T.sync_threads(7, 128)
                            if u + 1 < num:
                                begin(values, stored_v, page_table, shared, head, tile, u + 1, V_shared, tx - 128)
                            landed_phase = landed_phase ^ 1
                    if turn == 0:
                        T.pdl_sync()
                    for m in T.serial(T.ceildiv(most, parts)):
                        T.barrier_wait(free[at[0]], at[1] ^ 1)
                        for part in T.unroll(parts):
                            for r in T.unroll(queries):
                                if m * parts + part < (slots[r // 4] >> (r % 4 * 8)) & 255:
                                    for half in T.unroll(halves):
                                        T.tma_copy(
                                            partial_out[
                                                token - window_first + r,
                                                m * parts + part,
                                                head * group : head * group + group,
                                                half * 64 : half * 64 + 64,
                                            ],
                                            ring[
                                                at[0],
                                                part * ROWS + r * rows_per_query : part * ROWS
                                                + r * rows_per_query
                                                + group,
                                                half * 64 : half * 64 + 64,
                                            ],
                                            barrier=full[at[0]],
                                            eviction_policy="evict_first",
                                        )
                        T.barrier_arrive(full[at[0]])
                        advance(at, STAGES)
                    turn = turn + 1
                    place = place + num_ctas
                    if place >= end and again == 0:
                        T.barrier_wait(done, 0)
                        again = 1
                        place = first_again(again_shared)
            else:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                at = T.alloc_local([2], "int32")
                q_phase = T.alloc_var("int32")
                place = T.alloc_var("int32")
                turn = T.alloc_var("int32")
                again = T.alloc_var("int32")
                S = T.alloc_fragment([ROWS, block_size], "float32")
                P = T.alloc_fragment([ROWS, block_size], ELEMENT)
                O = T.alloc_fragment([ROWS, head_dim], "float32")
                row_max = T.alloc_fragment([ROWS], "float32")
                before = T.alloc_fragment([ROWS], "float32")
                scale = T.alloc_fragment([ROWS], "float32")
                row_sum = T.alloc_fragment([ROWS], "float32")
                block_sum = T.alloc_fragment([ROWS], "float32")
                row_last = T.alloc_fragment([ROWS], "int32")
                row_slots = T.alloc_fragment([ROWS], "int32")
                last = T.alloc_fragment([ROWS], "int32")
                word = T.alloc_var("int32")
                k_stage = T.alloc_var("int32")
                v_stage = T.alloc_var("int32")
                staged = T.alloc_var("int32")
                noted = T.alloc_var("int32")
                seeing = T.alloc_var("int32")
                first = T.alloc_local([1], "int32")
                at[0] = 0
                at[1] = 0
                q_phase = 0
                place = cta_index
                turn = 0
                again = 0
                staged = -1
                noted = end
                while place < end:
                    head = T.truncdiv(place, tiles)
                    tile = place - head * tiles
                    token = window_first + tile * queries
                    tile = tile + T.truncdiv(window_first, queries)
                    # A product that starts from zero is told of the old values all the same, and a tile without blocks
                    # has none: without this, S would hold its registers through the merge, which needs them.
                    T.fill(S, 0.0)
                    T.barrier_wait(tile_full[turn % TILES], (turn // TILES) & 1)
                    num = tile_shared[turn % TILES, 0]
                    most = tile_shared[turn % TILES, 1]
                    factor = keys.fold(scale_log2, stored_k, head)
                    if num > 0:
                        T.barrier_wait(q_full, q_phase)
                        q_phase = q_phase ^ 1
                        T.barrier_wait(full[at[0]], at[1])
                        T.wgmma_gemm(Q_shared, ring[at[0], :, :], S, transpose_B=True, clear_accum=True)
                        k_stage = at[0]
                        advance(at, STAGES)
                    # Only the thread that issued the last tile's stores waits here, and the stage is free once it
                    # arrives too.
                    if staged >= 0:
                        T.tma_store_wait(0)
                        T.barrier_arrive(free[staged])
                    for i in T.Parallel(ROWS):
                        row_last[i] = tile_shared[turn % TILES, 2 + queries + i // rows_per_query]
                        row_slots[i] = T.if_then_else(
                            i % rows_per_query < group, tile_shared[turn % TILES, 2 + i // rows_per_query], 0
                        )
                        row_max[i] = LOWEST
                    if turn == 0:
                        T.pdl_sync()
                    for s in T.serial(T.ceildiv(most, AHEAD)):
                        for u in T.unroll(AHEAD):
                            for i in T.Parallel(ROWS):
                                if s * AHEAD + u < row_slots[i]:
                                    row_max[i] = T.max(
                                        row_max[i],
                                        partial_lse[
                                            token - window_first + i // rows_per_query,
                                            s * AHEAD + u,
                                            head * group + i % rows_per_query,
                                        ],
                                    )
                    # Of scores, as S has them; factor must not be 0, which a scale of keys may be.
                    for i in T.Parallel(ROWS):
                        row_max[i] = T.max(row_max[i] * LOG2_E / factor, LOWEST)
                    T.fill(O, 0.0)
                    T.fill(row_sum, 0.0)
                    seeing = 0
                    for u in T.serial(num):
                        key_row = shared[head, tile, u, 0]
                        word = shared[head, tile, u, 1]
                        T.wait_wgmma(0)
                        key_value.weigh(keys, K_shared, S, ROWS)
                        T.barrier_arrive(free[k_stage])
                        if u == num - 1:
                            T.barrier_arrive(q_free)
                        if (word & CUT) != 0:
                            for i in T.Parallel(ROWS):
                                last[i] = T.if_then_else(
                                    ((word >> (i // rows_per_query)) & 1) != 0, row_last[i] - key_row, -1
                                )
                            for i, j in T.Parallel(ROWS, block_size):
                                S[i, j] = T.if_then_else(j <= last[i], S[i, j], -T.infinity("float32"))
                        T.copy(row_max, before)
                        T.reduce_max(S, row_max, dim=1, clear=False)
                        for i in T.Parallel(ROWS):
                            scale[i] = T.exp2((before[i] - row_max[i]) * factor)
                        for i, j in T.Parallel(ROWS, block_size):
                            S[i, j] = T.exp2(S[i, j] * factor - row_max[i] * factor)
                        T.reduce_sum(S, block_sum, dim=1)
                        for i in T.Parallel(ROWS):
                            row_sum[i] = row_sum[i] * scale[i] + block_sum[i]
                        for i, j in T.Parallel(ROWS, head_dim):
                            O[i, j] = O[i, j] * scale[i]
                        T.barrier_wait(full[at[0]], at[1])
                        key_value.weigh(values, V_shared, S, ROWS)
                        T.copy(S, P)
                        clear_rows(ring, at[0], word >> VALID_SHIFT, 8)
                        if again > 0 and (word & CUT) != 0:
                            find_unbounded(ring, at[0], tx, word >> VALID_SHIFT, first)
                            T.sync_threads(8, 128)
                            take_out(ring, at[0], tx, word >> VALID_SHIFT, 0, 1)
                            for r in T.unroll(queries):
                                if first[0] < block_size and ((word >> r) & 1) != 0:
                                    if key_row + first[0] <= tile_shared[turn % TILES, 2 + queries + r]:
                                        seeing = seeing | (1 << r)
                            T.fence_proxy_async()
                            T.sync_threads(8, 128)
                        T.wgmma_gemm(P, ring[at[0], :, :], O, clear_accum=False)
                        v_stage = at[0]
                        advance(at, STAGES)
                        if u + 1 < num:
                            T.barrier_wait(full[at[0]], at[1])
                            T.wgmma_gemm(Q_shared, ring[at[0], :, :], S, transpose_B=True, clear_accum=True)
                            k_stage = at[0]
                            advance(at, STAGES)
                            T.wait_wgmma(1)
                        else:
                            T.wait_wgmma(0)
                        T.barrier_arrive(free[v_stage])
                    # Nothing is under way any more, but the compiler only sees it here where a tile has no blocks.
                    T.wait_wgmma(0)
                    if key_value.STARTS:
                        for i, j in T.Parallel(ROWS, head_dim):
                            O[i, j] = values.fold(O[i, j], stored_v, head)
                    for m in T.serial(T.ceildiv(most, parts)):
                        if m > 0:
                            T.barrier_arrive(free[staged])
                        for i in T.Parallel(ROWS):
                            scale[i] = 0.0
                            before[i] = 0.0
                            if m * parts < row_slots[i]:
                                scale[i] = T.exp2(
                                    partial_lse[
                                        token - window_first + i // rows_per_query,
                                        m * parts,
                                        head * group + i % rows_per_query,
                                    ]
                                    * LOG2_E
                                    - row_max[i] * factor
                                )
                            if m * parts + parts - 1 < row_slots[i]:
                                before[i] = T.exp2(
                                    partial_lse[
                                        token - window_first + i // rows_per_query,
                                        m * parts + parts - 1,
                                        head * group + i % rows_per_query,
                                    ]
                                    * LOG2_E
                                    - row_max[i] * factor
                                )
                        T.barrier_wait(full[at[0]], at[1])
                        for part in T.unroll(parts):
                            if part > 0:
                                T.copy(before, scale)
                            for i in T.Parallel(ROWS):
                                row_sum[i] = row_sum[i] + scale[i]
                            # Of slots that are not there the ring may hold anything. Others may have a weight
                            # of 0, too, and NaN has to come through it.
                            for i, j in T.Parallel(ROWS, head_dim):
                                O[i, j] = O[i, j] + scale[i] * T.if_then_else(
                                    m * parts + part < row_slots[i],
                                    T.cast(ring[at[0], part * ROWS + i, j], "float32"),
                                    0.0,
                                )
                        staged = at[0]
                        advance(at, STAGES)
                    for i in T.Parallel(ROWS):
                        if token + i // rows_per_query < window_last and i % rows_per_query < group:
                            lse[token + i // rows_per_query, head * group + i % rows_per_query] = T.if_then_else(
                                row_sum[i] != 0.0,
                                (row_max[i] * factor + T.log2(row_sum[i])) * LN_2,
                                -T.infinity("float32"),
                            )
                    for i in T.Parallel(ROWS):
                        scale[i] = T.if_then_else(row_sum[i] != 0.0, 1.0 / row_sum[i], 0.0)
                    for i, j in T.Parallel(ROWS, head_dim):
                        O[i, j] = O[i, j] * scale[i]
                    T.copy(O, ring[staged, 0:ROWS, :])
                    if again > 0:
                        T.sync_threads(8, 128)
                        for i in T.serial(ROWS):
                            if ((seeing >> (i // rows_per_query)) & 1) != 0:
                                ring[staged, i, tx % head_dim] = nan()
                    T.fence_proxy_async()
                    T.sync_threads(8, 128)
                    # What reached one row where it may not be seen reached all.
                    if num > 0 and T.any_sync(unbounded(ring[staged, 0, tx % head_dim])) != 0:
                        noted = T.min(noted, place)
                    for r in T.unroll(queries):
                        if token + r < window_last:
                            for half in T.unroll(halves):
                                T.tma_copy(
                                    ring[
                                        staged,
                                        r * rows_per_query : r * rows_per_query + group,
                                        half * 64 : half * 64 + 64,
                                    ],
                                    described(out)[
                                        token + r,
                                        head * group : head * group + group,
                                        half * 64 : half * 64 + 64,
                                    ],
                                    eviction_policy="evict_first",
                                )
                    turn = turn + 1
                    place = place + num_ctas
                    if place >= end and again == 0:
                        # The same rows may be stored once more.
                        T.tma_store_wait(0, False)
                        if tx % 32 == 0:
                            again_shared[tx // 32] = noted
                        T.barrier_arrive(done)
                        T.barrier_wait(done, 0)
                        again = 1
                        place = first_again(again_shared)
                T.tma_store_wait(0)

    return main
