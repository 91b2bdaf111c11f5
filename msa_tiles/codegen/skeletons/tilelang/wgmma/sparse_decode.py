"""Attention of few queries over their selected blocks, split over the blocks: the decode twin of sparse_attention.

Grid: (query, KV head, split), queries on the axis that may be longer than 65,535. A CTA takes an equal share of the
query's slots and walks those whose block the query sees with a running softmax; the shares are merged by `combine`. One
split writes the answer itself.

With scored_blocks > 0 the ids are not given but chosen first, by the whole CTA, from the scores of the row, as
msa_tiles.dsl.tilelang.threshold describes; every split of a row chooses the same, and the first one writes the ids.

# <- cta

The floor is one read of the selected keys and values; the tensor cores work on 64 rows, however few heads there are.
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
"""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Pipeline, Role, Table, buffer, declares, threads
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.operands import plain as key_value  # <- operands.key_value
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer
from msa_tiles.dsl.tilelang.softmax import LOWEST
from msa_tiles.dsl.tilelang.stages import advance, clear_rows
from msa_tiles.dsl.tilelang.threshold import list_best, load_keys, write_row
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_visible

OUTPUT = "bfloat16"  # <- precision.output
STAGES = 2  # <- tile.stages
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.enable_fast_math": True,
}
ROWS = 64
RANKERS = 256  # all threads
LIST = 64
LN_2 = 0.6931471805599453


