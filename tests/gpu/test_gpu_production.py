"""First calls of a server: from packs, without a DSL, in seconds; and of many threads and processes at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import STEPS, steps

from msa_tiles import ops, reference
from msa_tiles.library import remember
from msa_tiles.pack.make import make
from msa_tiles.runtime import compile_count, default_registry, device_facts, dispatch, toolchain
from msa_tiles.runtime.build import Job

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("serving.py")
LIMIT = 2.0  # seconds from importing us to a result
WORKERS = 8


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the steps launch on this GPU, compiled here if it has to be."""
    for dsl in ("tilelang", "cutedsl"):
        if (reason := toolchain.missing(dsl)) is not None:
            pytest.skip(reason)
    dispatch._kernels.clear()
    remember.forget_all()
    for step in steps("cuda").values():
        step()
    torch.cuda.synchronize()
    registry = default_registry()
    target = device_facts(torch.device("cuda"), registry.targets.values()).target
    assert target is not None
    jobs = {str(job): job for job in (Job(kernel.cell, kernel.variant) for kernel in dispatch._kernels.values())}
    directory = tmp_path_factory.mktemp("packs") / "pack"
    assert len(list(make(jobs.values(), registry.targets[target], directory))) == len(jobs)
    yield directory
    dispatch._kernels.clear()
    remember.forget_all()


def serve(pack: Path, home: Path, names: tuple[str, ...], **environment: str) -> dict:
    """The report of a fresh process that has the pack and neither a compiler nor a cache."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CXX", "CC")}
    kept |= {"MSA_TILES_PACKS": str(pack), "MSA_TILES_CACHE_DIR": str(home / "cache"), "PATH": "", **environment}
    command = [sys.executable, str(PROGRAM), "cuda", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=kept, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("blocked", [True, False], ids=["no-dsl", "dsls-installed"])
@pytest.mark.parametrize("names", [*((name,) for name in STEPS), STEPS, STEPS[::-1]], ids=lambda names: "-".join(names))
def test_first_results_from_a_pack(pack: Path, tmp_path: Path, names: tuple[str, ...], blocked: bool) -> None:
    report = serve(pack, tmp_path, names, **({"BLOCK_DSLS": "1"} if blocked else {}))
    assert report["compiled"] == 0 and report["slow"] == []
    assert list(report["seconds"]) == list(names)
    assert max(report["seconds"].values()) < LIMIT, report
    assert not (tmp_path / "cache").exists()


def test_workers_that_begin_at_once_compile_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight forked processes of eight threads each, on an empty cache, with the real compilers."""
    dsls = [dsl for dsl in ("tilelang", "cutedsl") if toolchain.missing(dsl) is None]
    if not dsls:
        pytest.skip("no DSL is installed")
    program = f"import sys; sys.path[:0] = {sys.path!r}; import test_gpu_production as t; t.fork_and_serve({dsls!r})"
    environment = {name: value for name, value in os.environ.items() if name != "MSA_TILES_PACKS"}
    environment |= {"MSA_TILES_CACHE_DIR": str(tmp_path / "cache"), "MSA_TILES_JOBS": "2"}
    # Of its own: CUDA has begun in this process, so that its children could not use it.
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PROGRAM.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == 0 and report["answers"] == WORKERS * WORKERS * len(dsls), done.stderr[-4000:]
    assert report["compiled"] == len(dsls)


def fork_and_serve(dsls: list[str]) -> None:
    """In a process without CUDA: print what became of forked workers."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(WORKERS), context.Queue()

    def work() -> None:
        torch.zeros(1, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        out = torch.randn((3, 40, 8, 128), generator=generator, device="cuda").to(torch.bfloat16)
        lse = torch.randn((3, 40, 8), generator=generator, device="cuda")
        wanted, _ = reference.combine(out.float(), lse)
        answers: list[float] = []

        def call(dsl: str) -> None:
            found, _ = ops.combine(out, lse, backend=dsl)
            answers.append(float((found.float() - wanted).abs().max()))

        barrier.wait(120)
        threads = [threading.Thread(target=call, args=(dsl,)) for _ in range(WORKERS) for dsl in dsls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.put((compile_count(), len(answers), sum(not error < 0.02 for error in answers)))

    processes = [context.Process(target=work) for _ in range(WORKERS)]
    for process in processes:
        process.start()
    found = [results.get(timeout=480) for _ in processes]
    for process in processes:
        process.join(60)
    compiled, answers, wrong = (sum(each) for each in zip(*found, strict=True))
    sys.stdout.write(json.dumps({"compiled": compiled, "answers": answers, "wrong": wrong}) + "\n")
