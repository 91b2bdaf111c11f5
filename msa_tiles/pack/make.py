"""Make a pack of compiled kernels: take each out of the cache, and have it call the pack's own runtime.

A library in the cache asks the runtime of its DSL for a few functions. Here these names become those of `runtime.c`,
letter for letter; nothing else of host or device code changes, so a packed kernel launches as the DSL's would.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_tiles.errors import ToolError
from msa_tiles.pack import embedded
from msa_tiles.pack.elf import Library
from msa_tiles.runtime import packs, toolchain
from msa_tiles.runtime.build import Job, build
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.packs import FORMAT, MANIFEST, RUNTIME
from msa_tiles.runtime.registry import Cell, Target
from msa_tiles.sources import helpers_of, texts_of

MACHINE = "x86_64"
# The oldest glibc that packs promise to run with, unless their symbols ask for a newer one.
GLIBC = (2, 17)
# Versions of TVM-FFI whose binary interface packed kernels have: from one on, and before another.
TVM_FFI = ("0.1.11", "0.1.13")
# What the runtimes of the DSLs provide and `runtime.c` has under another name.
PROVIDED = {
    "cutedsl": (
        "CuteDSLRT_TVMFFISetRaisedCudaError", "_cuKernelGetAttribute", "_cuTensorMapEncodeTiled",
        "_cudaDeviceGetAttribute", "_cudaGetDevice", "_cudaKernelSetAttributeForDevice", "_cudaLaunchKernelEx",
        "_cudaLibraryGetKernel", "_cudaLibraryLoadData", "_cudaSetDevice", "cuda_dialect_init_library_once",
        "cuda_dialect_unload_library_once",
    ),
    "tilelang": ("TVMBackendGetFuncFromEnv",),
}  # fmt: skip
# What a kernel of TileLang may look up by name, besides its own device function.
_LOOKED_UP = {b"__tvm_set_device", b"__tvm_tensormap_create_tiled"}
_OWN_NAMES = {b"__tvm_ffi__library_bin", b"__tvm_ffi__library_ctx"}
_LIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
_SOURCE = Path(__file__).with_name("runtime.c")


class PackingError(ToolError):
    """A pack cannot be made; the message says why."""


@dataclass(frozen=True)
class Made:
    """A pack, or a wheel with one, on disk."""

    place: Path
    kernels: int
    glibc: str  # the oldest that it runs with, such as 2.17
    tvm_ffi: str  # the versions that it runs with
    bytes: int


def refuse_machine() -> None:
    """Raise PackingError unless this machine is one that packs are made for and on."""
    if (machine := platform.machine()) != MACHINE:
        raise PackingError(
            f"packs are for {MACHINE}, this machine is {machine}: packed host code is the compiler's own machine's, "
            f"and none has been tried on {machine}; let its kernels be compiled on first use"
        )


def make(
    jobs: Iterable[Job], target: Target, directory: Path, *, workers: int = 1, cache: Cache | None = None
) -> Iterator[Job]:
    """Compile what the cache lacks, and write the pack to an empty or new directory; yields the jobs as they are done.

    The pack is there when the last one is: it is staged beside its place, and a stop on the way leaves nothing.

    Raises PackingError at once for a place that is taken, and when a kernel does not compile, or asks for what packs do
    not have.
    """
    refuse_machine()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PackingError(f"{directory} exists and is no empty directory: name another, or remove it")
    return _made(jobs, target, directory, workers, cache)


def _made(jobs: Iterable[Job], target: Target, directory: Path, workers: int, cache: Cache | None) -> Iterator[Job]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        records, libraries = [], [_compile_runtime(staged / RUNTIME)]
        cells: dict[str, dict[str, Any]] = {}
        for outcome in build(
            list(jobs), {target.name: target}, workers=workers, audited=False, cache=cache, apart=True
        ):
            if outcome.entry is None:
                raise PackingError(f"{outcome.job}: {'; '.join(outcome.complaints)}")
            cell = outcome.job.cell
            if cell.id not in cells:
                cells[cell.id] = {**_code_of(cell), "versions": outcome.entry.meta["versions"]}
            record, library = _pack(outcome.job, outcome.entry, staged)
            records.append(record)
            libraries.append(library)
            yield outcome.job
        _write_manifest(staged, target, cells, records, libraries)
        staged.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        staged.rename(directory)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def described(directory: Path) -> Made:
    """What a pack holds, read back as a server would.

    Raises PackError when it does not fit this machine.
    """
    pack = packs.read(directory)
    low, high = pack.manifest["tvm_ffi"]
    size = sum(path.stat().st_size for path in directory.iterdir())
    return Made(directory, len(pack.records), pack.manifest["glibc"], f"{packs.TVM_FFI}>={low},<{high}", size)


def _code_of(cell: Cell) -> dict[str, Any]:
    """Which code the kernels of a cell are compiled from."""
    helpers = helpers_of(cell.text())
    code = {"digest": cell.digest, "source": cell.source_hash(), "texts": texts_of(cell.file, helpers)}
    # The name alone: where it lay is nobody else's concern.
    return code if cell.tree is None else {**code, "tree": cell.tree.name}


def _pack(job: Job, entry: Entry, staged: Path) -> tuple[dict[str, Any], Library]:
    cell = job.cell
    library = Library.read(entry.library)
    provided = PROVIDED[cell.dsl]
    where = str(job)
    if foreign := library.needed() - _LIBC:
        raise PackingError(f"{where} needs the library {min(foreign)}, which packs do not have")
    if unknown := {name for name in library.asked() - set(provided) if not name.startswith("TVMFFI")}:
        raise PackingError(f"{where} asks for the function {min(unknown)}, which packs do not have")
    record: dict[str, Any] = {
        "cell": cell.id,
        "variant": dict(job.variant),
        "file": _file_name(job),
        "function": entry.meta["function"],
    }
    if cell.dsl == "tilelang":
        names = set(re.findall(rb"(?<=\0)__tvm_\w+(?=\0)", library.image))
        if unknown_names := names - _LOOKED_UP - _OWN_NAMES - {b"__tvm_ffi_" + record["function"].encode()}:
            raise PackingError(f"{where} looks for {min(unknown_names).decode()}, which packs do not have")
        device = embedded.read(library.image, library.address("__tvm_ffi__library_bin"))
        record["device"] = {
            "name": device.name,
            "parameters": device.parameters,
            "launch": device.launch,
            "offset": device.offset,
        }
    image = library.renamed({name: packed_name(name) for name in provided})
    path = staged / record["file"]
    path.write_bytes(image)
    path.chmod(0o644)
    return record, Library(image, path.name)


def packed_name(name: str) -> str:
    """How `runtime.c` calls a function that a DSL's runtime provides: as long a name, with first letters of its own."""
    return "MT1" + name[3:]


