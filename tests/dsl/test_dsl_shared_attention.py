"""The roles and pipelines of the SM90 shared_attention in CuTe DSL, run lane by lane on small tiles.

The kernel's own source runs, with stand-ins for layouts, copies and products: two warps of consumers, tiles of 32 rows,
blocks of one or two tiles of keys. What the stand-ins leave out (layouts, descriptors, fences) is for other tests and
the audit. Whatever may hold anything holds NaN, or a number that names nothing.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import warpgroups
from warpgroups import POISON, Boxes, Chip, Fragment, Memory, Multiplications, Pair, Pairs, Writing
from warps import Array, Deadlock, Pointer, load, motions, tables

from msa_tiles.paths import generated_dir
from msa_tiles.sources import PACKAGE
from msa_tiles.tables import constants_of

KERNEL = generated_dir() / "cutedsl/sm90/shared_attention_bf16.py"
DECODING = generated_dir() / "cutedsl/sm90/shared_attention_q16kv8.py"
PACKED = generated_dir() / "cutedsl/sm90/shared_attention_q16kv4.py"
HELPERS = PACKAGE / "dsl/cutedsl"
LANES, WARPS, TILE = 32, 2, 32
HEAD_DIM, PANEL, ATOM = 16, 8, 8
HEADS, TOPK, SCALE_LOG2 = 2, 6, 0.3
OUT_SCALE = 0.7  # of values that are decoded
TILES_OF_WINDOW = 3
CUT, VALID_SHIFT = 1 << 8, 9


class Shape(NamedTuple):
    """What a kernel is built for."""

    group: int = 3
    block_size: int = 32
    pages: int = 0  # per block; 0 for flat keys

    @property
    def per_token(self) -> int:
        return max(self.group, ATOM)

    @property
    def tokens(self) -> int:
        return TILE // self.per_token

    @property
    def window(self) -> int:
        return TILES_OF_WINDOW * self.tokens


class Cta(Chip):
    """One thread block, whose lanes must wait for the kernel before, which ends at any time."""

    def __init__(self, index: int, seed: int) -> None:
        super().__init__(2, WARPS, LANES, seed)
        self.index = index
        self.asked = self.ended = False
        self.waited: set[int] = set()

    def block_idx(self) -> tuple[int, int, int]:
        return self.index, 0, 0

    def griddepcontrol_wait(self) -> None:
        if not self.asked:
            self.asked = True
            self.later("kernel before", lambda: setattr(self, "ended", True))
        self.wait(lambda: self.ended)
        self.waited.add(self.local.index)

    def may_touch(self) -> None:
        assert self.local.index in self.waited, "the kernel before may still be running"


class Guarded(Array):
    """What the kernel before writes or may still read: no lane touches it unless it has waited."""

    def __init__(self, values: np.ndarray, chip: Cta, place: tuple[Any, ...] = ()) -> None:
        super().__init__(values)
        self.chip, self.place = chip, place

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            # Only where a view begins: it may begin outside when nobody looks into it.
            return Guarded(self.values, self.chip, index)
        self.chip.may_touch()
        return self.values[tuple(index if i is None else i for i in self.place)].item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.chip.may_touch()
        super().__setitem__(index, value)


class Rows:
    """Rows of tokens, moved by boxes: of all columns, or of one panel for groups smaller than an atom."""

    def __init__(self, chip: Cta, group: int) -> None:
        self.chip, self.group = chip, group
        self.rows_per_token = max(group, ATOM)
        self.tokens = TILE // self.rows_per_token
        self.token_bytes = group * HEAD_DIM * 2
        self.boxes_per_token = HEAD_DIM // PANEL if group < ATOM else 1

    def tiles_layout(self, count: int) -> Any:
        return types.SimpleNamespace(outer=(TILE, HEAD_DIM, count), inner=None)

    def boxes(self, array: Array, count: int) -> Boxes:
        assert array.shape[-1] == count
        return Boxes(array)

    def partition(self, _atom: Any, view: Array, token: int, head: int, box: int, shared: tuple[Any, ...]) -> Any:
        array, number, tile = shared
        width = HEAD_DIM // self.boxes_per_token
        columns = slice(box * width, (box + 1) * width)
        heads = slice(head * self.group, (head + 1) * self.group)
        assert 0 <= token < len(view.values) and number < self.tokens
        rows = slice(number * self.rows_per_token, number * self.rows_per_token + self.group)
        return Box(array, (rows, columns, tile)), Box(view, (token, heads, columns))

    def store(self, atom: Any, source: Any, target: Array, token: int, head: int) -> None:
        for box in range(self.boxes_per_token):
            come_from, to = self.partition(atom, target, token, head, box, source)
            if self.chip.lane == 0:
                to.check()
                self.chip.later(("stores", self.chip.warp), lambda a=to, b=come_from: a.write(b.read()))


class Box(NamedTuple):
    """A part of an array, looked at when a copy completes."""

    array: Array
    place: tuple[Any, ...]

    def read(self) -> np.ndarray:
        return self.array.values[self.place]

    def write(self, values: np.ndarray) -> None:
        self.array.values[self.place] = values

    def check(self) -> None:
        if isinstance(self.array, Guarded):
            self.array.chip.may_touch()


class Blocks(warpgroups.Blocks):
    """Keys and values, flat or in pages."""

    def __init__(self, chip: Cta, block_size: int, pages: int) -> None:
        super().__init__(chip, block_size, HEAD_DIM)
        self.block_bytes = self.bytes
        self.panel = PANEL
        self.pages_per_block = pages
        self.box_rows = block_size // max(pages, 1)

    def clear_rows(self, block: Array, first: int, thread: int, threads: int) -> None:
        super().clear_rows(Array(block.values.T), first, thread, threads)


class Stages:
    """The blocks of the ring, [rows, 16, 1] each."""

    def __init__(self, keys: Array, box_rows: int, panel: int = PANEL) -> None:
        self.keys, self.box_rows, self.panel = keys, box_rows, panel

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        stage = index[-1]
        return Pages(self.keys.values[:, :, stage : stage + 1], self.box_rows, self.panel)


class Pages(Array):
    """A block of the ring, or the box of a page and panel."""

    def __init__(self, values: np.ndarray, box_rows: int, panel: int) -> None:
        super().__init__(values)
        self.box_rows, self.panel = box_rows, panel

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        _, _, page, panel = index
        return self.values[page * self.box_rows :][: self.box_rows, panel * self.panel :][:, : self.panel, 0]


class Operand:
    """Blocks in the ring that need no decoding."""

    LANDING = "ring_full"
    Q_LANDING = "q_full"
    decoded = False
    element = float

    def __init__(
        self, chip: Cta, _name: str, _table: Any, _dim: int, block_size: int, pages: int, **_scales: int
    ) -> None:
        self.chip, self.blocks = chip, Blocks(chip, block_size, pages)

    def atoms(self, _stored: Any) -> tuple[()]:
        return ()

    def boxes(self, tiles: Array, _stages: int) -> Stages:
        return Stages(tiles, self.blocks.box_rows)

    def load_scales(self, *_arguments: Any) -> None:
        pass

    skip_scales = scale_rows = load_scales

    def fold(self, value: float, _stored: Any, _head: int) -> float:
        return value

    def of_head(self, _stored: Any, _head: int) -> Any:
        return None


class Decoded(Operand):
    """Blocks that land beside the ring, from where decoding warps bring a share of rows each."""

    LANDING = "raw_full"
    Q_LANDING = "q_raw_full"
    decoded = True
    panel = PANEL

    def boxes(self, tiles: Array, _stages: int) -> Stages:
        if not hasattr(self.chip, "raw"):
            self.chip.raw, self.chip.tiles = Array(np.full(tiles.shape, np.nan)), tiles
        return Stages(self.chip.raw, self.blocks.box_rows, self.panel)

    def decode_tile(self, tile: Pointer, lane: int, member: int, members: int, _meeting: int) -> None:
        raw, tiles = self.chip.raw.values, self.chip.tiles.values
        stage = tile.place // (raw.shape[0] * raw.shape[1])
        if lane == 0:
            tiles[member::members, :, stage] = raw[member::members, :, stage]
            raw[member::members, :, stage] = np.nan

    def decode_queries(
        self, tile: Pointer, powers: Array, landed: Pointer, phase: int, lane: int, member: int, members: int
    ) -> None:
        self.chip.mbarrier_wait(landed, phase)
        if lane == 0:
            for row in range(member, TILE, members):
                powers.values[row] = row % 3 + 1
                tile.of.values[row] *= 2.0 ** (row % 3 + 1)

    def pass_queries_on(self, full: Pointer) -> None:
        self.chip.sync_warp()
        if self.chip.lane == 0:
            self.chip.mbarrier_arrive(full)

    def scale_rows(self, scales: Array, powers: Array, row: int) -> None:
        for half in range(2):
            scales[half] = scales[half] / 2.0 ** powers[row + 8 * half]

    def of_head(self, _stored: Any, _head: int) -> float:
        return OUT_SCALE


class Packed(Decoded):
    """The same in boxes of whole rows with scales that all lanes of the producer copy, under queries as they come."""

    Q_LANDING = "q_full"
    panel = HEAD_DIM

    def load_scales(self, *arguments: Any) -> None:
        self.skip_scales(arguments[-1])

    def skip_scales(self, barrier: Pointer) -> None:
        self.chip.mbarrier_arrive(barrier)
        if self.chip.lane == 0:
            self.chip.mbarrier_arrive(barrier)

    def decode_queries(self, *_arguments: Any) -> None:
        pass

    pass_queries_on = scale_rows = decode_queries


class Turned(tuple):
    """The layout of values: [column, key, stage]."""


class Staging(Writing):
    """Both ways between registers and the rows of a tile."""

    def partition_S(self, array: Array) -> Boxes:
        return Boxes(array)

    def read(self, source: tuple[Any, ...], fragment: Fragment) -> None:
        array, _, tile = source
        for half in range(2):
            row = self.member * self.warp_rows + self.lane // 4 + half * self.warp_rows // 2
            fragment.values[:, half] = array.values[row, :, tile].reshape(-1, 4, 2)[:, self.lane % 4].T


class Ring(Memory):
    """Stages one behind the other, so that another tensor over them has its own."""

    def allocate_tensor(self, element: Any, shape: Any, alignment: int, swizzle: Any = None) -> Array:
        if len(shape) < 3:
            return super().allocate_tensor(element, shape, alignment, swizzle)
        return self._next(lambda: Array(np.moveaxis(np.full((shape[2], *shape[:2]), np.nan), 0, -1)))


def exp2(value: float, fastmath: bool) -> float:
    # What nothing is visible of: infinite there, and thrown away.
    return 2.0**value if not value > 1000 else math.inf


def log2(value: float, fastmath: bool) -> float:
    return math.log2(value) if value > 0 else math.nan


def device_code(chip: Cta, source: str | None, kernel: Path) -> dict[str, Any]:
    """The kernel's module, and the helpers it imports, over stand-ins."""

    def plain(function: Any) -> Any:
        return function

    def make_tensor(place: Pointer, layout: Any) -> Array:
        values = place.of.values
        if isinstance(layout, Turned):
            return Array(values.transpose(1, 0, 2))
        stages = np.moveaxis(values, -1, 0)
        tiles = np.moveaxis(stages.reshape(layout[2], *layout[:2]), 0, -1)
        assert np.shares_memory(tiles, values)
        return Array(tiles)

    def make_rmem_tensor(shape: Any, _element: Any) -> Array:
        if isinstance(shape, tuple) and shape[0] == "operand":
            return chip.fragment(shape[1])
        values = np.full(shape, np.nan)
        return Fragment(values) if values.ndim == 3 else Array(values)

    def bring(source: Callable[[], np.ndarray], write: Callable[[Any], None], full: Pointer) -> None:
        def arrive() -> None:
            found = source()
            write(found)
            chip.barriers[full.place].receive(found.size * 2)

        chip.later(object(), arrive)

    def copy(how: Any, source: Any, target: Any, tma_bar_ptr: Any = None, cache_policy: Any = None) -> None:
        if tma_bar_ptr is None:
            how.read(source, target) if isinstance(target, Fragment) else how.copy(source, target)
        elif chip.elected():
            source.check()
            bring(source.read, target.write, tma_bar_ptr)

    def load_box(_atom: Any, page: Array, row: int, panel: int, target: np.ndarray, full: Pointer) -> None:
        if chip.elected():
            columns = slice(panel * PANEL, panel * PANEL + target.shape[1])
            bring(lambda: page.values[row:, columns], lambda found: np.copyto(target, found), full)

    float32 = type("Float32", (float,), {"inf": math.inf, "nan": math.nan})
    cutlass = types.SimpleNamespace(
        range=lambda *bounds, unroll=0: range(*bounds), range_constexpr=range, const_expr=bool, min=min, max=max,
        Constexpr=None, BFloat16=float, Float16=None, Float32=float32,
        select_=lambda condition, value, other: value if condition else other,
    )  # fmt: skip
    cute = types.SimpleNamespace(
        arch=chip,
        jit=plain,
        kernel=plain,
        math=types.SimpleNamespace(exp2=exp2, log2=log2),
        size=lambda tensor: tensor.values.size,
        make_layout=lambda shape, stride=None: shape,
        make_tensor=make_tensor,
        recast_ptr=lambda pointer, _swizzle, dtype: pointer,
        make_rmem_tensor=make_rmem_tensor,
        recast_tensor=lambda fragment, _type: Pairs(fragment),
        make_copy_atom=lambda *_arguments: None,
        make_tiled_copy_C=lambda _atom, _mma: types.SimpleNamespace(get_slice=lambda thread: Staging(chip, thread)),
        copy=copy,
    )
    names = {
        "cutlass": cutlass, "cute": cute, "Boolean": bool, "Float32": float32, "Int32": int, "Int64": float,
        "Uint8": int, "Any": Any,
    }  # fmt: skip
    scores = load(HELPERS / "scores.py", **names)
    folding = {name: scores[name] for name in ("pick_float", "fold")}
    softmax = load(HELPERS / "softmax.py", **names, **folding)
    running = load(
        HELPERS / "running.py",
        **names,
        **folding,
        quad_maxima=softmax["quad_maxima"],
        round_pair=lambda low, high, _element: Pair(low, high),
    )
    hidden = load(HELPERS / "hidden.py", **names)
    hidden["unbounded"] = lambda value: not math.isfinite(value)
    multiplications = Multiplications(chip)

    def values_or_keys(major: str, tiler: tuple[int, ...], _element: Any, count: int) -> Any:
        outer = (*tiler[1:], count)
        return types.SimpleNamespace(outer=Turned(outer) if major == "columns" else outer, inner=None)

    names |= {
        "NamedTuple": NamedTuple,
        "OperandMajorMode": types.SimpleNamespace(K=0, MN=1),
        "LayoutEnum": types.SimpleNamespace(ROW_MAJOR="rows", COL_MAJOR="columns"),
        "cpasync": types.SimpleNamespace(prefetch_descriptor=lambda _atom: None),
        "softmax": types.SimpleNamespace(
            **{name: softmax[name] for name in ("LOWEST", "quad_max", "quad_sum", "log_sum")}
        ),
        "running_softmax": running["running_softmax"],
        "clean_column": hidden["clean_column"],
        "unbounded_pair": lambda pair: int(not (math.isfinite(pair.low) and math.isfinite(pair.high))),
        "HIGH": None,
        "pick_float": scores["pick_float"],
        "pick": lambda condition, value, other: value if condition else other,
        "ballot": chip.vote_ballot_sync,
        "count_bits": chip.popc,
        "hopper": types.SimpleNamespace(make_smem_layout_b=values_or_keys),
        "tma": types.SimpleNamespace(
            PANEL=PANEL, load_box=load_box, boxes=lambda keys, box_rows, *_shape: Stages(keys, box_rows)
        ),
        "warp": types.SimpleNamespace(StMatrix8x8x16bOp=lambda *_: None, LdMatrix8x8x16bOp=lambda *_: None),
        "warpgroup": types.SimpleNamespace(
            wait_group=multiplications.wait_group, OperandSource=types.SimpleNamespace(SMEM=0, RMEM=1)
        ),
        "wgmma": multiplications,
        "SmemAllocator": lambda: Ring(chip),
        **tables(chip),
        "WARP": LANES,
        "ELEMENTS": {"bfloat16": float},
        "EVICT_FIRST": 0,
        "Rows": lambda _element, _head_dim, group: Rows(chip, group),
        "Blocks": lambda _element, _head_dim, block_size, pages: Blocks(chip, block_size, pages),
        "ROWS": TILE,
    }
    operands = {DECODING: ("e4m3", Decoded), PACKED: ("nvfp4", Packed)}
    format, kind = operands.get(kernel, ("plain", Operand))
    parts = constants_of(HELPERS / f"operands/{format}.py")
    operand = functools.partial(kind, chip)
    names["key_value"] = types.SimpleNamespace(
        InRing=operand, **{name: parts[name] for name in ("in_ring", "ring_parts", "query_parts")}
    )
    module = load(kernel, source=source, **names, **motions(**names))
    # Two rows of an accumulator a lane, and AHEAD so small that a query's slots take several rounds.
    module.update(WARPS=WARPS, DECODERS=WARPS - 1, TILE_ROWS=TILE, AHEAD=1)
    return module


