"""Where the compilers and disassemblers are, and which versions they have.

nvcc comes from CUDA_HOME or CUDA_PATH, from PATH, or from the wheels of the `cuda` extra, in that order, which is also
the order in which TileLang looks. The disassemblers come from their wheels or from PATH.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from msa_tiles.errors import ToolError

CODE_GENERATORS = ("tilelang", "apache-tvm-ffi")


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


@functools.lru_cache(maxsize=1)
def generator_versions() -> tuple[tuple[str, str], ...]:
    """(distribution, installed version) of the Python packages that turn a kernel into CUDA source and host code."""
    return tuple((name, importlib.metadata.version(name)) for name in CODE_GENERATORS)


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


def tilelang_libraries() -> tuple[Path, ...]:
    """TileLang's native libraries in loading order: the runtime that kernels call, then the CUDA module loader.

    Loading them takes about 30 ms, importing the whole Python package over a second.

    Raises ToolchainError when TileLang is not installed.
    """
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise ToolchainError("running a TileLang kernel needs the package tilelang: `pip install tilelang`")
    libraries = tuple(Path(spec.origin).parent / "lib" / name for name in ("libtvm_runtime.so", "libtilelang.so"))
    for library in libraries:
        if not library.exists():
            raise ToolchainError(f"the installed tilelang has no {library}; reinstall it")
    return libraries
