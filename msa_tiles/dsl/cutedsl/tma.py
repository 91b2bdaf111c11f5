"""TMA boxes of 128-byte rows: how a tensor is described to TMA, and one box copied to swizzled shared memory.

Tiles lie in shared memory as wgmma wants its operands along K: rows of 64 two-byte columns or 128 one-byte ones,
swizzled, one after another; a tile of more columns is one such panel behind another. Rows of 64 bytes in all make up a
panel too, swizzled by 64 bytes. Rows of a panel are as far apart as those of a box, so boxes of any number of rows (a
multiple of 8) make up a panel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

PANEL = 64  # two-byte columns
PANEL_BITS = 1024
BYTES = 16  # TMA wants addresses and strides to be multiples of it


@cute.jit
def described(tensor: cute.Tensor, modes: cutlass.Constexpr) -> cute.Tensor:
    """A view with the modes in this order and strides that TMA takes; the tensor's last stride is 1.

    The stride of a mode of size 1 means nothing and may be anything: it is replaced.
    """
    unit = BYTES * 8 // tensor.element_type.width
    strides = []
    for mode in cutlass.range_constexpr(cute.rank(tensor) - 1):
        stride = Int64(tensor.stride[mode])
        if tensor.shape[mode] == 1:
            stride = Int64(unit)
        strides.append(cute.assume(stride, divby=unit))
    strides.append(1)
    layout = cute.make_layout(
        tuple(tensor.shape[mode] for mode in modes), stride=tuple(strides[mode] for mode in modes)
    )
    return cute.make_tensor(tensor.iterator, layout)


def panel_columns(element, columns):
    """Columns of a panel of rows of `columns` in all."""
    return min(PANEL_BITS // element.width, columns)


def panel_layout(rows, element, panel=PANEL):
    """The shared-memory layout of a box: [rows, panel], swizzled."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.K_SW128 if panel * element.width == PANEL_BITS else kinds.K_SW64
    atom = warpgroup.make_smem_layout_atom(kind, element)
    return cute.tile_to_shape(atom, (rows, panel), order=(0, 1))


def box_atom(tensor, rows, panel=PANEL):
    """The copy atom for boxes of [rows, panel] of a described tensor, and the tensor of its coordinates."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, tensor, panel_layout(rows, tensor.element_type, panel), (rows, panel))


def boxes(tiles, rows, tile_rows, columns, count, panel=PANEL):
    """The boxes of `count` tiles of [tile_rows, columns] in shared memory: [rows, panel, box, panel number, tile]."""
    layout = cute.make_layout(
        (rows, panel, tile_rows // rows, columns // panel, count),
        stride=(panel, 1, rows * panel, tile_rows * panel, tile_rows * columns),
    )
    return cute.make_tensor(tiles.iterator, layout)


@cute.jit
def load_box(
    atom: cute.CopyAtom,
    source: cute.Tensor,
    row: cutlass.Int32,
    panel: cutlass.Constexpr,
    target: cute.Tensor,
    full: cute.Pointer,
):
    """source [rows, columns] from this row on, columns of this panel -> target [rows of a box, panel]; signals full.

    A whole warp calls it. Rows outside the source come as zeros and count as bytes.
    """
    tile = cute.local_tile(cute.domain_offset((row, 0), source), cute.shape(target), (0, panel))
    to, come_from = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)
    )
    cute.copy(atom, come_from, to, tma_bar_ptr=full)