def _file_name(job: Job) -> str:
    point = json.dumps(dict(sorted(job.variant.items()))).encode()
    return f"{job.cell.id}-{hashlib.sha256(point).hexdigest()[:12]}.so"


def _compile_runtime(path: Path) -> Library:
    import tvm_ffi

    include = Path(tvm_ffi.libinfo.find_include_path())
    options = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-s", f"-I{include}"]
    command = [*toolchain.find_linker(), *options, "-o", str(path), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackingError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    path.chmod(0o644)
    library = Library.read(path)
    if foreign := library.needed() - _LIBC:
        raise PackingError(f"{path.name} needs the library {min(foreign)}")
    return library


def _write_manifest(
    staged: Path,
    target: Target,
    cells: Mapping[str, Any],
    records: list[dict[str, Any]],
    libraries: list[Library],
) -> None:
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(staged.glob("*.so"))}
    manifest: Mapping[str, Any] = {
        "format": FORMAT,
        "target": target.name,
        "arch": target.arch,
        "machine": MACHINE,
        "cpu": _processor(staged / library.name for library in libraries),
        "glibc": "{}.{}".format(*max(GLIBC, *(library.libc() for library in libraries))),
        "tvm_ffi": list(TVM_FFI),
        "made_with": {"msa-tiles": _version("msa-tiles"), packs.TVM_FFI: _version(packs.TVM_FFI)},
        "cells": cells,
        "kernels": sorted(records, key=lambda record: record["file"]),
        "sha256": hashes,
    }
    path = staged / MANIFEST
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    path.chmod(0o644)


def _processor(libraries: Iterable[Path]) -> str:
    """The processor that the host code asks for: x86-64, or x86-64-v3 where it has AVX2's instructions.

    Raises PackingError for those of AVX-512, which hosts of Hopper GPUs need not have.
    """
    objdump = shutil.which("objdump")
    if objdump is None:
        raise PackingError("making a pack looks through its host code with objdump: install binutils")
    found = "x86-64"
    for library in libraries:
        done = subprocess.run([objdump, "-dw", os.fspath(library)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PackingError(f"objdump cannot read {library}: {done.stderr.strip()}")
        # The first byte tells the encoding: 62 is AVX-512's, c4 and c5 are AVX's.
        first = set(re.findall(r"^\s+[0-9a-f]+:\t([0-9a-f]{2}) ", done.stdout, re.M))
        if "62" in first:
            raise PackingError(
                f"{library.name} has instructions of AVX-512, which not every machine has: compile on one without it"
            )
        if first & {"c4", "c5"}:
            found = "x86-64-v3"
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
