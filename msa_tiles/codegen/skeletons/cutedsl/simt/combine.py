"""Merge split attention outputs by their log-sum-exp.

Grid: one CTA for ROWS heads of a token; head_dim // 8 neighbouring threads share a row and own eight columns each, so
every split is read with 16-byte loads, UNROLL of them in flight. All warps alike; nothing is shared between threads.

The weights of a row are exp(lse - max) / sum, with the maximum over UNROLL splits at a time and a rescale between. A
split with lse -inf is empty: its data may be anything and stays out of the sum. Splits are added in order, in float32.
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
UNROLL = 16  # <- tile.unroll
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def combine(head_dim: int):
    """Build the kernel for one head dim.

    partial_out [splits, total_q, num_q_heads, head_dim] and partial_lse [splits, total_q, num_q_heads] (natural
    logarithm) become out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads]; a row whose splits are all
    empty gets out 0 and lse -inf.

    Returns the entry point and stand-ins for its arguments.
    """
    kernel = Combine(head_dim)
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


class Combine:
    """
    # <- cta
    """

    def __init__(self, head_dim):
        self.cta = cta(head_dim)
        self.head_dim = head_dim
        self.element = ELEMENTS[ELEMENT]
        self.lanes = head_dim // VECTOR  # threads of a row

    def arguments(self):
        """Stand-ins for cute.compile: 4 tensors and the stream."""
        splits, total_q, heads = cute.sym_int(), cute.sym_int(), cute.sym_int()

        return (
            stand_in(self.element, splits, total_q, heads, self.head_dim, align=BYTES),
            stand_in(Float32, splits, total_q, heads, last=cute.sym_int64()),
            stand_in(self.element, total_q, heads, self.head_dim, align=BYTES),
            stand_in(Float32, total_q, heads, last=cute.sym_int64()),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self, partial_out: cute.Tensor, partial_lse: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, stream
    ):  # fmt: skip
        """Launch, as early as the kernel before allows. Rows of partial_out and out begin at multiples of 16 bytes."""
        self.kernel(partial_out, partial_lse, out, lse).launch(
            grid=(out.shape[0], cute.ceil_div(out.shape[1], ROWS), 1),
            block=(self.cta.threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, partial_out: cute.Tensor, partial_lse: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        token, head_group, _ = cute.arch.block_idx()
        head = head_group * ROWS + thread // self.lanes
        # What the kernel before wrote is there from here on; the one behind may come up and wait in turn.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if head < out.shape[1]:
            self.merge_row(partial_out, partial_lse, out, lse, token, head, thread % self.lanes)

    @cute.jit
    def merge_row(
        self, partial_out: cute.Tensor, partial_lse: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, token: Int32,
        head: Int32, lane: Int32,
    ):  # fmt: skip
        """The eight columns of one lane of a row."""
        splits = Int32(partial_out.shape[0])
        loaded = cute.make_rmem_tensor((VECTOR, UNROLL), self.element)
        weight = cute.make_rmem_tensor(UNROLL, Float32)
        total = cute.make_rmem_tensor(VECTOR, Float32)
        total.fill(0.0)
        largest = -Float32.inf
        mass = Float32(0.0)
        for step in cutlass.range(cute.ceil_div(splits, UNROLL), unroll=1):
            # Splits past the last one repeat it with no weight, so that the loads need no branch.
            for u in cutlass.range_constexpr(UNROLL):
                split = cutlass.min(step * UNROLL + u, splits - 1)
                copy_wide(wide(partial_out[split, token, head, None], lane), loaded[None, u])
                weight[u] = partial_lse[split, token, head]
            before = largest
            for u in cutlass.range_constexpr(UNROLL):
                if step * UNROLL + u >= splits:
                    weight[u] = -Float32.inf
                largest = cute.arch.fmax(largest, weight[u])
            if (step > 0) & (before != -Float32.inf):
                scale = cute.math.exp2((before - largest) * LOG2_E, fastmath=True)
                mass = mass * scale
                for c in cutlass.range_constexpr(VECTOR):
                    total[c] = total[c] * scale
            for u in cutlass.range_constexpr(UNROLL):
                # Not `weight > -inf`: a NaN has to come through.
                if weight[u] != -Float32.inf:
                    share = cute.math.exp2((weight[u] - largest) * LOG2_E, fastmath=True)
                    mass = mass + share
                    for c in cutlass.range_constexpr(VECTOR):
                        total[c] = total[c] + share * Float32(loaded[c, u])
        scale = Float32(0.0)
        row_lse = -Float32.inf
        if mass != 0.0:
            scale = 1.0 / mass
            row_lse = largest + cute.math.log2(mass, fastmath=True) * LN_2
        stored = cute.make_rmem_tensor(VECTOR, self.element)
        for c in cutlass.range_constexpr(VECTOR):
            stored[c] = (total[c] * scale).to(self.element)
        copy_wide(stored, wide(out[token, head, None], lane))
        if lane == 0:
            lse[token, head] = row_lse
