"""append_kv, append_index and norm_rope_append in CuTe DSL, run thread by thread on the CPU: see `lanes`.

What `cvt.rn.satfinite.e4m3x2.f32` does is written down here, as the PTX manual has it.
"""

from __future__ import annotations

import os
import re
import struct
from types import SimpleNamespace
from typing import Any

import lanes
import pytest
import torch
from lanes import Float32, Int32, Memory, Pointer
from torch import Tensor

from msa_tiles import trees
from msa_tiles.call import norm_rope as norm_rope_calls
from msa_tiles.call.caches import IndexRows, Rows
from msa_tiles.launch import norm_rope
from msa_tiles.launch.caches import index_arguments, kv_arguments
from msa_tiles.quant import FP8
from msa_tiles.runtime.registry import default_registry
from msa_tiles.spec import load
from msa_tiles.verify import caches
from msa_tiles.verify.inputs import Source
from msa_tiles.verify.norm_rope import NormRopeAppend

SEED = int(os.environ["MSA_TILES_SEED"])
BF16 = SimpleNamespace(width=16)
SCALE, GLOBAL = "_scale", "_global_scale"
ENDINGS = {
    "append_plain": ("",),
    "append_e4m3": ("", SCALE),
    "append_mxfp4": ("", SCALE),
    "append_nvfp4": ("", SCALE, GLOBAL),
}
FOUR_BITS = {"q16kv4": "append_kv", "q16kvmx4": "append_kv", "q16k4": "append_index", "q16kmx4": "append_index"}
FORMATS = dict(zip(FOUR_BITS, ("nvfp4", "mxfp4") * 2, strict=True))


def e4m3_of(value: float) -> int:
    """The code of a float32: to nearest even, what is larger becomes the largest, from the bits alone."""
    (pattern,) = struct.unpack("I", struct.pack("f", value))
    sign, magnitude = pattern >> 31 << 7, pattern & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 0x7F
    exponent, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    if exponent == 0:  # far below e4m3's smallest
        return sign
    # In units of 2**-9, the smallest step of e4m3, times 2**shift.
    step = max(exponent - 127, -6) - 3
    whole, shift = fraction | 1 << 23, step - (exponent - 127 - 23)
    if shift > 40:
        return sign
    rounded, rest = whole >> shift, whole & (1 << shift) - 1
    rounded += rest > 1 << shift - 1 or (rest == 1 << shift - 1 and rounded & 1)
    return sign | min(rounded + (step + 9 << 3), 0x7E)


class Float64(float):
    """Double precision, as Python's."""


class Pairs(Memory):
    """Memory of bytes that is handed to a kernel as two-byte elements."""

    element = BF16


class Words:
    """Memory of bytes as words."""

    def __init__(self, of: Memory) -> None:
        self.of = of

    def __setitem__(self, place: int, word: int) -> None:
        for i in range(4):
            self.of[4 * place + i] = int(word) >> 8 * i & 255


def ptx(text: str, write_only_types: Any = (), read_only_args: Any = ()) -> Int32:
    assert "low, {$r1}, {$r0}" in text and "high, {$r3}, {$r2}" in text and "{low, high}" in text
    return Int32(sum(e4m3_of(Float32(value)) << 8 * i for i, value in enumerate(read_only_args)))


