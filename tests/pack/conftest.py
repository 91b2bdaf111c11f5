"""The fake CUDA driver, compiled once, and what it takes to run a process on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from libraries import compile_library

from msa_tiles.runtime import toolchain
from msa_tiles.runtime.toolchain import ToolchainError

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for LD_LIBRARY_PATH: the fake driver, which is the CUDA runtime library as well."""
    try:
        toolchain.find_linker()
    except ToolchainError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("driver")
    compile_library(directory / "libcuda.so.1", str(HERE / "fake_cuda.c"), "-ldl", "-Wl,-soname,libcuda.so.1")
    for name in ("libcudart.so", "libcudart.so.12", "libcudart.so.13"):
        (directory / name).symlink_to("libcuda.so.1")
    return directory


@pytest.fixture
def launches(fake_driver: Path, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Run `launches.py` on the fake driver: what it printed, and the lines that the driver wrote."""

    def run(*arguments: str, python: Path = Path(sys.executable), **environment: str) -> tuple[Any, list[str]]:
        log = tmp_path / "driver.log"
        log.unlink(missing_ok=True)
        given = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "FAKE_CUDA_LOG": str(log), **environment}
        command = [str(python), str(HERE / "launches.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout), log.read_text().splitlines() if log.exists() else []

    return run
