"""What one thread moves with one 16-byte load or store: eight two-byte elements, or 16 of one byte."""

import cutlass
import cutlass.cute as cute

VECTOR = 8  # two-byte elements
BYTES = 16


def vector_of(element):
    """How many elements 16 bytes hold."""
    return BYTES * 8 // element.width


@cute.jit
def wide(row: cute.Tensor, place: cutlass.Int32) -> cute.Tensor:
    """The 16 bytes of this number in a row of unit stride that begins at a multiple of 16 bytes."""
    vector = vector_of(row.element_type)
    start = row.iterator + place * vector
    aligned = cute.make_ptr(row.element_type, start.toint(), start.memspace, assumed_align=BYTES)
    return cute.make_tensor(aligned, cute.make_layout(vector))


@cute.jit
def copy_wide(source: cute.Tensor, target: cute.Tensor):
    """16 bytes from memory to registers or back, in one instruction."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), source.element_type, num_bits_per_copy=BYTES * 8)
    cute.copy(atom, source, target)
