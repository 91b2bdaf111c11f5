"""KV-outer sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2.

# <- cta

A slot of the queries is free once the partial result staged in it has left.

A ring slot holds the query rows of a tile until its S is done, then the tile's normalised partial output on its way
to global memory. The next tile's S is issued before the current partial is scaled, so it overlaps the epilogue.
# % if "token_scales" in plan.variants

K and V come as bytes to k_raw and v_raw, and the producer decodes them: K to bfloat16, V to float16, or to bfloat16
where tokens have scales. Nobody frees the bytes: its threads meet (named barrier 7) before the next ones are sent for.
Scales of tokens multiply S, and P behind its sum. A scale that a head shares is folded into the softmax's (keys) and
into what O is normalised by (values).
# % endif
# % if precision.keys.packed > 1

K and V come as bytes to k_raw and v_raw, and the producer decodes them to bfloat16 with the scales of their groups.
Nobody frees the bytes: its threads meet (named barrier 7) before the next ones are sent for. A scale that a head has
besides is folded into the softmax's (keys) and into what O is normalised by (values).
# % endif

The producer sends the first AHEAD tiles of a task to each consumer before it waits for room for the task's K and V.
That must stay below STAGES - 1: the slot of a consumer's last partial is only freed by its next tile.

Infinite and NaN values of V that some edge of a task may not see are taken out of it (msa_tiles.dsl.tilelang.hidden):
each consumer looks for them where an edge sees less than the block, and meets the other one only if there are any.

A tile has 64 rows: 64 // rows_per_query queries, each with its `group` heads in the first of rows_per_query rows
(8 is the least that keeps a 128-byte swizzle atom whole; rows past `group` hold stale data and are never stored).

Edges and tasks are the words that msa_tiles.dsl.words describes. The last tile of a task repeats its last
edge; both copies write the same bytes.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang.claims import claim_together
from msa_tiles.dsl.tilelang.hidden import find_unbounded, nan, take_out
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value
from msa_tiles.dsl.tilelang.rings import next_stage
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.softmax import TINY, block_softmax
from msa_tiles.dsl.tilelang.stages import clear_rows
from msa_tiles.dsl.words import is_cut, last_column_of, query_of, slot_of, valid_rows_of

OUTPUT = "bfloat16"  # <- precision.output
STAGES = 5  # <- tile.stages
AHEAD = 2  # <- tile.ahead
CONSUMERS = 2  # <- tile.consumers
PRODUCER_REGISTERS = 56  # <- tile.producer_registers
CONSUMER_REGISTERS = 224  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
ROWS = 64
LN_2 = 0.6931471805599453


@declares
def cta(head_dim, block_size, group, pages_per_block, **scales):
    consumers = [f"consumer_{w}" for w in range(CONSUMERS)]
    everybody = tuple(threads(name) for name in consumers)
    sides = {"producer": "producer", "readers": consumers, **scales}
    keys = key_value.parts("k", head_dim, block_size, 1, **sides)
    values = key_value.parts("v", head_dim, block_size, 1, **sides)
    does = "one 64-row tile at a time: S = Q K^T, softmax over the block, O = P V, partial store"
    return Table(
        roles=(
            *(Role(name, 4, does, CONSUMER_REGISTERS) for name in consumers),
            Role("producer", 4, "claims tasks, loads K, V and the query rows of each tile", PRODUCER_REGISTERS),
        ),
        pipelines=(
            *keys.pipelines,
            *values.pipelines,
            Pipeline("met", 1, everybody, note="twice a task of whose V something is taken out"),
            *(
                Pipeline(f"q_{w}", STAGES, (threads("producer"),), (threads(name),))
                for w, name in enumerate(consumers)
            ),
        ),
        buffers=(
            *keys.buffers,
            *values.buffers,
            buffer(
                "queries", key_value.multiplied("k", **scales), align=1024,
                slots=CONSUMERS * STAGES, rows=ROWS, head_dim=head_dim,
            ),
            buffer("task", "int32", static=True, fields=2),
            buffer("claim", "int32", static=True, turns=2, fields=2),
            buffer("found", "int32", static=True, consumers=CONSUMERS, warps=4),
        ),
        static=TILELANG,
    )  # fmt: skip


def sparse_attention(
    head_dim: int,
    block_size: int,
    group: int,
    pages_per_block: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    The kernel takes q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], the window's
    schedule, and writes partial_out [window, topk, num_q_heads, head_dim] and partial_lse [window, topk, num_q_heads]
    (natural logarithm) for every edge of the window. scale_log2 is the softmax scale times log2(e).
    """
    rows_per_query = max(group, 8)
    queries = ROWS // rows_per_query
    halves = head_dim // 64

    table = cta(
        head_dim, block_size, group, pages_per_block,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )  # fmt: skip
    total_q, num_q_heads, num_kv_heads = T.dynamic("total_q, num_q_heads, num_kv_heads")
    num_tables, max_pages = T.dynamic("num_tables, max_pages")
    table_stride = strides("table_stride")
    num_windows, window, topk, num_edges, num_tasks = T.dynamic("num_windows, window, topk, num_edges, num_tasks")
    q_token, q_head = strides("q_token, q_head")
    keys, values = (
        key_value.Operand(
            name, head_dim, block_size, pages_per_block,
            token_scales=token_scales,  # % if "token_scales" in plan.variants
        )
        for name in "kv"
    )  # fmt: skip

    @T.macro
    def consume(
        w, thread, stored_k, stored_v, Q_shared, K_shared, V_shared, task_shared, found_shared, met, k_full, v_full,
        k_free, v_free, q_full, q_free, edges, tasks, partial_out, partial_lse, scale_log2, window_index,
    ):  # fmt: skip
        S = T.alloc_fragment([ROWS, block_size], "float32")
        P = T.alloc_fragment([ROWS, block_size], values.element)
        O = T.alloc_fragment([ROWS, head_dim], "float32")
        row_max = T.alloc_fragment([ROWS], "float32")
        row_sum = T.alloc_fragment([ROWS], "float32")
        row_edge = T.alloc_fragment([ROWS], "int32")
        slot = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        staged = T.alloc_var("int32")
        used = T.alloc_var("int32")
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        my_tiles = T.alloc_var("int32")
        task = T.alloc_var("int32")
        head = T.alloc_var("int32")
        first_taken = T.alloc_local([1], "int32")
        taken = T.alloc_var("int32")
        slot = 0
        phase = 0
        staged = -1
        turn = 0
        running = 1
        while running > 0:
            T.barrier_wait(k_full[0], turn & 1)
            task = task_shared[0]
            head = task_shared[1]
            if task < 0:
                running = 0
                task = 0
            first_edge = tasks[window_index, head, task, 1]
            last_edge = first_edge + tasks[window_index, head, task, 2] - 1
            extent = tasks[window_index, head, task, 3]
            tiles = T.ceildiv(tasks[window_index, head, task, 2], queries) * running
            my_tiles = (tiles - w + CONSUMERS - 1) // CONSUMERS
            factor = keys.fold(scale_log2, stored_k, head)
            if my_tiles > 0:
                T.barrier_wait(q_full[w * STAGES + slot], phase)
                T.wgmma_gemm(
                    Q_shared[w * STAGES + slot, :, :], K_shared.tiles[0, :, :], S, transpose_B=True, clear_accum=True
                )
            taken = 0
            if running > 0:
                T.barrier_wait(v_full[0], turn & 1)
                clear_rows(V_shared.tiles, 0, valid_rows_of(extent), 8 + w)
                if is_cut(extent) != 0:
                    # Some edge sees a part only: no value that it does not see may be infinite or NaN.
                    find_unbounded(V_shared.tiles, 0, thread, valid_rows_of(extent), first_taken)
                    taken = T.any_sync(first_taken[0] < block_size)
                    if thread % 32 == 0:
                        found_shared[w, thread // 32] = taken
                    T.sync_threads(8 + w, 128)
                    taken = found_shared[w, 0] | found_shared[w, 1] | found_shared[w, 2] | found_shared[w, 3]
                    if taken != 0:
                        # All consumers have looked before one of them writes, and find the same.
                        T.barrier_arrive(met)
                        T.barrier_wait(met, 0)
                        take_out(V_shared.tiles, 0, thread, valid_rows_of(extent), w, CONSUMERS)
                        T.fence_proxy_async()
                        T.barrier_arrive(met)
                        T.barrier_wait(met, 1)
            for tile in T.serial(my_tiles):
                first = first_edge + (tile * CONSUMERS + w) * queries
                for i in T.Parallel(ROWS):
                    row_edge[i] = edges[window_index, head, T.min(first + i // rows_per_query, last_edge)]
                T.wait_wgmma(0)
                key_value.weigh(keys, K_shared, S, ROWS)
                if tile + 1 == my_tiles:
                    T.barrier_arrive(k_free)
                if is_cut(extent) != 0:
                    for i, j in T.Parallel(ROWS, block_size):
                        S[i, j] = T.if_then_else(j <= last_column_of(row_edge[i]), S[i, j], -T.infinity("float32"))
                block_softmax(S, row_max, row_sum, factor, ROWS, block_size)
                key_value.weigh(values, V_shared, S, ROWS)
                T.copy(S, P)
                T.wgmma_gemm(P, V_shared.tiles[0, :, :], O, clear_accum=True)
                used = slot
                next_stage(slot, phase, STAGES)
                if tile + 1 < my_tiles:
                    T.barrier_wait(q_full[w * STAGES + slot], phase)
                    T.wgmma_gemm(
                        Q_shared[w * STAGES + slot, :, :],
                        K_shared.tiles[0, :, :],
                        S,
                        transpose_B=True,
                        clear_accum=True,
                    )
                    T.wait_wgmma(1)
                else:
                    T.wait_wgmma(0)
                    T.barrier_arrive(v_free)
                for i in T.Parallel(ROWS):
                    if i % rows_per_query < group:
                        partial_lse[query_of(row_edge[i]), slot_of(row_edge[i]), head * group + i % rows_per_query] = (
                            row_max[i] * factor + T.log2(row_sum[i])
                        ) * LN_2
                for i in T.Parallel(ROWS):
                    row_sum[i] = values.fold(1.0 / (row_sum[i] + TINY), stored_v, head)
                for i, j in T.Parallel(ROWS, head_dim):
                    O[i, j] = O[i, j] * row_sum[i]
                # Only the thread that issued the stores waits here, and the slot is free once that thread arrives too.
                T.tma_store_wait(0)
                if staged >= 0:
                    T.barrier_arrive(q_free[w * STAGES + staged])
                staged = used
                T.copy(O, Q_shared[w * STAGES + used, :, :])
                if taken != 0:
                    T.sync_threads(8 + w, 128)
                    for i in T.serial(ROWS):
                        seen = last_column_of(edges[window_index, head, T.min(first + i // rows_per_query, last_edge)])
                        if first_taken[0] <= seen:
                            Q_shared[w * STAGES + used, i, thread % head_dim] = nan()
                T.fence_proxy_async()
                T.sync_threads(8 + w, 128)
                for r in T.unroll(queries):
                    edge = edges[window_index, head, T.min(first + r, last_edge)]
                    for half in T.unroll(halves):
                        T.tma_copy(
                            Q_shared[
                                w * STAGES + used,
                                r * rows_per_query : r * rows_per_query + group,
                                half * 64 : half * 64 + 64,
                            ],
                            partial_out[
                                query_of(edge),
                                slot_of(edge),
                                head * group : head * group + group,
                                half * 64 : half * 64 + 64,
                            ],
                            eviction_policy="evict_first",
                        )
            if my_tiles == 0 and running > 0:
                T.barrier_arrive(k_free)
                T.barrier_arrive(v_free)
            turn = turn + 1
        T.tma_store_wait(0)

    @T.prim_func
    def main(
        q: T.StridedTensor((total_q, num_q_heads, head_dim), (q_token, q_head, 1), keys.element),
        k: keys.tensor(num_kv_heads),
        k_scale: keys.scale(num_kv_heads),  # % if precision.scale
        k_global_scale: keys.of_heads(num_kv_heads),  # % if precision.scale and precision.scale.global_dtype
        v: values.tensor(num_kv_heads),
        v_scale: values.scale(num_kv_heads),  # % if precision.scale
        v_global_scale: values.of_heads(num_kv_heads),  # % if precision.scale and precision.scale.global_dtype
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        edges: T.Tensor((num_windows, num_kv_heads, num_edges), "int32"),
        tasks: T.Tensor((num_windows, num_kv_heads, num_tasks, 4), "int32"),
        counts: T.Tensor((num_windows, num_kv_heads), "int32"),
        claims: T.Tensor((num_windows,), "int32"),
        partial_out: T.Tensor((window, topk, num_q_heads, head_dim), OUTPUT),
        partial_lse: T.Tensor((window, topk, num_q_heads), "float32"),
        scale_log2: T.float32,
        window_index: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=table.threads):
            K_shared = key_value.allocate(keys, table, 1)
            V_shared = key_value.allocate(values, table, 1)
            stored_k = key_value.Stored(
                k,  # <- tensors of operands.key_value
            )
            stored_v = key_value.Stored(
                v,  # <- tensors of operands.key_value
            )
            Q_shared = make_buffer(table, "queries")
            task_shared = make_buffer(table, "task")
            claim_shared = make_buffer(table, "claim")
            # Whether a warp has found a value to be taken out of V.
            found_shared = make_buffer(table, "found")
            k_full = make_barrier(table, "k_full")
            v_full = make_barrier(table, "v_full")
            k_free = make_barrier(table, "k_free")
            v_free = make_barrier(table, "v_free")
            met = make_barrier(table, "met_full")
            # Those of one consumer after those of the other.
            q_full = make_barrier(table, *(f"q_{w}_full" for w in range(CONSUMERS)))
            q_free = make_barrier(table, *(f"q_{w}_free" for w in range(CONSUMERS)))
            tx = T.get_thread_binding()
            if tx >= CONSUMERS * 128:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                turn = T.alloc_var("int32")
                running = T.alloc_var("int32")
                claim = T.alloc_var("int32")
                task = T.alloc_var("int32")
                head = T.alloc_var("int32")
                slot = T.alloc_local([CONSUMERS], "int32")
                phase = T.alloc_local([CONSUMERS], "int32")
                for w in T.unroll(CONSUMERS):
                    slot[w] = 0
                    phase[w] = 1
                turn = 0
                running = 1
                while running > 0:
                    claim_together(
                        tx - CONSUMERS * 128, claims, counts, window_index, num_kv_heads, 0, claim_shared, turn, 7,
                        claim, head,
                    )  # fmt: skip
                    task = claim
                    if claim < 0:
                        running = 0
                        task = 0
                    key_row = tasks[window_index, head, task, 0]
                    first_edge = tasks[window_index, head, task, 1]
                    num = tasks[window_index, head, task, 2] * running
                    rounds = T.ceildiv(num, queries * CONSUMERS)
                    if key_value.STARTS:
                        if running > 0:
                            rows = valid_rows_of(tasks[window_index, head, task, 3])
                            key_value.start(keys, stored_k, page_table, key_row, head, K_shared, 0, rows, tx % 128)
                            key_value.start(values, stored_v, page_table, key_row, head, V_shared, 0, rows, tx % 128)
                    for round in T.serial(rounds + 1):
                        if round == T.min(rounds, AHEAD):
                            T.barrier_wait(k_free, (turn & 1) ^ 1)
                            if tx == CONSUMERS * 128:
                                task_shared[0] = claim
                                task_shared[1] = head
                            if running > 0:
                                key_value.fill(
                                    keys, stored_k, page_table, key_row, head, K_shared, k_full, 0, 0, turn & 1,
                                    tx % 128,
                                )  # fmt: skip
                            T.barrier_arrive(k_full[0])
                            if running > 0:
                                T.barrier_wait(v_free, (turn & 1) ^ 1)
                                key_value.fill(
                                    values, stored_v, page_table, key_row, head, V_shared, v_full, 0, 0, turn & 1,
                                    tx % 128,
                                )  # fmt: skip
                                T.barrier_arrive(v_full[0])
                        for w in T.unroll(CONSUMERS):
                            if (round * CONSUMERS + w) * queries < num:
                                T.barrier_wait(q_free[w * STAGES + slot[w]], phase[w])
                                for r in T.unroll(queries):
                                    edge = edges[
                                        window_index,
                                        head,
                                        first_edge + T.min((round * CONSUMERS + w) * queries + r, num - 1),
                                    ]
                                    for half in T.unroll(halves):
                                        T.tma_copy(
                                            described(q)[
                                                window_index * window + query_of(edge),
                                                head * group : head * group + group,
                                                half * 64 : half * 64 + 64,
                                            ],
                                            Q_shared[
                                                w * STAGES + slot[w],
                                                r * rows_per_query : r * rows_per_query + group,
                                                half * 64 : half * 64 + 64,
                                            ],
                                            barrier=q_full[w * STAGES + slot[w]],
                                        )
                                T.barrier_arrive(q_full[w * STAGES + slot[w]])
                                next_stage(slot[w], phase[w], STAGES)
                    turn = turn + 1
            elif tx < 128:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                consume(
                    0, tx, stored_k, stored_v, Q_shared, K_shared, V_shared, task_shared, found_shared, met, k_full,
                    v_full, k_free, v_free, q_full, q_free, edges, tasks, partial_out, partial_lse, scale_log2,
                    window_index,
                )  # fmt: skip
            else:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                consume(
                    1, tx - 128, stored_k, stored_v, Q_shared, K_shared, V_shared, task_shared, found_shared, met,
                    k_full, v_full, k_free, v_free, q_full, q_free, edges, tasks, partial_out, partial_lse, scale_log2,
                    window_index,
                )  # fmt: skip

    return main
