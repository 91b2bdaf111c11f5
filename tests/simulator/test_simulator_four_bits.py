"""NVFP4 and MXFP4 of TileLang kernels: every code under every scale, what is not finite, and faults of the operand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_calls
import simulated_hybrid
import simulated_selection
import small_four_bits
import torch
from simulated_calls import Call

from msa_tiles.dsl import four_bits
from msa_tiles.dsl.tilelang import packed, packed_index, packed_queries
from msa_tiles.dsl.tilelang.operands import index_mxfp4, index_nvfp4, mxfp4, nvfp4
from msa_tiles.quant import GROUPS, QuantizedTensor
from msa_tiles.runtime.registry import default_registry
from msa_tiles.simulator import RaceError, SimulationError, simulate
from msa_tiles.verify.cases import Disagreement

MODULES: dict[str, tuple[Any, Any]] = {"nvfp4": (nvfp4, index_nvfp4), "mxfp4": (mxfp4, index_mxfp4)}
# By how much a power of two what is decoded is smaller: see `whole`.
LACKING = {"nvfp4": four_bits.POWER_BF16 - four_bits.SCALE_POWER, "mxfp4": 0}
each_format = pytest.mark.parametrize("name", GROUPS)


def every_code(name: str, dim: int) -> QuantizedTensor:
    """A block in whose groups every code meets every scale, NaN among them."""
    group, rows = GROUPS[name], small_four_bits.BLOCK
    count = rows * dim // group.size
    scale = (torch.arange(count) * 97 % 256).to(torch.uint8).view(group.dtype).view(rows, 1, dim // group.size)
    codes = (torch.arange(group.size) + torch.arange(count)[:, None]) % 16
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return QuantizedTensor(pairs.to(torch.uint8).view(rows, 1, dim // 2), scale, name)


@each_format
@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize("is_index", [False, True])
def test_every_code_under_every_scale(name: str, dim: int, is_index: bool) -> None:
    made = every_code(name, dim)
    values, index = MODULES[name]
    out = torch.zeros(small_four_bits.BLOCK, dim).bfloat16()
    kind, data, scale = values.Operand, made.data, made.scale
    if is_index:
        kind, data, scale = index.IndexKeys, data[:, 0], scale[:, 0]
    operand = kind("k", dim, small_four_bits.BLOCK, 0)
    simulate(small_four_bits.decoded(operand, values.parts, small_four_bits.BLOCK), data, scale, out)
    if is_index:
        out = out[:, [packed_index.column(c) for c in range(dim)]]
    wanted = made.dequantize()[:, 0].double() * 2.0 ** -LACKING[name]
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=0, equal_nan=True)


@each_format
def test_a_short_block_reads_no_scales_behind_it(name: str) -> None:
    """Keys end with the tensor: its last row's scales stand in for the missing ones."""
    made, (values, _) = every_code(name, 64), MODULES[name]
    out = torch.zeros(small_four_bits.BLOCK, 64).bfloat16()
    operand = values.Operand("k", 64, small_four_bits.BLOCK, 0)
    simulate(small_four_bits.decoded(operand, values.parts, 70), made.data[:70], made.scale[:70], out)
    wanted = made.dequantize()[:70, 0].double() * 2.0 ** -LACKING[name]
    torch.testing.assert_close(out[:70].double(), wanted, rtol=0, atol=0, equal_nan=True)


FAULTS: dict[str, tuple[str, str, tuple[type[Exception], ...]]] = {
    "bytes not awaited": ("T.barrier_wait(held.landed[stage], phase)", "pass", (SimulationError,)),
    "no fence behind the rows": ("    T.fence_proxy_async()\n", "", (SimulationError,)),
    "a page twice": ("T.min(first_page + p,", "T.min(first_page,", (Disagreement, AssertionError)),
    "scales of the first page": ("first_page + own // page_size]", "first_page]", (Disagreement, AssertionError)),
    "scales of a token instead of four": (
        "(rows - 1) // TOKENS * TOKENS + TOKENS - 1", "rows - 1", (Disagreement, AssertionError),
    ),
    "scales not awaited": (
        "T.cp_async_barrier_noinc(held.landed[stage])", "T.barrier_arrive(held.landed[stage])", (SimulationError,),
    ),
    "a word twice": ("got[half]", "got[0]", (Disagreement, AssertionError)),
}  # fmt: skip
SMALL = {"head_dim": 64, "block_size": 64, "group": 8, "topk": 3}


def decode() -> None:
    call = Call([(2, 149), (1, 70)], seed=3, strided=True, pages_per_block=2)
    simulated_calls.sparse_decode(call, precision="q16kv4", **SMALL)  # type: ignore[arg-type]


def with_fault(module: Any, old: str, new: str, file: Path) -> Any:
    """A copy of a module of macros with a piece of text replaced."""
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_the_call_is_right_without_faults() -> None:
    decode()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.drawn(2)
