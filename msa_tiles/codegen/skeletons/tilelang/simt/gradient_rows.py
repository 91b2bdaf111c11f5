"""What the backward of attention needs to know of every row: LSE in base two, and delta = <out, dout> - dlse.

Grid: one CTA for ROWS heads of a token; head_dim // 8 neighbouring threads share a row, load eight columns of both
tensors each, and add their products by shuffles.
"""

import tilelang.language as T

from msa_tiles.dsl.tilelang.layout import strides
from msa_tiles.dsl.tilelang.packing import high_half, low_half

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
}
VECTOR = 8
LOG2_E = 1.4426950408889634


def gradient_rows(head_dim: int):
    """Build the kernel for one head dim.

    out and dout [total_q, num_q_heads, head_dim], lse (natural logarithm) and dlse [total_q, num_q_heads] (read with
    use_dlse) -> rows [total_q, num_q_heads, 2]: lse * log2(e), delta. A row with LSE -inf gets +inf, so that all its
    probabilities are 0, and delta 0, whatever its gradients hold.
    """
    lanes = head_dim // VECTOR
    total_q, num_q_heads = T.dynamic("total_q, num_q_heads")
    out_token, out_head, dout_token, dout_head = strides("out_token, out_head, dout_token, dout_head")
    lse_token, lse_head, dlse_token, dlse_head = strides("lse_token, lse_head, dlse_token, dlse_head")

    @T.prim_func
    def main(
        dout: T.StridedTensor((total_q, num_q_heads, head_dim), (dout_token, dout_head, 1), ELEMENT),
        out: T.StridedTensor((total_q, num_q_heads, head_dim), (out_token, out_head, 1), ELEMENT),
        lse: T.StridedTensor((total_q, num_q_heads), (lse_token, lse_head), "float32"),
        dlse: T.StridedTensor((total_q, num_q_heads), (dlse_token, dlse_head), "float32"),
        rows: T.Tensor((total_q, num_q_heads, 2), "float32"),
        use_dlse: T.int32,
    ):
        with T.Kernel(total_q, T.ceildiv(num_q_heads, ROWS), threads=ROWS * lanes) as (token, head_group):
            packed = T.alloc_local([2, 4], "uint32")
            delta = T.alloc_var("float32")
            value = T.alloc_var("float32")
            tx = T.get_thread_binding()
            # Every lane takes part in the shuffles.
            head = T.min(head_group * ROWS + tx // lanes, num_q_heads - 1)
            column = (tx % lanes) * VECTOR
            packed[0, 0:4] = T.ldg128(out[token, head, column])
            packed[1, 0:4] = T.ldg128(dout[token, head, column])
            delta = 0.0
            for c in T.unroll(4):
                delta = delta + low_half(packed[0, c]) * low_half(packed[1, c])
                delta = delta + high_half(packed[0, c]) * high_half(packed[1, c])
            for step in T.unroll(lanes.bit_length() - 1):
                delta = delta + T.shfl_xor(delta, 1 << step)
            if column == 0 and head_group * ROWS + tx // lanes < num_q_heads:
                value = lse[token, head]
                if value == -T.infinity("float32"):
                    rows[token, head, 0] = T.infinity("float32")
                    rows[token, head, 1] = 0.0
                else:
                    if use_dlse != 0:
                        delta = delta - dlse[token, head]
                    rows[token, head, 0] = value * LOG2_E
                    rows[token, head, 1] = delta

    return main
