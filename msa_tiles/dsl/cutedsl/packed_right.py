"""Keys or values of 4 bits as the right side of products of 64-row tiles, decoded to a tile by one warp."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import packed
from msa_tiles.dsl.cutedsl.operands.e4m3 import aligned, words_at
from msa_tiles.dsl.cutedsl.packed import CHUNK, CODES, LEAST_COPY, Stored, byte_at, byte_of
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Parts, Pipeline, buffer, declares, lane, threads, warps

PANEL = 64  # columns of a panel of 16 bits
UNIT = 8  # codes of a word, that is columns that a lane decodes at a time
REPEAT = 8  # rows after which a swizzle repeats


@declares
def parts(name, head_dim, block_size, element, *, producer, keeper, readers, group):
    """What TMA and copies of all lanes of the producer bring, and what the keeper makes of it for the readers."""
    raw, tiles = f"{name}_raw", f"{name}_tiles"
    return Parts(
        (
            Pipeline(raw, 1, (lane(producer), threads(producer)), (warps(keeper),), (raw,)),
            Pipeline(name, 1, (lane(keeper),), tuple(warps(role) for role in readers)),
        ),
        (
            buffer(
                tiles, element, align=1024, note="swizzled by 128 bytes, in panels of 64 columns",
                block_size=block_size, head_dim=head_dim,
            ),
            *packed.buffers(name, head_dim, block_size, group),
        ),
    )  # fmt: skip


class HeldRight(NamedTuple):
    """A block in shared memory, decoded and as it comes, with barriers and scales."""

    tile: Any
    full: Any
    free: Any
    raw: Any
    raw_full: Any
    raw_free: Any
    scales: Any


class Right(packed.Storage):
    """Blocks as the right side of products of 64-row tiles: see msa_tiles.dsl.cutedsl.operands."""

    def layouts(self):
        major, shape = LayoutEnum.ROW_MAJOR, (ROWS, self.block_size, self.head_dim)
        if self.name == "v":
            major, shape = LayoutEnum.COL_MAJOR, (ROWS, self.head_dim, self.block_size)
        raw = cute.make_ordered_layout((self.block_size, self.head_dim // CODES), order=(1, 0))
        tiles = hopper.make_smem_layout_b(major, shape, self.element, 1)
        return {f"{self.name}_tiles": tiles, f"{self.name}_raw": raw}

    def held(self, buffers, barriers):
        full, free, raw_full, raw_free = (
            barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free", "raw_full", "raw_free")
        )
        tile, raw, scales = (buffers[f"{self.name}_{kind}"] for kind in ("tiles", "raw", "scales"))
        return HeldRight(tile, full, free, raw, raw_full, raw_free, scales)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: HeldRight, parity: Int32, inspected: Int32):
        """The producer: the block that begins at a row of flat keys, or that has these pages, once there is room."""
        cute.arch.mbarrier_wait(held.raw_free, parity ^ 1)
        with cute.arch.elect_one():
            if cutlass.const_expr(self.name == "v"):
                self.order_in(held.scales.iterator)[0] = self.order(stored)
            cute.arch.mbarrier_arrive_and_expect_tx(held.raw_full, self.table.bytes_of(f"{self.name}_raw"))
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, self.blocks.boxes(held.raw), held.raw_full)
        self.load_scales(stored, row, pages, head, held.scales.iterator)
        if cutlass.const_expr(self.groups < LEAST_COPY):
            cute.arch.mbarrier_arrive(held.raw_full)
        else:
            cute.arch.cp_async_mbarrier_arrive_noinc(held.raw_full)

    def end_of_loads(self, held, parity):
        """Nothing: the keeper wakes those who wait for another block."""

    @cute.jit
    def end_of_tasks(self, held: HeldRight, parity: Int32):
        """The keeper: wake those who wait for another block."""
        cute.arch.mbarrier_wait(held.free, parity ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(held.full)

    @cute.jit
    def bring(self, held: HeldRight, parity: Int32, phase: Int32, inspected: Int32):
        """The keeper: decode a block, once there is room; what came is free then."""
        cute.arch.mbarrier_wait(held.raw_full, parity)
        cute.arch.mbarrier_wait(held.free, parity ^ 1)
        order = Int32(self.groups)
        if cutlass.const_expr(self.name == "v"):
            order = self.order_in(held.scales.iterator)[0]
        self.decode_rows(held.raw.iterator, held.tile.iterator, held.scales.iterator, order, Int32(0), 1)
        cute.arch.fence_view_async_shared()
        arrive(held.raw_free)
        return phase

    @cute.jit
    def pass_on(self, held: HeldRight, inspected: Int32):
        """The keeper: the block is ready for its readers."""
        arrive(held.full)

    @cute.jit
    def decode_rows(
        self, raw: cute.Pointer, tile: cute.Pointer, scales: cute.Pointer, order: Int32, member: Int32,
        members: cutlass.Constexpr,
    ):  # fmt: skip
        """Rows of bytes, swizzled as byte_of says -> a tile of 16 bits in panels of 64 columns, by `members` warps.

        A lane takes the eight codes of a word at a time, of the same columns in all rows.
        """
        lane = cute.arch.lane_idx()
        per_row = self.head_dim // UNIT
        abreast = WARP // per_row  # rows
        unit = lane % per_row
        of_lane = scales + self.scale_of(Int32(0), unit * UNIT // self.group, order)
        for eight in cutlass.range(member, self.block_size // REPEAT, members, unroll=1):
            for step in cutlass.range_constexpr(REPEAT // abreast):
                row = REPEAT * eight + abreast * step + lane // per_row
                [word] = words_at(raw + byte_of(row, unit * 4 // CHUNK, self.head_dim // CODES) + unit * 4 % CHUNK, 1)
                factor = self.factor(byte_at(of_lane + self.scale_of(row, 0, order)))
                panel = unit // UNIT * self.block_size + row
                target = tile + panel * PANEL + ((unit % UNIT) ^ (row % REPEAT)) * UNIT
                cute.autovec_copy(self.columns(word, factor), aligned(target, Int32, UNIT // 2))

    @cute.jit
    def columns(self, word: Int32, factor: Int32):
        """The codes of a word as eight numbers in their order, two a word."""
        pairs = [self.decode(word, code, factor) for code in range(4)]
        found = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(2):
            found[i] = Int32(cute.arch.prmt(pairs[2 * i], pairs[2 * i + 1], Int32(0x5410)))
            found[2 + i] = Int32(cute.arch.prmt(pairs[2 * i], pairs[2 * i + 1], Int32(0x7632)))
        return found

    def factor(self, code):
        """What the codes of a group are multiplied with, twice in a word."""
        return self.value_factor(code, code) if self.name == "v" else self.key_factor(code)

    def decode(self, word, code, factor):
        """Codes `code` and `code` + 4 of a word."""
        return self.value(word, code, factor) if self.name == "v" else self.key(word, code, factor)
