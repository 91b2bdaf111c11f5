"""Kernels of a pack on a GPU: the same bits as from the cache, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_calls import Calls, Named

import msa_tiles
from msa_tiles.library import remember
from msa_tiles.pack.make import make
from msa_tiles.runtime import compile_count, default_registry, device_facts, dispatch, packed, packs
from msa_tiles.runtime.build import Job

pytestmark = pytest.mark.gpu


@pytest.fixture
def forgetful() -> Iterator[None]:
    """No pack afterwards, and no kernel that was found in one."""
    yield
    packs._named.clear()
    dispatch._kernels.clear()
    remember.forget_all()


@pytest.mark.parametrize("named", [Named("tilelang"), Named("cutedsl")], ids=lambda named: named.backend)
def test_packed_kernels_answer_bit_for_bit(named: Named, tmp_path: Path, forgetful: None) -> None:
    calls = Calls()
    every = {**calls.all(named), **calls.training(named)}
    served = {name: call for name, call in every.items() if named.has(name)}
    assert served
    dispatch._kernels.clear()
    remember.forget_all()
    answers = {name: call() for name, call in served.items()}
    torch.cuda.synchronize()
    registry = default_registry()
    target = device_facts(torch.device("cuda"), registry.targets.values()).target
    assert target is not None
    jobs = {str(job): job for job in (Job(kernel.cell, kernel.variant) for kernel in dispatch._kernels.values())}
    assert len(list(make(jobs.values(), registry.targets[target], tmp_path / "pack"))) == len(jobs)
    msa_tiles.use_pack(tmp_path / "pack")
    compiled, loaded = compile_count(), packed.load_count()
    for name, call in served.items():
        assert torch.equal(call(), answers[name]), name
    assert compile_count() == compiled
    assert packed.load_count() >= loaded + len(served)
