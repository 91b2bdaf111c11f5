"""Calls of the kernels that write rows into caches or read them, simulated and compared with the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from simulated_calls import Call

from msa_tiles import trees
from msa_tiles.call import norm_rope as norm_rope_calls
from msa_tiles.call.caches import IndexRows, Rows
from msa_tiles.call.norm_rope import ALONE, INDEX
from msa_tiles.launch import dequantize, norm_rope
from msa_tiles.launch.caches import index_arguments, kv_arguments
from msa_tiles.quant import FP8
from msa_tiles.spec import load
from msa_tiles.verify import caches
from msa_tiles.verify.dequantize import DequantizeKV
from msa_tiles.verify.norm_rope import NormRopeAppend

TOLERANCES = load(*trees.specs_dirs()).operators["norm_rope_append"].tolerance
SCALED = ("q16kv8", "q8k8")  # precisions whose rows may have a scale each


def append_kv(call: Call, precision: str = "bf16", **dims: int) -> None:
    check = _check(caches.AppendKV, call, precision, dims)
    into = check.caches.copied()
    rows = Rows(*check.rows, check.slots, *check.given, "tilelang")
    scales = into.scales or (None, None)
    call.run("append_kv", _variant(precision, dims), *kv_arguments(rows, *into.views, *scales), precision=precision)
    check.compare(into.codes())


def append_kv_q16kv8(call: Call, **dims: int) -> None:
    append_kv(call, "q16kv8", **dims)


def append_kv_q16kv4(call: Call, **dims: int) -> None:
    append_kv(call, "q16kv4", **dims)


def append_kv_q16kvmx4(call: Call, **dims: int) -> None:
    append_kv(call, "q16kvmx4", **dims)


def append_index(call: Call, precision: str = "bf16", **dims: int) -> None:
    check = _check(caches.AppendIndex, call, precision, dims)
    into = check.caches.copied()
    rows = IndexRows(check.rows[0][:, 0], check.slots, check.given[0], "tilelang")
    arguments = index_arguments(rows, into.views[0][:, 0], into.scales[0][:, 0] if into.scales else None)
    call.run("append_index", _variant(precision, dims), *arguments, precision=precision)
    check.compare(into.codes())


def append_index_q8k8(call: Call, **dims: int) -> None:
    append_index(call, "q8k8", **dims)


def append_index_q16k4(call: Call, **dims: int) -> None:
    append_index(call, "q16k4", **dims)


def append_index_q16kmx4(call: Call, **dims: int) -> None:
    append_index(call, "q16kmx4", **dims)


def dequantize_kv(call: Call, precision: str, **dims: int) -> None:
    check = _check(DequantizeKV, call, precision, {"total_k": call.total_k, **dims})
    into = check.buffers()
    arguments = dequantize.arguments(check.whole, *(buffer.view for buffer in into))
    call.run("dequantize_kv", dequantize.variant(check.whole), *arguments, precision=precision)
    check.compare(check.taken(into))


def dequantize_kv_q16kv8(call: Call, **dims: int) -> None:
    dequantize_kv(call, "q16kv8", **dims)


def dequantize_kv_q16kv4(call: Call, **dims: int) -> None:
    dequantize_kv(call, "q16kv4", **dims)


def dequantize_kv_q16kvmx4(call: Call, **dims: int) -> None:
    dequantize_kv(call, "q16kvmx4", **dims)


def norm_rope_append(
    call: Call, precision: str = "bf16", into_buffers: bool = False, dense: bool = False, **dims: int
) -> None:
    """A `dense` call has no index branch: what belongs to it stays as it was, and is then filled by the reference."""
    check = _check(NormRopeAppend, call, precision, dims)
    named, outputs = check.prepared(into_buffers)
    before = [each.clone() for each in outputs]
    if dense:
        named |= dict.fromkeys((*INDEX, *ALONE))
    given = {"q_out": None, "idx_out": None, "format": None, "k_scale": None, "v_scale": None, "backend": "reference"}
    made, written = norm_rope_calls.norm_rope_append(**{**given, **named})
    variant = {name: dims[name] for name in ("head_dim", "float32_table", "bf16_index", "token_scales") if name in dims}
    arguments = norm_rope.arguments(made, written.buffers)
    call.run("norm_rope_append", variant, *arguments, precision=precision)
    if dense:
        places = [1, 3, *range(6, len(outputs))]  # index queries, the index pool, scales of index keys
        others = check.run(into_buffers)
        for place in places:
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[outputs[place].dtype.itemsize]
            assert torch.equal(outputs[place].view(kind), before[place].view(kind))
        outputs = tuple(others[i] if i in places else each for i, each in enumerate(outputs))
    check.compare(outputs)


def norm_rope_append_q16kv8(call: Call, **arguments: Any) -> None:
    norm_rope_append(call, "q16kv8", **arguments)


def norm_rope_append_q16kv4(call: Call, **arguments: Any) -> None:
    norm_rope_append(call, "q16kv4", **arguments)


def norm_rope_append_q16kvmx4(call: Call, **arguments: Any) -> None:
    norm_rope_append(call, "q16kvmx4", **arguments)


def _check(kind: Any, call: Call, precision: str, dims: dict[str, int]) -> Any:
    stored = FP8 if precision in SCALED else torch.bfloat16
    packed = "nvfp4" if precision.endswith("k4") or precision.endswith("kv4") else "mxfp4" if "mx4" in precision else ""
    case = SimpleNamespace(
        dims={"total_q": call.total_q, **dims}, dtype=lambda role: stored, packed=packed, workload=call,
        tolerance=TOLERANCES.get(precision),
    )  # fmt: skip
    return kind(case, call.source, call.strided, "reference")


def _variant(precision: str, dims: dict[str, int]) -> dict[str, int]:
    names = ("head_dim", "float32_rows", *(["token_scales"] if precision in SCALED else []))
    return {name: dims[name] for name in names}
