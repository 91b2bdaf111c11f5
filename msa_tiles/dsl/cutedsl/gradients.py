"""The backward of attention on tiles that a warpgroup holds in registers, keys along rows and queries along columns.

A tile is wgmma's accumulator of 64 keys: warp i owns keys 16i to 16i + 15, and lane l of it holds, of keys l // 4 and
l // 4 + 8 (its halves), the query rows 8j + 2 (l % 4) and the next one, for every j. Element ((column, half, j), 0, 0).
What belongs to query rows comes as [column, j].
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from msa_tiles.dsl.cutedsl import tma
from msa_tiles.dsl.cutedsl.gather import ATOM, EVICT_FIRST, Rows
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.wgmma import ROWS

PAIR_BYTES = 8
HALF = 8  # keys between the two of a lane
HIGH = -(1 << 16)  # the upper of two bfloat16


def transposed_product(element, columns):
    """The two multiplications of [ROWS, K] x [K, columns], both in shared memory and with K as their slow dimension.

    See msa_tiles.dsl.cutedsl.wgmma for operands, and for why there are two.
    """
    first, rest = (
        hopper.make_trivial_tiled_mma(
            element, element, OperandMajorMode.MN, OperandMajorMode.MN, Float32, (1, 1, 1), (ROWS, columns),
            warpgroup.OperandSource.SMEM,
        )
        for _ in range(2)
    )  # fmt: skip
    first.set(warpgroup.Field.ACCUMULATE, False)
    rest.set(warpgroup.Field.ACCUMULATE, True)
    return first, rest


def transposed_layout(element, rows, columns, count, panels_apart):
    """Tiles of [columns, rows, tile] in shared memory as those of [rows, columns, tile]: rows lie beside each other.

    Panels of 64 rows are far apart, as those of a block of keys, or beside each other, as those of gathered rows.
    """
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, element)
    order = (1, 0, 2) if panels_apart else (0, 1, 2)
    return cute.tile_to_shape(atom, (rows, columns, count), order=order)


def transposed(tiles, *shape, panels_apart=False):
    """A view of tiles in shared memory; see `transposed_layout`."""
    layout = transposed_layout(tiles.element_type, *shape, panels_apart)
    return cute.make_tensor(tiles.iterator, layout.outer)


@cute.jit
def probabilities(
    scores: cute.Tensor, rounded: cute.Tensor, row_lse: cute.Tensor, scale_log2: Float32, rooms: cutlass.Constexpr
):
    """rounded = exp2(scores * scale_log2 - row_lse), 0 for keys that a query does not see, two query rows in an int.

    rooms[j] is the last key that the query of columns 8j to 8j + 7 sees, less the lane's first key, or rooms is None
    where every query sees all keys. The scores are only read: wgmma is still to write there.
    """
    for j in cutlass.range_constexpr(cute.size(scores) // 4):
        for half in cutlass.range_constexpr(2):
            pair = []
            for column in cutlass.range_constexpr(2):
                shifted = scores[(column, half, j), 0, 0] * scale_log2 - row_lse[column, j]
                weight = cute.math.exp2(shifted, fastmath=True)
                if cutlass.const_expr(rooms is not None):
                    weight = pick_float(rooms[j] >= HALF * half, weight, Float32(0.0))
                pair.append(weight)
            rounded[2 * j + half] = round_pair(pair[0], pair[1])


@cute.jit
def score_gradients(weights: cute.Tensor, products: cute.Tensor, row_delta: cute.Tensor, rounded: cute.Tensor):
    """rounded = weights * (products - row_delta): the gradients of scores, from probabilities and V dO'.

    weights and rounded hold two query rows in an int.
    """
    for j in cutlass.range_constexpr(cute.size(products) // 4):
        for half in cutlass.range_constexpr(2):
            both = weights[2 * j + half]
            low = (both << 16).bitcast(Float32) * (products[(0, half, j), 0, 0] - row_delta[0, j])
            high = (both & HIGH).bitcast(Float32) * (products[(1, half, j), 0, 0] - row_delta[1, j])
            rounded[2 * j + half] = round_pair(low, high)


@cute.jit
def round_pair(low: Float32, high: Float32, element: cutlass.Constexpr = cutlass.BFloat16) -> Int32:
    """Two bfloat16, or float16, in an int.

    The DSL's own conversion of elements that are also read one by one is a slow instruction for each.
    """
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[element]
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


@cute.jit
def load_sums(sums: cute.Tensor, first: Int32, valid: Int32, tile: cute.Tensor):
    """tile = rows of sums [row, column] from the lane's two on, its first being `first`; 0 from row `valid` on.

    `first` and `valid` count from the row where sums begins.
    """
    for half in cutlass.range_constexpr(2):
        key = first + HALF * half
        held = tile[(None, half, None), 0, 0]
        if key < valid:
            cute.autovec_copy(pairs(sums, key), held)
        else:
            held.fill(0.0)


@cute.jit
def store_sums(tile: cute.Tensor, sums: cute.Tensor, first: Int32, valid: Int32):
    """The way back of `load_sums`; rows from `valid` on stay as they are."""
    for half in cutlass.range_constexpr(2):
        key = first + HALF * half
        if key < valid:
            cute.autovec_copy(tile[(None, half, None), 0, 0], pairs(sums, key))


@cute.jit
def pairs(sums: cute.Tensor, key: Int32) -> cute.Tensor:
    """[2, j]: columns 8j + 2 (lane % 4) and the next one of a row."""
    start = sums.iterator + (Int64(key) * sums.stride[0] + cute.arch.lane_idx() % 4 * 2)
    aligned = cute.make_ptr(Float32, start.toint(), start.memspace, assumed_align=PAIR_BYTES)
    return cute.make_tensor(aligned, cute.make_layout((2, sums.shape[1] // ATOM), stride=(1, ATOM)))


class Panels(Rows):
    """Rows that leave one panel of columns at a time, from tiles of [ROWS, PANEL] in shared memory."""

    def __init__(self, element, head_dim, group):
        super().__init__(element, head_dim, group)
        heads = min(group, ATOM)
        self.box = (heads, tma.PANEL, 1, group // heads)
        self.box_stride = (tma.PANEL, 1, 0, ATOM * tma.PANEL)

    def tiles_layout(self, count):
        """`count` tiles, [ROWS, PANEL, count]."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.element)
        return cute.tile_to_shape(atom, (ROWS, tma.PANEL, count), order=(0, 1, 2))

    def boxes_layout(self, count):
        """Shape and strides of the boxes of `count` tiles: [box modes, token, tile]."""
        shape = (*self.box, self.tokens, count)
        return shape, (*self.box_stride, self.rows_per_token * tma.PANEL, ROWS * tma.PANEL)

    def boxes(self, tiles, count):
        """The boxes of `count` tiles, laid out so."""
        shape, stride = self.boxes_layout(count)
        return cute.make_tensor(tiles.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def store_panel(
        self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, token: Int32, head: Int32, panel: Int32
    ):
        """source [box modes] -> this panel of the rows of a token; see Rows.store for who calls it."""
        tile = cute.local_tile(target, (*self.box, 1), (0, 0, panel, head, token))
        come_from, to = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 4), cute.group_modes(tile, 0, 5)
        )
        cute.copy(atom, come_from, to, cache_policy=Int64(EVICT_FIRST))
