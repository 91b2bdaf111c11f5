"""Keys or values of e4m3 with float32 scales, decoded to 16 bits in registers.

A scale belongs to a head (to the tensor, with a stride of 0) or, with token_scales, to each token of a head. Queries
are bfloat16, so keys become it, too, but in a ring, where queries become float16; values become float16, which one
instruction makes of two of them. With token_scales all become bfloat16: a weight times the scale of a token is no
number for float16.

Blocks lie in shared memory as they are stored, a row of bytes for each token. `ldmatrix` hands them out in pairs of
bytes, which is not quite the order in which wgmma takes its left side from registers; what is left is turned round on
the other side:
- Of 16 columns of keys a lane gets four beside each other, wgmma counts them as two and two further on: `prepare` moves
  the columns of the queries likewise.
- Of 16 columns of values a lane gets two beside each other, wgmma counts them as rows 8 apart: `row_of` says so.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from msa_tiles.dsl.cutedsl import swap_ab, tma, wgmma
from msa_tiles.dsl.cutedsl.arguments import stand_in
from msa_tiles.dsl.cutedsl.elements import ELEMENTS
from msa_tiles.dsl.cutedsl.gradients import HIGH, round_pair
from msa_tiles.dsl.cutedsl.keys import Blocks
from msa_tiles.dsl.cutedsl.pipeline import arrive
from msa_tiles.dsl.cutedsl.row_scales import copy_scales
from msa_tiles.dsl.cutedsl.scores import pick_float
from msa_tiles.dsl.cutedsl.wgmma import ROWS
from msa_tiles.dsl.table import WARP, Parts, Pipeline, buffer, declares, lane, threads, warps

TENSORS = ("", "_scale")
CHUNK = 16  # bytes, that is values, of a row of ldmatrix
REPEAT = 8  # rows after which a swizzle repeats
HALF_PANEL = 64  # columns of a panel of 16 bits
UNIT = 8  # values that a lane decodes at a time
LEAST_SCALE = 1.0e-30
MAGNITUDE = 0x7FFF  # of a bfloat16
BIAS, MOST_POWER = 127, 253  # of a float32's exponent; of both a power of two and its inverse none is subnormal


@declares
def parts(name, head_dim, block_size, stages, *, producer, readers, token_scales):
    """One pipeline, which TMA fills; scales of tokens come with copies of all lanes of the producer."""
    raw, scales = f"{name}_raw", f"{name}_scales"
    copies = (threads(producer),) if token_scales else ()
    of_tokens = (buffer(scales, "float32", align=128, block_size=block_size, stages=stages),) if token_scales else ()
    return Parts(
        (Pipeline(name, stages, (lane(producer), *copies), (warps(readers),), (raw,)),),
        (
            buffer(
                raw, "float8_e4m3fn", align=1024, note="swizzled by 128 bytes, or 64 where a row is no longer",
                stages=stages, block_size=block_size, head_dim=head_dim,
            ),
            *of_tokens,
        ),
    )  # fmt: skip


@declares
def right_parts(name, head_dim, block_size, *, producer, keeper, readers, inspected, token_scales):
    """What TMA brings, and what the keeper makes of it for the readers."""
    raw, scales, tiles = f"{name}_raw", f"{name}_scales", f"{name}_tiles"
    copies = (threads(producer),) if token_scales else ()
    of_tokens = (buffer(scales, "float32", align=128, block_size=block_size),) if token_scales else ()
    return Parts(
        (
            Pipeline(raw, 1, (lane(producer), *copies), (warps(keeper),), (raw,)),
            Pipeline(name, 1, (lane(keeper),), tuple(warps(role) for role in readers)),
        ),
        (
            buffer(
                tiles, multiplied(name, token_scales), align=1024,
                note="swizzled by 128 bytes, in panels of 64 columns", block_size=block_size, head_dim=head_dim,
            ),
            buffer(
                raw, "float8_e4m3fn", align=1024, note="swizzled by 128 bytes, or 64 where a row is no longer",
                block_size=block_size, head_dim=head_dim,
            ),
            *of_tokens,
        ),
    )  # fmt: skip


@declares
def ring_parts(stages, *, producer, decoder, readers, token_scales):
    """A ring of blocks in memory of the kernel: what TMA brings, and what the decoder makes of it in its place."""
    copies = (threads(producer),) if token_scales else ()
    return Parts(
        (
            Pipeline("raw", stages, (lane(producer), *copies)),
            Pipeline("ring", stages, (warps(decoder),), (warps(readers),)),
        ),
        (),
    )


@declares
def query_parts(rows, *, producer, decoder, readers, token_scales):
    """A tile of queries, which TMA fills; for float16 keys the decoder makes float16 of it."""
    freed = (warps(readers),)
    if token_scales:
        return Parts((Pipeline("q", 1, (lane(producer),), freed),), ())
    return Parts(
        (Pipeline("q_raw", 1, (lane(producer),)), Pipeline("q", 1, (warps(decoder),), freed)),
        (buffer("query_powers", "uint8", rows=rows, note="the exponents of what a query's rows were multiplied with"),),
    )


@declares
def in_ring(name, token_scales):
    """The element of the product, of a ring, whose decoders make bfloat16 too slowly."""
    return "bfloat16" if token_scales else "float16"


@declares
def multiplied(name, token_scales):
    """The element of the product that keys ("k") or values ("v") are part of."""
    return "bfloat16" if name == "k" or token_scales else "float16"


class Stored(NamedTuple):
    """A tensor in global memory, as TMA sees it, and its scales."""

    atom: Any
    rows: Any
    scales: Any


class Held(NamedTuple):
    """What lies in shared memory; the barriers are pointers to those of the first stage."""

    raw: Any
    scales: Any  # None where a head has one
    full: Any
    free: Any


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
                panel = unit // UNIT * self.block_size + row
                target = tile + panel * HALF_PANEL + ((unit % UNIT) ^ (row % REPEAT)) * UNIT
                cute.autovec_copy(decoded, aligned(target, Int32, UNIT // 2))
            cute.arch.sync_warp()

    def fold(self, value, stored, head):
        return value if self.token_scales else value * stored.scales[head]


class Left(Storage):
    """Blocks as the left side of products: see msa_tiles.dsl.cutedsl.operands."""

    ahead = True

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, readers, transposed, token_scales):
        super().__init__(name, table, head_dim, block_size, pages_per_block, token_scales=token_scales)
        self.stages = table.depth(name)
        self.threads = table.threads_of(readers)
        self.transposed = transposed
        # Of the product: rows and what they are multiplied along.
        self.rows, self.depth = (head_dim, block_size) if transposed else (block_size, head_dim)

    def layouts(self):
        shape = (self.stages, self.block_size, self.head_dim)
        return {f"{self.name}_raw": cute.make_ordered_layout(shape, order=(2, 1, 0))}

    def held(self, buffers, barriers):
        full, free = (barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free"))
        return Held(buffers[f"{self.name}_raw"], buffers.get(f"{self.name}_scales"), full, free)

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: Held, stage: Int32, phase: Int32):
        """The block of one head that begins at a row of flat keys, or that has these pages. A whole warp calls it."""
        cute.arch.mbarrier_wait(held.free + stage, phase)
        full = held.full + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.table.bytes_of(self.name))
        boxes = self.blocks.boxes_of(held.raw, self.stages)[None, None, None, None, stage]
        self.blocks.copy(stored.atom, stored.rows, row, pages, head, boxes, full)
        if cutlass.const_expr(self.token_scales):
            of_head = self.scales_of_head(stored, head)
            copy_scales(of_head, row, pages, held.scales[None, stage], self.blocks.box_rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)

    def product(self, columns):
        """The multiplications of a block with [columns, K] (wgmma.product)."""
        return swap_ab.product(self.element, columns, OperandMajorMode.K, warpgroup.OperandSource.RMEM)

    def accumulator(self, product, columns):
        """Registers of the product of a block."""
        return swap_ab.accumulator(product, self.rows, columns)

    def operand(self, product, held):
        """Registers for a decoded block."""
        mma = product[0]
        return mma.make_fragment_A(mma.partition_shape_A((self.rows, self.depth)))

    @cute.jit
    def prepare(self, right: cute.Tensor, thread: Int32):
        """Of every 16 columns of the right side, put pairs 0, 2, 4, 6 before 1, 3, 5, 7; the readers meet."""
        if cutlass.const_expr(not self.transposed):
            columns = cute.size(right, mode=[0])
            for number in cutlass.range(thread, columns * (self.head_dim // 16), self.threads, unroll=1):
                row, chunk = number % columns, number // columns
                low, high = (
                    aligned(right.iterator + column_of(row, 2 * chunk + i, self.head_dim), Int32, 4) for i in range(2)
                )
                pairs = cute.make_rmem_tensor(8, Int32)
                for i in cutlass.range_constexpr(4):
                    pairs[i] = low[i]
                    pairs[4 + i] = high[i]
                for i in cutlass.range_constexpr(4):
                    low[i] = pairs[2 * i]
                    high[i] = pairs[2 * i + 1]
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    @cute.jit
    def take(self, operand: cute.Tensor, held: Held, stage: Int32, phase: Int32, valid, thread: Int32):
        """Wait for a stage and decode it, rows from `valid` on as zeros; then hand it back."""
        cute.arch.mbarrier_wait(held.full + stage, phase)
        lane = cute.arch.lane_idx()
        member = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        raw = held.raw[stage, None, None].iterator
        if cutlass.const_expr(valid is not None):
            if valid < self.block_size:
                self.clear(raw, valid, member, lane)
        registers = cute.recast_tensor(operand, Int32)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(self.transposed, 4), cutlass.BFloat16)
        for m in cutlass.range_constexpr(self.rows // ROWS):
            for step in cutlass.range_constexpr(self.depth // 32):
                if cutlass.const_expr(self.transposed):
                    row, chunk = 32 * step + lane, ROWS // CHUNK * m + member
                else:
                    row, chunk = ROWS * m + CHUNK * member + lane % 16, 2 * step + lane // 16
                four = cute.make_rmem_tensor(4, Int32)
                source = aligned(raw + byte_of(row, chunk, self.head_dim), cutlass.BFloat16, 8)
                cute.copy(atom, source, cute.recast_tensor(four, cutlass.BFloat16))
                for i in cutlass.range_constexpr(4):
                    self.put(four[i], i, registers[None, m, 2 * step + i // 2])
        arrive(held.free + stage)
        return operand

    @cute.jit
    def put(self, word: Int32, number: cutlass.Constexpr, target: cute.Tensor):
        """The word of matrix `number` of four, decoded, to its place in the four registers of 16 columns."""
        i = number % 2
        if cutlass.const_expr(self.transposed):
            # Two columns of two tokens -> two tokens of the one, and of the other.
            target[2 * i], target[2 * i + 1] = self.decode(Int32(cute.arch.prmt(word, Int32(0), Int32(0x3120))))
        else:
            target[i], target[2 + i] = self.decode(word)

    @cute.jit
    def clear(self, raw: cute.Pointer, valid: Int32, member: Int32, lane: Int32):
        """Zero the rows from `valid` on, of the columns that a warp reads."""
        for m in cutlass.range_constexpr(self.rows // ROWS):
            for row in cutlass.range(valid + lane, self.block_size, WARP, unroll=1):
                aligned(raw + byte_of(row, ROWS // CHUNK * m + member, self.head_dim), Int32, 4).fill(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    def multiply(self, product, into, tile, right):
        """Start into = tile x right and close the group."""
        wgmma.multiply(product, into, tile, right)

    def release(self, held, stage):
        """The stage went back when it was decoded."""

    def row_of(self, member, lane, half):
        """The row, of 64, whose column a lane of warp `member` has in this half of an accumulator."""
        return 16 * member + (2 * (lane // 4) + half if self.transposed else lane // 4 + 8 * half)

    @cute.jit
    def factors(self, held: Held, stage: Int32, phase: Int32, first_row: Int32):
        found = None
        if cutlass.const_expr(self.token_scales):
            cute.arch.mbarrier_wait(held.full + stage, phase)
            tokens = [first_row + ROWS * m + 8 * half for m in range(self.block_size // ROWS) for half in range(2)]
            found = [held.scales[token, stage] for token in tokens]
        return found


class HeldRight(NamedTuple):
    """A block in shared memory: decoded, and as it comes; with barriers, and scales where tokens have some."""

    tile: Any
    full: Any
    free: Any
    raw: Any
    raw_full: Any
    raw_free: Any
    scales: Any


class Right(Storage):
    """Blocks as the right side of products of 64-row tiles, decoded by one warp: see msa_tiles.dsl.cutedsl.operands."""

    def layouts(self):
        major, shape = LayoutEnum.ROW_MAJOR, (ROWS, self.block_size, self.head_dim)
        if self.name == "v":
            major, shape = LayoutEnum.COL_MAJOR, (ROWS, self.head_dim, self.block_size)
        raw = cute.make_ordered_layout((self.block_size, self.head_dim), order=(1, 0))
        tiles = hopper.make_smem_layout_b(major, shape, self.element, 1)
        return {f"{self.name}_tiles": tiles, f"{self.name}_raw": raw}

    def held(self, buffers, barriers):
        full, free, raw_full, raw_free = (
            barriers + self.table.place(f"{self.name}_{kind}") for kind in ("full", "free", "raw_full", "raw_free")
        )
        tile, raw = (buffers[f"{self.name}_{kind}"] for kind in ("tiles", "raw"))
        return HeldRight(tile, full, free, raw, raw_full, raw_free, buffers.get(f"{self.name}_scales"))

    @cute.jit
    def load(self, stored: Stored, row: Int32, pages, head: Int32, held: HeldRight, parity: Int32, inspected: Int32):
        """The producer: the block that begins at a row of flat keys, or that has these pages, once there is room."""
        cute.arch.mbarrier_wait(held.raw_free, parity ^ 1)
        boxes = self.blocks.boxes(held.raw)
        self.blocks.load(stored.atom, stored.rows, row, pages, head, boxes, held.raw_full)
        if cutlass.const_expr(self.token_scales):
            copy_scales(self.scales_of_head(stored, head), row, pages, held.scales, self.blocks.box_rows)
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
        lane = cute.arch.lane_idx()
        scales = self.scales_of_lane(held.scales, lane)
        self.decode_rows(held.raw.iterator, held.tile.iterator, scales, lane, 0, 1)
        cute.arch.fence_view_async_shared()
        arrive(held.raw_free)
        return phase

    @cute.jit
    def pass_on(self, held: HeldRight, inspected: Int32):
        """The keeper: the block is ready for its readers."""
        arrive(held.full)

    def of_head(self, stored, head):
        return None if self.token_scales else stored.scales[head]


class InRing(Storage):
    """Blocks as the right side of products, in a ring of tiles of the kernel's: see msa_tiles.dsl.cutedsl.operands.

    Bytes come to the second half of their tile. Decoded rows of two panels lie where their own bytes did; those of one
    panel are decoded in their order, by one warp, so that none is overwritten before it is read. Scales of tokens come
    to the tile's first bytes.
    """

    LANDING = "raw_full"  # where the bytes of a stage are awaited first
    decoded = True
    multiplied = staticmethod(in_ring)

    def __init__(self, name, table, head_dim, block_size, pages_per_block, *, token_scales):
        super().__init__(name, table, head_dim, block_size, pages_per_block, token_scales=token_scales)
        self.Q_LANDING = "q_full" if token_scales else "q_raw_full"  # likewise of queries

    def raw_of(self, tile):
        """The bytes of a tile."""
        half = self.block_size * self.head_dim
        return cute.make_ptr(self.stored_element, tile.toint() + half, tile.memspace, assumed_align=1024)

    def boxes(self, tiles, stages):
        """Where TMA writes in a ring of tiles: [rows, columns, box, panel, stage]."""
        of_stage = self.blocks.boxes_of(cute.make_tensor(self.raw_of(tiles.iterator), cute.make_layout(1)), 1)
        shape = (*of_stage.shape[:4], stages)
        stride = (*of_stage.stride[:4], 2 * self.block_size * self.head_dim)
        return cute.make_tensor(of_stage.iterator, cute.make_layout(shape, stride=stride))

    def scales_in(self, tile):
        start = cute.make_ptr(Float32, tile.toint(), tile.memspace, assumed_align=128)
        return cute.make_tensor(start, cute.make_layout(self.block_size))

    @cute.jit
    def load_scales(
        self, stored: Stored, row: Int32, page: Int32, head: Int32, tile: cute.Pointer, barrier: cute.Pointer
    ):
        """Scales of tokens, of which every lane takes some; lane i holds the block's i-th page."""
        if cutlass.const_expr(self.token_scales):
            pages = [cute.arch.shuffle_sync(page, p) for p in range(self.blocks.pages_per_block)]
            copy_scales(self.scales_of_head(stored, head), row, pages, self.scales_in(tile), self.blocks.box_rows)
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    def skip_scales(self, barrier):
        """The arrivals of a stage without scales."""
        if self.token_scales:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def decode_tile(self, tile: cute.Pointer, lane: Int32, member: Int32, members: cutlass.Constexpr, meeting: Int32):
        """One of the `members` decoding warps, which meet at a named barrier: a stage's bytes -> its tile."""
        scales = self.scales_of_lane(self.scales_in(tile), lane)
        if cutlass.const_expr(self.token_scales):
            cute.arch.barrier(barrier_id=meeting, number_of_threads=WARP * members)
        if cutlass.const_expr(self.head_dim == 2 * HALF_PANEL):
            self.decode_rows(self.raw_of(tile), tile, scales, lane, member, members)
        elif member == 0:
            self.decode_rows(self.raw_of(tile), tile, scales, lane, 0, 1)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def decode_queries(
        self, tile: cute.Pointer, powers, landed: cute.Pointer, phase: Int32, lane: Int32, member: Int32,
        members: cutlass.Constexpr,
    ):  # fmt: skip
        """One of the `members` decoding warps: rows of bfloat16 -> float16 in their place, for float16 keys.

        The largest of a row comes to lie between 2**14 and 2**15 by a power of two, whose exponent goes to `powers`:
        what is 2**31 times smaller loses nothing. Rows whose largest is infinite or NaN keep that and nothing else.
        """
        if cutlass.const_expr(not self.token_scales):
            cute.arch.mbarrier_wait(landed, phase)
            words = self.head_dim // HALF_PANEL  # of a lane
            unit, within = lane * words // (UNIT // 2), lane * words % (UNIT // 2)
            for row in cutlass.range(member, ROWS, members, unroll=2):
                place = tile + column_of(row, unit, self.head_dim) + 2 * within
                packed = words_at(place, words)
                largest = Int32(0)
                for i in cutlass.range_constexpr(words):
                    largest = cutlass.max(largest, cutlass.max(packed[i] & MAGNITUDE, (packed[i] >> 16) & MAGNITUDE))
                exponent = Int32(cute.arch.warp_redux_sync(largest, "max")) >> 7
                power = Int32(cutlass.min(2 * BIAS + 14 - exponent, MOST_POWER))
                factor = (power << 23).bitcast(Float32)
                scaled = cute.make_rmem_tensor(words, Int32)
                for i in cutlass.range_constexpr(words):
                    low, high = (packed[i] << 16).bitcast(Float32), (packed[i] & HIGH).bitcast(Float32)
                    scaled[i] = round_pair(low * factor, high * factor, cutlass.Float16)
                start = cute.make_ptr(Int32, place.toint(), place.memspace, assumed_align=4 * words)
                cute.autovec_copy(scaled, cute.make_tensor(start, cute.make_layout(words)))
                if lane == 0:
                    powers[row] = cutlass.Uint8(power)
            cute.arch.fence_view_async_shared()

    def pass_queries_on(self, full):
        """Queries are there as the products read them."""
        if not self.token_scales:
            arrive(full)

    @cute.jit
    def scale_rows(self, scales: cute.Tensor, powers, row: Int32):
        """scales[half], of rows row + 8 half of the queries that are there, times what undoes their powers of two.

        Not 0: LSE is divided by them. Where they would be as small, scores are small beside them as well.
        """
        if cutlass.const_expr(not self.token_scales):
            for half in cutlass.range_constexpr(2):
                inverse = ((2 * BIAS - Int32(powers[row + 8 * half])) << 23).bitcast(Float32)
                scales[half] = cute.arch.fmax(scales[half] * inverse, LEAST_SCALE)

    def fold(self, value, stored, head):
        """Not 0, by which LSE would be divided: a number that makes all scores 0 as well."""
        return value if self.token_scales else cute.arch.fmax(super().fold(value, stored, head), LEAST_SCALE)

    def of_head(self, stored, head):
        return None if self.token_scales else stored.scales[head]


