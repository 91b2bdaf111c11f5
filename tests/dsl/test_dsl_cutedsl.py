"""Device helpers of CuTe DSL kernels, and the arithmetic of their schedules, as host code on CPU tensors.

The DSL compiles a function for the CPU too, as long as it asks for no thread, warp or barrier.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass", reason="needs the extra `cutedsl`")

import cutlass.utils.hopper_helpers as hopper  # noqa: E402
from cutlass import BFloat16, Boolean, Float32, Int32, cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402
from cutlass.tensor_utils import LayoutEnum  # noqa: E402

from msa_tiles import reference  # noqa: E402
from msa_tiles.dsl.cutedsl import candidate_queue, gradients, maxima, topk, varlen, warp  # noqa: E402
from msa_tiles.dsl.cutedsl.gather import Rows  # noqa: E402
from msa_tiles.runtime.registry import default_registry  # noqa: E402

CAPACITY = 8
ORDERS = ("ascending", "score", "local_last")


def run(function: Any, *arguments: Any) -> None:
    function(*(from_dlpack(value) if isinstance(value, Tensor) else value for value in arguments))


def int32(*shape: int, fill: int = -7) -> Tensor:
    return torch.full(shape, fill, dtype=torch.int32)


def kernel_of(op: str, **variant: int) -> tuple[Any, Any]:
    """A generated kernel object of one variant, and its module."""
    (cell,) = default_registry().select(op=op, dsl="cutedsl", target="sm90", precision="bf16")
    entry, _ = cell.function(**variant)
    return entry, sys.modules[cell.function.__module__]


@cute.jit
def order_keys(scores: cute.Tensor, keys: cute.Tensor):
    for i in cutlass.range(cute.size(scores)):
        keys[i] = topk.order_key(scores[i])


def test_keys_order_as_scores_do() -> None:
    scores = torch.tensor([torch.nan, -torch.inf, -3e38, -1.5, -1e-45, 0.0, 1e-45, 1.5, 3e38, torch.inf])
    keys, zeros = int32(len(scores)), int32(2)
    run(order_keys, scores, keys)
    run(order_keys, torch.tensor([0.0, -0.0]), zeros)
    assert bool((keys.diff() > 0).all()), "NaN first, then ascending"
    assert zeros.tolist() == [int(keys[5])] * 2
    assert int(keys[0]) > topk.EMPTY and int(keys[-1]) < topk.LOCAL_KEY < topk.INIT_KEY


@cute.jit
def rank(scores: cute.Tensor, valid: cute.Tensor, out: cute.Tensor, init: Int32, local: Int32, order: Int32):
    for row in cutlass.range(scores.shape[0]):
        keys = cute.make_rmem_tensor(CAPACITY, Int32)
        ids = cute.make_rmem_tensor(CAPACITY, Int32)
        topk.clear(keys, ids)
        for block in cutlass.range(valid[row]):
            key = topk.order_key(scores[row, block])
            topk.insert(keys, ids, topk.forced_key(key, block, valid[row], init, local), block)
        topk.emit(keys, ids, valid[row], Int32(out.shape[1]), order, out[row, None])


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize(("k", "init", "local"), [(8, 0, 1), (5, 1, 2), (3, 4, 4), (1, 0, 0)])
@pytest.mark.drawn(3)
def test_a_list_holds_the_best(order: int, k: int, init: int, local: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 4, (200, 23), generator=generator).float()
    for value in (torch.nan, torch.inf, -torch.inf):
        scores[torch.rand(scores.shape, generator=generator) < 0.05] = value
    valid = torch.randint(0, 24, (200,), generator=generator).to(torch.int32)
    out = int32(200, k)
    run(rank, scores, valid, out, init, local, order)
    forced = {"init_blocks": init, "local_blocks": local, "order": ORDERS[order]}
    assert torch.equal(out, reference.topk_select(scores[None], k, num_valid_blocks=valid, **forced)[0])


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps of one lane, which is all that a CPU has, and the GPU's maximum, which ignores NaN."""

    def fmax(a: Float32, b: Float32) -> Float32:
        b_is_nan = (Float32(b).bitcast(Int32) & 0x7FFFFFFF) > topk.INFINITY_BITS
        return Float32(cutlass.select_((Float32(a) >= b) | b_is_nan, Float32(a), Float32(b)))

    monkeypatch.setattr(cute.arch, "fmax", fmax)
    for name in ("vote_any_sync", "vote_all_sync"):
        monkeypatch.setattr(cute.arch, name, Boolean)


