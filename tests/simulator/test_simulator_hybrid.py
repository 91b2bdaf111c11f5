"""Hybrid attention as it is launched on CUDA: the launch code, with every kernel in the simulator."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import simulated_calls
import simulated_hybrid
import torch
from simulated_calls import Call, kernel

from msa_tiles import reference
from msa_tiles.call.attention import Attention, AttentionCall
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, lookup, operands, windows, workspaces
from msa_tiles.runtime import CallFacts
from msa_tiles.runtime.registry import default_registry
from msa_tiles.simulator import RaceError, simulate
from msa_tiles.verify import compare
from msa_tiles.verify.hybrid import hybrid

CPU = torch.device("cpu")
CELLS = default_registry().of("shared_attention")


def test_windows_fill_the_ctas() -> None:
    # 264 CTAs take the tiles of 4 KV heads in turn: 264 queries a round.
    assert windows.even_window(32768, 4033, 4, 4, 264) == 3696
    # A single window is no longer than it has to be.
    assert windows.even_window(101, 4033, 4, 4, 264) == 104
    assert windows.even_window(3960, 4033, 4, 4, 264) == 3960
    assert windows.even_window(100000, 50, 8, 1, 264) == 48
    for total, most, tile, heads in ((32768, 4033, 4, 4), (131072, 4033, 4, 1), (9, 12, 8, 3), (77, 8, 8, 2)):
        window = windows.even_window(total, most, tile, heads, 264)
        assert window % tile == 0 and 0 < window <= most


def test_heads_take_turns_where_longer_windows_spare_reads() -> None:
    def rounds(total_q: int, longest_k: int, most: int = 4033, heads: int = 4) -> tuple[int, int]:
        return windows.choose_rounds(total_q, most, 16, heads, longest_k, 128, 65536, 4, 132)

    # A block of 32K keys has more edges than a task holds: longer windows would read it as often.
    assert rounds(32768, 32768) == (4, 3696)
    assert rounds(131072, 131072) == (2, 7920)
    assert rounds(8192, 1048576) == (1, 8192)
    assert rounds(1048576, 1048576) == (1, 8448)
    # One window, or one head: nothing to gain.
    assert rounds(2048, 1048576) == (4, 2048)
    assert rounds(8192, 1048576, heads=1)[0] == 1
    for total_q, longest_k, most, heads in ((9, 1 << 20, 4, 6), (50000, 1 << 20, 7, 8), (70, 70, 5000, 3)):
        at_a_time, window = rounds(total_q, longest_k, most, heads)
        assert heads % at_a_time == 0
        assert 0 < window <= most * heads // at_a_time and window % 4 == 0


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.drawn(1)
def test_each_role_waits_for_the_partial_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, role: int) -> None:
    cell = next(cell for cell in CELLS if cell.dsl == "tilelang")
    wait = " " * 20 + "if turn == 0:\n" + " " * 24 + "T.pdl_sync()\n"
    parts = cell.file.read_text().split(wait)
    assert len(parts) == 3
    file = tmp_path / "shared_attention.py"
    file.write_text(wait.join([parts[0] + parts[1], parts[2]] if role == 0 else [parts[0], parts[1] + parts[2]]))
    function = dataclasses.replace(cell, file=file).function
    real = simulated_calls.kernel

    def kernel(op: str, precision: str, target: str, **variant: int) -> Any:
        return function(**variant) if op == "shared_attention" else real(op, precision, target, **variant)

    monkeypatch.setattr(simulated_calls, "kernel", kernel)
    with pytest.raises(RaceError, match="accessed before pdl_sync"):
        simulated_hybrid.shared_attention(Call([(40, 90)], seed=1), head_dim=64, block_size=64, group=8, topk=2)


def test_the_kernel_before_shared_attention_begins_when_all_is_there() -> None:
    # shared_attention waits for that kernel alone and reads what earlier ones wrote before it waits.
    for cell in default_registry().of("sparse_attention"):
        if cell.target in {shared.target for shared in CELLS}:
            text = cell.file.read_text()
            assert "pdl" not in text and "griddepcontrol" not in text, cell.id


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("pages_per_block", "queries", "number", "rounds"), [(0, 40, 2, 1), (2, 40, 2, 1), (0, 20, 2, 2), (2, 40, 1, 2)]
)
@pytest.mark.drawn(2)
def test_the_launch_code_gives_every_kernel_what_it_wants(
    monkeypatch: pytest.MonkeyPatch, pages_per_block: int, queries: int, number: int, rounds: int, shared: bool
) -> None:
    launched = []

    def find(facts: CallFacts, backend: str, op: str, variant: dict[str, int], features: frozenset[str]) -> Any:
        assert backend == "tilelang", op

        def launch(*arguments: Any) -> None:
            launched.append(op)
            simulate(kernel(op, **variant), *arguments)

        return launch

    monkeypatch.setattr(lookup, "part_kernel", find)
    monkeypatch.setattr(lookup, "part_serves", lambda *_: True)
    properties = types.SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    # Heads take turns where launches cost nothing, and only there: these windows are short.
    monkeypatch.setattr(windows, "ROUND_COST", 0.0 if rounds > 1 else 1e6)
    if rounds == 1:
        # Two windows of all heads are as many launches as one of each head.
        for other in ("MEGABYTE_COST", "WALK_COST"):
            monkeypatch.setattr(windows, other, 0.0)
    # What it remembers was weighed with other costs.
    monkeypatch.setattr(windows, "choose_rounds", windows.choose_rounds.__wrapped__)
    call = Call([(31, 150), (0, 70), (1, 1), (40, 200)], seed=3, pages_per_block=pages_per_block)
    heads, group, dim, block_size, topk = 2, 16, 64, 64, 3
    q = call.tensor(call.total_q, heads * group, dim)
    flat = call.tensor(call.total_k, heads, dim), call.tensor(call.total_k, heads, dim)
    _, (k, v), where = call.place(block_size, *flat)
    ids = call.source.selection(call.lengths, heads, topk, block_size, True)
    out, lse = torch.full(q.shape, torch.nan).bfloat16(), torch.full(q.shape[:2], torch.nan)
    given = Attention(q, k, v, ids, Where(**{**where, "max_seqlen_k": 200}))
    workspace_bytes = queries * workspaces.partial_bytes(topk, heads * group, dim)
    attend = AttentionCall(given, block_size, 0.2, workspace_bytes, False, "tilelang")
    with hybrid(shared, fill=1):
        launch = attention.find(operands.facts("sparse_attention", attend), attend, out)
    assert launch.heads == heads // rounds
    launch(given, None, out, lse)
    pairs = ["sparse_attention", "shared_attention" if shared else "combine"] * (number * rounds)
    assert launched == [*(["split_selection"] if shared else []), "build_schedule", *pairs]
    wanted, wanted_lse = reference.sparse_attention(
        q.float(), k.float(), v.float(), ids, block_size=block_size, softmax_scale=0.2, **where
    )
    compare.numbers("lse", lse, wanted_lse, 2e-3)
    compare.numbers("out", out.float(), wanted, 0.04)
