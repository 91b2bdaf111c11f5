"""Load a compiled kernel and launch it through TVM-FFI.

TVM-FFI asks torch for the current stream of the first CUDA tensor's device on every call and launches there, so a
kernel follows `torch.cuda.stream` and graph capture by itself. The generated host code sets the device of its tensors
and does not set it back, which is why a call from another current device is guarded here.

Kernels of every DSL are shared libraries with a TVM-FFI function. They name no library of their own, so the runtime of
their DSL is made visible before; neither DSL is imported for that. Kernels of a pack bring a runtime of their own.

A process loads a library once and keeps it: TVM-FFI writes the module that was made last into a variable of the
library, where the function looks for its device code, so that a second load would have launches of other threads find a
module that has none yet, or none any more.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from msa_tiles.runtime import packed, toolchain
from msa_tiles.runtime.cache import VARIABLE, Entry
from msa_tiles.runtime.packs import Packed
from msa_tiles.runtime.pending import Pending
from msa_tiles.runtime.registry import Cell


class Kernel:
    """A compiled kernel on one device. Call it with the positional arguments of its generated file."""

    __slots__ = ("_function", "_index", "cell", "entry", "variant")

    def __init__(
        self, cell: Cell, variant: Mapping[str, int], entry: Entry | Packed | Pending, device: torch.device
    ) -> None:
        self.cell = cell
        self.variant = variant
        self.entry = entry
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._function = self._first_launch if isinstance(entry, Pending) else load_function(entry)

    def __call__(self, *args: Any) -> None:
        """Launch on the current stream of the kernel's device, without synchronising."""
        if torch.cuda.current_device() == self._index:
            self._function(*args)
        else:
            with torch.cuda.device(self._index):
                self._function(*args)

    def _first_launch(self, *args: Any) -> None:
        """Launch what was still being compiled when it was found."""
        entry = self.entry
        if isinstance(entry, Pending):  # threads may come here at the same time
            self.entry = entry = entry.wait()
        self._function = load_function(entry)
        self._function(*args)

    def __repr__(self) -> str:
        return f"Kernel({self.cell.id}, {dict(self.variant)}, cuda:{self._index})"


def load_function(entry: Entry | Packed) -> Any:
    """The TVM-FFI function of a cache entry or of a pack's kernel.

    Raises ToolchainError when the runtime of an entry's DSL is not installed, or the library cannot be loaded, and
    PackError for a damaged pack.
    """
    if isinstance(entry, Packed):
        return packed.load(entry)
    library, name = entry.library, entry.meta["function"]
    with _loading:
        function = _functions.get((library, name))
        if function is None:
            function = _functions[library, name] = _load(entry, name)
    return function


def _load(entry: Entry, name: str) -> Any:
    # Its import asks for CUDA devices, and whoever only asks which kernel would run has to leave them alone.
    import tvm_ffi

    _load_runtime(entry.meta["cell"].split(".")[1])
    try:
        return tvm_ffi.load_module(str(entry.library))[name]
    except (OSError, RuntimeError, AttributeError, KeyError) as error:
        why = str(error).strip()
        if os.statvfs(entry.directory).f_flag & os.ST_NOEXEC:
            why = f"its file system is mounted noexec; set {VARIABLE} to a directory on another one"
        raise toolchain.ToolchainError(f"the compiled kernel {entry.library} cannot be loaded: {why}") from error


def _fresh() -> None:
    """In a child of a fork, where nobody holds the lock that a thread of the parent may have held."""
    global _loading
    _loading = threading.Lock()


_loading = threading.Lock()
_functions: dict[tuple[Path, str], Any] = {}  # for the life of the process
os.register_at_fork(after_in_child=_fresh)


@functools.lru_cache(maxsize=2)
def _load_runtime(dsl: str) -> None:
    """Make what compiled kernels of a DSL call visible to everything loaded later.

    TileLang's are the loader of CUDA modules and the TMA descriptor functions, CuTe DSL's the launch itself.
    """
    libraries = toolchain.tilelang_libraries() if dsl == "tilelang" else (toolchain.cutedsl_runtime(),)
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
