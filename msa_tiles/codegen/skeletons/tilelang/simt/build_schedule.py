"""Reverse index of a block selection: for every KV block, the (query, slot) edges that chose it, and the task list.

Grid: (window, KV head, part); the CTAs of a window sort the edges of its queries by KV block with a counting sort that
is stable in the query, so the schedule is the same in every run. Global block numbers are
cu_seqlens_k[b] // block_size + b + block, which keeps requests apart without a prefix sum. They are taken in ranges of
BLOCKS, which the parts of a window take in turn.

Warps: all WARPS warps alike. Warp i owns a contiguous run of the window's queries and takes them in order, with one
slot a lane; where a row fits half a warp, two queries a step, which take turns at the counters. The ids of a row are
distinct, so a turn never has two lanes on one counter and needs no atomics. (A row that repeats an id breaks the
contract: copies within a step of 32 slots become one edge, of whichever lane stores last, others edges of their own.)

Passes over the ids, for every range of BLOCKS block numbers that the window can touch (one range up to
BLOCKS * block_size keys): count per warp and block; prefix over the warps and over the blocks, which gives each block
its run of edges and its tasks; then the same walk again writes the edges. A barrier parts each pass from the next; a
warp sets only its own counters to zero, which nobody else looks at after the prefix. A CTA counts the ranges below its
own too, whose sums say where its edges and tasks begin.

Shared memory: one counter per warp and block (WARPS x BLOCKS int32), cut flags, two sums of every warp. A thread owns
PER_THREAD neighbouring blocks between the walks, and reads and writes their counters together.

Edges and tasks are the words that msa_tiles.dsl.words describes. A block with more than CHUNK edges becomes
several tasks of nearly equal size, so that no CTA works long after the others.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Role, Table, buffer, declares
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.scan import inclusive_sums
from msa_tiles.dsl.tilelang.shared import make_buffer
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_tile_at_most, last_visible
from msa_tiles.dsl.words import edge_of, extent_of

WARPS = 16  # <- tile.warps
BLOCKS = 2048  # <- tile.blocks
CHUNK = 128  # as msa_tiles.launch.windows counts tasks
PREFETCH = 4  # <- tile.prefetch
PARTS = 4  # <- tile.parts
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
THREADS = WARPS * 32
PER_THREAD = BLOCKS // THREADS


@declares
def cta(block_size):
    return Table(
        roles=(Role("everybody", WARPS, "a contiguous run of the window's queries each, in order"),),
        pipelines=(),
        buffers=(
            buffer("counter", "int32", warps=WARPS, blocks=BLOCKS),
            buffer("cut", "int32", blocks=BLOCKS),
            buffer("warp_sums", "int32", kinds=2, warps=WARPS),
        ),
        static=TILELANG,
    )


def build_schedule(block_size: int):
    """Build the kernel for one block size.

    block_indices [num_kv_heads, total_q, topk] in any order with -1 anywhere; ids of blocks that the query cannot see
    are dropped. Writes edges [num_windows, num_kv_heads, window * topk], tasks [.., max_tasks, 4] and the number of
    tasks, counts [num_windows, num_kv_heads].
    """
    table = cta(block_size)
    num_kv_heads, total_q, topk, num_requests_1, num_requests = T.dynamic(
        "num_kv_heads, total_q, topk, num_requests_1, num_requests"
    )
    num_windows, num_edges, max_tasks = T.dynamic("num_windows, num_edges, max_tasks")
    num_positions = T.dynamic("num_positions")
    ids_head, ids_token = strides("ids_head, ids_token")

    @T.macro
    def fetch(block_indices, head, first, apart, last_query, slot, topk, ids):
        """What PREFETCH queries from `first` on, some queries apart, hold in a slot, -1 where there is none."""
        for ahead in T.unroll(PREFETCH):
            ids[ahead] = -1
            if first + ahead * apart < last_query and slot < topk:
                # Unsigned: a row times a stride of 64 bits is one multiplication then, and three with a sign.
                ids[ahead] = block_indices[T.cast(head, "uint32"), T.cast(first + ahead * apart, "uint32"), slot]

    @T.macro
    def stand(cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, request, standing):
        """Where a request's queries end, how many keys it has, and the global number of its first block."""
        standing[0] = cu_seqlens_q[request[0] + 1]
        standing[1] = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
        standing[2] = cu_seqlens_k[request[0]] // block_size + request[0]

    @T.macro
    def walk(
        write, low, high, lane, warp, window_index, head, first_query, last_query, window, requests,
        block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
        counter, cut, edges,
    ):  # fmt: skip
        """Visit this warp's edges whose block number is in [low, high); count them, or write them when `write`."""
        request = T.alloc_local([1], "int32")
        # Of the request: [end of its queries, its keys, the global number of its first block].
        standing = T.alloc_local([3], "int32")
        before = T.alloc_local([4], "int32")
        place = T.alloc_var("int32")
        query = T.alloc_var("int32")
        visible = T.alloc_var("int32")
        column = T.alloc_var("int32")
        ids = T.alloc_local([PREFETCH], "int32")
        coming = T.alloc_local([PREFETCH], "int32")
        # Queries a step; which of them is the lane's, and its slot there.
        abreast = T.alloc_var("int32")
        beside = T.alloc_var("int32")
        first_slot = T.alloc_var("int32")
        first = T.alloc_var("int32")
        next_first = T.alloc_var("int32")
        next_slot = T.alloc_var("int32")
        abreast = T.if_then_else(topk <= 16, 2, 1)
        beside = T.if_then_else(topk <= 16, lane // 16, 0)
        first_slot = lane - beside * 16
        request[0] = 0
        for i in T.unroll(3):
            standing[i] = 0
        if first_query < last_query:
            last_at_most(cu_seqlens_q, requests, first_query, request)
            stand(cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, request, standing)
        fetch(block_indices, head, first_query + beside, abreast, last_query, first_slot, topk, coming)
        for group in T.serial(T.ceildiv(last_query - first_query, PREFETCH * abreast)):
            first = first_query + group * PREFETCH * abreast + beside
            before[0] = request[0]
            for i in T.unroll(3):
                before[1 + i] = standing[i]
            for step in T.serial(T.ceildiv(topk, 32)):
                # Every step walks the group's queries again, from the request of the first one.
                request[0] = before[0]
                for i in T.unroll(3):
                    standing[i] = before[1 + i]
                for ahead in T.unroll(PREFETCH):
                    ids[ahead] = coming[ahead]
                # The next ids come while these are placed.
                next_first = first
                next_slot = (step + 1) * 32 + first_slot
                if (step + 1) * 32 >= topk:
                    next_first = first + PREFETCH * abreast
                    next_slot = first_slot
                fetch(block_indices, head, next_first, abreast, last_query, next_slot, topk, coming)
                for ahead in T.unroll(PREFETCH):
                    query = T.min(first + ahead * abreast, last_query - 1)
                    while query >= standing[0]:
                        request[0] = request[0] + 1
                        stand(cu_seqlens_q, cu_seqlens_k, seqused_k, use_seqused, request, standing)
                    limit = last_visible(
                        q_positions, use_positions, query, query, standing[1] - standing[0] + query, standing[1]
                    )
                    block = ids[ahead]
                    visible = 0
                    column = -1
                    # Compare before multiplying: a wild id must not overflow into a visible one.
                    if block >= 0 and limit >= 0 and block <= limit // block_size:
                        visible = T.min(limit - block * block_size, block_size - 1)
                        column = block + standing[2] - low
                    for turn in T.unroll(2):
                        if beside == turn and column >= 0 and column < high - low:
                            place = counter[warp, column]
                            counter[warp, column] = place + 1
                            if write:
                                edges[window_index, head, place] = edge_of(
                                    query - window_index * window, step * 32 + first_slot, visible
                                )
                            elif visible < block_size - 1:
                                cut[column] = 1
                        T.sync_warp()

    @T.prim_func
    def main(
        block_indices: T.StridedTensor((num_kv_heads, total_q, topk), (ids_head, ids_token, 1), "int32"),
        cu_seqlens_q: T.Tensor((num_requests_1,), "int32"),
        cu_seqlens_k: T.Tensor((num_requests_1,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        edges: T.Tensor((num_windows, num_kv_heads, num_edges), "int32"),
        tasks: T.Tensor((num_windows, num_kv_heads, max_tasks, 4), "int32"),
        counts: T.Tensor((num_windows, num_kv_heads), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        window: T.int32,
    ):
        # Tasks have room for one of each block, and for one of every CHUNK edges.
        parts = T.max(T.min(T.ceildiv(max_tasks - num_edges // CHUNK, BLOCKS), PARTS), 1)
        with T.Kernel(num_windows, num_kv_heads, parts, threads=table.threads) as (window_index, head, part):
            counter = make_buffer(table, "counter")
            cut = make_buffer(table, "cut")
            warp_sums = make_buffer(table, "warp_sums")
            # Of a thread's blocks: edges, the counters of one warp, and where its next edge goes.
            totals = T.alloc_local([PER_THREAD], "int32")
            part_counts = T.alloc_local([PER_THREAD], "int32")
            at = T.alloc_local([PER_THREAD], "int32")
            zeros = T.alloc_local([PER_THREAD], "int32")
            # Edges and tasks of the blocks up to and with this thread's, and of all.
            until = T.alloc_local([2], "int32")
            everything = T.alloc_local([2], "int32")
            request = T.alloc_local([1], "int32")
            low = T.alloc_var("int32")
            mine = T.alloc_var("int32")
            number = T.alloc_var("int32")
            ranges = T.alloc_var("int32")
            high = T.alloc_var("int32")
            edge_base = T.alloc_var("int32")
            task_base = T.alloc_var("int32")
            edge_at = T.alloc_var("int32")
            task_at = T.alloc_var("int32")
            edge_sum = T.alloc_var("int32")
            task_sum = T.alloc_var("int32")
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
            own = tx * PER_THREAD
            requests = num_requests_1 - 1
            window_first = window_index * window
            # Queries past the last request belong to nobody.
            window_last = T.min(T.min(window_first + window, total_q), cu_seqlens_q[requests])
            share = T.ceildiv(window, WARPS)
            first_query = T.min(window_first + warp * share, window_last)
            last_query = T.min(first_query + share, window_last)
            edge_base = 0
            task_base = 0
            low = 0
            high = 0
            request[0] = 0
            if window_first < window_last:
                last_at_most(cu_seqlens_q, requests, window_first, request)
                low = cu_seqlens_k[request[0]] // block_size + request[0]
                last_at_most(cu_seqlens_q, requests, window_last - 1, request)
                high = (
                    cu_seqlens_k[request[0]] // block_size
                    + request[0]
                    + T.ceildiv(key_length(cu_seqlens_k, seqused_k, use_seqused, request[0]), block_size)
                )
            ranges = T.ceildiv(high - low, BLOCKS)
            mine = part
            number = 0
            for i in T.unroll(PER_THREAD):
                zeros[i] = 0
            while mine < ranges:
                upper = T.min(low + BLOCKS, high)
                for i in T.serial(T.ceildiv(upper - low, 32 * PER_THREAD)):
                    column = (i * 32 + lane) * PER_THREAD
                    counter[warp, column : column + PER_THREAD] = zeros[0:PER_THREAD]
                cut[own : own + PER_THREAD] = zeros[0:PER_THREAD]
                T.sync_threads()
                walk(
                    False, low, upper, lane, warp, window_index, head, first_query, last_query, window, requests,
                    block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
                    counter, cut, edges,
                )  # fmt: skip
                T.sync_threads()
                for i in T.unroll(PER_THREAD):
                    totals[i] = 0
                if own < upper - low:
                    for other in T.unroll(WARPS):
                        part_counts[0:PER_THREAD] = counter[other, own : own + PER_THREAD]
                        for i in T.unroll(PER_THREAD):
                            totals[i] = totals[i] + part_counts[i]
                edge_sum = 0
                task_sum = 0
                for i in T.unroll(PER_THREAD):
                    edge_sum = edge_sum + totals[i]
                    task_sum = task_sum + T.ceildiv(totals[i], CHUNK)
                until[0] = edge_sum
                until[1] = task_sum
                inclusive_sums(until, 2, warp_sums, warp, lane, everything)
                if number == mine:
                    edge_at = edge_base + until[0] - edge_sum
                    task_at = task_base + until[1] - task_sum
                    for i in T.unroll(PER_THREAD):
                        at[i] = edge_at
                        edge_at = edge_at + totals[i]
                    if own < upper - low:
                        for other in T.unroll(WARPS):
                            part_counts[0:PER_THREAD] = counter[other, own : own + PER_THREAD]
                            counter[other, own : own + PER_THREAD] = at[0:PER_THREAD]
                            for i in T.unroll(PER_THREAD):
                                at[i] = at[i] + part_counts[i]
                        for i in T.unroll(PER_THREAD):
                            if totals[i] > 0:
                                last_tile_at_most(cu_seqlens_k, requests, block_size, low + own + i, request)
                                block = low + own + i - cu_seqlens_k[request[0]] // block_size - request[0]
                                valid = T.min(
                                    key_length(cu_seqlens_k, seqused_k, use_seqused, request[0]) - block * block_size,
                                    block_size,
                                )
                                pieces = T.ceildiv(totals[i], CHUNK)
                                piece = T.ceildiv(T.ceildiv(totals[i], pieces), 8) * 8
                                for p in T.serial(pieces):
                                    tasks[window_index, head, task_at, 0] = (
                                        cu_seqlens_k[request[0]] + block * block_size
                                    )
                                    tasks[window_index, head, task_at, 1] = at[i] - totals[i] + p * piece
                                    tasks[window_index, head, task_at, 2] = T.min(piece, totals[i] - p * piece)
                                    tasks[window_index, head, task_at, 3] = extent_of(valid, cut[own + i])
                                    task_at = task_at + 1
                    T.sync_threads()
                    walk(
                        True, low, upper, lane, warp, window_index, head, first_query, last_query, window, requests,
                        block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
                        counter, cut, edges,
                    )  # fmt: skip
                    mine = mine + parts
                edge_base = edge_base + everything[0]
                task_base = task_base + everything[1]
                low = low + BLOCKS
                number = number + 1
            # The CTA of the last range has counted all.
            if tx == 0 and part == T.max(ranges - 1, 0) % parts:
                counts[window_index, head] = task_base

    return main
