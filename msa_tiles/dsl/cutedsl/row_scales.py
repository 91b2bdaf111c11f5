"""Scales of rows, copied to shared memory beside the rows that TMA brings."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from msa_tiles.dsl.cutedsl.topk import pick
from msa_tiles.dsl.table import WARP


@cute.jit
def copy_scales(scales: cute.Tensor, row: Int32, pages, target: cute.Tensor, box_rows: cutlass.Constexpr):
    """Start to copy the scales of a block: [rows] from a row on, or of these pages of [pages, box_rows]; any strides.

    A whole warp calls it, and each lane takes some: all of them arrive by `cp_async_mbarrier_arrive_noinc`. Rows that
    nobody sees get any scale.
    """
    lane = cute.arch.lane_idx()
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    last = Int32(scales.shape[0]) - 1
    for i in cutlass.range_constexpr(cute.size(target) // WARP):
        key = WARP * i + lane
        if cutlass.const_expr(len(pages) > 0):
            # An entry past the request's keys may name any page.
            page = cutlass.min(cutlass.max(page_of(pages, WARP * i, lane, box_rows), 0), last)
            source = cute.domain_offset((page, key % box_rows), scales)
        else:
            source = cute.domain_offset((cutlass.min(row + key, last),), scales)
        place = cute.make_tensor(target.iterator + key, cute.make_layout(1))
        cute.copy(atom, cute.make_tensor(source.iterator, cute.make_layout(1)), place)


def page_of(pages, first, lane, box_rows):
    """The page of row `first` + lane of a block, where `first` is a multiple of 32."""
    page = pages[first // box_rows]
    for begin in range(box_rows, WARP, box_rows):
        page = pick(lane >= begin, pages[(first + begin) // box_rows], page)
    return page
