"""KV-outer sparse attention over one query window: every KV block meets the queries that selected it.

Grid: one persistent CTA per SM. A task is one KV block of one KV head with a run of the edges (query, slot) that
selected it; tasks are claimed through one atomic counter, head after head, so that the window's queries of the head in
work stay in L2. A tile is 128 rows of a task's queries.

# <- cta

The ring holds K and V of one task after the other. A warpgroup stores P once it holds S, so p_full frees S as well, and
stores the next P once it has seen O.

The S of a tile is issued before the O of the tile before it, so that it is multiplied while the other warpgroup is
busy with its softmax. At the end of a task that S is the next task's, and its K must come while V is in use: the ring
has three stages at least, and there are two tasks at least.

A tile has 128 // rows_per_query queries, each with its `group` heads in the first of rows_per_query rows (8 is the
least that keeps a 128-byte swizzle atom whole; rows past `group` hold stale data and are never stored).

Edges and tasks are the words that msa_tiles.dsl.words describes. The last tile of a task repeats its last edge;
both copies write the same bytes. A task has at most CHUNK edges.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Columns, Pipeline, Role, Table, buffer, commits, declares, threads
from msa_tiles.dsl.tilelang.claims import next_claim
from msa_tiles.dsl.tilelang.keys import block_keys
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.rings import next_stage
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.softmax import block_softmax
from msa_tiles.dsl.tilelang.stages import load_stage
from msa_tiles.dsl.tilelang.tensor_memory import make_tiles
from msa_tiles.dsl.words import is_cut, last_column_of, query_of, slot_of, valid_rows_of

ELEMENT = "bfloat16"  # <- precision.multiply
KV_STAGES = 3  # <- tile.kv_stages
Q_STAGES = 2  # <- tile.q_stages
TASKS = 3  # <- tile.tasks
PRODUCER_REGISTERS = 56  # <- tile.producer_registers
CONSUMER_REGISTERS = 224  # <- tile.consumer_registers
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
ROWS = 128
CHUNK = 128
LN_2 = 0.6931471805599453
# Fields of a task in shared memory; a task without edges ends the work.
HEAD, KEY_ROW, NUM_EDGES, EXTENT, FIELDS = 0, 1, 2, 3, 4
SOFTMAXES = 2


@declares
def cta(head_dim, block_size, group, pages_per_block):
    readers = tuple(threads(role) for role in ("softmax_even", "softmax_odd", "gatherer", "issuer", "loader"))
    turn = threads("softmax_even")  # or of the other one, whose turn it is
    does = "thread i has row i of S, of P and of the partial output of every second tile"
    return Table(
        roles=(
            Role("softmax_even", 4, f"{does}, from the first on", CONSUMER_REGISTERS),
            Role("softmax_odd", 4, f"{does}, from the second on", CONSUMER_REGISTERS),
            Role("claimer", 1, "claims tasks and brings their edges to shared memory", PRODUCER_REGISTERS),
            Role("gatherer", 1, "gathers the query rows of every tile by TMA", PRODUCER_REGISTERS),
            Role(
                "issuer", 1, "multiplies: S = Q K^T of a tile, then O = P V of the tile before it", PRODUCER_REGISTERS
            ),
            Role("loader", 1, "loads K and V of every task", PRODUCER_REGISTERS),
        ),
        pipelines=(
            Pipeline("task", TASKS, (threads("claimer"),), readers),
            Pipeline(
                "kv", KV_STAGES, (threads("loader"),), (commits("issuer"),), ("blocks",),
                note="behind the last product that reads it",
            ),
            Pipeline("q", Q_STAGES, (threads("gatherer"),), (commits("issuer"),), ("queries",)),
            Pipeline("s", SOFTMAXES, (commits("issuer"),), note="stage 1 is softmax_odd's"),
            Pipeline("p", SOFTMAXES, (turn,), note="likewise"),
            Pipeline("o", SOFTMAXES, (commits("issuer"),), note="likewise"),
            Pipeline("o_taken", 1, (turn,), note="by the one that held O"),
        ),
        buffers=(
            buffer("blocks", ELEMENT, align=1024, stages=KV_STAGES, block_size=block_size, head_dim=head_dim),
            buffer("queries", ELEMENT, align=1024, stages=Q_STAGES, rows=ROWS, head_dim=head_dim),
            buffer(
                "staging", ELEMENT, align=1024, note="the partial output of each softmax on its way out",
                softmaxes=SOFTMAXES, rows=ROWS, head_dim=head_dim,
            ),
            buffer("task", "int32", static=True, stages=TASKS, fields=FIELDS),
            buffer("edges", "int32", static=True, stages=TASKS, chunk=CHUNK),
        ),
        tensor_memory=(
            Columns("S", SOFTMAXES, block_size, "float32"),
            Columns("P", SOFTMAXES, block_size // 2, "pairs of elements"),
            Columns("O", 1, head_dim, "float32"),
        ),
        static=TILELANG,
    )  # fmt: skip


def sparse_attention(head_dim: int, block_size: int, group: int, pages_per_block: int):
    """Build the kernel for one head dim, block size and number of query heads per KV head.

    The kernel takes q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], the window's
    schedule, and writes partial_out [window, topk, num_q_heads, head_dim] and partial_lse [window, topk, num_q_heads]
    (natural logarithm) for every edge of the window. scale_log2 is the softmax scale times log2(e).
    """
    table = cta(head_dim, block_size, group, pages_per_block)
    odd, claimer, gatherer, issuer, loader = (
        table.first_warp(role) * 32 for role in ("softmax_odd", "claimer", "gatherer", "issuer", "loader")
    )
    rows_per_query = max(group, 8)
    queries = ROWS // rows_per_query
    halves = head_dim // 64

    total_q, num_q_heads, num_kv_heads = T.dynamic("total_q, num_q_heads, num_kv_heads")
    num_tables, max_pages = T.dynamic("num_tables, max_pages")
    table_stride = strides("table_stride")
    num_windows, window, topk, num_edges, num_tasks = T.dynamic("num_windows, window, topk, num_edges, num_tasks")
    q_token, q_head = strides("q_token, q_head")
    k_shape, k_strides = block_keys(num_kv_heads, head_dim, block_size, pages_per_block, "k")
    v_shape, v_strides = block_keys(num_kv_heads, head_dim, block_size, pages_per_block, "v")

    @T.macro
    def claim_tasks(lane, task_shared, edges_shared, task_full, task_free, edges, tasks, counts, claims, window_index):
        """Claim tasks, with their edges, until there are no more: the last one has none."""
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        claim = T.alloc_var("int32")
        head = T.alloc_var("int32")
        turn = 0
        running = 1
        while running > 0:
            T.barrier_wait(task_free[turn % TASKS], ((turn // TASKS) & 1) ^ 1)
            if lane == 0:
                next_claim(claims, counts, window_index, num_kv_heads, 0, claim, head)
                task_shared[turn % TASKS, HEAD] = head
                task_shared[turn % TASKS, KEY_ROW] = claim
            T.sync_warp()
            claim = task_shared[turn % TASKS, KEY_ROW]
            head = task_shared[turn % TASKS, HEAD]
            T.sync_warp()
            if claim < 0:
                running = 0
                if lane == 0:
                    task_shared[turn % TASKS, NUM_EDGES] = 0
                    task_shared[turn % TASKS, EXTENT] = 0
            else:
                first_edge = tasks[window_index, head, claim, 1]
                num = tasks[window_index, head, claim, 2]
                for i in T.unroll(CHUNK // 32):
                    edges_shared[turn % TASKS, i * 32 + lane] = edges[
                        window_index, head, first_edge + T.min(i * 32 + lane, num - 1)
                    ]
                if lane == 0:
                    task_shared[turn % TASKS, KEY_ROW] = tasks[window_index, head, claim, 0]
                    task_shared[turn % TASKS, NUM_EDGES] = num
                    task_shared[turn % TASKS, EXTENT] = tasks[window_index, head, claim, 3]
            T.barrier_arrive(task_full[turn % TASKS])
            turn = turn + 1

    @T.macro
    def gather(q, Q_shared, task_shared, edges_shared, task_full, task_free, q_full, q_free, window_index):
        """The query rows of every tile, one box for each query and half of a row."""
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        head = T.alloc_var("int32")
        tiles = T.alloc_var("int32")
        stage = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        turn = 0
        running = 1
        stage = 0
        phase = 1
        while running > 0:
            T.barrier_wait(task_full[turn % TASKS], (turn // TASKS) & 1)
            head = task_shared[turn % TASKS, HEAD]
            tiles = T.ceildiv(task_shared[turn % TASKS, NUM_EDGES], queries)
            if tiles == 0:
                running = 0
            for tile in T.serial(tiles):
                T.barrier_wait(q_free[stage], phase)
                for r in T.unroll(queries):
                    edge = edges_shared[turn % TASKS, tile * queries + r]
                    for half in T.unroll(halves):
                        T.tma_copy(
                            described(q)[
                                window_index * window + query_of(edge),
                                head * group : head * group + group,
                                half * 64 : half * 64 + 64,
                            ],
                            Q_shared[
                                stage, r * rows_per_query : r * rows_per_query + group, half * 64 : half * 64 + 64
                            ],
                            barrier=q_full[stage],
                        )
                T.barrier_arrive(q_full[stage])
                next_stage(stage, phase, Q_STAGES)
            T.barrier_arrive(task_free[turn % TASKS])
            turn = turn + 1

    @T.macro
    def load_blocks(k, v, page_table, KV_shared, task_shared, task_full, task_free, kv_full, kv_free):
        """K and V of every task, one after the other around the ring."""
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        head = T.alloc_var("int32")
        row = T.alloc_var("int32")
        turn = 0
        running = 1
        while running > 0:
            T.barrier_wait(task_full[turn % TASKS], (turn // TASKS) & 1)
            if task_shared[turn % TASKS, NUM_EDGES] == 0:
                running = 0
            else:
                head = task_shared[turn % TASKS, HEAD]
                row = task_shared[turn % TASKS, KEY_ROW]
                k_place = turn * 2
                v_place = turn * 2 + 1
                T.barrier_wait(kv_free[k_place % KV_STAGES], ((k_place // KV_STAGES) & 1) ^ 1)
                load_stage(
                    k, page_table, row, head, KV_shared, kv_full, k_place % KV_STAGES, block_size, head_dim,
                    pages_per_block,
                )  # fmt: skip
                T.barrier_arrive(kv_full[k_place % KV_STAGES])
                T.barrier_wait(kv_free[v_place % KV_STAGES], ((v_place // KV_STAGES) & 1) ^ 1)
                load_stage(
                    v, page_table, row, head, KV_shared, kv_full, v_place % KV_STAGES, block_size, head_dim,
                    pages_per_block,
                )  # fmt: skip
                T.barrier_arrive(kv_full[v_place % KV_STAGES])
            T.barrier_arrive(task_free[turn % TASKS])
            turn = turn + 1

    @T.macro
    def multiply(
        Q_shared, KV_shared, S, P, O, task_shared, task_full, task_free, kv_full, kv_free, q_full, q_free,
        s_full, p_full, o_full, o_taken,
    ):  # fmt: skip
        """S of every tile, then O of the tile before; the end of the work is a step with an O alone."""
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        tiles = T.alloc_var("int32")
        step = T.alloc_var("int32")
        stage = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        v_place = T.alloc_var("int32")
        v_last = T.alloc_var("int32")
        turn = 0
        running = 1
        step = 0
        stage = 0
        phase = 0
        v_place = 0
        v_last = 0
        while running > 0:
            T.barrier_wait(task_full[turn % TASKS], (turn // TASKS) & 1)
            tiles = T.ceildiv(task_shared[turn % TASKS, NUM_EDGES], queries)
            T.barrier_arrive(task_free[turn % TASKS])
            if tiles == 0:
                running = 0
            for tile in T.serial(T.max(tiles, 1)):
                if running > 0:
                    k_place = turn * 2
                    T.barrier_wait(kv_full[k_place % KV_STAGES], (k_place // KV_STAGES) & 1)
                    T.barrier_wait(q_full[stage], phase)
                    # The P of two tiles before has been waited for, so this S is free.
                    T.tcgen05_after_thread_sync()
                    T.tcgen05_gemm(
                        Q_shared[stage, :, :], KV_shared[k_place % KV_STAGES, :, :], S[step & 1, :, :],
                        transpose_B=True, clear_accum=True, mbar=None,
                    )  # fmt: skip
                    T.tcgen05_mma_arrive(q_free[stage])
                    if tile + 1 == tiles:
                        T.tcgen05_mma_arrive(kv_free[k_place % KV_STAGES])
                    T.tcgen05_mma_arrive(s_full[step & 1])
                    next_stage(stage, phase, Q_STAGES)
                if step > 0:
                    before = step - 1
                    T.barrier_wait(kv_full[v_place % KV_STAGES], (v_place // KV_STAGES) & 1)
                    T.barrier_wait(o_taken, (before & 1) ^ 1)
                    T.barrier_wait(p_full[before & 1], (before >> 1) & 1)
                    T.tcgen05_after_thread_sync()
                    T.tcgen05_gemm(
                        P[before & 1, :, :],
                        KV_shared[v_place % KV_STAGES, :, :],
                        O[0, :, :],
                        clear_accum=True,
                        mbar=None,
                    )
                    if v_last > 0:
                        T.tcgen05_mma_arrive(kv_free[v_place % KV_STAGES])
                    # Last, so that whoever has seen the last product leaves with nothing under way.
                    T.tcgen05_mma_arrive(o_full[before & 1])
                v_place = turn * 2 + 1
                v_last = T.if_then_else(tile + 1 == tiles, 1, 0)
                step = step + 1
            turn = turn + 1

    @T.macro
    def attend(
        w, O_shared, KV_shared, S, P, O, task_shared, edges_shared, task_full, task_free, kv_full, s_full,
        p_full, o_full, o_taken, partial_out, partial_lse, scale_log2,
    ):  # fmt: skip
        """Softmax and epilogue of every second tile."""
        scores = T.alloc_fragment([ROWS, block_size], "float32")
        probabilities = T.alloc_fragment([ROWS, block_size], ELEMENT)
        result = T.alloc_fragment([ROWS, head_dim], "float32")
        row_max = T.alloc_fragment([ROWS], "float32")
        row_sum = T.alloc_fragment([ROWS], "float32")
        row_edge = T.alloc_fragment([ROWS], "int32")
        turn = T.alloc_var("int32")
        running = T.alloc_var("int32")
        tiles = T.alloc_var("int32")
        head = T.alloc_var("int32")
        extent = T.alloc_var("int32")
        first = T.alloc_var("int32")
        phase = T.alloc_var("int32")
        turn = 0
        running = 1
        first = w
        phase = 0
        while running > 0:
            T.barrier_wait(task_full[turn % TASKS], (turn // TASKS) & 1)
            tiles = T.ceildiv(task_shared[turn % TASKS, NUM_EDGES], queries)
            head = task_shared[turn % TASKS, HEAD]
            extent = task_shared[turn % TASKS, EXTENT]
            if tiles == 0:
                running = 0
            # The warpgroups take turns across tasks: `first` is the first tile of this task that is ours.
            for mine in T.serial((tiles - first + 1) // 2):
                tile = first + mine * 2
                for i in T.Parallel(ROWS):
                    row_edge[i] = edges_shared[turn % TASKS, tile * queries + i // rows_per_query]
                T.barrier_wait(s_full[w], phase)
                T.copy(S[w, :, :], scores)
                if tile == 0 and valid_rows_of(extent) < block_size:
                    # Rows past the request's end may hold NaN, and 0 * NaN would reach O. Whoever has seen this S knows
                    # that the K before V in this place of the ring had come, so that the parity means V.
                    v_place = turn * 2 + 1
                    T.barrier_wait(kv_full[v_place % KV_STAGES], (v_place // KV_STAGES) & 1)
                    for i, j in T.Parallel(block_size, head_dim):
                        if i >= valid_rows_of(extent):
                            KV_shared[v_place % KV_STAGES, i, j] = 0
                    T.fence_proxy_async()
                if is_cut(extent) != 0:
                    for i, j in T.Parallel(ROWS, block_size):
                        scores[i, j] = T.if_then_else(
                            j <= last_column_of(row_edge[i]), scores[i, j], -T.infinity("float32")
                        )
                block_softmax(scores, row_max, row_sum, scale_log2, ROWS, block_size)
                T.copy(scores, probabilities)
                T.copy(probabilities, P[w, :, :])
                T.tcgen05_before_thread_sync()
                T.barrier_arrive(p_full[w])
                for i in T.Parallel(ROWS):
                    if i % rows_per_query < group:
                        partial_lse[query_of(row_edge[i]), slot_of(row_edge[i]), head * group + i % rows_per_query] = (
                            row_max[i] * scale_log2 + T.log2(row_sum[i])
                        ) * LN_2
                for i in T.Parallel(ROWS):
                    row_sum[i] = 1.0 / row_sum[i]
                T.barrier_wait(o_full[w], phase)
                phase = phase ^ 1
                T.copy(O[0, :, :], result)
                T.tcgen05_before_thread_sync()
                T.barrier_arrive(o_taken)
                for i, j in T.Parallel(ROWS, head_dim):
                    result[i, j] = result[i, j] * row_sum[i]
                # Only the thread that issued the stores waits here; the others learn of it through the barrier.
                T.tma_store_wait(0)
                T.sync_threads(8 + w, 128)
                T.copy(result, O_shared[w, :, :])
                T.fence_proxy_async()
                T.sync_threads(8 + w, 128)
                for r in T.unroll(queries):
                    edge = edges_shared[turn % TASKS, tile * queries + r]
                    for half in T.unroll(halves):
                        T.tma_copy(
                            O_shared[
                                w,
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
            first = (first + tiles) & 1
            T.barrier_arrive(task_free[turn % TASKS])
            turn = turn + 1
        T.tma_store_wait(0)

    @T.prim_func
    def main(
        q: T.StridedTensor((total_q, num_q_heads, head_dim), (q_token, q_head, 1), ELEMENT),
        k: T.StridedTensor(k_shape, k_strides, ELEMENT),
        v: T.StridedTensor(v_shape, v_strides, ELEMENT),
        page_table: T.StridedTensor((num_tables, max_pages), (table_stride, 1), "int32"),
        edges: T.Tensor((num_windows, num_kv_heads, num_edges), "int32"),
        tasks: T.Tensor((num_windows, num_kv_heads, num_tasks, 4), "int32"),
        counts: T.Tensor((num_windows, num_kv_heads), "int32"),
        claims: T.Tensor((num_windows,), "int32"),
        partial_out: T.Tensor((window, topk, num_q_heads, head_dim), ELEMENT),
        partial_lse: T.Tensor((window, topk, num_q_heads), "float32"),
        scale_log2: T.float32,
        window_index: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=table.threads):
            KV_shared = make_buffer(table, "blocks")
            Q_shared = make_buffer(table, "queries")
            O_shared = make_buffer(table, "staging")
            task_shared = make_buffer(table, "task")
            edges_shared = make_buffer(table, "edges")
            S = make_tiles(table, "S", "float32", 32)
            P = make_tiles(table, "P", ELEMENT, 16)
            O = make_tiles(table, "O", "float32", 32)
            task_full = make_barrier(table, "task_full")
            task_free = make_barrier(table, "task_free")
            kv_full = make_barrier(table, "kv_full")
            kv_free = make_barrier(table, "kv_free")
            q_full = make_barrier(table, "q_full")
            q_free = make_barrier(table, "q_free")
            s_full = make_barrier(table, "s_full")
            p_full = make_barrier(table, "p_full")
            o_full = make_barrier(table, "o_full")
            o_taken = make_barrier(table, "o_taken_full")
            tx = T.get_thread_binding()
            if tx >= claimer:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < gatherer:
                    claim_tasks(
                        tx - claimer, task_shared, edges_shared, task_full, task_free, edges, tasks, counts, claims,
                        window_index,
                    )  # fmt: skip
                elif tx < issuer:
                    gather(q, Q_shared, task_shared, edges_shared, task_full, task_free, q_full, q_free, window_index)
                elif tx < loader:
                    multiply(
                        Q_shared, KV_shared, S, P, O, task_shared, task_full, task_free, kv_full, kv_free, q_full,
                        q_free, s_full, p_full, o_full, o_taken,
                    )  # fmt: skip
                else:
                    load_blocks(k, v, page_table, KV_shared, task_shared, task_full, task_free, kv_full, kv_free)
            elif tx < odd:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                attend(
                    0, O_shared, KV_shared, S, P, O, task_shared, edges_shared, task_full, task_free, kv_full, s_full,
                    p_full, o_full, o_taken, partial_out, partial_lse, scale_log2,
                )  # fmt: skip
            else:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                attend(
                    1, O_shared, KV_shared, S, P, O, task_shared, edges_shared, task_full, task_free, kv_full, s_full,
                    p_full, o_full, o_taken, partial_out, partial_lse, scale_log2,
                )  # fmt: skip
            # Warp 0 gives the tensor memory back, and must not before the other warps have read it.
            T.sync_threads()

    return main
