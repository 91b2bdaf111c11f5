"""`msa_tiles.explain`: a call's own tensors, what would run, and nothing is computed or compiled."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import msa_tiles
from msa_tiles import ops
from msa_tiles.bench import cases
from msa_tiles.bench.operators import BENCHMARKS
from msa_tiles.call import backends
from msa_tiles.explaining import expect, grids, rehearsal
from msa_tiles.explaining.examples import call_of
from msa_tiles.launch import attention, copied, dequantize, windows
from msa_tiles.quant import GROUPS, QuantizedTensor
from msa_tiles.runtime.pairs import Pair
from msa_tiles.runtime.parts import parts_of
from msa_tiles.runtime.registry import default_registry
from msa_tiles.spec.model import DSLS

HEADS, KV_HEADS, DIM, BLOCK, TOPK = 64, 4, 128, 128, 16
H100 = default_registry().targets["sm90"].sm_count


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def prefill(queries: int = 4096, keys: int = 4096) -> dict[str, Any]:
    """Every tensor that an operator may take, at the M3 shape."""
    return {
        "q": meta(queries, HEADS, DIM),
        "k": meta(keys, KV_HEADS, DIM),
        "v": meta(keys, KV_HEADS, DIM),
        "out": meta(queries, HEADS, DIM),
        "dout": meta(queries, HEADS, DIM),
        "lse": meta(queries, HEADS, dtype=torch.float32),
        "idx_q": meta(queries, KV_HEADS, DIM),
        "idx_k": meta(keys, DIM),
        "block_indices": meta(KV_HEADS, queries, TOPK, dtype=torch.int32),
        "score": meta(KV_HEADS, queries, -(-keys // BLOCK), dtype=torch.float32),
        "partial_out": meta(4, queries, HEADS, DIM),
        "partial_lse": meta(4, queries, HEADS, dtype=torch.float32),
        "topk": TOPK,
        "k_cache": meta(keys // BLOCK, KV_HEADS, BLOCK, DIM),
        "v_cache": meta(keys // BLOCK, KV_HEADS, BLOCK, DIM),
        "cache": meta(keys // BLOCK, BLOCK, DIM),
        "slot_mapping": meta(keys, dtype=torch.int64),
        **{name: meta(DIM) for name in ("q_weight", "k_weight", "idx_q_weight", "idx_k_weight")},
        "cos_sin": meta(keys, DIM // 2),
        "positions": meta(queries, dtype=torch.int64),
        "index_cache": meta(keys // BLOCK, BLOCK, DIM),
    }


NEEDED: dict[str, tuple[str, ...]] = {
    "append_index": ("idx_k", "cache", "slot_mapping"),
    "append_kv": ("k", "v", "k_cache", "v_cache", "slot_mapping"),
    "build_schedule": ("block_indices",),
    "combine": ("partial_out", "partial_lse"),
    "decode_score": ("idx_q", "idx_k"),
    "decode_topk": ("score", "topk"),
    "dequantize_kv": ("k", "v"),
    "index_kl": ("q", "k", "lse", "idx_q", "idx_k", "block_indices"),
    "index_score": ("idx_q", "idx_k"),
    "msa_attention": ("q", "k", "v", "idx_q", "idx_k", "topk"),
    "msa_decode": ("q", "k", "v", "idx_q", "idx_k", "topk"),
    "norm_rope_append": (
        *("q", "k", "v", "q_weight", "k_weight", "cos_sin", "positions", "k_cache", "v_cache", "slot_mapping"),
        *("idx_q", "idx_k", "idx_q_weight", "idx_k_weight", "index_cache"),
    ),
    "select_blocks": ("idx_q", "idx_k", "topk"),
    "sparse_attention": ("q", "k", "v", "block_indices"),
    "sparse_attention_backward": ("dout", "q", "k", "v", "out", "lse", "block_indices"),
    "sparse_decode": ("q", "k", "v", "block_indices"),
    "topk_select": ("score", "topk"),
}


def arguments_of(op: str, **sizes: int) -> dict[str, Any]:
    given = prefill(**sizes)
    further = {"num_kv_heads": KV_HEADS} if op in ("select_blocks", "topk_select", "decode_topk") else {}
    if op == "dequantize_kv":
        given |= {name: meta(*given[name].shape, dtype=torch.float8_e4m3fn) for name in "kv"}
        further = {name: meta(dtype=torch.float32) for name in ("k_scale", "v_scale")}
    given["idx_q"].requires_grad_(op == "index_kl")  # gradients have a kernel of their own
    return {name: given[name] for name in NEEDED[op]} | further


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("something is compiled or loaded")

    for place in ("dispatch.obtain", "launch.load_function", "workers.perform", "dispatch.Kernel"):
        monkeypatch.setattr(f"msa_tiles.runtime.{place}", refuse)


def test_every_operator_is_among_these() -> None:
    functions = {name for name in ops.__all__ if name not in ("Schedule", "decode_workspace_bytes")}
    assert functions == {*NEEDED, "dense_attention"}


@pytest.mark.parametrize("op", NEEDED)
@pytest.mark.parametrize("backend", ["auto", "tilelang", "cutedsl"])
@pytest.mark.drawn(10)
def test_every_kernel_of_a_call_with_its_grid(op: str, backend: str) -> None:
    further = {} if op == "build_schedule" else {"backend": backend}
    queries = 8 if "decode" in op else 4096  # few queries are split, and merged
    told = msa_tiles.explain(getattr(ops, op), **arguments_of(op, queries=queries), **further, device="sm90")
    assert told.served and told.runs == "kernels" and told.target == "sm90"
    assert {kernel.op for kernel in told.kernels} <= set(parts_of(op))
    for kernel in told.kernels:
        assert kernel.cell is not None and kernel.cell.startswith(f"{kernel.op}.")
        assert kernel.launches > 0 and kernel.origin in ("pack", "cache", "compile")
        assert kernel.grid is not None and all(size > 0 for size in kernel.grid), kernel.cell
        refused = [each for each in kernel.asked if each.refusal is not None]
        assert len(kernel.asked) == len(default_registry().of(kernel.op))
        for each in refused:
            assert f"{each.cell}: refuses: {each.refusal}" in str(told)
    assert f"{op} on NVIDIA H100 80GB HBM3 (sm90)" in str(told).splitlines()[0]
    json.dumps(told.to_dict())


@pytest.mark.parametrize(
    ("op", "cell", "grid"),
    [
        ("combine", "combine.tilelang", (4096, HEADS // 16)),
        ("combine", "combine.cutedsl", (4096, HEADS // 16, 1)),
        ("select_blocks", "select_blocks.tilelang", (KV_HEADS * (4096 // 128 + 2),)),
        ("select_blocks", "select_blocks.cutedsl", (KV_HEADS * (4096 // 128 + 2), 1, 1)),
        ("sparse_attention", "sparse_attention.cutedsl", (H100, 1, 1)),
        ("sparse_attention", "shared_attention.cutedsl", (2 * H100, 1, 1)),
        ("dequantize_kv", "dequantize_kv.cutedsl", (KV_HEADS * 4096 // 64, 1, 1)),
        ("dequantize_kv", "dequantize_kv.tilelang", (KV_HEADS * 4096 // 64,)),
        ("norm_rope_append", "norm_rope_append.cutedsl", (4096 * (32 + 3 * KV_HEADS // 2 + 1) // 8, 1, 1)),
        ("norm_rope_append", "norm_rope_append.tilelang", (4096 * (32 + 3 * KV_HEADS // 2 + 1) // 8,)),
    ],
)
def test_grids_are_those_of_the_kernels(op: str, cell: str, grid: tuple[int, ...]) -> None:
    told = msa_tiles.explain(getattr(ops, op), **arguments_of(op), backend=cell.split(".")[1], device="sm90")
    [found] = [kernel.grid for kernel in told.kernels if (kernel.cell or "").startswith(f"{cell}.")]
    assert found == grid


@pytest.mark.parametrize("backend", DSLS)
def test_a_thread_block_of_dequantize_kv_has_as_many_rows_as_the_launch_counts(backend: str) -> None:
    """Calls of more thread blocks than kernels can count are refused by what the rows of the spec have."""
    rows = 4096
    stored = meta(rows, 3, DIM, dtype=torch.float8_e4m3fn)
    k = QuantizedTensor(stored, meta(3, dtype=torch.float32))
    [kernel] = msa_tiles.explain(ops.dequantize_kv, k, k, device="sm90", backend=backend).kernels
    [tile] = set(dequantize._tiles())
    assert kernel.grid is not None and math.prod(kernel.grid) == rows // tile * 3


def test_a_kernel_that_says_its_grid_otherwise_has_none(tmp_path: Any) -> None:
    cell = default_registry().select("combine", "cutedsl", "sm90")[0]
    text = cell.file.read_text().replace("grid=(out.shape[0],", "grid=(rows_of(out),")
    (tmp_path / "combine.py").write_text(text)
    changed = dataclasses.replace(cell, file=tmp_path / "combine.py")
    given = prefill()
    arguments = [given[name] for name in ("partial_out", "partial_lse", "out", "lse")]
    assert grids.grid_of(cell, {"head_dim": DIM}, arguments) == (4096, 4, 1)
    assert grids.grid_of(changed, {"head_dim": DIM}, arguments) is None


@pytest.mark.parametrize(("dtype", "columns", "group"), [(torch.bfloat16, DIM, 0), (torch.uint8, DIM // 2, 16)])
def test_windows_are_chosen_for_the_bytes_of_keys(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, columns: int, group: int
) -> None:
    """Two codes of 4 bits are one byte of a row."""
    given, choose = arguments_of("sparse_attention"), windows.choose_rounds
    if group:
        for name in "kv":
            scale = meta(4096, KV_HEADS, DIM // group, dtype=torch.float8_e4m3fn)
            given[name] = QuantizedTensor(meta(4096, KV_HEADS, columns, dtype=dtype), scale, "nvfp4")
    told: list[int] = []

    def recorded(*sizes: int) -> tuple[int, int]:
        told.append(sizes[6])
        return choose(*sizes)

    monkeypatch.setattr(copied, "is_made", lambda *_: False)  # copies are of BF16
    monkeypatch.setattr(windows, "choose_rounds", recorded)
    assert msa_tiles.explain(ops.sparse_attention, **given, backend="cutedsl", device="sm90").served
    assert set(told) == {2 * BLOCK * columns * dtype.itemsize}


def test_launches_and_memory_follow_the_workspace() -> None:
    def told(workspace: Any) -> Any:
        call = arguments_of("sparse_attention")
        return msa_tiles.explain(ops.sparse_attention, **call, workspace=workspace, device="sm90")

    large, small = told(1 << 30), told(1 << 26)
    attender = lambda answer: answer.kernels[0].launches  # noqa: E731
    assert attender(small) > attender(large)
    assert small.workspace_bytes < 1 << 27 < large.workspace_bytes < 2 << 30
    # The caller's own memory is not what the call takes.
    given = told(meta(1 << 26, dtype=torch.uint8))
    assert given.workspace_bytes < small.workspace_bytes - (1 << 25)
    assert large.result_bytes == 4096 * HEADS * DIM * 2
    call = arguments_of("sparse_attention")
    into = {"out": torch.empty_like(call["q"]), "lse": meta(4096, HEADS, dtype=torch.float32)}
    assert msa_tiles.explain(ops.sparse_attention, **call, **into, device="sm90").result_bytes == 0


WINDOWED = {
    "sparse_attention": {},
    "one launch a window": {"batch_invariant": True},
    "KV heads in turns": {"workspace": 1 << 27},
    "sparse_attention_backward": {},
    "index_kl": {},
    "of the prefix": {"block_indices": None},
    "msa_attention": {},
}


@pytest.mark.parametrize("what", WINDOWED)
@pytest.mark.drawn(3)
def test_windows_that_are_alike_count_as_if_each_were_rehearsed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = "index_kl" if what == "of the prefix" else what if what in NEEDED else "sparse_attention"
    # The last window is a shorter one.
    call = {**arguments_of(op, queries=40_000, keys=70_000), "workspace": 1 << 28, **WINDOWED[what]}
    met = []
    launch = rehearsal._Entry.__call__
    monkeypatch.setattr(rehearsal._Entry, "__call__", lambda self, *given: met.append(0) or launch(self, *given))
    told = msa_tiles.explain(getattr(ops, op), **call, device="sm90")
    few, met[:] = len(met), []
    monkeypatch.setattr(backends, "turns", lambda steps: steps)
    assert told == msa_tiles.explain(getattr(ops, op), **call, device="sm90")
    assert few < len(met) == sum(kernel.launches for kernel in told.kernels)


def test_memory_of_values_is_not_touched() -> None:
    """Nothing is allocated: this call's results alone take two terabytes."""
    call = {name: value.expand(1 << 25, -1, -1) if name == "q" else value
            for name, value in arguments_of("sparse_decode", queries=1).items()}  # fmt: skip
    call["block_indices"] = meta(KV_HEADS, 1 << 25, TOPK, dtype=torch.int32)
    call["q"] = meta(1 << 25, HEADS, DIM)
    assert msa_tiles.explain(ops.sparse_decode, **call, device="sm90").result_bytes > 1 << 38


