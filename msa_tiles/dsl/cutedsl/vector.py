"""Eight two-byte elements that one thread moves with one 16-byte load or store."""

import cutlass
import cutlass.cute as cute

VECTOR = 8
BYTES = 16


@cute.jit
def wide(row: cute.Tensor, place: cutlass.Int32) -> cute.Tensor:
    """Elements 8 place to 8 place + 7 of a row of unit stride that begins at a multiple of 16 bytes."""
    start = row.iterator + place * VECTOR
    aligned = cute.make_ptr(row.element_type, start.toint(), start.memspace, assumed_align=BYTES)
    return cute.make_tensor(aligned, cute.make_layout(VECTOR))


@cute.jit
def copy_wide(source: cute.Tensor, target: cute.Tensor):
    """Eight elements from memory to registers or back, in one instruction."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), source.element_type, num_bits_per_copy=BYTES * 8)
    cute.copy(atom, source, target)
