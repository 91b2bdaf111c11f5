"""topk_select of TileLang on rows of several chunks, and faults planted in how a warp chooses."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from simulated_calls import kernel
from torch import Tensor

from msa_tiles import paths, reference
from msa_tiles.dsl.tilelang import candidates
from msa_tiles.simulator import RaceError, SimulationError, simulate

ORDERS = ("ascending", "score", "local_last")
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, -3e-42)


def scores_of(kind: str, shape: tuple[int, int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    normal, dice = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    if kind == "special":
        for n, value in enumerate(SPECIAL):
            normal = torch.where((dice > 0.08 * n) & (dice < 0.08 * (n + 1)), value, normal)
        return normal
    return {
        "normal": normal,
        "ties": (normal * 2).round(),
        "equal": torch.zeros(shape),
        "rising": torch.arange(float(shape[2])).expand(shape).clone(),
        "falling": -torch.arange(float(shape[2])).expand(shape),
        "nearly_nan": torch.where(dice < 0.98, math.nan, normal),
        "minus_infinity": torch.where(dice < 0.98, -math.inf, normal),
        "infinity": torch.where(dice < 0.5, math.inf, normal),
    }[kind]


def chosen(function: Any, score: Tensor, valid: Tensor, k: int, *forced_and_order: int, lanes_log2: int = 0) -> Tensor:
    """What a kernel makes of every row."""
    init, local, order = forced_and_order
    starts = torch.tensor([0, score.shape[1]], dtype=torch.int32)
    out = torch.full((1, score.shape[1], k), -77, dtype=torch.int32)
    numbers = (0, 0, 2, 0, 128, init, local, order, lanes_log2)
    simulate(function, score, starts, starts, starts[1:], starts, valid, out, *numbers)
    return out


def wanted(score: Tensor, valid: Tensor, k: int, init: int, local: int, order: int) -> Tensor:
    options = {"init_blocks": init, "local_blocks": local, "order": ORDERS[order]}
    return reference.topk_select(score, k, num_kv_heads=1, num_valid_blocks=valid, **options)


@pytest.mark.parametrize(
    ("kind", "heads", "blocks", "k", "init", "local", "order"),
    [
        ("normal", 1, 2100, 16, 0, 1, 0),
        ("special", 2, 1061, 16, 1, 2, 1),
        ("ties", 1, 1024, 8, 2, 3, 2),
        ("nearly_nan", 3, 1030, 5, 0, 1, 1),
        ("normal", 1, 1500, 7, 9, 2, 1),
        ("infinity", 2, 1500, 16, 0, 1, 0),
        ("falling", 1, 1300, 16, 70, 1, 0),
        ("rising", 1, 1300, 16, 0, 1500, 1),
        ("equal", 1, 1400, 64, 0, 1, 0),
        ("rising", 1, 1100, 33, 0, 0, 1),
        ("minus_infinity", 1, 1057, 32, 0, 1, 0),
        ("special", 1, 40, 64, 3, 4, 2),
        ("special", 1, 4200, 20, 3, 4, 2),
    ],
)
@pytest.mark.drawn(2)
def test_the_best_blocks(kind: str, heads: int, blocks: int, k: int, init: int, local: int, order: int) -> None:
    score = scores_of(kind, (heads, 9, blocks))
    valid = torch.tensor([blocks, 0, blocks - 31, 1, 33, 31, 256, 257, blocks], dtype=torch.int32).clamp_max(blocks)
    function = kernel("topk_select", topk=min(size for size in (8, 16, 32, 64) if size >= k))
    for lanes_log2 in (0, 5):
        got = chosen(function, score, valid, k, init, local, order, lanes_log2=lanes_log2)
        assert torch.equal(got, wanted(score, valid, k, init, local, order))


def test_the_longest_row() -> None:
    score, valid = scores_of("special", (1, 1, 16384)), torch.tensor([16384], dtype=torch.int32)
    got = chosen(kernel("topk_select", topk=16), score, valid, 16, 0, 1, 0, lanes_log2=5)
    assert torch.equal(got, wanted(score, valid, 16, 0, 1, 0))


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def faulty(monkeypatch: pytest.MonkeyPatch, directory: Path, old: str, new: str) -> Any:
    """The generated kernel with one text of `candidates` replaced."""
    text = Path(str(candidates.__file__)).read_text()
    assert text.count(old) == 1, old
    copy = directory / "faulty_candidates.py"
    copy.write_text(text.replace(old, new))
    monkeypatch.setitem(sys.modules, "faulty_candidates", module_of(copy))
    text = (paths.generated_dir() / "tilelang/sm90/topk_select_bf16.py").read_text()
    assert "msa_tiles.dsl.tilelang.candidates import" in text
    caller = directory / "faulty_topk_select.py"
    caller.write_text(text.replace("msa_tiles.dsl.tilelang.candidates import", "faulty_candidates import"))
    return module_of(caller).topk_select(topk=16)


KINDS_OF_FAULTS = ("ties", "equal", "nearly_nan", "rising", "falling", "normal")


def wrong_rows(function: Any) -> bool:
    valid = torch.tensor([1100, 40, 1061], dtype=torch.int32)
    for kind in KINDS_OF_FAULTS:
        score = scores_of(kind, (1, 3, 1100))
        if not torch.equal(chosen(function, score, valid, 16, 0, 1, 0), wanted(score, valid, 16, 0, 1, 0)):
            return True
    return False


def test_without_a_fault_no_row_comes_out_wrong() -> None:
    assert not wrong_rows(kernel("topk_select", topk=16))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("over = T.max(over, least[0] - 1)", "over = T.max(over, least[0])"),
        ("columns_below(first, lane)", "columns_below(first + 1, lane)"),
        ("forced = window & (", "forced = ("),
        ("if over < -INFINITY_BITS:", "if over < -2 * INFINITY_BITS:"),
        ("count_bits(equal & bits_below(lane)) < ties", "count_bits(equal & bits_below(lane)) <= ties"),
        ("if left >= WARP * GROUP * (group + 1):", "if left >= WARP * GROUP * group:"),
        ("lists.keys[lists.warp, WARP * s + lane] >= least", "lists.keys[lists.warp, WARP * s + lane] > least"),
        ("if kept[0] > 0:", "if kept[0] > 1000:"),
    ],
)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_wrong_choice_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str) -> None:
    function = faulty(monkeypatch, tmp_path, old, new)
    try:
        found = wrong_rows(function)
    except SimulationError:
        return
    assert found, "no row came out wrong"


@pytest.mark.planted
def test_lanes_that_do_not_wait_for_each_other_race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function = faulty(monkeypatch, tmp_path, "                T.sync_warp()\n", "")
    with pytest.raises(RaceError, match="sync_warp"):
        chosen(function, scores_of("normal", (1, 1, 90)), torch.tensor([90], dtype=torch.int32), 16, 0, 1, 0)
