"""Index keys of 4 bits, decoded to tiles of 16 bits by warps that a kernel would have idle: a role named decoder.

Rows of bytes and their scales come to a ring of their own, as those of attention do; scales are linear.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import packed_right, tma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.operands import index_plain
from msa_tiles.dsl.cutedsl.packed import CODES, Stored
from msa_tiles.dsl.cutedsl.pipeline import arrive, following
from msa_tiles.dsl.cutedsl.row_scales import page_of
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Parts, Pipeline, buffer, declares, lane, threads, warps


@declares
def parts(name, head_dim, block_size, stages, element, *, producer, decoder, freed, group):
    """What TMA and copies of all lanes of the producer bring, and what the decoder makes of it."""
    raw, tiles = f"{name}_raw", f"{name}_tiles"
    return Parts(
        (
            Pipeline(raw, stages, (lane(producer), threads(producer)), (warps(decoder),), (raw,)),
            Pipeline(name, stages, (warps(decoder),), (freed,)),
        ),
        (
            buffer(
                tiles, element, align=1024, note="swizzled, in panels of 128 bytes",
                stages=stages, block_size=block_size, head_dim=head_dim,
            ),
            buffer(
                raw, "uint8", align=1024, note="two codes a byte, swizzled by 64 bytes, or 32 where a row is no longer",
                stages=stages, block_size=block_size, row_bytes=head_dim // 2,
            ),
            buffer(
                f"{name}_scales", "uint8", align=128,
                groups=head_dim // group, block_size=block_size, stages=stages,
            ),
        ),
    )  # fmt: skip


class Scales(NamedTuple):
    """The scales of queries [total_q, num_index_heads], and whether they are to be used; keys always have theirs."""

    q_scale: Any
    use_q_scale: Any
    use_k_scale: Any


class HeldKeys(NamedTuple):
    """What lies in shared memory; the barriers are pointers to the first of each kind."""

    tiles: Any
    raw: Any
    scales: Any
    full: Any
    free: Any
    raw_full: Any
    raw_free: Any


class IndexKeys(packed_right.Right):
    """Blocks of keys [total_k, head_dim / 2], or [pages, page, head_dim / 2] with pages_per_block > 0."""

    scaled = True
    key_scales = 0

    def __init__(self, name, table, head_dim, block_size, pages_per_block):
        super().__init__(name, table, head_dim, block_size, pages_per_block)
        self.pages_per_block = pages_per_block
        self.stages = table.depth(name)

    pages = index_plain.IndexKeys.pages

    def arguments(self):
        """Stand-ins: bytes, scales [total_k, groups] or [pages, page, groups], and a vector whose first element is the
        global scale, if there is one.
        """
        page = (self.blocks.box_rows,) if self.pages_per_block else ()
        of_all = (stand_in(Float32, cute.sym_int()),) if self.has_global else ()
        return (
            stand_in(cutlass.Uint8, cute.sym_int(), *page, self.head_dim // CODES, align=tma.BYTES),
            stand_in(self.scale_element, cute.sym_int(), *page, self.groups),
            *of_all,
        )

    def stored(self, keys, scales, of_heads=None):
        modes = (1, 2, 0) if self.pages_per_block else (0, 1)
        return Stored(*self.blocks.described_by(keys, modes), scales, of_heads)

    def layouts(self):
        shape = (ROWS, self.block_size, self.head_dim)
        raw = cute.make_ordered_layout((self.stages, self.block_size, self.head_dim // CODES), order=(2, 1, 0))
        tiles = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.element, self.stages)
        return {f"{self.name}_tiles": tiles, f"{self.name}_raw": raw}

    def held(self, buffers, barriers):
        tiles, raw, scales = (buffers[f"{self.name}_{kind}"] for kind in ("tiles", "raw", "scales"))
        kinds = ("full", "free", "raw_full", "raw_free")
        return HeldKeys(tiles, raw, scales, *(barriers + self.table.place(f"{self.name}_{kind}") for kind in kinds))

    @cute.jit
    def load(self, stored: Stored, held: HeldKeys, stage: Int32, phase: Int32, row: Int32, pages):
        """The block that begins at a row of flat keys, or that has these pages -> a stage, once it is free.

        A whole warp calls it.
        """
        cute.arch.mbarrier_wait(held.raw_free + stage, phase)
        full = held.raw_full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(f"{self.name}_raw"))
        boxes = self.blocks.boxes_of(held.raw, self.stages)
        if cutlass.const_expr(self.pages_per_block > 0):
            for p in cutlass.range_constexpr(self.pages_per_block):
                source = stored.rows[None, None, pages[p]]
                tma.load_box(stored.atom, source, Int32(0), 0, boxes[None, None, p, 0, stage], full)
        else:
            tma.load_box(stored.atom, stored.rows, row, 0, boxes[None, None, 0, 0, stage], full)
        self.load_rows(stored, row, pages, held.scales[None, None, stage].iterator)
        self.arrive_with_scales(full)

    @cute.jit
    def load_rows(self, stored: Stored, row: Int32, pages, target: cute.Pointer):
        """The scales of keys, of which every lane takes some; of rows that nobody sees, any."""
        lane = cute.arch.lane_idx()
        last = Int32(stored.scales.shape[0]) - 1
        for i in cutlass.range_constexpr(self.block_size // WARP):
            key = WARP * i + lane
            if cutlass.const_expr(self.pages_per_block > 0):
                # An entry past the request's keys may name any page.
                page = cutlass.min(cutlass.max(page_of(pages, WARP * i, lane, self.blocks.box_rows), 0), last)
                source = stored.scales[page, key % self.blocks.box_rows, None].iterator
            else:
                source = stored.scales[cutlass.min(row + key, last), None].iterator
            self.copy(source, target + self.groups * key)

    @cute.jit
    def decode_blocks(self, held: HeldKeys, count: Int32, member: Int32, members: cutlass.Constexpr):
        """One of the `members` decoding warps: `count` blocks, one after the other, from bytes to tiles."""
        stage = Int32(0)
        phase = Int32(0)
        for _ in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(held.raw_full + stage, phase)
            cute.arch.mbarrier_wait(held.free + stage, phase ^ 1)
            self.decode_rows(
                held.raw[stage, None, None].iterator, held.tiles[None, None, stage].iterator,
                held.scales[None, None, stage].iterator, Int32(self.groups), member, members,
            )  # fmt: skip
            cute.arch.fence_view_async_shared()
            arrive(held.raw_free + stage)
            arrive(held.full + stage)
            stage, phase = following(stage, phase, self.stages)

    def factors(self, held, stage):
        """None: scales are a part of what is decoded."""
        return None

    @cute.jit
    def row_factor(self, stored: Stored, scales: Scales, token: Int32, head: Int32):
        factor = Float32(1.0)
        if scales.use_q_scale != 0:
            factor = Float32(scales.q_scale[token, head])
        if cutlass.const_expr(self.has_global):
            factor = self.fold(factor, stored, 0)
        return factor