@cute.jit
def rank_candidates(
    scores: cute.Tensor, valid: cute.Tensor, out: cute.Tensor, positive: cute.Tensor, queue: cute.Tensor, init: Int32,
    local: Int32, order: Int32, capacity: cutlass.Constexpr,
):  # fmt: skip
    for i in cutlass.range(scores.shape[0]):
        row = candidate_queue.Candidates(queue, capacity, valid[i], init, local)
        candidate_queue.start(row)
        for block in cutlass.range(scores.shape[1]):
            candidate_queue.offer(row, scores[i, block], block)
        candidate_queue.settle(row)
        positive[i] = row.positive[0]
        topk.emit(row.keys, row.ids, valid[i], Int32(out.shape[1]), order, out[i, None])


def test_a_sorting_network_sorts() -> None:
    # It does so with everything if it does with zeros and ones.
    for size in (2, 4, 8, 16):
        pairs = candidate_queue.exchanges(size)
        for entries in map(list, itertools.product((0, 1), repeat=size)):
            for upper, lower in pairs:
                if entries[lower] > entries[upper]:
                    entries[upper], entries[lower] = entries[lower], entries[upper]
            assert entries == sorted(entries, reverse=True)


@pytest.mark.parametrize(
    ("k", "init", "local", "order", "capacity"),
    [(8, 0, 1, 0, 8), (5, 1, 2, 1, 8), (3, 4, 4, 2, 8), (1, 0, 0, 0, 8), (8, 20, 9, 1, 8), (16, 1, 2, 1, 16),
     (29, 0, 1, 0, 32)],
)  # fmt: skip
@pytest.mark.drawn(1)
def test_a_list_behind_a_queue_holds_the_best(
    one_lane: None, k: int, init: int, local: int, order: int, capacity: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 4, (200, 61), generator=generator).float()
    scores[::2] -= 2
    for value in (torch.inf, -torch.inf, -0.0):
        scores[torch.rand(scores.shape, generator=generator) < 0.05] = value
    valid = torch.randint(0, 62, (200,), generator=generator).to(torch.int32)
    out, positive = int32(200, k), int32(200)
    queue = torch.full((candidate_queue.WAITING,), -1, dtype=torch.int64)
    # Blocks past the valid ones are offered too, as a tile's other rows may see them.
    run(rank_candidates, scores, valid, out, positive, queue, init, local, order, capacity)
    forced = {"init_blocks": init, "local_blocks": local, "order": ORDERS[order]}
    assert torch.equal(out, reference.topk_select(scores[None], k, num_valid_blocks=valid, **forced)[0])
    # Bounds above 0 are those of full lists whose last score is not negative.
    full = reference.topk_select(scores[None], capacity, num_valid_blocks=valid, **forced)[0].long()
    blocks = torch.arange(61)
    is_forced = (blocks < init) | (blocks >= valid[:, None] - local)
    ranked = scores.masked_fill(is_forced, torch.inf).gather(1, full.clamp(min=0))
    assert torch.equal(positive.bool(), ((full >= 0) & (ranked >= 0)).all(1))


