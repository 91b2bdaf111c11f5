"""Launching: the device guard on any machine, streams and graphs on a GPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from msa_tiles.runtime import launch, toolchain
from msa_tiles.runtime.cache import Cache, Entry
from msa_tiles.runtime.compiler import compile_variant
from msa_tiles.runtime.launch import Kernel
from msa_tiles.runtime.registry import Cell, Target


class FakeDevices:
    """Stands in for torch.cuda: a current device and a guard that notes what it did."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.entered: list[int] = []

    def device(self, index: int) -> FakeDevices:
        self.entered.append(index)
        return self

    def __enter__(self) -> None:
        self.outside, self.current = self.current, self.entered[-1]

    def __exit__(self, *_exc: object) -> None:
        self.current = self.outside


@pytest.mark.parametrize(("current", "entered"), [(1, []), (0, [1])])
def test_a_kernel_runs_with_its_own_device_current(
    cell: Cell, entry: Entry, monkeypatch: pytest.MonkeyPatch, current: int, entered: list[int]
) -> None:
    devices = FakeDevices(current)
    calls = []
    monkeypatch.setattr(launch, "load_function", lambda _entry: lambda *args: calls.append((args, devices.current)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.current)
    monkeypatch.setattr(torch.cuda, "device", devices.device)
    kernel = Kernel(cell, cell.ci[0], entry, torch.device("cuda", 1))
    kernel("x", "y", 2.0)
    assert calls == [(("x", "y", 2.0), 1)]
    assert devices.entered == entered
    assert devices.current == current


def test_threads_load_a_library_once(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several kernels share one function, whoever comes first; a library that cannot be loaded is tried again."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    loaded: list[str] = []

    def load(path: str) -> dict[str, object]:
        loaded.append(path)
        time.sleep(0.01)
        if len(loaded) == 1:
            raise OSError("a first time")
        return {entry.meta["function"]: object()}

    monkeypatch.setattr(tvm_ffi, "load_module", load)
    monkeypatch.setattr(launch, "_load_runtime", lambda _dsl: None)
    monkeypatch.setattr(launch, "_functions", {})
    with pytest.raises(toolchain.ToolchainError, match="a first time"):
        launch.load_function(entry)
    together, found = threading.Barrier(8), []

    def call() -> None:
        together.wait(10)
        found.append(launch.load_function(entry))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(function) for function in found}) == 1
    assert loaded == [str(entry.library)] * 2


@pytest.fixture(scope="module", params=["tilelang", "cutedsl"])
def kernel(request: pytest.FixtureRequest, cell: Cell, cute: Cell, target: Target, cache: Cache) -> Kernel:
    try:
        toolchain.require_compiler(request.param)
    except toolchain.ToolchainError as error:
        pytest.skip(str(error))
    cell = cute if request.param == "cutedsl" else cell
    entry = compile_variant(cell, cell.ci[0], target.arch, cache)
    return Kernel(cell, cell.ci[0], entry, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 4, 1001])
def test_a_launch_computes(kernel: Kernel, rows: int) -> None:
    x = torch.randn(rows, 64, device="cuda")
    y = torch.full_like(x, torch.nan)
    kernel(x, y, 2.0)
    assert torch.equal(y, x * 2)


@pytest.mark.gpu
def test_a_launch_follows_the_current_stream(kernel: Kernel) -> None:
    x, y = torch.ones(4096, 64, device="cuda"), torch.zeros(4096, 64, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        kernel(x, y, 2.0)
        done = stream.record_event()
    assert not done.query(), "the launch did not wait behind the sleep on its stream"
    assert torch.cuda.default_stream().query(), "something was launched on the default stream"
    stream.synchronize()
    assert torch.equal(y, x * 2)


@pytest.mark.gpu
def test_a_launch_is_captured_in_a_graph(kernel: Kernel) -> None:
    x, y = torch.ones(100, 64, device="cuda"), torch.zeros(100, 64, device="cuda")
    kernel(x, y, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y, 3.0)
    x.fill_(5.0)
    graph.replay()
    assert bool((y == 15.0).all())
