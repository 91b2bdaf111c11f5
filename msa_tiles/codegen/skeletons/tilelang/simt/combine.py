"""Merge split attention outputs by their log-sum-exp.

Grid: one CTA for ROWS heads of a token; head_dim // 8 neighbouring threads share a row and own eight columns each, so
every split is read with 16-byte loads, UNROLL of them in flight.

The weights of a row are exp(lse - max) / sum. A split with lse -inf is empty: its data may be anything, so its load is
redirected to the heaviest split of the row and it is left out of the sum. Splits are added in order, in float32.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.packing import high_half, low_half, pack_halves

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
UNROLL = 8  # <- tile.unroll
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
    part_split, part_token, part_head = T.dynamic("part_split, part_token, part_head")
    plse_split, plse_token, plse_head = T.dynamic("plse_split, plse_token, plse_head")
    out_token, out_head, lse_token, lse_head = T.dynamic("out_token, out_head, lse_token, lse_head")

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
            best = T.alloc_var("int32")
            largest = T.alloc_var("float32")
            mass = T.alloc_var("float32")
            scale = T.alloc_var("float32")
            split = T.alloc_var("int32")
            tx = T.get_thread_binding()
            head = head_group * ROWS + tx // lanes
            column = (tx % lanes) * VECTOR
            if head < num_q_heads:
                largest = -T.infinity("float32")
                best = 0
                for s in T.serial(splits):
                    if partial_lse[s, token, head] > largest:
                        largest = partial_lse[s, token, head]
                        best = s
                mass = 0.0
                for c in T.unroll(VECTOR):
                    total[c] = 0.0
                for step in T.serial(T.ceildiv(splits, UNROLL)):
                    for u in T.unroll(UNROLL):
                        split = step * UNROLL + u
                        weight[u] = 0.0
                        if split < splits:
                            if partial_lse[split, token, head] != -T.infinity("float32"):
                                weight[u] = T.exp2((partial_lse[split, token, head] - largest) * LOG2_E)
                        if weight[u] == 0.0:
                            split = best
                        packed[u, 0:4] = T.ldg128(partial_out[split, token, head, column])
                    for u in T.unroll(UNROLL):
                        if weight[u] != 0.0:
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
