"""What operands are made of that decode stored bytes: places in swizzled rows, words from there, e4m3 in 16 bits."""

import cutlass.cute as cute
from cutlass import Int32

CHUNK = 16  # bytes that ldmatrix takes of a row
UNIT = 8  # values that a lane decodes at a time
REPEAT = 8  # rows after which a swizzle repeats
PANEL = 64  # columns of a panel of 16 bits


def words_at(place, count):
    """Words that may be loaded at once."""
    start = cute.make_ptr(Int32, place.toint(), place.memspace, assumed_align=4 * count)
    loaded = cute.make_tensor(start, cute.make_layout(count)).load()
    return [loaded[i] for i in range(count)]


def aligned(place, element, count):
    """16 bytes from a place that is a multiple of as many."""
    start = cute.make_ptr(element, place.toint(), place.memspace, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout(count))


def byte_of(row, chunk, row_bytes):
    """Where 16 bytes of a row begin in a block of rows of 128, 64 or 32 bytes, swizzled by as many."""
    return row * row_bytes + (chunk ^ (row * row_bytes // 128) % (row_bytes // CHUNK)) * CHUNK


def column_of(row, unit, head_dim):
    """Where 8 columns of a row of 16 bits begin, as msa_tiles.dsl.cutedsl.gather lays them down: in columns."""
    panel = row // REPEAT * (head_dim // PANEL) + unit // 8
    return panel * (REPEAT * PANEL) + row % REPEAT * PANEL + (unit % 8 ^ row % REPEAT) * 8


def columns_at(tile, row, unit, rows):
    """8 columns of a row, as four words, of a tile of 16 bits that lies in swizzled panels of so many rows."""
    panel = unit // UNIT * rows + row
    return aligned(tile + panel * PANEL + ((unit % UNIT) ^ (row % REPEAT)) * UNIT, Int32, UNIT // 2)


def decode_f16(word):
    """Four e4m3 -> two words of two float16, exact; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; "
        "cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def decode_bf16(word, scale=None):
    """Four e4m3 -> two words of two bfloat16, through float16 and float32: exact without a scale. NaN stays NaN."""
    return [widen(half, scale) for half in decode_f16(word)]


def widen(pair, scale):
    """Two float16, times a scale where it is given -> two bfloat16."""
    times = "" if scale is None else "mul.f32 first, first, {$r1}; mul.f32 second, second, {$r1}; "
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .f32 first, second; mov.b32 {low, high}, {$r0}; cvt.f32.f16 first, low; "
        "cvt.f32.f16 second, high; " + times + "cvt.rn.bf16x2.f32 {$w0}, second, first; }",
        write_only_types=[Int32],
        read_only_args=[pair] if scale is None else [pair, scale],
    )
