"""A wheel installed outside the checkout carries specs and generated kernels, and everything works from it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pages
import pytest
import torch
from installed import first_missing

from msa_tiles.runtime import toolchain

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout, without reaching for an index."""
    if needed := first_missing("pip", "hatchling"):
        pytest.skip(f"building a wheel here needs {needed}")
    directory = tmp_path_factory.mktemp("dist")
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [built] = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh virtual environment with the wheel in it; the dependencies are this environment's."""
    home = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*PIP, *install], check=True, capture_output=True)
    [packages] = (home / "venv" / "lib").glob("python*/site-packages")
    # A line of a .pth file appends one directory; the .pth files in it, and so an editable install, stay out.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def run(installed: Path, *command: str, expect: int = 0) -> str:
    """Run a program of the environment from a directory outside the checkout."""
    away = installed.parent.parent / "away"
    away.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=away,
        env={**kept, "MSA_TILES_CACHE_DIR": str(away / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_adds_one_package_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"msa_tiles", wheel.name.split("-py3")[0] + ".dist-info"}
    in_checkout = {
        f"msa_tiles/_{part}/{path.relative_to(ROOT / part)}"
        for part in ("specs", "generated")
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith(("msa_tiles/_specs/", "msa_tiles/_generated/"))} == in_checkout
    skeletons = {str(path.relative_to(ROOT)) for path in (ROOT / "msa_tiles/codegen/skeletons").rglob("*.py")}
    assert skeletons <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_the_installed_package_is_the_wheels(installed: Path) -> None:
    code = "from msa_tiles import paths; print(paths.__file__, paths.specs_dir(), paths.generated_dir())"
    places = run(installed, "python", "-c", code).split()
    assert len(places) == 3
    assert all(Path(place).is_relative_to(installed.parent) for place in places)


def test_operators_run_from_it(installed: Path) -> None:
    code = """
import torch
from msa_tiles import ops
idx_q, idx_k = torch.randn(300, 2, 64), torch.randn(300, 64)
q, k, v = torch.randn(300, 4, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
ids = ops.select_blocks(idx_q, idx_k, 2, block_size=64)
out = ops.sparse_attention(q, k, v, ids, block_size=64)
print(tuple(ids.shape), tuple(out.shape), bool(out.isfinite().all()))
"""
    assert run(installed, "python", "-c", code).strip() == "(2, 300, 2) (300, 4, 64) True"


def test_support_lists_every_cell_as_generated(installed: Path) -> None:
    rows = json.loads(run(installed, "msa-tiles", "support", "--json"))
    index = json.loads((ROOT / "generated" / "index.json").read_text())
    assert [row["digest"] for row in rows] == [cell["digest"] for cell in index["cells"]]
    assert rows
    assert all("generated" in row["flags"] for row in rows)


def test_generate_writes_the_same_kernels_elsewhere(installed: Path, tmp_path: Path) -> None:
    run(installed, "msa-tiles", "generate", "--check")
    run(installed, "msa-tiles", "generate", "--out", str(tmp_path / "out"))
    written = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert Path("index.json") in written
    for name in written:
        assert (tmp_path / "out" / name).read_bytes() == (ROOT / "generated" / name).read_bytes(), name
    kernels = {path.relative_to(ROOT / "generated") for path in (ROOT / "generated").glob("*/*/*.py")}
    assert kernels <= written


def test_explain_needs_no_gpu(installed: Path) -> None:
    text = run(installed, "msa-tiles", "explain", "sparse_attention", "--device", "sm90")
    assert re.search(r"Measured on NVIDIA \w+", text)
    assert re.search(r"Runs sparse_attention\.(tilelang|cutedsl)\.sm90\.bf16, from .*/site-packages/msa_tiles/", text)


def test_bench_shows_recorded_rows(installed: Path) -> None:
    text = run(installed, "msa-tiles", "bench", "--from", str(ROOT / "perf/results/nvidia-h100-80gb-hbm3.jsonl"))
    assert text.startswith("NVIDIA H100 80GB HBM3") and re.search(
        r"^sparse_attention +prefill_32k_u ", text, re.MULTILINE
    )


def test_the_demo_does_the_main_job(installed: Path, tmp_path: Path) -> None:
    run(installed, "msa-tiles", "demo", "--tokens", "2048", "--out", str(tmp_path / "demo"))
    assert list((tmp_path / "demo").iterdir())


def test_the_page_your_gpu_holds_word_for_word(installed: Path, tmp_path: Path) -> None:
    """From the installed wheel, in a directory outside any checkout; the installation stays as it is."""
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    home = tmp_path.resolve()
    [package] = (installed.parent / "lib").glob("python*/site-packages/msa_tiles")
    before = {path: path.read_bytes() for path in package.rglob("*") if path.suffix in (".py", ".yaml", ".json")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MSA_TILES"))}
    environment = {**kept, "MSA_TILES_CACHE_DIR": str(home / "cache"), "PATH": f"{installed}:{kept['PATH']}"}
    # CuTe DSL is found through a .pth file of its own.
    environment["PYTHONPATH"] = str(Path(str(importlib.util.find_spec("cutlass").origin)).parents[1])
    for step in pages.steps(ROOT / "docs/your-gpu.md"):
        if step.file:
            (home / step.file).parent.mkdir(parents=True, exist_ok=True)
            (home / step.file).write_text(step.text)
        elif not (torch.cuda.is_available() and "verify" in step.command):  # the page is of a machine without a GPU
            done = subprocess.run(
                step.command, shell=True, cwd=home, env=environment, capture_output=True, text=True, check=False
            )
            complaints = (line for line in done.stderr.splitlines(keepends=True) if line.startswith("msa-tiles "))
            printed = (done.stdout + "".join(complaints)).replace(str(home), pages.HOME)
            assert pages.same(step.text, printed), f"{step.command}\n{printed}{done.stderr}"
    assert {path: path.read_bytes() for path in before} == before
    assert set(before) >= {path for path in package.rglob("*") if path.suffix in (".py", ".yaml", ".json")}


def test_an_installation_is_not_written_to(installed: Path) -> None:
    run(installed, "msa-tiles", "generate", expect=2)
    run(installed, "msa-tiles", "generate", "--target", "sm103", expect=2)


def test_servers_find_the_plugins(installed: Path) -> None:
    """By the entry points of the installed wheel. Without these servers they do nothing, and raise nothing."""
    code = """
import sys
from importlib.metadata import entry_points

sys.modules["vllm"] = sys.modules["sglang"] = None
for group in ("vllm.general_plugins", "sglang.srt.plugins"):
    [plugin] = [entry for entry in entry_points(group=group) if entry.name == "msa_tiles"]
    print(plugin.load()())
"""
    assert run(installed, "python", "-c", code).split() == ["None", "None"]
