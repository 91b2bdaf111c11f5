"""Gradients of sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2. K and V of the task stay in shared memory, the sums of dK and dV in registers.

# <- cta

Keys lie along the rows of the products: S' = K Q^T, dP' = V dO^T, P' = exp(S' scale - lse), dV += P' dO,
dS' = P' (dP' - delta), dK += dS' Q; then dQ = dS K for a consumer's share of the columns.

P' and dS' are operands from registers. dS' goes through shared memory once more for dQ, which needs the keys of every
consumer: two buffers in turn, and `exchanged`, where all consumers meet once a tile. They arrive there only after their
dQ of the tile before, so nobody still reads the buffer that comes next. It is no named barrier, because each consumer
has a copy of the code, and tools take a barrier at two places for threads that diverge.

dQ of a tile is a partial result of its edges, stored in BF16 for every slot while the next tile's S is made; the merge
adds a query's slots in order. dK and dV go on from FP32 sums in global memory in the one task that owns the block; its
other tasks write theirs to rows behind the keys, which the merge adds in order. Windows follow each other. So no sum
depends on timing.

A tile has 64 rows: 64 // rows_per_query queries, each with its `group` heads in the first of rows_per_query rows (8 is
the least that keeps a 128-byte swizzle atom whole). The rows past `group` stay zero, and those behind a task's last
edge repeat it: both have LSE +inf, so that their P and dS are 0.

Edges and tasks are the words that msa_tiles.dsl.words describes. A task also has the row of its sums, which is the row
where the block begins for the task that owns it.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang.claims import claim_together
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.rings import next_stage
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.words import is_cut, last_column_of, query_of, slot_of, valid_rows_of

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 3  # <- tile.stages
AHEAD = 2  # <- tile.ahead
PRODUCER_REGISTERS = 40  # <- tile.producer_registers
CONSUMER_REGISTERS = 232  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
ROWS = 64
KEYS = 64
# The edges of a tile are wanted until its dQ has left, which is after its stage was given back.
EDGES = STAGES + 1
# Stands for the edge of no query: negative, and with the first key as its last, which every block has.
MISSING = -128


@declares
def cta(head_dim, block_size, group):
    consumers = block_size // KEYS
    everybody = (threads("consumers"),)
    # 64 columns of dQ at a time: where there are more consumers than that, they take turns.
    parts = max(head_dim // 64 // consumers, 1)
    return Table(
        roles=(
            Role("consumers", 4 * consumers, "a warpgroup for every 64 keys; all take every tile", CONSUMER_REGISTERS),
            Role(
                "producer",
                4,
                "claims tasks, loads K and V, gathers Q and dO, copies LSE, delta and what rows see",
                PRODUCER_REGISTERS,
            ),
        ),
        pipelines=(
            Pipeline("kv", 1, (threads("producer"),), everybody, fills=("k_tile", "v_tile")),
            Pipeline("tile", STAGES, (threads("producer"),), everybody, fills=("queries", "output_gradients")),
            Pipeline("exchanged", 1, everybody),
        ),
        buffers=(
            buffer("k_tile", ELEMENT, align=1024, block_size=block_size, head_dim=head_dim),
            buffer("v_tile", ELEMENT, align=1024, block_size=block_size, head_dim=head_dim),
            buffer("queries", ELEMENT, align=1024, stages=STAGES, rows=ROWS, head_dim=head_dim),
            buffer("output_gradients", ELEMENT, align=1024, stages=STAGES, rows=ROWS, head_dim=head_dim),
            buffer("score_gradients", ELEMENT, align=1024, turns=2, block_size=block_size, rows=ROWS),
            buffer("query_gradients", ELEMENT, align=1024, consumers=consumers, rows=ROWS, columns=parts * 64),
            buffer("rows", "float32", static=True, stages=STAGES, fields=2, rows=ROWS, note="LSE and delta"),
            buffer("edges", "int32", static=True, tiles=STAGES + 1, queries=ROWS // max(group, 8)),
            buffer("task", "int32", static=True, fields=2),
            buffer("claim", "int32", static=True, turns=2, fields=2),
        ),
        static=TILELANG,
    )


def sparse_attention_backward(head_dim: int, block_size: int, group: int):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    The kernel takes q and dout [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], rows
    [total_q, num_q_heads, 2] (LSE times log2(e), delta) and the window's schedule. It writes partial_dq [window, topk,
    num_q_heads, head_dim] and marks [window, num_kv_heads, topk] = window_index + 1 for every edge, adds to
    sums [2, num_kv_heads, num_sums, head_dim] (dK without the softmax scale, dV), of which the first total_k rows are
    those of the keys. scale is the softmax scale, scale_log2 that times log2(e).
    """
    consumers = block_size // KEYS
    rows_per_query = max(group, 8)
    queries = ROWS // rows_per_query
    halves = head_dim // 64
    # A consumer makes its share of the columns of dQ, 64 at a time: one swizzle atom. Two take turns at a single one.
    in_turns = consumers > halves
    parts = 1 if in_turns else halves // consumers
    share = 0 if in_turns else parts

    table = cta(head_dim, block_size, group)
    total_q, total_k, num_q_heads, num_kv_heads = T.dynamic("total_q, total_k, num_q_heads, num_kv_heads")
    num_windows, window, topk, num_edges = T.dynamic("num_windows, window, topk, num_edges")
    num_tasks, num_sums = T.dynamic("num_tasks, num_sums")
    q_token, q_head, dout_token, dout_head = strides("q_token, q_head, dout_token, dout_head")
    k_token, k_head, v_token, v_head = strides("k_token, k_head, v_token, v_head")

    @T.macro
    def store(w, tile, dQ_shared, edge_shared, partial_dq, head):
        """Send a tile's dQ on its way, if this consumer made it."""
        if not in_turns or (tile & 1) == w:
            T.fence_proxy_async()
            T.sync_threads(2 + w, 128)
            for r in T.unroll(queries):
                edge = edge_shared[tile % EDGES, r]
                if edge >= 0:
                    for part in T.unroll(parts):
                        T.tma_copy(
                            dQ_shared[w, r * rows_per_query : r * rows_per_query + group, part * 64 : part * 64 + 64],
                            partial_dq[
                                query_of(edge),
                                slot_of(edge),
                                head * group : head * group + group,
                                (w * share + part) * 64 : (w * share + part) * 64 + 64,
                            ],
                            eviction_policy="evict_first",
                        )

    @T.macro
    def consume(
        w, Q_shared, dO_shared, K_shared, V_shared, dS_shared, dQ_shared, row_shared, edge_shared, task_shared,
        kv_full, kv_free, full, free, exchanged, tasks, partial_dq, sums, scale, scale_log2, window_index,
    ):  # fmt: skip
        S = T.alloc_fragment([KEYS, ROWS], "float32")
        dP = T.alloc_fragment([KEYS, ROWS], "float32")
        P = T.alloc_fragment([KEYS, ROWS], ELEMENT)
        dS = T.alloc_fragment([KEYS, ROWS], ELEMENT)
        dQ = T.alloc_fragment([ROWS, 64], "float32")
        dK = T.alloc_fragment([KEYS, head_dim], "float32")
        dV = T.alloc_fragment([KEYS, head_dim], "float32")
        slot = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        tile = T.alloc_var("int32")
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        task = T.alloc_var("int32")
        head = T.alloc_var("int32")
        slot = 0
        phase = 0
        tile = 0
        turn = 0
        running = 1
        while running > 0:
            T.barrier_wait(kv_full, turn & 1)
            task = task_shared[0]
            head = task_shared[1]
            if task < 0:
                running = 0
            else:
                key_row = tasks[window_index, head, task, 0]
                tiles = T.ceildiv(tasks[window_index, head, task, 2], queries)
                extent = tasks[window_index, head, task, 3]
                sum_row = tasks[window_index, head, task, 4]
                if valid_rows_of(extent) < block_size:
                    # Rows past the request's end may hold NaN, and 0 * NaN would reach dQ.
                    for i, j in T.Parallel(KEYS, head_dim):
                        if w * KEYS + i >= valid_rows_of(extent):
                            K_shared[w * KEYS + i, j] = 0
                    T.fence_proxy_async()
                    T.sync_threads(2 + w, 128)
                if sum_row == key_row:
                    # Nothing is stored in between, so that all loads are in flight at once.
                    for i, j in T.Parallel(KEYS, head_dim):
                        dK[i, j] = T.if_then_else(
                            w * KEYS + i < valid_rows_of(extent), sums[0, head, sum_row + w * KEYS + i, j], 0.0
                        )
                    for i, j in T.Parallel(KEYS, head_dim):
                        dV[i, j] = T.if_then_else(
                            w * KEYS + i < valid_rows_of(extent), sums[1, head, sum_row + w * KEYS + i, j], 0.0
                        )
                else:
                    T.clear(dK)
                    T.clear(dV)
                for round in T.serial(tiles):
                    T.barrier_wait(full[slot], phase)
                    T.wgmma_gemm(
                        K_shared[w * KEYS : (w + 1) * KEYS, :],
                        Q_shared[slot, :, :],
                        S,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    # dQ of the tile before leaves while S is made.
                    if round > 0:
                        store(w, tile - 1, dQ_shared, edge_shared, partial_dq, head)
                    T.wgmma_gemm(
                        V_shared[w * KEYS : (w + 1) * KEYS, :],
                        dO_shared[slot, :, :],
                        dP,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    T.wait_wgmma(1)
                    for i, j in T.Parallel(KEYS, ROWS):
                        S[i, j] = T.exp2(S[i, j] * scale_log2 - row_shared[slot, 0, j])
                    if is_cut(extent) != 0:
                        for i, j in T.Parallel(KEYS, ROWS):
                            S[i, j] = T.if_then_else(
                                w * KEYS + i <= last_column_of(edge_shared[tile % EDGES, j // rows_per_query]),
                                S[i, j],
                                0.0,
                            )
                    T.copy(S, P)
                    # The rounded P once more for dS: half the registers of S, while the product below reads its own.
                    T.copy(P, dS)
                    T.wgmma_gemm(P, dO_shared[slot, :, :], dV, clear_accum=False)
                    T.wait_wgmma(1)
                    for i, j in T.Parallel(KEYS, ROWS):
                        dP[i, j] = T.cast(dS[i, j], "float32") * (dP[i, j] - row_shared[slot, 1, j])
                    if is_cut(extent) != 0:
                        # Not the product of P = 0: values past the request's end may be NaN.
                        for i, j in T.Parallel(KEYS, ROWS):
                            dP[i, j] = T.if_then_else(
                                w * KEYS + i <= last_column_of(edge_shared[tile % EDGES, j // rows_per_query]),
                                dP[i, j],
                                0.0,
                            )
                    T.copy(dP, dS)
                    T.wgmma_gemm(dS, Q_shared[slot, :, :], dK, clear_accum=False)
                    T.copy(dS, dS_shared[tile & 1, w * KEYS : (w + 1) * KEYS, :])
                    T.fence_proxy_async()
                    # Only the thread that issued the stores waits, and arrives when they are over.
                    T.tma_store_wait(0)
                    T.barrier_arrive(exchanged)
                    T.barrier_wait(exchanged, tile & 1)
                    if not in_turns or (tile & 1) == w:
                        for part in T.unroll(parts):
                            column = (w * share + part) * 64
                            T.wgmma_gemm(
                                dS_shared[tile & 1, :, :],
                                K_shared[:, column : column + 64],
                                dQ,
                                transpose_A=True,
                                clear_accum=True,
                            )
                            T.wait_wgmma(0)
                            if part + 1 == parts:
                                T.barrier_arrive(free[slot])
                            for i, j in T.Parallel(ROWS, 64):
                                dQ_shared[w, i, part * 64 + j] = dQ[i, j] * scale
                    else:
                        T.wait_wgmma(0)
                        T.barrier_arrive(free[slot])
                    tile = tile + 1
                    next_stage(slot, phase, STAGES)
                T.barrier_arrive(kv_free)
                store(w, tile - 1, dQ_shared, edge_shared, partial_dq, head)
                for i, j in T.Parallel(KEYS, head_dim):
                    if w * KEYS + i < valid_rows_of(extent):
                        sums[0, head, sum_row + w * KEYS + i, j] = dK[i, j]
                        sums[1, head, sum_row + w * KEYS + i, j] = dV[i, j]
                turn = turn + 1
        T.tma_store_wait(0)

    @T.prim_func
    def main(
        q: T.StridedTensor((total_q, num_q_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        dout: T.StridedTensor((total_q, num_q_heads, head_dim), (dout_token, dout_head, 1), ELEMENT),
        k: T.StridedTensor((total_k, num_kv_heads, head_dim), (k_token, k_head, 1), ELEMENT),
        v: T.StridedTensor((total_k, num_kv_heads, head_dim), (v_token, v_head, 1), ELEMENT),
        rows: T.Tensor((total_q, num_q_heads, 2), "float32"),
        edges: T.Tensor((num_windows, num_kv_heads, num_edges), "int32"),
        tasks: T.Tensor((num_windows, num_kv_heads, num_tasks, 5), "int32"),
        counts: T.Tensor((num_windows, num_kv_heads), "int32"),
        claims: T.Tensor((num_windows,), "int32"),
        partial_dq: T.Tensor((window, topk, num_q_heads, head_dim), ELEMENT),
        marks: T.Tensor((window, num_kv_heads, topk), "int32"),
        sums: T.Tensor((2, num_kv_heads, num_sums, head_dim), "float32"),
        scale: T.float32,
        scale_log2: T.float32,
        window_index: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=table.threads):
            K_shared = make_buffer(table, "k_tile")
            V_shared = make_buffer(table, "v_tile")
            Q_shared = make_buffer(table, "queries")
            dO_shared = make_buffer(table, "output_gradients")
            dS_shared = make_buffer(table, "score_gradients")
            dQ_shared = make_buffer(table, "query_gradients")
            row_shared = make_buffer(table, "rows")
            edge_shared = make_buffer(table, "edges")
            task_shared = make_buffer(table, "task")
            claim_shared = make_buffer(table, "claim")
            kv_full = make_barrier(table, "kv_full")
            kv_free = make_barrier(table, "kv_free")
            full = make_barrier(table, "tile_full")
            free = make_barrier(table, "tile_free")
            exchanged = make_barrier(table, "exchanged_full")
            tx = T.get_thread_binding()
            lane = tx - consumers * 128
            if tx >= consumers * 128:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                turn = T.alloc_var("int32")
                running = T.alloc_var("int32")
                claim = T.alloc_var("int32")
                task = T.alloc_var("int32")
                head = T.alloc_var("int32")
                slot = T.alloc_var("int32")
                phase = T.alloc_var("int32")
                edge = T.alloc_var("int32")
                number = T.alloc_var("int32")
                if group < rows_per_query:
                    # No box ever reaches these rows, and what they hold is multiplied.
                    for stage in T.unroll(STAGES):
                        for i, j in T.Parallel(ROWS, head_dim):
                            if i % rows_per_query >= group:
                                Q_shared[stage, i, j] = 0
                                dO_shared[stage, i, j] = 0
                    T.fence_proxy_async()
                slot = 0
                number = 0
                phase = 1
                turn = 0
                running = 1
                while running > 0:
                    claim_together(
                        lane, claims, counts, window_index, num_kv_heads, 0, claim_shared, turn, 7, claim, head,
                    )  # fmt: skip
                    task = claim
                    if claim < 0:
                        running = 0
                        task = 0
                    key_row = tasks[window_index, head, task, 0]
                    first_edge = tasks[window_index, head, task, 1]
                    num = tasks[window_index, head, task, 2] * running
                    tiles = T.ceildiv(num, queries)
                    for tile in T.serial(tiles + 1):
                        if tile == T.min(tiles, AHEAD):
                            T.barrier_wait(kv_free, (turn & 1) ^ 1)
                            if lane == 0:
                                task_shared[0] = claim
                                task_shared[1] = head
                            if running > 0:
                                T.tma_copy(
                                    described(k)[key_row : key_row + block_size, head, :], K_shared, barrier=kv_full
                                )
                                T.tma_copy(
                                    described(v)[key_row : key_row + block_size, head, :], V_shared, barrier=kv_full
                                )
                            T.barrier_arrive(kv_full)
                        if tile < tiles:
                            T.barrier_wait(free[slot], phase)
                            for r in T.unroll(queries):
                                edge = edges[window_index, head, first_edge + T.min(tile * queries + r, num - 1)]
                                for half in T.unroll(halves):
                                    T.tma_copy(
                                        described(q)[
                                            window_index * window + query_of(edge),
                                            head * group : head * group + group,
                                            half * 64 : half * 64 + 64,
                                        ],
                                        Q_shared[
                                            slot,
                                            r * rows_per_query : r * rows_per_query + group,
                                            half * 64 : half * 64 + 64,
                                        ],
                                        barrier=full[slot],
                                    )
                                    T.tma_copy(
                                        described(dout)[
                                            window_index * window + query_of(edge),
                                            head * group : head * group + group,
                                            half * 64 : half * 64 + 64,
                                        ],
                                        dO_shared[
                                            slot,
                                            r * rows_per_query : r * rows_per_query + group,
                                            half * 64 : half * 64 + 64,
                                        ],
                                        barrier=full[slot],
                                    )
                            # One half of the threads copies LSE and edges, the other delta.
                            place = tile * queries + lane % ROWS // rows_per_query
                            edge = MISSING
                            if place < num:
                                edge = edges[window_index, head, first_edge + place]
                            if edge >= 0 and lane % rows_per_query < group:
                                row_shared[slot, lane // ROWS, lane % ROWS] = rows[
                                    window_index * window + query_of(edge),
                                    head * group + lane % rows_per_query,
                                    lane // ROWS,
                                ]
                            else:
                                row_shared[slot, lane // ROWS, lane % ROWS] = T.if_then_else(
                                    lane < ROWS, T.infinity("float32"), 0.0
                                )
                            if lane % rows_per_query == 0 and lane < ROWS:
                                edge_shared[number % EDGES, lane // rows_per_query] = edge
                                if edge >= 0:
                                    marks[query_of(edge), head, slot_of(edge)] = window_index + 1
                            number = number + 1
                            T.barrier_arrive(full[slot])
                            next_stage(slot, phase, STAGES)
                    turn = turn + 1
            elif tx < 128:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                consume(
                    0, Q_shared, dO_shared, K_shared, V_shared, dS_shared, dQ_shared, row_shared, edge_shared,
                    task_shared, kv_full, kv_free, full, free, exchanged, tasks, partial_dq, sums, scale, scale_log2,
                    window_index,
                )  # fmt: skip
            elif consumers > 1:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                consume(
                    1, Q_shared, dO_shared, K_shared, V_shared, dS_shared, dQ_shared, row_shared, edge_shared,
                    task_shared, kv_full, kv_free, full, free, exchanged, tasks, partial_dq, sums, scale, scale_log2,
                    window_index,
                )  # fmt: skip

    return main
