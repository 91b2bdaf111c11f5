"""Exact top-k over block scores: a warp for each row, every score read once.

Grid: (run of consecutive tokens, KV head), runs on the axis that may be longer than 65,535, the last tokens first,
since theirs may be the longest rows. A warp takes ROWS tokens one after another, fewer where rows are few. How it
chooses is told in msa_tiles.dsl.tilelang.candidates. Blocks past a row's valid count are never looked at. With
several index heads per KV head, the maximum over the heads counts; it ignores NaN unless every head has NaN.
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Role, Table, buffer, declares
from msa_tiles.dsl.tilelang.candidates import Lengths, Lists, Row, rank, select_topk, slots_of, valid_blocks
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.shared import make_buffer
from msa_tiles.dsl.tilelang.warp import WARP

WARPS = 8  # <- tile.warps
ROWS = 8  # <- tile.rows
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
# Warps per SM for each list capacity: a chunk and a share of the list are kept in registers.
RESIDENT = {8: 32, 16: 32, 32: 24, 64: 16}


@declares
def cta(topk):
    slots = max(topk // 16, 1)
    return Table(
        roles=(Role("everybody", WARPS, "a row each"),),
        pipelines=(),
        buffers=(
            buffer("pool", "int32", warps=WARPS, entries=32 * slots),
            buffer("ids", "int32", warps=WARPS, entries=16 * slots),
            buffer("keys", "int32", warps=WARPS, entries=16 * slots),
        ),
        static=TILELANG,
    )


def rows_of(lanes_log2):
    """How many tokens a warp takes."""
    return T.max(ROWS >> lanes_log2, 1)


def topk_select(topk: int):
    """Build the kernel for one list capacity (topk).

    score [num_index_heads, total_q, max_blocks] float32 -> out [num_kv_heads, total_q, k] int32, k <= topk. How many
    blocks a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token]. order
    counts as in candidates.rank. lanes_log2 0 is for calls whose rows alone fill a GPU, more for fewer rows.

    Shared memory, for every warp: its pool of candidates, [32 slots] blocks, and its list, [16 slots] blocks and keys.
    No warp waits for another.
    """
    slots = slots_of(topk)
    table = cta(topk)
    num_index_heads, num_kv_heads, total_q, max_blocks, k = T.dynamic(
        "num_index_heads, num_kv_heads, total_q, max_blocks, k"
    )
    num_starts, num_requests, num_positions, num_counts = T.dynamic(
        "num_starts, num_requests, num_positions, num_counts"
    )
    score_head, score_token, out_head, out_token = strides("score_head, score_token, out_head, out_token")

    @T.prim_func
    def main(
        score: T.StridedTensor((num_index_heads, total_q, max_blocks), (score_head, score_token, 1), "float32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_starts,), "int32"),
        seqused_k: T.Tensor((num_requests,), "int32"),
        q_positions: T.Tensor((num_positions,), "int32"),
        num_valid: T.Tensor((num_counts,), "int32"),
        out: T.StridedTensor((num_kv_heads, total_q, k), (out_head, out_token, 1), "int32"),
        use_seqused: T.int32,
        use_positions: T.int32,
        valid_mode: T.int32,
        num_valid_scalar: T.int32,
        block_size: T.int32,
        init_blocks: T.int32,
        local_blocks: T.int32,
        order: T.int32,
        lanes_log2: T.int32,
    ):
        with T.Kernel(T.ceildiv(total_q, WARPS * rows_of(lanes_log2)), num_kv_heads, threads=table.threads) as (
            tile,
            head,
        ):
            T.annotate_min_blocks_per_sm(RESIDENT[topk] // WARPS)
            pool = make_buffer(table, "pool")
            ids = make_buffer(table, "ids")
            keys = make_buffer(table, "keys")
            counted = T.alloc_local([1], "int32")
            kept = T.alloc_local([1], "int32")
            place = T.alloc_local([1], "int32")
            heads = T.alloc_var("int32")
            token = T.alloc_var("int32")
            end = T.alloc_var("int32")
            valid = T.alloc_var("int32")
            block = T.alloc_var("int32")
            warp = T.alloc_var("int32")
            tx = T.get_thread_binding()
            # From lane 0, which tells the compiler that all lanes have the same.
            warp = T.shfl_sync(tx // WARP, 0)
            lane = tx % WARP
            rows = rows_of(lanes_log2)
            heads = T.truncdiv(num_index_heads, num_kv_heads)
            token = ((T.ceildiv(total_q, WARPS * rows) - 1 - tile) * WARPS + warp) * rows
            lists = Lists(warp, slots, pool, ids, keys)
            lengths = Lengths(
                cu_seqlens_q, num_starts - 1, cu_seqlens_k, seqused_k, q_positions, use_seqused, use_positions,
                block_size, valid_mode, num_valid_scalar, num_valid,
            )  # fmt: skip
            # Lane i finds the valid count of the warp's row i; then the counts move towards lane 0.
            counted[0] = 0
            if lane < rows and token + lane < total_q:
                valid_blocks(lengths, token + lane, max_blocks, counted)
            end = T.min(token + rows, total_q)
            while token < end:
                valid = T.shfl_sync(counted[0], 0)
                counted[0] = T.shfl_down(counted[0], 1)
                # Unsigned: with a sign, what is multiplied by a stride of 64 bits takes three products instead of one.
                first_head = T.cast(head * heads, "uint32")
                row = Row(score, first_head, heads, T.cast(token, "uint32"), valid, init_blocks, local_blocks)
                select_topk(row, lists, k, lane, kept)
                for s in T.unroll((topk + WARP - 1) // WARP):
                    if WARP * s + lane < k:
                        block = -1
                        place[0] = WARP * s + lane
                        if WARP * s + lane < kept[0]:
                            block = ids[warp, WARP * s + lane]
                            if order != 0:
                                rank(lists, kept[0], WARP * s + lane, order, place)
                        out[head, T.cast(token, "uint32"), place[0]] = block
                T.sync_warp()
                token = token + 1

    return main