@pytest.mark.planted
def test_a_fault_is_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, expected = FAULTS[fault]
    module = with_fault(packed, old, new, tmp_path / f"planted_{sorted(FAULTS).index(fault)}_packed.py")
    for name in ("start", "fill"):
        monkeypatch.setattr(nvfp4, name, getattr(module, name))
    monkeypatch.setattr(simulated_calls, "_kernels", {})
    with pytest.raises(expected):
        decode()


@pytest.mark.planted
def test_bytes_are_not_sent_for_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_fault(packed_index, "T.sync_threads(7, 128)", "pass", tmp_path / "planted_packed_index.py")
    monkeypatch.setattr(index_nvfp4, "send", module.send)
    monkeypatch.setattr(simulated_calls, "_kernels", {})
    with pytest.raises(RaceError):
        simulated_selection.decode_score_q16k4(Call([(1, 700)]), head_dim=64, block_size=64, ctas=1)


FAULTS_OF_QUERIES: dict[str, tuple[str, str, tuple[type[Exception], ...]]] = {
    "columns as they come": ("turned[0:4])", "words[0:4])", (Disagreement, AssertionError)),
    "no fence behind the rows": ("    T.fence_proxy_async()\n", "", (SimulationError,)),
    "rows of others not awaited": ("T.sync_threads(barrier, THREADS)", "pass", (Disagreement, AssertionError)),
}


@pytest.mark.parametrize("op", ["index_score", "select_blocks"])
@pytest.mark.parametrize("fault", FAULTS_OF_QUERIES)
@pytest.mark.drawn(1)
@pytest.mark.planted
def test_a_fault_in_turning_queries_is_caught(
    fault: str, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, expected = FAULTS_OF_QUERIES[fault]
    file = tmp_path / f"planted_{sorted(FAULTS_OF_QUERIES).index(fault)}_{op}_queries.py"
    (cell,) = default_registry().select(op, "tilelang", precision="q16k4")
    monkeypatch.setattr(sys.modules[cell.function.__module__], "turn", with_fault(packed_queries, old, new, file).turn)
    monkeypatch.setattr(simulated_calls, "_kernels", {})
    with pytest.raises(expected):
        index(op, "q16k4", Call([(70, 150)], seed=7, values="integer"))


def index(op: str, precision: str, call: Call) -> None:
    """A call of the indexer."""
    further = {"topk": 8, "k": 2, "heads_per_group": 2} if op == "select_blocks" else {}
    getattr(simulated_selection, f"{op}_{precision}")(call, head_dim=64, block_size=64, **further)


@each_format
@pytest.mark.parametrize("op", ["index_score", "select_blocks", "decode_score"])
@pytest.mark.drawn(1)
def test_a_key_that_is_nan_counts_for_nobody(name: str, op: str) -> None:
    """A key with a group whose scale is NaN, and a block of such keys, in the middle of keys that are seen."""
    call = Call([(9, 300)], seed=6, values="integer")
    real = call.tensor

    def tensor(*shape: int, **kind: Any) -> torch.Tensor:
        made = real(*shape, **kind)
        if len(shape) == 2:
            made[64:128, 3] = made[296, 40] = torch.nan
        return made

    call.tensor = tensor  # type: ignore[method-assign]
    index(op, {"nvfp4": "q16k4", "mxfp4": "q16kmx4"}[name], call)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("shared", [False, True])
@each_format
@pytest.mark.drawn(1)
def test_nan_reaches_who_sees_it(name: str, shared: bool, which: str) -> None:
    """A group whose scale is NaN, in a block that queries read: some of them see its row and some do not."""
    precision = {"nvfp4": "q16kv4", "mxfp4": "q16kvmx4"}[name]
    call = Call([(90, 150)] if shared else [(8, 130)], seed=5, spoilt=(which, float("nan")))
    if shared:
        simulated_hybrid.shared_attention(call, precision=precision, close=True, **SMALL)  # type: ignore[arg-type]
    else:
        simulated_calls.sparse_decode(call, precision=precision, **SMALL)  # type: ignore[arg-type]


@each_format
def test_what_is_too_large_is_the_largest_number(name: str) -> None:
    """Quantisers saturate; kernels read what they wrote."""
    precision = {"nvfp4": "q16k4", "mxfp4": "q16kmx4"}[name]
    call = Call([(2, 90)], seed=6)
    real = call.tensor
    call.tensor = lambda *shape, **kind: real(*shape, **kind).mul_(1e30 if len(shape) == 2 else 1.0)  # type: ignore[method-assign]
    out, wanted = simulated_selection.scored(
        call, "decode_score", 2, (2,), head_dim=64, block_size=64, heads=2, causal=True, precision=precision,
        key_scales=0, outer=1.0 if name == "nvfp4" else None,
    )  # fmt: skip
    held = wanted.isfinite()
    assert held.any() and float(wanted[held].abs().max()) > (1e3 if name == "nvfp4" else 1e29)
    torch.testing.assert_close(out.view[held], wanted[held], rtol=1e-5, atol=0)
