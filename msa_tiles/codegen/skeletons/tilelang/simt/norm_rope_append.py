"""Norm and rotate each token's queries and keys, and write keys and values into their slots of paged caches.

Grid: a CTA for every WARPS units; a unit is as many heads of one tensor of one token as a warp has room for, head_dim
// 8 neighbouring lanes for a row, eight columns a lane. A token's units are those of q, k, v, the index queries and the
index key, in this order, and all lanes of a warp have rows of one tensor. Rows are read 16 bytes at a time and stay in
registers, in float32, until they are rounded to what is stored. All warps alike; nothing is shared between warps.

A token whose slot is negative, or not in the caches, has its queries written, and its keys and values are neither read
nor written. Offsets have 64 bits.
"""

import tilelang.language as T

import msa_tiles.dsl.tilelang.operands.append_plain as append_plain
from msa_tiles.dsl.tilelang.append import VECTOR, find_slot, load_row
from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.norm_rope import load_angles, load_weight, norm, rotate, store_e4m3, store_rounded
from msa_tiles.dsl.tilelang.operands import append_plain as key_value  # <- operands.key_value
from msa_tiles.dsl.tilelang.warp import WARP

ELEMENT = "bfloat16"  # <- precision.output
WARPS = 8  # <- tile.warps
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}


