"""Compiling without a GPU, and the cache around it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from msa_tiles.runtime import compile_count, compiler, toolchain
from msa_tiles.runtime.cache import Cache, Entry, default_root
from msa_tiles.runtime.compiler import CompileError, cache_key, compile_variant, find_compiled
from msa_tiles.runtime.launch import load_function
from msa_tiles.runtime.registry import Cell, Registry, Target, default_registry
from msa_tiles.runtime.toolchain import ToolchainError


@pytest.fixture
def filled(entry: Entry, cache: Cache, tmp_path: Path) -> Cache:
    """A cache of the test's own that holds the compiled entry."""
    shutil.copytree(cache.root, tmp_path / "copy")
    return Cache(tmp_path / "copy")


def test_an_entry_has_a_library_a_cubin_and_what_a_launch_takes(entry: Entry) -> None:
    assert entry.library.read_bytes()[:4] == entry.cubin.read_bytes()[:4] == b"\x7fELF"
    assert entry.meta["kernels"] == {"scale_rows_kernel_kernel": {"threads": 64, "dynamic_shared_memory": 1024}}
    assert entry.meta["variant"] == {"width": 64, "capacity": 4}
    assert set(entry.meta["versions"]) == {"tilelang", "apache-tvm-ffi", "nvcc"}


def test_a_second_request_compiles_nothing(cell: Cell, target: Target, filled: Cache) -> None:
    before = compile_count()
    again = compile_variant(cell, cell.ci[0], target.arch, filled)
    assert again.directory.is_relative_to(filled.root)
    assert compile_count() == before


@pytest.mark.slow
def test_compiling_is_counted(cell: Cell, target: Target, tmp_path: Path, nvcc: Path) -> None:
    before = compile_count()
    compile_variant(cell, {"width": 64, "capacity": 8}, target.arch, Cache(tmp_path))
    assert compile_count() == before + 1
    assert [path.name for path in (tmp_path / cell.id).glob(".stage-*")] == []


def test_the_loaded_library_is_called_with_torch_tensors(entry: Entry) -> None:
    function = load_function(entry)
    rows = torch.zeros(3, 64)
    with pytest.raises(RuntimeError, match="expected cuda"):
        function(rows, rows, 2.0)


