"""Keys or values of e4m3 with float32 scales, decoded by the producer into tiles of a ring that others use, too.

As msa_tiles.dsl.tilelang.operands.e4m3, but for scales of tokens: the producer multiplies them into the rows as it
decodes them, which rounds to the ring's element once. Readers have nothing to do and no registers to spare, and shared
memory needs no place for scales: each warp decodes rows whose scales its lanes have brought.
"""

import tilelang.language as T

from msa_tiles.dsl.table import WARP, Parts, Pipeline, buffer, declares, threads
from msa_tiles.dsl.tilelang.layout import described
from msa_tiles.dsl.tilelang.operands import e4m3
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer

TENSORS = ("", "_scale")
STARTS = True
Stored = e4m3.Stored
Held = e4m3.Held
Operand = e4m3.Operand
WARPS = 4
UNIT = 8  # values that a lane decodes at a time: the 16 bytes that it writes lie together in a swizzled row


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, own, token_scales):
    """A ring of blocks as they are stored, which TMA fills; the tiles and their pipeline are the kernel's.

    Nobody arrives for the bytes: the producer's threads, who alone read them, meet between `fill` and the next `start`.
    """
    raw = buffer(f"{name}_raw", "float8_e4m3fn", align=1024, stages=stages, block_size=block_size, head_dim=head_dim)
    return Parts((Pipeline(f"{name}_raw", stages, (threads(producer),), fills=(raw.name,)),), (raw,))


def allocate(operand, table, stages, tiles):
    raw = make_buffer(table, f"{operand.name}_raw")
    landed = make_barrier(table, f"{operand.name}_raw_full")
    return Held(raw, landed, tiles, None, T.alloc_local([1], "float32") if operand.token_scales else None)


def rows_at_once(operand):
    """Rows that a warp decodes in one step."""
    return WARP // (operand.head_dim // UNIT)


@T.macro
def start(operand, stored, page_table, row, head, held, stage, rows, thread):
    """As e4m3 has it, in fewer registers: what places a block is worked out once, and pages follow each other.

    A lane brings the scale of one of the rows that its warp decodes.
    """
    block_size = operand.block_size
    pages = operand.pages_per_block
    page_size = block_size // max(pages, 1)
    values = described(stored.values)
    begin = T.alloc_var("int32")
    request = T.alloc_var("int32")
    first_page = T.alloc_var("int32")
    begin = row
    if pages == 0:
        T.tma_copy(values[begin : begin + block_size, head, :], held.raw[stage, :, :], barrier=held.landed[stage])
    else:
        request = T.truncdiv(begin, page_table.shape[1] * block_size)
        first_page = T.truncdiv(begin - request * (page_table.shape[1] * block_size), page_size)
        for p in T.unroll(pages, unroll_factor=1):
            T.tma_copy(
                values[page_table[request, T.min(first_page + p, page_table.shape[1] - 1)], head, 0:page_size, :],
                held.raw[stage, p * page_size : (p + 1) * page_size, :],
                barrier=held.landed[stage],
            )
    if operand.token_scales:
        at_once = rows_at_once(operand)
        # Where a warp has fewer rows than lanes, several do the same. Rows behind the block's last have its scale: what
        # they become does not matter, and products with strides take no registers from one block to the next.
        number = thread % WARP % (block_size // WARPS)
        own = T.alloc_var("int32")
        own = T.min(number // at_once * (WARPS * at_once) + thread // WARP * at_once + number % at_once, rows - 1)
        if pages == 0:
            held.coming[0] = stored.scales[begin + own, head]
        else:
            held.coming[0] = stored.scales[page_table[request, first_page + own // page_size], head, own % page_size]
    T.barrier_arrive(held.landed[stage])


@T.macro
def fill(operand, stored, page_table, row, head, held, full, place, stage, phase, thread):
    """In each step the warps decode rows beside each other, whose place in a swizzle is the same in every step."""
    at_once = rows_at_once(operand)
    lanes = WARP // at_once
    scale = T.alloc_var("float32")
    T.barrier_wait(held.landed[stage], phase)
    for step in T.serial(operand.block_size // (WARPS * at_once)):
        own = step * (WARPS * at_once) + thread // lanes
        if operand.token_scales:
            scale = T.shfl_sync(held.coming[0], step * at_once + thread % WARP // lanes)
            for i in T.vectorized(UNIT):
                held.tiles[place, own, thread % lanes * UNIT + i] = T.cast(
                    T.cast(held.raw[stage, own, thread % lanes * UNIT + i], "float32") * scale, operand.element
                )
        else:
            for i in T.vectorized(UNIT):
                held.tiles[place, own, thread % lanes * UNIT + i] = T.cast(
                    T.cast(held.raw[stage, own, thread % lanes * UNIT + i], "float32"), operand.element
                )
    T.fence_proxy_async()


@T.macro
def weigh(operand, held, S, rows):
    pass