@pytest.mark.parametrize(
    ("op", "label"),
    [
        *((op, label) for op in ("sparse_attention", "select_blocks", "sparse_attention_backward", "index_kl")
          for label in cases.labels(op) if cases.find(op, label).num_q > 1),
    ],
)  # fmt: skip
@pytest.mark.drawn(6)
def test_the_roofline_is_that_of_the_benchmarks(op: str, label: str) -> None:
    case = cases.find(op, label)
    told = msa_tiles.explain(getattr(ops, op), **arguments_of(op, queries=case.num_q, keys=case.num_k), device="sm90")
    assert told.expectation is not None and told.expectation.device == "NVIDIA H100 80GB HBM3"
    floor = cases.floor_ms([cases.work(op, label, "bf16")], "NVIDIA H100 80GB HBM3")
    assert told.expectation.floor_ms == pytest.approx(floor)


def test_rows_of_caches_of_4_bits_are_as_wide_as_others() -> None:
    floors = []
    for precision in ("bf16", "q16kv4"):
        call = call_of("norm_rope_append", {"head_dim": DIM}, Pair("bf16", precision), 64, 64, 1, default_registry())
        told = msa_tiles.explain(ops.norm_rope_append, **call, device="sm90")
        assert told.expectation is not None
        floors.append(told.expectation.floor_ms)
    assert 0.6 * floors[0] < floors[1] < floors[0]


