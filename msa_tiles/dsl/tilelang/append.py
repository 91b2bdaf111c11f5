"""Rows of tokens and heads that are written into pages: where one goes, and its values."""

import tilelang.language as T

from msa_tiles.dsl.tilelang.packing import high_half, low_half

VECTOR = 8  # columns of a lane


@T.macro
def find_slot(slots, token, num_slots, slot):
    """slot[0] = where a token goes, or -1: past the last token, for a negative slot, for one that is none of num_slots.

    A slot has one word, or two, of which the upper one is 0 for every slot that there is.
    """
    slot[0] = -1
    if token < slots.shape[0]:
        words = slots.shape[1]
        lower = slots[token, 0]
        if lower >= 0 and lower < num_slots and (words == 1 or slots[token, words - 1] == 0):
            slot[0] = lower


@T.macro
def load_row(rows, token, head, column, element, packed, values):
    """The VECTOR columns of a lane as float32, 16 bytes at a time; `packed` holds 4 words."""
    if element == "float32":
        for part in T.unroll(VECTOR // 4):
            packed[0:4] = T.ldg128(rows[token, head, column + 4 * part])
            for c in T.unroll(4):
                values[4 * part + c] = T.reinterpret(packed[c], "float32")
    else:
        packed[0:4] = T.ldg128(rows[token, head, column])
        for c in T.unroll(4):
            values[2 * c] = low_half(packed[c])
            values[2 * c + 1] = high_half(packed[c])


@T.macro
def largest_of(values, lanes, largest):
    """largest[0] = the largest magnitude of a row, NaN left out; its lanes are neighbours, and all threads call."""
    largest[0] = 0.0
    for c in T.unroll(VECTOR):
        # Not T.max, which is free to keep a NaN.
        if T.abs(values[c]) > largest[0]:
            largest[0] = T.abs(values[c])
    for step in T.unroll(lanes.bit_length() - 1):
        largest[0] = T.max(largest[0], T.shfl_xor(largest[0], 1 << step))
