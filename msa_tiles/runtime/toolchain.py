"""Where the compilers and disassemblers are, and which versions they have.

nvcc, which TileLang needs, comes from CUDA_HOME or CUDA_PATH, from PATH, or from the wheels of the `cuda` extra, in
that order, which is also the order in which TileLang looks. CuTe DSL brings a compiler of its own, one for each CUDA
series that it is installed for. The disassemblers come from their wheels or from PATH.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msa_tiles import files
from msa_tiles.errors import ToolError

# Distributions that turn a kernel into device code and host code, by DSL; the first one is the DSL itself.
CODE_GENERATORS = {"tilelang": ("tilelang", "apache-tvm-ffi"), "cutedsl": ("nvidia-cutlass-dsl", "apache-tvm-ffi")}
# Older ones do not parse all of our kernels.
LEAST_TILELANG = (0, 1, 15)
_CUTEDSL_RUNTIME = "libcute_dsl_runtime.so"


class ToolchainError(ToolError):
    """A compiler or a disassembler is missing or failed; the message says which one and how to get it."""


def _wheel_directories() -> Iterator[Path]:
    """`bin` directories of NVIDIA's CUDA 13 wheels: all of them unpack into one prefix, `nvidia/cu13`."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations if spec else None) or ():
        directory = Path(location) / "cu13" / "bin"
        if directory.is_dir():
            yield directory


def find_nvcc() -> Path | None:
    """Path of the nvcc that a compilation will use, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        candidate = Path(home) / "bin" / "nvcc"
        return candidate if candidate.exists() else None
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    for directory in _wheel_directories():
        if (directory / "nvcc").exists():
            return directory / "nvcc"
    system = Path("/usr/local/cuda/bin/nvcc")
    return system if system.exists() else None


def require_nvcc() -> Path:
    """Path of nvcc.

    Raises ToolchainError when there is none.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        where = f"CUDA_HOME is {home!r}, which has no bin/nvcc" if home else "nvcc is not on PATH"
        raise ToolchainError(
            f"compiling a kernel needs nvcc: {where}. "
            "Install the CUDA 13.0 toolkit, or `pip install 'msa-tiles[cuda]'`."
        )
    return nvcc


@functools.lru_cache(maxsize=8)
def _version_of(nvcc: Path, modified: int) -> str:
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolchainError(f"{nvcc} cannot be run: {error}") from error
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    if not found:
        raise ToolchainError(f"`{nvcc} --version` printed no version: {(done.stdout + done.stderr).strip()!r}")
    return found.group(1)


def nvcc_version() -> str | None:
    """Version such as `13.0.88`, or None when there is no nvcc."""
    nvcc = find_nvcc()
    return None if nvcc is None else _version_of(nvcc, nvcc.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def generator_versions(dsl: str) -> tuple[tuple[str, str], ...]:
    """(distribution, installed version) of the Python packages that turn a kernel into device code and host code.

    The version of a package that is not installed is empty.
    """
    return tuple((name, _installed(name)) for name in CODE_GENERATORS[dsl])


def _numbers(version: str) -> tuple[int, ...]:
    """`(0, 1, 15)` of `0.1.15.post2`."""
    return tuple(int(part) for part in re.findall(r"^\d+|(?<=\.)\d+", version))


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing(dsl: str) -> str | None:
    """Why kernels of this DSL cannot be compiled or run here, as a sentence, or None. Both DSLs are extras."""
    try:
        if dsl == "cutedsl":
            cutedsl_runtime()
        else:
            tilelang_libraries()
    except ToolchainError as error:
        return str(error)
    return None


def compiler_version(dsl: str) -> str | None:
    """Version of what compiles the DSL's device code, or None when it is not here.

    `13.0.88` of nvcc for TileLang; for CuTe DSL its own version and the CUDA series of its compiler, `4.8.1.cu12`.
    """
    if dsl == "tilelang":
        return nvcc_version()
    return None if missing(dsl) else f"{_installed('nvidia-cutlass-dsl')}.{cutedsl_runtime().parent.parent.name}"


def architectures(dsl: str) -> tuple[str, ...]:
    """Those that the DSL's compiler makes code for, such as `sm_90`; empty where it does not say."""
    if dsl == "tilelang":
        nvcc = find_nvcc()
        listed = nvcc and subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False)
        return tuple(re.findall(r"\bsm_\w+", listed.stdout)) if listed else ()
    with contextlib.suppress(ImportError, AttributeError):
        return tuple(importlib.import_module("cutlass.base_dsl.enums").Arch.__members__)
    return ()


def require_compiler(dsl: str) -> None:
    """Raise ToolchainError when there is nothing to compile the DSL's kernels with."""
    if dsl == "tilelang":
        tilelang_libraries()
        require_nvcc()
        find_host_compiler()
        return
    cutedsl_runtime()
    find_linker()


def find_linker() -> tuple[str, ...]:
    """Program and arguments of the C compiler that makes a shared library of an object file.

    Raises ToolchainError when there is none.
    """
    found = _command(("CC",), ("cc", "gcc", "clang"))
    if found is None:
        raise ToolchainError("compiling a CuTe DSL kernel needs a C compiler to link it: install gcc or set CC")
    return found


def find_host_compiler() -> tuple[str, ...]:
    """Program and arguments of the C++ compiler that nvcc and TileLang call.

    Raises ToolchainError when there is none.
    """
    found = _command(("CXX", "CC"), ("g++", "clang++", "c++"))
    if found is None:
        raise ToolchainError("compiling a TileLang kernel needs a C++ compiler: install g++ or set CXX")
    return found


