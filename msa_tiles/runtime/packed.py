"""Load a kernel of a pack: its library, and the pack's runtime over the CUDA driver. No DSL is needed.

The runtime (`msa_tiles/pack/runtime.c`) is loaded once a process, visible to the kernels that are loaded later; its
names are its own, so the runtimes of the DSLs may be there too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from msa_tiles.runtime.packs import RUNTIME, Packed, PackError

# In the order of `Driver` in runtime.c.
DRIVER = (
    "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
    "cuCtxGetDevice", "cuLibraryLoadData", "cuLibraryUnload", "cuLibraryGetKernel", "cuKernelGetAttribute",
    "cuKernelSetAttribute", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx",
    "cuTensorMapEncodeTiled", "cuGetErrorName", "cuGetErrorString",
)  # fmt: skip


class _Description(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p), ("context", ctypes.c_void_p), ("image", ctypes.c_void_p), ("name", ctypes.c_char_p),
        ("parameters", ctypes.c_char_p), ("launch", ctypes.c_char_p),
    )  # fmt: skip


_loaded = 0


def load_count() -> int:
    """How many packed kernels this process has loaded."""
    return _loaded


def load(packed: Packed) -> Any:
    """The TVM-FFI function of a packed kernel.

    Raises PackError when a file of the pack is not what its manifest says, or when there is no CUDA driver.
    """
    global _loaded
    with _lock:
        open_kernel = _runtime(packed)
        path = packed.pack.checked(packed.record["file"])
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise PackError(f"{path} cannot be loaded: {error}") from error
        description = _Description(entry=_address(library, f"__tvm_ffi_{packed.record['function']}"))
        device = packed.record.get("device")
        if device is not None:
            description.context = _address(library, "__tvm_ffi__library_ctx")
            description.image = _address(library, "__tvm_ffi__library_bin") + device["offset"]
            for text in ("name", "parameters", "launch"):
                setattr(description, text, device[text].encode())
        _kept.append(library)
        _loaded += 1
        return open_kernel(ctypes.addressof(description))


def _fresh() -> None:
    """In a child of a fork, where nobody holds the lock that a thread of the parent may have held."""
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
os.register_at_fork(after_in_child=_fresh)
_kept: list[ctypes.CDLL] = []  # libraries stay for the life of the process
_open: list[Any] = []  # the runtime's function, once it is loaded


def _runtime(packed: Packed) -> Any:
    """The runtime's function that opens kernels. The first pack's serves all: its names carry a version."""
    if not _open:
        import tvm_ffi

        driver = _driver()
        path = packed.pack.checked(RUNTIME)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        functions = (ctypes.c_void_p * len(DRIVER))(*(_address(driver, name) for name in DRIVER))
        failed = library.MT1_bind(functions)
        if failed:
            raise PackError(f"the CUDA driver counts no devices (error {failed})")
        _kept.append(library)
        _open.append(tvm_ffi.load_module(str(path))["open"])
    return _open[0]


def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PackError(f"a packed kernel needs the CUDA driver: {error}") from error
    if failed := driver.cuInit(0):
        raise PackError(f"the CUDA driver does not start (error {failed})")
    return driver


def _address(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        raise PackError(f"{library._name} has no {name}: another version of it is wanted") from None
