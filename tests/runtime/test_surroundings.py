"""What surrounds a process: its interpreter, its terminal, its pipes, its environment, and the processes it forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from few_specs import copy_specs

from msa_tiles.runtime import toolchain
from msa_tiles.runtime.toolchain import ToolchainError

PYTHON = [sys.executable, "-m", "msa_tiles"]


def test_a_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PYTHON, "support", "--json", "--op", "combine"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_that_knows_ascii_only(tmp_path: Path) -> None:
    """Paths and specs hold what they like."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    folder, specs = tmp_path / "größe", copy_specs(tmp_path / "maße", ["combine"])
    done = subprocess.run(
        [*PYTHON, "generate", "--specs", str(specs), "--out", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert r"gr\xf6\xdfe/index.json" in done.stdout
    assert (folder / "index.json").is_file()


def test_without_docstrings_and_asserts() -> None:
    command = [sys.executable, "-OO", "-m", "msa_tiles", "support", "--op", "combine"]
    subprocess.run(command, capture_output=True, check=True)


# Notes what is asked of CUDA while everything is imported, and a registry is asked which kernel serves a call.
ASK = """
import ctypes, sys
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, lambda *_, _name=name, **__: asked.append(_name))
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    if hasattr(torch._C, name):
        setattr(torch._C, name, lambda *_, _name=name: asked.append(_name))
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name.startswith("cu") and name != "cuDriverGetVersion":  # which needs no context and makes none
            asked.append(name)
        return super().__getattr__(name)
ctypes.CDLL = Library
from msa_tiles import nn, ops, quant, runtime
from msa_tiles.runtime import CallFacts, default_registry
from msa_tiles.runtime.dispatch import decide
from msa_tiles.runtime.facts import target_facts
registry = default_registry()
for op in sorted({cell.op for cell in registry.cells}):
    cell = registry.of(op)[0]
    facts = CallFacts(op, torch.device("cuda"), cell.precision, dict(cell.ci[0]))
    assert decide(facts, target_facts(registry.targets["sm90"]), registry).candidates
print(*asked, *({"tvm_ffi", "tilelang", "cutlass"} & set(sys.modules)))
"""


def test_importing_and_asking_leave_the_driver_alone() -> None:
    """Whoever forks afterwards can use CUDA in the child."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


class TestCompilerCommands:
    @pytest.fixture(autouse=True)
    def programs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ccache", "g++", "gcc", "my g++"):
            (tmp_path / name).write_text('#!/bin/sh\necho "$0" "$@"\n')
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
        for name in ("CC", "CXX"):
            monkeypatch.delenv(name, raising=False)
        toolchain.one_word.cache_clear()
        self.bin = tmp_path

    def test_a_command_of_several_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "ccache g++ '-I a b'")
        monkeypatch.setenv("CC", "ccache gcc")
        assert toolchain.find_host_compiler() == (f"{self.bin}/ccache", "g++", "-I a b")
        assert toolchain.find_linker() == (f"{self.bin}/ccache", "gcc")
        with toolchain.tilelang_environment():
            one = os.environ["CXX"]
            done = subprocess.run([one, "-x", "y z"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{self.bin}/ccache g++ -I a b -x y z\n"
        assert os.environ["CXX"] == "ccache g++ '-I a b'"

    def test_a_path_with_a_space(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", f"{self.bin}/my g++")
        assert toolchain.find_host_compiler() == (f"{self.bin}/my g++",)
        one = toolchain.one_word(toolchain.find_host_compiler())
        assert " " not in one
        assert (
            subprocess.run([one, "-x"], capture_output=True, text=True, check=True).stdout == f"{self.bin}/my g++ -x\n"
        )

    def test_a_plain_one_is_taken_as_it_is(self) -> None:
        with toolchain.tilelang_environment():
            assert os.environ["CXX"] == f"{self.bin}/g++"
        assert "CXX" not in os.environ

    def test_a_program_that_is_not_there_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "nowhere/g++ -O2")
        with pytest.raises(ToolchainError, match=r"CXX is 'nowhere/g\+\+ -O2', and there is no program"):
            toolchain.find_host_compiler()

    def test_no_compiler_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ToolchainError, match="needs a C compiler to link it: install gcc or set CC"):
            toolchain.find_linker()
        with pytest.raises(ToolchainError, match=r"needs a C\+\+ compiler: install g\+\+ or set CXX"):
            toolchain.find_host_compiler()

    def test_tilelang_keeps_its_cache_elsewhere_without_a_home(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("HOME", "/dev/null/home")
        monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
        with toolchain.tilelang_environment():
            place = Path(os.environ["TILELANG_CACHE_DIR"])
            assert place.parent.is_dir() and place.is_absolute()
        assert "TILELANG_CACHE_DIR" not in os.environ
        monkeypatch.setenv("HOME", str(tmp_path))
        with toolchain.tilelang_environment():
            assert "TILELANG_CACHE_DIR" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("dsl", ["tilelang", "cutedsl"])
def test_kernels_compile_between_odd_names(dsl: str, cell, cute, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Spaces in TMPDIR, in the cache's path and in compilers, no home directory, docstrings stripped."""
    try:
        toolchain.require_compiler(dsl)
    except ToolchainError as error:
        pytest.skip(str(error))
    chosen = cute if dsl == "cutedsl" else cell
    (tmp_path / "wrapped").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "wrapped").chmod(0o755)
    (tmp_path / "t m p").mkdir()
    code = (
        "import dataclasses, sys; from pathlib import Path; from msa_tiles.runtime import launch, registry;"
        "from msa_tiles.runtime.cache import Cache; from msa_tiles.runtime.compiler import compile_variant;"
        "generated, name, dsl, file, cache = sys.argv[1:];"
        "cell = registry.Registry.read(Path(generated)).cells[0];"
        "cell = dataclasses.replace(cell, id=name, dsl=dsl, file=Path(file));"
        "launch.load_function(compile_variant(cell, cell.ci[0], cell.arch, Cache(Path(cache))))"
    )
    places = [str(cell.file.parents[2]), chosen.id, dsl, str(chosen.file), str(tmp_path / "ca che")]
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "t m p"),
        "CXX": f"{tmp_path}/wrapped g++",
        "CC": f"{tmp_path}/wrapped gcc",
        "HOME": "/dev/null/home",
    }
    subprocess.run([sys.executable, "-c", code, *places], env=environment, check=True)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.drawn(1)
def test_first_calls_import_nothing_slow(order: int, tmp_path: Path) -> None:
    """No DSL, though it is there, and no torch._dynamo, which is a second or two: a training step neither."""
    program = Path(__file__).parents[1] / "gpu" / "serving.py"
    steps = ["select", "attention", "decode", "training"][::order]
    environment = {**os.environ, "MSA_TILES_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(program), "cpu", *steps], capture_output=True, text=True, env=environment, check=True
    )
    report = json.loads(done.stdout)
    assert list(report["seconds"]) == steps
    assert report["compiled"] == 0 and report["slow"] == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.gpu
def test_a_child_that_was_forked_after_importing_runs_on_the_gpu() -> None:
    code = (
        "import os, torch; from msa_tiles import nn, ops, quant, runtime; runtime.default_registry();"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    x = torch.ones(4, device='cuda'); os._exit(0 if x.sum().item() == 4 else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
