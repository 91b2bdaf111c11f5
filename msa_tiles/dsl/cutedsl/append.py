"""Rows of tokens and heads that are written into pages: which one a thread has, where it goes, and its values."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.vector import BYTES, VECTOR, copy_wide, vector_of, wide


def row_arguments(element, head_dim, tensors):
    """Stand-ins: rows [total, heads, head_dim] as often as asked, and slots, int32 [total, words]; and the heads."""
    total, heads = cute.sym_int(), cute.sym_int()
    rows = tuple(stand_in(element, total, heads, head_dim, align=BYTES) for _ in range(tensors))
    return (*rows, stand_in(Int32, total, cute.sym_int())), heads


@cute.jit
def slot_of(slots: cute.Tensor, token: Int32, num_slots: Int32) -> Int32:
    """Where a token goes, or -1: past the last token, for a negative slot, and for one that is none of num_slots.

    A slot has one word, or two, of which the upper one is 0 for every slot that there is.
    """
    slot = Int32(-1)
    if token < slots.shape[0]:
        words = Int32(slots.shape[1])
        lower, upper = slots[token, 0], slots[token, words - 1]
        if (lower >= 0) & (lower < num_slots) & ((words == 1) | (upper == 0)):
            slot = lower
    return slot


@cute.jit
def load_row(row: cute.Tensor, lane: Int32, values: cute.Tensor):
    """The VECTOR columns of a lane, 16 bytes at a time."""
    at_once = vector_of(row.element_type)
    steps = VECTOR // at_once
    for step in cutlass.range_constexpr(steps):
        part = cute.make_rmem_tensor(at_once, row.element_type)
        copy_wide(wide(row, lane * steps + step), part)
        for i in cutlass.range_constexpr(at_once):
            values[step * at_once + i] = part[i]


@cute.jit
def largest_of(values: cute.Tensor, lanes: cutlass.Constexpr) -> Float32:
    """The largest magnitude of a row, NaN left out; the lanes of a row stand beside each other, all threads call."""
    largest = Float32(0.0)
    for c in cutlass.range_constexpr(VECTOR):
        value = Float32(values[c])
        largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    return largest
