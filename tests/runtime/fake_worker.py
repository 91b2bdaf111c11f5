"""A worker whose compiler does what the variant's capacity says: see `Odd`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes import LIBRARY, VERSION

from msa_tiles.runtime import compiler, toolchain, workers
from msa_tiles.runtime.compiler import CompileError

FAILS, DIES, HANGS = 1001, 1002, 1003  # capacities of kernels that do not compile, in three ways


def compile_oddly(cell: Any, variant: Mapping[str, int], _arch: str, staged: Path) -> dict[str, Any]:
    with Path(os.environ["FAKE_LOG"]).open("a") as file:
        file.write(f"{os.getpid()} {sys.flags.optimize}\n")
    print("compilers print what they like")
    deadline = time.monotonic() + 60
    while len(Path(os.environ["FAKE_LOG"]).read_text().splitlines()) < int(os.environ.get("FAKE_TOGETHER", "0")):
        time.sleep(0.02)  # until so many have begun
        if time.monotonic() > deadline:
            raise CompileError(f"{cell.id}: alone")
    if variant["capacity"] == FAILS:
        raise CompileError(f"{cell.id}: no such thing")
    if variant["capacity"] == DIES:
        sys.stderr.write("out of luck\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if variant["capacity"] == HANGS:
        time.sleep(60)
    for name in ("kernel.so", "kernel.cubin", "kernel.cu"):
        (staged / name).write_bytes(LIBRARY)
    return {"function": "scale_rows_kernel", "kernels": {}}


def serve() -> None:
    compiler._COMPILERS["tilelang"] = compile_oddly
    toolchain.compiler_version = lambda _dsl: VERSION
    toolchain.require_compiler = lambda _dsl: None
    workers.serve()
