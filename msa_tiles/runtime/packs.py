"""Packs: kernels compiled ahead of time, which run without a compiler and without their DSL.

A pack is a directory with `manifest.json`, the kernels' shared libraries and one small runtime library that they call.
`msa-tiles pack` makes it. Packs are found inside the installed package (`msa_tiles/_packs`, which release wheels have),
along `MSA_TILES_PACKS`, a list of directories like PATH, and where `use` was told; whoever is named last comes first.

A pack is code, like a wheel: take it from whom you would take a wheel. What is checked here is that it is the pack that
was made, for this installation and this machine: nothing of it is loaded before that, and nothing is ever written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_tiles import paths, trust
from msa_tiles.errors import ToolError
from msa_tiles.runtime.registry import Cell
from msa_tiles.sources import texts_of

FORMAT = 1
MANIFEST, RUNTIME = "manifest.json", "runtime.so"
VARIABLE = "MSA_TILES_PACKS"
TVM_FFI = "apache-tvm-ffi"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*\.so")


class PackError(ToolError):
    """A pack cannot be used here; the message says which one, why, and what to do."""


@dataclass(frozen=True)
class Packed:
    """One compiled kernel of a pack."""

    pack: Pack
    record: Mapping[str, Any]  # its entry in the manifest

    @property
    def library(self) -> Path:
        return self.pack.directory / self.record["file"]

    def mismatch(self, cell: Cell) -> str | None:
        """Why it is not the kernel of this installation, as a sentence, or None."""
        made = self.pack.manifest["cells"][cell.id]
        if made["digest"] != cell.digest:
            tree = made.get("tree")
            here = "this installation's" if cell.tree is None else f"that of {cell.tree}"
            remedy = "make the pack again"
            if tree is None and cell.tree is not None:
                remedy = f"the tree wants a pack of its own, `msa-tiles pack --tree {cell.tree}`"
            elif tree and (cell.tree is None or cell.tree.name != tree):
                remedy = f"it was made with the tree {tree}: use that one here (--tree, MSA_TILES_TREE), or {remedy}"
            return (
                f"the pack {self.pack.directory} holds {cell.id} of digest {made['digest']}, "
                f"{here} is {cell.digest}: {remedy}"
            )
        if _same_texts(made["texts"], cell.file) or made["source"] == cell.source_hash():
            return None
        return f"the pack {self.pack.directory} holds {cell.id} of another text than {cell.file}: make the pack again"


@dataclass(frozen=True)
class Pack:
    """A directory of compiled kernels whose manifest fits this machine and this TVM-FFI."""

    directory: Path
    manifest: Mapping[str, Any]

    @functools.cached_property
    def kernels(self) -> Mapping[tuple[str, tuple[tuple[str, int], ...]], Packed]:
        """The kernels by cell and variant."""
        return {(record["cell"], _point(record["variant"])): Packed(self, record) for record in self.records}

    @property
    def records(self) -> list[Mapping[str, Any]]:
        return self.manifest["kernels"]

    def checked(self, name: str) -> Path:
        """A file of the pack, once its text is what the manifest says.

        Raises PackError for a missing, damaged or untrusted file.
        """
        path = self.directory / name
        try:
            found = hashlib.sha256(_content(path)).hexdigest()
        except OSError as error:
            raise PackError(f"{path} cannot be read ({error.strerror}): the pack is damaged, make it again") from error
        if found != self.manifest["sha256"][name]:
            raise PackError(f"{path} is not what {MANIFEST} says: the pack is damaged, make or install it again")
        return path


def read(directory: Path) -> Pack:
    """The pack of a directory.

    Raises PackError when it is damaged, or made for another machine or another TVM-FFI.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(_content(path))
    except OSError as error:
        raise PackError(f"{directory} is no pack: {MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path} is no JSON ({error}): the pack is damaged, make it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PackError(
            f"{path} has not format {FORMAT}: this version of msa-tiles cannot read it, make the pack again"
        )
    if complaint := _misshapen(manifest):
        raise PackError(f"{path} {complaint}: the pack is damaged, make it again")
    if complaint := _foreign(manifest):
        raise PackError(f"the pack {directory} {complaint}")
    return Pack(directory, manifest)


def use(path: str | os.PathLike[str]) -> Pack:
    """Look for kernels in this pack first, from now on.

    Raises PackError when it cannot be used here, or a file of it is not what was packed.
    """
    pack = read(Path(path).expanduser().resolve())
    for name in pack.manifest["sha256"]:
        pack.checked(name)
    with _lock:
        _named[:] = [pack, *(other for other in _named if other.directory != pack.directory)]
    return pack


def active() -> tuple[Pack, ...]:
    """The packs in the order in which they are searched.

    Raises PackError when one that is named, or the wheel's own, cannot be used here.
    """
    return (*_named, *_listed(os.environ.get(VARIABLE, "")), *_installed())


def find(cell: Cell, variant: Mapping[str, int]) -> Packed | None:
    """The packed kernel of a variant that is this installation's, or None."""
    return next((packed for packed in _candidates(cell, variant) if _mismatch(packed, cell) is None), None)


def mismatches(cell: Cell, variant: Mapping[str, int]) -> list[str]:
    """Why packed kernels of this variant, or all packs, are passed over, as sentences."""
    known = active()
    if known and all(pack.manifest["arch"] != cell.arch for pack in known):
        others = ", ".join(f"{pack.directory} for {pack.manifest['arch']}" for pack in known)
        return [f"no pack is for {cell.arch}: {others}"]
    return [why for packed in _candidates(cell, variant) if (why := _mismatch(packed, cell)) is not None]