def _command(variables: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...] | None:
    """What the first variable that is set says, `ccache g++` for example, or else the first program that is on PATH.

    Raises ToolchainError for a variable whose program is not there.
    """
    for variable in variables:
        value = os.environ.get(variable, "").strip()
        if not value:
            continue
        if whole := shutil.which(value):
            return (whole,)
        program, *arguments = shlex.split(value)
        if found := shutil.which(program):
            return (found, *arguments)
        raise ToolchainError(f"{variable} is {value!r}, and there is no program {program!r}; set it to a compiler")
    return next(((found,) for name in names if (found := shutil.which(name))), None)


@functools.lru_cache(maxsize=4)
def one_word(command: tuple[str, ...]) -> str:
    """A program of one word that does what a command with arguments does; there as long as this process.

    TileLang takes the whole of CXX for the name of a program, and remembers it.
    """
    if len(command) == 1 and not re.search(r"\s", command[0]):
        return command[0]
    script = _directory_of_process() / "c++"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o700)
    return str(script)


@functools.lru_cache(maxsize=1)
def _directory_of_process() -> Path:
    """A temporary directory of this process, removed when it ends. Its path holds no space where that can be helped."""
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    place = next((p for p in places if not re.search(r"\s", p) and os.access(p, os.W_OK)), places[0])
    made = Path(tempfile.mkdtemp(prefix="msa_tiles-", dir=place))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@contextlib.contextmanager
def tilelang_environment() -> Iterator[None]:
    """What TileLang reads from the environment, where what stands there is nothing that it can use.

    That is a compiler of several words, and a home directory that cannot be written to, where it keeps a cache.

    Raises ToolchainError when there is no C++ compiler.
    """
    wanted = {"CXX": one_word(find_host_compiler())}
    if not files.can_be_made(Path(os.path.expanduser("~/.tilelang/cache"))):
        wanted["TILELANG_CACHE_DIR"] = os.environ.get("TILELANG_CACHE_DIR") or str(_directory_of_process() / "tilelang")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_disassembler(name: str) -> Path:
    """Path of `cuobjdump` or `nvdisasm`.

    Raises ToolchainError when it is in none of the CUDA wheels and not on PATH.
    """
    for directory in _wheel_directories():
        if (directory / name).exists():
            return directory / name
    on_path = shutil.which(name)
    if on_path is None:
        raise ToolchainError(f"auditing a kernel needs {name}: `pip install nvidia-cuda-{name}` or put it on PATH")
    return Path(on_path)


@functools.lru_cache(maxsize=1)
def tilelang_libraries() -> tuple[Path, ...]:
    """TileLang's native libraries in loading order: the runtime that kernels call, then the CUDA module loader.

    Loading them takes about 30 ms, importing the whole Python package over a second.

    Raises ToolchainError when TileLang is not installed, or older than what kernels are written in.
    """
    version, spec = _installed("tilelang"), importlib.util.find_spec("tilelang")
    if not version or spec is None or spec.origin is None:
        raise ToolchainError(
            "a TileLang kernel needs tilelang, which is not installed: `pip install 'msa-tiles[tilelang]'`"
        )
    if _numbers(version) < LEAST_TILELANG:
        least = ".".join(map(str, LEAST_TILELANG))
        raise ToolchainError(
            f"TileLang kernels are written for tilelang {least}, {version} is installed; CuTe DSL kernels do without"
        )
    libraries = tuple(Path(spec.origin).parent / "lib" / name for name in ("libtvm_runtime.so", "libtilelang.so"))
    for library in libraries:
        if not library.exists():
            raise ToolchainError(f"the installed tilelang has no {library}; reinstall it")
    return libraries


@functools.lru_cache(maxsize=1)
def cutedsl_runtime() -> Path:
    """CuTe DSL's runtime library, of the CUDA series that the DSL itself would take: the newest that the driver runs.

    Loading it takes milliseconds, importing the DSL over a second.

    Raises ToolchainError when CuTe DSL is not installed, or for no series that the driver runs.
    """
    if not _installed("nvidia-cutlass-dsl"):
        raise ToolchainError(
            "a CuTe DSL kernel needs nvidia-cutlass-dsl, which is not installed: `pip install 'msa-tiles[cutedsl]'`"
        )
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
    found: dict[int, Path] = {}
    for path in (path for place in places for path in sorted(place.glob(f"cu*/lib/{_CUTEDSL_RUNTIME}"))):
        found.setdefault(int(path.parts[-3][2:]), path)  # of two installations, the one that imports find
    if not found:
        raise ToolchainError(
            f"the installed nvidia-cutlass-dsl has no {_CUTEDSL_RUNTIME}; reinstall it: "
            "`pip install --force-reinstall nvidia-cutlass-dsl`"
        )
    driver = _driver_series()
    fitting = [series for series in found if driver is None or series <= driver]
    if not fitting:
        series = ", ".join(f"cu{number}" for number in sorted(found))
        raise ToolchainError(
            f"a CuTe DSL kernel needs a runtime library for the driver, which runs up to cu{driver}: "
            f"the installed nvidia-cutlass-dsl has {series}"
        )
    return found[max(fitting)]


def _driver_series() -> int | None:
    """Major CUDA version that the driver runs, or None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000
