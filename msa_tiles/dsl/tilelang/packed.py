"""Keys or values of 4 bits with a scale for a group of values along D, decoded to bfloat16 by the producer.

Bytes come to a ring by TMA, and beside them their scales, which each of the producer's threads has copied past
registers for one token: in the order of global memory, "linear", the groups of a token beside each other, or
"interleaved", the same group of four tokens. Strides tell which one it is; those of keys are linear.

A lane decodes the 16 codes of eight bytes at a time. Four lanes beside each other have the panel's first 64 columns of
a row, the next four of the row below: so eight lanes write to all banks of shared memory, whatever the swizzle.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from msa_tiles.dsl.four_bits import CODES, TOKENS
from msa_tiles.dsl.table import Parts, Pipeline, buffer, declares, threads
from msa_tiles.dsl.tilelang.e2m1 import halves, lower_halves, upper_halves
from msa_tiles.dsl.tilelang.keys import block_keys
from msa_tiles.dsl.tilelang.layout import described, strides
from msa_tiles.dsl.tilelang.shared import make_barrier, make_buffer

PRODUCERS = 128  # threads
UNIT = 16  # codes that a lane decodes at a time
PANEL = 64  # columns of 128 bytes
WORD = 8  # codes
LEAST_COPY = 4  # bytes that may be copied past registers


@declares
def ring(name, head_dim, block_size, stages, group, producer):
    """Blocks as they are stored, with their scales.

    Nobody frees a stage: the producer's threads, who alone read it, meet between `fill` and the next `start`.
    """
    raw = buffer(f"{name}_raw", "uint8", align=1024, stages=stages, block_size=block_size, row_bytes=head_dim // 2)
    scales = buffer(f"{name}_scales", "uint8", stages=stages, scale_bytes=block_size * head_dim // group)
    return Parts((Pipeline(f"{name}_raw", stages, (threads(producer),), fills=(raw.name,)),), (raw, scales))


@declares
def with_tile(found, name, head_dim, block_size, producer, readers):
    """A ring, and one decoded tile."""
    tiles = buffer(f"{name}_tiles", "bfloat16", align=1024, places=1, block_size=block_size, head_dim=head_dim)
    decoded = Pipeline(name, 1, (threads(producer),), tuple(map(threads, readers)))
    return Parts((*found.pipelines, decoded), (*found.buffers, tiles))


class Stored(NamedTuple):
    """Keys or values in global memory: bytes, scales of groups, and those of heads where the format has them."""

    values: Any
    scales: Any
    of_heads: Any = None


class Held(NamedTuple):
    """In shared memory: bytes [stages, block_size, head_dim / 2], their scales [stages, bytes], and their barriers; the
    decoded tiles, [places, block_size, head_dim].
    """

    raw: Any
    scales: Any
    landed: Any
    tiles: Any


class Operand:
    """See msa_tiles.dsl.tilelang.operands. A format adds `group`, `scale_element`, `factor`, `number`, `whole`."""

    element = "bfloat16"
    group = None
    scale_element = None
    in_order = True

    def __init__(self, name, head_dim, block_size, pages_per_block, element=None):
        assert element in (None, self.element)
        self.name = name
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.groups = head_dim // self.group

    def tensor(self, heads):
        """Bytes [total_k, heads, head_dim / 2], or [pages, heads, page, head_dim / 2] with pages_per_block > 0."""
        width = self.head_dim // CODES
        return T.StridedTensor(*block_keys(heads, width, self.block_size, self.pages_per_block, self.name), "uint8")

    def scale(self, heads):
        """[total_k, heads, groups], or [pages, heads, page / 4, 4, groups]."""
        rows, pages = T.dynamic(f"num_{self.name}_scale_rows, num_{self.name}_scale_pages")
        names = [f"{self.name}_scale_{what}" for what in ("page", "head", "quad", "row", "group")]
        page_stride, head_stride, quad_stride, row_stride, group_stride = strides(", ".join(names))
        if self.pages_per_block == 0:
            return T.StridedTensor((rows, heads, self.groups), (row_stride, head_stride, 1), self.scale_element)
        shape = (pages, heads, self.block_size // self.pages_per_block // TOKENS, TOKENS, self.groups)
        steps = (page_stride, head_stride, quad_stride, row_stride, group_stride)
        return T.StridedTensor(shape, steps, self.scale_element)

    def of_heads(self, heads):
        """[heads] float32."""
        return T.StridedTensor((heads,), (strides(f"{self.name}_global_head"),), "float32")

    def scale_at(self, stored, place, token, head, byte):
        """One of the bytes that a thread brings for a token: of its scales, or its share of those of four tokens.

        The place is a row of flat keys, or a page, of which the token is one.
        """
        if self.pages_per_block == 0:
            return stored.scales[place, head, byte]
        quad, share = token // TOKENS, token % TOKENS * self.groups + byte
        turned = self.interleaved(stored)
        within = T.if_then_else(turned, share % TOKENS, token % TOKENS)
        return stored.scales[place, head, quad, within, T.if_then_else(turned, share // TOKENS, byte)]

    def box(self, stored, row, page, head):
        """What TMA brings, of a block or of a page."""
        values = described(stored.values)
        if self.pages_per_block == 0:
            return values[row : row + self.block_size, head, :]
        return values[page, head, 0 : self.block_size // self.pages_per_block, :]

    def interleaved(self, stored):
        """Whether the same group of four tokens lies together. A token alone in its group's bytes has either order."""
        return stored.scales.strides[4] != 1

    def scale_within(self, stored, token, group):
        """Where a token's scale is among the bytes of its four tokens."""
        linear = token % TOKENS * self.groups + group
        if self.name == "k" or self.pages_per_block == 0:
            return linear
        return T.if_then_else(self.interleaved(stored), group * TOKENS + token % TOKENS, linear)


