"""Compiling in processes of their own: for `build`, and for calls whose kernels are not there yet."""

from __future__ import annotations

import ast
import dataclasses
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fake_worker
import pytest
import torch
from fakes import VERSION

from msa_tiles import cli
from msa_tiles.runtime import compile_count, compiler, launch, parts, pending, toolchain, workers
from msa_tiles.runtime.build import Job, build
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import CompileError
from msa_tiles.runtime.launch import Kernel
from msa_tiles.runtime.pending import Pending, obtain
from msa_tiles.runtime.registry import Cell, Registry, Target, default_registry
from msa_tiles.runtime.workers import Task, Workers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Workers compile oddly, and leave a line here for each kernel."""
    other = f"sys.path.insert(0, {str(HERE)!r}); from fake_worker import"
    monkeypatch.setattr(workers, "_BOOT", workers._BOOT.replace("from msa_tiles.runtime.workers import", other))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("MSA_TILES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "compiler_version", lambda _dsl: VERSION)
    monkeypatch.setattr(toolchain, "require_compiler", lambda _dsl: None)
    monkeypatch.setattr(pending, "_workers", None)
    yield tmp_path / "log"
    if pending._workers is not None:
        pending._workers.close()


def jobs_of(cell: Cell, *capacities: int) -> list[Job]:
    return [Job(cell, {"width": 64, "capacity": capacity}) for capacity in capacities]


def test_one_bad_kernel_is_one_bad_outcome(
    cell: Cell, registry: Registry, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that dies takes its job with it and no other; what runs side by side has processes of its own."""
    monkeypatch.setenv("FAKE_TOGETHER", "2")
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    before = compile_count()
    jobs = jobs_of(cell, 4, fake_worker.DIES, 8, fake_worker.FAILS, 16)
    outcomes = {
        outcome.job.variant["capacity"]: outcome
        for outcome in build(jobs, registry.targets, workers=2, audited=False, cache=Cache(tmp_path / "cache"))
    }
    assert [outcomes[capacity].complaints for capacity in (4, 8, 16)] == [()] * 3
    assert outcomes[fake_worker.FAILS].complaints == (f"not compiled: {cell.id}: no such thing",)
    [words] = outcomes[fake_worker.DIES].complaints
    assert "not compiled: its compiler process ended by -9: " in words and words.endswith("out of luck")
    assert compile_count() == before + 3
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 5 and len({pid for pid, _ in lines}) >= 2
    assert {optimize for _, optimize in lines} == {"0"}, "compilers read docstrings"


