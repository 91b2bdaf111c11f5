"""Write quantised keys and values, of pages or flat, as flat ones of 16 bits, times their scales.

Grid: a CTA for every ROWS * STEPS tokens of a request's table and head; head_dim // 8 neighbouring threads have a row
of k and the one of v, eight columns of each, and STEPS rows that lie ROWS tokens apart. All of them are read before one
is written, 16 bytes at a time; as many columns are read at once.

Of pages, those of a request come in the order of its row of page_table, as many rows as the table has room for; what
lies behind seqused_k is not written, and tokens of a page that the cache does not have are 0. Offsets have 64 bits.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append import VECTOR
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.operands import dequantize_e4m3 as key_value  # <- operands.key_value

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
STEPS = 4  # <- tile.steps
EVERY_BIT = 0xFFFFFFFF
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}


def dequantize_kv(
    head_dim: int,
    paged: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim.

    k, v [pages, heads, page size, head_dim], page_table int32 [requests, columns] and seqused_k int32 [requests] ->
    k_out, v_out [requests * columns * page size, heads, head_dim]. Without `paged` there are one request and one page,
    [total_k] long: of page_table [1, 1] and seqused_k [1] nothing is read.
    # % if "token_scales" in plan.variants
    k_scale and v_scale are [heads], or with token_scales [pages, heads, page size].
    # % else
    k and v hold two values in a byte. Bytes of k_scale and v_scale [pages, heads, page size / n, n, groups], n 1 or 4,
    are one for every group of a row; global scales, of formats that have them, are [heads].
    # % endif
    """
    lanes = head_dim // VECTOR
    tokens = ROWS * STEPS
    scaled = {}
    scaled = {"token_scales": token_scales}  # % if "token_scales" in plan.variants
    k_rows = key_value.Cache("k", head_dim, **scaled)
    v_rows = key_value.Cache("v", head_dim, **scaled)
    pages, heads, page_size, requests, columns, rows = T.dynamic("pages, heads, page_size, requests, columns, rows")
    k_out_row, k_out_head, v_out_row, v_out_head = strides("k_out_row, k_out_head, v_out_row, v_out_head")
    table_row = strides("table_row")
    span = columns * page_size

    @T.prim_func
    def main(
        k: k_rows.tensor(pages, heads, page_size),
        k_scale: k_rows.scale(pages, heads, page_size),
        k_global_scale: k_rows.global_scale(heads),  # % if precision.scale.global_dtype
        v: v_rows.tensor(pages, heads, page_size),
        v_scale: v_rows.scale(pages, heads, page_size),
        v_global_scale: v_rows.global_scale(heads),  # % if precision.scale.global_dtype
        page_table: T.StridedTensor((requests, columns), (table_row, 1), "int32"),
        seqused_k: T.Tensor((requests,), "int32"),
        k_out: T.StridedTensor((rows, heads, head_dim), (k_out_row, k_out_head, 1), ELEMENT),
        v_out: T.StridedTensor((rows, heads, head_dim), (v_out_row, v_out_head, 1), ELEMENT),
    ):
        with T.Kernel(requests * T.ceildiv(columns * k.shape[2], tokens) * heads, threads=ROWS * lanes) as block:
            k_stored = key_value.Stored(
                k,  # <- tensors of operands.key_value
            )
            v_stored = key_value.Stored(
                v,  # <- tensors of operands.key_value
            )
            packed = T.alloc_local([4], "uint32")
            key = T.alloc_local([STEPS * key_value.WORDS], "uint32")
            value = T.alloc_local([STEPS * key_value.WORDS], "uint32")
            key_scales = T.alloc_local([STEPS], "uint32")
            value_scales = T.alloc_local([STEPS], "uint32")
            kept = T.alloc_local([STEPS], "uint32")
            k_outer = T.alloc_local([1], "float32")
            v_outer = T.alloc_local([1], "float32")
            head = T.alloc_var("int32")
            first = T.alloc_var("int32")
            length = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            request = T.alloc_var("int32")
            token = T.alloc_var("int32")
            page = T.alloc_var("int32")
            place = T.alloc_var("int32")
            tx = T.get_thread_binding()
            T.pdl_sync()
            T.pdl_trigger()
            row = tx // lanes
            column = (tx % lanes) * VECTOR
            head = T.truncmod(block, heads)
            first = T.truncdiv(block, heads)
            begin = 0
            request = 0
            length = page_size
            if paged:
                request = T.truncdiv(first, T.ceildiv(span, tokens))
                first = T.truncmod(first, T.ceildiv(span, tokens))
                length = T.min(seqused_k[request], span)
                begin = request * span
            first = first * tokens
            if first < length:
                key_value.find_outer(k_rows, k_stored, head, k_outer)
                key_value.find_outer(v_rows, v_stored, head, v_outer)
                for step in T.unroll(STEPS):
                    # Rows behind the last one read that, and are not written.
                    token = T.min(first + step * ROWS + row, length - 1)
                    page = 0
                    place = token
                    kept[step] = T.uint32(EVERY_BIT)
                    if paged:
                        entry = page_table[request, T.truncdiv(token, page_size)]
                        page = T.max(T.min(entry, pages - 1), 0)
                        place = T.truncmod(token, page_size)
                        kept[step] = T.if_then_else(entry == page, T.uint32(EVERY_BIT), T.uint32(0))
                    key_value.read(k_rows, k_stored, page, head, place, column, step, key, key_scales)
                    key_value.read(v_rows, v_stored, page, head, place, column, step, value, value_scales)
                for step in T.unroll(STEPS):
                    if first + step * ROWS + row < length:
                        key_value.decode(k_rows, step, key, key_scales, k_outer, packed)
                        for c in T.unroll(4):
                            packed[c] = packed[c] & kept[step]
                        T.stg128(k_out[begin + first + step * ROWS + row, head, column], packed[0:4])
                        key_value.decode(v_rows, step, value, value_scales, v_outer, packed)
                        for c in T.unroll(4):
                            packed[c] = packed[c] & kept[step]
                        T.stg128(v_out[begin + first + step * ROWS + row, head, column], packed[0:4])

    return main
