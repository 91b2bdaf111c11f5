"""Choose, compile, cache and launch generated kernels."""

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
