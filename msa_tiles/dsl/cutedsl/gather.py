"""Rows gathered by TMA: the heads that share a KV head, of one token at a time, as rows of a tile for wgmma.

A tile has 64 rows. Each token takes rows_per_token of them, its `group` heads first; 8 is the least that keeps an atom
of 128-byte swizzle whole. Atoms of 8 rows by 64 columns follow each other along a row first, so that with a group of
8 or more a token is contiguous in shared memory and moves as one box; smaller groups move one box per 64 columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.wgmma import ROWS

ATOM = 8  # rows of a swizzle atom
EVICT_FIRST = 0x12F0000000000000  # the L2 policy of createpolicy.fractional.L2::evict_first


class Rows:
    """The shapes of gathered rows: `group` heads of `head_dim` elements for each token."""

    def __init__(self, element, head_dim, group):
        self.element = element
        self.head_dim = head_dim
        self.group = group
        self.rows_per_token = max(group, ATOM)
        self.tokens = ROWS // self.rows_per_token
        self.token_bytes = group * head_dim * element.width // 8
        # A box: heads of an atom, columns, panels of columns, atoms.
        heads = min(group, ATOM)
        panels = head_dim // tma.PANEL
        self.box = (heads, tma.PANEL, panels if heads == ATOM else 1, group // heads)
        self.box_stride = (tma.PANEL, 1, ATOM * tma.PANEL, ATOM * head_dim)
        self.boxes_per_token = panels // self.box[2]

    def tiles_layout(self, count):
        """`count` tiles in shared memory, [ROWS, head_dim, count], as wgmma takes its operand A."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        return cute.tile_to_shape(atom, (ROWS, self.head_dim, count), order=(1, 0, 2))

    def boxes(self, tiles, count):
        """The boxes of `count` tiles: [box modes, box of the token, token, tile]."""
        layout = cute.make_layout(
            (*self.box, self.boxes_per_token, self.tokens, count),
            stride=(
                *self.box_stride, ATOM * tma.PANEL, self.rows_per_token * self.head_dim, ROWS * self.head_dim,
            ),
        )  # fmt: skip
        return cute.make_tensor(tiles.iterator, layout)

    @cute.jit
    def described(self, tensor: cute.Tensor) -> cute.Tensor:
        """A view [head, column, panel, heads of a box, token] of [token, head, column]."""
        plain = tma.described(tensor, (0, 1, 2))
        token, head, _ = plain.stride
        heads = self.box[0]
        unit = tma.BYTES * 8 // self.element.width
        layout = cute.make_layout(
            (heads, tma.PANEL, self.head_dim // tma.PANEL, plain.shape[1] // heads, plain.shape[0]),
            stride=(head, 1, tma.PANEL, cute.assume(Int64(head) * heads, divby=unit), token),
        )
        return cute.make_tensor(plain.iterator, layout)

    def atom(self, op, view):
        """The copy atom for boxes of a described tensor, and the tensor of its coordinates."""
        swizzle = cute.make_swizzle(3, 4, 3)
        layout = cute.make_composed_layout(swizzle, 0, cute.make_layout(self.box, stride=self.box_stride))
        return cpasync.make_tiled_tma_atom(op, view, layout, self.box)

    @cute.jit
    def load(
        self, atom: cute.CopyAtom, source: cute.Tensor, token: cutlass.Int32, head: cutlass.Int32, target: cute.Tensor,
        full: cute.Pointer,
    ):  # fmt: skip
        """The heads of KV head `head` of a token -> target [box modes, box of the token]; a whole warp calls it."""
        for box in cutlass.range_constexpr(self.boxes_per_token):
            to, come_from = self.partition(atom, source, token, head, box, target)
            cute.copy(atom, come_from, to, tma_bar_ptr=full)

    @cute.jit
    def store(
        self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, token: cutlass.Int32, head: cutlass.Int32
    ):
        """The way back: source [box modes, box of the token] -> the rows of a token, first in line to leave L2.

        A whole warp calls it with the same operands: unlike loads, stores elect no lane, and become one instruction of
        the warp.
        """
        for box in cutlass.range_constexpr(self.boxes_per_token):
            come_from, to = self.partition(atom, target, token, head, box, source)
            cute.copy(atom, come_from, to, cache_policy=Int64(EVICT_FIRST))

    def partition(self, atom, view, token, head, box, shared):
        """One box in shared memory and in global memory, as the copy atom wants them."""
        tile = cute.local_tile(view, (*self.box, 1), (0, 0, box, head, token))
        return cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared[None, None, None, None, box], 0, 4),
            cute.group_modes(tile, 0, 5),
        )
