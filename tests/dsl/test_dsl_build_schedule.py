"""build_schedule in CuTe DSL, run thread by thread on the CPU: see `lanes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lanes
import pytest
import torch
from lanes import Int32
from torch import Tensor

from msa_tiles.call import contents
from msa_tiles.call.schedule import WindowSchedule
from msa_tiles.call.where import Where
from msa_tiles.paths import generated_dir
from msa_tiles.reference.batch import read_batch

KERNEL = generated_dir() / "cutedsl/sm90/build_schedule_bf16.py"
POISON = -77
WILD = (2**31 - 1, -(2**31), -2, 1 << 26)
# As many warps as the kernel has would only take longer.
SMALLER = (("WARPS = 16", "WARPS = 2"), ("BLOCKS = 2048", "BLOCKS = 128"), ("CHUNK = 128", "CHUNK = 16"))
CHUNK = 16


class Garbage(lanes.Allocator):
    """Shared memory that holds anything: counters past a window's last block are read, and left out afterwards."""

    unwritten = Int32(12345)


@dataclass
class Call:
    """Requests of (queries, keys) and how their queries' ids are drawn and laid out."""

    requests: Sequence[tuple[int, int]]
    topk: int
    window: int
    block_size: int = 64
    heads: int = 1
    seed: int = 0
    behind: int = 0  # queries past the last request
    positions: bool = False
    shortened: bool = False  # requests use a part of their keys
    strides: tuple[int, int, int] = (0, 1, 2)  # the dimensions in memory, from the slowest to the fastest

    def __post_init__(self) -> None:
        chance = torch.Generator().manual_seed(self.seed)
        queries, keys = (torch.tensor(lengths) for lengths in zip(*self.requests, strict=True))
        starts = (torch.cat([torch.zeros(1), lengths.cumsum(0)]).int() for lengths in (queries, keys))
        self.where = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        used = keys - keys // 3 if self.shortened else keys
        if self.shortened:
            self.where["seqused_k"] = used.int()
        of = torch.repeat_interleave(torch.arange(len(self.requests)), queries)
        keys_of = torch.cat([used[of], torch.full((self.behind,), 300)])
        if self.positions:
            self.where["q_positions"] = (torch.rand(len(keys_of), generator=chance) * (keys_of + 20)).int() - 3
        self.ids = torch.full((self.heads, len(keys_of), self.topk), -1, dtype=torch.int32)
        for row, length in zip(self.ids.flatten(0, 1), keys_of.tolist() * self.heads, strict=True):
            blocks = -(-length // self.block_size)
            # A block too many is there now and then; half of the rows crowd on few blocks.
            drawn = torch.randperm(blocks + 1, generator=chance)
            if torch.rand((), generator=chance) < 0.5:
                drawn = torch.cat([drawn[drawn < 5], drawn[drawn >= 5]])
            drawn = drawn[: self.topk]
            row[: len(drawn)] = drawn[torch.randperm(len(drawn), generator=chance)].int()
            for slot in torch.randint(self.topk, (self.topk // 6,), generator=chance).tolist():
                row[slot] = WILD[int(torch.randint(len(WILD), (), generator=chance))]
        self.longest = int(keys.max())
        self.blocks = int((-(-keys // self.block_size)).sum())


def schedule(call: Call, file: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Edges, tasks and counts of a kernel that is made smaller by `SMALLER`."""
    module = lanes.load(file)
    module.__dict__["SmemAllocator"] = Garbage
    heads, total_q, topk = call.ids.shape
    ids = lanes.laid_out(call.ids, call.strides)
    lengths = lanes.lengths_of(module, call.where)
    windows, most = -(-total_q // call.window), call.window * topk
    tasks = min(most, call.blocks) + most // CHUNK
    shapes = ((windows, heads, most), (windows, heads, tasks, 4), (windows, heads))
    outputs = [lanes.tensor_of(torch.full(shape, POISON, dtype=torch.int32)) for shape in shapes]
    kernel = module.BuildSchedule(call.block_size)
    grid = (windows, heads, int(kernel.parts(*outputs[:2])))
    lanes.launch(kernel.kernel, (ids, lengths, *outputs, Int32(call.window)), grid, kernel.cta.threads)
    return tuple(torch.tensor([int(x) for x in out.memory]).int().view(out.shape) for out in outputs)


def wanted(call: Call, window: int, head: int) -> list[tuple[int, list[int], int, bool]]:
    """Of each block that the window's queries see, in order: its row, its edges, its valid rows, and whether it is cut.

    Edges stand in the order of the queries, those of one block being of different queries.
    """
    batch = read_batch(call.ids.shape[1], call.ids.device, **call.where)
    first = window * call.window
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for query in range(first, min(first + call.window, call.ids.shape[1])):
        request, limit = int(batch.request[query]), int(batch.limit[query])
        for slot, block in enumerate(call.ids[head, query].tolist()):
            if request >= 0 and 0 <= block * call.block_size <= limit:
                visible = min(limit - block * call.block_size, call.block_size - 1)
                found.setdefault((request, block), []).append((query - first, slot, visible))
    blocks = []
    for (request, block), edges in sorted(found.items()):
        row = block * call.block_size
        valid = min(batch.requests[request].key_end - row, call.block_size)
        cut = any(visible < call.block_size - 1 for _, _, visible in edges)
        words = [query << 13 | slot << 7 | visible for query, slot, visible in edges]
        blocks.append((int(call.where["cu_seqlens_k"][request]) + row, words, valid, cut))
    return blocks


def check(call: Call, file: Path) -> None:
    edges, tasks, counts = schedule(call, file)
    for window in range(counts.shape[0]):
        for head in range(counts.shape[1]):
            number = int(counts[window, head])
            assert 0 <= number <= tasks.shape[2]
            left = tasks[window, head, :number].tolist()
            at = 0
            for row, words, valid, cut in wanted(call, window, head):
                got: list[int] = []
                sizes = []
                while len(got) < len(words):
                    start, first, size, extent = left.pop(0)
                    assert (start, extent) == (row, valid * 2 + cut)
                    # Rows longer than a warp are taken in parts, several queries at a time.
                    assert first == at and 0 < size <= CHUNK
                    got += edges[window, head, first : first + size].tolist()
                    sizes.append(size)
                    at += size
                assert (sorted(got) if call.topk > lanes.WARP else got) == words
                assert all(size % 8 == 0 for size in sizes[:-1])
            assert not left
            assert (edges[window, head, at:] == POISON).all() and (tasks[window, head, number:] == POISON).all()


RAGGED = ((3, 300), (0, 90), (1, 700), (6, 640), (0, 0), (5, 3), (9, 1100))
CALLS = {
    "one_token": Call([(1, 1)], 1, 128),
    "short_rows": Call([(40, 1900), (37, 1500)], 5, 128, heads=2, seed=1),
    "half_a_warp": Call([(70, 3000)], 16, 40, seed=2, positions=True),
    "more_than_half": Call([(33, 2500), (4, 100)], 17, 128, seed=3, strides=(1, 2, 0)),
    "long_rows": Call([(21, 9000), (5, 3000), (4, 70)], 40, 128, seed=4),
    "ragged": Call(RAGGED, 5, 9, heads=2, strides=(2, 0, 1), shortened=True, seed=5),
    "behind": Call(RAGGED, 16, 16, behind=9, positions=True, seed=6),
    "crowded": Call([(90, 400)], 7, 64, block_size=128, seed=7),
    "several_parts": Call([(20, 20000), (30, 9000), (3, 70)], 16, 128, seed=8),
    "more_ranges_than_parts": Call([(60, 47000)], 16, 128, seed=9, heads=2),
    "more_blocks_than_edges": Call([(4, 30000), (2, 3000)], 4, 8, seed=10),
    "nothing": Call([(6, 0), (3, 0)], 16, 4),
}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = KERNEL.read_text(encoding="utf-8")
    for right, other in SMALLER:
        assert right in text
        text = text.replace(right, other)
    file = tmp_path_factory.mktemp("kernel") / KERNEL.name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.drawn(1)
def test_every_edge_is_scheduled(name: str, smaller: Path) -> None:
    check(CALLS[name], smaller)


@pytest.mark.parametrize("name", ["ragged", "long_rows", "behind"])
def test_a_call_knows_the_schedule_of_its_ids(name: str, smaller: Path) -> None:
    call = CALLS[name]
    made = WindowSchedule(*schedule(call, smaller), call.window)
    keys = torch.empty(int(call.where["cu_seqlens_k"][-1]), call.heads, 1)
    where = Where(**call.where)
    contents.check_schedule(made, call.ids, where, call.block_size, keys)
    limit = read_batch(call.ids.shape[1], call.ids.device, **call.where).limit
    seen = (call.ids >= 0) & (call.ids.long() * call.block_size <= limit[:, None])
    head, query, slot = seen.nonzero()[-1].tolist()
    ids = call.ids.clone()
    ids[head, query, slot] = -1
    with pytest.raises(
        ValueError, match=rf"schedule: got one of other block_indices or lengths at \[{head}, {query}\]"
    ):
        contents.check_schedule(made, ids, where, call.block_size, keys)
    # One visible token less is another schedule, too.
    moved = Where(**call.where | {"q_positions": (limit - 1).int()})
    with pytest.raises(ValueError, match="schedule: got one of other block_indices or lengths at"):
        contents.check_schedule(made, call.ids, moved, call.block_size, keys)


# What each fault replaces, and by what.
FAULTS = {
    "a warp takes the queries of all": ("start + warp * share", "start"),
    "queries past the window are taken": ("first + share, end)", "first + share + 1, end)"),
    "queries past the last request are taken": (
        "start + window, Int32(block_indices.shape[1])), lengths.cu_seqlens_q[requests])",
        "start + window, Int32(block_indices.shape[1])), Int32(block_indices.shape[1]))",
    ),
    "parts begin where the window does": ("edge_base + edge_at - edge_sum", "edge_at - edge_sum"),
    "tasks of all ranges begin at 0": ("task_base + task_at - task_sum", "task_at - task_sum"),
    "a part takes one range": ("mine = mine + parts", "mine = ranges"),
    "the first part counts": ("cutlass.max(ranges - 1, 0) % parts", "0"),
    "counters keep what was there": ("cute.autovec_copy(zeros, counters[warp, i * WARP + lane, None])", "pass"),
    "cuts stay": ("cute.autovec_copy(zeros, cut[thread, None])", "pass"),
    "counters past the last block count": ("pick(thread * PER_THREAD + i < num_blocks, totals[i], 0)", "totals[i]"),
    "both halves are one query": ("first = run.first + group * stride + beside", "first = run.first + group * stride"),
    "the halves are read from one query": ("self.fetch(run, run.first + beside,", "self.fetch(run, run.first,"),
    "slots of the upper half are behind the row": ("lane - beside * HALF", "lane"),
    "rows of half a warp go one at a time": ("abreast = pick(topk <= HALF, 2, 1)", "abreast = pick(topk < HALF, 2, 1)"),
    "longer rows go two at a time": ("abreast = pick(topk <= HALF, 2, 1)", "abreast = Int32(2)"),
    "the upper half never has its turn": ("turn in cutlass.range_constexpr(2)", "turn in cutlass.range_constexpr(1)"),
    "what comes is there already": ("ids.store(coming.load())\n", "pass\n"),
    "the second half of a row is not read": ("pick(done, first_slot, slot + WARP)", "first_slot"),
    "the next queries come too early": ("pick(done, first + stride, first)", "first + stride"),
    "a request once left is not taken again": ("request, end, length, base = before\n", "pass\n"),
    "requests never end": ("while query >= end:", "while query > end:"),
    "ids below zero are taken": ("(block >= 0) & ", ""),
    "requests meet": ("column = block + base - low", "column = block - low"),
    "columns of other ranges count": ("(column >= 0) & (column < high - low)", "(column >= 0)"),
    "columns below count": (" & (column >= 0) & (column", " & (column"),
    "visible tokens are not bounded": ("cutlass.min(limit - block * self.block_size, self.block_size - 1)",
                                       "limit - block * self.block_size"),
    "edges name queries of the call": ("edge_of(query - run.start,", "edge_of(query,"),
    "the slot is lost": ("run.start, slot,", "run.start, 0,"),
    "whole blocks are cut": ("elif visible < self.block_size - 1", "elif visible < self.block_size"),
    "no block is cut": ("run.cut[column] = 1", "run.cut[column] = 0"),
    "a task is too long": ("pieces = (totals[i] + CHUNK - 1) // CHUNK", "pieces = Int32(1)"),
    "pieces are not multiples": (" + PIECE - 1) // PIECE * PIECE", ")"),
    "a block is as long as any": ("rows = cutlass.min(length - row, self.block_size)", "rows = self.block_size"),
    "rows count from the request": ("lengths.cu_seqlens_k[request] + row", "row"),
    "counting begins before all counters are 0": (
        "cute.arch.sync_threads()\n            self.walk(False", "self.walk(False"
    ),
    "counters are added up before all have counted": (
        "cute.arch.sync_threads()\n            totals", "totals"
    ),
    "edges are written before all places are there": (
        "cute.arch.sync_threads()\n                self.walk(True", "self.walk(True"
    ),
    "queries of a run do not take turns": ("                        cute.arch.sync_warp()\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_shows(fault: str, smaller: Path, tmp_path: Path) -> None:
    file = lanes.plant(FAULTS[fault], smaller, tmp_path)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        for call in CALLS.values():
            check(call, file)
