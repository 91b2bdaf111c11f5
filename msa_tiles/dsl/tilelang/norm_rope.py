"""Rows that are normed and rotated in registers: VECTOR columns a lane, the lanes of a row beside each other."""

import tilelang.language as T

from msa_tiles.dsl.tilelang.append import VECTOR
from msa_tiles.dsl.tilelang.operands.append_e4m3 import code
from msa_tiles.dsl.tilelang.packing import high_half, low_half, pack_halves


@T.macro
def load_weight(weight, column, packed, values):
    """The VECTOR columns of a lane as float32, 16 bytes at a time; `packed` holds 4 words."""
    packed[0:4] = T.ldg128(weight[column])
    for c in T.unroll(VECTOR // 2):
        values[2 * c] = low_half(packed[c])
        values[2 * c + 1] = high_half(packed[c])


@T.macro
def _load_row(table, position, column, element, packed, values):
    """Those of a row of the table."""
    if element == "float32":
        for part in T.unroll(VECTOR // 4):
            packed[0:4] = T.ldg128(table[position, column + 4 * part])
            for c in T.unroll(4):
                values[4 * part + c] = T.reinterpret(packed[c], "float32")
    else:
        packed[0:4] = T.ldg128(table[position, column])
        for c in T.unroll(VECTOR // 2):
            values[2 * c] = low_half(packed[c])
            values[2 * c + 1] = high_half(packed[c])


@T.macro
def norm(values, weight, offset, eps, lanes):
    """values / root of (mean square + eps) * (weight + offset). All lanes of a warp call it."""
    total = T.alloc_var("float32")
    total = 0.0
    for c in T.unroll(VECTOR):
        total = total + values[c] * values[c]
    for step in T.unroll(lanes.bit_length() - 1):
        total = total + T.shfl_xor(total, 1 << step)
    total = 1.0 / T.sqrt(total / T.float32(lanes * VECTOR) + eps)
    for c in T.unroll(VECTOR):
        values[c] = values[c] * total * (weight[c] + offset)


@T.macro
def load_angles(table, position, lane, element, packed, cosines, sines):
    """Row `position` of the table [positions, rotary_dim], which has the cosines first and the sines behind them.

    The sines of the first half of what is rotated become negative. Without such a row all of them stay as they are.
    """
    half = T.truncdiv(table.shape[1], 2 * VECTOR)  # lanes of one half
    if lane < 2 * half and position >= 0 and position < table.shape[0]:
        column = T.if_then_else(lane < half, lane, lane - half) * VECTOR
        _load_row(table, position, column, element, packed, cosines)
        _load_row(table, position, column + half * VECTOR, element, packed, sines)
        if lane < half:
            for c in T.unroll(VECTOR):
                sines[c] = -sines[c]


@T.macro
def rotate(values, table, position, lane, lane_of_warp, cosines, sines):
    """Column i of the first rotary_dim / 2 with that of the second half of them. All lanes of a warp call it."""
    others = T.alloc_local([VECTOR], "float32")
    other = T.alloc_var("int32")
    half = T.truncdiv(table.shape[1], 2 * VECTOR)
    other = lane
    if lane < half:
        other = lane + half
    elif lane < 2 * half:
        other = lane - half
    for c in T.unroll(VECTOR):
        others[c] = T.shfl_sync(values[c], lane_of_warp - lane + other)
    if lane < 2 * half and position >= 0 and position < table.shape[0]:
        for c in T.unroll(VECTOR):
            values[c] = values[c] * cosines[c] + others[c] * sines[c]


@T.macro
def store_rounded(values, rows, token, head, column, packed):
    """The VECTOR columns of a lane, rounded to bfloat16."""
    for c in T.unroll(VECTOR // 2):
        packed[c] = pack_halves(values[2 * c], values[2 * c + 1])
    T.stg128(rows[token, head, column], packed[0:4])


@T.macro
def store_e4m3(values, rows, token, head, column, packed):
    """The same rounded to e4m3, in rows of as many bytes; the column is one of two-byte elements."""
    for i in T.unroll(VECTOR // 4):
        packed[i] = T.uint32(0)
        for c in T.unroll(4):
            packed[i] = packed[i] | (code(values[4 * i + c]) << T.uint32(8 * c))
    T.stg64(rows[token, head, column], packed[0 : VECTOR // 4])
