"""KV-outer index KL over one query window: loss and partial gradients of the index branch from one pass of the scores.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2. Everything is transposed, keys along the rows of an accumulator: consumer w owns the keys 64 w to
64 w + 63 of the block, with K in registers.

Edges are taken EDGES at a time, a chunk, in tiles of 64 query rows: 64 // rows_per_query queries, each with its `group`
heads in the first of rows_per_query rows (8 is the least that keeps a 128-byte swizzle atom whole; rows past `group`
hold stale data, and are left out of the sum). Of a tile, S = K Q^T and exp2 give the heads' probabilities in BF16; a
product with ones, which says whose row is whose, adds those of a query to its column of the teacher P [keys, edges].
Of a chunk, the index scores idx_k idx_q^T give the student Q, in the same layout; then with dS = weight (Q - P) in BF16

  d_idx_k [keys, index_dim] += dS idx_q          kept in registers until the task ends
  d_idx_q^T [index_dim, edges] = idx_k^T dS      stored for every edge; 64 rows of it are one consumer's

The second needs all keys of dS, which the consumers exchange through shared memory, two buffers in turn. It is made a
chunk later, so that no consumer waits for the other: while one multiplies, the other takes exponentials. Before the
products of a chunk's end, the first S of the next chunk is on its way.

# <- cta

A consumer passes `exchanged` before it writes the other buffer of dS, so that the products that read that one are over.
K is free as soon as it is in registers, so that the next task's K is loaded during this one; idx_k is loaded after the
first chunk's tiles, and needed behind them.

Edges and tasks are the words that msa_tiles.dsl.words describes.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang.claims import claim_together
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.packing import high_half, low_half
from msa_tiles.dsl.tilelang.rings import next_stage
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.words import last_column_of, query_of, slot_of, valid_rows_of

ELEMENT = "bfloat16"  # <- precision.multiply
STAGES = 6  # <- tile.stages
EDGES = 16  # <- tile.edges
CHUNKS = 3  # <- tile.chunks
PRODUCER_REGISTERS = 56  # <- tile.producer_registers
CONSUMER_REGISTERS = 224  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
ROWS = 64
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@declares
def cta(head_dim, index_dim, block_size, group, prefix):
    consumers = block_size // 64
    halves = index_dim // 64
    queries = ROWS // max(group, 8)
    everybody = (threads("consumers"),)
    return Table(
        roles=(
            Role("consumers", 4 * consumers, "a warpgroup for every 64 keys; all take every tile", CONSUMER_REGISTERS),
            Role("producer", 4, "claims tasks, loads K and idx_k, gathers the queries", PRODUCER_REGISTERS),
        ),
        pipelines=(
            Pipeline("k", 1, (threads("producer"),), everybody, fills=("k_tile",)),
            Pipeline("keys", 1, (threads("producer"),), everybody, fills=("idx_k_tile",)),
            Pipeline("q", STAGES, (threads("producer"),), everybody, fills=("queries",)),
            Pipeline("chunk", CHUNKS, (threads("producer"),), everybody),
            Pipeline("exchanged", 2, everybody),
        ),
        buffers=(
            buffer("k_tile", ELEMENT, align=1024, consumers=consumers, rows=ROWS, head_dim=head_dim),
            buffer("idx_k_tile", ELEMENT, align=1024, halves=halves * consumers, rows=ROWS, columns=64),
            buffer("queries", ELEMENT, align=1024, stages=STAGES, rows=ROWS, head_dim=head_dim),
            buffer("index_queries", ELEMENT, align=1024, chunks=CHUNKS * halves, edges=EDGES, columns=64),
            buffer("ones", ELEMENT, align=1024, tiles=EDGES // queries, edges=EDGES, rows=ROWS),
            buffer("score_gradients", ELEMENT, align=1024, turns=2 * consumers, edges=EDGES, rows=ROWS),
            buffer("edges", "int32", static=True, chunks=CHUNKS, edges=EDGES),
            buffer("lse", "float32", static=True, chunks=CHUNKS, rows=EDGES * max(group, 8)),
            buffer("index_lse", "float32", static=True, chunks=CHUNKS, edges=EDGES),
            buffer("weights", "float32", static=True, chunks=CHUNKS, edges=EDGES),
            buffer("task", "int32", static=True, fields=2),
            buffer("claim", "int32", static=True, turns=2, fields=2),
        ),
        static=TILELANG,
    )


def index_kl(head_dim: int, index_dim: int, block_size: int, group: int, prefix: int):
    """Build the kernel for one head dim, index dim, block size and number of query heads per KV head.

    q [total_q, num_q_heads, head_dim], k [total_k, num_kv_heads, head_dim], lse [total_q, num_q_heads] and index_lse
    [total_q, num_kv_heads] (natural logarithms), idx_q [total_q, num_kv_heads, index_dim], idx_k [total_k, index_dim],
    weights [total_q], the window's schedule -> losses [num_kv_heads, num_tasks, block_size], to which every task adds
    what its keys give, and with `gradients`, both times `factor`, partial_dq [window, topk, num_kv_heads, index_dim] of
    every edge, with present [window, topk, num_kv_heads] set to 1, and partial_dk [num_kv_heads, num_tasks,
    block_size, index_dim] of every task. With prefix all KV heads share one schedule, that of a head 0. scale_log2 and
    index_scale_log2 are the scales times log2(e).
    """
    rows_per_query = max(group, 8)
    queries = ROWS // rows_per_query
    tiles_per_chunk = EDGES // queries
    consumers = block_size // ROWS
    halves = head_dim // 64
    index_halves = index_dim // 64
    log2_group = group.bit_length() - 1
    # Where there is no second consumer, its registers are left: addresses of 64 bits take more than 56.
    producer_registers = PRODUCER_REGISTERS * (3 - consumers)

    table = cta(head_dim, index_dim, block_size, group, prefix)
    total_q, total_k, num_q_heads, num_kv_heads = T.dynamic("total_q, total_k, num_q_heads, num_kv_heads")
    num_windows, num_rows, topk, num_edges, num_tasks = T.dynamic("num_windows, num_rows, topk, num_edges, num_tasks")
    q_token, q_head, k_token, k_head = strides("q_token, q_head, k_token, k_head")
    iq_token, iq_head, ik_token = strides("iq_token, iq_head, ik_token")
    lse_token, lse_head = strides("lse_token, lse_head")
    schedule_heads, num_partials = T.dynamic("schedule_heads, num_partials")

    @T.macro
    def query_gradients(
        w, before, side, phase, first, num, head, keys_shared, dS_shared, edge_shared, dq, exchanged, chunk_free,
        present, partial_dq, factor,
    ):  # fmt: skip
        """d_idx_q of the edges from `first` on, whose chunk is in buffer `before` and whose dS in `side`."""
        T.barrier_wait(exchanged[side], phase)
        if w < index_halves:
            for part in T.serial(max(index_halves // consumers, 1)):
                half = w + part * consumers
                T.wgmma_gemm(
                    keys_shared[half * consumers, :, :],
                    dS_shared[side * consumers, :, :],
                    dq,
                    transpose_A=True,
                    transpose_B=True,
                    clear_accum=True,
                )
                if consumers > 1:
                    T.wgmma_gemm(
                        keys_shared[half * consumers + 1, :, :],
                        dS_shared[side * consumers + 1, :, :],
                        dq,
                        transpose_A=True,
                        transpose_B=True,
                        clear_accum=False,
                    )
                T.wait_wgmma(0)
                for i, j in T.Parallel(ROWS, EDGES):
                    if first + j < num:
                        partial_dq[
                            query_of(edge_shared[before, j]), slot_of(edge_shared[before, j]), head, half * 64 + i
                        ] = dq[i, j] * factor
        if w == 0:
            for j in T.Parallel(EDGES):
                if first + j < num:
                    present[query_of(edge_shared[before, j]), slot_of(edge_shared[before, j]), head] = 1
        T.barrier_arrive(chunk_free[before])

    @T.macro
    def consume(
        w, K_shared, keys_shared, Q_shared, idx_q_shared, ones_shared, dS_shared, task_shared, edge_shared, lse_shared,
        index_lse_shared, weight_shared, k_full, k_free, keys_full, keys_free, q_full, q_free, chunk_full, chunk_free,
        exchanged, tasks, present, losses, partial_dq, partial_dk, scale_log2, index_scale_log2, factor, gradients,
        window_index,
    ):  # fmt: skip
        K = T.alloc_fragment([ROWS, head_dim], ELEMENT)
        S = T.alloc_fragment([ROWS, ROWS], "float32")
        P = T.alloc_fragment([ROWS, ROWS], ELEMENT)
        tile_sum = T.alloc_fragment([ROWS, EDGES], "float32")
        teacher = T.alloc_fragment([ROWS, EDGES], "float32")
        scores = T.alloc_fragment([ROWS, EDGES], "float32")
        terms = T.alloc_fragment([ROWS, EDGES], "float32")
        dS = T.alloc_fragment([ROWS, EDGES], ELEMENT)
        dk_low = T.alloc_fragment([ROWS, 64], "float32")
        dk_high = T.alloc_fragment([ROWS, 64], "float32")
        dq = T.alloc_fragment([ROWS, EDGES], "float32")
        row_loss = T.alloc_fragment([ROWS], "float32")
        slot = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        buffer = T.alloc_var("int32")
        buffer_phase = T.alloc_var("int32")
        before = T.alloc_var("int32")
        chunk = T.alloc_var("int32")
        task = T.alloc_var("int32")
        head = T.alloc_var("int32")
        slot = 0
        phase = 0
        turn = 0
        running = 1
        buffer = 0
        buffer_phase = 0
        before = 0
        chunk = 0
        while running > 0:
            T.barrier_wait(k_full, turn & 1)
            task = task_shared[0]
            head = task_shared[1]
            if task < 0:
                running = 0
            else:
                listed = head * (1 - prefix)
                num = tasks[window_index, listed, task, 2]
                valid = valid_rows_of(tasks[window_index, listed, task, 3])
                chunks = T.ceildiv(num, EDGES)
                T.copy(K_shared[w, :, :], K)
                T.barrier_arrive(k_free)
                T.fill(dk_low, 0.0)
                if index_halves > 1:
                    T.fill(dk_high, 0.0)
                T.fill(row_loss, 0.0)
                T.barrier_wait(q_full[slot], phase)
                T.wgmma_gemm(K, Q_shared[slot, :, :], S, transpose_B=True, clear_accum=True)
                for c in T.serial(chunks):
                    tiles = T.ceildiv(T.min(num - c * EDGES, EDGES), queries)
                    T.barrier_wait(chunk_full[buffer], buffer_phase)
                    T.fill(teacher, 0.0)
                    for tile in T.serial(tiles):
                        T.wait_wgmma(0)
                        T.barrier_arrive(q_free[slot])
                        next_stage(slot, phase, STAGES)
                        for i, j in T.Parallel(ROWS, ROWS):
                            if group < 8:
                                P[i, j] = T.if_then_else(
                                    j % rows_per_query < group,
                                    T.exp2(S[i, j] * scale_log2 - lse_shared[buffer, tile * ROWS + j]),
                                    0.0,
                                )
                            else:
                                P[i, j] = T.exp2(S[i, j] * scale_log2 - lse_shared[buffer, tile * ROWS + j])
                        T.wgmma_gemm(P, ones_shared[tile, :, :], tile_sum, transpose_B=True, clear_accum=True)
                        if tile + 1 < tiles:
                            T.barrier_wait(q_full[slot], phase)
                            T.wgmma_gemm(K, Q_shared[slot, :, :], S, transpose_B=True, clear_accum=True)
                            T.wait_wgmma(1)
                        else:
                            T.wait_wgmma(0)
                        # Not an accumulator of the product itself: ptxas cannot follow that one and S over the loop.
                        for i, j in T.Parallel(ROWS, EDGES):
                            teacher[i, j] = teacher[i, j] + tile_sum[i, j]
                    # Nothing is under way any more, but the compiler only sees it here where a chunk has no tiles.
                    T.wait_wgmma(0)
                    if c == 0:
                        T.barrier_wait(keys_full, turn & 1)
                        if valid < block_size:
                            # Rows past the request's end may hold NaN, and 0 * NaN would reach d_idx_q.
                            for h in T.unroll(index_halves):
                                for i, j in T.Parallel(ROWS, 64):
                                    if w * ROWS + i >= valid:
                                        keys_shared[h * consumers + w, i, j] = 0
                            T.fence_proxy_async()
                            T.sync_threads(8 + w, 128)
                    if c + 1 < chunks:
                        T.barrier_wait(q_full[slot], phase)
                        T.wgmma_gemm(K, Q_shared[slot, :, :], S, transpose_B=True, clear_accum=True)
                    T.wgmma_gemm(
                        keys_shared[w, :, :],
                        idx_q_shared[buffer * index_halves, :, :],
                        scores,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    if index_halves > 1:
                        T.wgmma_gemm(
                            keys_shared[consumers + w, :, :],
                            idx_q_shared[buffer * index_halves + 1, :, :],
                            scores,
                            transpose_B=True,
                            clear_accum=False,
                        )
                    if gradients > 0 and c > 0:
                        query_gradients(
                            w, before, (chunk & 1) ^ 1, ((chunk - 1) >> 1) & 1, (c - 1) * EDGES, num, head, keys_shared,
                            dS_shared, edge_shared, dq, exchanged, chunk_free, present, partial_dq, factor,
                        )  # fmt: skip
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(ROWS, EDGES):
                        scores[i, j] = scores[i, j] * index_scale_log2 - index_lse_shared[buffer, j]
                    for i, j in T.Parallel(ROWS, EDGES):
                        seen = c * EDGES + j < num and w * ROWS + i <= last_column_of(edge_shared[buffer, j])
                        teacher[i, j] = T.if_then_else(seen, teacher[i, j], 0.0)
                        scores[i, j] = T.if_then_else(seen, scores[i, j], -T.infinity("float32"))
                        dS[i, j] = weight_shared[buffer, j] * (T.exp2(scores[i, j]) - teacher[i, j])
                        # A term of 0 * log(0 / Q) is 0, whatever Q is.
                        terms[i, j] = T.if_then_else(
                            teacher[i, j] != 0.0,
                            weight_shared[buffer, j] * teacher[i, j] * (T.log2(teacher[i, j]) - scores[i, j]),
                            0.0,
                        )
                    T.reduce_sum(terms, row_loss, dim=1, clear=False)
                    if gradients > 0:
                        for i, j in T.Parallel(ROWS, EDGES):
                            dS_shared[(chunk & 1) * consumers + w, j, i] = dS[i, j]
                        T.fence_proxy_async()
                        T.barrier_arrive(exchanged[chunk & 1])
                        T.wgmma_gemm(dS, idx_q_shared[buffer * index_halves, :, :], dk_low, clear_accum=False)
                        if index_halves > 1:
                            T.wgmma_gemm(dS, idx_q_shared[buffer * index_halves + 1, :, :], dk_high, clear_accum=False)
                        T.wait_wgmma(0)
                    else:
                        T.barrier_arrive(chunk_free[buffer])
                    before = buffer
                    chunk = chunk + 1
                    next_stage(buffer, buffer_phase, CHUNKS)
                if gradients > 0:
                    query_gradients(
                        w, before, (chunk & 1) ^ 1, ((chunk - 1) >> 1) & 1, (chunks - 1) * EDGES, num, head,
                        keys_shared, dS_shared, edge_shared, dq, exchanged, chunk_free, present, partial_dq, factor,
                    )  # fmt: skip
                T.barrier_arrive(keys_free)
                for i in T.Parallel(ROWS):
                    losses[head, task, w * ROWS + i] = losses[head, task, w * ROWS + i] + row_loss[i] * LN_2
                if gradients > 0:
                    for i, j in T.Parallel(ROWS, 64):
                        partial_dk[head, task, w * ROWS + i, j] = dk_low[i, j] * factor
                    if index_halves > 1:
                        for i, j in T.Parallel(ROWS, 64):
                            partial_dk[head, task, w * ROWS + i, 64 + j] = dk_high[i, j] * factor
            turn = turn + 1

    @T.prim_func
    def main(
        q: T.StridedTensor((total_q, num_q_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        k: T.StridedTensor((total_k, num_kv_heads, head_dim), (k_token, k_head, 1), ELEMENT),
        lse: T.StridedTensor((total_q, num_q_heads), (lse_token, lse_head), "float32"),
        idx_q: T.StridedTensor((total_q, num_kv_heads, index_dim), (iq_token, iq_head, 1), ELEMENT),
        idx_k: T.StridedTensor((total_k, index_dim), (ik_token, 1), ELEMENT),
        index_lse: T.Tensor((total_q, num_kv_heads), "float32"),
        weights: T.Tensor((total_q,), "float32"),
        edges: T.Tensor((num_windows, schedule_heads, num_edges), "int32"),
        tasks: T.Tensor((num_windows, schedule_heads, num_tasks, 4), "int32"),
        counts: T.Tensor((num_windows, schedule_heads), "int32"),
        claims: T.Tensor((num_windows,), "int32"),
        present: T.Tensor((num_rows, topk, num_kv_heads), "int32"),
        losses: T.Tensor((num_kv_heads, num_tasks, block_size), "float32"),
        partial_dq: T.Tensor((num_rows, topk, num_kv_heads, index_dim), "float32"),
        partial_dk: T.Tensor((num_kv_heads, num_partials, block_size, index_dim), "float32"),
        scale_log2: T.float32,
        index_scale_log2: T.float32,
        factor: T.float32,
        gradients: T.int32,
        window: T.int32,
        window_index: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=table.threads):
            K_shared = make_buffer(table, "k_tile")
            keys_shared = make_buffer(table, "idx_k_tile")
            Q_shared = make_buffer(table, "queries")
            idx_q_shared = make_buffer(table, "index_queries")
            ones_shared = make_buffer(table, "ones")
            dS_shared = make_buffer(table, "score_gradients")
            edge_shared = make_buffer(table, "edges")
            lse_shared = make_buffer(table, "lse")
            index_lse_shared = make_buffer(table, "index_lse")
            weight_shared = make_buffer(table, "weights")
            task_shared = make_buffer(table, "task")
            claim_shared = make_buffer(table, "claim")
            k_full = make_barrier(table, "k_full")
            keys_full = make_barrier(table, "keys_full")
            k_free = make_barrier(table, "k_free")
            keys_free = make_barrier(table, "keys_free")
            q_full = make_barrier(table, "q_full")
            q_free = make_barrier(table, "q_free")
            chunk_full = make_barrier(table, "chunk_full")
            chunk_free = make_barrier(table, "chunk_free")
            exchanged = make_barrier(table, "exchanged_full")
            tx = T.get_thread_binding()
            for tile, i, j in T.Parallel(tiles_per_chunk, EDGES, ROWS):
                ones_shared[tile, i, j] = T.if_then_else(i == tile * queries + j // rows_per_query, 1.0, 0.0)
            T.fence_proxy_async()
            T.sync_threads()
            if tx >= consumers * 128:
                T.set_max_nreg(producer_registers, 0)
                slot = T.alloc_var("int32")
                phase = T.alloc_var("int32")
                turn = T.alloc_var("int32")
                running = T.alloc_var("int32")
                buffer = T.alloc_var("int32")
                buffer_phase = T.alloc_var("int32")
                packed = T.alloc_local([index_halves, 4], "uint32")
                claim = T.alloc_var("int32")
                task = T.alloc_var("int32")
                head = T.alloc_var("int32")
                thread = tx - consumers * 128
                slot = 0
                phase = 1
                turn = 0
                running = 1
                buffer = 0
                buffer_phase = 1
                while running > 0:
                    claim_together(
                        thread, claims, counts, window_index, num_kv_heads, prefix, claim_shared, turn, 7, claim, head,
                    )  # fmt: skip
                    task = claim
                    if claim < 0:
                        running = 0
                        task = 0
                    T.barrier_wait(k_free, (turn & 1) ^ 1)
                    if thread == 0:
                        task_shared[0] = claim
                        task_shared[1] = head
                    # With prefix all heads share one schedule.
                    listed = head * (1 - prefix)
                    key_row = tasks[window_index, listed, task, 0]
                    first_edge = tasks[window_index, listed, task, 1]
                    num = tasks[window_index, listed, task, 2] * running
                    if running > 0:
                        for part in T.unroll(consumers):
                            T.tma_copy(
                                described(k)[key_row + part * 64 : key_row + part * 64 + 64, head, :],
                                K_shared[part, :, :],
                                barrier=k_full,
                            )
                    T.barrier_arrive(k_full)
                    for c in T.serial(T.ceildiv(num, EDGES)):
                        T.barrier_wait(chunk_free[buffer], buffer_phase)
                        if thread < EDGES:
                            edge = edges[
                                window_index, head * (1 - prefix), first_edge + T.min(c * EDGES + thread, num - 1)
                            ]
                            edge_shared[buffer, thread] = edge
                            index_lse_shared[buffer, thread] = (
                                index_lse[window_index * window + query_of(edge), head] * LOG2_E
                            )
                            weight_shared[buffer, thread] = weights[window_index * window + query_of(edge)]
                        for v in T.unroll(EDGES * rows_per_query // 128):
                            row = (v * 128 + thread) // rows_per_query
                            member = (v * 128 + thread) % rows_per_query
                            edge = edges[
                                window_index, head * (1 - prefix), first_edge + T.min(c * EDGES + row, num - 1)
                            ]
                            # The mean over the group's heads is a sum of probabilities that are smaller by as much.
                            lse_shared[buffer, v * 128 + thread] = (
                                lse[window_index * window + query_of(edge), head * group + T.min(member, group - 1)]
                                * LOG2_E
                                + log2_group
                            )
                        query = window_index * window + query_of(
                            edges[
                                window_index, head * (1 - prefix), first_edge + T.min(c * EDGES + thread // 8, num - 1)
                            ]
                        )
                        for h in T.unroll(index_halves):
                            packed[h, 0:4] = T.ldg128(idx_q[query, head, h * 64 + thread % 8 * 8])
                        for h in T.unroll(index_halves):
                            for u in T.unroll(4):
                                idx_q_shared[buffer * index_halves + h, thread // 8, thread % 8 * 8 + 2 * u] = low_half(
                                    packed[h, u]
                                )
                                idx_q_shared[buffer * index_halves + h, thread // 8, thread % 8 * 8 + 2 * u + 1] = (
                                    high_half(packed[h, u])
                                )
                        T.fence_proxy_async()
                        T.barrier_arrive(chunk_full[buffer])
                        next_stage(buffer, buffer_phase, CHUNKS)
                        for tile in T.serial(T.ceildiv(T.min(num - c * EDGES, EDGES), queries)):
                            T.barrier_wait(q_free[slot], phase)
                            for r in T.unroll(queries):
                                edge = edges[
                                    window_index,
                                    listed,
                                    first_edge + T.min(c * EDGES + tile * queries + r, num - 1),
                                ]
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
                                        barrier=q_full[slot],
                                    )
                            T.barrier_arrive(q_full[slot])
                            next_stage(slot, phase, STAGES)
                        if c == 0:
                            T.barrier_wait(keys_free, (turn & 1) ^ 1)
                            for h in T.unroll(index_halves):
                                for part in T.unroll(consumers):
                                    T.tma_copy(
                                        described(idx_k)[
                                            key_row + part * 64 : key_row + part * 64 + 64, h * 64 : h * 64 + 64
                                        ],
                                        keys_shared[h * consumers + part, :, :],
                                        barrier=keys_full,
                                    )
                            T.barrier_arrive(keys_full)
                    turn = turn + 1
            elif tx < 128:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                consume(
                    0, K_shared, keys_shared, Q_shared, idx_q_shared, ones_shared, dS_shared, task_shared,
                    edge_shared, lse_shared, index_lse_shared, weight_shared, k_full, k_free, keys_full, keys_free,
                    q_full, q_free, chunk_full, chunk_free, exchanged, tasks, present, losses, partial_dq, partial_dk,
                    scale_log2, index_scale_log2, factor, gradients, window_index,
                )  # fmt: skip
            elif consumers > 1:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                consume(
                    1, K_shared, keys_shared, Q_shared, idx_q_shared, ones_shared, dS_shared, task_shared,
                    edge_shared, lse_shared, index_lse_shared, weight_shared, k_full, k_free, keys_full, keys_free,
                    q_full, q_free, chunk_full, chunk_free, exchanged, tasks, present, losses, partial_dq, partial_dk,
                    scale_log2, index_scale_log2, factor, gradients, window_index,
                )  # fmt: skip

    return main