class Problem(NamedTuple):
    """The second window's tensors, and the keys and values of each request by the row where it begins."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    page_table: np.ndarray
    shared: np.ndarray
    shared_counts: np.ndarray
    rest_counts: np.ndarray
    last_rows: np.ndarray
    partial_out: np.ndarray
    partial_lse: np.ndarray
    requests: dict[int, tuple[np.ndarray, np.ndarray]]


# Of each tile: shared blocks, and the numbers of slots that its queries have.
TILES = (
    (0, (0,)),
    (1, (0, 1, 3, TOPK)),
    (3, (2, 0, 1)),
    (0, (5, 0, 1)),
    (2, (0,)),
    (1, (1,)),
)
# Every tile takes one stage.
SHORT = ((0, (0, 1)),) * 6
# Every tile multiplies.
DENSE = ((2, (0, 1)),) * 6


def begin(starts: Iterable[int], row: int) -> int:
    """Where the request of a row begins."""
    return max(start for start in starts if start <= row)


def problem(
    seed: int, shape: Shape, tiles: Sequence[tuple[int, tuple[int, ...]]] = TILES, spoilt: bool = False
) -> Problem:
    """With `spoilt`, some keys hold NaN, and some values NaN or infinities."""
    generator = np.random.default_rng(seed)
    group, block_size = shape.group, shape.block_size
    lengths = (2 * block_size - 5, 2 * block_size + 6)
    starts = (0, 2 * block_size + 3)
    page_table = np.full((1, 1), POISON)
    if shape.pages:
        starts = (0, 3 * shape.pages * block_size)
        page_table = generator.permutation(6 * shape.pages).reshape(2, 3 * shape.pages)
    padded = generator.standard_normal((2, 2, 3 * block_size, HEADS, HEAD_DIM))
    for request, length in enumerate(lengths):
        # Past the request's end, where nobody may look.
        padded[:, request, length:] = np.nan
        if spoilt:
            # In the second block, of which some queries see nothing and some the first rows.
            rows = generator.integers(block_size, length, 3)
            columns = generator.integers(0, HEAD_DIM, 3)
            padded[1, request, rows, :, columns] = np.array([np.inf, -np.inf, np.nan])[:, None]
            padded[0, request, length - 1] = np.nan
    if shape.pages:
        page = block_size // shape.pages
        pool = np.empty((2, 6 * shape.pages, HEADS, page, HEAD_DIM))
        pool[:, page_table.ravel()] = padded.reshape(2, -1, page, HEADS, HEAD_DIM).swapaxes(2, 3)
        # As TMA describes it: [row of a page, column, head, page].
        k, v = pool.transpose(0, 3, 4, 2, 1)
    else:
        # The last block ends beyond the tensor, too.
        k, v = np.concatenate([padded[:, 0, : starts[1]], padded[:, 1, : lengths[1] + 2]], axis=1)
    total_q = 2 * shape.window - 1
    q = np.full((total_q, HEADS * group, HEAD_DIM), np.nan)
    q[shape.window :] = generator.standard_normal((total_q - shape.window, *q.shape[1:]))
    last_rows = np.full(total_q, -POISON)
    for token in range(shape.window, total_q):
        # A tile of one request whose end all see, one of both, one in the middle of what there is.
        kind = (token - shape.window) // shape.tokens
        request = int(kind == 0 or generator.integers(2))
        behind = int(generator.integers(0, lengths[request])) if kind == 2 else 0
        last_rows[token] = starts[request] + lengths[request] - 1 - behind
    blocks = [
        (start + behind, min(block_size, length - behind))
        for start, length in zip(starts, lengths, strict=True)
        for behind in range(0, length, block_size)
    ]
    shared = np.full((HEADS, 2 * TILES_OF_WINDOW, len(blocks) + 1, 2), -POISON)
    shared_counts = np.full((HEADS, 2 * TILES_OF_WINDOW), -POISON)
    rest_counts = np.full((HEADS, total_q), -POISON)
    partial_out = np.full((shape.window, TOPK, HEADS * group, HEAD_DIM), np.nan)
    partial_lse = np.full((shape.window, TOPK, HEADS * group), np.nan)
    order = generator.permutation(len(tiles))
    for number in range(HEADS * TILES_OF_WINDOW):
        wanted, slots = tiles[order[number]]
        head, place = divmod(number, TILES_OF_WINDOW)
        first = shape.window + place * shape.tokens
        tokens = range(first, min(first + shape.tokens, total_q))
        masks = []
        for row, valid in blocks:
            seeing = [t for t in tokens if row <= last_rows[t] and begin(starts, row) == begin(starts, last_rows[t])]
            # Most blocks are selected by whoever sees them.
            chosen = [t for t in seeing if number % 2 or generator.random() < 0.8]
            mask = sum(1 << token - first for token in chosen)
            cut = len(chosen) < len(tokens) or any(last_rows[t] < row + block_size - 1 for t in chosen)
            if mask:
                masks.append((row, valid << VALID_SHIFT | cut * CUT | mask))
        found = generator.permutation(masks)[:wanted] if masks else []
        shared_counts[head, TILES_OF_WINDOW + place] = len(found)
        for i, entry in enumerate(found):
            shared[head, TILES_OF_WINDOW + place, i] = entry
        for token in tokens:
            count = slots[(token - first) % len(slots)]
            rest_counts[head, token] = count
            at = (token - shape.window, slice(count), slice(head * group, (head + 1) * group))
            partial_out[at] = generator.standard_normal(partial_out[at].shape)
            partial_lse[at] = 2 * generator.standard_normal(partial_lse[at].shape)
    requests = {start: tuple(padded[:, i]) for i, start in enumerate(starts)}
    return Problem(
        q, k, v, page_table, shared, shared_counts, rest_counts, last_rows, partial_out, partial_lse, requests
    )  # fmt: skip


def wanted(given: Problem, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Out and LSE of the second window; NaN before it, where nothing is written."""
    out, lse = np.full(given.q.shape, np.nan), np.full(given.q.shape[:2], np.nan)
    for token in range(shape.window, len(given.q)):
        place, bit = divmod(token, shape.tokens)
        for head in range(HEADS):
            heads = slice(head * shape.group, (head + 1) * shape.group)
            slots = slice(given.rest_counts[head, token])
            # [head, what is weighed] and [head, what is weighed, column]
            logs = [given.partial_lse[token - shape.window, slots, heads].T]
            rows = [given.partial_out[token - shape.window, slots, heads].swapaxes(0, 1)]
            for row, word in given.shared[head, place, : given.shared_counts[head, place]]:
                if word >> bit & 1:
                    start = begin(given.requests, row)
                    end = min(row + (word >> VALID_SHIFT), given.last_rows[token] + 1)
                    k, v = (keys[row - start : end - start, head] for keys in given.requests[start])
                    logs.append(given.q[token, heads] @ k.T * SCALE_LOG2 * math.log(2))
                    rows.append(np.broadcast_to(v, (shape.group, *v.shape)))
            weights = np.exp(np.concatenate(logs, axis=1))
            total = weights.sum(axis=1, keepdims=True)
            mean = np.einsum("hk,hkd->hd", weights, np.concatenate(rows, axis=1))
            out[token, heads] = np.where(total != 0, mean / np.where(total != 0, total, 1), 0)
            lse[token, heads] = np.where(total != 0, np.log(np.where(total != 0, total, 1)), -np.inf)[:, 0]
    return out, lse