def test_an_expectation_states_its_error() -> None:
    rows = [(1.0, 2.0), (2.0, 6.0), (8.0, 20.0)]
    found = expect.from_rows(rows, 5.0, "a card", "another")
    assert (found.ms, found.rows, found.card) == (pytest.approx(13.0), 3, "another")
    # Left out: the first is expected at 3 instead of 2, the second at 2 + 18 / 7 instead of 6, the third at 24, not 20.
    assert found.within == pytest.approx(1.5)
    assert "3 rows measured on another, each met within a factor of 1.5" in str(found)
    for outside, taken in ((0.5, 1.0), (1.0, 2.0), (2.0, 6.0), (8.0, 20.0), (16.0, 40.0)):
        assert expect.from_rows(rows, outside, "a card", "another").ms == pytest.approx(taken)
    for far in (0.2, 40.0):
        told = expect.from_rows(rows, far, "a card", "another")
        assert told.ms is None and str(told) == f"not measured at such a size; roofline {far:g} ms on a card"
    assert expect.from_rows(rows[:1], 1.0, "a card", "another").within is None
    # A launch alone says nothing of what is a thousand times larger; its answer is never given, and is no miss.
    assert expect.from_rows([(0.001, 2.0), *rows[:2]], 1.0, "a card", "another").within == pytest.approx(2, rel=1e-3)
    assert expect.from_rows([(1.0, 2.0), (1.0, 8.0)], 1.0, "a card", "another").ms == pytest.approx(4.0)
    none = expect.from_rows([], 0.5, "a card", "another")
    assert (none.ms, str(none)) == (None, "not measured; roofline 0.5 ms on a card")