_named: list[Pack] = []
_lock = threading.Lock()


def _candidates(cell: Cell, variant: Mapping[str, int]) -> list[Packed]:
    key = cell.id, _point(variant)
    return [pack.kernels[key] for pack in active() if key in pack.kernels and pack.manifest["arch"] == cell.arch]


_judged: dict[tuple[Path, str, str], str | None] = {}


def _mismatch(packed: Packed, cell: Cell) -> str | None:
    """`Packed.mismatch`, once a process: kernel files do not change under a running one."""
    key = packed.library, cell.digest, str(cell.file)
    if key not in _judged:
        _judged[key] = packed.mismatch(cell)
    return _judged[key]


@functools.lru_cache(maxsize=8)
def _listed(text: str) -> tuple[Pack, ...]:
    places = [place for place in text.split(os.pathsep) if place]
    try:
        return tuple(read(Path(place).expanduser().resolve()) for place in places)
    except PackError as error:
        raise PackError(f"{VARIABLE}: {error}") from error


@functools.lru_cache(maxsize=1)
def _installed() -> tuple[Pack, ...]:
    return tuple(read(manifest.parent) for manifest in sorted((paths.PACKAGE / "_packs").glob(f"*/{MANIFEST}")))


def _point(variant: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(variant.items()))


def _same_texts(texts: Mapping[str, str], file: Path) -> bool:
    """Whether kernel file and helpers are, byte for byte, those that were packed: quicker than comparing their code."""
    try:
        return texts_of(file, tuple(texts)) == texts
    except OSError:
        return False


def _misshapen(manifest: Mapping[str, Any]) -> str | None:
    """What a manifest lacks, or None: everything that is used later has its type."""
    hashes, kernels, cells = manifest.get("sha256"), manifest.get("kernels"), manifest.get("cells")
    if not (isinstance(hashes, dict) and isinstance(kernels, list) and isinstance(cells, dict) and RUNTIME in hashes):
        return "lists no kernels, cells or hashes"
    for name, value in hashes.items():
        if not (_NAME.fullmatch(name) and isinstance(value, str)):
            return f"names a file {name!r}"
    texts = ("arch", "machine", "cpu")
    bounds = manifest.get("tvm_ffi")
    if not all(isinstance(manifest.get(key), str) for key in texts) or not (
        isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(bound, str) for bound in bounds)
    ):
        return f"does not say {', '.join(texts)} and tvm_ffi"
    for name, made in cells.items():
        hashed = made.get("texts") if isinstance(made, dict) else None
        if not isinstance(hashed, dict) or not _are_texts(made.get("digest"), made.get("source"), *hashed.values()):
            return f"does not say of which code {name} is"
    for record in kernels:
        strings = ("cell", "file", "function")
        if not isinstance(record, dict) or not _are_texts(*(record.get(key) for key in strings)):
            return f"has a kernel without {', '.join(strings)}"
        if record["cell"] not in cells or record["file"] not in hashes:
            return f"has a kernel {record['file']!r} of an unknown cell, or without a hash"
        variant, device = record.get("variant"), record.get("device")
        if not (isinstance(variant, dict) and all(type(value) is int for value in variant.values())):
            return f"has a kernel {record['cell']} without variant"
        if device is not None and not _is_device(device):
            return f"has a kernel {record['cell']} with a device function that it does not describe"
    return None


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_device(device: Any) -> bool:
    return (
        isinstance(device, dict)
        and all(isinstance(device.get(key), str) for key in ("name", "parameters", "launch"))
        and re.fullmatch("[lifm]{0,96}", device["parameters"]) is not None
        and re.fullmatch("p?[xyzXYZ]{0,6}s?", device["launch"]) is not None
        and type(device.get("offset")) is int
        and device["offset"] >= 0
    )


def _foreign(manifest: Mapping[str, Any]) -> str | None:
    """Why a pack's host code cannot run here, or None."""
    if manifest["machine"] != platform.machine():
        return f"is for {manifest['machine']}, this machine is {platform.machine()}"
    low, high = manifest["tvm_ffi"]
    try:
        installed = importlib.metadata.version(TVM_FFI)
    except importlib.metadata.PackageNotFoundError:
        return f"needs {TVM_FFI}, which is not installed"
    if not _release(low) <= _release(installed) < _release(high):
        return f"needs {TVM_FFI}>={low},<{high}, installed is {installed}: its binary interface differs"
    if manifest["cpu"] == "x86-64-v3" and not _has_avx2():
        return "needs a processor with AVX2 (x86-64-v3)"
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


@functools.lru_cache(maxsize=1)
def _has_avx2() -> bool:
    try:
        return re.search(r"^flags\s*:.*\bavx2\b", Path("/proc/cpuinfo").read_text(), re.M) is not None
    except OSError:
        return True  # a kernel that hides it; whoever runs Hopper GPUs has it


def _content(path: Path) -> bytes:
    """The bytes of a file of a pack. What lies inside this package is as trusted as the package's own code.

    Raises OSError, and PackError for what another user could have written.
    """
    if path.is_relative_to(paths.PACKAGE):
        return path.read_bytes()
    try:
        trust.require(path.parent, path.parent.lstat())
        return trust.read(path)
    except trust.TrustError as error:
        raise PackError(f"{error}, and a pack is code") from error