def words_at(place, count):
    """Words that may be loaded at once."""
    start = cute.make_ptr(Int32, place.toint(), place.memspace, assumed_align=4 * count)
    loaded = cute.make_tensor(start, cute.make_layout(count)).load()
    return [loaded[i] for i in range(count)]


def byte_of(row, chunk, head_dim):
    """Where 16 bytes of a row begin in a block of rows of 128 bytes, swizzled by as many, or of 64 bytes likewise."""
    return row * head_dim + (chunk ^ (row * head_dim // 128) % (head_dim // CHUNK)) * CHUNK


def column_of(row, unit, head_dim):
    """Where 8 columns of a row of 16 bits begin, as msa_tiles.dsl.cutedsl.gather lays them down: in columns."""
    panel = row // REPEAT * (head_dim // HALF_PANEL) + unit // 8
    return panel * (REPEAT * HALF_PANEL) + row % REPEAT * HALF_PANEL + (unit % 8 ^ row % REPEAT) * 8


def aligned(place, element, count):
    """16 bytes from a place that is a multiple of as many."""
    start = cute.make_ptr(element, place.toint(), place.memspace, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout(count))


def decode_f16(word):
    """Four e4m3 -> two words of two float16, exact; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; "
        "cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def decode_bf16(word, scale=None):
    """Four e4m3 -> two words of two bfloat16, through float16 and float32: exact without a scale. NaN stays NaN."""
    return [widen(half, scale) for half in decode_f16(word)]


def widen(pair, scale):
    """Two float16, times a scale where it is given -> two bfloat16."""
    times = "" if scale is None else "mul.f32 first, first, {$r1}; mul.f32 second, second, {$r1}; "
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .f32 first, second; mov.b32 {low, high}, {$r0}; cvt.f32.f16 first, low; "
        "cvt.f32.f16 second, high; " + times + "cvt.rn.bf16x2.f32 {$w0}, second, first; }",
        write_only_types=[Int32],
        read_only_args=[pair] if scale is None else [pair, scale],
    )
