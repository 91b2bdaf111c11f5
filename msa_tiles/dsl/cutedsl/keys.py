"""TMA loads of one KV block of attention, from flat keys or from the pages of a pool.

Keys (or values) are [total_k, heads, dim], or [pages, heads, page, dim] with pages_per_block > 0. A block is named by
the row where it begins. Flat keys have real rows. Paged keys have virtual ones: request b begins at b * max_pages *
block_size, whatever the page size, page_table being [requests, max_pages]. What an entry past the request's keys names
does not matter: its rows are masked, and TMA answers a page outside the pool with zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from msa_tiles.dsl.cutedsl import tma


class Blocks:
    """The shapes of blocks of [block_size, head_dim] keys or values."""

    def __init__(self, element, head_dim, block_size, pages_per_block):
        self.element = element
        self.head_dim = head_dim
        self.block_size = block_size
        self.pages_per_block = pages_per_block
        self.box_rows = block_size // max(pages_per_block, 1)
        self.panel = tma.panel_columns(element, head_dim)
        self.block_bytes = block_size * head_dim * element.width // 8

    def described(self, keys):
        """Copy atom and coordinates of keys or values: [row, dim, head] or [row of a page, dim, head, page]."""
        modes = (2, 3, 1, 0) if self.pages_per_block else (0, 2, 1)
        return tma.box_atom(tma.described(keys, modes), self.box_rows, self.panel)

    def boxes(self, block):
        """The boxes of a block in shared memory: [rows, columns, box, panel]."""
        return self.boxes_of(block, 1)[None, None, None, None, 0]

    def boxes_of(self, tiles, count):
        """The boxes of `count` blocks in shared memory: [rows, columns, box, panel, block]."""
        return tma.boxes(tiles, self.box_rows, self.block_size, self.head_dim, count, self.panel)

    @cute.jit
    def pages(self, page_table: cute.Tensor, row: Int32):
        """The pages of the block that begins at a virtual row; nothing for flat keys."""
        found = []
        if cutlass.const_expr(self.pages_per_block > 0):
            columns = Int32(page_table.shape[1])
            request = row // (columns * self.block_size)
            entry = row % (columns * self.block_size) // self.box_rows
            for p in cutlass.range_constexpr(self.pages_per_block):
                found.append(page_table[request, cutlass.min(entry + p, columns - 1)])
        return found

    @cute.jit
    def load(
        self, atom: cute.CopyAtom, keys: cute.Tensor, row: Int32, pages, head: Int32, boxes: cute.Tensor,
        full: cute.Pointer,
    ):  # fmt: skip
        """One block of one head -> boxes; `full` gets its bytes and one arrival. A whole warp calls it."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.block_bytes)
        self.copy(atom, keys, row, pages, head, boxes, full)

    @cute.jit
    def copy(
        self, atom: cute.CopyAtom, keys: cute.Tensor, row: Int32, pages, head: Int32, boxes: cute.Tensor,
        full: cute.Pointer,
    ):  # fmt: skip
        """`load` without the arrival: block_bytes, told to `full`."""
        for panel in cutlass.range_constexpr(self.head_dim // self.panel):
            if cutlass.const_expr(self.pages_per_block > 0):
                for p in cutlass.range_constexpr(self.pages_per_block):
                    target = boxes[None, None, p, panel]
                    tma.load_box(atom, keys[None, None, head, pages[p]], Int32(0), panel, target, full)
            else:
                tma.load_box(atom, keys[None, None, head], row, panel, boxes[None, None, 0, panel], full)

    @cute.jit
    def clear_rows(self, block: cute.Tensor, first: Int32, thread: Int32, threads: cutlass.Constexpr):
        """Zero the rows of a block from `first` on, for wgmma to read once the threads have met.

        Past a request's end they may hold NaN, and a probability of 0 times NaN would reach the output.
        """
        words = self.panel * self.element.width // 64
        panels = self.head_dim // self.panel
        plain = cute.make_tensor(
            cute.recast_ptr(block.iterator, dtype=Int64),
            cute.make_layout((self.block_size * words, panels), stride=(1, self.block_size * words)),
        )
        for panel in cutlass.range_constexpr(panels):
            for word in cutlass.range(first * words + thread, self.block_size * words, threads, unroll=1):
                plain[word, panel] = Int64(0)
        cute.arch.fence_view_async_shared()
