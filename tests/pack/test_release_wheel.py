"""A release wheel of three kernels, in an environment that has neither a DSL nor a compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import first_missing

from msa_tiles import cli
from msa_tiles.pack import wheel
from msa_tiles.runtime import toolchain
from msa_tiles.runtime.toolchain import ToolchainError

pytestmark = pytest.mark.slow

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
KERNELS = [
    {"op": "combine", "variant": {"head_dim": 128}},
    {"op": "topk_select", "dsl": "cutedsl", "variant": {"topk": 16}},
]
NOT_THERE = ("tilelang", "tvm.", "z3", "nvidia", "cutlass", "msa_tiles", "__editable__", "_msa_tiles")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if needed := first_missing("pip", "hatchling"):
        pytest.skip(f"building a wheel here needs {needed}")
    try:
        for dsl in ("tilelang", "cutedsl"):
            toolchain.require_compiler(dsl)
    except ToolchainError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("release")
    (directory / "points.json").write_text(json.dumps(KERNELS))
    out = directory / "dist" / wheel.file_name()
    points = ["--points", str(directory / "points.json"), "--dsl", "both"]
    assert cli.main(["pack", "--target", "sm90", *points, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def python(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheel; of this environment's packages it has all but the DSLs."""
    home = tmp_path_factory.mktemp("server")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    found = home / "venv" / "bin" / "python"
    install = ["--python", str(found), "install", "--quiet", "--no-deps", "--no-index", str(release)]
    subprocess.run([*PIP, *install], check=True, capture_output=True)
    (home / "packages").mkdir()
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not package.name.startswith(NOT_THERE) and package.suffix != ".pth":
            (home / "packages" / package.name).symlink_to(package)
    [packages] = (home / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(str(home / "packages") + "\n")
    return found


def explain(python: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MSA_TILES"))}
    environment |= {"PATH": "", "MSA_TILES_CACHE_DIR": str(python.parent / "no_cache")}
    command = [str(python), "-m", "msa_tiles", "explain", *arguments, "--device", "sm90"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=python.parent, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_it_is_a_wheel_of_the_platform_and_lists_its_files(release: Path) -> None:
    with zipfile.ZipFile(release) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    [tags] = [content.decode() for name, content in files.items() if name.endswith(".dist-info/WHEEL")]
    assert "Tag: py3-none-manylinux_2_17_x86_64" in tags.splitlines()
    assert "Root-Is-Purelib: false" in tags.splitlines()
    [record] = [name for name in files if name.endswith(".dist-info/RECORD")]
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(files.pop(record).decode()))}
    assert rows.pop(record) == ("", "")
    assert rows.keys() == files.keys()
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert rows[name] == (f"sha256={digest}", str(len(content)))
    packed = {name.removeprefix("msa_tiles/_packs/sm90/") for name in files if name.startswith("msa_tiles/_packs/")}
    assert sorted(name.split("-")[0] for name in packed) == [
        "combine.cutedsl.sm90.bf16", "combine.tilelang.sm90.bf16", "manifest.json", "runtime.so",
        "topk_select.cutedsl.sm90.bf16",
    ]  # fmt: skip


@pytest.mark.parametrize("dsl", ["cutedsl", "tilelang"])
def test_its_kernels_reach_the_driver(
    release: Path, python: Path, launches: Callable, dsl: str, tmp_path: Path
) -> None:
    """With no compiler on PATH, no DSL to import, nothing compiled and nothing written."""
    cache = tmp_path / "no_cache"
    surroundings = {"PATH": "", "MSA_TILES_CACHE_DIR": str(cache), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    before = sorted(python.parents[1].rglob("*"))
    report, calls = launches("pack", dsl, "combine", python=python, **surroundings)
    assert report == {"libraries": [], "compiled": 0, "kernels": 1}
    assert sum(call.startswith("launch") for call in calls) == 2
    assert sorted(python.parents[1].rglob("*")) == before
    assert not cache.exists()


def test_explain_tells_what_is_packed(python: Path) -> None:
    text = explain(python, "combine")
    for dsl in ("tilelang", "cutedsl"):
        assert f"combine.{dsl}.sm90.bf16: serves it as head_dim=128, from the pack {python.parents[1]}" in text
    text = explain(python, "combine", "--variant", "head_dim=64")
    assert "No kernel serves this call" in text
    assert "combine.cutedsl.sm90.bf16: refuses: a CuTe DSL kernel needs nvidia-cutlass-dsl" in text
    assert not (python.parent / "no_cache").exists()
