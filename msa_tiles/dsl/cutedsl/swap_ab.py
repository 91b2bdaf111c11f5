"""Products with A and B swapped: keys, or columns of values, as the rows of the tensor cores, few queries as columns.

wgmma takes 64 rows whatever they hold, but as few as 8 columns: swapped, a product of few queries wastes little.
The right operand lies in shared memory, the left one there or in registers. See msa_tiles.dsl.cutedsl.wgmma for
operands and for how a product is started.
"""

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from msa_tiles.dsl.cutedsl.wgmma import ROWS


def product(element, columns, left_major, left_source=warpgroup.OperandSource.SMEM):
    """The two multiplications of [rows, K] x [K, columns], rows a multiple of ROWS: wgmma.product tells why two."""
    first, rest = (
        hopper.make_trivial_tiled_mma(
            element, element, left_major, OperandMajorMode.K, cutlass.Float32, (1, 1, 1), (ROWS, columns),
            left_source,
        )
        for _ in range(2)
    )  # fmt: skip
    first.set(warpgroup.Field.ACCUMULATE, False)
    rest.set(warpgroup.Field.ACCUMULATE, True)
    return first, rest


def accumulator(multiplications, rows, columns):
    """Registers of [rows, columns] float32. Only wgmma may write them: else the compiler waits for every product."""
    mma = multiplications[0]
    return mma.make_fragment_C(mma.partition_shape_C((rows, columns)))
