"""A compiler that takes no time and leaves a trace, so that what surrounds compiling can be tested by itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from msa_tiles.runtime import compiler, toolchain
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import compile_variant, find_compiled
from msa_tiles.runtime.registry import Cell

VERSION = "1.2.3"
ARCH = "sm_90a"
# Begins as a library of this machine does: the program that runs is one.
LIBRARY = Path(sys.executable).resolve().read_bytes()[:64] + b"code"


class Fake:
    """Compiles a cell for a cache; `log` has a line for each compilation. Each step of one takes `pause` seconds."""

    def __init__(self, cell: Cell, root: Path, log: Path) -> None:
        self.cell, self.root, self.log = cell, root, log
        self.variant = cell.ci[0]
        self.pause = 0.0
        self.failure: Exception | None = None

    def __call__(self, _cell: Cell, _variant: Mapping[str, int], _arch: str, staged: Path) -> dict[str, Any]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        for name, content in (("kernel.cubin", b"cubin"), ("kernel.cu", b"source"), ("kernel.so", LIBRARY)):
            for part in (content[:2], content[2:]):
                with (staged / name).open("ab") as file:
                    file.write(part)
                time.sleep(self.pause)
        if self.failure is not None:
            raise self.failure
        return {"function": "scale_rows_kernel", "kernels": {"scale_rows_kernel": {"threads": 64}}}

    def compile(self) -> Entry:
        return compile_variant(self.cell, self.variant, ARCH, Cache(self.root))

    def find(self) -> Entry | None:
        return find_compiled(self.cell, self.variant, ARCH, Cache(self.root))

    @property
    def count(self) -> int:
        """How often something was compiled, in any process."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    @property
    def names(self) -> list[str]:
        """What lies beside the locks."""
        return sorted(path.name for path in (self.root / self.cell.id).iterdir() if not path.name.endswith(".lock"))


def install(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setitem(compiler._COMPILERS, fake.cell.dsl, fake)
    monkeypatch.setattr(toolchain, "compiler_version", lambda _dsl: VERSION)
    monkeypatch.setattr(toolchain, "require_compiler", lambda _dsl: None)
    return fake
