"""Exact top-k over block scores for few rows: one CTA a row, keys in registers.

Grid: (token, KV head), tokens on the axis that may be longer than 65,535. How the best are found is described in
msa_tiles.dsl.tilelang.threshold; every score is read once.

# <- cta
"""

import tilelang.language as T

from msa_tiles.dsl.table import TILELANG, Role, Table, buffer, declares
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.shared import make_buffer
from msa_tiles.dsl.tilelang.threshold import list_best, load_keys, write_row
from msa_tiles.dsl.tilelang.varlen import key_length, last_at_most, last_visible

WARPS = 8  # <- tile.warps
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
THREADS = WARPS * 32
LIST = 64


@declares
def cta(max_blocks):
    return Table(
        roles=(Role("everybody", WARPS, "the scores of a row, each warp its share"),),
        pipelines=(),
        buffers=(
            buffer("sums", "int32", halves=2, warps=2 * WARPS),
            buffer("candidate_ids", "int32", candidates=32 * WARPS),
            buffer("candidate_keys", "uint32", candidates=32 * WARPS),
            buffer("listed_ids", "int32", listed=LIST),
            buffer("listed_keys", "uint32", listed=LIST),
        ),
        static=TILELANG,
    )


def decode_topk(max_blocks: int):
    """Build the kernel for rows of at most max_blocks scores.

    score [num_index_heads, total_q, width] float32 -> out [num_kv_heads, total_q, k] int32, k <= LIST. How many blocks
    a row may choose from: valid_mode 0 by the query's position, 1 num_valid_scalar, 2 num_valid[token]. order: 0
    ascending ids, 1 as ranked (init, local, descending score), 2 init, descending score, local last.
    """
    table = cta(max_blocks)
    per_thread = max_blocks // THREADS
    num_index_heads, num_kv_heads, total_q, width, k = T.dynamic("num_index_heads, num_kv_heads, total_q, width, k")
    num_starts, num_key_starts, num_requests = T.dynamic("num_starts, num_key_starts, num_requests")
    num_positions, num_counts = T.dynamic("num_positions, num_counts")
    score_head, score_token, out_head, out_token = strides("score_head, score_token, out_head, out_token")

    @T.prim_func
    def main(
        score: T.StridedTensor((num_index_heads, total_q, width), (score_head, score_token, 1), "float32"),
        cu_seqlens_q: T.Tensor((num_starts,), "int32"),
        cu_seqlens_k: T.Tensor((num_key_starts,), "int32"),
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
    ):
        with T.Kernel(total_q, num_kv_heads, threads=table.threads) as (token, head):
            sums = make_buffer(table, "sums")
            candidate_ids = make_buffer(table, "candidate_ids")
            candidate_keys = make_buffer(table, "candidate_keys")
            listed_ids = make_buffer(table, "listed_ids")
            listed_keys = make_buffer(table, "listed_keys")
            read = T.alloc_local([per_thread], "float32")
            keys = T.alloc_local([per_thread], "uint32")
            request = T.alloc_local([1], "int32")
            valid = T.alloc_var("int32")
            length = T.alloc_var("int32")
            tx = T.get_thread_binding()
            T.pdl_sync()
            T.pdl_trigger()
            valid = 0
            # Tokens past the last request belong to nobody and choose nothing.
            if token < cu_seqlens_q[num_starts - 1]:
                if valid_mode == 0:
                    last_at_most(cu_seqlens_q, num_starts - 1, token, request)
                    length = key_length(cu_seqlens_k, seqused_k, use_seqused, request[0])
                    length = last_visible(
                        q_positions, use_positions, token, cu_seqlens_q[request[0] + 1], length, length
                    )
                    valid = T.truncdiv(T.max(length + 1, 0) + block_size - 1, block_size)
                elif valid_mode == 1:
                    valid = num_valid_scalar
                else:
                    valid = num_valid[token]
                valid = T.max(T.min(valid, width), 0)
            wanted = T.min(k, valid)
            load_keys(
                score, head, T.truncdiv(num_index_heads, num_kv_heads), token, tx, THREADS, per_thread, valid,
                init_blocks, local_blocks, read, keys,
            )  # fmt: skip
            list_best(
                tx, THREADS, per_thread, keys, wanted, sums, candidate_ids, candidate_keys, listed_ids, listed_keys
            )
            write_row(tx, k, wanted, order, listed_ids, listed_keys, out, head, token)

    return main