def test_loading_needs_neither_tilelang_nor_a_compiler(entry: Entry) -> None:
    code = (
        "import json, sys; from pathlib import Path; from msa_tiles.runtime.cache import Entry;"
        "from msa_tiles.runtime.launch import load_function; directory = Path(sys.argv[1]);"
        "load_function(Entry(directory, json.loads((directory / 'meta.json').read_text())));"
        "print('tilelang' in sys.modules)"
    )
    environment = {**os.environ, "PATH": ""}
    command = [sys.executable, "-c", code, str(entry.directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_process_that_only_loaded_can_compile_later(entry: Entry, cell: Cell, target: Target, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from msa_tiles.runtime import compiler, launch, registry;"
        "from msa_tiles.runtime.cache import Cache; generated, full, empty, arch = sys.argv[1:];"
        "cell = registry.Registry.read(Path(generated)).cells[0];"
        "launch.load_function(compiler.find_compiled(cell, cell.ci[0], arch, Cache(Path(full))));"
        "launch.load_function(compiler.compile_variant(cell, cell.ci[1], arch, Cache(Path(empty))))"
    )
    places = [str(cell.file.parents[2]), str(entry.directory.parents[1]), str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *places, target.arch], check=True)


@pytest.mark.parametrize("name", ["kernel.so", "kernel.cubin", "meta.json"])
def test_a_corrupt_entry_is_a_miss_and_is_replaced(
    cell: Cell, target: Target, filled: Cache, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_compiled(cell, cell.ci[0], target.arch, filled)
    assert found is not None
    copy = {path.name: path.read_bytes() for path in found.directory.iterdir()}
    (found.directory / name).write_bytes(copy[name][: len(copy[name]) // 2])
    assert find_compiled(cell, cell.ci[0], target.arch, filled) is None

    def recompile(_cell: Cell, _variant: object, _arch: str, staged: Path) -> dict[str, object]:
        for file in ("kernel.so", "kernel.cubin", "kernel.cu"):
            (staged / file).write_bytes(copy[file])
        return {"function": "scale_rows_kernel", "kernels": {}}

    monkeypatch.setitem(compiler._COMPILERS, "tilelang", recompile)
    compile_variant(cell, cell.ci[0], target.arch, filled)
    mended = find_compiled(cell, cell.ci[0], target.arch, filled)
    assert mended is not None
    assert mended.library.read_bytes() == copy["kernel.so"]
    assert len(list(found.directory.parent.glob("[!.]*"))) == 1
    assert not list(found.directory.parent.glob(".stage-*"))


def test_the_key_follows_what_changes_code_generation(cell: Cell, target: Target, tmp_path: Path) -> None:
    usual = cache_key(cell, cell.ci[0], target.arch)
    edited = tmp_path / "scale_rows_bf16.py"
    edited.write_text(cell.file.read_text().replace("* factor", "+ factor"))
    moved = tmp_path / "moved.py"
    shutil.copy(cell.file, moved)
    different = [
        cache_key(cell, cell.ci[1], target.arch),
        cache_key(cell, cell.ci[0], "sm_100a"),
        cache_key(dataclasses.replace(cell, digest="f" * 16), cell.ci[0], target.arch),
        cache_key(dataclasses.replace(cell, file=edited), cell.ci[0], target.arch),
    ]
    assert len({usual, *different}) == 5
    reordered = dict(reversed(cell.ci[0].items()))
    assert cache_key(cell, reordered, target.arch) == usual
    assert cache_key(dataclasses.replace(cell, file=moved), cell.ci[0], target.arch) == usual


def test_comments_in_the_header_do_not_recompile(cell: Cell, target: Target, tmp_path: Path) -> None:
    commented = tmp_path / "scale_rows_bf16.py"
    commented.write_text("# Generated from another spec.\n\n" + cell.file.read_text())
    again = dataclasses.replace(cell, file=commented)
    assert cache_key(again, cell.ci[0], target.arch) == cache_key(cell, cell.ci[0], target.arch)


def test_without_nvcc_any_version_loads_and_none_compiles(
    cell: Cell, target: Target, filled: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert compile_variant(cell, cell.ci[0], target.arch, filled).directory.parent.parent == filled.root
    with pytest.raises(ToolchainError, match=r"needs nvcc.*msa-tiles\[cuda\]"):
        compile_variant(cell, cell.ci[1], target.arch, Cache(tmp_path / "empty"))


def test_another_nvcc_is_another_entry(
    cell: Cell, target: Target, filled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "12.9.1")
    assert find_compiled(cell, cell.ci[0], target.arch, filled) is None


def test_nvcc_is_found_in_cuda_home_then_path_then_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("home/bin", "path", "wheels"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "nvcc").write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
        (tmp_path / place / "nvcc").chmod(0o755)
    monkeypatch.setattr(toolchain, "_wheel_directories", lambda: iter([tmp_path / "wheels"]))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert toolchain.find_nvcc() == tmp_path / "home/bin/nvcc"
    assert toolchain.nvcc_version() == "13.0.88"
    monkeypatch.delenv("CUDA_HOME")
    assert toolchain.find_nvcc() == tmp_path / "path/nvcc"
    monkeypatch.setenv("PATH", "")
    assert toolchain.find_nvcc() == tmp_path / "wheels/nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=r"CUDA_HOME is '.*nowhere', which has no bin/nvcc"):
        toolchain.require_nvcc()


def test_a_kernel_that_does_not_compile_is_named(cell: Cell, target: Target, tmp_path: Path, nvcc: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def scale_rows(width, capacity):\n    raise IndexError('no such row')\n")
    bad = dataclasses.replace(cell, file=broken)
    with pytest.raises(CompileError) as caught:
        compile_variant(bad, cell.ci[0], target.arch, Cache(tmp_path / "cache"))
    where = "scale_rows.tilelang.sm90.bf16 width=64 capacity=4"
    assert str(caught.value) == f"{where}: IndexError: no such row ({broken}:2)"
    assert not list((tmp_path / "cache" / cell.id).glob("[!.]*"))


def test_of_a_long_error_the_end_is_told(cell: Cell, target: Target, tmp_path: Path, nvcc: Path) -> None:
    """TileLang puts the whole source in front of what nvcc says."""
    broken = tmp_path / "broken.py"
    broken.write_text("def scale_rows(width, capacity):\n    raise IndexError('source ' * 5000 + 'no such row')\n")
    with pytest.raises(CompileError, match=r"width=64 capacity=4: IndexError: … .*no such row \(\S+py:2\)$") as caught:
        compile_variant(dataclasses.replace(cell, file=broken), cell.ci[0], target.arch, Cache(tmp_path / "cache"))
    assert len(str(caught.value)) < 4000


def test_of_what_nvcc_says_its_errors_are_told() -> None:
    warning = (
        "/tmp/a/tvm_kernels.cu(55): warning #1046-D: value cannot be represented exactly\n  x = 0.1f;\n      ^\n\n"
    )
    told = (
        '/tmp/a/tvm_kernels.cu(95): error: no conversion from "uint3" to "uint4" exists\n      store(y);\n      ^\n\n'
    )
    said = compiler._end_of(RuntimeError(f"Compilation error:\nsource\n{warning * 40}{told}{warning}1 error detected."))
    assert said == 'nvcc: error: no conversion from "uint3" to "uint4" exists\n    store(y);'


def test_an_error_that_is_a_key_alone_says_what_it_is() -> None:
    assert compiler._end_of(KeyError("sm_91a")) == "KeyError: 'sm_91a'"
    assert compiler._end_of(ValueError("a sentence")) == "a sentence"
    assert compiler._end_of(ValueError("\x1b[91m\x1b[1merror\x1b[0m: in colours")) == "error: in colours"


def test_machine_code_that_cute_dsl_does_not_make() -> None:
    """For an architecture that it knows and its CUDA libraries do not: it keeps a text then."""
    assert compiler._machine_code(b"\x7fELF", "combine", "sm_90a") == b"\x7fELF"
    for made in ("an error", b"", None):
        with pytest.raises(
            CompileError,
            match=r"combine: the CUDA libraries of CuTe DSL .* no machine code for sm_110a: install ",
        ):
            compiler._machine_code(made, "combine", "sm_110a")


@pytest.mark.parametrize(("dsl", "name"), [("tilelang", "nvcc"), ("cutedsl", "CuTe DSL")])
def test_an_architecture_that_the_compiler_does_not_know_is_named(
    dsl: str, name: str, tmp_path: Path, nvcc: Path
) -> None:
    if reason := toolchain.missing(dsl):
        pytest.skip(reason)
    [cell] = default_registry().select("combine", dsl, "sm90")
    version = re.escape(toolchain.compiler_version(dsl) or "")
    known = rf"{name} {version} does not know the architecture sm_95a of the target, and sm_1\w+ is the highest that "
    with pytest.raises(CompileError, match=rf"^{re.escape(cell.id)} head_dim=64: {known}") as caught:
        compile_variant(cell, {"head_dim": 64}, "sm_95a", Cache(tmp_path))
    assert "KeyError" not in str(caught.value)
    for arch in ("sm_90a", "sm_100a"):  # whatever is wrong then, it is not that
        assert compiler._refusal(ValueError("a sentence"), cell, arch) == "a sentence"
    assert len(str(caught.value)) < 250 and ": install a newer " in str(caught.value)


def test_an_architecture_that_the_cuda_libraries_do_not_know_is_told_with_what_to_install() -> None:
    """CuTe DSL calls it a bug of its own, over seven lines."""
    if reason := toolchain.missing("cutedsl"):
        pytest.skip(reason)
    [cell] = default_registry().select("combine", "cutedsl", "sm90")
    text = "error[INTERNAL]: The compiler hit a problem.\n  error: Unsupported GPU architecture 'sm_107a' with"
    said = compiler._refusal(RuntimeError(text), cell, "sm_107a")
    assert re.fullmatch(r"the CUDA libraries of CuTe DSL \S+ make no machine code for sm_107a: install [^.\n]+", said)


def test_the_cache_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MSA_TILES_CACHE_DIR", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("MSA_TILES_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_root() == Path("/home/somebody/.cache/msa_tiles")


def hold_lock(root: str, seconds: float, ready, released) -> None:  # type: ignore[no-untyped-def]
    """Hold a key's lock until told, then note the release. Runs in a process of its own."""
    with Cache(Path(root)).lock("cell", "key"):
        ready.set()
        released.wait(seconds)
        Path(root, "released").touch()


@pytest.mark.slow  # beside it, TestManyAtOnce of test_cache.py
def test_one_key_is_locked_across_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, released = context.Event(), context.Event()
    other = context.Process(target=hold_lock, args=(str(tmp_path), 30, ready, released))
    other.start()
    assert ready.wait(60)
    with Cache(tmp_path).lock("cell", "another key"):
        assert not (tmp_path / "released").exists()
    released.set()
    with Cache(tmp_path).lock("cell", "key"):
        assert (tmp_path / "released").exists()
    other.join()


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"index\.json cannot be read .*; run `msa-tiles generate`"):
        Registry.read(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": 99, "cells": []}))
    with pytest.raises(ValueError, match="has not format 2"):
        Registry.read(tmp_path)
    (tmp_path / "index.json").write_text(
        json.dumps({"format": 2, "cells": [{}], "targets": {}, "formats": {}, "precisions": {}})
    )
    with pytest.raises(ValueError, match="lacks or misstates 'target'"):
        Registry.read(tmp_path)
