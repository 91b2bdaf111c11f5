"""Keys or values of e4m3 with float32 scales, decoded to 16 bits by the producer.

A scale belongs to a head (to the tensor, with a stride of 0) or, with token_scales, to each token of a head. Queries
are bfloat16, so keys become it, too, by way of float32, which costs two instructions a value and keeps NaN; values
become float16, for which one instruction does two. With token_scales values become bfloat16 as well: a weight times
the scale of a token is no number for float16.

There is one tile. The producer warpgroup, which has little else to do, decodes the next block while the readers are at
the other operand's product, and the bytes of the blocks behind it are on their way in a ring.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, threads
from msa_tiles.dsl.tilelang.keys import block_keys
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer

TENSORS = ("", "_scale")
STARTS = True
STORED = "float8_e4m3fn"
LEAST_SCALE = 1.0e-30


@declares
def multiplied(name, token_scales):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16" if name == "k" or token_scales else "float16"


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, own=True, token_scales):
    """A ring of blocks as they are stored, which TMA fills, and one decoded tile.

    Nobody arrives for the bytes: the producer's threads, who alone read them, meet between `fill` and the next `start`.
    """
    element = multiplied(name, token_scales)
    raw = buffer(f"{name}_raw", "float8_e4m3fn", align=1024, stages=stages, block_size=block_size, head_dim=head_dim)
    tile = buffer(f"{name}_tiles", element, align=1024, places=1, block_size=block_size, head_dim=head_dim)
    scales = buffer(f"{name}_scales", "float32", static=True, places=1, block_size=block_size)
    coming = buffer(f"{name}_coming", "float32", static=True, stages=stages, block_size=block_size)
    landed = Pipeline(f"{name}_raw", stages, (threads(producer),), fills=(raw.name,))
    decoded = Pipeline(name, 1, (threads(producer),), tuple(map(threads, readers)))
    return Parts(
        (landed, *((decoded,) if own else ())),
        (
            raw,
            *((tile,) if own else ()),
            *((scales,) if token_scales else ()),
            *((coming,) if token_scales and stages > 1 else ()),
        ),
    )


class Stored(NamedTuple):
    """Keys or values in global memory, and their scales."""

    values: Any
    scales: Any


class Held(NamedTuple):
    """In shared memory: the ring as it is stored, its barriers, and the decoded tiles, [1, block_size, head_dim] of its
    own or what it was given; with token_scales the scales of the tile, [1, block_size], and those on their way, which
    each thread keeps itself where the ring has one stage.
    """

    raw: Any
    landed: Any
    tiles: Any
    scales: Any
    coming: Any


class Operand:
    """See msa_tiles.dsl.tilelang.operands."""

    def __init__(self, name, head_dim, block_size, pages_per_block, element=None, *, token_scales):
        self.name = name
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.token_scales = token_scales
        self.element = element or multiplied(name, token_scales)

    def tensor(self, heads):
        """[total_k, heads, head_dim], or [pages, heads, page, head_dim] with pages_per_block > 0."""
        return T.StridedTensor(
            *block_keys(heads, self.head_dim, self.block_size, self.pages_per_block, self.name), STORED
        )

    def scale(self, heads):
        """[heads], or with token_scales the shape of the values without head_dim. Any strides."""
        rows, pages = T.dynamic(f"num_{self.name}_scale_rows, num_{self.name}_scale_pages")
        page_stride, row_stride, head_stride = strides(
            f"{self.name}_scale_page, {self.name}_scale_row, {self.name}_scale_head"
        )
        if not self.token_scales:
            return T.StridedTensor((heads,), (head_stride,), "float32")
        if self.pages_per_block == 0:
            return T.StridedTensor((rows, heads), (row_stride, head_stride), "float32")
        shape = (pages, heads, self.block_size // self.pages_per_block)
        return T.StridedTensor(shape, (page_stride, head_stride, row_stride), "float32")

    def fold(self, value, stored, head):
        """Not 0 for keys, whose scores may be -inf and LSE be divided by it: the least scale makes scores 0 as well."""
        if self.token_scales:
            return value
        folded = value * stored.scales[head]
        return T.max(folded, LEAST_SCALE) if self.name == "k" else folded


def allocate(operand, table, stages, tiles=None):
    name = operand.name
    raw = make_buffer(table, f"{name}_raw")
    landed = make_barrier(table, f"{name}_raw_full")
    if tiles is None:
        tiles = make_buffer(table, f"{name}_tiles")
    scales = coming = None
    if operand.token_scales:
        scales = make_buffer(table, f"{name}_scales")
        coming = T.alloc_local([1], "float32") if stages == 1 else make_buffer(table, f"{name}_coming")
    return Held(raw, landed, tiles, scales, coming)


@T.macro
def start(operand, stored, page_table, row, head, held, stage, rows, thread):
    """A row is one box of at most 128 bytes. The scales of rows from `rows` on are not looked at.

    All threads have left the block that was in the stage before.
    """
    block_size = operand.block_size
    pages = operand.pages_per_block
    page_size = block_size // max(pages, 1)
    values = described(stored.values)
    if pages == 0:
        T.tma_copy(values[row : row + block_size, head, :], held.raw[stage, :, :], barrier=held.landed[stage])
    else:
        span = page_table.shape[1] * block_size
        for p in T.unroll(pages):
            page = page_table[row // span, T.min(row % span // page_size + p, page_table.shape[1] - 1)]
            T.tma_copy(
                values[page, head, 0:page_size, :],
                held.raw[stage, p * page_size : (p + 1) * page_size, :],
                barrier=held.landed[stage],
            )
    if operand.token_scales:
        # Where a block has fewer rows than the warpgroup threads, several do the same.
        own = thread % block_size
        scale = T.alloc_var("float32")
        scale = 0.0
        if own < rows:
            if pages == 0:
                scale = stored.scales[row + own, head]
            else:
                span = page_table.shape[1] * block_size
                page = page_table[row // span, row % span // page_size + own // page_size]
                scale = stored.scales[page, head, own % page_size]
        if len(held.coming.shape) == 1:
            held.coming[0] = scale
        else:
            held.coming[stage, own] = scale
    T.barrier_arrive(held.landed[stage])


@T.macro
def fill(operand, stored, page_table, row, head, held, full, place, stage, phase, thread):
    T.barrier_wait(held.landed[stage], phase)
    for j, c in T.Parallel(operand.block_size, operand.head_dim):
        if operand.element == "float16":
            held.tiles[place, j, c] = T.cast(held.raw[stage, j, c], "float16")
        else:
            held.tiles[place, j, c] = T.cast(T.cast(held.raw[stage, j, c], "float32"), "bfloat16")
    if operand.token_scales:
        own = thread % operand.block_size
        if len(held.coming.shape) == 1:
            held.scales[0, own] = held.coming[0]
        else:
            held.scales[0, own] = held.coming[stage, own]
    T.fence_proxy_async()


@T.macro
def weigh(operand, held, S, rows):
    if operand.token_scales:
        for i, j in T.Parallel(rows, operand.block_size):
            if operand.name == "k":
                S[i, j] = S[i, j] * held.scales[0, j]
            else:
                S[i, j] = T.if_then_else(S[i, j] != 0.0, S[i, j] * held.scales[0, j], 0.0)
