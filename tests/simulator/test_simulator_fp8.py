"""e4m3 in the simulator: products against torch, what wgmma takes, and faults of the FP8 kernel that it catches."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_calls
import simulated_selection
import small_fp8
import torch
from simulated_calls import Call
from torch import Tensor

from msa_tiles.quant import FP8
from msa_tiles.runtime.registry import default_registry
from msa_tiles.simulator import ArgumentError, RaceError, SimulationError, UnsupportedError, simulate

SEEDS = range(2)


def operands() -> tuple[Tensor, Tensor]:
    """Every e4m3 number, NaN left out, in the rows of A."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    a = torch.zeros(64, 128).to(FP8)
    a.view(-1)[:256] = every.float().nan_to_num(0.0).to(FP8)
    return a, torch.randint(-8, 9, (64, 128), generator=torch.Generator().manual_seed(0)).float().to(FP8)


@pytest.mark.parametrize("late", [True, False])
def test_products_are_those_of_the_decoded_values(late: bool) -> None:
    a, b = operands()
    out = torch.full((64, 64), torch.nan)
    simulate(small_fp8.multiplied(), a, b, out, seed=0, late=late)
    assert torch.equal(out, a.float() @ b.float().T)


def test_a_nan_stays_one() -> None:
    a, b = operands()
    a[3, 5] = torch.nan
    out = torch.zeros(64, 64)
    simulate(small_fp8.multiplied(), a, b, out)
    assert out[3].isnan().all() and out.isnan().sum() == 64


def test_e5m2_is_another_type() -> None:
    a, b = operands()
    with pytest.raises(ArgumentError, match=r"torch.float8_e5m2 .* came, wanted float8_e4m3fn"):
        simulate(small_fp8.multiplied(), a.float().to(torch.float8_e5m2), b, torch.zeros(64, 64))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (small_fp8.multiplied_across, "wanted both operands with K along their rows"),
        (small_fp8.multiplied_mixed, "bfloat16 x float8_e4m3fn: wanted operands of one type"),
    ],
)
def test_what_wgmma_does_not_take(kernel: Any, message: str) -> None:
    a, b = operands()
    function = kernel()
    first = str(function.buffer_map[function.params[0]].dtype)
    shapes = [[int(n) for n in function.buffer_map[parameter].shape] for parameter in function.params[:2]]
    tensors = (a.float().to(getattr(torch, first)).view(shapes[0]), b.view(shapes[1]))
    with pytest.raises(UnsupportedError, match=message):
        simulate(function, *tensors, torch.zeros(64, 64))


def copy_of_the_kernel(directory: Path, *replacements: tuple[str, str]) -> Any:
    """`select_blocks` of a copy of the generated FP8 kernel with pieces of text replaced."""
    (cell,) = default_registry().select("select_blocks", "tilelang", precision="q8k8")
    text = cell.file.read_text()
    for old, new in replacements:
        assert text.count(old) >= 1, f"{old!r} is not in {cell.file.name}"
        text = text.replace(old, new)
    file = directory / "planted_select_blocks_fp8.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{file.stem}_{directory.name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.select_blocks


FAULTS: dict[str, tuple[list[tuple[str, str]], type[Exception] | tuple[type[Exception], ...]]] = {
    "too few slots of scales": ([("SLOTS = 2 * STAGES", "SLOTS = 2")], (RaceError, AssertionError)),
    "scales of another block": (
        [("block % SLOTS, key_scales", "(block + 1) % SLOTS, key_scales")], (SimulationError, AssertionError)),
    "scales stored after the arrival": (
        [("key_scale[block % SLOTS, tx % 128] = scale_read[0]", "pass"), (
            "T.barrier_arrive(k_full[block % STAGES])",
            "T.barrier_arrive(k_full[block % STAGES])\n"
            "                            key_scale[block % SLOTS, tx % 128] = scale_read[0]",
        )], (SimulationError, AssertionError)),
    "scales of another head": ([("head * heads_per_group + r], T", "head * heads_per_group], T")], AssertionError),
    "scales of queries ignored": ([("use_q_scale != 0", "use_q_scale > 1")], AssertionError),
    "no barrier within a warp": ([("            T.sync_warp()\n        top.clear", "        top.clear")], RaceError),
    "queries of the upper tile for both": ([("Q_shared[2 * w + 1, r", "Q_shared[2 * w, r")], AssertionError),
    "limits of the upper tile for both": ([("T.min(first_token + ROWS + i", "T.min(first_token + i")], AssertionError),
    "maxima of the upper tile for both": (
        [("max_shared[w, lane // 16, row]", "max_shared[w, 0, row]")], AssertionError),
    "scales of the lower tile in the upper one": (
        [("query_scale, 2 * w, r, heads", "query_scale, 2 * w + 1, r, heads")], AssertionError),
    "a stage released before its last product": ([
        ("                    T.barrier_arrive(k_free[stage])\n", ""),
        ("                T.wait_wgmma(0)\n                T.wgmma_gemm(\n                    Q_shared[2 * w + 1",
         "                T.wait_wgmma(0)\n                if r == heads_per_group - 1:\n"
         "                    T.barrier_arrive(k_free[stage])\n                T.wgmma_gemm(\n"
         "                    Q_shared[2 * w + 1")], SimulationError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_of_the_kernel_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replacements, expected = FAULTS[fault]
    variant = {"head_dim": 64, "block_size": 64, "topk": 8, "heads_per_group": 2, "key_scales": 1}
    arguments = {**variant, "k": 3, "local_blocks": 0}

    def run(seed: int) -> None:
        call = Call([(130, 900), (3, 90)], seed=seed, values="integer", strided=True)
        # A loud head would decide alone, whatever the other's scale.
        simulated_selection.select_blocks_q8k8(call, loud=False, **arguments)

    run(0)
    function = copy_of_the_kernel(tmp_path, *replacements)(**variant, pages_per_block=0)
    monkeypatch.setattr(simulated_calls, "kernel", lambda *_args, **_variant: function)
    for seed in SEEDS:
        with pytest.raises(expected):
            run(seed)
