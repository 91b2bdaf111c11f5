"""Products of a 64-row tile by one warpgroup, accumulated in registers."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

ROWS = 64  # what one wgmma takes


def product(element, columns, right_major, left_source):
    """The two multiplications of [ROWS, K] x [K, columns]: its first step, which forgets what was there, and the rest.

    A multiplication that is told to accumulate inside dynamic control flow would be a new value there: hence two.
    """
    first, rest = (
        hopper.make_trivial_tiled_mma(
            element, element, OperandMajorMode.K, right_major, cutlass.Float32, (1, 1, 1), (ROWS, columns), left_source
        )
        for _ in range(2)
    )
    first.set(warpgroup.Field.ACCUMULATE, False)
    rest.set(warpgroup.Field.ACCUMULATE, True)
    return first, rest


def operand_a(multiplications, tiles):
    """The left operand in shared memory; it is described whole, whatever the thread."""
    mma = multiplications[0]
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tiles))


def operand_b(multiplications, tiles):
    """The right operand in shared memory; it is described whole, whatever the thread."""
    mma = multiplications[0]
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tiles))


def accumulator(multiplications, columns):
    """Registers of [ROWS, columns] float32. Only wgmma may write them: else the compiler waits for every product."""
    mma = multiplications[0]
    return mma.make_fragment_C(mma.partition_shape_C((ROWS, columns)))


@cute.jit
def multiply(multiplications, into: cute.Tensor, left: cute.Tensor, right: cute.Tensor):
    """Start into = left x right and close the group."""
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(left, mode=[2])):
        mma = multiplications[0] if cutlass.const_expr(step == 0) else multiplications[1]
        cute.gemm(mma, into, left[None, None, step], right[None, None, step], into)
    warpgroup.commit_group()