def attend(
    given: Problem, shape: Shape, seed: int, num_ctas: int, source: str | None, spoilt: bool, file: Path = KERNEL
) -> tuple[np.ndarray, np.ndarray]:
    """Thread blocks one after another; none goes through its tiles twice without a reason."""
    out, lse = np.full(given.q.shape, np.nan), np.full(given.q.shape[:2], np.nan)
    for index in range(num_ctas):
        chip = Cta(index, seed + index)
        module = device_code(chip, source, file)
        scales = {"token_scales": 0} if file == DECODING else {}
        kernel = module["SharedAttention"](HEAD_DIM, shape.block_size, shape.group, shape.pages, **scales)
        flat = Guarded(given.partial_out.reshape(-1, *given.partial_out.shape[2:]), chip)
        q, k, v, page_table, shared, shared_counts, rest_counts, last_rows = (Array(tensor) for tensor in given[:8])
        stored = (types.SimpleNamespace(atom=None, rows=rows) for rows in (k, v))
        arguments = (
            None, q, *stored, None, flat, None, Guarded(out, chip), page_table, shared, shared_counts, rest_counts,
            last_rows, Guarded(given.partial_lse, chip), Guarded(lse, chip), SCALE_LOG2, 1, num_ctas,
        )  # fmt: skip
        chip.run(lambda kernel=kernel, arguments=arguments: kernel.kernel(*arguments))
        (again,) = (found.values for found in chip.allocated if isinstance(found, Array) and found.shape == (WARPS,))
        assert spoilt or (again == module["NO_TURN"]).all()
    return out, lse