def test_the_kernels_of_a_call_compile_side_by_side(
    cell: Cell, target: Target, log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("FAKE_TOGETHER", "2")
    monkeypatch.setenv("MSA_TILES_JOBS", "2")
    monkeypatch.setattr(launch, "load_function", lambda entry: lambda *args: launched.append((entry, args)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launched: list[tuple[Entry, tuple]] = []
    variants = [job.variant for job in jobs_of(cell, 4, 8)]
    kernels = [
        Kernel(cell, variant, obtain(cell, variant, target.arch), torch.device("cuda", 0)) for variant in variants
    ]
    again = obtain(cell, variants[0], target.arch)
    assert again is kernels[0].entry, "whoever looks for it meanwhile waits for the same"
    assert not caplog.records
    for kernel in kernels:
        kernel("x")
        kernel("y")
    assert [args for _, args in launched] == [("x",), ("y",)] * 2
    assert [entry.meta["variant"] for entry, _ in launched] == [variants[0]] * 2 + [variants[1]] * 2
    assert len({line.split()[0] for line in log.read_text().splitlines()}) == 2
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = record.getMessage()
    assert text.startswith(
        "compiling 2 kernels in up to 2 processes, usually 10 to 40 s of a core for a tilelang kernel"
    )
    assert "`msa-tiles build --for CALL`" in text and "pack" in text
    assert all(f"{cell.id} width=64 capacity={capacity}" in text for capacity in (4, 8))
    assert isinstance(obtain(cell, variants[0], target.arch), Entry)


def test_a_kernel_that_does_not_compile_is_tried_again(cell: Cell, target: Target, log: Path) -> None:
    [job] = jobs_of(cell, fake_worker.FAILS)
    found = obtain(cell, job.variant, target.arch)
    assert isinstance(found, Pending)
    for _ in range(2):
        with pytest.raises(CompileError, match="no such thing"):
            found.wait()
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_program_without_a_guarded_main_module_runs_once(
    cell: Cell, target: Target, log: Path, tmp_path: Path
) -> None:
    """As any script is that calls an operator."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path[:0] = [{str(HERE)!r}, {str(ROOT)!r}]
from pathlib import Path
from fakes import VERSION
from msa_tiles.runtime import pending, registry, toolchain, workers
print("once")
workers._BOOT = {workers._BOOT!r}
toolchain.compiler_version = lambda _dsl: VERSION
toolchain.require_compiler = lambda _dsl: None
cell = registry.Registry.read(Path({str(cell.file.parents[2])!r})).cells[0]
found = pending.obtain(cell, cell.ci[0], {target.arch!r})
print(found.wait().meta["function"])
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", "scale_rows_kernel"]


def test_a_child_of_a_fork_compiles_for_itself(cell: Cell, target: Target, log: Path) -> None:
    [job] = jobs_of(cell, 4)
    inherited = obtain(cell, job.variant, target.arch)
    assert isinstance(inherited, Pending)
    child = os.fork()
    if child == 0:
        os._exit(0 if inherited.wait().meta["variant"] == job.variant else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert inherited.wait().meta["variant"] == job.variant
    assert len(log.read_text().splitlines()) == 1, "the lock of the cache holds for both"


@pytest.mark.slow
def test_whoever_is_interrupted_leaves_no_compiler_behind(cell: Cell, log: Path, tmp_path: Path) -> None:
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
sys.path[:0] = [{str(HERE)!r}, {str(ROOT)!r}]
from pathlib import Path
import fake_worker
from msa_tiles.runtime import registry, workers
from msa_tiles.runtime.build import Job, build
from msa_tiles.runtime.cache import Cache
workers._BOOT = {workers._BOOT!r}
found = registry.Registry.read(Path({str(cell.file.parents[2])!r}))
job = Job(found.cells[0], {{"width": 64, "capacity": fake_worker.HANGS}})
list(build([job], found.targets, workers=2, cache=Cache(Path({str(tmp_path / "cache")!r}))))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    worker = int(log.read_text().split()[0])
    start = time.monotonic()
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors and time.monotonic() - start < 10
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(worker, 0)
            time.sleep(0.1)


def test_threads_share_workers(cell: Cell, target: Target, log: Path, tmp_path: Path) -> None:
    pool = Workers(1, linger=5)
    futures = []
    tasks = [Task(cell, job.variant, target.arch, tmp_path / "cache") for job in jobs_of(cell, 4, 8, 16)]
    threads = [threading.Thread(target=lambda task=task: futures.append(pool.submit(task))) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {future.result(60).entry.meta["variant"]["capacity"] for future in futures} == {4, 8, 16}
    pool.close()
    assert len({line.split()[0] for line in log.read_text().splitlines()}) == 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_the_number_of_processes_is_a_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSA_TILES_JOBS", "3")
    assert workers.most_workers() == 3
    monkeypatch.setenv("MSA_TILES_JOBS", " ")
    assert 1 <= workers.most_workers() <= workers.MOST
    monkeypatch.setenv("MSA_TILES_JOBS", value)
    with pytest.raises(ValueError, match=f"MSA_TILES_JOBS is '{value}', wanted a number of processes"):
        workers.most_workers()


@pytest.mark.slow
def test_processes_and_threads_compile_a_kernel_once(
    cute: Cell, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked workers of a server that begin together on an empty cache; with the real compiler."""
    try:
        toolchain.require_compiler("cutedsl")
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("MSA_TILES_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MSA_TILES_JOBS", "1")
    context = multiprocessing.get_context("fork")
    barrier, counts = context.Barrier(4), context.Queue()

    def serve() -> None:
        before = compile_count()
        barrier.wait(60)
        found: list[Entry] = []
        errors: list[str] = []

        def begin() -> None:
            try:
                found.append(ready(cute, target))
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=begin) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts.put((compile_count() - before, len({entry.directory for entry in found}), len(found), errors))

    processes = [context.Process(target=serve) for _ in range(4)]
    for process in processes:
        process.start()
    results = [counts.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(30)
    assert not [error for *_, errors in results for error in errors]
    assert sum(compiled for compiled, *_ in results) == 1
    assert {(directories, found) for _, directories, found, _ in results} == {(1, 2)}


def ready(cell: Cell, target: Target) -> Entry:
    found = obtain(cell, cell.ci[0], target.arch)
    return found.wait() if isinstance(found, Pending) else found


# The operator whose calls a module of launches serves.
LAUNCHES = {
    "attention": "sparse_attention",
    "dequantize": "sparse_attention",
    "schedules": "sparse_attention",
    "backward": "sparse_attention_backward",
    "kl": "index_kl",
    "decode": "msa_decode",
}


@pytest.mark.parametrize("module", LAUNCHES)
def test_parts_are_what_launches_look_for(module: str) -> None:
    """Every operator that a module of launches names is a part of the call."""
    tree = ast.parse((ROOT / f"msa_tiles/launch/{module}.py").read_text())
    named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    operators = {cell.op for cell in default_registry().cells}
    assert named & operators and named & operators <= set(parts.parts_of(LAUNCHES[module]))


class TestWhatACallNeeds:
    def test_the_m3_shape(self) -> None:
        jobs = parts.jobs_for("msa_decode", default_registry(), "sm90")
        assert {job.cell.op for job in jobs} == {"decode_score", "decode_topk", "sparse_decode", "combine"}
        assert {job.cell.target for job in jobs} == {"sm90"}
        assert {job.variant["head_dim"] for job in jobs if "head_dim" in job.variant} == {128}
        assert len({job.variant["max_blocks"] for job in jobs if job.cell.op == "decode_topk"}) > 1

    def test_dims_and_precisions(self) -> None:
        call = "sparse_attention, precision=fp8, group=8, pages_per_block=1, head_dim=64"
        jobs = parts.jobs_for(call, default_registry(), "sm90")
        own = [job for job in jobs if job.cell.op == "sparse_attention"]
        assert {(job.cell.precision, job.variant["group"], job.variant["pages_per_block"]) for job in own} == {
            ("q16kv8", 8, 1),
            # A copy of keys and values is flat.
            ("bf16", 8, 0),
        }
        assert {"combine", "dequantize_kv"} <= {job.cell.op for job in jobs}
        assert {job.variant["head_dim"] for job in jobs if job.cell.op == "dequantize_kv"} == {64}
        wide = parts.jobs_for("sparse_attention", default_registry(), "sm90")
        assert "dequantize_kv" not in {job.cell.op for job in wide}

    def test_a_capacity_is_rounded_up(self) -> None:
        [job] = parts.jobs_for("topk_select,topk=9", default_registry(), "sm90")
        assert job.variant == {"topk": 16}

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            ("attend", "--for attend: operator attend is unknown; known: "),
            ("sparse_atention", "operator sparse_atention is unknown; did you mean sparse_attention"),
            ("sparse_attention,precision=q16kv9", "precision q16kv9 is unknown; did you mean q16kv8"),
            ("combine,width=3", "--for combine,width=3: the compile-time dim width is unknown; known: head_dim"),
            ("combine,head_dim", "'head_dim' is not NAME=NUMBER or precision=NAME"),
            ("combine,head_dim=96", "no kernel serves it on sm90"),
            ("msa_decode,group=7", "no kernel of sparse_decode, which it launches, serves it on sm90"),
            ("msa_attention,group=7", "no kernel of sparse_attention and index_kl, which it launches, serves it"),
            ("", "--for '': operator  is unknown"),
            ("sparse_attention,precision=nvfp4,head_dim=96", "no kernel serves it on sm90"),
            ("sparse_attention,head_dim=96", r"cutedsl\.sm90\.bf16.*: head_dim is 96, wanted one of 64, 128"),
            ("msa_decode,group=7", r"sparse_decode\.tilelang\.sm90\.bf16.*: group is 7, wanted one of 1, 2, 4, 8, 16"),
            ("sparse_attention,precision=q8k8", "\n  sparse_attention has kernels of bf16, "),
        ],
    )
    def test_calls_that_are_none(self, call: str, sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            parts.jobs_for(call, default_registry(), "sm90")
        with pytest.raises(ValueError, match=r"^call "):
            parts.warm(call, target="sm90")

    @pytest.mark.parametrize("call", ["combine", "sparse_attention,precision=fp8", "msa_decode", "msa_attention"])
    def test_a_backend_has_the_kernels_of_its_dsl(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        """Also where those of the other one would run."""
        monkeypatch.setattr(toolchain, "missing", lambda _dsl: None)
        registry = default_registry()
        for dsl in ("cutedsl", "tilelang"):
            jobs = parts.jobs_for(call, registry, "sm90", backend=dsl)
            assert jobs and {job.cell.dsl for job in jobs} == {dsl}

    def test_a_backend_has_helpers_of_the_other_dsl_where_it_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "missing", lambda _dsl: None)
        registry = default_registry()
        cells = tuple(cell for cell in registry.cells if (cell.op, cell.dsl) != ("combine", "cutedsl"))
        registry = dataclasses.replace(registry, cells=cells)
        jobs = parts.jobs_for("sparse_decode", registry, "sm90", backend="cutedsl")
        assert {(job.cell.op, job.cell.dsl) for job in jobs} == {("sparse_decode", "cutedsl"), ("combine", "tilelang")}
        with pytest.raises(ValueError, match="it is a tilelang kernel, backend='cutedsl' was asked for"):
            parts.jobs_for("combine", registry, "sm90", backend="cutedsl")

    def test_a_target_is_named_where_no_gpu_has_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ValueError, match=r"target is None.* no CUDA device; name one of sm100, sm103, sm90"):
            parts.warm("msa_decode")

    def test_why_no_kernel_serves_a_call_without_a_dsl(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(toolchain, "missing", lambda dsl: f"needs what compiles {dsl}")
        with pytest.raises(ValueError) as raised:
            parts.warm("msa_decode", target="sm90")
        for part in ("decode_score", "sparse_decode"):
            for dsl in ("cutedsl", "tilelang"):
                assert f"\n  {part}.{dsl}.sm90.bf16: needs what compiles {dsl}" in str(raised.value)
        assert cli.main(["build", "--for", "msa_decode", "--target", "sm90"]) == 2
        assert str(raised.value).removeprefix("call") in capsys.readouterr().err

    def test_build_for_a_call(
        self, log: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from msa_tiles.runtime import registry as registry_module

        monkeypatch.setattr(registry_module, "default_registry", lambda: registry)
        monkeypatch.setattr(toolchain, "missing", lambda _dsl: None)
        call = ["build", "--for", "scale_rows,width=64,capacity=3", "--target", "sm90", "--jobs", "2"]
        assert cli.main(call) == 0
        printed = capsys.readouterr()
        assert "1 of 1 kernels are compiled for sm90: scale_rows,width=64,capacity=3" in printed.out
        usual = "1 kernel, 0 in the cache: compiling 1 usually takes 10 to 40 seconds in 1 process\n"
        assert printed.err.startswith(usual)
        assert cli.main(call) == 0 and capsys.readouterr().err.startswith("1 kernel, 1 in the cache\n")
        assert len(log.read_text().splitlines()) == 1
        assert cli.main(["build", "--for", "scale_rows,width=65", "--target", "sm90"]) == 2
        assert cli.main(["build", "--for", "scale_rows", "--target", "sm80"]) == 2
        assert "--target sm80 is unknown" in capsys.readouterr().err
        assert cli.main(["build", "--for", "scale_rows"]) == 2
        assert "--for needs --target, one of sm90" in capsys.readouterr().err


def test_verify_compiles_what_its_cases_launch() -> None:
    from msa_tiles import paths
    from msa_tiles.spec import load
    from msa_tiles.verify.cases import cases, smallest
    from msa_tiles.verify.launched import launched

    registry, specs = default_registry(), load(paths.specs_dir())
    [combine] = registry.select("combine", "cutedsl", "sm90")
    jobs = launched([(combine, cases(combine, specs))], registry)
    assert {str(job) for job in jobs} == {str(Job(combine, point)) for point in combine.ci}
    [attention] = registry.select("sparse_attention", "cutedsl", "sm90", "bf16")
    jobs = launched([(attention, smallest(cases(attention, specs)))], registry)
    assert {job.cell.op for job in jobs} == {*parts.parts_of("sparse_attention")} - {parts.COPIER}
    assert {job.cell.dsl for job in jobs} == {"cutedsl"} and len(jobs) < 30
    [quantised] = registry.select("sparse_attention", "cutedsl", "sm90", "q16kv8")
    jobs = launched([(quantised, smallest(cases(quantised, specs)))], registry)
    assert parts.COPIER not in {job.cell.op for job in jobs}
    [helper] = registry.select("build_schedule", "cutedsl", "sm90")
    only_tilelang = dataclasses.replace(registry, cells=tuple(c for c in registry.cells if c.id != helper.id))
    jobs = launched([(attention, smallest(cases(attention, specs)))], only_tilelang)
    assert {job.cell.dsl for job in jobs if job.cell.op == "build_schedule"} == {"tilelang"}


def test_an_interpreter_without_a_program_compiles_by_itself(
    cell: Cell, target: Target, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setitem(compiler._COMPILERS, "tilelang", fake_worker.compile_oddly)
    assert isinstance(obtain(cell, {"width": 64, "capacity": 4}, target.arch), Entry)
