"""Run in a process of its own: calls of every operator, of some (`combine,topk_select`) or of `combine` alone.

`launches.py points DSL all` prints the kernels that the calls take, as `msa-tiles pack --points` reads them;
`dsl DSL all LIBRARY` launches them with the runtime of their DSL, `pack DSL all` with packs, which are found as they
are by default, and `beside DSL all LIBRARY` with packs in a process that has the runtime of the DSL too. Instead of
`all` there may be names of operators: of all calls only their kernels are launched. `combine` is called alone. A launch
that fails ends it: what was raised is printed.

The driver is the fake one, which writes what it is asked for. CPU tensors travel as tensors of cuda:0 at made-up
addresses, so that two processes that do the same write the same.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_tiles import ops, runtime
from msa_tiles.call import backends
from msa_tiles.call.where import Where
from msa_tiles.launch import attention, lookup, places
from msa_tiles.quant import FP8
from msa_tiles.runtime.dispatch import fit_variant
from msa_tiles.runtime.registry import Cell, default_registry

CPU = torch.device("cpu")
# DLPack's (type code, bits) and TVM-FFI's type indices of what a call hands over.
CODES = {torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.int32: (0, 32), FP8: (10, 8), torch.int64: (0, 64)}
CUDA, INTEGER, FLOAT, TENSOR = 2, 1, 3, 7
RTLD_LAZY_GLOBAL = 0x101


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Value(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p))


class Argument(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", Value))


def argument(given: Any, place: int, kept: list[Any]) -> Argument:
    if not isinstance(given, Tensor):
        number = isinstance(given, float)
        value = Value(number=given) if number else Value(integer=int(given))
        return Argument(FLOAT if number else INTEGER, 0, value)
    code, bits = CODES[given.dtype]
    extents = ctypes.c_int64 * given.dim()
    shape, strides = extents(*given.shape), extents(*given.stride())
    address = ((place + 1) << 40) + given.data_ptr() % 64
    tensor = DLTensor(
        address, CUDA, 0, given.dim(), code, bits, 1, ctypes.addressof(shape), ctypes.addressof(strides), 0
    )
    kept += [shape, strides, tensor]
    return Argument(TENSOR, 0, Value(pointer=ctypes.addressof(tensor)))


class LaunchError(Exception):
    """What a kernel raises, through TVM-FFI."""


def raised(library: ctypes.CDLL) -> str:
    """Kind and message of the error that a TVM-FFI function left: two texts behind the object's header of 24 bytes."""
    handle = ctypes.c_void_p()
    library.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    cell = (ctypes.c_uint64 * 4).from_address((handle.value or 0) + 24)
    return ": ".join(ctypes.string_at(cell[i], cell[i + 1]).decode() for i in (0, 2))


class Launcher:
    """Stands in for `runtime.find_kernel`, for one DSL's kernels of these operators, or of all (None)."""

    def __init__(
        self, dsl: str, load: Callable[[str, Any, Cell, dict[str, int]], Any] | None, operators: set[str] | None
    ) -> None:
        self.dsl, self.load, self.operators = dsl, load, operators
        self.points: dict[str, dict[str, Any]] = {}
        self.functions: dict[str, Any] = {}

    def find_kernel(self, op: str, facts: Any, backend: str = "auto", *, helper: bool = False) -> Callable[..., None]:
        if self.operators is not None and op not in self.operators:
            return lambda *_arguments: None
        cell = default_registry().select(op=op, dsl=self.dsl, target="sm90", precision=facts.precision)[0]
        variant, misfit = fit_variant(cell, facts.variant)
        assert misfit is None, misfit
        name = f"{cell.id} {variant}"
        self.points[name] = {"op": op, "dsl": self.dsl, "precision": cell.precision, "variant": variant}
        if self.load is None:
            return lambda *_arguments: None
        if name not in self.functions:
            self.functions[name] = self.load(op, facts, cell, variant)
        return lambda *arguments: self.launch(name, arguments)

    def launch(self, name: str, arguments: tuple[Any, ...]) -> None:
        import tvm_ffi

        driver = ctypes.CDLL("libcuda.so.1")
        kept: list[Any] = []
        values = (Argument * len(arguments))(*(argument(given, i, kept) for i, given in enumerate(arguments)))
        handle = ctypes.c_void_p(self.functions[name].__chandle__())
        for pattern in (0, 255):
            # Every launch begins without a current device; both know what to do then.
            driver.cuCtxSetCurrent(None)
            failed = driver.fake_call(tvm_ffi.LIB.TVMFFIFunctionCall, handle, values, len(arguments), pattern)
            if failed:
                raise LaunchError(raised(tvm_ffi.LIB))