def check(
    seed: int,
    shape: Shape,
    num_ctas: int = 1,
    source: str | None = None,
    tiles: Sequence[tuple[int, tuple[int, ...]]] = TILES,
    spoilt: bool = False,
    file: Path = KERNEL,
) -> None:
    given = problem(seed, shape, tiles, spoilt)
    found = attend(given, shape, seed, num_ctas, source, spoilt, file)
    if file != KERNEL:
        given = given._replace(requests={start: (k, OUT_SCALE * v) for start, (k, v) in given.requests.items()})
    with np.errstate(invalid="ignore"):
        right = wanted(given, shape)
    # What is made of an infinite value that a query sees may be NaN.
    found[0][np.isinf(right[0])] = right[0][np.isinf(right[0])] = np.nan
    for got, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "num_ctas"),
    [
        (Shape(), 1),
        (Shape(group=8), 2),
        (Shape(group=16), 7),
        (Shape(block_size=64), 1),
        (Shape(group=16, block_size=64), 4),
        (Shape(pages=2), 2),
    ],
)
@pytest.mark.drawn(1)
def test_every_row_gets_what_it_sees(shape: Shape, num_ctas: int) -> None:
    check(num_ctas, shape, num_ctas)


@pytest.mark.parametrize(
    ("shape", "num_ctas"), [(Shape(), 1), (Shape(group=8, pages=2), 2), (Shape(group=16, block_size=64), 4)]
)
@pytest.mark.drawn(1)
def test_what_a_query_may_not_see_never_reaches_it(shape: Shape, num_ctas: int) -> None:
    check(num_ctas, shape, num_ctas, spoilt=True)


