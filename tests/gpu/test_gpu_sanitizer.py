"""compute-sanitizer on one small case per kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ERROR = 23

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH"),
]


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer_is_clean(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERROR), "--kernel-name", "kns=main_kernel"]
    done = subprocess.run(
        [*command, sys.executable, "tests/gpu/gpu_calls.py"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