def allocate(operand, table, tiles=None):
    name = operand.name
    if tiles is None:
        tiles = make_buffer(table, f"{name}_tiles")
    raw, scales = make_buffer(table, f"{name}_raw"), make_buffer(table, f"{name}_scales")
    return Held(raw, scales, make_barrier(table, f"{name}_raw_full"), tiles)


@T.macro
def start(operand, stored, page_table, row, head, held, stage, rows, thread):
    """A row is one box. Rows behind the block's last four tokens have the last one's bytes of scales: what they become
    does not matter.

    All threads have left the block that was in the stage before.
    """
    block_size = operand.block_size
    pages = operand.pages_per_block
    page_size = block_size // max(pages, 1)
    own = T.alloc_var("int32")
    place = T.alloc_var("int32")
    # Where a block has fewer rows than the warpgroup threads, several do the same.
    token = thread % block_size
    if pages == 0:
        own = T.min(token, rows - 1)
        T.tma_copy(operand.box(stored, row, 0, head), held.raw[stage, :, :], barrier=held.landed[stage])
        place = row + own
    else:
        request = T.alloc_var("int32")
        first_page = T.alloc_var("int32")
        request = T.truncdiv(row, page_table.shape[1] * block_size)
        first_page = T.truncdiv(row - request * (page_table.shape[1] * block_size), page_size)
        for p in T.unroll(pages, unroll_factor=1):
            T.tma_copy(
                operand.box(stored, 0, page_table[request, T.min(first_page + p, page_table.shape[1] - 1)], head),
                held.raw[stage, p * page_size : (p + 1) * page_size, :],
                barrier=held.landed[stage],
            )
        # Interleaved scales of a token lie among those of four, all of which the page has.
        own = T.min(token, (rows - 1) // TOKENS * TOKENS + TOKENS - 1)
        place = page_table[request, first_page + own // page_size]
    if operand.groups < LEAST_COPY:
        for i in T.unroll(operand.groups):
            byte = operand.scale_at(stored, place, own % page_size, head, i)
            held.scales[stage, token * operand.groups + i] = T.reinterpret(byte, "uint8")
        T.barrier_arrive(held.landed[stage])
    else:
        T.ptx_cp_async(
            T.access_ptr(held.scales[stage, token * operand.groups], "w", operand.groups),
            T.access_ptr(operand.scale_at(stored, place, own % page_size, head, 0), "r", operand.groups),
            operand.groups,
        )
        T.cp_async_barrier_noinc(held.landed[stage])


@T.macro
def fill(operand, stored, page_table, row, head, held, full, place, stage, phase, thread):
    """Each lane has the same columns in all rows.

    Remainders say nothing new but what the compiler cannot know: that places are within their buffers. Without them
    every access works out where a place outside would be.
    """
    panels = operand.head_dim // PANEL
    rows = PRODUCERS * UNIT // operand.head_dim  # at once
    got = T.alloc_local([UNIT // WORD], "uint32")
    words = T.alloc_local([4], "uint32")
    factor = T.alloc_var("uint32")
    own = thread % PRODUCERS
    slot = stage % held.raw.shape[0]
    tile = place % held.tiles.shape[0]
    first = own // (8 * panels) * 2 + own // 4 % 2
    unit = own // 8 % panels * 4 + own % 4
    of_scale = first // TOKENS * (TOKENS * operand.groups) + operand.scale_within(
        stored, first, unit * UNIT // operand.group
    )
    T.barrier_wait(held.landed[stage], phase)
    for step in T.unroll(operand.block_size // rows, unroll_factor=2):
        got[0:2] = T.lds64(held.raw[slot, step * rows + first, unit * (UNIT // CODES)])
        factor = operand.factor(held.scales[slot, step * rows * operand.groups + of_scale])
        for half in T.unroll(UNIT // WORD):
            decode(operand, got[half], factor, words)
            T.sts128(held.tiles[tile, step * rows + first, unit * UNIT + half * WORD], words[0:4])
    T.fence_proxy_async()


@T.macro
def decode(operand, word, factor, words):
    """The codes of a word, in their order or as they come."""
    if operand.in_order:
        pairs = T.alloc_local([4], "uint32")
        decode_pairs(operand, word, factor, pairs)
        words[0] = lower_halves(pairs[0], pairs[1])
        words[1] = lower_halves(pairs[2], pairs[3])
        words[2] = upper_halves(pairs[0], pairs[1])
        words[3] = upper_halves(pairs[2], pairs[3])
    else:
        decode_pairs(operand, word, factor, words)


@T.macro
def decode_pairs(operand, word, factor, pairs):
    pairs[0] = operand.number(halves(word, 0), factor)
    pairs[1] = operand.number(halves(word, 1), factor)
    pairs[2] = operand.number(halves(word, 2), factor)
    pairs[3] = operand.number(halves(word, 3), factor)


@T.macro
def weigh(operand, held, S, rows):
    """Nothing: scales are a part of what is decoded."""
