"""Write each token's keys and values into its slot of paged caches, in place.

Grid: one CTA for every ROWS rows of a token and head; head_dim // 8 neighbouring threads have a row of k and the one of
v and eight columns of each. Rows are read 16 bytes at a time, both before either is written.

A token whose slot is negative, or not in the caches, is neither read nor written. Offsets have 64 bits.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append import VECTOR, find_slot, load_row
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.operands import append_plain as key_value  # <- operands.key_value

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}


def append_kv(
    head_dim: int,
    float32_rows: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim.

    k, v [total_q, heads, head_dim], float32 with float32_rows, and slots int32 [total_q, words] (of one word, or of two
    with the lower one first: page * page size + place) -> k_cache, v_cache [pages, heads, page size, head_dim].
    # % if "token_scales" in plan.variants
    k_scale and v_scale are [heads], what rows are divided by, or with token_scales [pages, heads, page size], written.
    # % elif precision.scale
    Caches hold two values in a byte. Bytes of k_scale and v_scale [pages, heads, page size / n, n, groups] are written,
    one for every group of a row; global scales, of formats that have them, are [heads].
    # % endif
    """
    lanes = head_dim // VECTOR
    element = "float32" if float32_rows else ELEMENT
    scaled = {}
    scaled = {"token_scales": token_scales}  # % if "token_scales" in plan.variants
    k_rows = key_value.Cache("k_cache", head_dim, **scaled)
    v_rows = key_value.Cache("v_cache", head_dim, **scaled)
    total_q, heads, words, pages, page_size = T.dynamic("total_q, heads, words, pages, page_size")
    k_token, k_head, v_token, v_head = strides("k_token, k_head, v_token, v_head")
    slot_token = strides("slot_token")

    @T.prim_func
    def main(
        k: T.StridedTensor((total_q, heads, head_dim), (k_token, k_head, 1), element),
        v: T.StridedTensor((total_q, heads, head_dim), (v_token, v_head, 1), element),
        slots: T.StridedTensor((total_q, words), (slot_token, 1), "int32"),
        k_cache: k_rows.tensor(pages, heads, page_size),
        k_cache_scale: k_rows.scale(pages, heads, page_size),  # % if precision.scale
        k_cache_global_scale: k_rows.global_scale(heads),  # % if precision.scale and precision.scale.global_dtype
        v_cache: v_rows.tensor(pages, heads, page_size),
        v_cache_scale: v_rows.scale(pages, heads, page_size),  # % if precision.scale
        v_cache_global_scale: v_rows.global_scale(heads),  # % if precision.scale and precision.scale.global_dtype
    ):
        with T.Kernel(T.ceildiv(total_q * heads, ROWS), threads=ROWS * lanes) as block:
            k_stored = key_value.Stored(
                k_cache,  # <- tensors of operands.key_value
            )
            v_stored = key_value.Stored(
                v_cache,  # <- tensors of operands.key_value
            )
            packed = T.alloc_local([4], "uint32")
            key = T.alloc_local([VECTOR], "float32")
            value = T.alloc_local([VECTOR], "float32")
            k_scale = T.alloc_local([1], "float32")
            v_scale = T.alloc_local([1], "float32")
            slot = T.alloc_local([1], "int32")
            tx = T.get_thread_binding()
            T.pdl_sync()
            T.pdl_trigger()
            row = block * ROWS + tx // lanes
            token = T.truncdiv(row, heads)
            head = T.truncmod(row, heads)
            column = (tx % lanes) * VECTOR
            find_slot(slots, token, pages * page_size, slot)
            for c in T.unroll(VECTOR):
                key[c] = 0.0
                value[c] = 0.0
            if slot[0] >= 0:
                load_row(k, token, head, column, element, packed, key)
                load_row(v, token, head, column, element, packed, value)
            # Every lane takes part in the shuffles.
            key_value.find_scale(k_rows, k_stored, key, head, 1, k_scale)
            key_value.find_scale(v_rows, v_stored, value, head, 1, v_scale)
            if slot[0] >= 0:
                page = T.truncdiv(slot[0], page_size)
                place = T.truncmod(slot[0], page_size)
                key_value.write(k_rows, k_stored, key, k_scale, page, head, place, column, packed)
                key_value.write(v_rows, v_stored, value, v_scale, page, head, place, column, packed)

    return main