@pytest.mark.parametrize(("shape", "num_ctas"), [(Shape(), 1), (Shape(group=16, block_size=64, pages=2), 3)])
@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.drawn(1)
@pytest.mark.parametrize("file", [DECODING, PACKED], ids=["e4m3", "nvfp4"])
def test_blocks_are_decoded_before_they_are_multiplied(shape: Shape, num_ctas: int, spoilt: bool, file: Path) -> None:
    check(num_ctas, shape, num_ctas, spoilt=spoilt, file=file)


@pytest.mark.planted
def test_tiles_of_one_stage_each_do_not_overtake() -> None:
    check(0, Shape(), tiles=SHORT)


SEEDS = 6
SCORED = """        warpgroup.wait_group(0)
        arrive(shared.free + used)
        if cutlass.const_expr(last):
            arrive(shared.q_free)
"""
WEIGHED = "            warpgroup.wait_group(1)\n        arrive(shared.free + held)\n"
WAIT = "cute.arch.mbarrier_wait(shared."
CONSUMED = (
    "\n            num, q_phase = self.shared_blocks(shared, entry)\n"
    "            most = shared.tiles[entry, 1]\n            numbers"
)
ANNOUNCED = "            arrive(shared.tile_full + entry)\n"
ALONE = "            if lane == 0:\n                cute.arch.mbarrier_arrive(shared.tile_full + entry)\n"
MEETING = "cute.arch.barrier(barrier_id=MEETING, number_of_threads=WARPS * WARP)\n"
DEPENDENCY = "            if turn == 0:\n                cute.arch.griddepcontrol_wait()\n"


