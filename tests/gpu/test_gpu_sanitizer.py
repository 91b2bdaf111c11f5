"""compute-sanitizer on one small case per kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msa_tiles.runtime import toolchain

ROOT = Path(__file__).resolve().parents[2]
ERROR = 23
NAMES = {"tilelang": "main_kernel", "cutedsl": "_msa_tiles_kernel_"}  # what our kernels' names have in them

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH"),
]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("group", ["forward", "training"])
def test_sanitizer_is_clean(group: str, tool: str, backend: str) -> None:
    if reason := toolchain.missing(backend):
        pytest.skip(reason)
    options = ["--tool", tool, "--error-exitcode", str(ERROR), "--kernel-name", f"kns={NAMES[backend]}"]
    command = ["compute-sanitizer", *options, sys.executable, "tests/gpu/gpu_calls.py", backend, group]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
