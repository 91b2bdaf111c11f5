"""Choose, compile, cache and launch generated kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msa_tiles.runtime.compiler import CompileError, compile_count
    from msa_tiles.runtime.dispatch import NoKernelError, find_kernel, serves, use_pack
    from msa_tiles.runtime.facts import CallFacts, DeviceFacts, device_facts
    from msa_tiles.runtime.launch import Kernel
    from msa_tiles.runtime.packs import PackError
    from msa_tiles.runtime.parts import warm
    from msa_tiles.runtime.registry import default_registry
    from msa_tiles.runtime.toolchain import ToolchainError

__all__ = [
    "CallFacts",
    "CompileError",
    "DeviceFacts",
    "Kernel",
    "NoKernelError",
    "PackError",
    "ToolchainError",
    "compile_count",
    "default_registry",
    "device_facts",
    "find_kernel",
    "serves",
    "use_pack",
    "warm",
]

# The module of each name, imported when it is asked for: what compiles and what lists kernels does without torch, whose
# import takes longer than all else that they do.
_HOMES = {
    "CallFacts": "facts",
    "CompileError": "compiler",
    "DeviceFacts": "facts",
    "Kernel": "launch",
    "NoKernelError": "dispatch",
    "PackError": "packs",
    "ToolchainError": "toolchain",
    "compile_count": "compiler",
    "default_registry": "registry",
    "device_facts": "facts",
    "find_kernel": "dispatch",
    "serves": "dispatch",
    "use_pack": "dispatch",
    "warm": "parts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
