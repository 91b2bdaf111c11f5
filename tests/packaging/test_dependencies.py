"""The project installs beside the servers that its operators go into, and needs no DSL until a kernel is compiled."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from installed import first_missing
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from msa_tiles.codegen.toolchain import PINS

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="reading pyproject.toml on Python 3.10 needs tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What the metadata of the wheels on PyPI require of packages that this project requires too, read on 2026-11-29.
SERVERS = {
    "vllm 0.33.0": ["torch==2.14.0", "apache-tvm-ffi==0.1.11", "tilelang==0.1.12", "nvidia-cutlass-dsl[cu13]==4.8.0"],
    "sglang 0.5.23": ["torch==2.14.1", "apache-tvm-ffi==0.1.11", "tilelang==0.1.12", "nvidia-cutlass-dsl[cu13]==4.8.0"],
    "flashinfer-python 0.7.4": ["apache-tvm-ffi>=0.1.11,<0.2"],
    # What the pinned DSLs require themselves.
    "tilelang 0.1.12": ["apache-tvm-ffi>=0.1.10,<=0.1.11", "numpy>=1.23.5"],
    "tilelang 0.1.15": ["apache-tvm-ffi>=0.1.11,<0.1.13", "numpy>=1.23.5"],
}
# Versions that exist, to try: where all specifiers of a package hold one of them there is a solution.
KNOWN = {
    "apache-tvm-ffi": ("0.1.10", "0.1.11", "0.1.12", "0.1.13", "0.1.15.post2"),
    "jinja2": ("3.1.6",),
    "numpy": ("1.26.4", "2.4.6"),
    "nvidia-cutlass-dsl": ("4.8.0", "4.8.1"),
    "pyyaml": ("6.0.1", "6.0.4"),
    "tilelang": ("0.1.12", "0.1.13", "0.1.15"),
    "torch": ("2.9.0", "2.13.0", "2.14.0", "2.14.1"),
}
DSLS = ("tilelang", "cutedsl")


def required(*extras: str) -> list[Requirement]:
    """The requirements of the project with these extras."""
    found = list(PROJECT["dependencies"])
    for extra in extras:
        found += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in found]


def solution(*lists: list[Requirement]) -> dict[str, str | None]:
    """The newest known version of each package that all requirements allow; None where there is none."""
    wanted: dict[str, SpecifierSet] = {}
    for requirement in (each for requirements in lists for each in requirements):
        name = canonicalize_name(requirement.name)
        wanted[name] = wanted.get(name, SpecifierSet()) & requirement.specifier
    return {name: max(specifiers.filter(KNOWN[name]), key=Version, default=None) for name, specifiers in wanted.items()}


@pytest.mark.parametrize("server", SERVERS)
def test_there_is_a_solution_beside(server: str) -> None:
    ours = required(*([server.split()[0]] if server.startswith("tilelang") else DSLS))
    found = solution(ours, [Requirement(text) for text in SERVERS[server]])
    assert None not in found.values(), found


def test_no_solution_is_noticed() -> None:
    """With the exact versions that evidence is of there is none."""
    pinned = [Requirement(f"{name}=={version}") for pins in PINS.values() for name, version in pins.items()]
    found = solution(required(), pinned, [Requirement(text) for text in SERVERS["vllm 0.33.0"]])
    assert {name for name, version in found.items() if version is None} == {"tilelang", "nvidia-cutlass-dsl"}


def test_only_development_pins_versions() -> None:
    optional = PROJECT["optional-dependencies"]
    for extra in (None, *DSLS):
        requirements = required(*([extra] if extra else []))
        assert not [str(each) for each in requirements if "==" in str(each.specifier)]
    pinned = {each.name: str(each.specifier) for each in map(Requirement, optional["dev"])}
    for pins in PINS.values():
        assert {name: pinned[name] for name in pins} == {name: f"=={version}" for name, version in pins.items()}
    # The ranges hold what development pins.
    for dsl in DSLS:
        [requirement] = map(Requirement, optional[dsl])
        assert requirement.specifier.contains(PINS[dsl][requirement.name])


def test_no_dsl_is_a_core_dependency() -> None:
    names = {canonicalize_name(each.name) for each in required()}
    assert names == {"apache-tvm-ffi", "jinja2", "numpy", "pyyaml", "torch"}


# Hides both DSLs, as if they were not installed, then does what needs none.
WITHOUT_DSLS = """
import importlib.metadata, json, sys
for name in ("tilelang", "tvm", "cutlass", "nvidia_cutlass_dsl"):
    sys.modules[name] = None