def normal(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def calls() -> None:
    """Every operator once on flat keys and, where it takes them, once on pages; the M3 shape."""
    lengths = torch.tensor([0, 1, 5, 130], dtype=torch.int32)
    flat_where = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_k": 125}
    paged_where = {"cu_seqlens_q": lengths, "page_table": torch.zeros(3, 2, dtype=torch.int32), "max_seqlen_k": 256}
    paged_where["seqused_k"] = lengths.diff()
    q, idx_q = normal(130, 32, 128), normal(130, 2, 128)
    ids, lse = torch.zeros(2, 130, 16, dtype=torch.int32), torch.zeros(130, 32)
    for where, k, idx_k in (
        (flat_where, normal(130, 2, 128), normal(130, 128)),
        (paged_where, normal(6, 2, 128, 128), normal(6, 128, 128)),
    ):
        ops.index_score(idx_q, idx_k, **where)
        ops.select_blocks(idx_q, idx_k, 16, **where)
        ops.decode_score(idx_q, idx_k, **where)
        ops.sparse_attention(q, k, k, ids, **where)
        ops.sparse_decode(q, k, k, ids, **where)
    where = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    ops.topk_select(torch.zeros(4, 130, 2), 16, **where)
    ops.decode_topk(torch.zeros(4, 130, 2), 16, **where)
    k = normal(130, 2, 128)
    ops.sparse_attention_backward(q, q, k, k, q, lse, ids, max_seqlen_k=125, **where)
    ops.index_kl(q, k, lse, normal(130, 2, 128).requires_grad_(), normal(130, 128), ids, max_seqlen_k=125, **where)
    slots, scale = torch.arange(130), torch.ones(())
    ops.append_kv(k, k, normal(2, 2, 128, 128), normal(2, 2, 128, 128), slots)
    ops.append_index(normal(130, 128), normal(2, 128, 128).to(FP8), slots.to(torch.int32), scale=scale)
    weights, table = [normal(128) for _ in range(4)], torch.zeros(200, 64)
    turned = normal(130, 2, 128), normal(130, 2, 128), normal(130, 2, 128), *weights[:2], table, slots
    index = {"idx_q": normal(130, 3, 128), "idx_k": normal(130, 128), "index_cache": normal(2, 128, 128)}
    index |= {"idx_q_weight": weights[2], "idx_k_weight": weights[3]}
    ops.norm_rope_append(*turned, normal(2, 2, 128, 128), normal(2, 2, 128, 128), slots, **index)
    caches = [normal(2, 2, 128, 128).to(FP8) for _ in "kv"]
    ops.norm_rope_append(*turned, *caches, slots.to(torch.int32), k_scale=scale, v_scale=scale)
    pages = {name: paged_where[name] for name in ("page_table", "seqused_k")}
    for codes, table in ((normal(130, 2, 128).to(FP8), {}), (normal(6, 2, 128, 128).to(FP8), pages)):
        ops.dequantize_kv(codes, codes, k_scale=scale, v_scale=scale, **table)
    split(ids, Where(**where))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "part_serves", lambda _facts, _backend, op, *_: op == "shared_attention")
        ops.sparse_attention(q, k, k, ids, max_seqlen_k=125, **where)


