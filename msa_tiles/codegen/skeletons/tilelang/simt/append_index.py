"""Write each token's index key into its slot of a paged cache, in place.

Grid: one CTA for every ROWS keys; head_dim // 8 neighbouring threads have a key and eight columns each, which they read
16 bytes at a time.

A token whose slot is negative, or not in the cache, is neither read nor written. Offsets have 64 bits.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append import VECTOR, find_slot, load_row
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.operands import append_plain as index_key  # <- operands.index_key

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}


def append_index(
    head_dim: int,
    float32_rows: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one index dim.

    idx_k [total_q, 1, head_dim], float32 with float32_rows, and slots int32 [total_q, words] (of one word, or of two
    with the lower one first: page * page size + place) -> cache [pages, 1, page size, head_dim].
    # % if "token_scales" in plan.variants
    cache_scale is [1], what keys are divided by with use_scale, or with token_scales [pages, 1, page size], written.
    # % elif precision.scale
    The cache holds two values in a byte. Bytes of cache_scale [pages, 1, page size / n, n, groups] are written, one for
    every group of a key; the global scale, of formats that have one, is [1].
    # % endif
    """
    lanes = head_dim // VECTOR
    element = "float32" if float32_rows else ELEMENT
    scaled = {}
    scaled = {"token_scales": token_scales}  # % if "token_scales" in plan.variants
    keys = index_key.Cache("cache", head_dim, **scaled)
    total_q, heads, words, pages, page_size = T.dynamic("total_q, heads, words, pages, page_size")
    key_token, key_head = strides("key_token, key_head")
    slot_token = strides("slot_token")

    @T.prim_func
    def main(
        idx_k: T.StridedTensor((total_q, heads, head_dim), (key_token, key_head, 1), element),
        slots: T.StridedTensor((total_q, words), (slot_token, 1), "int32"),
        cache: keys.tensor(pages, heads, page_size),
        cache_scale: keys.scale(pages, heads, page_size),  # % if precision.scale
        cache_global_scale: keys.global_scale(heads),  # % if precision.scale and precision.scale.global_dtype
        use_scale: T.int32,  # % if "token_scales" in plan.variants
    ):
        with T.Kernel(T.ceildiv(total_q * heads, ROWS), threads=ROWS * lanes) as block:
            stored = index_key.Stored(
                cache,  # <- tensors of operands.index_key
            )
            packed = T.alloc_local([4], "uint32")
            key = T.alloc_local([VECTOR], "float32")
            scale = T.alloc_local([1], "float32")
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
            if slot[0] >= 0:
                load_row(idx_k, token, head, column, element, packed, key)
            # Every lane takes part in the shuffles.
            index_key.find_scale(keys, stored, key, head, 0, scale)  # % if "token_scales" not in plan.variants
            index_key.find_scale(keys, stored, key, head, use_scale, scale)  # % if "token_scales" in plan.variants
            if slot[0] >= 0:
                page = T.truncdiv(slot[0], page_size)
                place = T.truncmod(slot[0], page_size)
                index_key.write(keys, stored, key, scale, page, head, place, column, packed)

    return main