@pytest.fixture
def dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lanes.py has no stand-in for."""

    def make_ptr(element: Any, place: Pointer, _memspace: Any, assumed_align: int) -> Pointer:
        if element is not Int32:
            return place
        if isinstance(place.memory, Pairs):
            assert 2 * place.offset % assumed_align == 0
            return Pointer(Words(place.memory), place.offset // 2)  # type: ignore[arg-type]
        assert assumed_align in (4, 8) and place.offset % assumed_align == 0
        return Pointer(Words(place.memory), place.offset // 4)  # type: ignore[arg-type]

    def make_rmem_tensor(layout: Any, element: Any) -> lanes.Tensor:
        made = lanes.empty(layout)
        made.memory.element = Float32 if element is Float32 else BF16  # type: ignore[attr-defined]
        return made

    element_of = property(lambda tensor: getattr(tensor.memory, "element", BF16))
    monkeypatch.setattr(lanes.Tensor, "element_type", element_of)
    monkeypatch.setattr(lanes, "_LOADED", {})  # helpers that were loaded with other stand-ins
    monkeypatch.setattr(lanes._CUTLASS.cute, "make_rmem_tensor", make_rmem_tensor)
    monkeypatch.setattr(lanes.ARCH, "inline_ptx", ptx)
    monkeypatch.setattr(lanes._CUTLASS.cute, "make_ptr", make_ptr)
    for name, stand_in in {"BFloat16": BF16, "Float64": Float64, "Uint8": int}.items():
        monkeypatch.setattr(lanes._CUTLASS, name, stand_in, raising=False)
    for name in ("__add__", "__mul__"):
        plain = getattr(float, name)
        single = lambda one, other, plain=plain: Float32(plain(float(one), float(other)))  # noqa: E731
        monkeypatch.setattr(Float32, name, single, raising=False)
    math = SimpleNamespace(rsqrt=lambda value: Float32(1 / value**0.5))
    monkeypatch.setattr(lanes._CUTLASS.cute, "math", math, raising=False)
    rounded = lambda value, _element: Float32(torch.tensor(value).bfloat16())  # noqa: E731
    monkeypatch.setattr(Float32, "to", rounded, raising=False)


def endings(cell: Any) -> tuple[str, ...]:
    """The tensors of a cache, as the operand of a kernel says."""
    (module,) = re.findall(
        r"operands import (append_\w+) as (?:key_value|index_key)", cell.file.read_text(encoding="utf-8")
    )
    return ENDINGS[module]


def view(values: Tensor, memory: Memory) -> lanes.Tensor:
    return lanes.Tensor(memory, values.storage_offset(), tuple(values.shape), values.stride())


def argument(value: Any, memories: dict[int, tuple[Memory, Tensor]]) -> Any:
    """A tensor as device code sees it, over the memory of its storage."""
    if not isinstance(value, Tensor):
        return Int32(value)
    place = value.untyped_storage().data_ptr()
    if place not in memories:
        whole = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
        kind = Float32 if whole.dtype in (torch.float32, torch.bfloat16) else Int32
        plain = whole.view(torch.uint8) if whole.dtype == FP8 else whole
        memories[place] = Memory(map(kind, plain.tolist())), whole
        memories[place][0].element = Float32 if whole.dtype == torch.float32 else BF16  # type: ignore[attr-defined]
    return view(value, memories[place][0])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("float32_rows", [0, 1])
@pytest.mark.parametrize(
    ("op", "precision", "token_scales"),
    [(op, precision, scales) for op, fp8 in (("append_kv", "q16kv8"), ("append_index", "q8k8"))
     for precision, scales in (("bf16", 0), (fp8, 0), (fp8, 1))]
    + [(op, precision, 0) for precision, op in FOUR_BITS.items()],
)  # fmt: skip
@pytest.mark.drawn(3)
def test_rows_go_to_their_slots(
    op: str, precision: str, token_scales: int, float32_rows: int, strided: bool, dsl: None
) -> None:  # fmt: skip
    dims = {
        "total_q": 9, "num_pages": 4, "page_size": 5, "head_dim": 64, "float32_rows": float32_rows,
        "token_scales": token_scales, "num_kv_heads": 3 if op == "append_kv" else 1,
    }  # fmt: skip
    packed = FORMATS.get(precision, "")
    if packed and strided:
        dims |= {"num_pages": 2, "page_size": 8}  # vLLM's slots have scales of four tokens beside each other
    stored = torch.bfloat16 if precision == "bf16" or packed else FP8
    source = Source(torch.device("cpu"), SEED, "normal")
    case = SimpleNamespace(dims=dims, dtype=lambda role: stored, packed=packed)
    check: Any = caches.CHECKS[op](case, source, strided, "reference")  # type: ignore[arg-type]
    into = check.caches.copied()
    if op == "append_kv":
        rows = Rows(*check.rows, check.slots, *check.given, "cutedsl")
        arguments: Any = kv_arguments(rows, *into.views, *(into.scales or (None, None)))
    else:
        keys = IndexRows(check.rows[0][:, 0], check.slots, check.given[0], "cutedsl")
        arguments = index_arguments(keys, into.views[0][:, 0], into.scales[0][:, 0] if into.scales else None)
    [cell] = default_registry().select(op=op, dsl="cutedsl", target="sm90", precision=precision)
    module = lanes.load(cell.file)
    scales = {"token_scales": token_scales} if stored == FP8 else {}
    kernel = getattr(module, "AppendKv" if op == "append_kv" else "AppendIndex")(64, float32_rows, **scales)
    memories: dict[int, tuple[Memory, Tensor]] = {}
    made = [argument(value, memories) for value in arguments]
    number, tensors = check.number, len(endings(cell))
    parts = made[number + 1 :]
    caches_of = [kernel.cache.stored(*parts[tensors * i : tensors * (i + 1)]) for i in range(number)]
    further = [] if op == "append_kv" else [parts[-1] if stored == FP8 else Int32(0)]
    grid = (-(-9 * dims["num_kv_heads"] // module.ROWS),)
    lanes.launch(kernel.kernel, (*made[: number + 1], *caches_of, *further), grid, module.ROWS * kernel.lanes)
    bring_back(memories)
    check.compare(into.codes())


def bring_back(memories: dict[int, tuple[Memory, Tensor]]) -> None:
    """What a kernel left in memory."""
    for memory, whole in memories.values():
        plain = whole.view(torch.uint8) if whole.dtype == FP8 or isinstance(memory, Pairs) else whole
        plain.copy_(torch.tensor(list(memory)).to(plain.dtype))


@pytest.mark.parametrize(
    ("precision", "token_scales", "bf16_index", "strided"),
    [
        ("bf16", 0, 0, False), ("bf16", 0, 0, True), ("q16kv8", 0, 0, True), ("q16kv8", 0, 1, False),
        ("q16kv8", 1, 0, False), ("q16kv8", 1, 1, True), ("q16kv4", 0, 0, True), ("q16kv4", 0, 1, False),
        ("q16kvmx4", 0, 0, False), ("q16kvmx4", 0, 1, True),
    ],
)  # fmt: skip
@pytest.mark.drawn(3)
def test_rows_are_turned_on_their_way(
    precision: str, token_scales: int, bf16_index: int, strided: bool, dsl: None
) -> None:
    packed = FORMATS.get(precision, "")
    dims = {
        "total_q": 4, "num_pages": 2, "page_size": 8, "head_dim": 64, "float32_table": int(strided),
        "bf16_index": bf16_index, "token_scales": token_scales, "num_q_heads": 5, "num_kv_heads": 2,
        "num_index_heads": 3, "rotary_dim": 32, "num_positions": 7,
    }  # fmt: skip
    stored = torch.bfloat16 if precision == "bf16" or packed else FP8
    tolerance = load(*trees.specs_dirs()).operators["norm_rope_append"].tolerance[precision]
    case: Any = SimpleNamespace(dims=dims, dtype=lambda role: stored, packed=packed, tolerance=tolerance)
    check = NormRopeAppend(case, Source(torch.device("cpu"), SEED, "normal"), strided, "reference")
    named, outputs = check.prepared(into_buffers=not strided)
    given = {"q_out": None, "idx_out": None, "format": None, "k_scale": None, "v_scale": None, "backend": "reference"}
    call, written = norm_rope_calls.norm_rope_append(**{**given, **named})
    arguments = norm_rope.arguments(call, written.buffers)
    [cell] = default_registry().select(op="norm_rope_append", dsl="cutedsl", target="sm90", precision=precision)
    module = lanes.load(cell.file)
    scales = {"token_scales": token_scales} if stored == FP8 else {}
    kernel = module.NormRopeAppend(64, int(strided), bf16_index, **scales)
    memories: dict[int, tuple[Memory, Tensor]] = {}
    idx_out = arguments[6]
    if idx_out.shape[-1] < 64:  # of e4m3
        whole = idx_out.view(torch.uint8).flatten()
        memories[idx_out.untyped_storage().data_ptr()] = Pairs(map(Int32, whole.tolist())), idx_out.flatten()
    made = [argument(value, memories) for value in arguments]
    tensors = len(endings(cell))
    parts = [made[15 + tensors * i : 15 + tensors * (i + 1)] for i in range(3)]
    caches_of = [kernel.cache.stored(*part) for part in parts[:2]]
    caches_of.append(kernel.index.stored(*parts[2][: 1 if bf16_index else None]))
    heads, offset, eps, *use_scale = arguments[15 + 3 * tensors :]
    units = -(-5 // 4) + 2 + 1 + 1
    assert heads == 3 and kernel.heads == 4
    lanes.launch(
        kernel.kernel,
        (
            *(tuple(made[:5]), tuple(made[5:7]), tuple(made[7:11]), made[11], tuple(made[12:15]), tuple(caches_of)),
            *(Int32(units), Float32(offset), Float32(eps), Int32(use_scale[0] if use_scale else 0)),
        ),
        (-(-4 * units // module.WARPS),),
        32 * module.WARPS,
    )
    bring_back(memories)
    check.compare(outputs)


def test_codes_are_those_of_torch() -> None:
    """The model above, and with it what the kernels are compared with, over all kinds of float32."""
    generator = torch.Generator().manual_seed(SEED)
    patterns = torch.randint(-(1 << 31), 1 << 31, (20_000,), generator=generator).to(torch.int32)
    powers = torch.randint(-12, 11, (20_000,), generator=generator)
    near = (torch.rand(20_000, generator=generator) - 0.5) * 2.0**powers
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448.0, 464.0, 464.1, 1e-40, -1e-40])
    values = torch.cat([patterns.view(torch.float32), near, ties, -ties, ties.nextafter(codes[1:]), odd])
    wanted = values.clamp(-448.0, 448.0).to(FP8).view(torch.uint8)
    wanted = torch.where(values.isnan(), 0x7F, wanted)
    assert [e4m3_of(value) for value in values.tolist()] == wanted.tolist()
