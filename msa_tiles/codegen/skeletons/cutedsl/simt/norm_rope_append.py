"""Norm and rotate each token's queries and keys, and write keys and values into their slots of paged caches.

Grid: a CTA for every WARPS units; a unit is as many heads of one tensor of one token as a warp has room for, head_dim
// 8 neighbouring lanes for a row, eight columns a lane. A token's units are those of q, k, v, the index queries and the
index key, in this order, and all lanes of a warp have rows of one tensor. Rows are read 16 bytes at a time and stay in
registers, in float32, until they are rounded to what is stored. All warps alike; nothing is shared between warps.

A token whose slot is negative, or not in the caches, has its queries written, and its keys and values are neither read
nor written. Offsets have 64 bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from msa_tiles.dsl.cutedsl.append import slot_of
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.norm_rope import Slots, load_angles, load_floats, norm, rotate, store_e4m3, store_rounded
from msa_tiles.dsl.cutedsl.operands import append_plain as key_value  # <- operands.key_value
from msa_tiles.dsl.cutedsl.operands.append_plain import Cache as PlainCache
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR
from msa_tiles.dsl.table import WARP, Role, Table, declares

ELEMENT = "bfloat16"  # <- precision.output
WARPS = 8  # <- tile.warps


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

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = NormRopeAppend(
        head_dim,
        float32_table,
        bf16_index,
        token_scales=token_scales,  # % if "token_scales" in plan.variants
    )
    return kernel, kernel.arguments()


@declares
def cta(head_dim, float32_table, bf16_index, **scales):
    """What a thread block is made of."""
    return Table((Role("all", WARPS, "a unit each: head_dim // 8 neighbouring lanes a row"),), ())


class NormRopeAppend:
    """
    # <- cta
    """

    def __init__(self, head_dim, float32_table, bf16_index, **scales):
        self.cta = cta(head_dim, float32_table, bf16_index, **scales)
        self.head_dim = head_dim
        self.element = ELEMENTS[ELEMENT]
        self.table_element = ELEMENTS["float32" if float32_table else ELEMENT]
        self.bf16_index = bf16_index
        self.cache = key_value.Cache(head_dim, **scales)
        self.index = PlainCache(head_dim) if bf16_index else self.cache
        self.slots, self.index_slots = Slots(self.cache), Slots(self.index)
        self.lanes = head_dim // VECTOR  # of a row
        self.heads = WARP // self.lanes  # of a warp

    def arguments(self):
        """Stand-ins for cute.compile: rows, weights, the table, positions, slots, caches, scalars and the stream."""
        total, q_heads, heads, index_heads, one = (cute.sym_int() for _ in range(5))
        pages, page, index_pages, index_page = (cute.sym_int() for _ in range(4))

        def rows(of):
            return stand_in(self.element, total, of, self.head_dim, align=BYTES)

        def words():
            return stand_in(Int32, total, cute.sym_int())

        keys, values = (self.cache.arguments(pages, heads, page) for _ in range(2))
        stored = self.index.arguments(index_pages, one, index_page)
        if self.bf16_index:
            stored = (*stored, *self.cache.arguments(pages, heads, page)[1:])
        return (
            *(rows(of) for of in (q_heads, heads, heads, index_heads, one, q_heads)),
            stand_in(self.element, total, index_heads, cute.sym_int(), align=BYTES),
            *(stand_in(self.element, self.head_dim, align=BYTES) for _ in range(4)),
            stand_in(self.table_element, cute.sym_int(), cute.sym_int(), align=BYTES),
            *(words() for _ in range(3)),
            *keys,
            *values,
            *stored,
            Int32(0),
            Float32(0.0),
            Float32(0.0),
            Int32(0),  # % if "token_scales" in plan.variants
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        idx_q: cute.Tensor,
        idx_k: cute.Tensor,
        q_out: cute.Tensor,
        idx_out: cute.Tensor,
        q_weight: cute.Tensor,
        k_weight: cute.Tensor,
        idx_q_weight: cute.Tensor,
        idx_k_weight: cute.Tensor,
        table: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        index_slots: cute.Tensor,
        k_cache: cute.Tensor,  # <- tensors of operands.key_value
        v_cache: cute.Tensor,  # <- tensors of operands.key_value
        index_cache: cute.Tensor,  # <- tensors of operands.key_value
        index_heads: Int32,
        weight_offset: Float32,
        eps: Float32,
        use_index_scale: Int32,  # % if "token_scales" in plan.variants
        stream,
    ):
        """Launch, as early as the kernel before allows. Rows begin at multiples of 16 bytes."""
        k_stored = self.cache.stored(
            k_cache,  # <- tensors of operands.key_value
        )
        v_stored = self.cache.stored(
            v_cache,  # <- tensors of operands.key_value
        )
        if cutlass.const_expr(self.bf16_index):
            index_stored = self.index.stored(index_cache)
        else:
            index_stored = self.index.stored(
                index_cache,  # <- tensors of operands.key_value
            )
        use_index_scale = Int32(0)  # % if "token_scales" not in plan.variants
        index_units = cute.ceil_div(index_heads, self.heads) + cutlass.min(index_heads, 1)
        units = cute.ceil_div(q.shape[1], self.heads) + 2 * cute.ceil_div(k.shape[1], self.heads) + index_units
        rows = (q, k, v, idx_q, idx_k)
        written = (q_out, idx_out)
        weights = (q_weight, k_weight, idx_q_weight, idx_k_weight)
        places = (positions, slots, index_slots)
        stored = (k_stored, v_stored, index_stored)
        self.kernel(rows, written, weights, table, places, stored, units, weight_offset, eps, use_index_scale).launch(
            grid=(cute.ceil_div(q.shape[0] * units, WARPS), 1, 1),
            block=(self.cta.threads, 1, 1),
            # As many registers as it takes: left to itself, ptxas stays with 40 and spills.
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        rows: tuple,
        written: tuple,
        weights: tuple,
        table: cute.Tensor,
        places: tuple,
        stored: tuple,
        units: Int32,
        weight_offset: Float32,
        eps: Float32,
        use_index_scale: Int32,
    ):
        block, _, _ = cute.arch.block_idx()
        q, k, v, idx_q, idx_k = rows
        positions, slots, index_slots = places
        k_stored, v_stored, index_stored = stored
        unit = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        token, part = unit // units, unit % units
        # A unit's tensor and first head: `part` counts from the first unit of q, the others from the first of theirs.
        q_units = cute.ceil_div(Int32(q.shape[1]), self.heads)
        kv_units = cute.ceil_div(Int32(k.shape[1]), self.heads)
        k_part, v_part, idx_part = part - q_units, part - q_units - kv_units, part - q_units - 2 * kv_units
        of_q, of_k, of_v = k_part < 0, (k_part >= 0) & (v_part < 0), (v_part >= 0) & (idx_part < 0)
        of_idx_k = (idx_part >= 0) & (part == units - 1)
        of_idx_q = (idx_part >= 0) & (part < units - 1)
        within, lane = cute.arch.lane_idx() // self.lanes, cute.arch.lane_idx() % self.lanes
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        slot = slot_of(slots, token, k_stored.values.shape[0] * k_stored.values.shape[2])
        index_slot = slot_of(index_slots, token, index_stored.values.shape[0] * index_stored.values.shape[2])
        values = cute.make_rmem_tensor(VECTOR, Float32)
        weight = cute.make_rmem_tensor(VECTOR, Float32)
        values.fill(0.0)
        weight.fill(0.0)
        position = Int32(-1)
        head = Int32(0)
        live = token < q.shape[0]
        if live:
            position = positions[token, 0]
            if of_q:
                head = part * self.heads + within
                live = head < q.shape[1]
                if live:
                    load_floats(q[token, head, None], lane, values)
                load_floats(weights[0], lane, weight)
            elif of_k:
                head = k_part * self.heads + within
                live = (head < k.shape[1]) & (slot >= 0)
                if live:
                    load_floats(k[token, head, None], lane, values)
                load_floats(weights[1], lane, weight)
            elif of_v:
                head = v_part * self.heads + within
                live = (head < v.shape[1]) & (slot >= 0)
                if live:
                    load_floats(v[token, head, None], lane, values)
            elif of_idx_q:
                head = idx_part * self.heads + within
                live = head < idx_q.shape[1]
                if live:
                    load_floats(idx_q[token, head, None], lane, values)
                load_floats(weights[2], lane, weight)
            else:
                live = (within == 0) & (index_slot >= 0)
                if live:
                    load_floats(idx_k[token, 0, None], lane, values)
                load_floats(weights[3], lane, weight)
        # Every lane of a warp takes part in its shuffles.
        if of_q | of_k | (idx_part >= 0):
            # On their way while the row is.
            angles = load_angles(table, position, lane)
            norm(values, weight, weight_offset, eps, self.lanes)
            rotate(values, angles, lane)
        if of_q:
            if live:
                store_rounded(values, written[0][token, head, None], lane)
        elif of_k:
            self.slots.insert(values, live, k_stored, slot, head, lane, Int32(1))
        elif of_v:
            self.slots.insert(values, live, v_stored, slot, head, lane, Int32(1))
        elif of_idx_q:
            if live:
                if written[1].shape[2] == self.head_dim:
                    store_rounded(values, written[1][token, head, None], lane)
                else:
                    store_e4m3(values, written[1][token, head, None], lane)
        elif of_idx_k:
            self.index_slots.insert(values, live, index_stored, index_slot, head, lane, use_index_scale)
