"""The demo on a GPU whose kernels it finds by itself."""

from __future__ import annotations

import json

import pytest
import torch

from msa_tiles.cli import main


@pytest.mark.gpu
def test_demo_runs_on_the_gpu_and_agrees(tmp_path):
    assert main(["demo", "--tokens", "16384", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == torch.cuda.get_device_name() and report["dtype"] == "bfloat16"
    assert report["shape"]["num_q_heads"] == 64 and report["agrees"]
    assert sum(outcome["heads_with_answer"] > 0 for outcome in report["outcomes"]) == report["questions"] == 8
