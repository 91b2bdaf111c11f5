"""CuTe DSL code that warps work out together, run thread by thread on the CPU: see `lanes`."""

from __future__ import annotations

import bisect
from typing import Any

import lanes
import pytest
import torch
from lanes import Int32, Tensor
from torch import Tensor as TorchTensor

from msa_tiles import reference
from msa_tiles.runtime.registry import default_registry

ORDERS = ("ascending", "score", "local_last")
SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, -1e-45)


def kernel_of(op: str) -> Any:
    (cell,) = default_registry().select(op=op, dsl="cutedsl", target="sm90", precision="bf16")
    return lanes.load(cell.file)


def int32(*values: int) -> Tensor:
    return lanes.tensor_of(torch.tensor(values, dtype=torch.int32))


def scores_of(kind: str, shape: tuple[int, ...]) -> TorchTensor:
    """Scores of one kind: spread, hardly different, the same, rising, special values among few, or nearly all NaN."""
    generator = torch.Generator().manual_seed(len(kind))
    few = torch.randint(-2, 3, shape, generator=generator).float()
    if kind == "special":
        for value in SPECIAL:
            few = few.masked_fill(torch.rand(shape, generator=generator) < 0.15, value)
    nearly_nan = torch.where(torch.rand(shape, generator=generator) < 0.995, torch.nan, few)
    return {
        "normal": torch.randn(shape, generator=generator),
        "ties": few,
        "special": few,
        "equal": torch.zeros(shape),
        "rising": torch.arange(shape[-1]).float().expand(shape).clone(),
        "minus_infinity": torch.full(shape, -torch.inf),
        "nearly_nan": nearly_nan,
    }[kind]


