"""Values that are infinite or NaN, in blocks that some query sees in part.

A probability of 0 times such a value is NaN: the product would bring it to queries that may not see its row. So it is
taken out before, and the rows that do see it are marked afterwards: what they get in its column is NaN, whatever sign
an infinity had.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

# Of two elements in an int: the exponents, and what carries out of one that is all ones; where that goes.
EXPONENTS = {cutlass.BFloat16: (0x7F807F80, 0x00800080), cutlass.Float16: (0x7C007C00, 0x04000400)}
CARRIED = 0x80008000 - (1 << 32)
VECTOR = 4  # ints that a lane loads at a time


@cute.jit
def unbounded_pair(bits: Int32, element: cutlass.Constexpr = cutlass.BFloat16) -> Int32:
    """Not 0 if one of the two elements in an int is infinite or NaN."""
    exponents, carry = EXPONENTS[element]
    return ((bits & exponents) + carry) & CARRIED


@cute.jit
def unbounded(value: Float32) -> Boolean:
    """Whether a number is infinite or NaN; bits only, since simplifiers take `x - x` for what it seems."""
    return (value.bitcast(Int32) & 0x7F800000) == 0x7F800000


@cute.jit
def any_unbounded(block: cute.Tensor, ints: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr) -> Int32:
    """Not 0 if this thread's share of a block in shared memory, of so many ints of two elements, has such a value."""
    words = cute.make_tensor(
        cute.recast_ptr(block.iterator, dtype=Int32), cute.make_layout((VECTOR, ints // VECTOR), stride=(1, VECTOR))
    )
    found = Int32(0)
    for place in cutlass.range(thread, ints // VECTOR, threads, unroll=8):
        held = words[None, place].load()
        for i in cutlass.range_constexpr(VECTOR):
            found = found | unbounded_pair(held[i], block.element_type)
    return found


@cute.jit
def clean_column(block: cute.Tensor, column: Int32, rows: Int32, none: cutlass.Constexpr) -> Int32:
    """Replace such values by 0 in the first `rows` of a column of block [column, row]. Their first row, or `none`."""
    first = Int32(none)
    for back in cutlass.range(rows, unroll=1):
        row = rows - 1 - back
        if unbounded(Float32(block[column, row])):
            block[column, row] = block.element_type(0.0)
            first = row
    return first