def norm_rope_append(
    head_dim: int,
    float32_table: int,
    bf16_index: int,
    token_scales: int,  # % if "token_scales" in plan.variants
):
    """Build the kernel for one head dim.

    q, k, v and idx_q [total_q, heads, head_dim], idx_k [total_q, 1, head_dim]; q_out and idx_out, like q and idx_q or
    themselves, or idx_out of half the width: pairs of e4m3; weights [head_dim] of each but v; table [positions,
    rotary_dim], float32 with float32_table: cosines, and sines behind them; positions, slots and index_slots int32
    [total_q, words] (of one word, or of two with the lower one first) -> q_out, idx_out, k_cache, v_cache [pages,
    heads, page size, head_dim] and index_cache [index pages, 1, index page size, head_dim], bfloat16 with bf16_index.
    Without index_heads nothing of the index is read or written, and stand-ins may have other numbers of heads.
    # % if "token_scales" in plan.variants
    k_scale and v_scale are [heads], what rows are divided by, or with token_scales [pages, heads, page size], written;
    index_cache_scale likewise, of one head, and used with use_index_scale. With bf16_index it is not looked at.
    # % elif precision.scale
    Caches hold two values in a byte. Bytes of k_scale and v_scale [pages, heads, page size / n, n, groups] are written,
    one for every group of a row; global scales, of formats that have them, are [heads]. Those of the index cache are
    like them, of one head. With bf16_index they are not looked at.
    # % endif
    """
    lanes = head_dim // VECTOR  # of a row
    of_warp = WARP // lanes  # heads
    table_element = "float32" if float32_table else ELEMENT
    scaled = {}
    scaled = {"token_scales": token_scales}  # % if "token_scales" in plan.variants
    k_rows = key_value.Cache("k_cache", head_dim, **scaled)
    v_rows = key_value.Cache("v_cache", head_dim, **scaled)
    like_keys = key_value.Cache("index_cache", head_dim, **scaled)
    index = append_plain if bf16_index else key_value
    index_rows = append_plain.Cache("index_cache", head_dim) if bf16_index else like_keys
    total_q, q_heads, heads, idx_heads, one, idx_width = T.dynamic("total_q, q_heads, heads, idx_heads, one, idx_width")
    num_positions, rotary_dim = T.dynamic("num_positions, rotary_dim")
    pages, page_size, index_pages, index_page_size = T.dynamic("pages, page_size, index_pages, index_page_size")
    # What stands in for the scales of a bfloat16 cache are those of the keys.
    of_scales = (pages, heads, page_size) if bf16_index else (index_pages, one, index_page_size)  # % if precision.scale
    position_words, slot_words, index_slot_words = T.dynamic("position_words, slot_words, index_slot_words")

    def rows(name, of, width=head_dim):
        return T.StridedTensor((total_q, of, width), (*strides(f"{name}_token, {name}_head"), 1), ELEMENT)

    def words(name, of):
        return T.StridedTensor((total_q, of), (strides(f"{name}_token"), 1), "int32")

    @T.prim_func
    def main(
        q: rows("q", q_heads),
        k: rows("k", heads),
        v: rows("v", heads),
        idx_q: rows("idx_q", idx_heads),
        idx_k: rows("idx_k", one),
        q_out: rows("q_out", q_heads),
        idx_out: rows("idx_out", idx_heads, idx_width),
        q_weight: T.StridedTensor((head_dim,), (1,), ELEMENT),
        k_weight: T.StridedTensor((head_dim,), (1,), ELEMENT),
        idx_q_weight: T.StridedTensor((head_dim,), (1,), ELEMENT),
        idx_k_weight: T.StridedTensor((head_dim,), (1,), ELEMENT),
        table: T.StridedTensor((num_positions, rotary_dim), (strides("table_row"), 1), table_element),
        positions: words("position", position_words),
        slots: words("slot", slot_words),
        index_slots: words("index_slot", index_slot_words),
        k_cache: k_rows.tensor(pages, heads, page_size),
        k_cache_scale: k_rows.scale(pages, heads, page_size),  # % if precision.scale
        k_cache_global_scale: k_rows.global_scale(heads),  # % if precision.scale and precision.scale.global_dtype
        v_cache: v_rows.tensor(pages, heads, page_size),
        v_cache_scale: v_rows.scale(pages, heads, page_size),  # % if precision.scale
        v_cache_global_scale: v_rows.global_scale(heads),  # % if precision.scale and precision.scale.global_dtype
        index_cache: index_rows.tensor(index_pages, one, index_page_size),
        index_cache_scale: like_keys.scale(*of_scales),  # % if precision.scale
        # % if precision.scale and precision.scale.global_dtype
        index_cache_global_scale: like_keys.global_scale(of_scales[1]),
        # % endif
        index_heads: T.int32,
        weight_offset: T.float32,
        eps: T.float32,
        use_index_scale: T.int32,  # % if "token_scales" in plan.variants
    ):
        # A unit's tensor and first head: units of a token are counted from the first one of q.
        q_end = T.ceildiv(q.shape[1], of_warp)
        k_end = q_end + T.ceildiv(k.shape[1], of_warp)
        v_end = k_end + T.ceildiv(k.shape[1], of_warp)
        idx_q_end = v_end + T.ceildiv(index_heads, of_warp)
        units = idx_q_end + T.min(index_heads, 1)
        with T.Kernel(T.ceildiv(q.shape[0] * units, WARPS), threads=WARPS * WARP) as block:
            k_stored = key_value.Stored(
                k_cache,  # <- tensors of operands.key_value
            )
            v_stored = key_value.Stored(
                v_cache,  # <- tensors of operands.key_value
            )
            index_stored = append_plain.Stored(index_cache)
            if not bf16_index:
                index_stored = key_value.Stored(
                    index_cache,  # <- tensors of operands.key_value
                )
            packed = T.alloc_local([4], "uint32")
            values = T.alloc_local([VECTOR], "float32")
            weight = T.alloc_local([VECTOR], "float32")
            cosines = T.alloc_local([VECTOR], "float32")
            sines = T.alloc_local([VECTOR], "float32")
            scale = T.alloc_local([1], "float32")
            slot = T.alloc_local([1], "int32")
            index_slot = T.alloc_local([1], "int32")
            position = T.alloc_var("int32")
            head = T.alloc_var("int32")
            live = T.alloc_var("bool")
            tx = T.get_thread_binding()
            T.pdl_sync()
            T.pdl_trigger()
            unit = block * WARPS + T.truncdiv(tx, WARP)
            token = T.truncdiv(unit, units)
            part = T.truncmod(unit, units)
            within = T.truncdiv(T.truncmod(tx, WARP), lanes)
            lane = T.truncmod(tx, lanes)
            column = lane * VECTOR
            find_slot(slots, token, pages * page_size, slot)
            find_slot(index_slots, token, index_pages * index_page_size, index_slot)
            for c in T.unroll(VECTOR):
                values[c] = 0.0
                weight[c] = 0.0
            position = -1
            head = within
            live = token < total_q
            if token < total_q:
                position = positions[token, 0]
                if part < q_end:
                    head = part * of_warp + within
                    live = head < q_heads
                    if live:
                        load_row(q, token, head, column, ELEMENT, packed, values)
                    load_weight(q_weight, column, packed, weight)
                elif part < k_end:
                    head = (part - q_end) * of_warp + within
                    live = head < heads and slot[0] >= 0
                    if live:
                        load_row(k, token, head, column, ELEMENT, packed, values)
                    load_weight(k_weight, column, packed, weight)
                elif part < v_end:
                    head = (part - k_end) * of_warp + within
                    live = head < heads and slot[0] >= 0
                    if live:
                        load_row(v, token, head, column, ELEMENT, packed, values)
                elif part < idx_q_end:
                    head = (part - v_end) * of_warp + within
                    live = head < index_heads
                    if live:
                        load_row(idx_q, token, head, column, ELEMENT, packed, values)
                    load_weight(idx_q_weight, column, packed, weight)
                else:
                    live = within == 0 and index_slot[0] >= 0
                    if live:
                        load_row(idx_k, token, 0, column, ELEMENT, packed, values)
                    load_weight(idx_k_weight, column, packed, weight)
            # Every lane of a warp takes part in its shuffles.
            if part < k_end or part >= v_end:
                # On their way while the row is.
                load_angles(table, position, lane, table_element, packed, cosines, sines)
                norm(values, weight, weight_offset, eps, lanes)
                rotate(values, table, position, lane, T.truncmod(tx, WARP), cosines, sines)
            # Lanes without a row may have a head that there is not.
            stored_head = T.min(head, heads - 1)
            if part < q_end:
                if live:
                    store_rounded(values, q_out, token, head, column, packed)
            elif part < k_end:
                key_value.find_scale(k_rows, k_stored, values, stored_head, 1, scale)
                if live:
                    page = T.truncdiv(slot[0], page_size)
                    place = T.truncmod(slot[0], page_size)
                    key_value.write(k_rows, k_stored, values, scale, page, head, place, column, packed)
            elif part < v_end:
                key_value.find_scale(v_rows, v_stored, values, stored_head, 1, scale)
                if live:
                    page = T.truncdiv(slot[0], page_size)
                    place = T.truncmod(slot[0], page_size)
                    key_value.write(v_rows, v_stored, values, scale, page, head, place, column, packed)
            elif part < idx_q_end:
                if live:
                    if idx_width == head_dim:
                        store_rounded(values, idx_out, token, head, column, packed)
                    else:
                        store_e4m3(values, idx_out, token, head, T.truncdiv(column, 2), packed)
            else:
                use_scale = 0  # % if "token_scales" not in plan.variants
                use_scale = use_index_scale  # % if "token_scales" in plan.variants
                index.find_scale(index_rows, index_stored, values, 0, use_scale, scale)
                if live:
                    page = T.truncdiv(index_slot[0], index_page_size)
                    place = T.truncmod(index_slot[0], index_page_size)
                    index.write(index_rows, index_stored, values, scale, page, 0, place, column, packed)

    return main
