"""Cells of CuTe DSL: compiled without a GPU and without nvcc, audited, cached, and loaded without the DSL."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from msa_tiles import cli
from msa_tiles.runtime import audit, compile_count, evidence, launch, toolchain
from msa_tiles.runtime import registry as registry_module
from msa_tiles.runtime.build import build, ci_jobs
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import CompileError, cache_key, compile_variant, find_compiled
from msa_tiles.runtime.dispatch import decide
from msa_tiles.runtime.facts import CallFacts, target_facts
from msa_tiles.runtime.launch import load_function
from msa_tiles.runtime.registry import Cell, Registry, Target
from msa_tiles.runtime.toolchain import ToolchainError


@pytest.fixture(scope="module")
def dsl() -> None:
    try:
        toolchain.require_compiler("cutedsl")
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def compiled(cute: Cell, target: Target, dsl: None, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A cache with both variants, which were compiled without nvcc."""
    cache = Cache(tmp_path_factory.mktemp("cutedsl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "find_nvcc", lambda: None)
        for variant in cute.ci:
            compile_variant(cute, variant, target.arch, cache)
    return cache


@pytest.fixture
def entry(cute: Cell, target: Target, compiled: Cache) -> Entry:
    found = find_compiled(cute, cute.ci[0], target.arch, compiled)
    assert found is not None
    return found


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the extra were not installed."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "nvidia-cutlass-dsl":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    caches = (toolchain.cutedsl_runtime, toolchain.generator_versions, launch._load_runtime)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_an_entry_has_a_library_a_cubin_and_what_a_launch_takes(entry: Entry, target: Target) -> None:
    assert entry.library.read_bytes()[:4] == entry.cubin.read_bytes()[:4] == b"\x7fELF"
    assert f".target {target.arch}" in (entry.directory / "kernel.ptx").read_text()
    assert list(entry.meta["kernels"].values()) == [{"threads": 64, "dynamic_shared_memory": 1024}]
    assert set(entry.meta["versions"]) == {"nvidia-cutlass-dsl", "apache-tvm-ffi", "compiler"}


def test_a_second_request_compiles_nothing(cute: Cell, target: Target, compiled: Cache) -> None:
    before = compile_count()
    for variant in cute.ci:
        compile_variant(cute, variant, target.arch, compiled)
    assert compile_count() == before


def test_the_key_follows_the_dsls_own_toolchain(
    cute: Cell, target: Target, compiled: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = cache_key(cute, cute.ci[0], target.arch)
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "12.9.1")
    assert find_compiled(cute, cute.ci[0], target.arch, compiled) is not None
    monkeypatch.setattr(toolchain, "compiler_version", lambda _dsl: "4.8.1.cu13")
    assert cache_key(cute, cute.ci[0], target.arch) == usual
    assert find_compiled(cute, cute.ci[0], target.arch, compiled) is None
    versions = (("nvidia-cutlass-dsl", "9"), ("apache-tvm-ffi", "0.1.12"))
    monkeypatch.setattr(toolchain, "generator_versions", lambda dsl: versions if dsl == "cutedsl" else ())
    assert cache_key(cute, cute.ci[0], target.arch) != usual


def test_the_audit_holds_and_notices_broken_promises(cute: Cell, target: Target, entry: Entry) -> None:
    try:
        audit.measured(entry)
    except ToolchainError as error:
        pytest.skip(str(error))
    assert audit.complaints(cute, cute.ci[0], target, entry) == []
    for changes, complaint in (
        ({"expect": ["HGMMA"]}, "the plan promised HGMMA, the code has none"),
        ({"forbid": ["FMUL"]}, "the code has FMUL, which the plan forbids"),
        ({"threads": 128}, "runs 64 threads, the plan says 128"),
        ({"shared_memory": "capacity * width"}, "uses 1024 bytes of shared memory, the plan says 256"),
    ):
        promised = dataclasses.replace(cute, entry={**cute.entry, **changes})
        [found] = audit.complaints(promised, cute.ci[0], target, entry)
        assert found.endswith(complaint)
    spilled = {**entry.read_audit(), "opcodes": {"FMUL": 1, "STL": 2}}  # type: ignore[dict-item]
    kept = entry.read_audit()
    try:
        entry.write_audit(spilled)
        assert audit.complaints(cute, cute.ci[0], target, entry) == ["the code has STL, which the plan forbids"]
    finally:
        entry.write_audit(kept or {})


def test_variants_stand_side_by_side(cute: Cell, target: Target, compiled: Cache) -> None:
    """Both libraries are loaded before either is called: neither takes the other's code for its own."""
    functions = []
    for variant in cute.ci:
        found = find_compiled(cute, variant, target.arch, compiled)
        assert found is not None
        functions.append((variant["width"], load_function(found)))
    for width, function in functions:
        rows = torch.zeros(3, width)
        with pytest.raises(ValueError, match=rf"x: Tensor\(\[n0, {width}\], float32\).*expected device_type=cuda"):
            function(rows, rows, 2.0)


def test_a_call_takes_the_arguments_of_the_tilelang_kernel(entry: Entry) -> None:
    """Three of them: the stream comes from torch."""
    function, rows = load_function(entry), torch.zeros(3, 64)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        function(rows, rows, 2.0, 0)
    with pytest.raises(TypeError, match="Mismatched type on argument #0"):
        function(2.0, rows, rows)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(rows, rows, 2.0)


# TVM-FFI imports ml_dtypes where it is installed, which alone takes 0.9 s since 0.7.0.
LOAD = """
import json, sys, time
from pathlib import Path
import tvm_ffi
from msa_tiles.runtime.cache import Entry
from msa_tiles.runtime.launch import load_function
directory = Path(sys.argv[1])
start = time.process_time()
load_function(Entry(directory, json.loads((directory / 'meta.json').read_text())))
print({"cutlass", "tilelang"} & set(sys.modules), time.process_time() - start)
"""


def test_loading_takes_milliseconds_and_neither_the_dsl_nor_a_linker(entry: Entry) -> None:
    command = [sys.executable, "-c", LOAD, str(entry.directory)]
    times: list[float] = []
    while len(times) < 3 and not any(seconds < 0.1 for seconds in times):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": ""}, check=True)
        modules, seconds = done.stdout.rsplit(maxsplit=1)
        assert modules == "set()"
        times.append(float(seconds))
    assert min(times) < 0.1


@pytest.mark.parametrize("arch", ["", "sm_100a"])
@pytest.mark.slow
def test_the_environments_architecture_does_not_matter(
    arch: str, cute: Cell, entry: Entry, target: Target, tmp_path: Path
) -> None:
    code = (
        "import os, sys; from pathlib import Path; from msa_tiles.runtime import compiler, registry;"
        "from msa_tiles.runtime.cache import Cache; import dataclasses; generated, file, cache, arch = sys.argv[1:];"
        "cell = registry.Registry.read(Path(generated)).cells[0];"
        "cell = dataclasses.replace(cell, id='scale_rows.cutedsl.sm90.bf16', dsl='cutedsl', file=Path(file));"
        "compiler.compile_variant(cell, cell.ci[0], arch, Cache(Path(cache)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH"}
    if arch:
        environment["CUTE_DSL_ARCH"] = arch
    places = [str(cute.file.parents[2]), str(cute.file), str(tmp_path), target.arch]
    subprocess.run([sys.executable, "-c", code, *places], check=True, env=environment)
    again = find_compiled(cute, cute.ci[0], target.arch, Cache(tmp_path))
    assert again is not None
    assert again.cubin.read_bytes() == entry.cubin.read_bytes()


def test_compiling_leaves_the_settings_of_the_dsl_alone(cute: Cell, target: Target, dsl: None, tmp_path: Path) -> None:
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    before = settings._arch
    compile_variant(cute, {"width": 64, "capacity": 8}, target.arch, Cache(tmp_path))
    assert settings._arch == before


def test_a_kernel_that_does_not_compile_is_named(cute: Cell, target: Target, dsl: None, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def scale_rows(width, capacity):\n    raise IndexError('no such row')\n")
    bad = dataclasses.replace(cute, file=broken)
    with pytest.raises(CompileError) as caught:
        compile_variant(bad, cute.ci[0], target.arch, Cache(tmp_path / "cache"))
    where = "scale_rows.cutedsl.sm90.bf16 width=64 capacity=4"
    assert str(caught.value) == f"{where}: IndexError: no such row ({broken}:2)"
    assert not list((tmp_path / "cache" / cute.id).glob("[!.]*"))


TWICE = """stream=stream
        )
        self.kernel(y, y, factor).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
"""


def test_a_launch_that_cannot_be_audited_is_refused(cute: Cell, target: Target, dsl: None, tmp_path: Path) -> None:
    text = cute.file.read_text()
    twice = tmp_path / "twice.py"
    twice.write_text(text.replace("stream=stream\n        )\n", TWICE))
    open_ended = tmp_path / "open_ended.py"
    open_ended.write_text(text.replace("block=(THREADS, 1, 1)", "block=(x.shape[0], 1, 1)"))
    for file in (twice, open_ended):
        assert file.read_text() != text
        bad = dataclasses.replace(cute, file=file)
        with pytest.raises(CompileError, match="0 launches of constant size came out, wanted one"):
            compile_variant(bad, cute.ci[0], target.arch, Cache(tmp_path / "cache"))


@pytest.mark.slow
def test_workers_compile_side_by_side(cute: Cell, registry: Registry, dsl: None, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    outcomes = list(build(ci_jobs([cute]), registry.targets, workers=2, cache=cache))
    assert [outcome.complaints for outcome in outcomes] == [(), ()]
    assert evidence.is_compiled(cute, registry.targets["sm90"], cache)


def test_it_is_never_simulated(cute: Cell, tmp_path: Path) -> None:
    evidence.mark_simulated(cute, tmp_path)
    assert not evidence.is_simulated(cute, tmp_path)


class TestWithoutTheExtra:
    """The library works without nvidia-cutlass-dsl; only its cells refuse."""

    SENTENCE = r"needs nvidia-cutlass-dsl, which is not installed: `pip install 'msa-tiles\[cutedsl\]'`"

    def test_a_call_is_refused(self, missing: None, cute: Cell, cell: Cell, registry: Registry, target: Target) -> None:
        call = CallFacts("scale_rows", torch.device("cuda", 0), "bf16", cell.ci[0])
        both = dataclasses.replace(registry, cells=(cute, cell))
        decision = decide(call, target_facts(target), both, "cutedsl")
        assert decision.chosen is None
        with pytest.raises(ValueError, match=self.SENTENCE):
            raise ValueError(decision.complaint())
        assert decide(call, target_facts(target), both).chosen.cell is cell  # type: ignore[union-attr]

    def test_nothing_compiles_or_loads(self, missing: None, cute: Cell, target: Target, tmp_path: Path) -> None:
        with pytest.raises(ToolchainError, match=self.SENTENCE):
            compile_variant(cute, cute.ci[0], target.arch, Cache(tmp_path))
        entry = Entry(tmp_path, {"cell": cute.id, "function": "scale_rows"})
        with pytest.raises(ToolchainError, match=self.SENTENCE):
            load_function(entry)

    def test_commands_leave_its_cells_out(
        self,
        missing: None,
        cute: Cell,
        registry: Registry,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        alone = dataclasses.replace(registry, cells=(cute,))
        monkeypatch.setattr(registry_module, "default_registry", lambda: alone)
        assert cli.main(["build"]) == 2
        sentence = "a CuTe DSL kernel needs nvidia-cutlass-dsl"
        assert f"the cells of cutedsl are left out: {sentence}" in capsys.readouterr().err
        assert cli.main(["support"]) == 0
        assert cli.main(["explain", "scale_rows", "--device", "sm90"]) == 1
        assert f"refuses: {sentence}" in capsys.readouterr().out