@cute.jit
def tile_maxima(
    tiles: cute.Tensor, factors: cute.Tensor, limits: cute.Tensor, out: cute.Tensor, scaled: cutlass.Constexpr,
    cut: Int32, positive: Int32,
):  # fmt: skip
    """The four lanes of two rows, one after the other: out [tile, lane, row]."""
    scores = cute.make_rmem_tensor(cute.make_layout(((2, 2, 16), 1, 1), stride=((1, 2, 4), 0, 0)), Float32)
    for i in cutlass.range(tiles.shape[0]):
        for lane in cutlass.range(4):
            for number in cutlass.range_constexpr(64):
                column = number // 4 * 8 + lane * 2 + number % 2
                scores[(number % 2, number // 2 % 2, number // 4), 0, 0] = tiles[i, number // 2 % 2, column]
            found = maxima.tile_maxima(
                scores, factors if cutlass.const_expr(scaled) else None, limits[i, None], Int32(0), cut != 0,
                positive, lane,
            )  # fmt: skip
            for half in cutlass.range_constexpr(2):
                out[i, lane, half] = found[half]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("cut", "positive"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.drawn(2)
def test_maxima_of_a_tile(one_lane: None, scaled: bool, cut: int, positive: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randn(60, 2, 128, generator=generator)
    tiles[::3] -= 3
    tiles[10:13] = -tiles[10:13].abs()
    for value in (torch.nan, torch.inf, -torch.inf, -0.0, 0.0):
        tiles[30:][torch.rand(30, 2, 128, generator=generator) < 0.1] = value
    tiles[50, 0] = torch.nan
    factors = torch.rand(128, generator=generator) + 0.5
    limits = torch.randint(-2, 130, (60, 2), generator=generator).to(torch.int32)
    out = torch.full((60, 4, 2), torch.nan)
    run(tile_maxima, tiles, factors, limits, out, scaled, cut, positive)
    products = tiles * factors if scaled else tiles
    wanted = products.masked_fill(products.isnan(), -torch.inf)
    if cut:
        wanted[torch.arange(128) > limits[..., None]] = -torch.inf
    wanted = wanted.unflatten(-1, (16, 4, 2)).amax((-3, -1)).transpose(1, 2)
    if positive and not cut:
        inexact = (wanted < 0) & ~products.unflatten(-1, (16, 4, 2)).isnan().any(1).any(1).any(-1)[..., None]
        assert bool(inexact.any()) and bool((out[inexact] < 0).all())
        out, wanted = out.masked_fill(inexact, 0), wanted.masked_fill(inexact, 0)
    assert torch.equal(out, wanted)


def test_every_row_has_a_lane() -> None:
    @cute.jit
    def places(out: cute.Tensor):
        for thread in cutlass.range(128):
            out[thread] = maxima.place_of_lane(thread // 32, thread % 32)

    out = int32(128)
    run(places, out)
    assert sorted(out.tolist()) == list(range(128))


def test_bits_below() -> None:
    @cute.jit
    def masks(counts: cute.Tensor, out: cute.Tensor):
        for i in cutlass.range(cute.size(counts)):
            out[i] = warp.bits_below(counts[i])

    counts = torch.tensor([-(2**31), -1, 0, 1, 5, 31, 32, 33, 2**31 - 1], dtype=torch.int32)
    out = int32(len(counts))
    run(masks, counts, out)
    wanted = [0, 0, 0, 1, 31, 2**31 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1]
    assert [mask % 2**32 for mask in out.tolist()] == wanted


@cute.jit
def owners(starts: cute.Tensor, values: cute.Tensor, requests: cute.Tensor, slots: cute.Tensor):
    for i in cutlass.range(cute.size(values)):
        requests[i] = varlen.last_at_most(starts, values[i])
        slots[i] = varlen.last_tile_at_most(starts, 64, values[i])


def test_requests_are_found_by_token_and_by_tile() -> None:
    lengths = [0, 3, 0, 0, 200, 64, 1, 0, 127]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    values = torch.arange(int(starts[-1]), dtype=torch.int32)
    requests, slots = int32(len(values)), int32(len(values))
    run(owners, starts, values, requests, slots)
    assert requests.tolist() == [request for request, length in enumerate(lengths) for _ in range(length)]
    first_slots = starts // 64 + torch.arange(len(starts))
    for request, length in enumerate(lengths):
        mine = (slots == request).nonzero()[:, 0]
        assert int(mine.min()) == int(first_slots[request])
        assert len(mine) >= -(-length // 64), "a request has a slot for each of its tiles"


def test_a_schedule_places_every_edge_and_cuts_long_blocks() -> None:
    """What stands between the two walks of build_schedule: the counts of every warp become places and tasks."""
    block_size = 64
    kernel, module = kernel_of("build_schedule", block_size=block_size)
    warps, blocks, per_thread = module.WARPS, module.BLOCKS, module.PER_THREAD
    threads = blocks // per_thread
    generator = torch.Generator().manual_seed(0)
    lengths_k = torch.tensor([0, 20000, 0, 5, 9000, 64])
    starts_k = torch.tensor([0, *lengths_k]).cumsum(0).to(torch.int32)
    first_blocks = starts_k // block_size + torch.arange(len(starts_k), dtype=torch.int32)
    low, number = 11, int(first_blocks[-2] + 1) - 11
    # Numbers between two requests belong to no block.
    real = torch.zeros(number, dtype=torch.bool)
    for request, length in enumerate(lengths_k.tolist()):
        first = int(first_blocks[request]) - low
        real[max(first, 0) : max(first + -(-length // block_size), 0)] = True
    counted = torch.randint(0, 60, (warps, number), generator=generator).to(torch.int32)
    counted *= (torch.rand(number, generator=generator) < 0.5) & real
    counters = int32(warps, blocks, fill=12345)
    counters[:, :number] = counted
    cut = torch.randint(0, 2, (blocks,), generator=generator).to(torch.int32)
    tasks, totals = int32(4096, 4), int32(threads, 2)

    @cute.jit
    def place(counters: cute.Tensor, cut: cute.Tensor, tasks: cute.Tensor, starts: cute.Tensor, totals: cute.Tensor):
        lengths = module.Lengths(starts, starts, starts, starts, Int32(0), Int32(0))
        edge_at, task_at = Int32(0), Int32(0)
        for thread in cutlass.range(threads):
            parts, edge_sum, task_sum = kernel.total(counters, thread, Int32(number))
            requests = Int32(cute.size(starts)) - 1
            kernel.place(counters, cut, parts, tasks, lengths, requests, thread, Int32(low), edge_at, task_at)
            totals[thread, 0] = edge_sum
            totals[thread, 1] = task_sum
            edge_at = edge_at + edge_sum
            task_at = task_at + task_sum

    run(place, counters.view(warps, threads, per_thread), cut.view(threads, per_thread), tasks, starts_k, totals)
    # Places: block after block, in it warp after warp.
    wanted = (counted.T.flatten().cumsum(0) - counted.T.flatten()).view(number, warps).T
    assert torch.equal(counters[:, :number].long(), wanted)
    sums = counted.sum(0)
    assert int(totals[:, 0].sum()) == int(sums.sum())
    at = 0
    for block in sums.nonzero()[:, 0].tolist():
        request = int((first_blocks <= low + block).nonzero()[-1])
        row = (low + block - int(first_blocks[request])) * block_size
        valid = min(block_size, int(lengths_k[request]) - row)
        edge, left = int(wanted[0, block]), int(sums[block])
        pieces = -(-left // module.CHUNK)
        sizes = []
        for _ in range(pieces):
            start, first, size, extent = tasks[at].tolist()
            assert (start, first, extent) == (int(starts_k[request]) + row, edge, valid * 2 + int(cut[block]))
            assert 0 < size <= module.CHUNK
            edge, left, at = edge + size, left - size, at + 1
            sizes.append(size)
        assert left == 0 and max(sizes) - min(sizes) < 8 * pieces
    assert at == int(totals[:, 1].sum()) and tasks[at].tolist() == [-7] * 4


@cute.jit
def places(layout: cutlass.Constexpr, out: cute.Tensor):
    """Where a layout has its elements [row, column, tile]."""
    for row in cutlass.range(out.shape[0]):
        for column in cutlass.range(out.shape[1]):
            for tile in cutlass.range(out.shape[2]):
                out[row, column, tile] = layout((row, column, tile))


@cute.jit
def tile_places(
    gathered: cute.Tensor, transposed_gathered: cute.Tensor, keys: cute.Tensor, transposed_keys: cute.Tensor,
    scores: cute.Tensor, transposed_scores: cute.Tensor, boxes: cute.Tensor, head_dim: cutlass.Constexpr,
    block_size: cutlass.Constexpr, group: cutlass.Constexpr,
):  # fmt: skip
    """Gathered rows, keys and the gradients of scores, each by rows and by columns; boxes of partial results."""
    rows, panels = Rows(BFloat16, head_dim, group), gradients.Panels(BFloat16, head_dim, group)
    tiler = (64, block_size, head_dim)
    places(rows.tiles_layout(3).outer, gathered)
    places(gradients.transposed_layout(BFloat16, head_dim, 64, 3, False).outer, transposed_gathered)
    places(hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, 1).outer, keys)
    places(gradients.transposed_layout(BFloat16, head_dim, block_size, 1, True).outer, transposed_keys)
    places(panels.tiles_layout(2 * block_size // 64).outer, scores)
    places(gradients.transposed_layout(BFloat16, 64, block_size, 2, False).outer, transposed_scores)
    shape, stride = panels.boxes_layout(2)
    box = cute.make_layout(shape, stride=stride)
    for token in cutlass.range(boxes.shape[0]):
        for head in cutlass.range(group):
            for column in cutlass.range(64):
                place = (head % panels.box[0], column, 0, head // panels.box[0], token, 1)
                boxes[token, head, column] = box(place)


@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(128, 128, 16), (128, 64, 8), (64, 128, 4), (64, 64, 1)])
@pytest.mark.drawn(2)
def test_tiles_are_read_by_rows_and_by_columns(head_dim: int, block_size: int, group: int) -> None:
    consumers, tokens = block_size // 64, 64 // max(group, 8)
    gathered, transposed_gathered = int32(64, head_dim, 3), int32(head_dim, 64, 3)
    keys, transposed_keys = int32(block_size, head_dim, 1), int32(head_dim, block_size, 1)
    scores, transposed_scores = int32(64, 64, 2 * consumers), int32(64, block_size, 2)
    boxes = int32(tokens, group, 64)
    tensors = (gathered, transposed_gathered, keys, transposed_keys, scores, transposed_scores, boxes)
    run(tile_places, *tensors, head_dim, block_size, group)
    assert len(gathered.unique()) == gathered.numel() and torch.equal(gathered, transposed_gathered.transpose(0, 1))
    assert len(keys.unique()) == keys.numel() and torch.equal(keys, transposed_keys.transpose(0, 1))
    # The keys of a consumer are a tile of their own, [key, row, buffer and consumer].
    of_consumers = scores.unflatten(2, (2, consumers)).permute(1, 3, 0, 2).flatten(1, 2)
    assert len(scores.unique()) == scores.numel() and torch.equal(of_consumers, transposed_scores)
    assert torch.equal(boxes, scores[..., 1].unflatten(0, (tokens, -1))[:, :group])
