"""Reverse index of a block selection: for every KV block, the (query, slot) edges that chose it, and the task list.

Grid: (window, KV head, part); the CTAs of a window sort the edges of its queries by KV block with a counting sort that
is stable in the query, so the schedule is the same in every run. Global block numbers are
cu_seqlens_k[b] // block_size + b + block, which keeps requests apart without a prefix sum. They are taken in ranges of
BLOCKS, which the parts of a window take in turn.

Warps: all WARPS warps alike. Warp i owns a contiguous run of the window's queries and takes them in order, with one
slot a lane; where a row fits half a warp, two queries a step, which take turns at the counters. The ids of a row are
distinct, so a turn never has two lanes on one counter and needs no atomics. (Should a caller repeat an id in a row, its
copies collapse into one edge.)

Passes over the ids, for every range of BLOCKS block numbers that the window can touch (one range up to
BLOCKS * block_size keys): count per warp and block; prefix over the warps and over the blocks, which gives each block
its run of edges and its tasks; then the same walk again writes the edges. A CTA counts the ranges below its own too,
whose sums say where its edges and tasks begin.

Shared memory: one counter per warp and block (WARPS x BLOCKS int32), totals, cut flags, and two scan rows.

Edges and tasks are laid out as the sparse_attention kernel documents them. A block with more than CHUNK edges becomes
several tasks of nearly equal size, so that no CTA works long after the others.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_tile_at_most, last_visible

WARPS = 16  # <- tile.warps
BLOCKS = 2048  # <- tile.blocks
CHUNK = 128  # <- tile.chunk
PREFETCH = 4  # <- tile.prefetch
PARTS = 4  # <- tile.parts
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
THREADS = WARPS * 32
PER_THREAD = BLOCKS // THREADS


def build_schedule(block_size: int):
    """Build the kernel for one block size.

    block_indices [num_kv_heads, total_q, topk] in any order with -1 anywhere; ids of blocks that the query cannot see
    are dropped. Writes edges [num_windows, num_kv_heads, window * topk], tasks [.., max_tasks, 4] and the number of
    tasks, counts [num_windows, num_kv_heads].
    """
    num_kv_heads, total_q, topk, num_requests_1, num_requests = T.dynamic(
        "num_kv_heads, total_q, topk, num_requests_1, num_requests"
    )
    num_windows, num_edges, max_tasks = T.dynamic("num_windows, num_edges, max_tasks")
    ids_head, ids_token, num_positions = T.dynamic("ids_head, ids_token, num_positions")

    @T.macro
    def fetch(block_indices, head, first, apart, last_query, slot, topk, ids):
        """What PREFETCH queries from `first` on, some queries apart, hold in a slot, -1 where there is none."""
        for ahead in T.unroll(PREFETCH):
            ids[ahead] = -1
            if first + ahead * apart < last_query and slot < topk:
                ids[ahead] = block_indices[head, first + ahead * apart, slot]

    @T.macro
    def walk(
        write, low, high, lane, warp, window_index, head, first_query, last_query, window, requests,
        block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
        counter, cut, edges,
    ):  # fmt: skip
        """Visit this warp's edges whose block number is in [low, high); count them, or write them when `write`."""
        request = T.alloc_local([1], "int32")
        group_request = T.alloc_var("int32")
        place = T.alloc_var("int32")
        visible = T.alloc_var("int32")
        column = T.alloc_var("int32")
        ids = T.alloc_local([PREFETCH], "int32")
        coming = T.alloc_local([PREFETCH], "int32")
        # Queries a step; which of them is the lane's, and its slot there.
        abreast = T.if_then_else(topk <= 16, 2, 1)
        beside = T.if_then_else(topk <= 16, lane // 16, 0)
        first_slot = lane - beside * 16
        request[0] = 0
        if first_query < last_query:
            last_at_most(cu_seqlens_q, requests, first_query, request)
        group_request = request[0]
        fetch(block_indices, head, first_query + beside, abreast, last_query, first_slot, topk, coming)
        for group in T.serial(T.ceildiv(last_query - first_query, PREFETCH * abreast)):
            for step in T.serial(T.ceildiv(topk, 32)):
                # Every step walks the group's queries again, from the request of the first one.
                if step > 0:
                    request[0] = group_request
                group_request = request[0]
                first = first_query + group * PREFETCH * abreast + beside
                slot = step * 32 + first_slot
                for ahead in T.unroll(PREFETCH):
                    ids[ahead] = coming[ahead]
                # The next ids come while these are placed.
                done = T.if_then_else((step + 1) * 32 >= topk, 1, 0)
                fetch(
                    block_indices, head, first + done * PREFETCH * abreast, abreast, last_query,
                    T.if_then_else(done > 0, first_slot, slot + 32), topk, coming,
                )  # fmt: skip
                for ahead in T.unroll(PREFETCH):
                    query = T.min(first + ahead * abreast, last_query - 1)
                    while query >= cu_seqlens_q[request[0] + 1]:
                        request[0] = request[0] + 1
                    length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                    limit = last_visible(
                        q_positions, use_positions, query, query, length - cu_seqlens_q[request[0] + 1] + query, length
                    )
                    block = ids[ahead]
                    visible = 0
                    column = -1
                    # Compare before multiplying: a wild id must not overflow into a visible one.
                    if block >= 0 and limit >= 0 and block <= limit // block_size:
                        visible = T.min(limit - block * block_size, block_size - 1)
                        column = block + cu_seqlens_k[request[0]] // block_size + request[0] - low
                    for turn in T.unroll(2):
                        if beside == turn and column >= 0 and column < high - low:
                            place = counter[warp, column]
                            counter[warp, column] = place + 1
                            if write:
                                edges[window_index, head, place] = (
                                    ((query - window_index * window) << 13) | (slot << 7) | visible
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
        with T.Kernel(num_windows, num_kv_heads, parts, threads=THREADS) as (window_index, head, part):
            counter = T.alloc_shared([WARPS, BLOCKS], "int32", scope="shared.dyn")
            cut = T.alloc_shared([BLOCKS], "int32", scope="shared.dyn")
            edge_scan = T.alloc_shared([THREADS], "int32", scope="shared.dyn")
            task_scan = T.alloc_shared([THREADS], "int32", scope="shared.dyn")
            totals = T.alloc_local([PER_THREAD], "int32")
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
            stride = T.alloc_var("int32")
            first = T.alloc_var("int32")
            here = T.alloc_var("int32")
            tx = T.get_thread_binding()
            warp = tx // 32
            lane = tx % 32
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
            while mine < ranges:
                upper = T.min(low + BLOCKS, high)
                for i in T.serial(T.ceildiv(upper - low, 32)):
                    if i * 32 + lane < upper - low:
                        counter[warp, i * 32 + lane] = 0
                for i in T.serial(PER_THREAD):
                    cut[i * THREADS + tx] = 0
                T.sync_threads()
                walk(
                    False, low, upper, lane, warp, window_index, head, first_query, last_query, window, requests,
                    block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
                    counter, cut, edges,
                )  # fmt: skip
                T.sync_threads()
                # Each thread owns PER_THREAD neighbouring blocks.
                edge_sum = 0
                task_sum = 0
                for i in T.unroll(PER_THREAD):
                    totals[i] = 0
                    if tx * PER_THREAD + i < upper - low:
                        for other in T.serial(WARPS):
                            totals[i] = totals[i] + counter[other, tx * PER_THREAD + i]
                    edge_sum = edge_sum + totals[i]
                    task_sum = task_sum + T.ceildiv(totals[i], CHUNK)
                edge_scan[tx] = edge_sum
                task_scan[tx] = task_sum
                T.sync_threads()
                stride = 1
                while stride < THREADS:
                    edge_at = 0
                    task_at = 0
                    if tx >= stride:
                        edge_at = edge_scan[tx - stride]
                        task_at = task_scan[tx - stride]
                    T.sync_threads()
                    edge_scan[tx] = edge_scan[tx] + edge_at
                    task_scan[tx] = task_scan[tx] + task_at
                    T.sync_threads()
                    stride = stride * 2
                if number == mine:
                    edge_at = edge_base + edge_scan[tx] - edge_sum
                    task_at = task_base + task_scan[tx] - task_sum
                    for i in T.serial(PER_THREAD):
                        column = tx * PER_THREAD + i
                        if column < upper - low:
                            first = edge_at
                            for other in T.serial(WARPS):
                                here = counter[other, column]
                                counter[other, column] = edge_at
                                edge_at = edge_at + here
                            total = edge_at - first
                            if total > 0:
                                last_tile_at_most(cu_seqlens_k, requests, block_size, low + column, request)
                                block = low + column - cu_seqlens_k[request[0]] // block_size - request[0]
                                valid = T.min(
                                    key_length(cu_seqlens_k, seqused_k, use_seqused, request[0]) - block * block_size,
                                    block_size,
                                )
                                pieces = T.ceildiv(total, CHUNK)
                                piece = T.ceildiv(T.ceildiv(total, pieces), 8) * 8
                                for p in T.serial(pieces):
                                    tasks[window_index, head, task_at, 0] = (
                                        cu_seqlens_k[request[0]] + block * block_size
                                    )
                                    tasks[window_index, head, task_at, 1] = first + p * piece
                                    tasks[window_index, head, task_at, 2] = T.min(piece, total - p * piece)
                                    tasks[window_index, head, task_at, 3] = valid * 2 + cut[column]
                                    task_at = task_at + 1
                    T.sync_threads()
                    walk(
                        True, low, upper, lane, warp, window_index, head, first_query, last_query, window, requests,
                        block_indices, cu_seqlens_q, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
                        counter, cut, edges,
                    )  # fmt: skip
                    T.sync_threads()
                    mine = mine + parts
                edge_base = edge_base + edge_scan[THREADS - 1]
                task_base = task_base + task_scan[THREADS - 1]
                low = low + BLOCKS
                number = number + 1
            # The CTA of the last range has counted all.
            if tx == 0 and part == T.max(ranges - 1, 0) % parts:
                counts[window_index, head] = task_base

    return main