version = importlib.metadata.version
def hidden(name):
    if name in ("tilelang", "nvidia-cutlass-dsl"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
import torch
from msa_tiles import cli, nn, ops, quant, runtime
idx_q, idx_k = torch.randn(300, 2, 64), torch.randn(300, 64)
q, k, v = torch.randn(300, 4, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
ids = ops.select_blocks(idx_q, idx_k, 2, block_size=64)
out = ops.sparse_attention(q, k, v, ids, block_size=64)
assert out.shape == q.shape and out.isfinite().all()
for command in json.loads(sys.argv[1]):
    print("exit", cli.main(command))
"""


def without_dsls(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", WITHOUT_DSLS, json.dumps(commands)]
    return subprocess.run(code, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_what_needs_no_dsl_works_without_one(tmp_path: Path) -> None:
    done = without_dsls(["support", "--op", "combine"], ["generate", "--check"], ["generate", "--out", str(tmp_path)])
    assert done.stdout.count("exit 0") == 3
    assert (tmp_path / "index.json").read_bytes() == (ROOT / "generated" / "index.json").read_bytes()


def test_a_missing_dsl_is_a_sentence() -> None:
    done = without_dsls(["explain", "combine", "--device", "sm90"], ["build", "--op", "combine"])
    for dsl, package in (("TileLang", "tilelang"), ("CuTe DSL", "nvidia-cutlass-dsl")):
        extra = "tilelang" if dsl == "TileLang" else "cutedsl"
        sentence = f"a {dsl} kernel needs {package}, which is not installed: `pip install 'msa-tiles[{extra}]'`"
        assert f"combine.{extra}.sm90.bf16: refuses: {sentence}" in done.stdout
        assert f"the cells of {extra} are left out: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


# Compiles points of cells with the CuTe DSL of the environment, and prints what is wrong with each.
COMPILE = """
import json, sys
from pathlib import Path
from msa_tiles.runtime import default_registry, toolchain
from msa_tiles.runtime.build import Job, build
from msa_tiles.runtime.cache import Cache
registry = default_registry()
cells = {cell.id: cell for cell in registry.cells}
jobs = [Job(cells[name], point) for name, point in json.loads(sys.argv[1])]
outcomes = build(jobs, registry.targets, cache=Cache(Path(sys.argv[2])))
print(json.dumps([toolchain.compiler_version("cutedsl"), {str(o.job): o.complaints for o in outcomes}]))
"""
SERVER_CUTEDSL = "4.8.0"
DRAWN = 3


@pytest.fixture(scope="module")
def with_server_cutedsl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment with the CuTe DSL of the servers in front of this environment's packages."""
    if first_missing("pip"):
        pytest.skip("installing another CuTe DSL needs pip")
    home = tmp_path_factory.mktemp("server") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    parts = ("", "-libs-base", "-libs-core", "-libs-cu12")
    packages = [f"nvidia-cutlass-dsl{part}=={SERVER_CUTEDSL}" for part in parts]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = subprocess.run([*pip, "install", "--quiet", "--no-deps", *packages], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nvidia-cutlass-dsl {SERVER_CUTEDSL} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    [site] = (home / "lib").glob("python*/site-packages")
    (site / "zz_dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


@pytest.mark.slow
def test_cutedsl_kernels_compile_with_the_version_of_the_servers(with_server_cutedsl: Path, tmp_path: Path) -> None:
    """A drawn sample of cells, and a point of each; the machine code passes the audit there too."""
    from msa_tiles.runtime import default_registry

    draw = random.Random(int(os.environ["MSA_TILES_SEED"]))
    cells = default_registry().select(dsl="cutedsl")
    chosen = [[cell.id, dict(draw.choice(cell.ci))] for cell in draw.sample(cells, DRAWN)]
    command = [str(with_server_cutedsl), "-c", COMPILE, json.dumps(chosen), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    version, complaints = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith(f"{SERVER_CUTEDSL}.cu")
    assert importlib.metadata.version("nvidia-cutlass-dsl") == PINS["cutedsl"]["nvidia-cutlass-dsl"]
    assert len(complaints) == DRAWN
    assert set(map(tuple, complaints.values())) == {()}, complaints
