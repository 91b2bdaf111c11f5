"""dequantize_kv in CuTe DSL, run thread by thread on the CPU: see `lanes`.

What instructions make of registers is written down here and in test_dsl_four_bits, as the PTX manual has them.
"""

from __future__ import annotations

import os
import types
from types import SimpleNamespace
from typing import Any

import lanes
import pytest
import torch
from lanes import Float32, Int32, Memory, Pointer
from test_dsl_e4m3 import halves, prmt, word
from test_dsl_four_bits import View, Words
from test_dsl_four_bits import ptx as ptx_of_operands
from torch import Tensor

from msa_tiles.launch import dequantize
from msa_tiles.quant import FP8
from msa_tiles.runtime.registry import default_registry
from msa_tiles.verify.cases import Disagreement
from msa_tiles.verify.dequantize import DequantizeKV
from msa_tiles.verify.inputs import Source

SEED = int(os.environ["MSA_TILES_SEED"])
FORMATS = {"q16kv8": "", "q16kv4": "nvfp4", "q16kvmx4": "mxfp4"}
TENSORS = {"q16kv8": 2, "q16kv4": 3, "q16kvmx4": 2}


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
    if "cvt.rn.bf16x2.f32" not in text:
        return ptx_of_operands(text, write_only_types, read_only_args)
    assert text.endswith("cvt.rn.bf16x2.f32 {$w0}, second, first; }")
    if "cvt.f32.f16" in text:
        return ptx_of_operands(text, write_only_types, read_only_args)
    assert "shl.b32 low, {$r0}, 16; and.b32 high, {$r0}, 0xFFFF0000; mov.b32 first, low; mov.b32 second, high" in text
    pair, factor, lacking = read_only_args
    return word((halves(pair, torch.bfloat16).float() * lacking * factor).to(torch.bfloat16))


@pytest.fixture
def dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lanes.py has no stand-in for."""

    def make_ptr(element: Any, place: Pointer, _memspace: Any, assumed_align: int) -> Pointer:
        units = 32 // place.memory.bits  # type: ignore[attr-defined]
        assert element is Int32 and place.offset * place.memory.bits % (8 * assumed_align) == 0  # type: ignore[attr-defined]
        kind = Words if place.memory.bits == 8 else View  # type: ignore[attr-defined]
        return Pointer(kind(place.memory, units), place.offset // units)  # type: ignore[arg-type]

    monkeypatch.setattr(lanes, "_LOADED", {})  # helpers that were loaded with other stand-ins
    monkeypatch.setattr(lanes.ARCH, "inline_ptx", ptx)
    monkeypatch.setattr(lanes.ARCH, "prmt", prmt, raising=False)
    monkeypatch.setattr(lanes._CUTLASS.cute, "make_ptr", make_ptr)
    for name in ("BFloat16", "Float64", "Uint8"):
        monkeypatch.setattr(lanes._CUTLASS, name, name, raising=False)


def argument(value: Tensor, memories: dict[int, tuple[Memory, Tensor]]) -> Any:
    """A tensor as device code sees it, over the memory of its storage: floats, or integers of its bits."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    place = value.untyped_storage().data_ptr()
    if place not in memories:
        whole = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
        if value.dtype == torch.float32:
            memory = Memory(map(Float32, whole.tolist()))
        else:
            memory = Memory(Int32(x) for x in whole.view(kinds[value.element_size()]).tolist())
        memory.bits = 8 * value.element_size()  # type: ignore[attr-defined]
        memories[place] = memory, whole
    return lanes.Tensor(memories[place][0], value.storage_offset(), tuple(value.shape), value.stride())


def run(check: DequantizeKV, precision: str, module: types.ModuleType) -> tuple[Tensor, ...]:
    """What the kernel writes into poisoned buffers."""
    into = check.buffers()
    call = check.whole
    memories: dict[int, tuple[Memory, Tensor]] = {}
    arguments = dequantize.arguments(call, *(buffer.view for buffer in into))
    # What is written first: in the place of a table that is not read stands a part of it.
    made = [argument(value, memories) for value in reversed(arguments)][::-1]
    kernel = module.DequantizeKv(**dequantize.variant(call))
    count = TENSORS[precision]
    stored = [kernel.cache.stored(*made[count * i : count * (i + 1)]) for i in range(2)]
    rows, heads, _ = call.shape
    requests = 1 if call.page_table is None else call.page_table.shape[0]
    grid = (requests * -(-(rows // max(requests, 1)) // (module.ROWS * module.STEPS)) * heads,)
    lanes.launch(kernel.kernel, (*stored, *made[2 * count :]), grid, module.ROWS * kernel.lanes)
    for buffer in into:
        memory, whole = memories[buffer.view.untyped_storage().data_ptr()]
        bits = torch.tensor([int(x) & 0xFFFF for x in memory], dtype=torch.int32)
        whole.view(torch.int16).copy_(bits.to(torch.int16))
    return check.taken(into)


def check_of(precision: str, sequences: list[tuple[int, int]], strided: bool, **dims: int) -> DequantizeKV:
    dims = {"total_k": sum(keys for _, keys in sequences), "num_kv_heads": 2, "token_scales": 0, **dims}
    case = SimpleNamespace(
        dims=dims, dtype=lambda role: FP8, packed=FORMATS[precision], workload=SimpleNamespace(sequences=sequences)
    )
    return DequantizeKV(case, Source(torch.device("cpu"), SEED, "normal"), strided, "reference")  # type: ignore[arg-type]


def module_of(precision: str) -> types.ModuleType:
    [cell] = default_registry().select(op="dequantize_kv", dsl="cutedsl", target="sm90", precision=precision)
    return lanes.load(cell.file)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("precision", "token_scales"), [("q16kv8", 0), ("q16kv8", 1), ("q16kv4", 0), ("q16kvmx4", 0)]
)  # fmt: skip
@pytest.mark.parametrize("paged", [0, 1])
@pytest.mark.drawn(1)
def test_rows_are_those_of_the_reference(
    precision: str, token_scales: int, paged: int, strided: bool, dsl: None
) -> None:
    sequences = [(1, 21), (0, 0), (1, 70)] if paged else [(1, 69)]
    page = 8 if strided else 5
    check = check_of(
        precision, sequences, strided, paged=paged, token_scales=token_scales, head_dim=64, page_size=page
    )  # fmt: skip
    check.compare(run(check, precision, module_of(precision)))


@pytest.mark.parametrize("precision", FORMATS)
def test_thread_blocks_have_as_many_tokens_as_the_launch_counts(precision: str, dsl: None) -> None:
    module = module_of(precision)
    assert {module.ROWS * module.STEPS} == set(dequantize._tiles())


@pytest.mark.planted
def test_a_write_behind_the_last_key_is_found(dsl: None) -> None:
    check = check_of("q16kv8", [(1, 21), (1, 70)], False, paged=1, head_dim=64, page_size=8)
    module = module_of("q16kv8")
    into = check.buffers()
    into[0].view[check.whole.page_table.shape[1] * 8 - 1] = 0.0  # type: ignore[union-attr]
    with pytest.raises(Disagreement, match="behind the last keys"):
        check.taken(into)
    outputs = run(check, "q16kv8", module)
    outputs[1][0, 0, 0] += 1.0
    with pytest.raises(Disagreement, match="v_out"):
        check.compare(outputs)
