"""Compile a shared library for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

from msa_tiles.runtime import toolchain


def compile_library(path: Path, *arguments: str) -> None:
    command = [*toolchain.find_linker(), "-shared", "-fPIC", "-O1", *arguments, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