def test_nothing_measured_on_one_target_is_said_of_another() -> None:
    told = msa_tiles.explain(ops.sparse_attention, **arguments_of("sparse_attention"), device="sm100")
    assert told.served and told.expectation is not None and told.expectation.ms is None


def test_lengths_are_read_where_they_can_be() -> None:
    call = arguments_of("select_blocks", queries=4096, keys=8192)

    def floor(starts_q: Tensor, starts_k: Tensor) -> tuple[float, tuple[str, ...]]:
        told = msa_tiles.explain(ops.select_blocks, **call, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, device="sm90")
        assert told.expectation is not None
        return told.expectation.floor_ms, told.notes

    even = torch.tensor([0, 2048, 4096], dtype=torch.int32), torch.tensor([0, 4096, 8192], dtype=torch.int32)
    odd = torch.tensor([0, 4095, 4096], dtype=torch.int32), torch.tensor([0, 8191, 8192], dtype=torch.int32)
    assumed = meta(3, dtype=torch.int32), meta(3, dtype=torch.int32)
    (even_floor, none), (odd_floor, _), (assumed_floor, notes) = floor(*even), floor(*odd), floor(*assumed)
    assert even_floor == assumed_floor < odd_floor
    assert not none and "Requests are taken to have equally many queries: their lengths are not known here." in notes


