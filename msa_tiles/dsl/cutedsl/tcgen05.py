"""Products of a 128-row tile in tensor memory: one elected thread starts them, whole warpgroups read and write them.

Tensor memory has 128 lanes of 512 columns of 32 bits; row i of a tile is lane i. A product's accumulator takes a
column for each of its own, a left operand of two-byte elements one for every two. Warp i of a warpgroup reaches the
lanes 32 (i % 4) and up, so that a thread owns a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

ROWS = 128  # of a tile: the lanes of tensor memory
DEPTH = 16  # elements along the contraction that one multiplication of two-byte elements takes
LANE = 1 << 16  # from one lane of tensor memory to the next, where the next column is 1 away
COLUMNS = 32  # of tensor memory that a thread reads or writes at a time


def product(element, columns, right_major, left_source):
    """The two multiplications of [ROWS, K] x [K, columns]: the first step, which forgets what was there, and the rest.

    A multiplication that is told to accumulate inside dynamic control flow would be a new value there: hence two.
    """
    op = tcgen05.MmaF16BF16Op(
        element, Float32, (ROWS, columns, DEPTH), tcgen05.CtaGroup.ONE, left_source, OperandMajorMode.K, right_major
    )
    first, rest = (cute.make_tiled_mma(op) for _ in range(2))
    first.set(tcgen05.Field.ACCUMULATE, False)
    rest.set(tcgen05.Field.ACCUMULATE, True)
    return first, rest


def left_layout(multiplications, element, depth, count):
    """Left operands [ROWS, depth, count] along K, atoms of 8 rows by 64 columns one after another along a row first."""
    shape = cute.append(multiplications[0].partition_shape_A((ROWS, depth)), count)
    return tcgen05.tile_to_mma_shape(_atom(OperandMajorMode.K, element), shape, order=(2, 1, 3))


def right_layout(multiplications, element, major, columns, depth, count):
    """Right operands [columns, depth, count] in panels of 64 elements along `major`, one panel behind another."""
    shape = cute.append(multiplications[0].partition_shape_B((columns, depth)), count)
    order = (1, 2, 3) if major == OperandMajorMode.K else (2, 1, 3)
    return tcgen05.tile_to_mma_shape(_atom(major, element), shape, order=order)


def _atom(major, element):
    kinds = tcgen05.SmemLayoutAtomKind
    return tcgen05.make_smem_layout_atom(kinds.K_SW128 if major == OperandMajorMode.K else kinds.MN_SW128, element)


def accumulator(multiplications, columns, memory):
    """The accumulator of a product that begins at a column of tensor memory."""
    mma = multiplications[0]
    return cute.make_tensor(memory, mma.make_fragment_C(mma.partition_shape_C((ROWS, columns))).layout)


def left_operand(multiplications, element, depth, memory):
    """A left operand that begins at a column of tensor memory."""
    mma = multiplications[0]
    layout = mma.make_fragment_A(mma.partition_shape_A((ROWS, depth))).layout
    return cute.make_tensor(cute.recast_ptr(memory, dtype=element), layout)


@cute.jit
def multiply(multiplications, into: cute.Tensor, left: cute.Tensor, right: cute.Tensor):
    """Start into = left x right; a whole warp calls it."""
    for step in cutlass.range_constexpr(cute.size(left, mode=[2])):
        mma = multiplications[0] if cutlass.const_expr(step == 0) else multiplications[1]
        cute.gemm(mma, into, left[None, None, step], right[None, None, step], into)


def _columns(memory, columns):
    """[ROWS, columns] of tensor memory."""
    return cute.make_tensor(memory, cute.make_layout((ROWS, columns), stride=(LANE, 1)))


@cute.jit
def read(memory: cute.Pointer, thread: Int32, values: cute.Tensor):
    """Start a read of the thread's row of a warpgroup's tile -> float32 values in registers; see `wait_for_reads`."""
    width = cutlass.min(cute.size(values), COLUMNS)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
    for step in cutlass.range_constexpr(cute.size(values) // width):
        source = _columns(memory + step * width, width)
        copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
        rows = copy.partition_S(source)
        target = cute.make_tensor(
            values.iterator + step * width, copy.partition_D(cute.make_identity_tensor((ROWS, width))).shape
        )
        cute.copy(copy, rows, target)


@cute.jit
def write(values: cute.Tensor, memory: cute.Pointer, thread: Int32):
    """Start a write of values in registers -> the thread's row; two-byte elements go two to a column."""
    words = cute.make_tensor(
        cute.recast_ptr(values.iterator, dtype=Float32), cute.size(values) * values.element_type.width // Float32.width
    )
    width = cutlass.min(cute.size(words), COLUMNS)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(width)), Float32)
    for step in cutlass.range_constexpr(cute.size(words) // width):
        target = _columns(memory + step * width, width)
        copy = tcgen05.make_tmem_copy(atom, target).get_slice(thread)
        source = cute.make_tensor(
            words.iterator + step * width, copy.partition_S(cute.make_identity_tensor((ROWS, width))).shape
        )
        cute.copy(copy, source, copy.partition_D(target))