class Fault(NamedTuple):
    """What is replaced, by what, the tiles that it shows on, and the first seed to try.

    A copy that overtakes a product has to come before everything else that could: few seeds show that.
    """

    right: str
    wrong: str
    tiles: tuple[tuple[int, tuple[int, ...]], ...] = TILES
    seed: int = 0
    spoilt: bool = False
    file: Path = KERNEL


DECODED = "            if num > 0:\n                landed, queries"
FAULTS = {
    "Q is given back before the last product is made": Fault(
        SCORED,
        "        if cutlass.const_expr(last):\n"
        "            arrive(shared.q_free)\n"
        "        warpgroup.wait_group(0)\n"
        "        arrive(shared.free + used)\n",
        DENSE,
        seed=12,
    ),
    "K is given back before its product is made": Fault(
        "        warpgroup.wait_group(0)\n        arrive(shared.free + used)\n",
        "        arrive(shared.free + used)\n        warpgroup.wait_group(0)\n",
        DENSE,
        seed=9,
    ),
    "V is given back before its product is made": Fault(
        WEIGHED + "        return stage, phase, used\n",
        "            arrive(shared.free + held)\n"
        "            warpgroup.wait_group(1)\n"
        "        if cutlass.const_expr(last):\n"
        "            arrive(shared.free + held)\n"
        "        return stage, phase, used\n",
        DENSE,
        seed=1,
    ),
    "O is read before its last product is made": Fault(
        "        if cutlass.const_expr(last):\n            warpgroup.wait_group(0)\n",
        "        if cutlass.const_expr(last):\n            pass\n",
        seed=4,
    ),
    "P is overwritten before its product is made": Fault(
        "            warpgroup.wait_group(1)\n", "            warpgroup.wait_group(2)\n", seed=26
    ),
    "staged rows are given back before they have left": Fault(
        "cute.arch.cp_async_bulk_wait_group(0, read=True)\n            if staged", "if staged", seed=4
    ),
    "the last rows have not left when the block ends": Fault(
        "wait_group(0)\n        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "wait_group(0)\n",
        spoilt=True,
    ),
    "the stage where rows are staged is given back at once": Fault(
        "            if m > 0:\n                arrive(shared.free + staged)\n            for part",
        "            arrive(shared.free + stage)\n            for part",
    ),
    "a tile is waited for with the wrong parity": Fault(
        f"(turn // TILES) & 1){CONSUMED}", f"(turn // TILES + 1) & 1){CONSUMED}"
    ),
    "a tile is not waited for": Fault(f"{WAIT}tile_full + entry, (turn // TILES) & 1){CONSUMED}", f"pass{CONSUMED}"),
    "a tile is announced before all lanes have written it": Fault(ANNOUNCED, ALONE),
    "a tile is overwritten while it is read": Fault("TILES = 4", "TILES = 3", SHORT, seed=10),
    "Q is overwritten while it is read": Fault(f"{WAIT}q_free, q_phase)", "pass", DENSE, seed=6),
    "Q is read before it came": Fault(f"{WAIT}q_full, q_phase)", "pass"),
    "V is read before it came": Fault(f"{WAIT}full + stage, phase)\n        valid", "pass\n        valid"),
    "partial results are read before they came": Fault(
        f"{WAIT}full + stage, phase)\n            for part", "pass\n            for part"
    ),
    "partial results overwrite what is read": Fault(
        f"{WAIT}free + stage, phase)\n                landing", "pass\n                landing"
    ),
    "fewer bytes of Q are expected": Fault(
        "self.queries * self.rows.token_bytes", "(self.queries - 1) * self.rows.token_bytes"
    ),
    "fewer bytes of partial results are expected": Fault("rows * self.rows.token_bytes", "rows * 64"),
    "the producer does not wait for the kernel before": Fault(DEPENDENCY + "            for m", "            for m"),
    "consumers do not wait for the kernel before": Fault(DEPENDENCY + "            own", "            own"),
    "O is not rescaled": Fault("tile.O[i] = tile.O[i] * rescale[i // 2 % 2]", "pass"),
    "what was not loaded is weighed": Fault("value = pick_float(there[half], value, Float32(0.0))", "pass"),
    "a slot counts for all rows of a warp": Fault(
        "slot >= cutlass.min(slots[0], slots[1])", "slot >= cutlass.max(slots[0], slots[1])"
    ),
    "a slot that one row lacks is left out": Fault(
        "slot < cutlass.max(slots[0], slots[1])", "slot < cutlass.min(slots[0], slots[1])"
    ),
    "rows past the end are multiplied": Fault("if valid < self.block_size:", "if valid < 0:"),
    "rows past the end are multiplied before others cleared them": Fault(
        f"WARPS * WARP)\n            {MEETING}", "WARPS * WARP)\n            pass\n"
    ),
    "queries see what they have not selected": Fault("pick((word >> numbers[half]) & 1 != 0,", "pick(True,"),
    "queries see past their last row": Fault("end - row, -1)", "999, -1)"),
    "a warp is excused from a block that one of its queries selects": Fault(
        "cutlass.max(rooms[0], rooms[1]) >= 0", "cutlass.min(rooms[0], rooms[1]) >= 0"
    ),
    "a warp masks nothing because one of its queries sees the block": Fault(
        "cutlass.min(rooms[0], rooms[1]) <", "cutlass.max(rooms[0], rooms[1]) <"
    ),
    "the words are those of another stage": Fault(
        "shared.words[used, 0], shared.words[used, 1]", "shared.words[stage, 0], shared.words[stage, 1]"
    ),
    "slots of other queries are loaded": Fault("if (present[part] >> r) & 1 != 0:", "if r >= 0:"),
    "tiles with infinite values are not taken again": Fault(
        "return cutlass.max(turns - first, 0)", "return 0", spoilt=True
    ),
    "only the last tile is taken again": Fault(
        "return cutlass.max(turns - first, 0)", "return cutlass.min(turns - first, 1)", spoilt=True
    ),
    "infinite values stay in blocks that not all queries see": Fault("word = word | SUSPECT", "pass", spoilt=True),
    "infinite values are zero for who sees them": Fault("self.taint(shared, tile, staged)", "pass", spoilt=True),
    "infinite values count as seen by who selects the block": Fault("(row + first <= end)", "(row >= 0)", spoilt=True),
    "infinite values count as seen by who has not selected the block": Fault(
        "((word >> number) & 1 != 0) & (row + first", "(row + first", spoilt=True
    ),
    "columns are tainted before all are known": Fault(
        f"what comes next.\n        {MEETING}", "what comes next.\n        pass\n", spoilt=True
    ),
    "queries are passed on before they are decoded": Fault(
        DECODED,
        "            if num > 0:\n                self.keys.pass_queries_on(shared.q_full)\n" + DECODED,
        file=DECODING,
    ),
    "queries are decoded for tiles that have none": Fault(
        DECODED, DECODED.replace("num > 0", "num >= 0"), file=DECODING
    ),
    "the powers of two of queries stay": Fault(
        "                self.keys.scale_rows(", "                (", file=DECODING
    ),
    "decoded queries are not awaited": Fault(f"{WAIT}q_full, q_phase)", "pass", file=DECODING),
    "a stage of partial results without the arrivals of scales": Fault(
        "                self.keys.skip_scales(landing)\n", "", file=PACKED
    ),
    "bytes are decoded before they come": Fault(
        "                    cute.arch.mbarrier_wait(shared.landing + stage, phase)\n                    operand",
        "                    operand",
        file=PACKED,
    ),
    "columns are forgotten while others read them": Fault(
        f"        {MEETING}        thread = ", "        thread = ", spoilt=True
    ),
}


@functools.cache
def is_right(seed: int, tiles: tuple[tuple[int, tuple[int, ...]], ...], spoilt: bool, file: Path) -> bool:
    """The kernel as it is, on what a fault shows on."""
    check(seed, Shape(), tiles=tiles, spoilt=spoilt, file=file)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.planted
def test_a_fault_shows(name: str) -> None:
    fault = FAULTS[name]
    text = fault.file.read_text()
    assert text.count(fault.right) == 1
    with pytest.raises((AssertionError, Deadlock, IndexError)):
        for seed in range(fault.seed, fault.seed + SEEDS):
            check(seed, Shape(), 1, text.replace(fault.right, fault.wrong), fault.tiles, fault.spoilt, fault.file)
    assert is_right(seed, fault.tiles, fault.spoilt, fault.file)
