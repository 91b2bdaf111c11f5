"""Keys or values of 4 bits with a scale for a group of values along D: how they lie, and how they are loaded.

Blocks lie in shared memory as they are stored: rows of head_dim / 2 bytes, swizzled, and beside them the bytes of their
scales, of four tokens after those of other four, in the order that global memory has: "linear", the groups of a token
beside each other, or "interleaved", the same group of four tokens. Strides tell which one it is, and who loads tells
those who read. Scales of keys are linear.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.decoding import words_at
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.row_scales import page_of
from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.table import WARP, buffer, declares

CODES = 2  # in a byte
TOKENS = 4  # whose scales lie together
SWIZZLES = {64: (2, 4, 3), 32: (1, 4, 3)}  # of rows of so many bytes
LEAST_COPY = 4  # bytes that may be copied past registers
ORDER_BYTES = 16  # behind the scales of a block of values


@declares
def buffers(name, head_dim, block_size, group, **stages):
    """Rows of bytes and their scales. Behind those of values stands how far apart the scales of two tokens are."""
    groups = head_dim // group
    spare = ORDER_BYTES // groups if name == "v" else 0
    return (
        buffer(
            f"{name}_raw", "uint8", align=1024,
            note="two codes a byte, swizzled by 64 bytes, or 32 where a row is no longer",
            **stages, block_size=block_size, row_bytes=head_dim // 2,
        ),
        buffer(
            f"{name}_scales", "uint8", align=128, note="in the order of global memory, told behind those of values",
            groups=groups, tokens=block_size + spare, **stages,
        ),
    )  # fmt: skip


class Stored(NamedTuple):
    """A tensor in global memory, as TMA sees it, the scales of its groups, and those of heads."""

    atom: Any
    rows: Any
    scales: Any
    of_heads: Any  # None where the format has none


class Rows(Blocks):
    """Blocks of rows of head_dim / 2 bytes, of which a box holds whole ones."""

    def __init__(self, head_dim, block_size, pages_per_block):
        super().__init__(cutlass.Uint8, head_dim // CODES, block_size, pages_per_block)

    def described(self, keys):
        return self.described_by(keys, (2, 3, 1, 0) if self.pages_per_block else (0, 2, 1))

    def described_by(self, keys, modes):
        """Copy atom and coordinates of rows whose modes come in this order."""
        swizzle = cute.make_swizzle(*SWIZZLES[self.head_dim])
        plain = cute.make_ordered_layout((self.box_rows, self.head_dim), order=(1, 0))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tma.described(keys, modes),
            cute.make_composed_layout(swizzle, 0, plain), (self.box_rows, self.head_dim),
        )  # fmt: skip


class Storage:
    """Blocks of [block_size, head_dim] in global memory, and their scales.

    A format says of how many values a `group` is, its `scale_element`, whether heads have a scale besides, and decodes.
    """

    group = None
    scale_element = None
    has_global = False

    def __init__(self, name, table, head_dim, block_size, pages_per_block):
        self.name = name
        self.table = table
        self.block_size = block_size
        self.head_dim = head_dim
        self.groups = head_dim // self.group
        self.blocks = Rows(head_dim, block_size, pages_per_block)
        self.element = ELEMENTS[self.multiplied(name)]

    @property
    def row_bytes(self):
        """Of a row in shared memory."""
        return self.head_dim // CODES

    def arguments(self, kv_heads):
        """Bytes [total_k, kv_heads, head_dim / 2], or [pages, kv_heads, page, head_dim / 2]; scales [total_k, kv_heads,
        groups], or [pages, kv_heads, page / 4, 4, groups]; those of heads [kv_heads], if there are any.
        """
        page, quads = (), ()
        if self.blocks.pages_per_block:
            page, quads = (self.blocks.box_rows,), (self.blocks.box_rows // TOKENS, TOKENS)
        of_groups = (cute.sym_int(), kv_heads, *quads, self.groups)
        strides = tuple(cute.sym_int64() for _ in of_groups)
        of_heads = (make_fake_tensor(cutlass.Float32, (kv_heads,), (cute.sym_int64(),)),) if self.has_global else ()
        return (
            stand_in(cutlass.Uint8, cute.sym_int(), kv_heads, *page, self.head_dim // CODES, align=tma.BYTES),
            make_fake_tensor(self.scale_element, of_groups, strides),
            *of_heads,
        )

    def stored(self, rows, scales, of_heads=None):
        return Stored(*self.blocks.described(rows), scales, of_heads)

    def atoms(self, stored):
        return (stored.atom,)

    def order_in(self, scales):
        """Where it is told how far apart the scales of two tokens are: 1 where they are interleaved."""
        place = scales + self.groups * self.block_size
        start = cute.make_ptr(Int32, place.toint(), place.memspace, assumed_align=4)
        return cute.make_tensor(start, cute.make_layout(1))

    @cute.jit
    def order(self, stored: Stored):
        """How many bytes further on the scale of a group of the next token is, among four of them."""
        found = Int32(self.groups)
        if cutlass.const_expr(self.blocks.pages_per_block > 0):
            if stored.scales.stride[4] != 1:
                found = Int32(1)
        return found

    @cute.jit
    def load_scales(self, stored: Stored, row: Int32, pages, head: Int32, target: cute.Pointer, full: cute.Pointer):
        """Scales of as many bytes as a token has, of which every lane takes some; of rows that nobody sees, any.

        All lanes arrive.
        """
        lane = cute.arch.lane_idx()
        last = Int32(stored.scales.shape[0]) - 1
        for i in cutlass.range_constexpr(self.block_size // WARP):
            token = WARP * i + lane
            if cutlass.const_expr(self.blocks.pages_per_block > 0):
                # An entry past the request's keys may name any page.
                page = cutlass.min(cutlass.max(page_of(pages, WARP * i, lane, self.blocks.box_rows), 0), last)
                quad, within = token % self.blocks.box_rows // TOKENS, token % TOKENS
                step = Int64(stored.scales.stride[3])
                if stored.scales.stride[4] != 1:
                    step = Int64(self.groups)
                source = stored.scales[page, head, quad, 0, None].iterator + within * step
            else:
                source = stored.scales[cutlass.min(row + token, last), head, None].iterator
            self.copy(source, target + self.groups * token)
        self.arrive_with_scales(full)

    @cute.jit
    def arrive_with_scales(self, full: cute.Pointer):
        """A lane's copies of scales are done, or will be."""
        if cutlass.const_expr(self.groups < LEAST_COPY):
            cute.arch.mbarrier_arrive(full)
        else:
            cute.arch.cp_async_mbarrier_arrive_noinc(full)

    @cute.jit
    def copy(self, source: cute.Pointer, target: cute.Pointer):
        """The bytes of a token: past registers where such a copy is as small, else through them."""
        unit = {8: Int64, 4: Int32, 2: cutlass.Int16}[self.groups]
        come_from, to = (
            cute.make_tensor(
                cute.make_ptr(unit, place.toint(), place.memspace, assumed_align=self.groups), cute.make_layout(1)
            )
            for place in (source, target)
        )
        if cutlass.const_expr(self.groups < LEAST_COPY):
            to[0] = come_from[0]
        else:
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), unit, num_bits_per_copy=8 * self.groups)
            cute.copy(atom, come_from, to)

    def scale_of(self, token, group, order):
        """Where the scale of a token's group stands among those of a block."""
        quad = token // TOKENS * (TOKENS * self.groups)
        return quad + token % TOKENS * order + group * pick(order == 1, Int32(TOKENS), Int32(1))

    def row_of_scales(self, scales, token):
        """The scales of a token's groups, in words."""
        place = scales + self.groups * token
        if self.groups < LEAST_COPY:
            start = cute.make_ptr(cutlass.Uint16, place.toint(), place.memspace, assumed_align=self.groups)
            return [Int32(cute.make_tensor(start, cute.make_layout(1))[0])]
        return words_at(place, self.groups // 4)


def byte_at(place):
    return Int32(cute.make_tensor(place, cute.make_layout(1))[0])