def split(ids: Tensor, where: Where) -> None:
    """A part of sparse_attention, which no GPU serves here: as it calls it."""
    variant = {"block_size": 128, "tile_tokens": 8}
    facts = lookup.call_facts("split_selection", where, CPU, "bf16", variant, queries=130)
    facts = dataclasses.replace(facts, features=facts.features - {"paged"})
    attention.split_selection(facts, "auto", ids, places.place(where, 130, 130, 128, CPU), fill=3, **variant)


def combine() -> None:
    ops.combine(normal(4, 3, 32, 128), torch.zeros(4, 3, 32))


def load_runtime(dsl: str, library: Path) -> None:
    """Make the functions of a DSL's own runtime visible to all kernels."""
    from msa_tiles.runtime import launch

    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    if dsl == "tilelang":
        launch._load_runtime(dsl)
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    assert dlopen(str(library).encode(), RTLD_LAZY_GLOBAL), library


def of_dsl(dsl: str, library: Path) -> Callable[[str, Any, Cell, dict[str, int]], Any]:
    """How a kernel of the cache is loaded, with its DSL's own runtime.

    CuTe DSL's brings a CUDA runtime library that does not take the fake driver. Its archive for linking is the same
    code without, and runs on the fake CUDA runtime.
    """
    from msa_tiles.runtime import launch
    from msa_tiles.runtime.compiler import find_compiled

    load_runtime(dsl, library)
    launch._load_runtime = lambda _dsl: None  # type: ignore[assignment]

    def load(_op: str, _facts: Any, cell: Cell, variant: dict[str, int]) -> Any:
        entry = find_compiled(cell, variant, cell.arch)
        assert entry is not None, f"{cell.id} {variant} is not in the cache"
        return launch.load_function(entry)

    return load


def of_pack(dsl: str, patch: pytest.MonkeyPatch) -> Callable[[str, Any, Cell, dict[str, int]], Any]:
    """How dispatch finds a kernel on a Hopper GPU. Whoever imports a DSL fails."""
    from msa_tiles.runtime import dispatch
    from msa_tiles.runtime.facts import target_facts

    for name in ("tilelang", "tvm", "cutlass"):
        patch.setitem(sys.modules, name, None)
    find = runtime.find_kernel
    patch.setattr(dispatch, "device_facts", lambda *_: target_facts(default_registry().targets["sm90"]))
    patch.setattr(torch.cuda, "current_device", lambda: 0)

    def load(op: str, facts: Any, cell: Cell, variant: dict[str, int]) -> Any:
        kernel = find(op, facts, dsl)
        assert (kernel.cell.id, dict(kernel.variant)) == (cell.id, variant)
        return kernel._function

    return load


def main(mode: str, dsl: str, what: str, library: str = "") -> None:
    with pytest.MonkeyPatch.context() as patch:
        loaders = {
            "points": lambda: None,
            "dsl": lambda: of_dsl(dsl, Path(library)),
            "beside": lambda: (load_runtime(dsl, Path(library)), of_pack(dsl, patch))[1],
            "pack": lambda: of_pack(dsl, patch),
        }
        launcher = Launcher(dsl, loaders[mode](), None if what == "all" else set(what.split(",")))
        patch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
        patch.setattr(runtime, "find_kernel", launcher.find_kernel)
        properties = types.SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        # Whether a call is split between two kernels is said below, and not by the GPU.
        patch.setattr(lookup, "part_serves", lambda *_: False)
        try:
            (combine if what == "combine" else calls)()
        except LaunchError as error:
            sys.stdout.write(json.dumps(str(error)))
            return
    if mode == "points":
        sys.stdout.write(json.dumps(list(launcher.points.values())))
        return
    maps = Path("/proc/self/maps").read_text()
    foreign = [name for name in ("libtvm_runtime", "libtilelang", "cute_dsl", "cutlass", "cutert") if name in maps]
    report = {"libraries": foreign, "compiled": runtime.compile_count(), "kernels": len(launcher.functions)}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