def quantised(shape: tuple[int, ...], scale: tuple[int, ...] = ()) -> QuantizedTensor:
    return QuantizedTensor(meta(*shape, dtype=torch.float8_e4m3fn), meta(*scale, dtype=torch.float32))


@pytest.mark.parametrize("copy", [False, True])
def test_quantised_tensors_find_their_kernels(copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that read them, or the one that copies them to BF16 and those of BF16."""
    monkeypatch.setattr(attention, "COPY", copy)
    call = arguments_of("sparse_attention")
    call |= {name: quantised((4096, KV_HEADS, DIM)) for name in ("k", "v")}
    told = msa_tiles.explain(ops.sparse_attention, **call, device="sm90")
    found = {
        kernel.op: kernel.precision for kernel in told.kernels if kernel.op in ("sparse_attention", "dequantize_kv")
    }
    assert found == (
        {"dequantize_kv": "q16kv8", "sparse_attention": "bf16"} if copy else {"sparse_attention": "q16kv8"}
    )


@pytest.mark.parametrize(
    ("format", "outer", "copy", "rounded"),
    [("e4m3", False, True, True), ("e4m3", False, False, False), ("nvfp4", True, True, True),
     ("nvfp4", False, True, False), ("mxfp4", False, True, False)],
)  # fmt: skip
def test_errors_of_an_attention_to_a_rounded_copy_are_told_as_such(
    format: str, outer: bool, copy: bool, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of groups, and e8m0 ones, are exact in the copy: those that are float32 are rounded into it."""
    monkeypatch.setattr(attention, "COPY", copy)
    keys = quantised((4096, KV_HEADS, DIM))
    if groups := GROUPS.get(format):
        data = meta(4096, KV_HEADS, DIM // 2, dtype=torch.uint8)
        scale = meta(4096, KV_HEADS, DIM // groups.size, dtype=groups.dtype)
        keys = QuantizedTensor(data, scale, format, global_scale=meta(dtype=torch.float32) if outer else None)
    call = arguments_of("sparse_attention") | {"k": keys, "v": keys}
    told = msa_tiles.explain(ops.sparse_attention, **call, device="sm90")
    found = [note for note in told.notes if "errors of attention count from that copy" in note]
    assert len(found) == rounded
    assert all(f"from {format} to bfloat16" in note and note in str(told) for note in found)
    alone = msa_tiles.explain(ops.dequantize_kv, keys, keys, device="sm90")
    assert not any("copied" in note for note in alone.notes)


def test_every_reason_of_a_refusal_is_told_at_once() -> None:
    call = {name: value[..., :96] if name in ("q", "k", "v") else value
            for name, value in arguments_of("sparse_decode").items()}  # fmt: skip
    call["q"] = call["q"][:, :12]
    told = msa_tiles.explain(ops.sparse_decode, **call, device="sm90")
    assert not told.served and "it would raise NoKernelError" in str(told)
    refusal = next(each.refusal for each in told.kernels[0].asked if each.cell == "sparse_decode.tilelang.sm90.q16kv8")
    for reason in ("it takes q16kv8, the call is bf16", "head_dim is 96, wanted", "group is 3, wanted"):
        assert reason in (refusal or "")


def test_addresses_and_strides_are_those_of_the_call() -> None:
    storage = torch.empty(4096 * KV_HEADS * DIM + 1, dtype=torch.bfloat16)
    odd = storage[1:].view(4096, KV_HEADS, DIM)
    call = {name: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
            for name, value in arguments_of("sparse_attention").items()}  # fmt: skip
    assert msa_tiles.explain(ops.sparse_attention, **call, device="sm90").served
    told = msa_tiles.explain(ops.sparse_attention, **{**call, "k": odd}, device="sm90")
    assert not told.served and "does not serve strided_unaligned" in str(told)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("sparse_attention", {"k": meta(7, 3, DIM)}),
    ("sparse_attention", {"block_indices": meta(KV_HEADS, 3, TOPK, dtype=torch.int32)}),
    ("sparse_attention", {"block_indices": meta(KV_HEADS, 4096, TOPK)}),
    ("sparse_attention", {"softmax_scale": -1.0}),
    ("sparse_attention", {"workspace": 0}),
    ("sparse_attention", {"workspace": 1}),
    ("sparse_attention", {"backend": "triton"}),
    ("sparse_attention", {"q": "no tensor"}),
    ("sparse_attention", {"v": torch.empty(4096, KV_HEADS, DIM)}),
    ("sparse_attention", {"unheard": 3}),
    ("select_blocks", {"topk": 0}),
    ("select_blocks", {"idx_k": meta(4096, 64)}),
    ("msa_decode", {"topk": "many"}),
    ("combine", {"partial_lse": meta(4, 4096, HEADS)}),
    ("index_kl", {"token_weights": meta(3)}),
]


@pytest.mark.parametrize(
    ("op", "change"), WRONG, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_wrong_arguments_raise_what_the_call_raises(op: str, change: dict[str, Any]) -> None:
    call = {**arguments_of(op, queries=4096), **change}

    def real(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.is_meta else value

    function = getattr(ops, op)
    with pytest.raises((ValueError, TypeError)) as told:
        msa_tiles.explain(function, **call, device="sm90")
    if change == {"workspace": 1}:  # kernels alone have windows
        assert "workspace: got 1 bytes" in str(told.value)
        return
    small = {name: real(value) for name, value in call.items()}
    with pytest.raises((ValueError, TypeError)) as called:
        function(**small)
    assert type(told.value) is type(called.value)
    if not any(isinstance(value, Tensor) and not value.is_meta for value in change.values()):
        assert str(told.value).replace("meta", "cpu") == str(called.value)


def test_check_looks_at_values() -> None:
    call = {name: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
            for name, value in arguments_of("sparse_attention", queries=256, keys=256).items()}  # fmt: skip
    with pytest.raises(ValueError, match=r"block_indices: got id 0 twice at \[0, 0\]"):
        msa_tiles.explain(ops.sparse_attention, **call, check=True, device="sm90")
    call["block_indices"][..., 1:] = -1
    assert msa_tiles.explain(ops.sparse_attention, **call, check=True, device="sm90").served
    with pytest.raises(ValueError, match="check: got True for tensors without values"):
        msa_tiles.explain(ops.sparse_attention, **arguments_of("sparse_attention"), check=True, device="sm90")


@pytest.mark.parametrize("device, said", [("B300", True), ("sm103", True), ("sm100", False)])
def test_how_kernels_come_that_a_target_has_on_request(device: str, said: bool) -> None:
    told = msa_tiles.explain(ops.sparse_attention, **arguments_of("sparse_attention"), device=device)
    remedy = "sparse_attention can be generated for sm103 and is not: msa-tiles generate --tree DIR --target sm103"
    assert (told.served, remedy in told.notes) == (not said, said)
    assert str(told).count(remedy) == int(said)


def test_a_cpu_runs_the_reference() -> None:
    told = msa_tiles.explain(ops.sparse_attention, **arguments_of("sparse_attention"), device="cpu")
    assert (told.served, told.kernels, told.runs, told.workspace_bytes) == (True, (), "reference", None)
    assert str(told).splitlines()[1] == "  runs on the reference in plain torch"
    told = msa_tiles.explain(
        ops.sparse_attention, **arguments_of("sparse_attention"), backend="reference", device="sm90"
    )
    assert (told.kernels, told.runs, told.workspace_bytes) == ((), "reference", None)
    assert str(told).splitlines()[1] == "  runs on the reference in plain torch, as backend says"


def test_dense_attention_has_kernels_of_others() -> None:
    given = prefill()
    call = {name: given[name] for name in ("q", "k", "v")}
    told = msa_tiles.explain(ops.dense_attention, **call, device="sm90")
    assert (told.runs, told.workspace_bytes) == ("borrowed", None) and "runs on FlashAttention-4" in str(told)


@pytest.mark.parametrize(
    ("operator", "device", "error", "sentence"),
    [
        (torch.add, "sm90", TypeError, "wanted a function of msa_tiles.ops, such as ops.sparse_attention"),
        ("sparse_attention", "sm90", TypeError, "wanted a function of msa_tiles.ops"),
        (ops.Schedule, "sm90", TypeError, "wanted a function of msa_tiles.ops"),
        (ops.combine, "sm91", ValueError, "device sm91 is unknown; did you mean sm90? Known: sm100, "),
        *(
            (ops.combine, name, ValueError, "sm90; cards such as H100, cuda, cuda:N and cpu are devices, too")
            for name in ("CPU", "", "H1")
        ),
        (
            ops.combine,
            "gb200",
            ValueError,
            "gb200 is unknown; a GPU of compute capability 10.0 is served by sm100: write device sm100.",
        ),
    ],
)
def test_what_is_no_operator_or_device(operator: Any, device: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as told:
        msa_tiles.explain(operator, **arguments_of("combine"), device=device)
    assert sentence in str(told.value)


def test_other_calls_are_as_before_meanwhile_and_afterwards() -> None:
    call = {"partial_out": torch.ones(2, 3, 4, 8), "partial_lse": torch.zeros(2, 3, 4)}
    wanted, _ = ops.combine(**call)
    seen: list[Tensor] = []
    # What is explained calls back in the middle; another thread computes.
    met = grids.grid_of

    def meanwhile(*arguments: Any) -> Any:
        thread = threading.Thread(target=lambda: seen.append(ops.combine(**call)[0]))
        thread.start()
        thread.join()
        return met(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "grid_of", meanwhile)
        msa_tiles.explain(ops.combine, **arguments_of("combine"), device="sm90")
    assert seen and torch.equal(seen[0], wanted)
    assert torch.equal(ops.combine(**call)[0], wanted)
    with pytest.raises(ValueError):
        msa_tiles.explain(ops.combine, **{**call, "backend": "none"}, device="sm90")
    assert torch.equal(ops.combine(**call)[0], wanted)


@pytest.mark.parametrize(
    ("label", "requests", "keys"), [("decode_128k_b32", 32, 1 << 17), ("decode_1m_b1", 1, 1 << 20)]
)
def test_a_step_of_decoding_is_expected_from_steps_that_were_timed(label: str, requests: int, keys: int) -> None:
    call = call_of("msa_decode", {"pages_per_block": 1}, Pair("bf16", "bf16"), 1, keys, requests, default_registry())
    told = msa_tiles.explain(ops.msa_decode, **call, backend="cutedsl", device="sm90").expectation
    rows = expect.MEASURED.read_text()
    count = len(json.loads(rows)["rows"]["msa_decode bf16 cutedsl"])
    assert told is not None and told.rows == count and told.ms is not None
    works = BENCHMARKS["msa_decode"].work(label, "bf16")
    assert told.floor_ms == pytest.approx(cases.floor_ms(works, "NVIDIA H100 80GB HBM3"), rel=0.02)


def test_what_is_told_of_a_kernel() -> None:
    told = msa_tiles.explain(ops.combine, **arguments_of("combine"), device="sm90")
    [kernel] = told.kernels
    first, second, *_ = dataclasses.replace(kernel, tree="/mine", origin="pack", place="/packs/one").lines()
    assert first == f"{kernel.cell} (of the tree /mine)  head_dim=128"
    assert second == "  from the pack /packs/one, 1 launch, grid 4,096 x 4"
    idle = dataclasses.replace(kernel, launches=0, grid=None, origin="cache")
    assert list(idle.lines())[1] == "  from the cache, found, and not launched"
    missing = dataclasses.replace(kernel, cell=None)
    assert next(missing.lines()) == "combine: no kernel serves it"
    assert next(dataclasses.replace(missing, optional=True).lines()).endswith("and the call does without")
    lost = dataclasses.replace(told, kernels=(missing,))
    assert not lost.served and "\n  0 launches, " in str(lost)
    assert dataclasses.replace(told, kernels=(dataclasses.replace(missing, optional=True),)).served


@pytest.mark.parametrize(("device", "cpu"), [("meta", False), ("cpu", True)])
def test_a_call_without_a_device_says_what_it_is_taken_for(device: str, cpu: bool) -> None:
    arguments = {
        name: torch.empty_like(part, device=device) for name, part in arguments_of("combine", queries=4).items()
    }
    note = f"No device is named and the tensors are on {device}: as if on NVIDIA H100 80GB HBM3 (sm90)."
    told = str(msa_tiles.explain(ops.combine, **arguments))
    assert note in told and ("What runs on the CPU is the reference: device='cpu'." in told) == cpu
    for named in ("sm90", "H200", "cpu"):
        told = str(msa_tiles.explain(ops.combine, **arguments, device=named))
        assert "No device is named" not in told
    assert "combine on NVIDIA H200 (sm90)" in str(msa_tiles.explain(ops.combine, **arguments, device="h200"))
