"""Compile one variant of one cell for its target. No GPU is needed, only nvcc and a C compiler."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msa_tiles.errors import ToolError
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.cache import CUBIN, LIBRARY, SOURCE, Cache, Entry
from msa_tiles.runtime.registry import Cell

# Skeletons assign warp roles and fence their own pipelines; bounds are theirs to check as well. Fast math would turn
# -inf and NaN handling into undefined behaviour.
PASS_CONFIGS: Mapping[str, Any] = {
    "tl.disable_warp_specialized": True,
    "tl.enable_fast_math": False,
    "tl.disable_safe_memory_legalize": True,
}
_CUDA_COMPILE = "tilelang_callback_cuda_compile"
_state = threading.Lock()  # guards the counter, and TileLang's process-wide callback while a kernel compiles
_compiled = 0


class CompileError(ToolError):
    """A kernel did not compile; the message starts with its cell and variant."""


def compile_count() -> int:
    """How many kernels this process has compiled; a cache hit compiles none."""
    return _compiled


def cache_key(cell: Cell, variant: Mapping[str, int], arch: str) -> str:
    """What code generation depends on, except nvcc: see `Cache.load` for why that stands beside the key."""
    document = {
        "digest": cell.digest,
        "source": cell.source_hash(),
        "function": cell.op,
        "variant": dict(sorted(variant.items())),
        "arch": arch,
        "pass_configs": dict(PASS_CONFIGS),
        "generators": toolchain.generator_versions(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]


def find_compiled(cell: Cell, variant: Mapping[str, int], arch: str, cache: Cache | None = None) -> Entry | None:
    """The cache entry of a variant, or None when it has not been compiled."""
    return (cache or Cache()).load(cell.id, cache_key(cell, variant, arch), toolchain.nvcc_version())


def compile_variant(cell: Cell, variant: Mapping[str, int], arch: str, cache: Cache | None = None) -> Entry:
    """The cache entry of a variant, compiled first when the cache lacks it.

    Raises CompileError when the kernel does not compile, ToolchainError when there is no nvcc to compile it.
    """
    cache = cache or Cache()
    key, nvcc = cache_key(cell, variant, arch), toolchain.nvcc_version()
    entry = cache.load(cell.id, key, nvcc)
    if entry is not None:
        return entry
    toolchain.require_nvcc()
    assert nvcc is not None
    with cache.lock(cell.id, key):
        entry = cache.load(cell.id, key, nvcc)  # another process may have compiled it while this one waited
        if entry is not None:
            return entry
        with cache.stage(cell.id) as staged:
            start = time.perf_counter()
            meta = _COMPILERS[cell.dsl](cell, variant, arch, staged)
            meta |= {
                "cell": cell.id,
                "digest": cell.digest,
                "variant": dict(variant),
                "arch": arch,
                "versions": {**dict(toolchain.generator_versions()), "nvcc": nvcc},
                "seconds": round(time.perf_counter() - start, 2),
            }
            return cache.publish(cell.id, key, nvcc, staged, meta)


def _tilelang(cell: Cell, variant: Mapping[str, int], arch: str, staged: Path) -> dict[str, Any]:
    global _compiled
    import tilelang
    from tilelang import tvm

    where = f"{cell.id} {variant_text(variant)}"
    cuda = tvm.target.Target({"kind": "cuda", "arch": arch})
    configs = dict(PASS_CONFIGS if cell.pass_configs is None else cell.pass_configs)
    with _state, _captured_cubins() as cubins:
        _compiled += 1
        try:
            kernel = cell.function(**variant)
            with tvm.transform.PassContext(opt_level=3, config=configs), cuda:
                artifact = tilelang.lower(kernel, target=cuda, enable_host_codegen=True, enable_device_compile=True)
            artifact.rt_mod.export_library(str(staged / LIBRARY))
        except Exception as error:
            raise CompileError(f"{where}: {error}") from error
    if len(cubins) != 1:
        raise CompileError(f"{where}: {len(cubins)} device images came out, wanted one")
    (staged / CUBIN).write_bytes(cubins[0])
    (staged / SOURCE).write_text(artifact.kernel_source)
    return {
        "function": str(kernel.attrs["global_symbol"]),
        "kernels": {str(name.name_hint): _launch(function) for name, function in artifact.device_mod.functions.items()},
    }


_COMPILERS: dict[str, Callable[[Cell, Mapping[str, int], str, Path], dict[str, Any]]] = {"tilelang": _tilelang}


def _launch(function: Any) -> dict[str, int]:
    """Threads and dynamic shared memory of one device function, in bytes.

    Neither TileLang nor nvcc compares them with the GPU's limits; the audit does.
    """
    threads = 1
    for name, extent in function.attrs["thread_extent"].items():
        if str(name).startswith("threadIdx."):
            threads *= int(extent)
    return {"threads": threads, "dynamic_shared_memory": int(function.attrs.get("dyn_shared_memory_buf", 0))}


@contextlib.contextmanager
def _captured_cubins() -> Iterator[list[bytes]]:
    """Collect the cubins that TileLang's CUDA callback returns; the exported library holds them in an opaque blob.

    TileLang's own cache of cubins is off meanwhile: its key leaves nvcc's version out.
    """
    import tvm_ffi
    from tilelang.cuda.backend import tilelang_callback_cuda_compile as original
    from tilelang.env import CacheState

    cubins: list[bytes] = []

    def compile_and_keep(code: str, target: Any, pass_config: Any = None) -> bytearray:
        image = original(code, target, pass_config)
        cubins.append(bytes(image))
        return image

    was_enabled = CacheState.is_enabled()
    CacheState.disable()
    tvm_ffi.register_global_func(_CUDA_COMPILE, f=compile_and_keep, override=True)
    try:
        yield cubins
    finally:
        tvm_ffi.register_global_func(_CUDA_COMPILE, f=original, override=True)
        if was_enabled:
            CacheState.enable()


def variant_text(variant: Mapping[str, int]) -> str:
    """`head_dim=128 block_size=64`, or `(one variant)` for a kernel without compile-time dims."""
    return " ".join(f"{name}={value}" for name, value in variant.items()) or "(one variant)"
