"""GPU tests run without a GPU, and say which kernels they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from msa_tiles.pack.points import jobs_of
from msa_tiles.runtime import default_registry

ON_A_GPU = """
import pytest
import torch

from msa_tiles import ops
from msa_tiles.ops import combine
from msa_tiles.runtime import NoKernelError

pytestmark = pytest.mark.gpu
score = torch.randn(4, 20, 300, device="cuda", generator=torch.Generator("cuda").manual_seed(0))


def test_that_passes():
    out = torch.empty(4, 20, 8, dtype=torch.int32, device=torch.device("cuda"))
    ids = ops.topk_select(score.cuda(), 8, max_seqlen_k=300 * 128, num_valid_blocks=300, backend="cutedsl", out=out)
    torch.cuda.synchronize()
    assert ids is out and ids.is_cuda and ids.sort(-1).values.equal(ids)


def test_of_a_function_by_its_name():
    combine(torch.ones(3, 20, 8, 128, dtype=torch.bfloat16, device="cuda"), torch.ones(3, 20, 8, device="cuda"))


def test_of_a_workspace():
    q = torch.ones(2, 64, 128, dtype=torch.bfloat16, device="cuda")
    assert ops.decode_workspace_bytes(q, 16, 4) > 0


def test_that_fails():
    assert not len(ops.topk_select(score, 8, num_valid_blocks=300))


def test_that_no_kernel_serves():
    with pytest.raises(NoKernelError, match="topk"):
        ops.topk_select(score, 80, num_valid_blocks=300)


def test_with_a_graph():
    torch.cuda.CUDAGraph()
"""


@pytest.mark.slow
def test_gpu_tests_run_on_the_reference_and_note_their_kernels(tmp_path: Path) -> None:
    (tmp_path / "test_on_a_gpu.py").write_text(ON_A_GPU)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-n",
        "2",
        "--rehearse",
        "points",
    ]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120)
    assert "1 failed, 4 passed, 1 skipped" in done.stdout, done.stdout
    assert re.findall(r"^FAILED .*::(\w+)", done.stdout, re.MULTILINE) == ["test_that_fails"]
    points = json.loads((tmp_path / "points").read_text())
    found = {(point["op"], point["variant"].get("topk"), point["dsl"]) for point in points}
    assert ("topk_select", 8, "cutedsl") in found and "combine" in {op for op, *_ in found}
    jobs = jobs_of(str(tmp_path / "points"), default_registry(), "sm90", "both")
    assert len(jobs) == len(points) == 2