def chosen(op: str, score: TorchTensor, valid: TorchTensor, k: int, order: int, init: int, local: int) -> TorchTensor:
    """The ids [1, T, k] that a kernel chooses for one KV head."""
    module = kernel_of(op)
    heads, total_q, _ = score.shape
    out = lanes.tensor_of(torch.full((1, total_q, k), -9, dtype=torch.int32))
    starts = int32(0, total_q)
    numbers = [0, 0, 2, 0, 128, init, local, order, heads]
    if op == "topk_select":
        capacity = next(size for size in (8, 16, 32, 64) if k <= size)
        kernel, rows = module.TopkSelect(capacity), 2
        grid, numbers = (-(-total_q // (module.WARPS * rows)), 1, 1), [*numbers, rows]
    else:
        kernel, grid = module.DecodeTopk(8192), (total_q, 1, 1)
    tensors = (lanes.tensor_of(score), starts, starts, starts, starts, lanes.tensor_of(valid), out)
    lanes.launch(kernel.kernel, (*tensors, *map(Int32, numbers)), grid, kernel.cta.threads)
    return torch.tensor([int(block) for block in out.memory], dtype=torch.int32).view(1, total_q, k)


SHORT_LISTS = [
    ("normal", 1, 2100, 16, 0, 0, 1),
    ("special", 2, 1061, 16, 1, 1, 2),
    ("ties", 1, 1024, 8, 2, 2, 3),
    ("nearly_nan", 3, 1030, 5, 1, 0, 1),
    ("normal", 1, 1500, 7, 1, 9, 2),
]
LONG_LISTS = [
    ("equal", 1, 1400, 64, 0, 0, 1),
    ("rising", 1, 1100, 33, 1, 0, 0),
    ("minus_infinity", 1, 1057, 32, 0, 0, 1),
    ("special", 1, 40, 64, 2, 3, 4),
]


@pytest.mark.parametrize(
    ("op", "case"),
    [
        *(("topk_select", case) for case in SHORT_LISTS + LONG_LISTS),
        *(("decode_topk", case) for case in SHORT_LISTS),
        # Every warp of a CTA sorts long lists, whatever the row holds.
        *(pytest.param("decode_topk", case, marks=pytest.mark.slow) for case in LONG_LISTS),
    ],
)
@pytest.mark.drawn(1)
def test_the_best_blocks(op: str, case: tuple[str, int, int, int, int, int, int]) -> None:
    kind, heads, blocks, k, order, init, local = case
    score = scores_of(kind, (heads, 3, blocks))
    valid = torch.tensor([blocks, 0, blocks - 31], dtype=torch.int32)
    got = chosen(op, score, valid, k, order, init, local)
    forced = {"init_blocks": init, "local_blocks": local, "order": ORDERS[order]}
    assert torch.equal(got, reference.topk_select(score, k, num_kv_heads=1, num_valid_blocks=valid, **forced))


@pytest.mark.slow  # beside it, test_the_threshold
def test_the_longest_row() -> None:
    score = scores_of("special", (1, 1, 16384))
    valid = torch.tensor([16384], dtype=torch.int32)
    for op in ("topk_select", "decode_topk"):
        got = chosen(op, score, valid, 16, 0, 0, 1)
        assert torch.equal(got, reference.topk_select(score, 16, num_valid_blocks=valid))


@pytest.mark.parametrize(
    ("kind", "heads", "blocks", "k", "few", "threads"),
    [
        ("normal", 1, 1000, 16, True, 256),
        ("normal", 3, 1024, 64, True, 256),
        ("special", 2, 1024, 64, False, 256),
        ("equal", 1, 1000, 16, False, 256),
        ("nearly_nan", 1, 1024, 64, False, 256),
        ("ties", 1, 5, 16, True, 256),
        ("special", 1, 16, 16, True, 256),
        ("equal", 1, 256, 40, True, 256),
        ("normal", 1, 257, 9, True, 256),
        ("normal", 1, 0, 4, True, 256),
        ("normal", 3, 1024, 64, True, 384),
        ("equal", 1, 1000, 16, False, 384),
        ("special", 2, 1024, 64, False, 384),
    ],
)
@pytest.mark.drawn(2)
def test_the_threshold(kind: str, heads: int, blocks: int, k: int, few: bool, threads: int) -> None:
    """Every split of a row works on its share of this list, so its order is settled too: as ranked where few blocks
    reach the mark, else by thread, then by block.
    """
    threshold = lanes.helper("threshold")
    width = 1024
    score = scores_of(kind, (heads, 1, width))
    listed, row = [], lanes.tensor_of(torch.full((k,), -9, dtype=torch.int32))
    tensor = lanes.tensor_of(score)

    def choose() -> None:
        memory = lanes.Allocator()
        best = threshold.Best(
            *(memory.allocate_tensor(Int32, shape) for shape in ((threads // 32, 2, 2), (threads, 2), (64,)))
        )
        read = lanes.empty(-(-width // threads))
        read.fill(lanes.Float32.nan)
        source = threshold.Row(tensor, Int32(0), Int32(heads), Int32(0))
        threshold.read_scores(source, Int32(blocks), read, threads)
        keys = threshold.keys_of(read, Int32(blocks), Int32(1), Int32(2), threads)
        wanted = min(k, blocks)
        threshold.list_best(keys, Int32(wanted), Int32(blocks), best, threads)
        thread = lanes.thread()
        threshold.write_row(best, Int32(thread), Int32(wanted), row)
        if thread == 0:
            listed.extend(int(best.ids[i]) for i in range(wanted))

    lanes.launch(choose, (), (1,), threads)
    valid = torch.tensor([blocks], dtype=torch.int32)
    wanted, ranked = (
        reference.topk_select(
            score, k, num_kv_heads=1, num_valid_blocks=valid, init_blocks=1, local_blocks=2, order=order
        ).flatten()
        for order in ("ascending", "score")
    )
    assert [int(block) for block in row.memory] == wanted.tolist()
    by_thread = sorted(wanted[wanted >= 0].tolist(), key=lambda block: (block % threads, block))
    assert listed == (ranked[ranked >= 0].tolist() if few else by_thread)


@pytest.mark.parametrize("requests", [1, 3, 40, 70])
@pytest.mark.parametrize("ctas", [1, 7, 66])
@pytest.mark.drawn(1)
def test_decode_score_shares_out_every_block(requests: int, ctas: int) -> None:
    """Runs differ by one unit at most; together they hold each block of each tile of each request once, in order."""
    module = kernel_of("decode_score")
    kernel = module.DecodeScore.__new__(module.DecodeScore)
    kernel.block_size = 64
    generator = torch.Generator().manual_seed(requests)
    queries = torch.randint(0, 4, (requests,), generator=generator) * torch.randint(
        1, 12, (requests,), generator=generator
    )
    keys = torch.randint(0, 3, (requests,), generator=generator) * torch.randint(
        1, 200, (requests,), generator=generator
    )
    starts_q, starts_k = ([0, *lengths.cumsum(0).tolist()] for lengths in (queries, keys))
    tile_queries, max_blocks = 16, 5
    lengths = module.Lengths(
        int32(*starts_q), int32(*starts_k), int32(*starts_k), Int32(0), Int32(tile_queries), Int32(max_blocks)
    )
    units: list[tuple[int, int, int]] = []
    shares: list[int] = []

    def walk() -> None:
        left, request, tile, first, length, tiles, blocks = kernel.find_run(lengths)
        if lanes.thread() == 0:
            shares.append(int(left))
        while left > 0:
            taken = min(left, blocks - first)
            if lanes.thread() == 0:
                units.extend((int(request), int(tile), block) for block in range(first, first + taken))
                assert length == keys[request]
            left, first = left - taken, Int32(0)
            request, tile, length, tiles, blocks = kernel.advance(lengths, left, request, tile, length, tiles, blocks)

    lanes.launch(walk, (), (ctas,), 32)
    assert units == [
        (request, tile, block)
        for request in range(requests)
        for tile in range(-(-int(queries[request]) // tile_queries))
        for block in range(min(-(-int(keys[request]) // kernel.block_size), max_blocks))
    ]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("requests", [1, 2, 31, 32, 33, 1024, 1100])
def test_a_warp_finds_the_request_of_a_token(requests: int) -> None:
    generator = torch.Generator().manual_seed(requests)
    starts = [0, *torch.randint(0, 3, (requests,), generator=generator).cumsum(0).tolist()]
    tokens = torch.randint(0, starts[-1] + 2, (20,), generator=generator).tolist()
    tensor = int32(*starts)
    found: list[list[int]] = []

    def find() -> None:
        answers = [int(lanes.helper("warp").request_of(tensor, Int32(token))) for token in tokens]
        found.append(answers)

    lanes.launch(find, (), (1,), 32)
    assert found == [[max(bisect.bisect_right(starts[:-1], token) - 1, 0) for token in tokens]] * 32


@pytest.mark.planted
def test_faults_do_not_pass() -> None:
    """Divergence, a barrier that some never reach, reads of nothing, and indices out of bounds."""
    warp = lanes.helper("warp")
    tensor = int32(1, 2, 3)

    def diverge() -> None:
        if lanes.thread() < 5:
            warp.ballot(True)
        else:
            warp.inclusive_sum(Int32(1), Int32(lanes.thread()))

    def leave() -> None:
        if lanes.thread() < 5:
            warp.ballot(True)

    for faulty, match in (
        (diverge, "threads that meet ask for"),
        (leave, "never come"),
        (lambda: lanes.empty(2)[0], "never written"),
        (lambda: tensor[3], "outside"),
        (lambda: tensor[-1], "outside"),
    ):
        with pytest.raises((RuntimeError, IndexError), match=match):
            lanes.launch(faulty, (), (1,), 32)


BARRIERS = {
    "none": lambda: None,
    "a vote": lambda: lanes.ARCH.vote_any_sync(True),
    "of the warp": lanes.ARCH.sync_warp,
    "of all": lanes.ARCH.sync_threads,
}


@pytest.mark.parametrize("barrier", BARRIERS)
@pytest.mark.parametrize(("distance", "orders"), [(1, {"of the warp", "of all"}), (32, {"of all"})])
@pytest.mark.parametrize("access", ["read after write", "write after read", "write after write"])
def test_what_no_barrier_orders_is_an_error(barrier: str, distance: int, orders: set[str], access: str) -> None:
    """Every thread touches its own element first, then that of another thread."""

    def touch() -> None:
        values = lanes.Allocator().allocate_tensor(Int32, 64)
        own = lanes.thread()
        other = (own ^ distance) % 64
        values[own] = Int32(own)
        lanes.ARCH.sync_threads()
        if access == "write after read":
            _ = values[own]
        else:
            values[own] = Int32(own + 100)
        BARRIERS[barrier]()
        if access == "read after write":
            _ = values[other]
        else:
            values[other] = Int32(7 + own)

    if barrier in orders:
        lanes.launch(touch, (), (1,), 64)
    else:
        with pytest.raises(RuntimeError, match="meanwhile"):
            lanes.launch(touch, (), (1,), 64)


def test_threads_may_write_the_same_at_the_same_time() -> None:
    def touch() -> None:
        lanes.Allocator().allocate_tensor(Int32, 1)[0] = Int32(5)

    lanes.launch(touch, (), (1,), 64)
