"""Merge split attention outputs by their log-sum-exp.

Grid: one CTA for ROWS heads of a token; head_dim // 8 neighbouring threads share a row and own eight columns each, so
every split is read with 16-byte loads, UNROLL of them in flight.

The weights of a row are exp(lse - max) / sum, with the maximum over UNROLL splits at a time and a rescale between. A
split with lse -inf is empty: its data may be anything and stays out of the sum. Splits are added in order, in float32.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.packing import high_half, low_half, pack_halves

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
UNROLL = 16  # <- tile.unroll
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
VECTOR = 8
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def combine(head_dim: int):
    """Build the kernel for one head dim.

    partial_out [splits, total_q, num_q_heads, head_dim] and partial_lse [splits, total_q, num_q_heads] (natural
    logarithm) become out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads]; a row whose splits are all
    empty gets out 0 and lse -inf.
    """
    lanes = head_dim // VECTOR
    splits, total_q, num_q_heads = T.dynamic("splits, total_q, num_q_heads")
    part_split, part_token, part_head = strides("part_split, part_token, part_head")
    plse_split, plse_token, plse_head = strides("plse_split, plse_token, plse_head")
    out_token, out_head, lse_token, lse_head = strides("out_token, out_head, lse_token, lse_head")

    @T.prim_func
    def main(
        partial_out: T.StridedTensor(
            (splits, total_q, num_q_heads, head_dim), (part_split, part_token, part_head, 1), ELEMENT
        ),
        partial_lse: T.StridedTensor((splits, total_q, num_q_heads), (plse_split, plse_token, plse_head), "float32"),
        out: T.StridedTensor((total_q, num_q_heads, head_dim), (out_token, out_head, 1), ELEMENT),
        lse: T.StridedTensor((total_q, num_q_heads), (lse_token, lse_head), "float32"),
    ):
        with T.Kernel(total_q, T.ceildiv(num_q_heads, ROWS), threads=ROWS * lanes) as (token, head_group):
            packed = T.alloc_local([UNROLL, 4], "uint32")
            weight = T.alloc_local([UNROLL], "float32")
            total = T.alloc_local([VECTOR], "float32")
            stored = T.alloc_local([4], "uint32")
            largest = T.alloc_var("float32")
            before = T.alloc_var("float32")
            mass = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            split = T.alloc_var("int32")
            tx = T.get_thread_binding()
            T.pdl_sync()
            T.pdl_trigger()
            head = head_group * ROWS + tx // lanes
            column = (tx % lanes) * VECTOR
            if head < num_q_heads:
                largest = -T.infinity("float32")
                mass = 0.0
                for c in T.unroll(VECTOR):
                    total[c] = 0.0
                for step in T.serial(T.ceildiv(splits, UNROLL)):
                    for u in T.unroll(UNROLL):
                        split = T.min(step * UNROLL + u, splits - 1)
                        packed[u, 0:4] = T.ldg128(partial_out[split, token, head, column])
                        weight[u] = partial_lse[split, token, head]
                    before = largest
                    for u in T.unroll(UNROLL):
                        if step * UNROLL + u >= splits:
                            weight[u] = -T.infinity("float32")
                        largest = T.max(largest, weight[u])
                    if step > 0 and before != -T.infinity("float32"):
                        scale = T.exp2((before - largest) * LOG2_E)
                        mass = mass * scale
                        for c in T.unroll(VECTOR):
                            total[c] = total[c] * scale
                    for u in T.unroll(UNROLL):
                        # Not `weight > -inf`: a NaN has to come through.
                        if weight[u] != -T.infinity("float32"):
                            weight[u] = T.exp2((weight[u] - largest) * LOG2_E)
                            mass = mass + weight[u]
                            for c in T.unroll(4):
                                total[2 * c] = total[2 * c] + weight[u] * low_half(packed[u, c])
                                total[2 * c + 1] = total[2 * c + 1] + weight[u] * high_half(packed[u, c])
                scale = T.if_then_else(mass != 0.0, 1.0 / mass, 0.0)
                for c in T.unroll(4):
                    stored[c] = pack_halves(total[2 * c] * scale, total[2 * c + 1] * scale)
                T.stg128(out[token, head, column], stored[0:4])
                if column == 0:
                    lse[token, head] = T.if_then_else(
                        mass != 0.0, largest + T.log2(mass) * LN_2, -T.infinity("float32")
                    )

    return main