@declares
def cta(head_dim, block_size, group, pages_per_block, scored_blocks, **scales):
    sides = {"producer": "producer", "readers": ["consumer"], **scales}
    keys = key_value.parts("k", head_dim, block_size, STAGES, **sides)
    values = key_value.parts("v", head_dim, block_size, STAGES, **sides)
    queries = buffer("queries", key_value.multiplied("k", **scales), align=1024, rows=ROWS, head_dim=head_dim)
    ranking = (
        buffer("sums", "int32", static=True, halves=2, warps=RANKERS // 16),
        buffer("candidate_ids", "int32", static=True, candidates=RANKERS),
        buffer("candidate_keys", "uint32", static=True, candidates=RANKERS),
        buffer("listed_ids", "int32", static=True, listed=LIST),
        buffer("listed_keys", "uint32", static=True, listed=LIST),
    )
    return Table(
        roles=(
            Role("consumer", 4, "the query's heads in the first rows of a tile of 64; S = Q K^T, softmax, O += P V"),
            Role("producer", 4, "reads the ids, loads Q once, then K and V of one block a stage"),
        ),
        pipelines=(Pipeline("q", 1, (threads("producer"),), fills=("queries",)), *keys.pipelines, *values.pipelines),
        buffers=(queries, *keys.buffers, *values.buffers, *(ranking if scored_blocks > 0 else ())),
        static=TILELANG,
    )


class Tiles(NamedTuple):
    """The tiles of keys and values, and their pipelines."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


def sparse_decode(
    head_dim: int,
    block_size: int,
    group: int,
    pages_per_block: int,
    scored_blocks: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim, block size, group, page size, and rows of so many scores (0: ids are given).

    q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads, head_dim], or [pages, num_kv_heads, page,
    head_dim] with pages_per_block > 0 and page_table [requests, max_pages], block_indices [num_kv_heads, total_q, topk]
    -> partial_out [splits, total_q, num_q_heads, head_dim] and partial_lse [splits, total_q, num_q_heads] (natural
    logarithm); a share without a visible key gives 0 and -inf. scale_log2 is the softmax scale times log2(e). With
    scored_blocks > 0, score [num_index_heads, total_q, width] is ranked, topk <= LIST, and block_indices is an output.
    """
    total_q, num_q_heads, num_kv_heads = T.dynamic("total_q, num_q_heads, num_kv_heads")
    num_starts, num_key_starts, num_requests = T.dynamic("num_starts, num_key_starts, num_requests")
    num_tables, max_pages, num_positions = T.dynamic("num_tables, max_pages, num_positions")
    table_stride = strides("table_stride")
    topk = T.dynamic("topk")
    ids_head, ids_token, ids_slot = strides("ids_head, ids_token, ids_slot")
    table = cta(
        head_dim, block_size, group, pages_per_block, scored_blocks,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )  # fmt: skip
    per_thread = scored_blocks // RANKERS
    num_index_heads, width = T.dynamic("num_index_heads, width")
    score_head, score_token = strides("score_head, score_token")
    splits = T.dynamic("splits")
    q_token, q_head = strides("q_token, q_head")
    part_split, part_token, part_head = strides("part_split, part_token, part_head")
    plse_split, plse_token, plse_head = strides("plse_split, plse_token, plse_head")
    keys, values = (
        key_value.Operand(
            name, head_dim, block_size, pages_per_block,
            token_scales=token_scales,  # % if "token_scales" in plan.variants
        )
        for name in "kv"
    )  # fmt: skip

    @T.macro
    def lay_down(stored_k, stored_v, page_table, row, head, tiles, at, come, thread):
        """The next block's tiles, one after the other."""
        T.barrier_wait(tiles.k_free[at[0]], at[1] ^ 1)
        key_value.fill(keys, stored_k, page_table, row, head, tiles.k, tiles.k_full, at[0], come[0], come[1], thread)
        T.barrier_arrive(tiles.k_full[at[0]])
        T.barrier_wait(tiles.v_free[at[0]], at[1] ^ 1)
        key_value.fill(values, stored_v, page_table, row, head, tiles.v, tiles.v_full, at[0], come[0], come[1], thread)
        T.barrier_arrive(tiles.v_full[at[0]])
        advance(at, table.depth("k"))
        if key_value.STARTS:
            advance(come, STAGES)

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
        block_indices: T.StridedTensor((num_kv_heads, total_q, topk), (ids_head, ids_token, ids_slot), "int32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_key_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        score: T.StridedTensor((num_index_heads, total_q, width), (score_head, score_token, 1), "float32"),
        partial_out: T.StridedTensor(
            (splits, total_q, num_q_heads, head_dim), (part_split, part_token, part_head, 1), OUTPUT
        ),
        partial_lse: T.StridedTensor((splits, total_q, num_q_heads), (plse_split, plse_token, plse_head), "float32"),
        scale_log2: T.float32,
        use_seqused: T.int32,
        use_positions: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
    ):
        with T.Kernel(total_q, num_kv_heads, splits, threads=table.threads) as (token, head, split):
            Q_shared = make_buffer(table, "queries")
            K_shared = key_value.allocate(keys, table, STAGES)
            V_shared = key_value.allocate(values, table, STAGES)
            stored_k = key_value.Stored(
                k,  # <- tensors of operands.key_value
            )
            stored_v = key_value.Stored(
                v,  # <- tensors of operands.key_value
            )
            q_full = make_barrier(table, "q_full")
            k_full = make_barrier(table, "k_full")
            v_full = make_barrier(table, "v_full")
            k_free = make_barrier(table, "k_free")
            v_free = make_barrier(table, "v_free")
            tiles = Tiles(K_shared, V_shared, k_full, v_full, k_free, v_free)
            request = T.alloc_local([1], "int32")
            wanted = T.alloc_var("int32")
            limit = T.alloc_var("int32")
            length = T.alloc_var("int32")
            key_row = T.alloc_var("int32")
            at = T.alloc_local([2], "int32")
            block = T.alloc_var("int32")
            tx = T.get_thread_binding()
            if scored_blocks == 0:
                T.pdl_sync()
                T.pdl_trigger()
            limit = -1
            length = 0
            key_row = 0
            # Tokens past the last request belong to nobody and see nothing.
            if token < cu_seqlens_q[num_starts - 1]:
                last_at_most(cu_seqlens_q, num_starts - 1, token, request)
                length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                end_token = cu_seqlens_q[request[0] + 1]
                limit = last_visible(q_positions, use_positions, token, end_token, length, length)
                if pages_per_block > 0:
                    key_row = request[0] * max_pages * block_size
                else:
                    key_row = cu_seqlens_k[request[0]]
            wanted = topk
            if scored_blocks > 0:
                # Only the scores are the work of the kernel before, which began when everything else was there.
                T.pdl_sync()
                T.pdl_trigger()
                sums = make_buffer(table, "sums")
                candidate_ids = make_buffer(table, "candidate_ids")
                candidate_keys = make_buffer(table, "candidate_keys")
                listed_ids = make_buffer(table, "listed_ids")
                listed_keys = make_buffer(table, "listed_keys")
                read = T.alloc_local([per_thread], "float32")
                ranks = T.alloc_local([per_thread], "uint32")
                valid = T.alloc_var("int32")
                valid = T.min(T.truncdiv(T.max(limit + 1, 0) + block_size - 1, block_size), width)
                wanted = T.min(topk, valid)
                load_keys(
                    score, head, T.truncdiv(num_index_heads, num_kv_heads), token, tx, RANKERS, per_thread, valid,
                    init_blocks, local_blocks, read, ranks,
                )  # fmt: skip
                list_best(
                    tx, RANKERS, per_thread, ranks, wanted, sums, candidate_ids, candidate_keys, listed_ids, listed_keys
                )
                if split == 0:
                    write_row(tx, topk, wanted, 0, listed_ids, listed_keys, block_indices, head, token)
            # Slots split * topk / splits and on: shares differ by one slot at most.
            first_slot = T.truncdiv(split * topk, splits)
            last_slot = T.truncdiv((split + 1) * topk, splits)
            at[0] = 0
            at[1] = 0
            if tx >= 128:
                if key_value.STARTS:
                    # The block that is to be laid down next, and how many are on their way.
                    come = T.alloc_local([2], "int32")
                    begun = T.alloc_var("int32")
                    come[0] = 0
                    come[1] = 0
                    begun = 0
                for half in T.unroll(head_dim // 64):
                    T.tma_copy(
                        described(q)[token, head * group : head * group + group, half * 64 : half * 64 + 64],
                        Q_shared[0:group, half * 64 : half * 64 + 64],
                        barrier=q_full,
                    )
                T.barrier_arrive(q_full)
                for i in T.serial(last_slot - first_slot):
                    block = -1
                    if scored_blocks > 0:
                        if first_slot + i < wanted:
                            block = listed_ids[first_slot + i]
                    else:
                        block = block_indices[head, token, first_slot + i]
                    if block >= 0 and block <= limit // block_size:
                        row = key_row + block * block_size
                        if key_value.STARTS:
                            if begun == STAGES:
                                lay_down(stored_k, stored_v, page_table, row, head, tiles, at, come, tx - 128)
                                begun = begun - 1
                            # All threads are done with the stage.
                            T.sync_threads(7, 128)
                            rows = limit + 1 - block * block_size
                            stage = T.truncmod(come[0] + begun, STAGES)
                            key_value.start(keys, stored_k, page_table, row, head, K_shared, stage, rows, tx - 128)
                            key_value.start(values, stored_v, page_table, row, head, V_shared, stage, rows, tx - 128)
                            begun = begun + 1
                        else:
                            lay_down(stored_k, stored_v, page_table, row, head, tiles, at, at, tx - 128)
                if key_value.STARTS:
                    for _ in T.serial(begun):
                        lay_down(stored_k, stored_v, page_table, 0, head, tiles, at, come, tx - 128)
            else:
                S = T.alloc_fragment([ROWS, block_size], "float32")
                P = T.alloc_fragment([ROWS, block_size], values.element)
                O = T.alloc_fragment([ROWS, head_dim], "float32")
                row_max = T.alloc_fragment([ROWS], "float32")
                before = T.alloc_fragment([ROWS], "float32")
                scale = T.alloc_fragment([ROWS], "float32")
                row_sum = T.alloc_fragment([ROWS], "float32")
                block_sum = T.alloc_fragment([ROWS], "float32")
                T.fill(O, 0.0)
                T.fill(row_sum, 0.0)
                T.fill(row_max, LOWEST)
                factor = keys.fold(scale_log2, stored_k, head)
                T.barrier_wait(q_full, 0)
                for i in T.serial(last_slot - first_slot):
                    block = -1
                    if scored_blocks > 0:
                        if first_slot + i < wanted:
                            block = listed_ids[first_slot + i]
                    else:
                        block = block_indices[head, token, first_slot + i]
                    if block >= 0 and block <= limit // block_size:
                        # Of the block's rows, which may be more than all.
                        seen = limit + 1 - block * block_size
                        T.barrier_wait(k_full[at[0]], at[1])
                        T.wgmma_gemm(Q_shared, K_shared.tiles[at[0], :, :], S, transpose_B=True, clear_accum=True)
                        T.wait_wgmma(0)
                        key_value.weigh(keys, K_shared, S, ROWS)
                        T.barrier_arrive(k_free[at[0]])
                        if (block + 1) * block_size > limit + 1:
                            for r, j in T.Parallel(ROWS, block_size):
                                S[r, j] = T.if_then_else(
                                    block * block_size + j <= limit, S[r, j], -T.infinity("float32")
                                )
                        T.copy(row_max, before)
                        T.reduce_max(S, row_max, dim=1, clear=False)
                        for r in T.Parallel(ROWS):
                            scale[r] = T.exp2((before[r] - row_max[r]) * factor)
                        for r, j in T.Parallel(ROWS, block_size):
                            S[r, j] = T.exp2(S[r, j] * factor - row_max[r] * factor)
                        T.reduce_sum(S, block_sum, dim=1)
                        for r in T.Parallel(ROWS):
                            row_sum[r] = row_sum[r] * scale[r] + block_sum[r]
                        for r, c in T.Parallel(ROWS, head_dim):
                            O[r, c] = O[r, c] * scale[r]
                        T.barrier_wait(v_full[at[0]], at[1])
                        key_value.weigh(values, V_shared, S, ROWS)
                        T.copy(S, P)
                        clear_rows(V_shared.tiles, at[0], seen, 8)
                        T.wgmma_gemm(P, V_shared.tiles[at[0], :, :], O, clear_accum=False)
                        T.wait_wgmma(0)
                        T.barrier_arrive(v_free[at[0]])
                        advance(at, table.depth("k"))
                # Not `row_sum > 0`: a NaN has to come through.
                for r in T.Parallel(ROWS):
                    scale[r] = values.fold(T.if_then_else(row_sum[r] != 0.0, 1.0 / row_sum[r], 0.0), stored_v, head)
                for r, c in T.Parallel(ROWS, head_dim):
                    if r < group:
                        partial_out[split, token, head * group + r, c] = O[r, c] * scale[r]
                for r in T.Parallel(ROWS):
                    if r < group:
                        partial_lse[split, token, head * group + r] = T.if_then_else(
                            row_sum[r] != 0.0,
                            (row_max[r] * factor + T.log2(row_sum[r])) * LN_2,
                            -T.infinity("float32"),
                        )

    return main
