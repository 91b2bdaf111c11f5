"""Keys or values of e4m3 with float32 scales in memory, and as rows of 16 bits: what all places of them share.

A scale belongs to a head (to the tensor, with a stride of 0) or, with token_scales, to each token of a head. Queries
are bfloat16, so keys become it, too; values become float16, which one instruction makes of two of them. With
token_scales all become bfloat16: a weight times the scale of a token is no number for float16.

Blocks lie in shared memory as they are stored, a row of bytes for each token.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.decoding import REPEAT, UNIT, byte_of, columns_at, decode_bf16, decode_f16, words_at
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.row_scales import copy_scales
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.table import WARP, buffer, declares


@declares
def buffers(name, head_dim, block_size, token_scales, **stages):
    """Rows of bytes, and the scales of tokens, if they have some."""
    scales = (buffer(f"{name}_scales", "float32", align=128, block_size=block_size, **stages),) if token_scales else ()
    return (
        buffer(
            f"{name}_raw", "float8_e4m3fn", align=1024, note="swizzled by 128 bytes, or 64 where a row is no longer",
            **stages, block_size=block_size, head_dim=head_dim,
        ),
        *scales,
    )  # fmt: skip


@declares
def multiplied(name, token_scales):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16" if name == "k" or token_scales else "float16"


class Stored(NamedTuple):
    """A tensor in global memory, as TMA sees it, and its scales."""

    atom: Any
    rows: Any
    scales: Any


class Storage:
    """Blocks of [block_size, head_dim] in global memory, and their scales."""

    stored_element = cutlass.Float8E4M3FN
    multiplied = staticmethod(multiplied)

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, token_scales):
        self.name = name
        self.table = table
        self.block_size = block_size
        self.head_dim = head_dim
        self.blocks = Blocks(self.stored_element, head_dim, block_size, pages_per_block)
        self.token_scales = token_scales
        self.element = ELEMENTS[self.multiplied(name, token_scales)]

    @property
    def row_bytes(self):
        """Of a row in shared memory."""
        return self.head_dim

    def arguments(self, kv_heads):
        """Values [total_k, kv_heads, head_dim], or [pages, kv_heads, page, head_dim]; scales [kv_heads], or of the
        values' shape without head_dim.
        """
        page = (self.blocks.box_rows,) if self.blocks.pages_per_block else ()
        shape = (cute.sym_int(), kv_heads, *page, self.head_dim)
        of_scales = shape[:-1] if self.token_scales else (kv_heads,)
        return (
            stand_in(self.stored_element, *shape, align=tma.BYTES),
            make_fake_tensor(Float32, of_scales, tuple(cute.sym_int64() for _ in of_scales)),
        )

    def stored(self, rows, scales):
        return Stored(*self.blocks.described(rows), scales)

    def atoms(self, stored):
        return (stored.atom,)

    def scales_of_head(self, stored, head):
        """Those of tokens: [rows], or [pages, rows of a page]."""
        return stored.scales[(None, head, None) if self.blocks.pages_per_block else (None, head)]

    @cute.jit
    def load_scales(self, stored: Stored, row: Int32, pages, head: Int32, scales, full: cute.Pointer):
        """The scales of a block's tokens, if they have some, of which every lane takes some; all lanes arrive."""
        if cutlass.const_expr(self.token_scales):
            copy_scales(self.scales_of_head(stored, head), row, pages, scales, self.blocks.box_rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)

    def decode(self, word, scale=None):
        """Four values -> two words of two of `element`, times a scale where it is given."""
        return decode_f16(word) if self.element is cutlass.Float16 else decode_bf16(word, scale)

    def scales_of_lane(self, scales, lane):
        """The scales of tokens lane, lane + 32, …, of a block's in shared memory; None where tokens have none."""
        if not self.token_scales:
            return None
        return [scales[WARP * i + lane] for i in range(self.block_size // WARP)]

    @cute.jit
    def decode_rows(
        self, raw: cute.Pointer, tile: cute.Pointer, scales, lane: Int32, member: Int32, members: cutlass.Constexpr
    ):
        """raw rows of bytes, swizzled as byte_of says -> tile of 16 bits in panels of 64 columns, by `members` warps.

        A lane takes 8 values of a row at a time, of rows a multiple of 8 apart from turn to turn, so that places in a
        swizzled row stay what they are. Each row is read before it is written, in case both lie in one place.
        """
        per_row = self.head_dim // UNIT
        abreast = WARP // per_row  # rows
        steps = REPEAT // abreast
        unit = lane % per_row
        for eight in cutlass.range(member, self.block_size // REPEAT, members, unroll=1):
            packed = [None] * steps
            factors = [None] * steps
            for step in cutlass.range_constexpr(steps):
                of_eight = abreast * step + lane // per_row
                row = REPEAT * eight + of_eight
                packed[step] = words_at(raw + byte_of(row, unit // 2, self.head_dim) + unit % 2 * UNIT, UNIT // 4)
                if cutlass.const_expr(scales is not None):
                    held = scales[0]
                    for i in cutlass.range_constexpr(1, len(scales)):
                        held = pick_float(row >= WARP * i, scales[i], held)
                    factors[step] = cute.arch.shuffle_sync(held, row % WARP)
            cute.arch.sync_warp()
            for step in cutlass.range_constexpr(steps):
                row = REPEAT * eight + abreast * step + lane // per_row
                decoded = cute.make_rmem_tensor(UNIT // 2, Int32)
                for i in cutlass.range_constexpr(UNIT // 4):
                    decoded[2 * i], decoded[2 * i + 1] = self.decode(packed[step][i], factors[step])
                cute.autovec_copy(decoded, columns_at(tile, row, unit, self.block_size))
            cute.arch.sync_warp()

    def fold(self, value, stored, head):
        return value if self.token_scales else value * stored.scales[head]
