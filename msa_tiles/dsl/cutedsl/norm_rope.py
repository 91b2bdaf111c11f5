"""Rows that are normed and rotated in registers: VECTOR columns a lane, the lanes of a row beside each other."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from msa_tiles.dsl.cutedsl.operands.append_e4m3 import WORD, round_e4m3
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.cutedsl.vector import VECTOR, copy_wide, vector_of, wide


@cute.jit
def load_floats(row: cute.Tensor, place: Int32, values: cute.Tensor):
    """The VECTOR columns of this number as float32, 16 bytes at a time."""
    at_once = vector_of(row.element_type)
    steps = VECTOR // at_once
    for step in cutlass.range_constexpr(steps):
        part = cute.make_rmem_tensor(at_once, row.element_type)
        copy_wide(wide(row, place * steps + step), part)
        for i in cutlass.range_constexpr(at_once):
            values[step * at_once + i] = Float32(part[i])


@cute.jit
def norm(values: cute.Tensor, weight: cute.Tensor, offset: Float32, eps: Float32, lanes: cutlass.Constexpr):
    """values / root of (mean square + eps) * (weight + offset). All threads call it."""
    total = Float32(0.0)
    for c in cutlass.range_constexpr(VECTOR):
        total = total + values[c] * values[c]
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
    factor = cute.math.rsqrt(total / Float32(lanes * VECTOR) + eps)
    for c in cutlass.range_constexpr(VECTOR):
        values[c] = values[c] * factor * (weight[c] + offset)


class Angles(NamedTuple):
    """Cosines and sines of a lane's columns, those of the first half of what is rotated negative, if there are any."""

    turned: Any
    half: Any  # lanes of one half
    cosines: Any
    sines: Any


@cute.jit
def load_angles(table: cute.Tensor, position: Int32, lane: Int32) -> Angles:
    """Row `position` of the table [positions, rotary_dim], which has the cosines first and the sines behind them.

    Without such a row nothing is rotated.
    """
    half = Int32(table.shape[1]) // (2 * VECTOR)
    turned = (lane < 2 * half) & (position >= 0) & (position < table.shape[0])
    cosines = cute.make_rmem_tensor(VECTOR, Float32)
    sines = cute.make_rmem_tensor(VECTOR, Float32)
    cosines.fill(1.0)
    sines.fill(0.0)
    if turned:
        place = pick(lane < half, lane, lane - half)
        load_floats(table[position, None], place, cosines)
        load_floats(table[position, None], place + half, sines)
        if lane < half:
            for c in cutlass.range_constexpr(VECTOR):
                sines[c] = -sines[c]
    return Angles(turned, half, cosines, sines)


@cute.jit
def rotate(values: cute.Tensor, angles: Angles, lane: Int32):
    """Column i of the first rotary_dim / 2 with that of the second half of them. All threads call it."""
    other = lane
    if lane < angles.half:
        other = lane + angles.half
    elif lane < 2 * angles.half:
        other = lane - angles.half
    first = Int32(cute.arch.lane_idx()) - lane
    others = cute.make_rmem_tensor(VECTOR, Float32)
    for c in cutlass.range_constexpr(VECTOR):
        others[c] = cute.arch.shuffle_sync(values[c], first + other)
    if angles.turned:
        for c in cutlass.range_constexpr(VECTOR):
            values[c] = values[c] * angles.cosines[c] + others[c] * angles.sines[c]


@cute.jit
def store_rounded(values: cute.Tensor, row: cute.Tensor, lane: Int32):
    """The VECTOR columns of a lane, rounded to the row's two bytes."""
    rounded = cute.make_rmem_tensor(VECTOR, row.element_type)
    for c in cutlass.range_constexpr(VECTOR):
        rounded[c] = values[c].to(row.element_type)
    copy_wide(rounded, wide(row, lane))


@cute.jit
def store_e4m3(values: cute.Tensor, row: cute.Tensor, lane: Int32):
    """The VECTOR columns of a lane, rounded to e4m3, in a row of as many bytes in two-byte elements."""
    words = cute.make_rmem_tensor(VECTOR // WORD, Int32)
    for i in cutlass.range_constexpr(VECTOR // WORD):
        words[i] = round_e4m3(*(values[WORD * i + c] for c in range(WORD)))
    start = row.iterator + lane * (VECTOR // 2)
    target = cute.make_ptr(Int32, start.toint(), start.memspace, assumed_align=VECTOR)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(VECTOR // WORD)))


class Slots:
    """The slots of a cache [pages, heads, page, head_dim], which an operand writes."""

    def __init__(self, cache):
        self.cache = cache

    @cute.jit
    def insert(
        self,
        values: cute.Tensor,
        live: Boolean,
        stored: tuple,
        slot: Int32,
        head: Int32,
        lane: Int32,
        use_scale: Int32,
    ):
        """Into a slot, from lanes whose row is live. All lanes of a warp call it."""
        # Lanes without a row may have a head that there is not.
        scale = self.cache.scale_of(values, stored, cutlass.min(head, stored.values.shape[1] - 1), use_scale)
        if live:
            page_size = Int32(stored.values.shape[2])
            self.cache.write(values, scale, stored, slot // page_size, head, slot % page_size, lane)
