"""How an argument travels from a public operator to the launch of its kernel: few frames, and never back."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from ops.calls import OPERATORS, call

import msa_tiles
from msa_tiles.call import backends
from msa_tiles.launch import lookup

PACKAGE = Path(msa_tiles.__file__).parent
MOST_FRAMES = 10
TENSOR = {"sparse_attention": "q", "sparse_decode": "q", "select_blocks": "idx_q", "index_score": "idx_q"}


def holds(value, wanted) -> bool:
    """Whether a frame has the tensor itself, or a call or a list that it stands in."""
    if isinstance(value, (tuple, list)):
        return any(holds(part, wanted) for part in value)
    return value is wanted


@pytest.mark.parametrize("buffers", [False, True], ids=["functional", "mutating"])
@pytest.mark.parametrize("op", TENSOR)
@pytest.mark.drawn(4)
def test_few_frames_lie_between_an_operator_and_its_kernel(op, buffers, monkeypatch):
    arguments = call(op, torch.bfloat16)
    tensor = arguments[TENSOR[op]]
    if buffers:
        arguments["out"] = OPERATORS[op](**arguments)
    active, journey = [], []

    def arrive(*given):
        if given[0] is tensor and not journey:
            journey.extend(active)

    def profile(frame, event, _argument):
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(PACKAGE):
            return
        if event == "call":
            if any(holds(value, tensor) for value in frame.f_locals.values()):
                active.append((frame, file.relative_to(PACKAGE).parts[0], frame.f_code.co_qualname))
        elif event == "return" and active and active[-1][0] is frame:
            active.pop()

    monkeypatch.setattr(backends, "runs_reference", lambda backend, device: backend == "reference")
    monkeypatch.setattr(lookup, "find_kernel", lambda facts, backend: arrive)
    monkeypatch.setattr(lookup, "part_kernel", lambda *part: arrive)
    monkeypatch.setattr(lookup, "part_serves", lambda *part: False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Chip", (), {"multi_processor_count": 1})
    )
    sys.setprofile(profile)
    try:
        OPERATORS[op](**arguments)
    finally:
        sys.setprofile(None)
    names = [f"{package}.{name}" for _, package, name in journey]
    assert journey and journey[0][2] == op
    assert len(set(names)) <= MOST_FRAMES, names
    # Every package is entered once.
    packages = [package for package, _ in itertools.groupby(package for _, package, _ in journey)]
    assert packages == ["ops", "library", "launch"], names
