"""What the backward of attention needs to know of every row: LSE in base two, and delta = <out, dout> - dlse.

Grid: one CTA for ROWS heads of a token; head_dim // 8 neighbouring threads share a row, load eight columns of both
tensors each, and add their products by shuffles. All warps alike; nothing is shared between them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, wide
from msa_tiles.dsl.table import WARP, Role, Table, declares

ELEMENT = "bfloat16"  # <- precision.output
ROWS = 16  # <- tile.rows
LOG2_E = 1.4426950408889634


def gradient_rows(head_dim: int):
    """Build the kernel for one head dim.

    out and dout [total_q, num_q_heads, head_dim], lse (natural logarithm) and dlse [total_q, num_q_heads] (read with
    use_dlse) -> rows [total_q, num_q_heads, 2]: lse * log2(e), delta. A row with LSE -inf gets +inf, so that all its
    probabilities are 0, and delta 0, whatever its gradients hold.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = GradientRows(head_dim)
    return kernel, kernel.arguments()


@declares
def cta(head_dim):
    """What a thread block is made of."""
    return Table(
        (
            Role(
                "all",
                ROWS * head_dim // (VECTOR * WARP),
                "head_dim // 8 neighbouring threads a row, eight columns each",
            ),
        ),
        (),
    )


class GradientRows:
    """
    # <- cta
    """

    def __init__(self, head_dim):
        self.cta = cta(head_dim)
        self.head_dim = head_dim
        self.element = ELEMENTS[ELEMENT]
        self.lanes = head_dim // VECTOR  # threads of a row

    def arguments(self):
        """Stand-ins for cute.compile: 5 tensors, 1 scalar and the stream."""
        total_q, heads = cute.sym_int(), cute.sym_int()

        return (
            stand_in(self.element, total_q, heads, self.head_dim, align=BYTES),
            stand_in(self.element, total_q, heads, self.head_dim, align=BYTES),
            stand_in(Float32, total_q, heads, last=cute.sym_int64()),
            stand_in(Float32, total_q, heads, last=cute.sym_int64()),
            stand_in(Float32, total_q, heads, 2),
            Int32(0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, dout: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, dlse: cute.Tensor, rows: cute.Tensor,
        use_dlse: Int32, stream,
    ):  # fmt: skip
        """Launch. Rows of dout and out begin at multiples of 16 bytes; an absent dlse is any tensor of its kind."""
        self.kernel(dout, out, lse, dlse, rows, use_dlse).launch(
            grid=(out.shape[0], cute.ceil_div(out.shape[1], ROWS), 1),
            block=(self.cta.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, dout: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, dlse: cute.Tensor, rows: cute.Tensor,
        use_dlse: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        token, head_group, _ = cute.arch.block_idx()
        wanted = head_group * ROWS + thread // self.lanes
        lane = thread % self.lanes
        # Every lane takes part in the shuffles.
        head = cutlass.min(wanted, Int32(out.shape[1]) - 1)
        results = cute.make_rmem_tensor(VECTOR, self.element)
        gradients = cute.make_rmem_tensor(VECTOR, self.element)
        copy_wide(wide(out[token, head, None], lane), results)
        copy_wide(wide(dout[token, head, None], lane), gradients)
        delta = Float32(0.0)
        for c in cutlass.range_constexpr(VECTOR):
            delta = delta + Float32(results[c]) * Float32(gradients[c])
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            delta = delta + cute.arch.shuffle_sync_bfly(delta, 1 << step)
        if (lane == 0) & (wanted == head):
            value = lse[token, head]
            if value == -Float32.inf:
                value = Float32.inf
                delta = Float32(0.0)
            else:
                value = value * LOG2_E
                if use_dlse != 0:
                    delta = delta - dlse[token, head]
            rows[token, head, 0] = value
            rows[token, head, 1] = delta
