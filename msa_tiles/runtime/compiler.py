"""Compile one variant of one cell for its target. No GPU is needed, only a C compiler and, for TileLang, nvcc."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msa_tiles.errors import ToolError
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.cache import CUBIN, LIBRARY, SOURCES, Cache, Entry
from msa_tiles.runtime.places import located
from msa_tiles.runtime.registry import Cell
from msa_tiles.syntax import SourceError

# Skeletons assign warp roles and fence their own pipelines; bounds are theirs to check as well. Fast math would turn
# -inf and NaN handling into undefined behaviour.
PASS_CONFIGS: Mapping[str, Any] = {
    "tl.disable_warp_specialized": True,
    "tl.enable_fast_math": False,
    "tl.disable_safe_memory_legalize": True,
}
USUAL_SECONDS = {"tilelang": (10, 40), "cutedsl": (2, 7)}  # of a core, for one kernel
_CUDA_COMPILE = "tilelang_callback_cuda_compile"
_LONGEST_ERROR, _LONGEST_LINE, _MOST_ERRORS = 3000, 300, 5  # characters, twice, and errors of one compilation
_OF_NVCC = re.compile(r"^\S+\(\d+\): (?P<words>(?:catastrophic )?error\b.*)\n(?P<source>.*)", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal
_UNSUPPORTED = "Unsupported GPU architecture"  # says CuTe DSL of one that its CUDA libraries do not know
_LEAST_ROOM = 1 << 20  # bytes that a compilation writes at most, about
_CUTEDSL_OPTIONS = "--enable-tvm-ffi"
# Host code of CuTe DSL is the machine's own unless its functions say otherwise, and another one may lack instructions.
_HOST = ("x86_64", "x86-64-v3", "+avx2")  # machine, and LLVM's name and features of its processors
# What CuTe DSL hands to the launch: grid, block, bytes of dynamic shared memory, stream, attributes and their number.
_CUTEDSL_LAUNCH = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
# Guards the counter and what is the whole process's while a kernel compiles: TileLang's callback, CuTe DSL's settings.
_state = threading.Lock()
_compiled = 0


def _fresh_lock() -> None:
    """In a child of a fork, whose parent may have been compiling in another thread."""
    global _state
    _state = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)


class CompileError(ToolError):
    """A kernel did not compile; the message starts with its cell and variant."""


def compile_count() -> int:
    """How many kernels this process has compiled; a cache hit compiles none."""
    return _compiled


def count(compiled: int) -> None:
    """Count kernels that are compiled in this process, or by a worker for it."""
    global _compiled
    with _state:
        _compiled += compiled


def cache_key(cell: Cell, variant: Mapping[str, int], arch: str) -> str:
    """What an entry depends on, except the compiler: see `Cache.load` for why that stands beside the key.

    The machine and its C library are those that the host code is compiled for: machines may share a cache.
    """
    document = {
        "digest": cell.digest,
        "source": cell.source_hash(),
        "function": cell.op,
        "variant": dict(sorted(variant.items())),
        "arch": arch,
        **_SETTINGS[cell.dsl],
        "generators": toolchain.generator_versions(cell.dsl),
        "host": [platform.machine(), *platform.libc_ver()],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]


def find_compiled(cell: Cell, variant: Mapping[str, int], arch: str, cache: Cache | None = None) -> Entry | None:
    """The cache entry of a variant, or None when it has not been compiled."""
    key, version = cache_key(cell, variant, arch), toolchain.compiler_version(cell.dsl)
    return (cache or Cache()).load(cell.id, key, version, _expected(cell, variant, arch))


def _expected(cell: Cell, variant: Mapping[str, int], arch: str) -> dict[str, Any]:
    """What the meta of an entry says of itself, should it be the right one."""
    return {"digest": cell.digest, "variant": dict(variant), "arch": arch}


def compile_variant(cell: Cell, variant: Mapping[str, int], arch: str, cache: Cache | None = None) -> Entry:
    """The cache entry of a variant, compiled first when the cache lacks it.

    Raises CompileError when the kernel does not compile, ToolchainError when there is nothing to compile it with,
    CacheError when there is no place for it.
    """
    cache, expected = cache or Cache(), _expected(cell, variant, arch)
    try:
        key, version = cache_key(cell, variant, arch), toolchain.compiler_version(cell.dsl)
    except SourceError as error:
        raise CompileError(f"{cell.id} {variant_text(variant)}: {error}") from error
    entry = cache.load(cell.id, key, version, expected)
    if entry is not None:
        return entry
    toolchain.require_compiler(cell.dsl)
    assert version is not None
    with cache.lock(cell.id, key):
        entry = cache.load(cell.id, key, version, expected)  # somebody may have compiled it while this one waited
        if entry is not None:
            return entry
        with cache.stage(cell.id) as staged:
            start = time.perf_counter()
            count(1)
            try:
                meta = _COMPILERS[cell.dsl](cell, variant, arch, staged)
            except CompileError as error:
                if full := _full_disk(staged):
                    raise CompileError(f"{error}; the disk of {full} is full") from error
                raise
            versions = {**dict(toolchain.generator_versions(cell.dsl)), _COMPILER_NAMES[cell.dsl]: version}
            meta |= {**expected, "versions": versions, "seconds": round(time.perf_counter() - start, 2)}
            return cache.publish(cell.id, key, version, staged, meta)


def _full_disk(staged: Path) -> Path | None:
    """Which of the places that a compilation writes to has no room left, if one has none."""
    for place in (staged, Path(tempfile.gettempdir())):
        usage = os.statvfs(place)
        if usage.f_bavail * usage.f_frsize < _LEAST_ROOM:
            return place
    return None


def _tilelang(cell: Cell, variant: Mapping[str, int], arch: str, staged: Path) -> dict[str, Any]:
    with _state, toolchain.tilelang_environment():
        return _tilelang_there(cell, variant, arch, staged)


def _tilelang_there(cell: Cell, variant: Mapping[str, int], arch: str, staged: Path) -> dict[str, Any]:
    import tilelang
    from tilelang import tvm

    where = f"{cell.id} {variant_text(variant)}"
    cuda = tvm.target.Target({"kind": "cuda", "arch": arch})
    with _captured_cubins() as cubins:
        try:
            configs = dict(PASS_CONFIGS if cell.pass_configs is None else cell.pass_configs)
            kernel = cell.function(**variant)
            with tvm.transform.PassContext(opt_level=3, config=configs), cuda:
                artifact = tilelang.lower(kernel, target=cuda, enable_host_codegen=True, enable_device_compile=True)
            artifact.rt_mod.export_library(str(staged / LIBRARY))
        except Exception as error:
            raise CompileError(f"{where}: {_refusal(error, cell, arch)}") from error
    if len(cubins) != 1:
        raise CompileError(f"{where}: {len(cubins)} device images came out, wanted one")
    (staged / CUBIN).write_bytes(cubins[0])
    (staged / SOURCES["tilelang"]).write_text(artifact.kernel_source)
    return {
        "function": str(kernel.attrs["global_symbol"]),
        "kernels": {str(name.name_hint): _launch(function) for name, function in artifact.device_mod.functions.items()},
    }


def _end_of(error: Exception) -> str:
    """What a compiler says in the end: TileLang puts the whole source in front, and CuTe DSL colours it."""
    text = _COLOURS.sub("", str(error))
    if found := [f"{each['words']}\n    {each['source'].strip()[:_LONGEST_LINE]}" for each in _OF_NVCC.finditer(text)]:
        return "nvcc: " + "\n".join(found[:_MOST_ERRORS])  # warnings stand between them
    if isinstance(error, KeyError) or not text:  # a key alone says nothing
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _LONGEST_ERROR else f"… {text[-_LONGEST_ERROR:]}"


def _refusal(error: Exception, cell: Cell, arch: str) -> str:
    """The same with its place, but of an architecture that the compiler does not know what to install.

    CuTe DSL says of one that it does not know a key alone, and calls one that its CUDA libraries do not know a bug.
    """
    known, text = toolchain.architectures(cell.dsl), _end_of(error)
    if _UNSUPPORTED in text:
        return _no_machine_code(arch)
    # nvcc lists architectures without the letter of their own instructions.
    if not known or arch in known or (cell.dsl == "tilelang" and arch.rstrip("af") in known):
        return located(error, text, cell)
    name, newer = {"tilelang": ("nvcc", "CUDA toolkit"), "cutedsl": ("CuTe DSL", "nvidia-cutlass-dsl")}[cell.dsl]
    highest = max(known, key=lambda each: int(re.sub(r"\D", "", each) or 0))
    return (
        f"{name} {toolchain.compiler_version(cell.dsl)} does not know the architecture {arch} of the target, and "
        f"{highest} is the highest that it knows: install a newer {newer}"
    )


def _cutedsl(cell: Cell, variant: Mapping[str, int], arch: str, staged: Path) -> dict[str, Any]:
    """The host code comes as an object file. It is linked here, so that loading it takes neither the DSL nor a linker.

    Undefined in the library are the functions of TVM-FFI and of CuTe DSL's runtime, which `launch` makes visible.
    """
    from cutlass import cute

    where = f"{cell.id} {variant_text(variant)}"
    name = "_".join([cell.op, *map(str, variant.values())])  # the library's only symbol, so that no two are alike
    with _state, _cutedsl_arch(arch), tempfile.TemporaryDirectory() as scratch:
        options = f"{_CUTEDSL_OPTIONS} --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {shlex.quote(scratch)}"
        try:
            entry, arguments = cell.function(**variant)
            compiled = cute.compile(entry, *arguments, options=options)
            _for_every_host(compiled.ir_module)
            compiled.export_to_c(f"{scratch}/kernel.o", function_name=name, export_only_tvm_ffi_symbols=True)
        except Exception as error:
            raise CompileError(f"{where}: {_refusal(error, cell, arch)}") from error
        _link(Path(scratch, "kernel.o"), staged / LIBRARY, where)
        (staged / CUBIN).write_bytes(_machine_code(compiled.__cubin__, where, arch))
        (staged / SOURCES["cutedsl"]).write_text(compiled.__ptx__)
        launches = _cutedsl_launches(compiled.__ptx__, str(compiled.ir_module))
    if len(launches) != 1:
        raise CompileError(f"{where}: {len(launches)} launches of constant size came out, wanted one")
    return {"function": name, "kernels": launches}


def _machine_code(cubin: bytes | str | None, where: str, arch: str) -> bytes:
    """What CuTe DSL kept of it: text, or nothing, where its CUDA libraries are older than an architecture it knows."""
    if isinstance(cubin, bytes) and cubin:
        return cubin
    raise CompileError(f"{where}: {_no_machine_code(arch)}")


def _no_machine_code(arch: str) -> str:
    """The sentence about CUDA libraries that are older than an architecture which CuTe DSL knows."""
    version = toolchain.compiler_version("cutedsl") or ""
    newer = "a newer nvidia-cutlass-dsl" if version.endswith("cu13") else "those of nvidia-cutlass-dsl[cu13]"
    return f"the CUDA libraries of CuTe DSL {version} make no machine code for {arch}: install {newer}"


def _cutedsl_launches(ptx: str, host: str) -> dict[str, dict[str, int]]:
    """Threads and dynamic shared memory in bytes of the kernel that the host code launches.

    Empty when there are several kernels or launches, or when one of the sizes is known at run time only.
    """
    names = re.findall(r"\.entry (\w+)", ptx)
    blocks = re.findall(r"\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", ptx)
    slot = rf"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {re.escape(_CUTEDSL_LAUNCH)}"
    sizes = []
    for function in host.split("llvm.func @"):
        for place in re.findall(slot, function):
            for value in re.findall(rf"llvm\.store (%\d+), {place} : i64", function):
                sizes += re.findall(rf"{value} = llvm\.mlir\.constant\((\d+) : i64\)", function)
    if not len(names) == len(blocks) == len(sizes) == 1:
        return {}
    threads = math.prod(int(extent or 1) for extent in blocks[0])
    return {names[0]: {"threads": threads, "dynamic_shared_memory": int(sizes[0])}}


def _for_every_host(module: Any) -> None:
    """Have the host code of a compiled module run on all machines of this one's architecture that have such GPUs."""
    ir: Any = importlib.import_module("cutlass._mlir.ir")  # its stubs lack the names below

    machine, processor, features = _HOST
    if platform.machine() != machine:
        return
    with module.context:
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                attributes = operation.operation.attributes
                attributes["target_cpu"] = ir.StringAttr.get(processor)
                attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')


def _link(object_file: Path, library: Path, where: str) -> None:
    command = [*toolchain.find_linker(), "-shared", "-o", str(library), str(object_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{where}: `{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


@contextlib.contextmanager
def _cutedsl_arch(arch: str) -> Iterator[None]:
    """Part of the DSL asks its settings for the architecture, whatever a compilation's options say.

    They hold what CUTE_DSL_ARCH was when the DSL was imported, or else that of the GPU.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    settings: Any = CuTeDSL._get_dsl().envar
    before = settings._arch
    settings.arch = arch
    try:
        yield
    finally:
        settings.arch = before


_COMPILERS: dict[str, Callable[[Cell, Mapping[str, int], str, Path], dict[str, Any]]] = {
    "tilelang": _tilelang,
    "cutedsl": _cutedsl,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "tilelang": {"pass_configs": dict(PASS_CONFIGS)},
    "cutedsl": {"options": _CUTEDSL_OPTIONS, "host": _HOST},
}
_COMPILER_NAMES = {"tilelang": "nvcc", "cutedsl": "compiler"}


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
