"""Index keys of 4 bits as the left side of products of few columns, decoded in registers (packed_left).

In global memory they are what packed_index has; rows of bytes and their scales come to one ring.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from msa_tiles.dsl.cutedsl import packed_index, packed_left, tma
from msa_tiles.dsl.cutedsl.packed import Stored


class IndexKeys(packed_left.Left):
    """Blocks of keys [total_k, head_dim / 2], or [pages, page, head_dim / 2] with pages_per_block > 0."""

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers):
        super().__init__(name, table, head_dim, block_size, pages_per_block, readers=readers, transposed=False)
        self.pages_per_block = pages_per_block

    arguments = packed_index.IndexKeys.arguments
    stored = packed_index.IndexKeys.stored
    pages = packed_index.IndexKeys.pages
    load_rows = packed_index.IndexKeys.load_rows
    row_factor = packed_index.IndexKeys.row_factor

    @cute.jit
    def load(self, stored: Stored, held: tuple, stage: Int32, phase: Int32, row: Int32, pages):
        """The block that begins at a row of flat keys, or that has these pages -> a stage, once it is free.

        A whole warp calls it.
        """
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)
        for p in cutlass.range_constexpr(max(self.pages_per_block, 1)):
            source, first = stored.rows, row
            if cutlass.const_expr(self.pages_per_block > 0):
                source, first = stored.rows[None, None, pages[p]], Int32(0)
            tma.load_box(stored.atom, source, first, 0, boxes[None, None, p, 0, stage], full)
        self.load_rows(stored, row, pages, self.scales_at(held, stage))
        self.arrive_with_scales(full)
