"""What drop-ins have compiled ahead: calls that Hopper's kernels serve, once a process, and nothing that raises."""

from __future__ import annotations

import logging

import pytest
import torch

from msa_tiles import runtime
from msa_tiles.compat import notes, warm
from msa_tiles.quant import FP8
from msa_tiles.runtime import parts

LOG = logging.getLogger("vllm.msa_tiles")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(warm, "_ASKED", set())
    monkeypatch.setattr(notes, "_SAID", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("gone", [None, "it is for another version"], ids=["both DSLs", "CuTe DSL alone"])
def test_hopper_has_kernels_for_what_is_asked(monkeypatch, gone, dtype, group):
    monkeypatch.setattr("msa_tiles.runtime.toolchain.missing", lambda dsl: gone if dsl == "tilelang" else None)
    registry = runtime.default_registry()
    for call in (*warm.indexer(dtype, 16), *warm.attention(dtype == FP8, group)):
        jobs = parts.jobs_for(call, registry, "sm90")
        # A copy in bfloat16 of quantised pages is flat.
        paged = [job for job in jobs if dtype != FP8 or job.cell.precision != "bf16"]
        assert jobs and all(job.variant.get("pages_per_block", 1) == 1 for job in paged)


def test_once_a_process(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(runtime, "warm", lambda *calls: asked.append(calls) or len(calls))
    with caplog.at_level(logging.INFO, logger=LOG.name):
        for calls in (("a", "b"), ("b", "c"), ("a",)):
            warm.ahead(LOG, calls)
    assert asked == [("a", "b"), ("c",)]
    said = [record.getMessage().split(": ") for record in caplog.records]
    assert [text[1] for text in said] == ["2 compiled kernels", "1 compiled kernels"]


def test_without_a_gpu_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "warm", lambda *calls: pytest.fail("asked"))
    warm.ahead(LOG, ("a",))


def test_it_never_raises(monkeypatch, caplog):
    def fail(*calls):
        raise RuntimeError("nvcc is missing")

    monkeypatch.setattr(runtime, "warm", fail)
    for _ in range(2):
        warm.ahead(LOG, ("a",))
    assert [record.getMessage() for record in caplog.records] == [
        "msa_tiles could not compile ahead what MiniMax M3 needs: nvcc is missing"
    ]
